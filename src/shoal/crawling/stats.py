"""Counters of a process, snapshots of a running crawl, and the summary at its end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from msgspec import Struct, field

from shoal.crawling.outcome import Outcome
from shoal.fetch.layers.identity_facts import IdentityCounts
from shoal.ports import Holder, HostState, RunView, Stats
from shoal.system import clock

_MAX_REASONS = 100
"""Reasons of dropped items. Others are counted together: a page may decide them."""
_MAX_FAILING = 1000
"""Hosts whose failures are counted. The one that was tried longest ago is forgotten first."""
_HOST_KINDS = frozenset({"connect", "dns", "half body", "protocol", "reset", "timeout", "tls"})
"""Kinds of failures without a status that say something about the host."""


class Latency(Struct):
    """A histogram of fetch times."""

    BOUNDS: ClassVar = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
    """The upper bound of each bucket, in seconds. The last bucket has none."""
    counts: list[int] = field(default_factory=lambda: [0] * (len(Latency.BOUNDS) + 1))
    seconds: float = 0.0

    def measured(self, seconds: float) -> None:
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.seconds += seconds

    def __add__(self, other: Latency) -> Latency:
        counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        return Latency(counts, self.seconds + other.seconds)


class PickedItems:
    """Some of the items that were stored lately, encoded. It picks none before the first ``take``."""

    __slots__ = ("_items", "room")

    _MAX = 250
    _MAX_BYTES = 1 << 18
    """Maximum size of an item. Larger ones are not picked."""

    def __init__(self) -> None:
        self.room = 0
        """Bytes that it still picks."""
        self._items: list[bytes] = []

    def offer(self, items: Sequence[bytes]) -> None:
        """Pick items while there is room. Check ``room`` first: it is 0 most of the time in a fast crawl."""
        for item in items:
            if self.room and len(item) <= self._MAX_BYTES:
                self._items.append(item)
                self.room = max(0, self.room - len(item)) if len(self._items) < self._MAX else 0

    def take(self) -> list[bytes]:
        """The items that it picked since the last call: the first ones after that call, up to 250 and about 1 MB."""
        items, self._items, self.room = self._items, [], 1 << 20
        return items


class FailingHost(Struct, array_like=True):
    """The attempts of a process on a host since its last good answer. All of them failed."""

    since: float
    """When the first of them failed, by the clock of the process."""
    last: float = 0.0
    """When the last of them failed."""
    kinds: dict[str, int] = {}
    """How many there are, by kind of failure."""

    @property
    def attempts(self) -> int:
        return sum(self.kinds.values())


class CodeError(Struct, frozen=True):
    """An error of the user's code, or an item that could not be stored."""

    at: float
    reason: str
    url: str


class Counters:
    """What one process did. The frontier counts for the whole run."""

    __slots__ = (
        "bytes", "drop_reasons", "dropped", "errors", "failing_hosts", "fetched", "from_cache",
        "item_errors", "items", "last_callback_error", "last_item_error", "latency", "leases_lost", "left_out",
        "links_refused", "not_followed", "out_of_scope", "picked", "redirected", "retried", "started", "too_deep",
    )  # fmt: skip
    NOT_ADDED = frozenset(
        {"drop_reasons", "errors", "failing_hosts", "last_callback_error", "last_item_error",
         "picked", "started"}
    )  # fmt: skip
    """Fields that ``add`` does not add up as numbers."""

    def __init__(self) -> None:
        self.started = clock.monotonic()
        self.fetched = self.from_cache = self.bytes = self.items = self.dropped = self.item_errors = 0
        self.redirected = self.retried = self.out_of_scope = self.leases_lost = self.left_out = 0
        self.too_deep = 0
        """Links out of scope that are deeper than ``scope.max_depth``."""
        self.not_followed = 0
        """Links that their pages mark with nofollow (``robots.nofollow``)."""
        self.links_refused = 0
        """Links of completed pages that found the queue full."""
        self.latency = Latency()
        """Pages from the network, not from the cache."""
        self.errors: Counter[str] = Counter()
        """Failed attempts by kind."""
        self.drop_reasons: Counter[str] = Counter()
        """Dropped items by reason, up to a number of reasons."""
        self.last_callback_error: CodeError | None = None
        self.last_item_error: CodeError | None = None
        self.failing_hosts: dict[str, FailingHost] = {}
        """Hosts without a good answer since their last failure, the one that failed last at the end."""
        self.picked = PickedItems()
        """Some of the stored items."""

    def add(self, other: Counters) -> None:
        """Add the counts of another part of the same process."""
        for name in self.__slots__:
            if name not in self.NOT_ADDED:
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors.update(other.errors)
        self.drop_reasons.update(other.drop_reasons)

    def host_failed(self, host: str, kind: str, status: int) -> None:
        """Count an attempt on a host, if the failure says something about the host."""
        if status >= 400:
            kind = f"http {status}"
        elif kind not in _HOST_KINDS:
            return
        now = clock.time()
        failing = self.failing_hosts.pop(host, None) or FailingHost(now, kinds={})
        failing.last = now
        failing.kinds[kind] = failing.kinds.get(kind, 0) + 1
        if len(self.failing_hosts) >= _MAX_FAILING:
            del self.failing_hosts[next(iter(self.failing_hosts))]
        self.failing_hosts[host] = failing

    def drop(self, reason: str) -> None:
        """Count a dropped item."""
        self.dropped += 1
        if reason not in self.drop_reasons and len(self.drop_reasons) >= _MAX_REASONS:
            reason = "other reasons"
        self.drop_reasons[reason] += 1

    def numbers(self) -> dict[str, float]:
        """All plain numbers, by name."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "started"}
        counts = {name: value for name, value in values.items() if isinstance(value, int)}
        return {**counts, "errors": self.errors.total(), "elapsed": self.elapsed}

    @property
    def elapsed(self) -> float:
        return clock.monotonic() - self.started


class CrawlSnapshot(Struct, frozen=True, kw_only=True):
    """The state of a running crawl."""

    stats: Stats
    hosts: list[HostState]
    in_flight: int
    counters: Counters
    waiting: str = ""
    """Why it has had nothing to do for some seconds. Empty: it works."""


class Standing(Struct, frozen=True, kw_only=True):
    """The place of a node in its cluster."""

    cluster: str
    role: str | None
    """None while it is not a member."""
    events: Mapping[str, int]
    """How often it was elected, took over, retired, lost its session or was fenced."""


class Vitals(Struct, frozen=True, kw_only=True):
    """What a crawling process knows about itself without a call to the store."""

    worker: str
    """Its name, unique in the fleet."""
    run_id: str
    spider: str
    counters: Counters
    in_flight: int = 0
    looped_at: float | None = None
    """When its loop last ran, on the monotonic clock. None before it works, and on standby."""
    frontier: RunView | None = None
    """The frontier of its run. None before it is opened."""
    waits: bool = False
    """It has no run now, and waits for the next one."""
    standing: Standing | None = None
    """None if it is not a node."""
    identities: IdentityCounts | None = None
    """None if it has no proxies."""
    holder: Holder | None = None
    """The slot under which it leases. None if its store checks for itself which processes are alive."""
    browser: str = ""
    """What its browser does. Empty if it has none."""
    tor: str = ""
    """Whether its Tor daemon is ready. Empty if it does not go through Tor."""
    error: str = ""
    """What ended its part in the run. Empty if it works, or ended well."""
    loop_age: float | None = None
    """Seconds since its event loop last ran. None while it works on no run."""
    blocked_by: str = ""
    """What blocks its event loop, if that did not run for some seconds."""


class LimitReached(Struct, frozen=True, kw_only=True):
    """The limit at which a run stopped, or why its spider stopped it."""

    setting: str
    """Such as ``scope.max_pages``. Empty: the spider called ``stop``."""
    value: int | float = 0
    left: int = 0
    """Requests in the queue when it stopped."""
    at: float
    """Unix time, in seconds."""
    reason: str = ""
    """What the spider passed to ``stop``."""

    def __str__(self) -> str:
        left = "1 request" if self.left == 1 else f"{self.left} requests"
        if not self.setting:
            return f"was stopped by its spider ({self.reason}) with {left} left"
        return f"stopped at the limit {self.setting}={self.value:g} with {left} left"


class Summary(Struct, frozen=True, kw_only=True):
    """How a crawl ended."""

    run_id: str
    spider: str
    state: str
    """``finished``, ``stopped``, ``limit`` (a limit was reached, or the spider called ``stop``: see ``limit``), or
    ``failed`` (see ``error``)."""
    error: str
    stats: Stats
    dead_kinds: dict[str, int]
    counters: Counters
    elapsed: float
    outputs: tuple[str, ...]
    keeps_items: bool = True
    """Whether its items went to outputs, to pipelines, or stay in the item log."""
    own_counters: dict[str, int] = {}
    """What the spider counted with ``self.stats.inc``."""
    failed_url: str = ""
    """One of the failed requests, if there are any."""
    unmatched: dict[str, int] = {}
    """Queries that found nothing on any page of this process, with the number of pages."""
    processes: int = 1
    """How many processes ``counters`` are of."""
    limit: LimitReached | None = None
    """The limit that this process found reached. None: none, or scope.max_pages."""
    outcome: Outcome | None = None
    """The outcome of the run. None if it has not ended, or this process failed."""

    @property
    def has_failed(self) -> bool:
        """Whether the outcome of the run is ``failed``."""
        return self.outcome is not None and self.outcome.verdict == "failed"

    @property
    def lost(self) -> int:
        """Requests that are in no state. Anything but 0 is a bug."""
        stats = self.stats
        return stats.pushed - (stats.ready + stats.waiting + stats.leased + stats.done + stats.dead)

    @property
    def pages_per_second(self) -> float:
        return self.counters.fetched / self.elapsed if self.elapsed > 0 else 0.0


STATE_NAMES = {"leased": "in flight", "dead": "failed"}
"""States of a request that users know under another name."""


def ledger(stats: Stats) -> dict[str, int | bool]:
    """The counters of a run under the names that commands, the API and the documentation use."""
    return {
        "pushed": stats.pushed,
        "ready": stats.ready,
        "waiting": stats.waiting,
        "in_flight": stats.leased,
        "done": stats.done,
        "failed": stats.dead,
        "left": stats.remaining,
        "duplicates": stats.duplicates,
        "items": stats.items,
        "seeding": stats.seeding,
        "incoming": stats.incoming,
        "rewinds": stats.rewinds,
    }


def counts(stats: Stats) -> dict[str, int]:
    """The counters of a run under the names that work queues use."""
    return {
        "pending": stats.ready + stats.waiting,
        "claimed": stats.leased,
        "completed": stats.done,
        "failed": stats.dead,
        "remaining": stats.remaining,
    }
