"""The frontier of a run in a PostgreSQL database.

Whatever changes something is one function in the database (``functions/*.sql``), called for a whole batch: one round
trip, one transaction. Nothing is kept here, so any number of workers do the same at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import asyncpg
import msgspec
from msgspec import UNSET

from shoal.errors import QueueFullError, RunError
from shoal.frontier.postgres.columns import Endings, Offered, first_places, storable, tokens_of
from shoal.frontier.postgres.connection import Database
from shoal.frontier.rules import SPARED_KINDS, STATE_NAMES, check_nonce, push_fingerprint
from shoal.frontier.servertime import ServerTime
from shoal.frontier.unheard import heard
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
    RoleState,
    Stats,
)

log = logging.getLogger("shoal.frontier")

UNREADABLE = "unreadable"
"""The kind of death of a request that something else wrote."""
_MOST = 100_000
_PAGE = 100
_decode = msgspec.msgpack.Decoder(Request).decode
_pack = msgspec.msgpack.Encoder().encode


class PostgresFrontier:
    """See `shoal.ports.Frontier`."""

    def __init__(
        self,
        database: Database,
        run: int,
        options: FrontierOptions,
        offset: Callable[[], float],
        holder: Holder | None = None,
    ) -> None:
        self._database = database
        self._run = run
        self._options = options
        self._offset = offset
        """Seconds to add to the server's clock: 0 but in tests."""
        self._holder = (None, None) if holder is None else (storable(holder.slot), holder.epoch)
        self._time = ServerTime(database.address.timeout)
        self._told = False

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        offered = Offered()
        offered.add(1, ((push_fingerprint(each, seed, cursor, i), each) for i, each in enumerate(requests)))
        role = (None, None, None) if seed is None else (storable(seed.role), seed.token, cursor)
        try:
            added: int | None = await self._database.value(
                "push", self._run, self._offset(), self._options.max_queue_size, *role, *offered.as_push()
            )
        except QueueFullError as exc:
            most = self._options.max_queue_size
            raise QueueFullError(f"the queue holds its maximum of {most} requests; nothing was pushed") from exc
        return Pushed(0, 0) if added is None else Pushed(added, len(requests) - added)

    # -- leasing

    async def lease(self, limit: int, ttl: float, *, begun: bool = True) -> Leased:
        return await heard(self._lease(min(limit, _MOST), ttl, begun), lambda leased: self.release(leased.leases))

    async def _lease(self, limit: int, ttl: float, begun: bool) -> Leased:
        if not self._told:
            options = self._options
            told = options.max_attempts, float(options.delay), options.concurrency_per_host
            await self._database.call("set_options", self._run, *told)
            self._told = True
        while True:
            sent, late = time.monotonic(), False
            deadline = sent + ttl
            rows = await self._database.call(
                "lease", self._run, self._offset(), limit, ttl, self._time.not_after, *self._holder, begun
            )
            wait: float | None = None
            leases: list[Lease] = []
            unreadable = Endings()
            for token, fingerprint, payload, attempt, host, learned_delay, moment in rows:
                if token is None:
                    wait, late = moment, bool(attempt)
                    self._time.heard(sent, learned_delay)
                    continue
                try:
                    request = _decode(payload)
                except (msgspec.MsgspecError, ValueError) as exc:
                    self._report(unreadable, token, fingerprint, exc)
                else:
                    leases.append(Lease(request, fingerprint, token, attempt, host, deadline, learned_delay))
            if unreadable.places:
                await self._end(unreadable)
            if leases or not (unreadable.places or late):  # late: the server's clock has jumped, and is known now
                return Leased(leases, wait)

    def _report(self, unreadable: Endings, token: int, fingerprint: bytes, exc: Exception) -> None:
        log.warning("the request %s can't be read (%s); something else wrote it", fingerprint.hex(), exc)
        nothing = Lease(Request("http://unreadable.invalid/"), fingerprint, token, 0, "", 0.0)
        unreadable.bury(nothing, UNREADABLE, f"what is stored of it is no request: {exc}")

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        if not leases:
            return []
        deadline = time.monotonic() + ttl
        rows = await self._database.call("renew", self._run, self._offset(), *tokens_of(leases), ttl)
        kept = {leases[row[0] - 1].token for row in rows}
        return [msgspec.structs.replace(lease, deadline=deadline) if lease.token in kept else None for lease in leases]

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        check_nonce(nonce)
        if not leases:
            return []
        # Whoever had the old tokens may have begun.
        return await heard(
            self._reissue(leases, ttl, nonce),
            lambda anew: self.release([lease for lease in anew if lease], contacted=True),
        )

    async def _reissue(self, leases: Sequence[Lease], ttl: float, nonce: bytes) -> list[Lease | None]:
        deadline = time.monotonic() + ttl
        places = first_places(leases)
        columns = tokens_of(leases[place] for place in places)
        rows = await self._database.call("reissue", self._run, self._offset(), *columns, ttl, nonce)
        reissued: list[Lease | None] = [None] * len(leases)
        for nth, token in rows:
            place = places[nth - 1]
            reissued[place] = msgspec.structs.replace(leases[place], token=token, deadline=deadline)
        return reissued

    # -- ending a lease

    async def _end(self, endings: Endings) -> dict[int, tuple[int, int]]:
        """By place in the batch, the new state and how many children were new; without those that were lost."""
        if not endings.places:
            return {}
        rows = await self._database.call("finish", self._run, self._offset(), *endings.as_arguments())
        return {endings.places[nth - 1]: (state, added) for nth, state, added in rows}

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        endings = Endings()
        for place, page in enumerate(completions):
            endings.add(place, page)
        ended = await self._end(endings)
        return [
            Pushed(ended[place][1], len(page.children) - ended[place][1] + page.duplicates) if place in ended else None
            for place, page in enumerate(completions)
        ]

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        endings = Endings()
        for place, failure in enumerate(failures):
            endings.add(place, failure)
        ended = await self._end(endings)
        return [STATE_NAMES[ended[place][0]] if place in ended else None for place in range(len(failures))]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        if not leases:
            return []
        places = first_places(leases)
        columns = tokens_of(leases[place] for place in places)
        rows = await self._database.call("release", self._run, self._offset(), *columns, contacted)
        given = {places[row[0] - 1] for row in rows}
        return [place in given for place in range(len(leases))]

    async def fence(self, slot: str, epoch: int) -> int:
        count: int = await self._database.value("fence", self._run, self._offset(), storable(slot), epoch)
        return count

    async def retry_dead(self, kinds: Sequence[str] | None = None) -> int:
        chosen = [storable(kind) for kind in (SPARED_KINDS if kinds is None else kinds)]
        count: int = await self._database.value(
            "retry_dead", self._run, self._offset(), chosen, kinds is None, patient=True
        )
        return count

    # -- roles and items

    async def claim(self, role: str, ttl: float) -> Claim | None:
        rows = await self._database.call("claim", self._run, self._offset(), storable(role), ttl, *self._holder)
        return Claim(role, rows[0][0], rows[0][1]) if rows else None

    async def advance(self, claim: Claim, cursor: bytes, ttl: float) -> bool:
        kept: bool = await self._database.value(
            "advance", self._run, self._offset(), storable(claim.role), claim.token, cursor, ttl
        )
        return kept

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        kept: bool = await self._database.value("relinquish", self._run, storable(claim.role), claim.token, finished)
        return kept

    async def roles(self) -> list[RoleState]:
        rows = await self._database.call("roles", self._run, self._offset())
        return [RoleState(role=row[0], cursor=row[1], held=row[2], finished=row[3]) for row in rows]

    async def read_items(self, after: int, limit: int) -> list[LoggedItem]:
        return [LoggedItem(*row) for row in await self._database.call("read_items", self._run, after, limit)]

    async def trim_items(self, through: int) -> None:
        await self._database.call("trim_items", self._run, through, patient=True)

    # -- hosts

    async def update_host(self, host: str, update: HostUpdate) -> None:
        values = (update.delay, update.concurrency, update.crawl_delay, update.learned_delay, update.block_for)
        changes = [part for value in values for part in (value is not UNSET, None if value is UNSET else value)]
        await self._database.call(
            "update_host", self._run, self._offset(), storable(host), *changes, storable(update.block_reason)
        )

    async def host_states(self, limit: int = 100) -> list[HostState]:
        rows = await self._database.call("host_states", self._run, self._offset(), min(limit, _MOST))
        return [self._state(row) for row in rows]

    def _state(self, row: asyncpg.Record) -> HostState:
        host, own, everyone, crawl, learned, concurrency, in_flight, ready, blocked_for, reason = row
        delay, why = max(
            (own, "set for this host") if own is not None
            else (everyone, "set for all hosts") if everyone is not None
            else (self._options.delay, "download_delay"),
            (crawl or 0.0, "robots.txt Crawl-delay"),
            (learned or 0.0, "learned from its answers"),
            key=lambda pair: pair[0],
        )  # fmt: skip
        many = self._options.concurrency_per_host if concurrency is None else concurrency
        return HostState(
            host=host, delay=delay, why=why if delay else "no delay", concurrency=1 if delay > 0 else many,
            in_flight=in_flight, ready=ready, blocked_for=blocked_for, block_reason=reason if blocked_for else "",
        )  # fmt: skip

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        await self._database.call("remember", self._offset(), key.encode(errors="surrogatepass"), value, ttl)

    async def recall(self, key: str) -> bytes | None:
        value: bytes | None = await self._database.value("recall", self._offset(), key.encode(errors="surrogatepass"))
        return value

    # -- looking at it

    async def stats(self) -> Stats:
        return self._stats(await self._database.call("stats", self._run))

    async def audit(self) -> Stats:
        return self._stats(await self._database.call("audit", self._run, patient=True))

    @staticmethod
    def _stats(rows: Sequence[asyncpg.Record]) -> Stats:
        if not rows:
            raise RunError("the run was deleted")
        return Stats(**dict(rows[0]))

    async def is_finished(self) -> bool:
        stats = await self.stats()
        return not (stats.remaining or stats.seeding)

    async def find(self, request: Request) -> History | None:
        number = await self._database.value("find", self._run, request.fingerprint())
        if number is None:
            named = b"\xa3url" + _pack(request.url)
            number = await self._database.value("search", self._run, named, patient=True)
        if number is None:
            return None
        rows = await self._database.call("history", number, patient=True)
        return _history(rows[0]) if rows else None

    async def dead_kinds(self) -> dict[str, int]:
        return {row[0]: row[1] for row in await self._database.call("dead_kinds", self._run, patient=True)}

    async def dead(self) -> AsyncIterator[History]:
        last = 0
        while rows := await self._database.call("dead_page", self._run, last, _PAGE):
            for row in rows:
                yield _history(row)
            last = rows[-1][0]

    async def close(self) -> None:
        """Nothing: the connections belong to the store."""


def _read(payload: bytes | None) -> Request | None:
    try:
        return None if payload is None else _decode(payload)
    except (msgspec.MsgspecError, ValueError):
        return None


def _history(row: asyncpg.Record) -> History:
    _, state, attempts, status, items, at, reason, payload, above, *columns = row
    request, parent = _read(payload), _read(above)
    events: list[Any] = list(zip(*(column or () for column in columns), strict=True))
    return History(
        url=request.url if request else "(unreadable)", state=STATE_NAMES[state],
        depth=request.depth if request else 0, priority=request.priority if request else 0.0, attempts=attempts,
        status=status, items=items, parent=parent.url if parent else None, reason=reason,
        events=(*(Event(*event) for event in events), Event(at, STATE_NAMES[state])),
    )  # fmt: skip
