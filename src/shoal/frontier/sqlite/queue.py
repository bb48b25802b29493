"""The queue of a run in a SQLite file: requests enter, are leased, and are completed, failed or released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from shoal.errors import DECODING_ERRORS
from shoal.frontier import rules
from shoal.frontier.receipts import release_if_cancelled
from shoal.frontier.rules import DEAD, DONE, STATE_NAMES, WAITING, E, MovedLinks, Portion
from shoal.frontier.sqlite.items import SQLiteItemLog, SQLiteRoles
from shoal.frontier.sqlite.lanes import NewRequest
from shoal.frontier.sqlite.leases import HeldLease, LeaseCall, Leases, storable
from shoal.frontier.sqlite.run_file import Ledger, RunFile, Seen
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Failure,
    History,
    Holder,
    Lease,
    Leased,
    Pushed,
    RequestState,
)
from shoal.system import clock

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Portion).decode
_decode = msgspec.msgpack.Decoder(Request).decode


class Stages:
    """The staged links of a run: a row for each portion, in order. See `shoal.frontier.rules`."""

    def __init__(
        self, run: RunFile, seen: Seen, add_links: Callable[[Sequence[NewRequest], Ledger, float], Counter[int | None]]
    ) -> None:
        """``add_links`` returns how many of the links were refused, by page."""
        self._run = run
        self._db = run.db
        self._seen = seen
        self._add_links = add_links
        self._movers = 0

    # -- within a transaction

    def add(self, parent: int, portions: Sequence[Portion], ledger: Ledger) -> None:
        """Stage the links of a page."""
        self._db.executemany(
            "INSERT INTO stage (run, parent, size, links) VALUES (?, ?, ?, ?)",
            ((self._run.number, parent, len(portion), _pack(portion)) for portion in portions),
        )
        ledger.incoming += sum(map(len, portions))

    def help(self, ledger: Ledger, now: float) -> None:
        """Move a portion of the first page, unless the calls that ended large pages do that themselves. They may be
        gone: cancelled, or killed with their process."""
        if ledger.incoming and not self._movers:
            self._move_portion(None, ledger, now)

    def _move_portion(self, parent: int | None, ledger: Ledger, now: float) -> MovedLinks | None:
        """Move a portion of this page, or of any page. None if nothing is staged."""
        row = self._db.execute(
            "SELECT id, parent, size, links FROM stage"
            " WHERE run = ?1 AND (?2 IS NULL OR parent = ?2) ORDER BY id LIMIT 1",
            (self._run.number, parent),
        ).fetchone()
        if row is None:
            return None
        number, parent, size, links = row
        try:
            portion = rules.first_of_each(_unpack(links))
            known = self._seen.known(portion)
            new = [
                NewRequest(fingerprint, _decode(payload), parent, payload)
                for fingerprint, payload in portion.items()
                if fingerprint not in known
            ]
        except DECODING_ERRORS as exc:
            raise self._run.file.damaged(f"the links of request {parent} can't be read: {exc!r}") from exc
        refused = self._add_links(new, ledger, now)[parent]
        self._db.execute("DELETE FROM stage WHERE id = ?", (number,))
        ledger.incoming -= size
        ledger.duplicates += size - len(new)
        return MovedLinks(len(new) - refused, refused)

    def find(self, fingerprint: bytes) -> History | None:
        """The history of a staged link. It reads all staged links, so it is only for inspection."""
        rows = self._db.execute(
            "SELECT s.links, r.payload FROM stage s JOIN request r ON r.id = s.parent"
            " WHERE s.run = ? AND instr(s.links, ?) > 0",
            (self._run.number, fingerprint),
        )
        for links, above in rows:
            payload = rules.first_of_each(_unpack(links)).get(fingerprint)
            if payload is not None:
                return rules.incoming_history(_decode(payload), _decode(above).url)
        return None

    def count(self) -> int:
        """The number of staged links, recounted."""
        sql = "SELECT coalesce(sum(size), 0) FROM stage WHERE run = ?"
        count: int = self._db.execute(sql, (self._run.number,)).fetchone()[0]
        return count

    # -- between transactions

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Use it around a call that stages and moves links. Meanwhile `help` does nothing, so that the call can count
        its links."""
        self._movers += 1
        try:
            yield
        finally:
            self._movers -= 1

    async def move(self, parent: int) -> MovedLinks:
        """Move all links of a page into the queue, each portion in its own transaction. If the caller is cancelled or
        killed, `help` continues."""
        moved = MovedLinks(0, 0)
        while (portion := await self._run.change(partial(self._move_portion, parent))) is not None:
            moved = moved.plus(portion)
        return moved


_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class SQLiteQueue:
    """See `shoal.ports.Queue`. Each call is one transaction, but a large page needs more: see `Stages`."""

    def __init__(
        self,
        run: RunFile,
        seen: Seen,
        leases: Leases,
        items: SQLiteItemLog,
        roles: SQLiteRoles,
        expire_others: Callable[[float], None],
        put_document: Callable[[str, bytes | None, bytes, bytes], bool],
    ) -> None:
        self.halted = False
        """The run is paused or cancelled: nothing is leased."""
        self._run = run
        self._db = run.db
        self._seen = seen
        self._lanes = leases.lanes
        self._leases = leases
        self._histories = leases.histories
        self._items = items
        self._roles = roles
        self._expire_others = expire_others
        self._put_document = put_document
        self.stages = Stages(run, seen, self._add_links)
        self._last_calls: dict[Holder | None, tuple[bytes, list[Lease]]] = {}
        """The nonce of the last lease call, and what it leased."""

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        def step(ledger: Ledger, now: float) -> Pushed:
            if seed is not None:
                if not self._roles.is_held(seed):
                    return Pushed(0, 0)
                self._roles.check_cursor(seed, cursor)
            names = (rules.push_fingerprint(request, seed, cursor, i) for i, request in enumerate(requests))
            new = self._select_new([(name, request, None) for name, request in zip(names, requests, strict=True)])
            rules.check_queue_size(self._run.options.max_queue_size, ledger.ready + ledger.waiting, len(new))
            self._add(new, ledger, now)
            ledger.duplicates += len(requests) - len(new)
            if seed is not None:
                self._roles.save_cursor(seed.role, cursor)
            return Pushed(len(new), len(requests) - len(new))

        return await self._run.change(step)

    def _select_new(self, offered: Sequence[tuple[bytes, Request, int | None]]) -> list[NewRequest]:
        """The requests that the run does not have yet, of (fingerprint, request, parent). RequestError if one cannot
        be encoded; nothing is changed."""
        known = self._seen.known({fingerprint for fingerprint, _, _ in offered})
        new = []
        for fingerprint, request, parent in offered:
            if fingerprint not in known:
                known.add(fingerprint)
                new.append(NewRequest(fingerprint, request, parent, rules.encode_request(request, _encode)))
        return new

    def _select_children(self, ended: Iterable[tuple[HeldLease, Completion | Failure]]) -> list[NewRequest]:
        offered: list[tuple[bytes, Request, int | None]] = [
            (rules.child_fingerprint(child, held.fingerprint, index), child, held.number)
            for held, page in ended
            for index, child in enumerate(page.children)
        ]
        return self._select_new(offered)

    def _add(self, new: Sequence[NewRequest], ledger: Ledger, now: float, refused: Collection[bytes] = ()) -> None:
        if new:
            numbers = self._lanes.add(new, now, refused)
            self._seen.add(numbers)
            ledger.newest = numbers[new[-1].fingerprint]
            ledger.pushed += len(new)
            ledger.ready += len(new) - len(refused)
            ledger.dead += len(refused)

    def _add_links(
        self, new: Sequence[NewRequest], ledger: Ledger, now: float, unlimited: Collection[int | None] = ()
    ) -> Counter[int | None]:
        """Add links of pages while there is room. ``unlimited``: pages whose links always enter. Returns how many were
        refused, by page."""
        room = rules.room_for_links(self._run.options.link_limit, ledger.ready + ledger.waiting)
        if room is None:
            self._add(new, ledger, now)
            return Counter()
        beyond = [link for link in new[room:] if link.parent not in unlimited]
        self._add(new, ledger, now, {link.fingerprint for link in beyond})
        return Counter(link.parent for link in beyond)

    # -- leasing

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, counts_attempt: bool = True, nonce: bytes = b""
    ) -> Leased:
        nonce = nonce or rules.new_nonce()
        rules.check_nonce(nonce)
        call = LeaseCall(min(limit, rules.MAX_LEASES), ttl, clock.now() + ttl, holder, counts_attempt, nonce)
        step = self._run.change(partial(self._lease, call))
        return await release_if_cancelled(step, self.release)

    def _lease(self, call: LeaseCall, ledger: Ledger, now: float) -> Leased:
        self._roles.check_holder(call.holder)
        until = now + call.ttl
        if (granted := self._granted_before(call)) is not None:
            renewed = self._leases.renew(granted, until, call.deadline)
            return Leased([lease for lease in renewed if lease], 0.0, cookies=self._run.cookies)
        self._expire_others(now)
        next_moment = self._leases.expire(now, ledger)
        if self.halted:
            return Leased([], None, cookies=self._run.cookies)
        self.stages.help(ledger, now)
        chosen = self._lanes.choose(call.limit, now)
        leases = self._leases.grant(chosen, call, ledger, now)
        self._last_calls[call.holder] = call.nonce, leases
        table = self._lanes.table
        table.called, table.asked = now, now if len(leases) < call.limit else 0.0
        incoming = now + rules.POLL if ledger.incoming else None
        moments = (next_moment, until if leases else None, table.next_due(), incoming)
        first = min((moment for moment in moments if moment is not None), default=None)
        return Leased(leases, None if first is None else max(0.0, first - now), cookies=self._run.cookies)

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        def put() -> int:
            if not self._put_document(*msgspec.structs.astuple(cookies)):
                return 0
            self._run.count_cookies()
            return self._run.cookies

        version = await self._run.file.write(put)
        if not version:
            return 0, []
        return version, await self.complete(completions) if completions else []

    def _granted_before(self, call: LeaseCall) -> list[Lease] | None:
        """What the same call leased before, if this is a repeat. The process that answered it may be gone."""
        if call.holder in self._last_calls:
            nonce, leases = self._last_calls[call.holder]
            return leases if nonce == call.nonce else None
        return None if call.holder is None else self._leases.granted_under(call) or None

    def expire_leases(self, now: float) -> None:
        """End leases that have run out. Call it within a transaction."""
        self._leases.expire(now)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        return await self._run.change(lambda _, now: self._leases.renew(leases, now + ttl, deadline))

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        rules.check_nonce(nonce)
        deadline = clock.now() + ttl
        step = self._run.change(lambda _, now: self._leases.reissue(leases, now + ttl, deadline, nonce))
        return await release_if_cancelled(step, self.release)

    # -- ending a lease

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        results, moved = await self._end(completions, self._complete)
        for place, links in moved.items():
            results[place] = rules.count_moved(completions[place], links)
        return results

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        states, _ = await self._end(failures, self._fail)
        return states

    async def _end(
        self, pages: Sequence[E], end: Callable[[Sequence[E], Ledger, float], list[T]]
    ) -> tuple[list[T], dict[int, MovedLinks]]:
        """End the leases of pages in one transaction, then move the links of large ones. Returns what ``end`` returns,
        and by position what became of the links of large pages."""
        small, staged = await rules.split_large(pages, _encode)
        if not staged:
            return await self._run.change(partial(end, pages)), {}

        def step(ledger: Ledger, now: float) -> tuple[list[T], dict[int, int]]:
            holders = self._leases.select_ending(page.lease for page in small)
            results = end(small, ledger, now)
            return results, self._stage(staged, holders, results, ledger)

        with self.stages.moving():
            results, parents = await self._run.change(step)
            return results, {place: await self.stages.move(parent) for place, parent in parents.items()}

    def _stage(
        self,
        staged: Mapping[int, list[Portion]],
        holders: Sequence[HeldLease | None],
        results: Sequence[object],
        ledger: Ledger,
    ) -> dict[int, int]:
        """Stage the links of the pages that ended done or dead. Returns the numbers of these pages."""
        parents = {}
        for place, portions in staged.items():
            held = holders[place]
            if held is not None and results[place] != STATE_NAMES[WAITING]:
                parents[place] = held.number
                self.stages.add(held.number, portions, ledger)
        return parents

    def _complete(self, completions: Sequence[Completion], ledger: Ledger, now: float) -> list[Pushed | None]:
        holders = self._leases.select_ending(page.lease for page in completions)
        done = [(held, page) for held, page in zip(holders, completions, strict=True) if held]
        stale = [page.lease for held, page in zip(holders, completions, strict=True) if not held]
        repeated = {lease.token for lease in stale if self._leases.has_completed(lease, self._seen)}
        new = self._select_children(done)
        self._db.executemany(
            f"UPDATE request SET state = {DONE}, due = NULL, status = ?, items = ?, at = ? WHERE id = ?",
            [(page.status, held.items + len(page.items), now, held.number) for held, page in done],
        )
        self._items.append([(held.fingerprint, held.items, page.items) for held, page in done], ledger)
        refused = self._add_links(new, ledger, now, {held.number for held, page in done if page.redirected})
        new_by_parent = Counter(child.parent for child in new)
        results: list[Pushed | None] = []
        for held, page in zip(holders, completions, strict=True):
            if held is None:
                results.append(Pushed(0, 0) if page.lease.token in repeated else None)
                continue
            new_ones, beyond = new_by_parent.get(held.number, 0), refused.get(held.number, 0)
            duplicates = len(page.children) - new_ones + page.duplicates
            results.append(Pushed(new_ones - beyond, duplicates, beyond))
            ledger.duplicates += duplicates
            ledger.redirects += page.redirected
            ledger.item_errors += page.item_errors
            if page.note:
                self._histories.add_event(held.number, now, rules.NOTE_EVENT, page.note, held.holder)
        ledger.done += len(done)
        self._leases.end([(held, page.contacted) for held, page in done], ledger, now)
        return results

    def _fail(self, failures: Sequence[Failure], ledger: Ledger, now: float) -> list[RequestState | None]:
        holders = self._leases.select_ending(failure.lease for failure in failures)
        states: list[RequestState | None] = []
        dead, waiting = [], []
        for held, failure in zip(holders, failures, strict=True):
            if held is None:
                states.append(None)
            elif failure.retry_in is None or held.attempts >= self._run.options.max_attempts:
                states.append("dead")
                dead.append((held, failure))
            else:
                states.append("waiting")
                waiting.append((held, failure, failure.retry_in))
        self._bury(dead, ledger, now)
        self._db.executemany(
            f"UPDATE request SET state = {WAITING}, due = ?, token = NULL, status = ?, at = ? WHERE id = ?",
            [(now + retry_in, failure.status, now, held.number) for held, failure, retry_in in waiting],
        )
        for held, failure, _ in waiting:
            event = rules.failure_event(held.attempts, failure, waits=True)
            self._histories.add_event(held.number, now, *event, held.holder)
        ledger.waiting += len(waiting)
        self._leases.end([(held, failure.contacted) for held, failure, _ in waiting], ledger, now)
        return states

    def _bury(self, dead: Sequence[tuple[HeldLease, Failure]], ledger: Ledger, now: float) -> None:
        new = self._select_children(dead)
        for held, failure in dead:
            self._db.execute(
                f"UPDATE request SET state = {DEAD}, due = NULL, token = NULL, kind = ?, reason = ?, status = ?,"
                " items = ?, at = ? WHERE id = ?",
                (
                    storable(failure.kind),
                    storable(failure.reason),
                    failure.status,
                    held.items + len(failure.items),
                    now,
                    held.number,
                ),
            )
            event = rules.failure_event(held.attempts, failure, waits=False)
            self._histories.add_event(held.number, now, *event, held.holder)
        self._items.append([(held.fingerprint, held.items, failure.items) for held, failure in dead], ledger)
        self._add_links(new, ledger, now)
        ledger.duplicates += sum(len(failure.children) for _, failure in dead) - len(new)
        ledger.item_errors += sum(failure.item_errors for _, failure in dead)
        ledger.dead += len(dead)
        self._leases.end([(held, failure.contacted) for held, failure in dead], ledger, now)

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        def step(ledger: Ledger, now: float) -> list[bool]:
            ending = self._leases.select_ending(leases)
            self._leases.release([held for held in ending if held], ledger, now, contacted=contacted)
            return [held is not None for held in ending]

        return await self._run.change(step)

    async def fence(self, slot: str, epoch: int) -> int:
        def step(ledger: Ledger, now: float) -> int:
            self._roles.fence(slot, epoch)
            lost = self._leases.fenced(slot, epoch)
            self._leases.lose(lost, ledger, now)
            return len(lost)

        return await self._run.change(step)
