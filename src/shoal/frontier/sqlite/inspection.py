"""Inspect a run in a SQLite file: its counters, the history of a request, the dead requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial

import msgspec

from shoal.frontier.faults import compare_counters, make_faults
from shoal.frontier.rules import (
    DONE,
    LEASED,
    SEED_ROLE,
    STATE_NAMES,
    WAITING,
    retry_reason,
    sought_fingerprint,
    sought_urls,
)
from shoal.frontier.sqlite.audit import find_faults, repair, trimmed_items
from shoal.frontier.sqlite.history import Histories
from shoal.frontier.sqlite.lanes import StoredLanes
from shoal.frontier.sqlite.roles import SQLiteRoles
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.frontier.sqlite.seen import Seen
from shoal.frontier.sqlite.stages import Stages
from shoal.http import Request
from shoal.ports import History, LeaseHolder, LeaseKey, LeaseOutcome, Rewind, Stats, Waits


class SQLiteInspection:
    """See `shoal.ports.Inspection`."""

    def __init__(
        self,
        run: RunFile,
        seen: Seen,
        lanes: StoredLanes,
        histories: Histories,
        roles: SQLiteRoles,
        stages: Stages,
        holders: Callable[[Collection[str]], list[LeaseHolder]],
    ) -> None:
        """``holders``: who has leased requests of hosts."""
        self._file = run
        self._seen = seen
        self._lanes = lanes
        self._histories = histories
        self._roles = roles
        self._stages = stages
        self._holders = holders

    async def stats(self) -> Stats:
        return await self._file.read(self._stats)

    def _stats(self) -> Stats:
        ledger = msgspec.structs.asdict(self._file.ledger())
        del ledger["newest"]
        return Stats(**ledger, trimmed=trimmed_items(self._file), seeding=not self._roles.is_finished(SEED_ROLE))

    async def audit(self) -> Stats:
        return await self._file.read(self._audit)

    def _audit(self) -> Stats:
        # With "+" SQLite uses no index: it counts the requests themselves, in the order of the file.
        sql = "SELECT state, count(*) FROM request WHERE +run = ? GROUP BY +state"
        counts = {STATE_NAMES[state]: count for state, count in self._file.db.execute(sql, (self._file.number,))}
        states = {name: counts.get(name, 0) for name in STATE_NAMES}
        stored = self._stats()
        counted = msgspec.structs.replace(stored, **states, incoming=self._stages.count())
        found = (*compare_counters(stored, counted, sum(states.values())), *find_faults(self._file))
        return msgspec.structs.replace(counted, faults=make_faults(found))

    async def repair(self) -> list[str]:
        def step() -> list[str]:
            lost = repair(self._file)
            self._file.file.restore()
            return lost

        return await self._file.file.write(step)

    async def waits(self, hosts: Sequence[str]) -> Waits:
        def read() -> Waits:
            holders, file = self._holders(frozenset(hosts)), self._file
            waiting = f"run = ? AND due IS NOT NULL AND state = {WAITING}"
            sql = f"SELECT id, due FROM request WHERE {waiting} ORDER BY due LIMIT 1"
            row = file.db.execute(sql, (file.number,)).fetchone()
            if row is None:
                return Waits(holders=holders)
            sql = "SELECT detail FROM event WHERE request = ? ORDER BY id DESC LIMIT 1"
            event = file.db.execute(sql, row[:1]).fetchone()
            detail = event[0] if event is not None else ""
            return Waits(holders=holders, retry_in=max(0.0, row[1] - file.clock()), retry_reason=retry_reason(detail))

        return await self._file.read(read)

    async def rewinds(self) -> list[Rewind]:
        return []

    # -- histories

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        def step() -> History | None:
            if self._file.file.readonly:
                self._seen.load()
            fingerprint = sought_fingerprint(request, parent)
            number = self._seen.find(fingerprint)
            if number is None and (staged := self._stages.find(fingerprint)):
                return staged
            if number is None and not exact:
                found = map(self._histories.search, sought_urls(request))
                number = next((number for number in found if number is not None), None)
            return None if number is None else self._histories.of(number)

        return await self._file.read(step)

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        sql = "SELECT state FROM request WHERE id = ? AND token = ?"
        names: dict[int, LeaseOutcome] = {DONE: "done", LEASED: "leased"}

        def step() -> list[LeaseOutcome]:
            if self._file.file.readonly:
                self._seen.load()
            rows = [
                self._file.db.execute(sql, (self._seen.find(lease.fingerprint), lease.token)).fetchone()
                for lease in leases
            ]
            return ["lost" if row is None else names.get(row[0], "lost") for row in rows]

        return await self._file.read(step)

    # -- dead requests

    async def dead_kinds(self) -> dict[str, int]:
        return await self._file.read(self._histories.dead_kinds)

    async def dead(self) -> AsyncIterator[History]:
        last = 0
        while page := await self._file.read(partial(self._histories.dead_page, last)):
            for _, history in page:
                yield history
            last = page[-1][0]

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        def step(ledger: Ledger, now: float) -> int:
            numbers = None if only is None else [each for each in map(self._seen.find, only) if each is not None]
            return self._lanes.retry_dead(kinds, numbers, ledger, now)

        return await self._file.change(step)
