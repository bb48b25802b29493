"""Why a worker has nothing to do although its run has requests.

`explain_wait` decides, from facts that a frontier tells. `WaitWatch` asks for them, seldom, while a worker waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.errors import FrontierError
from shoal.ports import Frontier, HostState, Leased, LeaseHolder, Stats, Waits

log = logging.getLogger("shoal.engine")

FIRST_REPORT = 5.0
"""Seconds without work before the first report."""
_EVERY = 30.0
"""Seconds between two reports of the same reason."""
_AGAIN = 300.0
"""The same, if the worker has worked in between."""
_CHECK_EVERY = 5.0
"""Seconds between two questions whether the reason has changed."""
_PER_POLL = 20.0
"""Where many idle workers poll, each asks this many times less often than it polls."""
_HOSTS = 100
_LONG_DELAY = 2.0
"""Seconds. A shorter wait for the delay of a host is not worth a report."""
_MOST = 3
"""Reasons in one report."""

_MOST_AUDITED = 200_000
"""Requests of a run that a worker audits by itself while it waits. More would take too long."""
_STUCK_AFTER = 10.0
"""Seconds without a change and without a reason after which the run is audited, once."""
_MOST_SILENT = 300.0
"""The same, if all requests are in flight: a page may take long."""

WaitKind: TypeAlias = Literal["blocked", "busy", "delay", "retry", "in flight", "incoming", "seeding", "fault"]


class WaitReason(Struct, frozen=True, kw_only=True):
    """Why some requests of a run cannot be leased now."""

    kind: WaitKind
    """``blocked``: their host is. ``busy``: their host has as many requests in flight as it may have. ``delay``: their
    host was contacted less than its delay ago. ``retry``: they wait for their next attempt. ``in flight``: other
    workers have leased them. ``incoming``: the store moves the links of a large page into the queue. ``seeding``:
    another process pushes the start requests. ``fault``: something is missing in the store."""
    requests: int
    """How many requests wait for this reason, as far as it is known."""
    text: str
    subject: tuple[str, ...] = ()
    """The runs, workers or hosts that it is about. Two reasons of one kind and subject are the same, later."""
    is_alarming: bool = False
    """Whether it does not end by itself soon: a long block, or a worker that may be dead."""


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
        few = "the last request is" if stats.leased == 1 else f"all {stats.leased} requests are"
        reasons.append(WaitReason(kind="in flight", requests=stats.leased, text=f"{few} in flight at other workers"))
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
    """The host, if there is only one. Which hosts of many wait changes all the time."""
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
    """Logs why a worker has nothing to do: once, when the reason changes, and then every half minute."""

    def __init__(self, frontier: Frontier, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``run_id``: empty if nothing is to be logged."""
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
        """What an audit found since the counters have changed last. None: there was none."""

    def work(self) -> None:
        """The worker has something to do."""
        self.reason, self._ask_at, self._repeat_after = "", 0.0, _AGAIN

    async def wait(self, leased: Leased) -> float:
        """The worker has had nothing to do for `FIRST_REPORT` seconds. ``leased``: the answer to its last lease call.
        Returns the seconds after which to call it again."""
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
        """Faults of the store, if nothing happens and nothing explains that. A healthy store hands out what is ready,
        so this costs nothing while a run works."""
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
            counted = await self._frontier.audit()
            advice = f"see `shoal audit {self._run_id}`"
            self._faults = [
                WaitReason(
                    kind="fault", requests=fault.count, text=f"{fault.what}; {advice}", subject=(fault.kind,),
                    is_alarming=True,
                )
                for fault in counted.faults
            ]  # fmt: skip
        return self._faults

    def _report(self, reasons: Sequence[WaitReason], now: float) -> None:
        self.reason = "; ".join(reason.text for reason in reasons)
        told = [(reason.kind, reason.subject) for reason in reasons]
        if reasons and (told != self._logged or now - self._logged_at >= self._repeat_after):
            self._logged, self._logged_at, self._repeat_after = told, now, _EVERY
            level = logging.WARNING if any(reason.is_alarming for reason in reasons) else logging.INFO
            log.log(level, "waiting: %s", self.reason)
