"""Politeness: when a host may be contacted, and by how many requests at once.

The rules are in `shoal.frontier.host_policy`. Frontiers that live in one process keep their state here. A `Host`
belongs to the store, so all runs share its politeness. A `Lane` is the queue of one run for one host. `Turns` are the
runs that share a host. The code is pure: it gets the time as an argument, and knows only the best request of each lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct

from shoal.frontier.host_policy import (
    DEFAULT_HOST,
    MAX_SHARING,
    RECHECK,
    SHORT_PAUSE,
    Delays,
    Limits,
    RivalDelay,
    due_at,
    effective_concurrency,
    effective_delay,
    host_state,
    is_asking,
    is_live,
    pause_for,
    turns_left,
)
from shoal.ports import FrontierOptions, HostState, HostUpdate


class _Use(Struct):
    """How one run uses a host."""

    used: float
    """Its turns, divided by its weight."""
    seen: float
    """When it last asked for the host."""


class Turns:
    """The runs that share one host. Most hosts have one run, and no `Turns`."""

    def __init__(self, host: str, user: LaneTable[Any], in_flight: int, seen_at: float) -> None:
        """``user``: the run that has used the host alone. Its turns in flight count, or its last turn."""
        self._host = host
        self._time = 0.0
        """Where a run starts that comes or returns. It only grows."""
        self._uses: dict[LaneTable[Any], _Use] = {user: _Use(max(1, in_flight) / user.options.weight, seen_at)}

    def join(self, run: LaneTable[Any], seen_at: float) -> None:
        """Note that a run uses the host. A run that was away gets no credit for that time."""
        use = self._uses.get(run)
        if use is None:
            if len(self._uses) >= MAX_SHARING:
                del self._uses[min(self._uses, key=lambda user: (user.options.delay, self._uses[user].seen))]
            self._uses[run] = _Use(self._time, seen_at)
        else:
            use.used, use.seen = max(use.used, self._time), seen_at

    def leave(self, run: LaneTable[Any]) -> None:
        self._uses.pop(run, None)

    def drop_gone(self, run: LaneTable[Any], now: float) -> bool:
        """Drop the runs that are gone. Returns whether any other than ``run`` is left."""
        for other in [other for other in self._uses if other is not run and not self._is_live(other, now)]:
            del self._uses[other]
        return len(self._uses) > (run in self._uses)

    def _is_live(self, run: LaneTable[Any], now: float) -> bool:
        delay = run.options.delay
        if run.is_resting or not is_live(run.called, delay, now):
            return False
        return run.wants(self._host) or is_live(self._uses[run].seen, delay, now)

    def rival_delay(self, run: LaneTable[Any], now: float) -> RivalDelay | None:
        """The longest delay of the others."""
        rivals = [other for other in self._uses if other is not run and self._is_live(other, now)]
        delays = [RivalDelay(rival.options.delay, rival.run_id) for rival in rivals]
        return max(delays, key=lambda rival: rival.delay, default=None)

    def take(self, run: LaneTable[Any], concurrency: int, due: float, now: float) -> bool:
        """Take one turn. False if it is the turn of another run that asks for it."""
        use, weight, least = self._uses[run], run.options.weight, inf
        for other, other_use in self._uses.items():
            if other is run or not other.wants(self._host):
                continue
            if is_asking(other.asked, due, now):
                least = min(least, max(self._time, other_use.used))
            else:
                other.asked = 0.0  # its time is over: no host waits for it until it asks again
        if least < inf and turns_left(concurrency, weight, use.used, least) <= 0:
            return False
        self._time = max(self._time, min(use.used, least))
        use.used += 1 / weight
        return True


Key = tuple[float, int]
"""(-priority, sequence). The best request has the smallest key."""

Queue = TypeVar("Queue")

_CHECK_INTERVAL = 0.05  # seconds between checks of other runs' leases
_MAX_COMPARED = 1000  # hosts that are compared to find the busiest


class Host:
    """The politeness of one host, shared by all runs on a store."""

    __slots__ = (
        "block_reason", "blocked_until", "concurrency", "crawl_delay", "delay", "ended_at", "in_flight", "last_lane",
        "learned_delay", "name", "user",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.delay: float | None = None
        self.concurrency: int | None = None
        self.crawl_delay: float | None = None
        self.learned_delay: float | None = None
        self.blocked_until = 0.0
        self.block_reason = ""
        self.in_flight = 0
        self.ended_at = 0.0
        """When the last fetch from this host ended."""
        self.last_lane: Lane[Any] | None = None
        """The lanes of a host are a chain: most hosts have one lane and need no list."""
        self.user: LaneTable[Any] | Turns | None = None
        """The run that has asked for this host, or `Turns` if several want it."""

    def apply(self, update: HostUpdate, now: float) -> None:
        """Change the values that the update names."""
        if update.delay is not UNSET:
            self.delay = update.delay
        if update.concurrency is not UNSET:
            self.concurrency = update.concurrency
        if update.crawl_delay is not UNSET:
            self.crawl_delay = update.crawl_delay
        if update.learned_delay is not UNSET:
            self.learned_delay = update.learned_delay
        if update.block_for is not UNSET:
            until = now + update.block_for if update.block_for else 0.0
            if not until or until > self.blocked_until:  # a shorter block does not end a longer one
                self.blocked_until = until
                self.block_reason = update.block_reason if until else ""
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Apply the changed politeness to all lanes of this host."""
        lane = self.last_lane
        while lane is not None:
            lane.table.refresh(lane)
            lane.table.place(lane, now)
            lane = lane.earlier

    def leave(self, table: LaneTable[Any]) -> None:
        """Drop the lanes and the turns of a run."""
        if isinstance(self.user, Turns):
            self.user.leave(table)
        elif self.user is table:
            self.user = None
        later, lane = None, self.last_lane
        while lane is not None:
            if lane.table is not table:
                later = lane
            elif later is None:
                self.last_lane = lane.earlier
            else:
                later.earlier = lane.earlier
            lane = lane.earlier

    def end_lease(self, now: float, *, contacted: bool) -> None:
        """Count a lease on this host as ended. Other runs see the free place at their next `LaneTable.reopen`, so the
        cost does not depend on the number of runs."""
        self.in_flight -= 1
        if contacted:
            self.ended_at = now


_NO_DEFAULTS = Host(DEFAULT_HOST)


@lru_cache(maxsize=256)  # nearly all hosts of a run have the same policy
def _in_force(delays: Delays, limits: Limits, rival: RivalDelay | None = None) -> tuple[float, int]:
    """The delay and the concurrency in force."""
    delay, _ = effective_delay(*delays, rival)
    return delay, effective_concurrency(delay, *limits)


def _usual(options: FrontierOptions) -> tuple[float, int]:
    return _in_force((None, None, options.delay, None, None), (None, None, options.concurrency_per_host))


class Lane(Generic[Queue]):
    """One run's requests for one host."""

    __slots__ = ("best", "delay", "earlier", "entry", "host", "limit", "queue", "ready", "rival", "table")

    def __init__(self, table: LaneTable[Queue], host: Host, queue: Queue) -> None:
        self.table = table
        self.host = host
        self.queue = queue
        self.earlier = host.last_lane
        """The lane, of another run, that the host got before this one."""
        self.ready = 0
        self.best: Key | None = None
        """The key of the best ready request. None if no request is ready."""
        self.entry: tuple[float, int, int, Lane[Queue]] | None = None
        """The current heap entry of this lane. Older entries in the heaps are skipped."""
        self.delay = 0.0
        self.limit = 1
        self.rival: RivalDelay | None = None
        """The longest delay of the other runs that shared the host when this run last asked for it."""


class LaneTable(Generic[Queue]):
    """The lanes of one run.

    Lanes that are due are in one heap, ordered by their best request. Lanes that must wait are in a second heap,
    ordered by time. Lanes without ready requests, or whose host is full, are in no heap until that changes.
    """

    def __init__(self, hosts: dict[str, Host], options: FrontierOptions, run_id: str = "") -> None:
        self.options = options
        self.run_id = run_id
        self.called = 0.0
        """When the run last leased or ended a lease."""
        self.asked = 0.0
        """When it last leased, if it got less than it wanted. Else 0."""
        self.is_resting = False
        """Whether it is paused or over."""
        self.by_name: dict[str, Lane[Queue]] = {}
        self._hosts = hosts
        self._due: list[tuple[float, int, int, Lane[Queue]]] = []
        self._later: list[tuple[float, int, int, Lane[Queue]]] = []
        self._entries = 0
        self._full: dict[Lane[Queue], None] = {}
        """Lanes with ready requests whose host is full. They are never more than the requests in flight."""
        self._behind: list[Lane[Queue]] = []
        """Lanes whose host was due when it was the turn of another run."""
        self._ask_again = inf
        """When to ask again for hosts that other runs use."""
        self._usual = _usual(options)
        """The delay and the concurrency of a host for which nothing is set."""

    def set_options(self, options: FrontierOptions, now: float) -> None:
        """Apply other options of the run to all its lanes."""
        self.options, self._usual = options, _usual(options)
        for lane in self.by_name.values():
            self.refresh(lane)
            self.place(lane, now)

    def add(self, name: str, queue: Queue) -> Lane[Queue]:
        """Add a lane for a host that is new to this run."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = Host(name)
        lane = self.by_name[name] = host.last_lane = Lane(self, host, queue)
        self.refresh(lane)
        return lane

    def wants(self, host: str) -> bool:
        """Whether the run has ready requests for a host."""
        lane = self.by_name.get(host)
        return lane is not None and lane.best is not None

    def refresh(self, lane: Lane[Queue]) -> None:
        """Copy the delay and concurrency in force to the lane."""
        host, default = lane.host, self._hosts.get(DEFAULT_HOST, _NO_DEFAULTS)
        if (
            lane.rival is None
            and host.delay is host.concurrency is host.crawl_delay is host.learned_delay is None
            and default.delay is default.concurrency is None
        ):
            lane.delay, lane.limit = self._usual  # the case of nearly all hosts
        else:
            lane.delay, lane.limit = _in_force(*self._policy(host), lane.rival)

    def _policy(self, host: Host) -> tuple[Delays, Limits]:
        """What the rules of politeness depend on."""
        default, options = self._hosts.get(DEFAULT_HOST, _NO_DEFAULTS), self.options
        delays = host.delay, default.delay, options.delay, host.crawl_delay, host.learned_delay
        return delays, (host.concurrency, default.concurrency, options.concurrency_per_host)

    def place(self, lane: Lane[Queue], now: float) -> None:
        """Put the lane into the right heap after it or its host has changed."""
        best, host, old = lane.best, lane.host, lane.entry
        if best is None or host.in_flight >= lane.limit:
            lane.entry = None
            if best is not None:
                self._full[lane] = None
                if host.user is not self:
                    self._ask_again = min(self._ask_again, now + pause_for(lane.delay))
            return
        due = due_at(lane.delay, host.ended_at, host.blocked_until)
        if due > now and lane.rival is not None and lane.rival.delay > self.options.delay:
            due = min(due, now + RECHECK)
        first, second, heap = (due, 0, self._later) if due > now else (*best, self._due)
        if old is not None and old[0] == first and old[1] == second:
            return
        self._entries += 1
        lane.entry = (first, second, self._entries, lane)
        heappush(heap, lane.entry)
        if len(heap) > 64 + 4 * len(self.by_name):
            heap[:] = [entry for entry in heap if entry[3].entry is entry]
            heapify(heap)

    def reopen(self, now: float) -> None:
        """Place the lanes whose host may have room again. Call it before leasing."""
        if self._ask_again != inf:
            self._ask_again = inf
            behind, self._behind = self._behind, []
            for lane in behind:
                self.place(lane, now)
        if not self._full:
            return
        for lane in [
            lane
            for lane in self._full
            if lane.best is None or lane.host.in_flight < lane.limit or lane.host.user is not self
        ]:
            del self._full[lane]
            self._share(lane, now)
            self.place(lane, now)

    def take_best(self, now: float) -> Lane[Queue] | None:
        """Remove and return the due lane with the best request. The caller takes the request, then places the lane."""
        later = self._later
        while later and later[0][0] <= now:
            entry = heappop(later)
            lane = entry[3]
            if lane.entry is entry:
                lane.entry = None
                if lane.host.user is not self:
                    self._share(lane, now)
                self.place(lane, now)
        while self._due:
            entry = heappop(self._due)
            lane = entry[3]
            if lane.entry is entry:
                lane.entry = None
                host = lane.host
                turns = None if host.user is self else self._share(lane, now)
                if host.in_flight >= lane.limit or due_at(lane.delay, host.ended_at, host.blocked_until) > now:
                    self.place(lane, now)  # another run has taken the last place of the host
                elif turns is None or self._take_turn(lane, turns, now):
                    return lane
        return None

    def unplaced(self) -> list[Lane[Queue]]:
        """Lanes that nobody can lease from: they have ready requests and room at their host, but are in no heap."""
        entries, kept_apart = {id(entry) for entry in chain(self._due, self._later)}, {*self._full, *self._behind}
        return [
            lane
            for lane in self.by_name.values()
            if lane.best is not None and id(lane.entry) not in entries and lane not in kept_apart
        ]

    def _share(self, lane: Lane[Queue], now: float) -> Turns | None:
        """Ask for the host of a lane. Returns the host's turns if other runs want it too."""
        host, turns = lane.host, lane.host.user
        if turns is self or lane.best is None:
            return None
        if turns is not None and not isinstance(turns, Turns):
            turns = Turns(host.name, turns, host.in_flight, now if host.in_flight else host.ended_at)
        if turns is None or not turns.drop_gone(self, now):
            host.user, lane.rival = self, None
            self.refresh(lane)
            return None
        turns.join(self, now)
        host.user, lane.rival = turns, turns.rival_delay(self, now)
        self.refresh(lane)
        return turns

    def _take_turn(self, lane: Lane[Queue], turns: Turns, now: float) -> bool:
        host = lane.host
        if turns.take(self, lane.limit, due_at(lane.delay, host.ended_at, host.blocked_until), now):
            return True
        self._behind.append(lane)
        self._ask_again = min(self._ask_again, now + SHORT_PAUSE)
        return False

    def next_due(self) -> float | None:
        """When the next waiting host is due, or when to ask again for a host that other runs use."""
        while self._later and self._later[0][3].entry is not self._later[0]:
            heappop(self._later)
        first = self._later[0][0] if self._later else None
        return first if self._ask_again == inf else min(first or inf, self._ask_again)

    def states(self, now: float, limit: int) -> list[HostState]:
        """The politeness in force, busiest hosts first.

        To limit the cost, a run with very many hosts compares only some of them: the full ones, the first due ones, and
        the first waiting ones.
        """
        lanes: Iterable[Lane[Queue]] = self.by_name.values()
        if len(self.by_name) > _MAX_COMPARED:
            count = max(limit, _MAX_COMPARED)
            entries = chain(islice(self._due, count), islice(self._later, count))
            lanes = dict.fromkeys(chain(self._full, (entry[3] for entry in entries if entry[3].entry is entry)))
        busiest = sorted(lanes, key=lambda lane: (-(lane.ready + lane.host.in_flight), lane.host.name))
        return [self._state(lane.host, lane.ready, now) for lane in busiest[:limit]]

    def state(self, host: Host, now: float) -> HostState:
        """The politeness in force for one host. It need not have a lane."""
        lane = self.by_name.get(host.name)
        return self._state(host, lane.ready if lane is not None else 0, now)

    def _state(self, host: Host, ready: int, now: float) -> HostState:
        rival = host.user.rival_delay(self, now) if isinstance(host.user, Turns) else None
        return host_state(
            host.name, *self._policy(host), rival=rival, in_flight=host.in_flight, ready=ready,
            blocked_for=host.blocked_until - now, block_reason=host.block_reason,
        )  # fmt: skip


class OpenRun(Protocol):
    """The frontier of a run that is open in this process."""

    def expire_leases(self, now: float) -> object:
        """End the leases that have run out."""
        ...

    def held_at(self, hosts: Collection[str]) -> Iterable[tuple[str, str]]:
        """The host and the name of the holder of each lease of these hosts."""
        ...


F = TypeVar("F", bound=OpenRun)


class OpenRuns(dict[str, F]):
    """The frontiers of a store that are open in this process, by run."""

    _check_at = 0.0

    def expire_others(self, own: F, now: float) -> None:
        """End expired leases of other runs, so that these leases do not block hosts for this run.

        A store may have thousands of runs. So they are checked once in a while, not at every lease.
        """
        if self._check_at - _CHECK_INTERVAL <= now < self._check_at:
            return
        self._check_at = now + _CHECK_INTERVAL
        for frontier in list(self.values()):
            if frontier is not own:
                frontier.expire_leases(now)


def apply_update(hosts: dict[str, Host], host: Host, update: HostUpdate, now: float) -> None:
    """Change a host. A change of the default host changes all hosts."""
    host.apply(update, now)
    if host.name == DEFAULT_HOST:
        for other in hosts.values():
            other.refresh(now)
