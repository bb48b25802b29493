"""The frontier of a run in a SQLite file.

One process works on a file at a time, so it keeps in memory what has to be decided quickly: the best request of each
lane, the politeness of each host, the leases that are out, the newest fingerprints. All of it can be made anew from
the file at any moment, which is done when the run is opened and whenever a transaction was rolled back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from shoal import clock
from shoal.errors import QueueFullError
from shoal.frontier.cancelled_calls import heard
from shoal.frontier.politeness import DEFAULT_HOST, Host, Key, Lane, OpenRuns, apply_update
from shoal.frontier.rules import (
    HALTED,
    LEASED,
    LOST_EVENT,
    LOST_KIND,
    MOST_LEASES,
    check_nonce,
    child_fingerprint,
    claim_token,
    encode_children,
    encode_request,
    is_fenced,
    lost_reason,
    new_nonce,
    push_fingerprint,
    reissued_token,
    token_base,
)
from shoal.frontier.sqlite.file import SQLiteFile
from shoal.frontier.sqlite.queue import NewRequest, SharedHosts, StoredQueue
from shoal.frontier.sqlite.records import Ledger, Records, slot_of, storable
from shoal.frontier.sqlite.seen import Seen
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
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

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_NOTHING: Mapping[int, bytes] = {}


class _Held(msgspec.Struct, frozen=True):
    """A lease that is out."""

    number: int
    fingerprint: bytes
    token: int
    attempts: int
    items: int
    lane: Lane[int]
    rank: float
    holder: Holder | None
    begun: bool
    """Else the last of its attempts does not count yet."""
    origin: tuple[int, bytes] | None = None
    """If it was reissued: the token before, and the nonce."""


class SQLiteFrontier:
    """See `shoal.ports.Frontier`. Each method is one transaction, in the thread of the file."""

    def __init__(
        self,
        file: SQLiteFile,
        run: int,
        options: FrontierOptions,
        hosts: SharedHosts,
        clock: Callable[[], float],
        runs: OpenRuns[SQLiteFrontier],
    ) -> None:
        self._file = file
        self._db = file.db
        self._run = run
        self._options = options
        self._hosts = hosts
        self._clock = clock
        self._runs = runs
        """The frontiers of all runs that are open in the file."""
        self._records = Records(file.db, run)
        self._seen = Seen(file.db, run)
        self._queue = StoredQueue(file.db, run, hosts, options)
        self._held: dict[bytes, _Held] = {}
        self._granted: tuple[bytes, list[Lease]] = (b"", [])
        """The nonce of the last lease call, and what it leased."""
        self.halted = False
        """The run is paused or cancelled: nothing is leased."""

    def load(self) -> None:
        """Make what is in memory anew from the file. The hosts are new too; when all runs are loaded, ``place``."""
        self.halted = self._records.run_state() in HALTED
        self._load_queue()
        self._seen.load()

    def place(self) -> None:
        """Let the hosts be leased from."""
        self._queue.place(self._clock())

    def _load_queue(self) -> None:
        self._queue.load()
        self._held = {}
        leased = self._db.execute(
            "SELECT id, fingerprint, token, attempts, items, lane, rank, slot, epoch, begun, origin, nonce FROM request"
            " WHERE run = ? AND due IS NOT NULL AND state = 2",
            (self._run,),
        )
        for number, name, token, attempts, items, lane_number, rank, slot, epoch, begun, before, nonce in leased:
            lane = self._queue[lane_number]
            lane.host.in_flight += 1
            holder = None if slot is None else Holder(slot, epoch)
            origin = None if nonce is None else (before, nonce)
            self._held[name] = _Held(number, name, token, attempts, items, lane, rank, holder, bool(begun), origin)

    def end_old_leases(self) -> None:
        """End what a process that is gone held. Each of its leases that were begun was an attempt."""
        ledger = self._records.ledger()
        self._lose(list(self._held.values()), ledger, self._clock())
        self._records.save(ledger)
        self._records.free_roles()
        self.place()

    async def _change(self, step: Callable[[Ledger, float], T]) -> T:
        """``step`` with the ledger and the time, as one transaction."""

        def transaction() -> T:
            ledger = self._records.ledger()
            before = msgspec.structs.astuple(ledger)
            result = step(ledger, self._clock())
            if msgspec.structs.astuple(ledger) != before:
                self._records.save(ledger)
            return result

        return await self._file.write(transaction)

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        def step(ledger: Ledger, now: float) -> Pushed:
            if seed is not None:
                if not self._records.holds("seed", seed.token):
                    return Pushed(0, 0)
                self._records.check(seed, cursor)
            new = self._new([(push_fingerprint(r, seed, cursor, i), r, None) for i, r in enumerate(requests)])
            most = self._options.max_queue_size
            if most is not None and new and ledger.ready + ledger.waiting + len(new) > most:
                raise QueueFullError(f"the queue holds its maximum of {most} requests; nothing was pushed")
            self._add(new, ledger, now)
            ledger.duplicates += len(requests) - len(new)
            if seed is not None:
                self._records.set_cursor("seed", cursor)
            return Pushed(len(new), len(requests) - len(new))

        return await self._change(step)

    def _new(
        self, offered: Sequence[tuple[bytes, Request, int | None]], encoded: Mapping[int, bytes] = _NOTHING
    ) -> list[NewRequest]:
        """Those that the run has not yet, of (fingerprint, request, parent). One that can't be encoded is refused here,
        before anything is changed."""
        known = self._seen.known({fingerprint for fingerprint, _, _ in offered})
        new = []
        for fingerprint, request, parent in offered:
            if fingerprint not in known:
                known.add(fingerprint)
                payload = encoded.get(id(request)) or encode_request(request, _encode)
                new.append(NewRequest(fingerprint, request, parent, payload))
        return new

    def _new_children(
        self, families: Iterable[tuple[_Held, Sequence[Request]]], encoded: Mapping[int, bytes]
    ) -> list[NewRequest]:
        offered: list[tuple[bytes, Request, int | None]] = [
            (child_fingerprint(child, held.fingerprint, index), child, held.number)
            for held, children in families
            for index, child in enumerate(children)
        ]
        return self._new(offered, encoded)

    def _add(self, new: Sequence[NewRequest], ledger: Ledger, now: float) -> None:
        if new:
            numbers = self._queue.add(new, now)
            self._seen.add(numbers)
            ledger.newest = numbers[new[-1].fingerprint]
            ledger.pushed += len(new)
            ledger.ready += len(new)

    # -- leasing

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, begun: bool = True, nonce: bytes = b""
    ) -> Leased:
        nonce = nonce or new_nonce()
        check_nonce(nonce)
        limit = min(limit, MOST_LEASES)
        step = self._change(partial(self._lease, limit, ttl, clock.now() + ttl, holder, begun, nonce))
        return await heard(step, lambda leased: self.release(leased.leases))

    def _lease(
        self,
        limit: int,
        ttl: float,
        deadline: float,
        holder: Holder | None,
        begun: bool,
        nonce: bytes,
        ledger: Ledger,
        now: float,
    ) -> Leased:
        self._records.check_holder(holder)
        if nonce == self._granted[0]:
            renewed = self._renew(self._granted[1], ttl, deadline, ledger, now)
            return Leased([lease for lease in renewed if lease], 0.0)
        if self._runs.others_are_due(now):
            for frontier in list(self._runs.values()):
                if frontier is not self:
                    frontier._wake(now)
        moment = self._wake(now, ledger)
        if self.halted:
            return Leased([], None)
        chosen = self._queue.choose(limit, now)
        leases = self._take(chosen, token_base(nonce), holder, begun, ledger, now, now + ttl, deadline)
        self._granted = nonce, leases
        moments = [moment, now + ttl if leases else None, self._queue.next_due()]
        first = min((moment for moment in moments if moment is not None), default=None)
        return Leased(leases, None if first is None else max(0.0, first - now))

    def _wake(self, now: float, ledger: Ledger | None = None) -> float | None:
        """Give back expired leases, and make ready what has waited long enough. Returns when there is more to do."""
        moment = self._next_moment()
        if moment is None or moment > now:
            return moment
        own = ledger or self._records.ledger()
        lost = []
        sql = "SELECT state, id, lane, rank, fingerprint FROM request WHERE run = ? AND due <= ?"
        for state, number, lane, rank, fingerprint in self._db.execute(sql, (self._run, now)):
            if state == LEASED:
                lost.append(self._held[fingerprint])
            else:
                own.waiting -= 1
                own.ready += 1
                self._queue.ready(self._queue[lane], (rank, number), now)
        self._db.execute(
            "UPDATE request SET state = 0, due = NULL WHERE run = ? AND due <= ? AND state = 1", (self._run, now)
        )
        self._lose(lost, own, now)
        if ledger is None:
            self._records.save(own)
        return self._next_moment()

    def _next_moment(self) -> float | None:
        """When the next lease is lost or the next waiting request is ready."""
        sql = "SELECT min(due) FROM request WHERE run = ? AND due IS NOT NULL"
        moment: float | None = self._db.execute(sql, (self._run,)).fetchone()[0]
        return moment

    def _lose(self, lost: Sequence[_Held], ledger: Ledger, now: float) -> None:
        """End leases whose worker is gone."""
        self._give_back([held for held in lost if not held.begun], ledger, now, contacted=False)
        lost = [held for held in lost if held.begun]
        ready, dead = [], []
        for held in lost:
            reason = lost_reason(held.attempts)
            self._records.note(held.number, now, LOST_EVENT, reason)
            if held.attempts >= self._options.max_attempts:
                dead.append((LOST_KIND, reason, now, held.number))
            else:
                ready.append((now, held.number))
                self._queue.ready(held.lane, (held.rank, held.number), now)
        self._db.executemany("UPDATE request SET state = 0, due = NULL, token = NULL, at = ? WHERE id = ?", ready)
        self._db.executemany(
            "UPDATE request SET state = 4, due = NULL, token = NULL, kind = ?, reason = ?, at = ? WHERE id = ?", dead
        )
        ledger.ready += len(ready)
        ledger.dead += len(dead)
        self._end([(held, True) for held in lost], ledger, now)

    def _give_back(self, unused: Sequence[_Held], ledger: Ledger, now: float, *, contacted: bool) -> None:
        """End leases that were not used."""
        self._db.executemany(
            "UPDATE request SET state = 0, due = NULL, token = NULL, attempts = ?, at = ? WHERE id = ?",
            [(held.attempts - 1, now, held.number) for held in unused],
        )
        for held in unused:
            self._queue.ready(held.lane, (held.rank, held.number), now)
        ledger.ready += len(unused)
        self._end([(held, contacted) for held in unused], ledger, now)

    def _take(
        self,
        chosen: Sequence[tuple[Lane[int], Key]],
        token: int,
        holder: Holder | None,
        begun: bool,
        ledger: Ledger,
        now: float,
        until: float,
        deadline: float,
    ) -> list[Lease]:
        sql = (
            "SELECT id, fingerprint, attempts, items, payload FROM request WHERE id IN (SELECT value FROM json_each(?))"
        )
        numbers = msgspec.json.encode([number for _, (_, number) in chosen]).decode()
        rows = {row[0]: row for row in self._db.execute(sql, (numbers,))}
        leases, changes, slot = [], [], slot_of(holder)
        for lane, (rank, number) in chosen:
            try:
                _, fingerprint, attempts, items, payload = rows[number]
                request = _decode(payload)
            except (KeyError, UnicodeDecodeError, msgspec.MsgspecError) as exc:
                raise self._file.damaged(f"request {number} can't be read: {exc!r}") from exc
            token, attempt = token + 1, attempts + 1
            self._held[fingerprint] = _Held(number, fingerprint, token, attempt, items, lane, rank, holder, begun)
            learned = lane.host.learned_delay or 0.0
            leases.append(Lease(request, fingerprint, token, attempt, lane.host.name, deadline, learned))
            changes.append((token, *slot, begun, attempt, until, now, number))
        self._db.executemany(
            "UPDATE request SET state = 2, token = ?, slot = ?, epoch = ?, begun = ?, origin = NULL, nonce = NULL,"
            " attempts = ?, due = ?, at = ? WHERE id = ?",
            changes,
        )
        ledger.ready -= len(leases)
        ledger.leased += len(leases)
        return leases

    # -- ending a lease

    def _current(self, lease: Lease) -> _Held | None:
        """What is held under the lease's token, or None: stale."""
        held = self._held.get(lease.fingerprint)
        return held if held is not None and held.token == lease.token else None

    def _ending(self, leases: Iterable[Lease]) -> list[_Held | None]:
        """What each of these holds that are about to end; so the second of two equal ones is stale."""
        ending: set[int] = set()
        found: list[_Held | None] = []
        for held in map(self._current, leases):
            found.append(held if held and held.number not in ending else None)
            if held:
                ending.add(held.number)
        return found

    def _end(self, ended: Sequence[tuple[_Held, bool]], ledger: Ledger, now: float) -> None:
        """These leases are over; each with whether its host was contacted."""
        contacted: dict[str, Host] = {}
        for held, contact in ended:
            del self._held[held.fingerprint]
            host = held.lane.host
            host.returned(now, contacted=contact)
            if contact:
                contacted[host.name] = host
        self._hosts.save(contacted.values())
        ledger.leased -= len(ended)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        return await self._change(partial(self._renew, leases, ttl, clock.now() + ttl))

    def _renew(self, leases: Sequence[Lease], ttl: float, deadline: float, _: Ledger, now: float) -> list[Lease | None]:
        current = list(map(self._current, leases))
        self._db.executemany(
            "UPDATE request SET due = ? WHERE id = ?", [(now + ttl, held.number) for held in current if held]
        )
        return [
            msgspec.structs.replace(lease, deadline=deadline) if held else None
            for lease, held in zip(leases, current, strict=True)
        ]

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        check_nonce(nonce)
        step = self._change(partial(self._reissue, leases, ttl, clock.now() + ttl, nonce))
        # Whoever had the old tokens may have begun.
        return await heard(step, lambda anew: self.release([lease for lease in anew if lease], contacted=True))

    def _reissue(
        self, leases: Sequence[Lease], ttl: float, deadline: float, nonce: bytes, _: Ledger, now: float
    ) -> list[Lease | None]:
        reissued: list[Lease | None] = []
        changes: dict[bytes, tuple[int, int, bytes, float, int]] = {}
        for lease in leases:
            held, origin = self._held.get(lease.fingerprint), (lease.token, nonce)
            if held is None or held.fingerprint in changes or (held.token != lease.token and held.origin != origin):
                reissued.append(None)
                continue
            if held.token == lease.token:
                anew = reissued_token(nonce, lease.token)
                held = msgspec.structs.replace(held, token=anew, begun=True, origin=origin)
                self._held[held.fingerprint] = held
            changes[held.fingerprint] = (held.token, *origin, now + ttl, held.number)
            reissued.append(msgspec.structs.replace(lease, token=held.token, deadline=deadline))
        self._db.executemany(
            "UPDATE request SET token = ?, begun = 1, origin = ?, nonce = ?, due = ? WHERE id = ?", changes.values()
        )
        return reissued

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        encoded = await encode_children(completions, _encode)
        return await self._change(partial(self._complete, completions, encoded))

    def _complete(
        self, completions: Sequence[Completion], encoded: Mapping[int, bytes], ledger: Ledger, now: float
    ) -> list[Pushed | None]:
        holders = self._ending(page.lease for page in completions)
        done = [(held, page) for held, page in zip(holders, completions, strict=True) if held]
        new = self._new_children(((held, page.children) for held, page in done), encoded)
        self._db.executemany(
            "UPDATE request SET state = 3, due = NULL, token = NULL, status = ?, items = ?, at = ? WHERE id = ?",
            [(page.status, held.items + len(page.items), now, held.number) for held, page in done],
        )
        self._records.append([(held.fingerprint, held.items, page.items) for held, page in done], ledger)
        self._add(new, ledger, now)
        added = Counter(child.parent for child in new)
        results: list[Pushed | None] = []
        for held, page in zip(holders, completions, strict=True):
            if held is None:
                results.append(None)
                continue
            known = len(page.children) - added[held.number] + page.duplicates
            results.append(Pushed(added[held.number], known))
            ledger.duplicates += known
            if page.note:
                self._records.note(held.number, now, "note", page.note)
        ledger.done += len(done)
        self._end([(held, page.contacted) for held, page in done], ledger, now)
        return results

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        encoded = await encode_children(failures, _encode)
        return await self._change(partial(self._fail, failures, encoded))

    def _fail(
        self, failures: Sequence[Failure], encoded: Mapping[int, bytes], ledger: Ledger, now: float
    ) -> list[RequestState | None]:
        holders = self._ending(failure.lease for failure in failures)
        states: list[RequestState | None] = []
        dead, waiting = [], []
        for held, failure in zip(holders, failures, strict=True):
            if held is None:
                states.append(None)
            elif failure.retry_in is None or held.attempts >= self._options.max_attempts:
                states.append("dead")
                dead.append((held, failure))
            else:
                states.append("waiting")
                waiting.append((held, failure, failure.retry_in))
        self._die(dead, encoded, ledger, now)
        self._db.executemany(
            "UPDATE request SET state = 1, due = ?, token = NULL, status = ?, at = ? WHERE id = ?",
            [(now + retry_in, failure.status, now, held.number) for held, failure, retry_in in waiting],
        )
        for held, failure, retry_in in waiting:
            detail = f"{failure.reason}; waits {retry_in:g} s"
            self._records.note(held.number, now, f"attempt {held.attempts} failed", detail)
        ledger.waiting += len(waiting)
        self._end([(held, failure.contacted) for held, failure, _ in waiting], ledger, now)
        return states

    def _die(
        self, dead: Sequence[tuple[_Held, Failure]], encoded: Mapping[int, bytes], ledger: Ledger, now: float
    ) -> None:
        new = self._new_children(((held, failure.children) for held, failure in dead), encoded)
        for held, failure in dead:
            self._db.execute(
                "UPDATE request SET state = 4, due = NULL, token = NULL, kind = ?, reason = ?, status = ?, items = ?,"
                " at = ? WHERE id = ?",
                (
                    storable(failure.kind), storable(failure.reason), failure.status,
                    held.items + len(failure.items), now, held.number,
                ),
            )  # fmt: skip
            self._records.note(held.number, now, f"attempt {held.attempts} failed", failure.reason)
        self._records.append([(held.fingerprint, held.items, failure.items) for held, failure in dead], ledger)
        self._add(new, ledger, now)
        ledger.duplicates += sum(len(failure.children) for _, failure in dead) - len(new)
        ledger.dead += len(dead)
        self._end([(held, failure.contacted) for held, failure in dead], ledger, now)

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        def step(ledger: Ledger, now: float) -> list[bool]:
            holders = self._ending(leases)
            self._give_back([held for held in holders if held], ledger, now, contacted=contacted)
            return [held is not None for held in holders]

        return await self._change(step)

    async def fence(self, slot: str, epoch: int) -> int:
        def step(ledger: Ledger, now: float) -> int:
            self._records.fence(slot, epoch)
            lost = [held for held in self._held.values() if is_fenced(held.holder, slot, epoch)]
            self._lose(lost, ledger, now)
            return len(lost)

        return await self._change(step)

    async def retry_dead(self, kinds: Sequence[str] | None = None) -> int:
        def step(ledger: Ledger, now: float) -> int:
            count = self._queue.revive(kinds, now)
            ledger.ready += count
            ledger.dead -= count
            return count

        return await self._change(step)

    # -- roles and items

    async def claim(self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b"") -> Claim | None:
        token = claim_token(nonce or new_nonce())
        return await self._change(lambda _, now: self._records.claim(role, now, now + ttl, holder, token))

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        return await self._change(lambda _, now: self._records.advance(claim, cursor, now + ttl))

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        return await self._change(lambda *_: self._records.relinquish(claim, finished=finished))

    async def roles(self) -> list[RoleState]:
        return await self._file.read(lambda: self._records.roles(self._clock()))

    async def read_items(self, after: int, limit: int, *, last: LoggedItem | None = None) -> list[LoggedItem]:
        return await self._file.read(lambda: self._records.read_items(after, limit))

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        await self._file.write(lambda: self._records.trim_items(through))

    # -- hosts

    async def update_host(self, host: str, update: HostUpdate) -> None:
        def step() -> None:
            known = self._hosts.load(host) if host == DEFAULT_HOST else self._queue.lane(host).host
            apply_update(self._hosts.by_name, known, update, self._clock())
            self._hosts.save([known])

        await self._file.write(step)

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """When the file was opened to be looked at, only requests of this run count as in flight."""

        def step() -> list[HostState]:
            if self._file.readonly:
                self._hosts.by_name.clear()
                self._load_queue()
            return self._queue.states(self._clock(), limit)

        return await self._file.read(step)

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        await self._change(lambda _, now: self._records.remember(key, value, now, now + ttl))

    async def recall(self, key: str) -> bytes | None:
        return await self._file.read(lambda: self._records.recall(key, self._clock()))

    # -- looking at it

    async def stats(self) -> Stats:
        return await self._file.read(self._records.stats)

    async def audit(self) -> Stats:
        return await self._file.read(self._records.audit)

    async def recover(self) -> Rewind | None:
        """None: one process has the file, so nobody sets it back meanwhile."""
        return None

    async def rewinds(self) -> list[Rewind]:
        return []

    async def find(self, request: Request) -> History | None:
        def step() -> History | None:
            if self._file.readonly:
                self._seen.load()
            number = self._seen.find(request.fingerprint()) or self._records.search(request.url)
            return None if number is None else self._records.history(number)

        return await self._file.read(step)

    async def dead_kinds(self) -> dict[str, int]:
        return await self._file.read(self._records.dead_kinds)

    async def dead(self) -> AsyncIterator[History]:
        last = 0
        while page := await self._file.read(partial(self._records.dead_page, last)):
            for _, history in page:
                yield history
            last = page[-1][0]

    async def close(self) -> None:
        """Nothing: the file belongs to the store."""
