"""The requests of a run in memory: a record of each, the ready ones in their queues, and counters of their states."""

from __future__ import annotations

import logging
import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from struct import Struct as Layout
from typing import NamedTuple

import msgspec

from shoal.errors import FrontierError
from shoal.frontier import rules
from shoal.frontier.politeness import Host, Key, Lane, LaneTable
from shoal.frontier.rules import DEAD, DONE, LEASED, READY, STATE_NAMES, WAITING
from shoal.http import Request
from shoal.ports import Completion, Event, Failure, FrontierOptions, Pushed
from shoal.urls.normalize import host_of

# The ready requests of one host in memory, best first. If there are too many, the last ones are on disk.
#
# Requests of equal priority leave in the order of their numbers. New requests arrive in that order, so a queue
# holds them. The few that return (after a retry, a released lease) go into a small heap beside it, at their old
# place.


log = logging.getLogger("shoal.frontier")

SpilledRow = tuple[int, float, int, bytes]
"""(lane, rank, number, record)"""

ON_DISK = -1
"""In place of the number of a request."""

_CLEAN_AFTER = 512  # numbers that were taken


class Bucket:
    """The requests of one priority."""

    __slots__ = ("_fresh", "_returned", "_taken", "spilled")

    def __init__(self) -> None:
        self._fresh: array[int] = array("I")
        self._taken = 0
        """How many of the fresh ones were taken."""
        self._returned: list[int] = []
        self.spilled = 0

    def count(self) -> int:
        return len(self._fresh) - self._taken + len(self._returned) + self.spilled

    def push(self, number: int) -> None:
        """Add a request after all others."""
        self._fresh.append(number)

    def put_back(self, number: int) -> None:
        heappush(self._returned, number)

    def first(self) -> int | None:
        """The first request; `ON_DISK` if those after the ones that returned are on disk."""
        if self._taken < len(self._fresh):
            fresh = self._fresh[self._taken]
            return self._returned[0] if self._returned and self._returned[0] < fresh else fresh
        if self.spilled > 0:
            return ON_DISK
        return self._returned[0] if self._returned else None

    def remove_first(self, number: int) -> None:
        """Remove what `first` returned."""
        if self._returned and self._returned[0] == number:
            heappop(self._returned)
            return
        self._taken += 1
        if self._taken >= _CLEAN_AFTER and 2 * self._taken >= len(self._fresh):
            del self._fresh[: self._taken]
            self._taken = 0


class Backlog:
    """The queue of one lane. ``number`` identifies the lane in the spill file.

    Many hosts have one page only. So the first request of an empty queue needs no bucket.
    """

    __slots__ = ("_buckets", "_only", "_only_rank", "_order", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._only: int | None = None
        """The only request of the queue. Then there are no buckets."""
        self._only_rank = 0.0
        self._buckets: dict[float, Bucket] | None = None
        self._order: list[float] | None = None
        """The ranks of the buckets, as a heap."""

    def _bucket(self, rank: float) -> Bucket:
        """The bucket of a rank. It is added if there is none."""
        if self._buckets is None or self._order is None:
            self._buckets, self._order = {}, []
        if self._only is not None:
            only, self._only = self._only, None
            self._bucket(self._only_rank).push(only)
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = Bucket()
            heappush(self._order, rank)
        return bucket

    def push(self, rank: float, number: int) -> None:
        """Add a new request after all others of its rank (the negative of its priority)."""
        if self._buckets:
            (self._buckets.get(rank) or self._bucket(rank)).push(number)
        elif self._only is None:
            self._only, self._only_rank = number, rank
        else:
            self._bucket(rank).push(number)

    def put_back(self, rank: float, number: int) -> None:
        """Return a request to its old place."""
        if not self._buckets and self._only is None:
            self._only, self._only_rank = number, rank
        else:
            self._bucket(rank).put_back(number)

    def remove_best(self, rank: float, number: int) -> None:
        """Remove the best request, which is in memory."""
        if self._buckets:
            self._buckets[rank].remove_first(number)
        else:
            self._only = None

    def has_tail(self, rank: float) -> bool:
        """Whether later requests of this rank are on disk, so that new ones must go there too."""
        bucket = self._buckets.get(rank) if self._buckets else None
        return bucket is not None and bucket.spilled > 0

    def count_spilled(self, rank: float, count: int) -> None:
        self._bucket(rank).spilled += count

    def count(self) -> int:
        """How many requests it has. For an audit."""
        return (self._only is not None) + sum(bucket.count() for bucket in (self._buckets or {}).values())

    def best(self) -> tuple[float, int] | None:
        """Rank and number of the best request. The number is `ON_DISK` if requests of that rank must be read first."""
        if self._only is not None:
            return self._only_rank, self._only
        while self._order and self._buckets:
            rank = self._order[0]
            bucket = self._buckets[rank]
            number = bucket.first()
            if number is not None:
                return rank, number
            heappop(self._order)
            del self._buckets[rank]
        return None


class Spill:
    """Requests on disk, in a private temporary database that disappears with the process."""

    def __init__(self) -> None:
        # With an empty name SQLite makes a temporary file and unlinks it at once.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA cache_size = -4000")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(
            "CREATE TABLE spill (lane INTEGER, rank REAL, number INTEGER, record BLOB, "
            "PRIMARY KEY (lane, rank, number)) WITHOUT ROWID"
        )

    def add(self, rows: list[SpilledRow]) -> bool:
        """Add requests. False if the disk is full; then none was added."""
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO spill VALUES (?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            log.warning("cannot spill the queue to disk: %s. It stays in memory", exc)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def take(self, lane: int, rank: float, limit: int) -> list[tuple[int, bytes]]:
        """Remove and return the first requests of a lane and rank, in order, as (number, record)."""
        try:
            return self._take(lane, rank, limit)
        except sqlite3.Error as exc:
            raise FrontierError(f"cannot read requests that were spilled to disk: {exc}") from exc

    def _take(self, lane: int, rank: float, limit: int) -> list[tuple[int, bytes]]:
        rows = self._db.execute(
            "SELECT number, record FROM spill WHERE lane = ? AND rank = ? ORDER BY number LIMIT ?", (lane, rank, limit)
        ).fetchall()
        if rows:
            self._db.execute("DELETE FROM spill WHERE lane = ? AND rank = ? AND number <= ?", (lane, rank, rows[-1][0]))
        return rows

    def find(self, number: int) -> bytes | None:
        """The record of a request. It scans the whole table, so it is only for inspection."""
        row = self._db.execute("SELECT record FROM spill WHERE number = ?", (number,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._db.close()


# The fingerprints of the requests of a run in memory. Each has a number, in the order in which they were added.
#
# A dictionary takes about 90 bytes per URL, this takes less than 30. All fingerprints are in one piece of memory,
# by number. They are found through groups of a few: a ``bytes`` object with the first four bytes of each
# fingerprint and its number. There is always about one group for `_LOAD` fingerprints: when there are too few
# groups, the next one is split in two (linear hashing). So no call takes long.


_SIZE = 16
_PIECE = 4
_ENTRY = 8
"""A piece of a fingerprint, and its number."""
_LOAD = 16


class Fingerprints:
    """Numbers for fingerprints, and fingerprints for numbers."""

    def __init__(self) -> None:
        self._all = bytearray()
        self._groups = [b""]
        self._mask = 0
        """The bits of a piece that choose its group. The groups before `_next` are split already: one more bit."""
        self._next = 0

    def __getitem__(self, number: int) -> bytes:
        return bytes(self._all[_SIZE * number : _SIZE * (number + 1)])

    def find(self, fingerprint: bytes) -> int | None:
        """The number of a fingerprint. None if it was not added."""
        piece, mask = fingerprint[:_PIECE], self._mask
        bits = int.from_bytes(piece, "little")
        place = bits & mask
        group = self._groups[place if place >= self._next else bits & (2 * mask + 1)]
        at = group.find(piece)
        while at >= 0:
            if at % _ENTRY == 0:
                number = int.from_bytes(group[at + _PIECE : at + _ENTRY], "little")
                if self._all[_SIZE * number : _SIZE * (number + 1)] == fingerprint:
                    return number
            at = group.find(piece, at + 1)
        return None

    def add(self, fingerprint: bytes) -> int:
        """The number of a fingerprint that was not added yet."""
        number = len(self._all) // _SIZE
        self._all += fingerprint
        piece, mask = fingerprint[:_PIECE], self._mask
        bits = int.from_bytes(piece, "little")
        place = bits & mask
        entry = piece + number.to_bytes(_ENTRY - _PIECE, "little")
        self._groups[place if place >= self._next else bits & (2 * mask + 1)] += entry
        if number >= _LOAD * len(self._groups):
            self._split()
        return number

    def _split(self) -> None:
        """Move the entries of a group that have one more bit to a new group."""
        group, bit = self._groups[self._next], self._mask + 1
        stays, moves = list[bytes](), list[bytes]()
        for at in range(0, len(group), _ENTRY):
            entry = group[at : at + _ENTRY]
            (moves if int.from_bytes(entry[:_PIECE], "little") & bit else stays).append(entry)
        self._groups[self._next] = b"".join(stays)
        self._groups.append(b"".join(moves))
        self._next += 1
        if self._next > self._mask:
            self._mask, self._next = 2 * self._mask + 1, 0


# The records of the requests of a run in memory: a fixed header, then the request as msgpack.
#
# They are in one piece of memory, one after the other. So a record takes no more than its bytes, its header is
# changed in place, and the garbage collector never has to visit one.


_HEAD = Layout("<BHHIHdIQ")
_LENGTH = Layout("<I")
# Parts of the header, with their places: to change one takes a third of the time of a whole header.
_STATE_ATTEMPTS = Layout("<BH")
_STATUS_ITEMS, _STATUS_AT = Layout("<HI"), 3
_WORKER_TIME, _WORKER_AT = Layout("<Hd"), 9
_TOKEN, _TOKEN_AT = Layout("<Q"), 23
_PAYLOAD_AT = _HEAD.size + _LENGTH.size

NO_PARENT = 2**32 - 1
MAX_ATTEMPTS = 2**16 - 1
"""Attempts that a record can count."""

encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode


class Head(NamedTuple):
    """The header of a record."""

    state: int
    attempts: int
    status: int
    items: int
    worker: int
    """The number of the holder of its last lease; 0: none."""
    at: float
    parent: int
    """The number of the page that has the link to it, or `NO_PARENT`."""
    token: int = 0
    """Of the lease under which it became done; 0: it is not done."""


def pack_head(head: Head) -> bytes:
    return _HEAD.pack(*head)


def make_record(head: bytes, payload: bytes) -> bytes:
    """A record of what `pack_head` returned and the msgpack of a request."""
    return head + _LENGTH.pack(len(payload)) + payload


def read_record(record: bytes) -> tuple[Head, Request]:
    return Head._make(_HEAD.unpack_from(record)), decode_request(record[_PAYLOAD_AT:])


class Records:
    """The records of a run by the numbers of their requests: 0, 1, 2 ... Some may be on disk instead."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends: array[int] = array("Q")
        """Where the header of each record ends; 0: it is on disk."""

    def append(self, record: bytes | None) -> None:
        """Add the record of the next number. None: it is on disk."""
        self._ends.append(0 if record is None else len(self._data) + _HEAD.size)
        self._data += record or b""

    def put(self, number: int, record: bytes) -> None:
        """Add a record that was on disk."""
        self._ends[number] = len(self._data) + _HEAD.size
        self._data += record

    def is_on_disk(self, number: int) -> bool:
        return not self._ends[number]

    def head(self, number: int) -> Head:
        return Head._make(_HEAD.unpack_from(self._data, self._ends[number] - _HEAD.size))

    def set_head(self, number: int, head: Head) -> None:
        _HEAD.pack_into(self._data, self._ends[number] - _HEAD.size, *head)

    def set_leased(self, number: int, worker: int, at: float) -> int:
        """Make a ready request leased. Returns the number of its attempt."""
        data, start = self._data, self._ends[number] - _HEAD.size
        attempt: int = _STATE_ATTEMPTS.unpack_from(data, start)[1] + 1
        _STATE_ATTEMPTS.pack_into(data, start, LEASED, min(MAX_ATTEMPTS, attempt))
        _WORKER_TIME.pack_into(data, start + _WORKER_AT, worker, at)
        return attempt

    def set_done(self, number: int, status: int, new_items: int, at: float, token: int) -> int:
        """Make a leased request done. Returns how many items it had before."""
        data, start = self._data, self._ends[number] - _HEAD.size
        items: int = _STATUS_ITEMS.unpack_from(data, start + _STATUS_AT)[1]
        worker: int = _WORKER_TIME.unpack_from(data, start + _WORKER_AT)[0]
        data[start] = DONE
        _STATUS_ITEMS.pack_into(data, start + _STATUS_AT, status, items + new_items)
        _WORKER_TIME.pack_into(data, start + _WORKER_AT, worker, at)
        _TOKEN.pack_into(data, start + _TOKEN_AT, token)
        return items

    def payload(self, number: int) -> bytearray:
        """The msgpack of a request."""
        end = self._ends[number]
        start = end + _LENGTH.size
        return self._data[start : start + _LENGTH.unpack_from(self._data, end)[0]]

    def request(self, number: int) -> Request:
        return decode_request(self.payload(number))

    def states(self) -> Iterator[int]:
        """The state of each request. Those on disk are ready."""
        data = self._data
        return (data[end - _HEAD.size] if end else READY for end in self._ends)

    def search(self, text: bytes) -> Iterator[int]:
        """The numbers of the requests in memory whose msgpack contains a text."""
        if text in self._data:
            for number, end in enumerate(self._ends):
                if end and text in self.payload(number):
                    yield number


_LOAD_COUNT = 1000  # requests that are read from disk at once

NewRequests = dict[bytes, tuple[Request, bytes]]
"""Requests that the run does not have yet, by fingerprint, with their msgpack."""


class TakenRequest(NamedTuple):
    """A request that was taken from its queue."""

    number: int
    rank: float
    attempts: int
    request: Request


class Requests:
    """All requests of a run. Each has a number: 0, 1, 2 ... in the order in which they were added.

    Past ``in_memory`` ready requests, new ones go to disk. No method yields to another task.
    """

    def __init__(self, options: FrontierOptions, hosts: dict[str, Host], run_id: str = "") -> None:
        self.lanes: LaneTable[Backlog] = LaneTable(hosts, options, run_id)
        self.fingerprints = Fingerprints()
        self.records = Records()
        self.counts = [0] * len(STATE_NAMES)
        """How many requests are in each state."""
        self.pushed = self.duplicates = self.redirects = self.item_errors = 0
        self.deaths: dict[int, tuple[str, str]] = {}
        """Kind and reason of each dead request."""
        self.events: dict[int, list[Event]] = {}
        self._worker_numbers = {"": 0}
        """The numbers of workers and slots of clusters in records, by name."""
        self._worker_names = [""]
        self._spill: Spill | None = None
        self._spilled = 0
        self._room: int | None = None
        self.set_options(options, 0.0)

    def set_options(self, options: FrontierOptions, now: float) -> None:
        """Change the options of the run."""
        self.options = options
        self._spill_above = min(options.in_memory, options.max_queue_size or options.in_memory)
        self._link_limit = options.link_limit
        self.lanes.set_options(options, now)

    # -- adding

    def select_new(self, requests: Iterable[tuple[bytes, Request]]) -> NewRequests:
        """The requests that the run does not have yet, encoded. RequestError if one cannot be encoded."""
        new: NewRequests = {}
        for fingerprint, request in requests:
            if fingerprint not in new and self.fingerprints.find(fingerprint) is None:
                new[fingerprint] = request, rules.encode_request(request, encode_request)
        return new

    def select_children(self, ended: Completion | Failure) -> NewRequests:
        """The children of a page that the run does not have yet."""
        if not ended.children:
            return {}
        parent = ended.lease.fingerprint
        return self.select_new(
            (rules.child_fingerprint(child, parent, i), child) for i, child in enumerate(ended.children)
        )

    def measure_room(self) -> int | None:
        """Begin a step that adds links: it may add as many as fit now. Returns how many; None: all."""
        self._room = rules.room_for_links(self._link_limit, self.counts[READY] + self.counts[WAITING])
        return self._room

    def add_children(
        self, ended: Completion | Failure, parent: int, new: NewRequests, duplicates: int, now: float
    ) -> Pushed:
        """Add the selected children of a page. ``duplicates``: links that the worker left out already."""
        refused = 0
        if ended.children:
            # An earlier page of the same batch may have added the same link.
            new = {name: request for name, request in new.items() if self.fingerprints.find(name) is None}
            is_limited = not rules.is_redirect(ended)
            refused = self.add_links(new, parent, len(ended.children), now, is_limited=is_limited)
        self.duplicates += duplicates
        if ended.item_errors:
            self.item_errors += ended.item_errors
        return Pushed(len(new) - refused, len(ended.children) - len(new) + duplicates, refused)

    def add_links(self, new: NewRequests, parent: int, offered: int, now: float, *, is_limited: bool = True) -> int:
        """Add selected links in a step that `measure_room` began. Returns how many were refused."""
        room = self._room
        if room is None:
            self.add(new, parent, offered, now)
            return 0
        entering = dict(islice(new.items(), room)) if is_limited else new
        self.add(entering, parent, offered - len(new) + len(entering), now)
        self._room = max(0, room - len(entering))
        if len(entering) < len(new):
            self._refuse(dict(islice(new.items(), room, None)), parent, now)
        return len(new) - len(entering)

    def _refuse(self, new: NewRequests, parent: int, now: float) -> None:
        """Record links that do not fit into the queue as dead."""
        head = pack_head(Head(DEAD, 0, 0, 0, 0, now, parent))
        refusal = rules.FULL_KIND, rules.FULL_REASON % self._link_limit
        for fingerprint, (_, payload) in new.items():
            self.deaths[self.fingerprints.add(fingerprint)] = refusal
            self.records.append(make_record(head, payload))
        self.counts[DEAD] += len(new)
        self.pushed += len(new)

    def add(self, new: NewRequests, parent: int, offered: int, now: float) -> None:
        """Make selected requests ready. The rest of the ``offered`` ones count as duplicates."""
        spilled: dict[int, SpilledRow] = {}
        counts, head = self.counts, pack_head(Head(READY, 0, 0, 0, 0, now, parent))
        for fingerprint, (request, payload) in new.items():
            number, rank = self.fingerprints.add(fingerprint), 0.0 - request.priority
            record = make_record(head, payload)
            lane = self.lane(host_of(request.url))
            has_tail = self._spilled and lane.queue.has_tail(rank)
            if has_tail or counts[READY] - self._spilled >= self._spill_above:
                self.records.append(None)
                spilled[number] = (lane.queue.number, rank, number, record)
                lane.queue.count_spilled(rank, 1)
                self._spilled += 1
            else:
                self.records.append(record)
                lane.queue.push(rank, number)
            counts[READY] += 1
            lane.ready += 1
            if lane.best is None or rank < lane.best[0]:  # its number is higher than all others
                lane.best = (rank, number)
                self.lanes.place(lane, now)
        if spilled:
            self._write_spill(spilled)
        self.pushed += len(new)
        self.duplicates += offered - len(new)

    def lane(self, host: str) -> Lane[Backlog]:
        """The lane of a host. It is added if the run has none."""
        return self.lanes.by_name.get(host) or self.lanes.add(host, Backlog(len(self.lanes.by_name)))

    # -- taking and returning

    def take(self, lane: Lane[Backlog], now: float, worker: int = 0) -> TakenRequest:
        """Take the best request of a lane and count it as leased by a worker. The caller places the lane."""
        assert lane.best is not None
        rank, number = lane.best
        if self.records.is_on_disk(number):
            self._load_spilled(lane, rank)
        lane.queue.remove_best(rank, number)
        attempts = self.records.set_leased(number, worker, now)
        self.counts[READY] -= 1
        self.counts[LEASED] += 1
        lane.host.in_flight += 1
        lane.ready -= 1
        lane.best = self._best(lane) if lane.ready else None
        return TakenRequest(number, rank, attempts, self.records.request(number))

    def requeue(self, lane: Lane[Backlog], rank: float, number: int, now: float) -> None:
        """Return a request to its old place in the queue."""
        lane.queue.put_back(rank, number)
        lane.ready += 1
        lane.best = self._best(lane)
        self.lanes.place(lane, now)

    def lane_of(self, request: Request) -> Lane[Backlog]:
        """The lane of a request that the run has."""
        return self.lane(host_of(request.url))

    def _best(self, lane: Lane[Backlog]) -> Key | None:
        best = lane.queue.best()
        if best is not None and best[1] == ON_DISK:
            self._load_spilled(lane, best[0])
            best = lane.queue.best()
            assert best is not None
            assert best[1] != ON_DISK
        return best

    # -- records

    def update(self, number: int, old: Head, head: Head) -> None:
        """Replace the header of a record, and count its new state."""
        self.counts[old.state] -= 1
        self.counts[head.state] += 1
        self.records.set_head(number, head)

    def add_event(self, number: int, at: float, what: str, detail: str, worker: int = 0) -> None:
        self.events.setdefault(number, []).append(rules.read_event(at, what, detail, self.worker_name(worker)))

    def worker_number(self, name: str) -> int:
        """The number of a worker or a slot of a cluster. It gets one if it has none; 0 if there are too many."""
        if name not in self._worker_numbers and len(self._worker_names) <= rules.MAX_WORKERS:
            self._worker_numbers[name] = len(self._worker_names)
            self._worker_names.append(name)
        return self._worker_numbers.get(name, 0)

    def worker_name(self, number: int) -> str:
        return self._worker_names[number]

    def read(self, number: int) -> tuple[Head, Request]:
        """The record of a request, from disk if it is there."""
        if not self.records.is_on_disk(number):
            return self.records.head(number), self.records.request(number)
        assert self._spill is not None
        record = self._spill.find(number)
        assert record is not None
        return read_record(record)

    def search(self, url: str) -> int | None:
        """Find a request by its URL whose fingerprint differs: it was not filtered, or is not a GET. Reads all
        records."""
        numbers = self.records.search(url.encode())
        return next((number for number in numbers if self.records.request(number).url == url), None)

    def find_faults(self) -> Iterator[tuple[str, int, str]]:
        """The faults of requests in their queues, as (kind, count, example)."""
        lanes = self.lanes.by_name.values()
        queued = {lane.host.name: lane.queue.count() for lane in lanes}
        miscounted = [lane.host.name for lane in lanes if lane.ready != queued[lane.host.name]]
        ready = sum(state == READY for state in self.records.states())
        yield "ready", abs(ready - sum(queued.values())) or len(miscounted), next(iter(miscounted), "")
        unplaced = [lane.host.name for lane in self.lanes.unplaced()]
        yield "lanes", len(unplaced), next(iter(unplaced), "")
        dead = {number for number, state in enumerate(self.records.states()) if state == DEAD}
        yield "failures", len(dead ^ self.deaths.keys()), ""

    # -- the disk

    def _write_spill(self, spilled: dict[int, SpilledRow]) -> None:
        """Move requests to disk. If the disk is full they stay in memory, before those that are on disk already."""
        self._spill = self._spill or Spill()
        if self._spill.add(list(spilled.values())):
            return
        backlogs = {lane.queue.number: lane.queue for lane in self.lanes.by_name.values()}
        for number, (lane, rank, _, record) in spilled.items():
            self.records.put(number, record)
            backlogs[lane].count_spilled(rank, -1)
            backlogs[lane].push(rank, number)
            self._spilled -= 1

    def _load_spilled(self, lane: Lane[Backlog], rank: float) -> None:
        assert self._spill is not None
        rows = self._spill.take(lane.queue.number, rank, _LOAD_COUNT)
        for number, record in rows:
            self.records.put(number, record)
            lane.queue.push(rank, number)
        lane.queue.count_spilled(rank, -len(rows))
        self._spilled -= len(rows)

    def close(self) -> None:
        """Remove the lanes from their hosts, and delete the requests on disk."""
        for lane in self.lanes.by_name.values():
            lane.host.leave(self.lanes)
        if self._spill is not None:
            self._spill.close()
            self._spill = None
