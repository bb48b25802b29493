"""The frontier of a run in memory. Past ``in_memory`` queued requests, more go to disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

import msgspec

from shoal import clock
from shoal.errors import QueueFullError
from shoal.frontier import rules
from shoal.frontier.memory.backlog import Backlog, Spill
from shoal.frontier.memory.records import (
    HEADER,
    NO_PARENT,
    Head,
    decode_request,
    encode_request,
    head_of,
    make_record,
    payload_of,
    request_of,
    sequence_of,
)
from shoal.frontier.memory.roles import ItemLog, Roles
from shoal.frontier.politeness import DEFAULT_HOST, Host, Lane, LaneTable, OpenRuns, apply_update
from shoal.frontier.rules import (
    DEAD,
    DONE,
    LEASED,
    LOST_EVENT,
    LOST_KIND,
    MOST_LEASES,
    READY,
    SPARED_KINDS,
    STATE_NAMES,
    WAITING,
    check_fence,
    check_nonce,
    child_fingerprint,
    claim_token,
    is_fenced,
    lost_reason,
    new_nonce,
    push_fingerprint,
    reissued_token,
    token_base,
)
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    Event,
    Failure,
    FrontierOptions,
    History,
    Holder,
    HostState,
    HostUpdate,
    Lease,
    Leased,
    LoggedItem,
    Pushed,
    RequestState,
    Rewind,
    RoleState,
    Stats,
)
from shoal.urls.normalize import host_of

_CHUNK = 1000
_NOTHING: Mapping[int, bytes] = {}
_Fresh = dict[bytes, tuple[Request, bytes]]
"""New requests by fingerprint, with their msgpack."""


class _Held(msgspec.Struct):
    """A lease that is out."""

    token: int
    until: float
    lane: Lane[Backlog]
    rank: float
    holder: Holder | None
    begun: bool
    """Else its attempt, which its record has, does not count yet."""
    origin: tuple[int, bytes] | None = None
    """If it was reissued: the token before, and the nonce."""


class MemoryFrontier:
    """See `shoal.ports.Frontier`. No method gives way to another task while it changes something, so each is one atomic
    step."""

    def __init__(
        self,
        options: FrontierOptions,
        hosts: dict[str, Host],
        clock: Callable[[], float],
        runs: OpenRuns[MemoryFrontier],
        notes: dict[str, tuple[bytes, float]],
    ) -> None:
        self._options = options
        self._hosts = hosts
        self._notes = notes
        self._clock = clock
        self._runs = runs
        """The frontiers of all runs on the store, this one among them."""
        self._lanes: LaneTable[Backlog] = LaneTable(hosts, options)
        self._records: dict[int, bytes | None] = {}
        """By fingerprint; None while it is on disk."""
        self._held: dict[int, _Held] = {}
        self._expiries: list[tuple[float, int, int]] = []
        self._waiting: list[tuple[float, int, int]] = []
        self._roles = Roles()
        self._fences: dict[str, int] = {}
        """By slot, the epoch before which nothing is given to it."""
        self._log = ItemLog()
        self._causes: dict[int, tuple[str, str]] = {}
        self._events: dict[int, list[Event]] = {}
        self._spill: Spill | None = None
        self._spill_at = min(options.in_memory, options.max_queue_size or options.in_memory)
        self._spilled = 0
        self._counts = [0, 0, 0, 0, 0]
        self._pushed = self._duplicates = self._sequence = 0
        self._granted: tuple[bytes, list[Lease]] = (b"", [])
        """The nonce of the last lease call, and what it leased."""
        self.halted = False
        """The run is paused or cancelled: nothing is leased."""

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        if seed is not None:
            if not self._roles.holds(seed):
                return Pushed(0, 0)
            self._roles.check(seed, cursor)
        fresh = self._fresh((push_fingerprint(request, seed, cursor, i), request) for i, request in enumerate(requests))
        most = self._options.max_queue_size
        if most is not None and fresh and self._counts[READY] + self._counts[WAITING] + len(fresh) > most:
            raise QueueFullError(f"the queue holds its maximum of {most} requests; nothing was pushed")
        self._enqueue(fresh, NO_PARENT, len(requests))
        if seed is not None:
            self._roles.save(seed.role, cursor)
        return Pushed(len(fresh), len(requests) - len(fresh))

    def _fresh(self, named: Iterable[tuple[bytes, Request]], encoded: Mapping[int, bytes] = _NOTHING) -> _Fresh:
        """What is new, encoded: a request that can't be is refused here, before anything is changed."""
        fresh: _Fresh = {}
        for fingerprint, request in named:
            if fingerprint not in fresh and int.from_bytes(fingerprint, "big") not in self._records:
                payload = encoded.get(id(request)) or rules.encode_request(request, encode_request)
                fresh[fingerprint] = request, payload
        return fresh

    def _fresh_children(self, ended: Completion | Failure, encoded: Mapping[int, bytes]) -> _Fresh:
        parent = ended.lease.fingerprint
        named = ((child_fingerprint(child, parent, i), child) for i, child in enumerate(ended.children))
        return self._fresh(named, encoded)

    def _push_children(self, ended: Completion | Failure, fresh: _Fresh, known: int) -> Pushed:
        # Another page of the same batch may have brought the same link meanwhile.
        fresh = {name: new for name, new in fresh.items() if int.from_bytes(name, "big") not in self._records}
        self._enqueue(fresh, ended.lease.fingerprint, len(ended.children))
        self._duplicates += known
        return Pushed(len(fresh), len(ended.children) - len(fresh) + known)

    def _enqueue(self, fresh: _Fresh, parent: bytes, offered: int) -> None:
        now = self._clock()
        spilled: dict[int, tuple[int, float, int, bytes, bytes]] = {}
        for fingerprint, (request, payload) in fresh.items():
            self._sequence += 1
            number, rank = int.from_bytes(fingerprint, "big"), -request.priority
            record = make_record(Head(READY, 0, 0, 0, now, self._sequence, parent), payload)
            name = host_of(request.url)
            lane = self._lanes.by_name.get(name) or self._lanes.add(name, Backlog(len(self._lanes.by_name)))
            self._records[number] = record
            if lane.queue.has_tail(rank) or self._counts[READY] - self._spilled >= self._spill_at:
                spilled[number] = (lane.queue.number, rank, self._sequence, fingerprint, record)
                lane.queue.count_spilled(rank, 1)
                self._spilled += 1
            else:
                lane.queue.push(rank, number)
            self._counts[READY] += 1
            lane.ready += 1
            if lane.best is None or (rank, self._sequence) < lane.best:
                lane.best = (rank, self._sequence)
                self._lanes.place(lane, now)
        if spilled:
            self._write_spill(spilled)
        self._pushed += len(fresh)
        self._duplicates += offered - len(fresh)

    def _write_spill(self, spilled: dict[int, tuple[int, float, int, bytes, bytes]]) -> None:
        """To disk with them; if it has no room they stay in memory, before the tail that is there already."""
        self._spill = self._spill or Spill()
        written = self._spill.add(list(spilled.values()))
        lanes = {} if written else {lane.queue.number: lane.queue for lane in self._lanes.by_name.values()}
        for number, (lane, rank, *_) in spilled.items():
            if written:
                self._records[number] = None
            else:
                lanes[lane].count_spilled(rank, -1)
                lanes[lane].push(rank, number)
                self._spilled -= 1

    # -- leasing

    def _check_holder(self, holder: Holder | None) -> None:
        if holder is not None:
            check_fence(holder.slot, holder.epoch, self._fences.get(holder.slot))

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, begun: bool = True, nonce: bytes = b""
    ) -> Leased:
        nonce = nonce or new_nonce()
        token = token_base(nonce)
        self._check_holder(holder)
        if nonce == self._granted[0]:
            return self._repeat(ttl)
        started = clock.now()
        now = self._clock()
        self._wake(now)
        if self._runs.others_are_due(now):
            for frontier in self._runs.values():
                frontier._wake(now)
        if self.halted:
            return Leased([], None)
        self._lanes.reopen(now)
        leases: list[Lease] = []
        limit = min(limit, MOST_LEASES)
        while len(leases) < limit and (lane := self._lanes.take_best(now)) is not None:
            token += 1
            leases.append(self._take(lane, token, now, ttl, started + ttl, holder, begun))
            self._lanes.place(lane, now)
        self._granted = nonce, leases
        due_again = self._waiting[0][0] if self._waiting else None
        moments = [at for at in (due_again, self._next_expiry(), self._lanes.next_due()) if at is not None]
        return Leased(leases, max(0.0, min(moments) - now) if moments else None)

    def _repeat(self, ttl: float) -> Leased:
        """What the last call leased, as far as it is still held."""
        deadline, until = clock.now() + ttl, self._clock() + ttl
        leases = []
        for lease in self._granted[1]:
            current = self._current(lease)
            if current is not None:
                self._extend(current[0], current[1], until)
                leases.append(msgspec.structs.replace(lease, deadline=deadline))
        return Leased(leases, 0.0)

    def _next_expiry(self) -> float | None:
        """When the next lease runs out; entries of leases that ended or were extended are dropped on the way."""
        while self._expiries:
            until, token, number = self._expiries[0]
            held = self._held.get(number)
            if held is not None and held.token == token and held.until == until:
                return until
            heappop(self._expiries)
        return None

    def _wake(self, now: float) -> None:
        """Give back expired leases, and make ready what has waited long enough."""
        while self._expiries and self._expiries[0][0] <= now:
            _, token, number = heappop(self._expiries)
            held = self._held.get(number)
            if held is not None and held.token == token and held.until <= now:
                self._lose(number, held, now)
        while self._waiting and self._waiting[0][0] <= now:
            _, _, number = heappop(self._waiting)
            record = self._records[number]
            assert record is not None
            head, request = head_of(record), request_of(record)
            self._set(number, head._replace(state=READY), record)
            self._requeue(self._lanes.by_name[host_of(request.url)], -request.priority, head.sequence, number, now)

    def _lose(self, number: int, held: _Held, now: float) -> None:
        """End a lease whose worker is gone."""
        record = self._records[number]
        assert record is not None
        if not held.begun:
            self._give_back(number, held, record, now, contacted=False)
            return
        del self._held[number]
        head = head_of(record)
        reason = lost_reason(head.attempts)
        self._note(number, now, LOST_EVENT, reason)
        if head.attempts >= self._options.max_attempts:
            self._causes[number] = (LOST_KIND, reason)
            self._set(number, head._replace(state=DEAD, at=now), record)
        else:
            self._set(number, head._replace(state=READY, at=now), record)
            self._requeue(held.lane, held.rank, head.sequence, number, now)
        held.lane.host.returned(now, contacted=True)

    def _give_back(self, number: int, held: _Held, record: bytes, now: float, *, contacted: bool) -> None:
        """End a lease that was not used."""
        del self._held[number]
        head = head_of(record)
        self._set(number, head._replace(state=READY, attempts=head.attempts - 1, at=now), record)
        self._requeue(held.lane, held.rank, head.sequence, number, now)
        held.lane.host.returned(now, contacted=contacted)

    def _take(
        self,
        lane: Lane[Backlog],
        token: int,
        now: float,
        ttl: float,
        deadline: float,
        holder: Holder | None,
        begun: bool,
    ) -> Lease:
        found = lane.queue.best()
        assert found is not None
        rank, bucket = found
        if bucket.back and (not bucket.fresh or bucket.back[0][0] < self._sequence_of(bucket.fresh[0])):
            number = heappop(bucket.back)[1]
        elif bucket.fresh:
            number = bucket.fresh.popleft()
        else:
            self._load(lane, rank)
            number = bucket.fresh.popleft()
        record = self._records[number]
        assert record is not None
        _, attempts, status, items, _, sequence, parent = HEADER.unpack_from(record)
        payload = payload_of(record)
        attempts += 1
        self._records[number] = (
            HEADER.pack(LEASED, min(65535, attempts), status, items, now, sequence, parent) + payload
        )
        self._counts[READY] -= 1
        self._counts[LEASED] += 1
        self._held[number] = _Held(token, now + ttl, lane, rank, holder, begun)
        heappush(self._expiries, (now + ttl, token, number))
        lane.host.in_flight += 1
        lane.ready -= 1
        lane.best = self._best(lane)
        fingerprint = number.to_bytes(16, "big")
        host = lane.host
        learned = host.learned_delay or 0.0
        return Lease(decode_request(payload), fingerprint, token, attempts, host.name, deadline, learned)

    def _best(self, lane: Lane[Backlog]) -> tuple[float, int] | None:
        found = lane.queue.best()
        if found is None:
            return None
        rank, bucket = found
        if not bucket.fresh and bucket.spilled:
            self._load(lane, rank)
        if not bucket.back:
            return rank, self._sequence_of(bucket.fresh[0])
        back = bucket.back[0][0]
        return rank, min(back, self._sequence_of(bucket.fresh[0])) if bucket.fresh else back

    def _load(self, lane: Lane[Backlog], rank: float) -> None:
        assert self._spill is not None
        rows = self._spill.take(lane.queue.number, rank, _CHUNK)
        for fingerprint, record in rows:
            number = int.from_bytes(fingerprint, "big")
            self._records[number] = record
            lane.queue.push(rank, number)
        lane.queue.count_spilled(rank, -len(rows))
        self._spilled -= len(rows)

    def _sequence_of(self, number: int) -> int:
        record = self._records[number]
        assert record is not None
        return sequence_of(record)

    def _requeue(self, lane: Lane[Backlog], rank: float, sequence: int, number: int, now: float) -> None:
        lane.queue.put_back(rank, sequence, number)
        lane.ready += 1
        lane.best = self._best(lane)
        self._lanes.place(lane, now)

    def _set(self, number: int, head: Head, record: bytes) -> None:
        self._counts[record[0]] -= 1
        self._counts[head.state] += 1
        self._records[number] = make_record(head, payload_of(record))

    def _note(self, number: int, at: float, what: str, detail: str) -> None:
        self._events.setdefault(number, []).append(Event(at, what, detail))

    def _current(self, lease: Lease) -> tuple[int, _Held, bytes] | None:
        """What is held under the lease's token, or None: stale."""
        number = int.from_bytes(lease.fingerprint, "big")
        held = self._held.get(number)
        record = self._records.get(number)
        if held is None or record is None or held.token != lease.token:
            return None
        return number, held, record

    # -- ending a lease

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        renewed: list[Lease | None] = []
        for lease in leases:
            current = self._current(lease)
            if current is None:
                renewed.append(None)
                continue
            number, held, _ = current
            self._extend(number, held, until)
            renewed.append(msgspec.structs.replace(lease, deadline=deadline))
        return renewed

    def _extend(self, number: int, held: _Held, until: float) -> None:
        held.until = until
        heappush(self._expiries, (until, held.token, number))

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        check_nonce(nonce)
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        reissued: set[int] = set()
        answer: list[Lease | None] = []
        for lease in leases:
            number, origin = int.from_bytes(lease.fingerprint, "big"), (lease.token, nonce)
            held = self._held.get(number)
            if held is None or number in reissued or (held.token != lease.token and held.origin != origin):
                answer.append(None)
                continue
            reissued.add(number)
            if held.token == lease.token:
                held.token, held.origin, held.begun = reissued_token(nonce, lease.token), origin, True
            self._extend(number, held, until)
            answer.append(msgspec.structs.replace(lease, token=held.token, deadline=deadline))
        return answer

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        encoded = await rules.encode_children(completions, encode_request)
        now = self._clock()
        fresh = [self._fresh_children(completion, encoded) for completion in completions]
        return [self._complete(completion, new, now) for completion, new in zip(completions, fresh, strict=True)]

    def _complete(self, completion: Completion, fresh: _Fresh, now: float) -> Pushed | None:
        current = self._current(completion.lease)
        if current is None:
            return None
        number, held, record = current
        del self._held[number]
        head = head_of(record)
        items = self._log.append(completion.lease.fingerprint, completion.items, head.items)
        self._set(number, head._replace(state=DONE, status=completion.status, items=items, at=now), record)
        if completion.note:
            self._note(number, now, "note", completion.note)
        pushed = self._push_children(completion, fresh, completion.duplicates)
        held.lane.host.returned(now, contacted=completion.contacted)
        return pushed

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        encoded = await rules.encode_children(failures, encode_request)
        now = self._clock()
        fresh = [self._fresh_children(failure, encoded) for failure in failures]
        return [self._fail(failure, new, now) for failure, new in zip(failures, fresh, strict=True)]

    def _fail(self, failure: Failure, fresh: _Fresh, now: float) -> RequestState | None:
        current = self._current(failure.lease)
        if current is None:
            return None
        number, held, record = current
        del self._held[number]
        head = head_of(record)._replace(status=failure.status, at=now)
        if failure.retry_in is not None and head.attempts < self._options.max_attempts:
            state = WAITING
            self._note(
                number, now, f"attempt {head.attempts} failed", f"{failure.reason}; waits {failure.retry_in:g} s"
            )
            heappush(self._waiting, (now + failure.retry_in, head.sequence, number))
        else:
            state = DEAD
            self._note(number, now, f"attempt {head.attempts} failed", failure.reason)
            self._causes[number] = (failure.kind, failure.reason)
            head = head._replace(items=self._log.append(failure.lease.fingerprint, failure.items, head.items))
            self._push_children(failure, fresh, 0)
        self._set(number, head._replace(state=state), record)
        held.lane.host.returned(now, contacted=failure.contacted)
        return STATE_NAMES[state]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        now = self._clock()
        released = []
        for lease in leases:
            current = self._current(lease)
            released.append(current is not None)
            if current is None:
                continue
            number, held, record = current
            self._give_back(number, held, record, now, contacted=contacted)
        return released

    async def fence(self, slot: str, epoch: int) -> int:
        check_fence(slot, epoch, self._fences.get(slot))
        self._fences[slot] = epoch
        now = self._clock()
        lost = [(number, held) for number, held in self._held.items() if is_fenced(held.holder, slot, epoch)]
        for number, held in lost:
            self._lose(number, held, now)
        self._roles.fence(slot, epoch)
        return len(lost)

    # -- roles and items

    async def claim(self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b"") -> Claim | None:
        self._check_holder(holder)
        return self._roles.claim(role, self._clock(), ttl, holder, claim_token(nonce or new_nonce()))

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        return self._roles.advance(claim, cursor, self._clock() + ttl)

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        return self._roles.relinquish(claim, finished=finished)

    async def roles(self) -> list[RoleState]:
        return self._roles.states(self._clock())

    async def read_items(self, after: int, limit: int, *, last: LoggedItem | None = None) -> list[LoggedItem]:
        return self._log.read(after, limit)

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        self._log.trim(through)

    # -- hosts

    async def update_host(self, host: str, update: HostUpdate) -> None:
        if host == DEFAULT_HOST:
            known = self._hosts.setdefault(host, Host(host))
        else:
            lane = self._lanes.by_name.get(host) or self._lanes.add(host, Backlog(len(self._lanes.by_name)))
            known = lane.host
        apply_update(self._hosts, known, update, self._clock())

    async def host_states(self, limit: int = 100) -> list[HostState]:
        return self._lanes.states(self._clock(), limit)

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        now = self._clock()
        for old in [old for old, (_, until) in self._notes.items() if until <= now]:
            del self._notes[old]
        self._notes[key] = (value, now + ttl)

    async def recall(self, key: str) -> bytes | None:
        value, until = self._notes.get(key, (None, 0.0))
        return value if until > self._clock() else None

    # -- looking at it

    def _seeding(self) -> bool:
        return not self._roles.is_finished("seed")

    def _stats(self, counts: Sequence[int], pushed: int) -> Stats:
        ready, waiting, leased, done, dead = counts
        return Stats(
            pushed=pushed, ready=ready, waiting=waiting, leased=leased, done=done, dead=dead,
            duplicates=self._duplicates, items=self._log.count, seeding=self._seeding(),
        )  # fmt: skip

    async def stats(self) -> Stats:
        return self._stats(self._counts, self._pushed)

    async def audit(self) -> Stats:
        counts = [0, 0, 0, 0, 0]
        for record in self._records.values():
            counts[READY if record is None else record[0]] += 1
        return self._stats(counts, self._pushed)

    async def recover(self) -> Rewind | None:
        """None: what is in memory never goes back."""
        return None

    async def rewinds(self) -> list[Rewind]:
        return []

    async def find(self, request: Request) -> History | None:
        number: int | None = int.from_bytes(request.fingerprint(), "big")
        if number not in self._records:
            number = self._search(request.url)
        return None if number is None else self._history(number)

    def _search(self, url: str) -> int | None:
        """One with a name of its own: it was not filtered, or is no GET. Reads all, as only a person asks."""
        needle = url.encode()
        for number, record in self._records.items():
            if record is not None and needle in record and request_of(record).url == url:
                return number
        return None

    def _history(self, number: int) -> History:
        record = self._read(number)
        head, request = head_of(record), request_of(record)
        parent = int.from_bytes(head.parent, "big")
        url = request_of(self._read(parent)).url if parent in self._records else None
        held = self._held.get(number)
        return History(
            url=request.url, state=STATE_NAMES[head.state], depth=request.depth, priority=request.priority,
            attempts=head.attempts if held is None or held.begun else head.attempts - 1,
            status=head.status, items=head.items, parent=url,
            reason=self._causes.get(number, ("", ""))[1],
            events=(*self._events.get(number, ()), Event(head.at, STATE_NAMES[head.state])),
        )  # fmt: skip

    def _read(self, number: int) -> bytes:
        record = self._records[number]
        if record is None:
            assert self._spill is not None
            record = self._spill.find(number.to_bytes(16, "big"))
        assert record is not None
        return record

    async def dead_kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for kind, _ in self._causes.values():
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds

    async def dead(self) -> AsyncIterator[History]:
        for number in list(self._causes):
            yield self._history(number)

    async def retry_dead(self, kinds: Sequence[str] | None = None) -> int:
        now = self._clock()
        chosen = [
            number
            for number, (kind, _) in self._causes.items()
            if (kind not in SPARED_KINDS if kinds is None else kind in kinds)
        ]
        for number in chosen:
            del self._causes[number]
            record = self._records[number]
            assert record is not None
            head, request = head_of(record), request_of(record)
            self._note(number, now, "retried", "made ready again with all its attempts")
            self._set(number, head._replace(state=READY, attempts=0, at=now), record)
            self._requeue(self._lanes.by_name[host_of(request.url)], -request.priority, head.sequence, number, now)
        return len(chosen)

    async def close(self) -> None:
        """Nothing: what it holds belongs to the store, where another worker may go on with it."""

    def discard(self) -> None:
        """The run is forgotten, or the store closed: its leases end, and what is on disk goes away."""
        for held in self._held.values():
            held.lane.host.returned(self._clock(), contacted=True)
        self._held.clear()
        for lane in self._lanes.by_name.values():
            lane.host.lanes = [entry for entry in lane.host.lanes if entry[0] is not self._lanes]
        if self._spill is not None:
            self._spill.close()
            self._spill = None
