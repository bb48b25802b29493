"""Politeness of the frontiers that live in one process: which host may be fetched from now, and how many at once.

A `Host` belongs to the store, so all runs share its politeness; a `Lane` is one run's queue for a host. Pure
bookkeeping on the clock that is passed in: of requests it knows only the key of each lane's best one.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Generic, TypeVar

from msgspec import UNSET

from shoal.ports import FrontierOptions, HostState, HostUpdate

Key = tuple[float, int]
"""(-priority, sequence): the smallest is the best request."""

Queue = TypeVar("Queue")

_CHECK_EVERY = 0.05  # seconds between checks of other runs' leases
_MOST_COMPARED = 1000  # hosts that are compared to find the busiest

DEFAULT_HOST = "*"
"""Its delay and concurrency are those of every host that has none of its own."""


class Host:
    """What all runs on a store keep to with one host."""

    __slots__ = (
        "block_reason", "blocked_until", "concurrency", "crawl_delay", "delay", "ended_at", "in_flight", "lanes",
        "learned_delay", "name",
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
        self.lanes: list[tuple[LaneTable[object], Lane[object]]] = []

    def effective_delay(self, options: FrontierOptions, default: Host | None) -> tuple[float, str]:
        """The delay in force, and whose it is."""
        own = (options.delay, "download_delay")
        if self.delay is not None:
            own = (self.delay, "set for this host")
        elif default is not None and default.delay is not None:
            own = (default.delay, "set for all hosts")
        return max(
            own,
            (self.crawl_delay or 0.0, "robots.txt Crawl-delay"),
            (self.learned_delay or 0.0, "learned from its answers"),
            key=lambda pair: pair[0],
        )

    def apply(self, update: HostUpdate, now: float) -> None:
        """Change what the update names."""
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
        """Let all lanes of this host take over what has changed."""
        for table, lane in self.lanes:
            table.refresh(lane)
            table.place(lane, now)

    def returned(self, now: float, *, contacted: bool) -> None:
        """A lease on this host ended. Runs that wait for the place find it with their next `LaneTable.reopen`: so this
        costs the same however many runs use the host."""
        self.in_flight -= 1
        if contacted:
            self.ended_at = now


class Lane(Generic[Queue]):
    """One run's requests for one host."""

    __slots__ = ("best", "delay", "entry", "host", "limit", "queue", "ready")

    def __init__(self, host: Host, queue: Queue) -> None:
        self.host = host
        self.queue = queue
        self.ready = 0
        self.best: Key | None = None
        """Key of the best ready request; None when nothing is ready."""
        self.entry: tuple[float, int, int, Lane[Queue]] | None = None
        """The one heap entry of this lane that counts; older ones are passed over."""
        self.delay = 0.0
        self.limit = 1

    def due_at(self) -> float:
        """From when on the host may be fetched from."""
        host = self.host
        return max(host.ended_at + self.delay if self.delay else 0.0, host.blocked_until)


class LaneTable(Generic[Queue]):
    """The lanes of one run. Those that may be leased from now stand in one heap by their best request; those that
    must wait for a time in another; those with nothing ready or no room in none, until that changes."""

    def __init__(self, hosts: dict[str, Host], options: FrontierOptions) -> None:
        self.options = options
        self.by_name: dict[str, Lane[Queue]] = {}
        self._hosts = hosts
        self._due: list[tuple[float, int, int, Lane[Queue]]] = []
        self._later: list[tuple[float, int, int, Lane[Queue]]] = []
        self._entries = 0
        self._full: dict[Lane[Queue], None] = {}
        """Lanes with something ready whose host has no place: at most as many as hosts have requests in flight."""

    def add(self, name: str, queue: Queue) -> Lane[Queue]:
        """A new lane for a host that this run has not met before."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = Host(name)
        lane = self.by_name[name] = Lane(host, queue)
        host.lanes.append((self, lane))  # type: ignore[arg-type]  # the host never looks into a queue
        self.refresh(lane)
        return lane

    def refresh(self, lane: Lane[Queue]) -> None:
        """Take over the host's delay and concurrency."""
        host, default = lane.host, self._hosts.get(DEFAULT_HOST)
        lane.delay = host.effective_delay(self.options, default)[0]
        own = [host.concurrency, default.concurrency if default else None, self.options.concurrency_per_host]
        lane.limit = 1 if lane.delay > 0 else next(limit for limit in own if limit is not None)

    def place(self, lane: Lane[Queue], now: float) -> None:
        """Put the lane where it belongs, after anything of it or its host has changed."""
        best, host, old = lane.best, lane.host, lane.entry
        if best is None or host.in_flight >= lane.limit:
            lane.entry = None
            if best is not None:
                self._full[lane] = None
            return
        due_at = lane.due_at()
        first, second, heap = (due_at, 0, self._later) if due_at > now else (*best, self._due)
        if old is not None and old[0] == first and old[1] == second:
            return
        self._entries += 1
        lane.entry = (first, second, self._entries, lane)
        heappush(heap, lane.entry)
        if len(heap) > 64 + 4 * len(self.by_name):
            heap[:] = [entry for entry in heap if entry[3].entry is entry]
            heapify(heap)

    def reopen(self, now: float) -> None:
        """Place the lanes whose host has room again. To be called before leasing."""
        for lane in [lane for lane in self._full if lane.best is None or lane.host.in_flight < lane.limit]:
            del self._full[lane]
            self.place(lane, now)

    def take_best(self, now: float) -> Lane[Queue] | None:
        """The due lane with the best request. The caller takes that request and places the lane again."""
        later = self._later
        while later and later[0][0] <= now:
            entry = heappop(later)
            if entry[3].entry is entry:
                entry[3].entry = None
                self.place(entry[3], now)
        while self._due:
            entry = heappop(self._due)
            lane = entry[3]
            if lane.entry is entry:
                lane.entry = None
                if lane.host.in_flight < lane.limit and lane.due_at() <= now:
                    return lane
                self.place(lane, now)  # another run took the host's last place meanwhile
        return None

    def next_due(self) -> float | None:
        """When the next waiting host becomes due."""
        while self._later and self._later[0][3].entry is not self._later[0]:
            heappop(self._later)
        return self._later[0][0] if self._later else None

    def states(self, now: float, limit: int) -> list[HostState]:
        """Politeness in force, the busiest hosts first. Of a run with very many hosts only some are compared, so that
        it costs the same for all: those that are full, the first that are due, and the first that wait."""
        lanes: Iterable[Lane[Queue]] = self.by_name.values()
        if len(self.by_name) > _MOST_COMPARED:
            most = max(limit, _MOST_COMPARED)
            entries = chain(islice(self._due, most), islice(self._later, most))
            lanes = dict.fromkeys(chain(self._full, (entry[3] for entry in entries if entry[3].entry is entry)))
        busiest = sorted(lanes, key=lambda lane: (-(lane.ready + lane.host.in_flight), lane.host.name))
        return [self._state(lane, now) for lane in busiest[:limit]]

    def _state(self, lane: Lane[Queue], now: float) -> HostState:
        host = lane.host
        delay, why = host.effective_delay(self.options, self._hosts.get(DEFAULT_HOST))
        blocked_for = max(0.0, host.blocked_until - now)
        return HostState(
            host=host.name,
            delay=delay,
            why=why if delay else "no delay",
            concurrency=lane.limit,
            in_flight=host.in_flight,
            ready=lane.ready,
            blocked_for=blocked_for,
            block_reason=host.block_reason if blocked_for else "",
        )


F = TypeVar("F")


class OpenRuns(dict[str, F]):
    """The frontiers of a store that are open in this process, by run."""

    _wake_at = 0.0

    def others_are_due(self, now: float) -> bool:
        """Whether the leases of all runs should be checked for expiry: what another run lost must not keep a host from
        this one. Not with every lease, as there may be thousands of runs."""
        if self._wake_at - _CHECK_EVERY <= now < self._wake_at:
            return False
        self._wake_at = now + _CHECK_EVERY
        return True


def apply_update(hosts: dict[str, Host], host: Host, update: HostUpdate, now: float) -> None:
    """Change a host; after the default all of them."""
    host.apply(update, now)
    if host.name == DEFAULT_HOST:
        for each in hosts.values():
            each.refresh(now)
