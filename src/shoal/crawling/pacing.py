"""When the engine leases and settles: one strategy for a store in this process, one for a store on a server. Both wait
for outputs that are far behind.

`WaitWatch` logs why a worker has nothing to do although its run has requests. `explain_wait` finds the reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from shoal.crawling.leases import Persistence
from shoal.errors import FrontierError
from shoal.ports import Frontier, HostState, ItemSource, Leased, LeaseHolder, RoleState, Stats, Waits
from shoal.sinks.drainer import COLLECTORS, PREFIX, output_name, position_of
from shoal.system import chance, clock

log = logging.getLogger("shoal.engine")


_GIVE_UP_AFTER = 0.4
"""Seconds that releasing leases may take after the grace period."""
_MAX_LAG = 50_000
"""How many items the slowest drainer may be behind before leasing pauses."""
_IDLE_FACTOR = 8
"""The engine polls an idle item log up to this many times less often."""


class Waker:
    """Lets the loop sleep until something happens."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._woken = False

    def reset(self) -> None:
        """Forget earlier events: only later ones end the next sleep."""
        self._woken = False

    def wake(self) -> None:
        """Wake the loop: something happened."""
        self._woken = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def sleep(self, seconds: float) -> None:
        """Sleep until something happens, at most ``seconds``. Events since the last ``reset`` count."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_later(max(0.001, seconds), self.wake)
        try:
            await self._future
        finally:
            self._future = None
            timer.cancel()


class Pacing:
    """Decides how many leases the engine asks for, and when it settles finished pages. For a store in this process:
    lease whenever a place is free, and settle at once."""

    poll_after = 0.0
    """Seconds between polls that the store asks for while many workers are idle. 0: no limit."""
    give_up_after: float | None = None
    """Seconds that the engine waits for the store after the grace period of a stop. None: it waits without a limit."""
    overlaps = False
    """Whether the engine may lease before the store has answered its settlements."""

    async def let_pages_end(self, settled: Sized, active: Sized, concurrency: int) -> None:
        """Wait for pages that are about to end, so that they are settled together with those in ``settled``."""
        # Settling ten pages costs little more than settling one. So wait while pages end one after the other and
        # enough others are in flight.
        ended = 0
        while ended < len(settled) and 4 * len(active) > concurrency:
            ended = len(settled)
            await asyncio.sleep(0)

    def linger(self, settled: int, since: float, busy: int, concurrency: int) -> float:
        """Seconds to wait for more settlements before all of them are stored together."""
        return 0.0

    def room(self, free: int, ahead: int, concurrency: int) -> int:
        """How many requests to lease now. ``ahead``: leases that have not begun."""
        return free

    def pause(self) -> float | None:
        """Seconds until the next poll, when nothing is leased now. None: until something happens."""
        return None

    def after(self, leased: Leased, *, short: bool, has_place: bool) -> float | None:
        """Seconds until the next poll after an answer. None: until something happens. ``short``: the answer has fewer
        leases than the engine asked for."""
        return leased.wait

    def poll_now(self) -> None:
        """Lease again without waiting for the next poll."""


class RoundTrip(NamedTuple):
    """Times in seconds that fit a store at some distance."""

    linger: float
    """How long a settlement waits for others while the engine has enough to do."""
    first_poll: float
    """Between the first two polls of a queue that other processes may fill."""
    last_poll: float
    """Between two polls, at most."""
    ahead: float
    """The share of places for which to lease requests ahead. These count as in flight at their hosts."""
    enough: float
    """The engine has enough to do if it has work for a larger share of its places."""


_ON_A_SERVER = RoundTrip(0.02, 0.05, 0.5, 1.0, 0.75)
_ON_THIS_MACHINE = RoundTrip(0.005, 0.002, 0.01, 0.25, 0.25)


class RemotePacing(Pacing):
    """For a store that is a round trip away, and that other processes use too.

    Settlements wait a moment for each other. The engine leases some requests ahead, so that no place stays empty during
    a round trip. It polls a queue without due requests, less often if the store asks for that.
    """

    def __init__(self, batch: int, *, near: bool = False) -> None:
        """``batch``: the most requests in one call. ``near``: another process of this machine owns the store."""
        self.give_up_after = _GIVE_UP_AFTER
        self.overlaps = near  # safe: the owner begins calls in order, and nothing can rewind its store
        self._batch = batch
        self._times = _ON_THIS_MACHINE if near else _ON_A_SERVER
        self._poll = self._times.first_poll
        self._next_poll = 0.0
        """The earliest time of the next poll, on the monotonic clock. 0: now."""

    async def let_pages_end(self, settled: Sized, active: Sized, concurrency: int) -> None:
        pass  # `linger` says how long they have

    def linger(self, settled: int, since: float, busy: int, concurrency: int) -> float:
        if busy <= self._times.enough * concurrency or 4 * settled >= self._batch:
            return 0.0
        return max(0.0, since + self._times.linger - clock.monotonic())

    def room(self, free: int, ahead: int, concurrency: int) -> int:
        # Lease only a few ahead: other workers need requests too.
        most_ahead = min(self._batch, math.ceil(self._times.ahead * concurrency))
        if 2 * ahead > most_ahead or clock.monotonic() < self._next_poll:
            return 0
        return min(self._batch, free + most_ahead - ahead)

    def pause(self) -> float | None:
        return max(0.0, self._next_poll - clock.monotonic()) if self._next_poll else None

    def after(self, leased: Leased, *, short: bool, has_place: bool) -> float | None:
        if not short:
            self._next_poll, self._poll = 0.0, self._times.first_poll
            return 0.0 if has_place else None
        wait = self._poll if leased.wait is None else min(leased.wait, self._poll)
        self._poll = self._times.first_poll
        self.poll_after = 0.0 if leased.leases else leased.poll_after
        if not leased.leases:
            wait = max(wait, leased.poll_after * chance.uniform(0.75, 1.25))
            self._poll = min(self._times.last_poll, 1.5 * wait)
        self._next_poll = clock.monotonic() + wait
        return wait

    def poll_now(self) -> None:
        self._next_poll = 0.0


class ItemLogKeeper:
    """Decides when leasing must wait for a drainer of any process. Unless ``keep``, trims the items that all drainers
    have written."""

    def __init__(
        self, frontier: ItemSource, persist: Persistence, outputs: Collection[str], *, keep: bool, every: float
    ) -> None:
        """``outputs``: the roles of this process's outputs. Nothing is trimmed before each of them has been taken."""
        self._frontier = frontier
        self._persist = persist
        self._outputs = frozenset(outputs)
        self._keep = keep
        self._every = every
        self._expects = True
        self.far_behind = False
        """Whether a running drainer is so far behind that the engine should lease nothing."""
        self._unwritten: set[str] = set()
        """The outputs that nobody writes and that a warning has named."""

    def expect_items(self) -> None:
        """Poll again: pages of this process may have items."""
        self._expects = True

    async def run(self) -> None:
        trimmed, pause, before = 0, self._every, None
        while True:
            await asyncio.sleep(pause)
            if not self._expects:  # an idle process leaves the polling to others
                continue
            roles = [role for role in await self._persist(self._frontier.roles) if role.role.startswith("sink:")]
            logged = (await self._persist(self._frontier.stats)).items if roles else 0
            now = (roles, logged)
            pause = min(_IDLE_FACTOR * self._every, 2 * pause) if now == before and not self.far_behind else self._every
            before = now
            self._expects = any(position_of(role.cursor) < logged for role in roles)
            if not roles:
                continue
            self._judge(logged, [position_of(role.cursor) for role in roles if role.held])
            self._warn_of_unwritten(logged, roles)
            passed = min((position_of(role.cursor) for role in roles if _counts(role)), default=0)
            cursors = {role.role: role.cursor for role in roles}
            if not self._keep and passed > trimmed and self._outputs.issubset(cursors):
                await self._persist(partial(self._frontier.trim_items, passed, cursors=cursors))
                trimmed = passed

    def _judge(self, logged: int, positions: list[int]) -> None:
        lag = logged - min(positions, default=logged)
        if lag > _MAX_LAG and not self.far_behind:
            log.warning("an output is %d items behind; fetching pauses until it has caught up", lag)
        self.far_behind = lag > _MAX_LAG

    def _warn_of_unwritten(self, logged: int, roles: Sequence[RoleState]) -> None:
        """Warn once about an output that nobody writes, because the log keeps growing for it. Fetching goes on: the
        machine of the output may be gone."""
        for role in roles:
            lag = logged - position_of(role.cursor)
            if not role.held and _counts(role) and lag > _MAX_LAG and role.role not in self._unwritten:
                self._unwritten.add(role.role)
                name = role.role.removeprefix(PREFIX)
                log.warning(
                    "no process writes %s, and %d items wait for it in the log; start one that does, or forget the "
                    "output: `shoal outputs RUN forget '%s'`", output_name(name), lag, name,
                )  # fmt: skip


def _counts(role: RoleState) -> bool:
    """Whether items must be kept for this role."""
    return role.held or not role.role.startswith(COLLECTORS)


FIRST_REPORT = 5.0
"""Seconds without work before the first report."""
_EVERY = 30.0
"""Seconds between two reports of the same reason."""
_AGAIN = 300.0
"""The same, if the worker had work in between."""
_CHECK_EVERY = 5.0
"""Seconds between two checks whether the reason has changed."""
_PER_POLL = 20.0
"""Where many idle workers poll, each checks this many times less often than it polls."""
_HOSTS = 100
_LONG_DELAY = 2.0
"""Seconds. A shorter wait for a host's delay is not reported."""
_MOST = 3
"""Reasons in one report."""

_MOST_AUDITED = 200_000
"""The largest run, in requests, that a waiting worker audits by itself. A larger one would take too long."""
_STUCK_AFTER = 10.0
"""Seconds without a change and without a reason after which the worker audits the run once."""
_MOST_SILENT = 300.0
"""The same, if all requests are in flight: a page may take a long time."""

WaitKind: TypeAlias = Literal["blocked", "busy", "delay", "retry", "in flight", "incoming", "seeding", "fault"]


class WaitReason(Struct, frozen=True, kw_only=True):
    """Why some requests of a run cannot be leased now."""

    kind: WaitKind
    """``blocked``: their host is. ``busy``: their host has as many requests in flight as it may have. ``delay``: their
    host was contacted less than its delay ago. ``retry``: they wait for their next attempt. ``in flight``: other
    workers have leased them. ``incoming``: the store moves the links of a large page into the queue. ``seeding``:
    another process pushes the start requests. ``fault``: something is missing in the store."""
    requests: int
    """How many requests wait for this reason, as far as the worker knows."""
    text: str
    subject: tuple[str, ...] = ()
    """The runs, workers or hosts that it is about. Reasons with the same kind and subject are the same reason."""
    is_alarming: bool = False
    """Whether the wait will not end soon by itself: a long block, or a worker that may be dead."""


class WaitFacts(Struct, frozen=True, kw_only=True):
    """What `explain_wait` needs to know."""

    run_id: str
    stats: Stats
    hosts: Sequence[HostState]
    """Hosts of the run."""
    waits: Waits
    """Who uses the hosts that are full."""
    wait: float | None = None
    """`Leased.wait` of the last call."""


def full_hosts(hosts: Sequence[HostState]) -> list[HostState]:
    """The hosts that have requests, and as many in flight as they may have."""
    return [host for host in hosts if host.ready and not host.blocked_for and host.in_flight >= host.concurrency]


def explain_wait(facts: WaitFacts) -> list[WaitReason]:
    """Why nothing can be leased now. The reason that holds up the most requests comes first. Empty: nothing remains, or
    the wait is too short to explain."""
    stats, queued = facts.stats, [host for host in facts.hosts if host.ready]
    blocked = [host for host in queued if host.blocked_for]
    full = full_hosts(queued)
    idle = [host for host in queued if host not in blocked and host not in full]
    reasons = [_blocked(blocked)] if blocked else []
    reasons += _busy(facts, full)
    if idle and any(host.delay for host in idle) and (facts.wait or 0.0) >= _LONG_DELAY:
        reasons.append(_delayed([host for host in idle if host.delay], facts.wait or 0.0))
    if stats.waiting and facts.waits.retry_in:
        reasons.append(_retry(stats.waiting, facts.waits))
    if stats.leased and not stats.ready and not stats.waiting:
        which = "the last request is" if stats.leased == 1 else f"all {stats.leased} requests are"
        reasons.append(WaitReason(kind="in flight", requests=stats.leased, text=f"{which} in flight at other workers"))
    if stats.incoming:
        text = f"{stats.incoming} links of large pages are on their way into the queue"
        reasons.append(WaitReason(kind="incoming", requests=stats.incoming, text=text))
    if stats.seeding and not stats.remaining:
        reasons.append(WaitReason(kind="seeding", requests=0, text="another process pushes the start requests"))
    return sorted(reasons, key=lambda reason: -reason.requests)


def _ready(hosts: Sequence[HostState]) -> int:
    return sum(host.ready for host in hosts)


def _names(hosts: Sequence[HostState]) -> str:
    return f"{hosts[0].host} is" if len(hosts) == 1 else f"{len(hosts)} hosts are"


def _subject(hosts: Sequence[HostState]) -> tuple[str, ...]:
    """The host, if there is only one. A longer list would change all the time."""
    return (hosts[0].host,) if len(hosts) == 1 else ()


def _blocked(hosts: Sequence[HostState]) -> WaitReason:
    first = min(hosts, key=lambda host: host.blocked_for)
    why = f": {first.block_reason}" if first.block_reason else ""
    text = f"{_names(hosts)} blocked"
    text += f", {first.host} for {first.blocked_for:.0f} s" if len(hosts) > 1 else f" for {first.blocked_for:.0f} s"
    return WaitReason(
        kind="blocked", requests=_ready(hosts), text=text + why, subject=_subject(hosts),
        is_alarming=first.blocked_for > _EVERY,
    )  # fmt: skip


def _busy(facts: WaitFacts, hosts: Sequence[HostState]) -> list[WaitReason]:
    """One reason for each run that uses these hosts."""
    by_run: dict[str, list[LeaseHolder]] = {}
    for holder in facts.waits.holders:
        if any(host.host == holder.host for host in hosts):
            by_run.setdefault(holder.run_id, []).append(holder)
    explained = {holder.host for holders in by_run.values() for holder in holders}
    reasons = [_used_by(run_id, holders, hosts, own=facts.run_id) for run_id, holders in by_run.items()]
    unknown = [host for host in hosts if host.host not in explained]
    if unknown:
        text = f"{_names(unknown)} busy with requests of other workers"
        reasons.append(WaitReason(kind="busy", requests=_ready(unknown), text=text))
    return reasons


def _used_by(run_id: str, holders: Sequence[LeaseHolder], hosts: Sequence[HostState], *, own: str) -> WaitReason:
    names = {holder.host for holder in holders}
    used = [host for host in hosts if host.host in names]
    silent = max(holders, key=lambda holder: holder.silent_for)
    text = f"{_names(used)} busy with " + ("other workers of this run" if run_id == own else f"run {run_id}")
    if not silent.silent_for:
        return WaitReason(kind="busy", requests=_ready(used), text=text, subject=(run_id,))
    text += f"{'; its' if run_id == own else ', whose'} worker {silent.worker} is silent for {silent.silent_for:.0f} s"
    return WaitReason(kind="busy", requests=_ready(used), text=text, subject=(run_id, silent.worker), is_alarming=True)


def _delayed(hosts: Sequence[HostState], wait: float) -> WaitReason:
    if len(hosts) == 1:
        text = f"{hosts[0].host} keeps its delay of {hosts[0].delay:g} s ({hosts[0].why})"
    else:
        text = f"{len(hosts)} hosts keep their delay"
    text += f", next in {wait:.0f} s"
    return WaitReason(kind="delay", requests=_ready(hosts), text=text, subject=_subject(hosts))


def _retry(waiting: int, waits: Waits) -> WaitReason:
    why = f" (retry after: {waits.retry_reason})" if waits.retry_reason else ""
    which = "the last request" if waiting == 1 else f"the next request of {waiting}"
    return WaitReason(kind="retry", requests=waiting, text=f"{which} is due in {waits.retry_in:.0f} s{why}")


class WaitWatch:
    """Logs why a worker has nothing to do: when the reason changes, and then every half minute."""

    def __init__(self, frontier: Frontier, run_id: str, clock: Callable[[], float] = lambda: clock.monotonic()) -> None:
        """``run_id``: empty to log nothing."""
        self._clock = clock
        self.reason = ""
        """Why the worker waits, for people. Empty while it works."""
        self._frontier = frontier
        self._run_id = run_id
        self._ask_at = 0.0
        self._logged_at, self._repeat_after = 0.0, _EVERY
        self._logged: list[tuple[WaitKind, tuple[str, ...]]] = []
        self._last: Stats | None = None
        self._changed_at = 0.0
        self._faults: list[WaitReason] | None = None
        """What an audit has found since the counters last changed. None: there was no audit."""

    def work(self) -> None:
        """The worker has something to do."""
        self.reason, self._ask_at, self._repeat_after = "", 0.0, _AGAIN

    async def wait(self, leased: Leased) -> float:
        """The worker has had nothing to do for `FIRST_REPORT` seconds. ``leased``: the answer to its last lease call.
        Returns the seconds until the next call of this method."""
        if not self._run_id:
            return _EVERY
        now = self._clock()
        if now >= self._ask_at:
            self._ask_at = now + max(_CHECK_EVERY, _PER_POLL * leased.poll_after)
            with suppress(FrontierError):  # a store that is away is reported elsewhere
                self._report((await self._explain(leased.wait))[:_MOST], now)
        return max(0.0, self._ask_at - self._clock())

    async def _explain(self, wait: float | None) -> list[WaitReason]:
        stats = await self._frontier.stats()
        if stats.finished:
            return []
        hosts = await self._frontier.host_states(_HOSTS) if stats.ready else []
        waits = await self._frontier.waits([host.host for host in full_hosts(hosts)])
        reasons = explain_wait(WaitFacts(run_id=self._run_id, stats=stats, hosts=hosts, waits=waits, wait=wait))
        return [*await self._find_faults(stats, reasons), *reasons]

    async def _find_faults(self, stats: Stats, reasons: Sequence[WaitReason]) -> list[WaitReason]:
        """Faults of the store, if nothing happens and nothing explains that. A healthy store leases what is ready, so
        a run that works pays nothing for this."""
        now = self._clock()
        if stats != self._last:
            self._last, self._changed_at, self._faults = stats, now, None
        patience = _MOST_SILENT if reasons else _STUCK_AFTER
        if any(reason.kind != "in flight" for reason in reasons) or now - self._changed_at < patience:
            return []
        if stats.pushed > _MOST_AUDITED:
            text = f"nothing happens, and nothing explains it: see `shoal audit {self._run_id}`"
            return [WaitReason(kind="fault", requests=stats.ready, text=text, subject=("unknown",), is_alarming=True)]
        if self._faults is None:
            audit = await self._frontier.audit()
            advice = f"see `shoal audit {self._run_id}`"
            self._faults = [
                WaitReason(
                    kind="fault", requests=fault.count, text=f"{fault.what}; {advice}", subject=(fault.kind,),
                    is_alarming=True,
                )
                for fault in audit.faults
            ]  # fmt: skip
        return self._faults

    def _report(self, reasons: Sequence[WaitReason], now: float) -> None:
        self.reason = "; ".join(reason.text for reason in reasons)
        subjects = [(reason.kind, reason.subject) for reason in reasons]
        if reasons and (subjects != self._logged or now - self._logged_at >= self._repeat_after):
            self._logged, self._logged_at, self._repeat_after = subjects, now, _EVERY
            level = logging.WARNING if any(reason.is_alarming for reason in reasons) else logging.INFO
            log.log(level, "waiting: %s", self.reason)
