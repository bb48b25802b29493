"""The turns of runs that share a host, for frontiers that live in one process.

The rules are in `shoal.frontier.host_policy`. Most hosts have one run, and no `Turns`.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from shoal.frontier.host_policy import MAX_SHARING, RivalDelay, is_asking, is_live, turns_left
from shoal.ports import FrontierOptions


class Sharer(Protocol):
    """A run, as the others on its hosts see it."""

    options: FrontierOptions
    run_id: str
    called: float
    """When it last leased or ended a lease."""
    asked: float
    """The time of its last lease, if that got less than it wanted; else 0."""
    is_resting: bool
    """It is paused or over."""

    def wants(self, host: str) -> bool:
        """Whether it has ready requests for a host."""
        ...


class _Use:
    """How one run uses a host."""

    __slots__ = ("seen", "used")

    def __init__(self, used: float, seen: float) -> None:
        self.used = used
        """Its turns, divided by its weight."""
        self.seen = seen
        """When it last asked for the host."""


class Turns:
    """The runs that share one host."""

    def __init__(self, host: str, user: Sharer, in_flight: int, seen: float) -> None:
        """``user``: the run that has used the host alone. Its turns in flight count, or its last one."""
        self._host = host
        self._time = 0.0
        """Where a run that comes or returns starts. It only grows."""
        self._uses: dict[Sharer, _Use] = {user: _Use(max(1, in_flight) / user.options.weight, seen)}

    def join(self, run: Sharer, seen: float) -> None:
        """Note that a run uses the host. If it was away, it has no credit for that time."""
        use = self._uses.get(run)
        if use is None:
            if len(self._uses) >= MAX_SHARING:
                del self._uses[min(self._uses, key=lambda each: (each.options.delay, self._uses[each].seen))]
            self._uses[run] = _Use(self._time, seen)
        else:
            use.used, use.seen = max(use.used, self._time), seen

    def leave(self, run: Sharer) -> None:
        self._uses.pop(run, None)

    def drop_gone(self, run: Sharer, now: float) -> bool:
        """Forget the runs that are gone. Returns whether any but ``run`` is left."""
        for other in [other for other in self._uses if other is not run and not self._is_live(other, now)]:
            del self._uses[other]
        return len(self._uses) > (run in self._uses)

    def _is_live(self, run: Sharer, now: float) -> bool:
        delay = run.options.delay
        if run.is_resting or not is_live(run.called, delay, now):
            return False
        return run.wants(self._host) or is_live(self._uses[run].seen, delay, now)

    def rival_delay(self, run: Sharer, now: float) -> RivalDelay | None:
        """The longest delay of the others."""
        rivals = [other for other in self._uses if other is not run and self._is_live(other, now)]
        delays = [RivalDelay(rival.options.delay, rival.run_id) for rival in rivals]
        return max(delays, key=lambda each: each.delay, default=None)

    def take(self, run: Sharer, concurrency: int, due: float, now: float) -> bool:
        """Take one turn. False if it is the turn of another run, which has asked for it."""
        use, weight, least = self._uses[run], run.options.weight, inf
        for other, other_use in self._uses.items():
            if other is run or not other.wants(self._host):
                continue
            if is_asking(other.asked, due, now):
                least = min(least, max(self._time, other_use.used))
            else:
                other.asked = 0.0  # its time is over: no host waits for it, unless it asks again
        if least < inf and turns_left(concurrency, weight, use.used, least) <= 0:
            return False
        self._time = max(self._time, min(use.used, least))
        use.used += 1 / weight
        return True
