"""The frontier of a run in a PostgreSQL database.

Each call is one function in the database (``functions/*.sql``) for a whole batch: one round trip, one transaction. Many
workers may call them at the same time. The process keeps only receipts, to notice a store that went back in
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import asyncpg
import msgspec
from msgspec import UNSET

from shoal.clients.postgres import PostgresClient, storable_text
from shoal.errors import DECODING_ERRORS, QueueFullError, RunError, StoreAwayError
from shoal.frontier import rules
from shoal.frontier.faults import compare_counters, describe_losses, make_faults
from shoal.frontier.host_policy import Delays, Limits, RivalDelay, host_state
from shoal.frontier.postgres.columns import (
    ALREADY_DONE,
    LOST,
    EndingColumns,
    RequestColumns,
    first_places,
    read_request,
    tokens_of,
)
from shoal.frontier.receipts import Receipts, ServerClock, release_if_cancelled
from shoal.frontier.rules import DONE, LEASED, STATE_NAMES, MovedLinks
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Event,
    Failure,
    FrontierOptions,
    Heartbeat,
    History,
    Holder,
    HostState,
    HostUpdate,
    Lease,
    Leased,
    LeaseHolder,
    LeaseKey,
    LeaseOutcome,
    LoggedItem,
    Pushed,
    RequestState,
    Rewind,
    RoleState,
    SilentWorker,
    Stats,
    Waits,
    WorkerState,
)
from shoal.ports.documents import check_document
from shoal.system import clock
from shoal.urls.normalize import host_of


def _read(url: str, payload: bytes) -> Request | None:
    try:
        return read_request(url, payload)
    except (ValueError, *DECODING_ERRORS):
        return None


def history_of(row: asyncpg.Record) -> History:
    """The history of a request, from a row of `histories`."""
    state, attempts, status, items, at, kind, reason, worker, fingerprint, url, payload, parent, *columns = row
    request = _read(url, payload)
    events = [rules.read_event(*event) for event in zip(*(column or () for column in columns), strict=True)]
    return History(
        url=url, state=STATE_NAMES[state], depth=request.depth if request else 0,
        priority=request.priority if request else 0.0, attempts=attempts, status=status, items=items, parent=parent,
        reason=reason, events=(*events, Event(at, STATE_NAMES[state], worker=worker)),
        worker=worker, fingerprint=fingerprint, kind=kind or "",
    )  # fmt: skip


log = logging.getLogger("shoal.frontier")

_PAUSE = 0.01
_ITEMS = "item log"
_MAX_HOSTS = 100_000
_PAGE = 100
_NONE_MOVED = MovedLinks(0, 0)
_NO_COOKIES = (None,) * 4
_COMPARED = ("pushed", *STATE_NAMES, "incoming")
"""The stored counters that an audit returns, in order."""


class PostgresFrontier:
    """See `shoal.ports.Frontier`."""

    def __init__(
        self,
        database: PostgresClient,
        run: int,
        options: FrontierOptions | None,
        offset: Callable[[], float],
        holder: Holder | None = None,
    ) -> None:
        """``options``: those of the run from ``join`` on. None: it is only looked at."""
        self._database = database
        self._run = run
        self._options = options
        self._offset = offset
        """Seconds to add to the server's clock, for tests."""
        self._holder: tuple[str | None, int | None] = (None, None)
        if holder is not None:
            self.hold(holder)
        self._time = ServerClock(database.address.timeout)
        self._has_joined = False
        self._receipts = Receipts[tuple[int, int]]()
        self._recovering = asyncio.Lock()

    def hold(self, holder: Holder) -> None:
        self._holder = storable_text(holder.slot), holder.epoch

    @property
    def _proof(self) -> tuple[int | None, int | None]:
        """The request and token to present."""
        return self._receipts.proof or (None, None)

    async def join(self) -> None:
        """Set the options of the run, once, and again after a rewind. Does nothing if it is only looked at."""
        options = self._options
        if options is not None and not self._has_joined:
            values = options.max_attempts, float(options.delay), options.concurrency_per_host, options.link_limit
            await self._database.call("set_options", self._run, *values, float(options.weight))
            self._has_joined = True

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        offered = RequestColumns()
        offered.add(1, ((rules.push_fingerprint(r, seed, cursor, i), r) for i, r in enumerate(requests)))
        role = (None,) * 4 if seed is None else (storable_text(seed.role), seed.token, seed.cursor, cursor)
        most = None if self._options is None else self._options.max_queue_size
        try:
            with self._receipts.watch("" if seed is None else seed.role, proven=True) as call:
                added: int | None = await self._database.value(
                    "push", self._run, self._offset(), *self._proof, most, *role, *offered.as_push()
                )
        except QueueFullError as exc:
            raise rules.queue_full(most) from exc
        if seed is not None and added is not None:
            self._receipts.confirmed(call, seed.role)
        return Pushed(0, 0) if added is None else Pushed(added, len(requests) - added)

    # -- leasing

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        base = rules.token_base(nonce or rules.new_nonce())
        call = self._lease(min(limit, rules.MAX_LEASES), ttl, counts_attempt, base, bool(nonce))
        return await release_if_cancelled(call, self.release)

    async def _lease(self, limit: int, ttl: float, counts_attempt: bool, base: int, repeat: bool) -> Leased:
        await self.join()
        used = 0
        while True:
            sent = clock.now()
            deadline = sent + ttl
            with self._receipts.watch(proven=True):
                (row,) = await self._database.call(
                    "lease", self._run, self._offset(), *self._proof, limit, ttl, base, used, repeat,
                    self._time.not_after, *self._holder, counts_attempt,
                )  # fmt: skip
            *columns, late, server, wait, incoming, poll_after, cookies = row
            self._time.observe(sent, server)
            leases: list[Lease] = []
            unreadable = EndingColumns()
            for token, fingerprint, url, payload, attempt, learned_delay in zip(*map(_entries, columns), strict=True):
                try:
                    request = read_request(url, payload)
                except (ValueError, *DECODING_ERRORS) as exc:
                    self._report(unreadable, token, fingerprint, exc)
                else:
                    leases.append(Lease(request, fingerprint, token, attempt, host_of(url), deadline, learned_delay))
            if unreadable.places:
                await self._end(unreadable)
                # Skip their tokens, so that a repeat of this call finds the readable leases.
                used += len(unreadable.places)
                limit = min(limit, rules.MAX_LEASES - used)
            moved = bool(incoming) and await self._help()
            # If the call was late because the server's clock has jumped, try again: now its time is known.
            if leases or not limit or not (unreadable.places or late or moved):
                return Leased(leases, wait, poll_after or 0.0, cookies or 0)

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        check_document(cookies.key, cookies.value, cookies.version)
        words = (cookies.key.encode(), cookies.value, cookies.replaces, cookies.version)
        if completions:
            stored, pushed = await self._complete(completions, words)
            return stored, pushed if stored else []
        return int(await self._database.value("store_cookies", self._run, *words)), []

    def _report(self, unreadable: EndingColumns, token: int, fingerprint: bytes, exc: Exception) -> None:
        log.warning("cannot read request %s (%s): another program wrote it", fingerprint.hex(), exc)
        nothing = Lease(Request("http://unreadable.invalid/"), fingerprint, token, 0, "", 0.0)
        unreadable.bury(nothing, rules.UNREADABLE, f"cannot read its record in PostgreSQL: {exc}")

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        self._receipts.check()
        if not leases:
            return []
        deadline = clock.now() + ttl
        rows = await self._database.call("renew", self._run, self._offset(), *tokens_of(leases), ttl)
        held = {leases[row[0] - 1].token for row in rows}
        return [msgspec.structs.replace(lease, deadline=deadline) if lease.token in held else None for lease in leases]

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        self._receipts.check()
        anew = [rules.reissued_token(nonce, lease.token) for lease in leases]
        if not leases:
            return []
        return await release_if_cancelled(self._reissue(leases, anew, ttl), self.release)

    async def _reissue(self, leases: Sequence[Lease], anew: Sequence[int], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        places = first_places(leases)
        old, fingerprints = tokens_of(leases[place] for place in places)
        new = [anew[place] for place in places]
        rows = await self._database.call("reissue", self._run, self._offset(), old, new, fingerprints, ttl)
        reissued: list[Lease | None] = [None] * len(leases)
        for (nth,) in rows:
            place = places[nth - 1]
            reissued[place] = msgspec.structs.replace(leases[place], token=anew[place], deadline=deadline)
        return reissued

    # -- ending a lease

    async def _end(
        self, endings: EndingColumns, cookies: Sequence[object] = _NO_COOKIES
    ) -> tuple[int, dict[int, tuple[int, MovedLinks]]]:
        """End leases, and write ``cookies`` in the same step. Returns their version, and by position in the batch the
        new state and what became of the children, without lost leases."""
        if not endings.places:
            return 0, {}
        with self._receipts.watch(proven=True) as call:
            for page in endings.staged.values():
                await self._upload(page.lease, page.children)
            (row,) = await self._database.call(
                "finish", self._run, self._offset(), *self._proof, *cookies, *endings.as_arguments()
            )
        states, added, refused, first, number, incoming, order, cookie_version = row
        if states is None:
            return 0, {}
        if first is not None:
            self._receipts.completed(call, order, (number, endings.tokens[first - 1]))
        links = (_NONE_MOVED,) * len(states) if added is None else map(MovedLinks, added, refused)
        ended = zip(endings.places, states, links, strict=True)
        result = {place: (state, moved) for place, state, moved in ended if state != LOST}
        for place, page in endings.staged.items():
            state, _ = result.get(place, (0, None))
            if state > 1:  # done or dead
                result[place] = (state, await self._move_links(page.lease.token))
        if incoming and not endings.staged:  # staged links of other pages
            await self._help()
        return cookie_version or 0, result

    # The links of very large pages are uploaded before the completion, and moved into the queue after it, step by step.

    async def _upload(self, lease: Lease, children: Sequence[Request]) -> None:
        """Upload the links of a page, so that its completion can refer to them. If the lease ends without a completion,
        they are deleted."""
        parent = lease.fingerprint
        links = ((rules.child_fingerprint(child, parent, index), child) for index, child in enumerate(children))
        for number in range(-(-len(children) // rules.CHUNK)):
            offered = RequestColumns()
            offered.add(1, islice(links, rules.CHUNK))
            stored = await self._database.value("upload", self._run, lease.token, parent, number, *offered.as_push())
            if not stored:  # the lease was lost, or an earlier completion succeeded: the completion reports it
                return

    async def _move_links(self, token: int) -> MovedLinks:
        """Move all links of this completion into the queue. If this process dies, others continue."""
        before = -1
        while True:
            rows = await self._database.call("move_chunk", self._run, self._offset(), token)
            remaining, added, refused = rows[0] if rows else (0, 0, 0)
            if not remaining:
                return MovedLinks(added, refused)
            await asyncio.sleep(_PAUSE if remaining == before else 0)  # another client moves the next chunk
            before = remaining

    async def _help(self) -> bool:
        """Move links that other clients left behind. Returns whether there were any. Ignores an outage."""
        with suppress(StoreAwayError):
            return bool(await self._database.call("move_chunk", self._run, self._offset(), None))
        return False

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        return (await self._complete(completions, _NO_COOKIES))[1]

    async def _complete(
        self, completions: Sequence[Completion], cookies: Sequence[object]
    ) -> tuple[int, list[Pushed | None]]:
        endings = EndingColumns()
        for place, page in enumerate(completions):
            endings.add(place, page)
        version, ended = await self._end(endings, cookies)
        pushed = [_pushed(page, *ended[place]) if place in ended else None for place, page in enumerate(completions)]
        return version, pushed

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        endings = EndingColumns()
        for place, failure in enumerate(failures):
            endings.add(place, failure)
        _, ended = await self._end(endings)
        return [STATE_NAMES[ended[place][0]] if place in ended else None for place in range(len(failures))]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        self._receipts.check()
        if not leases:
            return []
        places = first_places(leases)
        columns = tokens_of(leases[place] for place in places)
        with self._receipts.watch(proven=True):
            rows = await self._database.call("release", self._run, self._offset(), *self._proof, *columns, contacted)
        released = {places[row[0] - 1] for row in rows}
        return [place in released for place in range(len(leases))]

    async def fence(self, slot: str, epoch: int) -> int:
        count: int = await self._database.value("fence", self._run, self._offset(), storable_text(slot), epoch)
        return count

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        chosen = [storable_text(kind) for kind in (rules.KINDS_NOT_RETRIED if kinds is None else kinds)]
        count: int = await self._database.value(
            "retry_dead", self._run, self._offset(), chosen, kinds is None, only, patient=True
        )
        return count

    # -- workers

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        due: float | None = await self._database.value(
            "beat", self._run, self._offset(), storable_text(heartbeat.worker), heartbeat.epoch, heartbeat.session,
            heartbeat.pid, storable_text(heartbeat.machine),
        )  # fmt: skip
        return due

    async def fence_silent(self) -> list[SilentWorker]:
        """See `shoal.ports.Workers`. One step for each worker."""
        fenced: list[SilentWorker] = []
        while rows := await self._database.call("fence_silent", self._offset()):
            fenced += [SilentWorker(*row) for row in rows]
        return fenced

    async def leave(self, worker: str, epoch: int) -> None:
        await self._database.call("leave", self._run, storable_text(worker), epoch)

    async def workers(self) -> list[WorkerState]:
        rows = await self._database.call("workers", self._run, self._offset())
        return [WorkerState(**dict(row)) for row in rows]

    # -- roles and items

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"", above: int = 0) -> Claim | None:
        call = self._receipts.begin()
        token = rules.claim_token(nonce or rules.new_nonce())
        words = (self._run, self._offset(), storable_text(role), token, ttl, above, *self._holder)
        rows = await self._database.call("claim", *words)
        if not rows:
            return None
        self._receipts.confirmed(call, role)
        return Claim(role, token, *rows[0])

    async def forget(self, role: str) -> bool:
        self._receipts.check()
        is_gone: bool = await self._database.value("forget_role", self._run, self._offset(), storable_text(role))
        return is_gone

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        with self._receipts.watch(claim.role) as call:
            is_held: bool = await self._database.value(
                "advance", self._run, self._offset(), storable_text(claim.role), claim.token, claim.cursor, cursor, ttl,
                *_known(last),
            )  # fmt: skip
        if is_held:
            self._receipts.confirmed(call, claim.role)
        return is_held

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        with self._receipts.watch(claim.role):
            is_held: bool = await self._database.value(
                "relinquish", self._run, storable_text(claim.role), claim.token, claim.cursor, finished
            )
        return is_held

    async def roles(self) -> list[RoleState]:
        rows = await self._database.call("roles", self._run, self._offset())
        return [RoleState(**row) for row in rows]

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        with self._receipts.watch(_ITEMS) as call:
            rows = await self._database.call("read_items", self._run, after, max(0, limit), *_known(last), max_bytes)
        self._receipts.confirmed(call, _ITEMS)
        return [LoggedItem(*row) for row in rows]

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        seen_cursors = cursors or {}
        roles = [storable_text(role) for role in seen_cursors]
        await self._database.call("trim_items", self._run, through, roles, list(seen_cursors.values()), patient=True)

    # -- hosts

    async def update_host(self, host: str, update: HostUpdate) -> None:
        values = (update.delay, update.concurrency, update.crawl_delay, update.learned_delay, update.block_for)
        changes = [part for value in values for part in (value is not UNSET, None if value is UNSET else value)]
        await self._database.call(
            "update_host", self._run, self._offset(), storable_text(host), *changes, storable_text(update.block_reason)
        )

    async def host_states(self, limit: int = 100) -> list[HostState]:
        rows = await self._database.call("host_states", self._run, self._offset(), min(limit, _MAX_HOSTS))
        return [_host_state(*row) for row in rows]

    async def host_state(self, host: str) -> HostState:
        (row,) = await self._database.call("host_state", self._run, self._offset(), storable_text(host))
        return _host_state(*row)

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        await self._database.call("remember", self._offset(), key.encode(errors="surrogatepass"), value, ttl)

    async def recall(self, key: str) -> bytes | None:
        value: bytes | None = await self._database.value("recall", self._offset(), key.encode(errors="surrogatepass"))
        return value

    # -- inspection

    async def stats(self) -> Stats:
        stats = Stats(**_counters(await self._database.call("stats", self._run)))
        if stats.rewinds or not self._receipts.has_recorded:
            return stats
        # The record was lost in another rewind.
        await self._database.call("record_rewind", self._run, self._offset(), None, [], [], [])
        return Stats(**_counters(await self._database.call("stats", self._run)))

    async def audit(self) -> Stats:
        columns = _counters(await self._database.call("audit", self._run, patient=True))
        counters, *faults = (columns.pop(name) for name in ("stored", "kinds", "counts", "examples"))
        counted = Stats(**columns)
        stored = msgspec.structs.replace(counted, **dict(zip(_COMPARED, counters, strict=True)))
        all_faults = (*compare_counters(stored, counted, counted.pushed), *zip(*faults, strict=True))
        return msgspec.structs.replace(counted, faults=make_faults(all_faults))

    async def repair(self) -> list[str]:
        rows = await self._database.call("missing_hosts", self._run, patient=True)
        hosts, names = [row[0] for row in rows], [storable_text(host_of(row[1])) for row in rows]
        lost = await self._database.call("repair", self._run, self._offset(), hosts, names, patient=True)
        return describe_losses((row[0], row[1]) for row in lost)

    async def recover(self) -> Rewind | None:
        async with self._recovering:
            notice = self._receipts.notice
            if notice is None:
                return None
            age = None if notice.age is None else clock.now() - notice.at + notice.age
            ages = self._receipts.ages()
            rows = await self._database.call(
                "record_rewind", self._run, self._offset(), age, [seconds for seconds, _ in ages],
                [number for _, (number, _) in ages], [token for _, (_, token) in ages],
            )  # fmt: skip
            self._receipts.clear()
            self._has_joined = False  # the options may have gone back too
            return Rewind(at=rows[0][0], lost_seconds=rows[0][1])

    async def rewinds(self) -> list[Rewind]:
        rows = await self._database.call("rewinds", self._run)
        return [Rewind(at=row[0], lost_seconds=row[1]) for row in rows]

    async def waits(self, hosts: Sequence[str]) -> Waits:
        retries = await self._database.call("next_retry", self._run, self._offset())
        names = [storable_text(host) for host in hosts]
        rows = await self._database.call("lease_holders", self._offset(), names) if names else []
        holders = [LeaseHolder(**dict(row)) for row in rows]
        if not retries:
            return Waits(holders=holders)
        return Waits(holders=holders, retry_in=retries[0][0], retry_reason=rules.retry_reason(retries[0][1]))

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        fingerprint = rules.sought_fingerprint(request, parent)
        number = await self._database.value("find", self._run, fingerprint)
        if number is None:
            staged = await self._database.call("find_staged", self._run, fingerprint, patient=True)
            if staged:
                url, payload, above = staged[0]
                link = _read(url, payload)
                return None if link is None else rules.incoming_history(link, above)
            if exact:
                return None
            for url in rules.sought_urls(request):
                if (number := await self._database.value("search", self._run, url, patient=True)) is not None:
                    break
        if number is None:
            return None
        return next(iter(await self._histories([number])), None)

    async def _histories(self, numbers: Sequence[int]) -> list[History]:
        return [history_of(row) for row in await self._database.call("histories", numbers, patient=True)]

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        keys = [lease.fingerprint for lease in leases], [lease.token for lease in leases]
        rows = await self._database.call("lease_outcomes", self._run, *keys, patient=True)
        names: dict[int, LeaseOutcome] = {DONE: "done", LEASED: "leased"}
        return [names.get(row[0], "lost") for row in rows]

    async def dead_kinds(self) -> dict[str, int]:
        return {row[0]: row[1] for row in await self._database.call("dead_kinds", self._run, patient=True)}

    async def dead(self) -> AsyncIterator[History]:
        last = 0
        while numbers := await self._database.value("dead_page", self._run, last, _PAGE):
            for history in await self._histories(numbers):
                yield history
            last = numbers[-1]

    async def close(self) -> None:
        """Does nothing: the connections belong to the store."""


def _counters(rows: Sequence[asyncpg.Record]) -> dict[str, Any]:
    """The columns of the only row. RunError if there is none: the run has no counters."""
    if not rows:
        raise RunError("the run was deleted, or its counters are missing: `shoal audit --repair` counts them again")
    return dict(rows[0])


def _pushed(page: Completion, state: int, links: MovedLinks) -> Pushed:
    return Pushed(0, 0) if state == ALREADY_DONE else rules.count_moved(page, links)


def _host_state(
    host: str, delays: Delays, limits: Limits, in_flight: int, ready: int, blocked_for: float, reason: str,
    rival_delay: float | None, rival: str | None,
) -> HostState:  # fmt: skip
    return host_state(
        host, delays, limits, rival=None if rival_delay is None else RivalDelay(rival_delay, rival or ""),
        in_flight=in_flight, ready=ready, blocked_for=blocked_for, block_reason=reason,
    )  # fmt: skip


def _entries(column: list[object] | None) -> Sequence[Any]:
    """An array in a row of `lease`; null if it is empty."""
    return column or ()


def _known(item: LoggedItem | None) -> tuple[int, int, bytes, int]:
    """How the store identifies an item that a client has read."""
    return (0, 0, b"", 0) if item is None else (item.seq, item.token, item.fingerprint, item.index)
