"""What can be asked about a run: its counters, its dead requests, the history of a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from shoal.http import Request
from shoal.ports.queue import RequestState

MAX_RETRIED = 1000
"""Requests that one call of ``retry_dead`` names."""
REPAIRED_LEASE = 300.0
"""Seconds that a lease lasts whose end was lost: long enough for its holder to renew it."""


class Fault(Struct, frozen=True, kw_only=True):
    """Something that is missing in the store, or contradicts the rest, in what belongs to a run. See `shoal audit`."""

    kind: str
    """The kind of fault, for programs: see `shoal.frontier.faults`."""
    count: int
    what: str
    """What is wrong, for people: a sentence without a full stop."""
    example: str = ""
    """One of the URLs, hosts or roles that it is about, or empty."""
    repairable: bool = False
    """Whether `shoal audit --repair` restores it from what is left, or accepts that it is lost."""


class Stats(Struct, frozen=True, kw_only=True):
    """The counters of a run."""

    pushed: int = 0
    ready: int = 0
    waiting: int = 0
    leased: int = 0
    done: int = 0
    dead: int = 0
    duplicates: int = 0
    items: int = 0
    trimmed: int = 0
    """Items that were deleted from the log on purpose: see ``ItemLog.trim_items``. They were the first ones."""
    seeding: bool = False
    incoming: int = 0
    """Links of completed pages that the store is still moving into the queue, in portions. They are not pushed yet, but
    they remain to be done."""
    redirects: int = 0
    """Done requests that were redirects. They are not pages."""
    item_errors: int = 0
    """Items that callbacks yielded and that could not be stored."""
    rewinds: int = 0
    """How often clients noticed that the store had gone back in time: see ``Inspection.rewinds``."""
    faults: tuple[Fault, ...] = ()
    """What an audit found wrong. Always empty in the answer of ``Inspection.stats``, which does not look."""

    @property
    def balanced(self) -> bool:
        """Whether every pushed request is in exactly one state, and an audit found no fault."""
        in_states = self.ready + self.waiting + self.leased + self.done + self.dead
        return self.pushed == in_states and not self.faults

    @property
    def remaining(self) -> int:
        """Requests that are neither done nor dead."""
        return self.ready + self.waiting + self.leased + self.incoming

    # The words of commands, API and dashboard.

    @property
    def in_flight(self) -> int:
        return self.leased

    @property
    def failed(self) -> int:
        return self.dead

    @property
    def left(self) -> int:
        return self.remaining

    @property
    def pages(self) -> int:
        """Pages that were fetched and handled."""
        return self.done - self.redirects

    @property
    def finished(self) -> bool:
        """Nothing remains, and seeding is complete."""
        return not (self.remaining or self.seeding)


class Rewind(Struct, frozen=True, kw_only=True):
    """The store went back in time: a restored backup, a promoted replica that lagged, a power cut before a sync."""

    at: float
    """When a client noticed it, by the store's clock."""
    lost_seconds: float | None = None
    """At most this many seconds of changes were lost. None if that is not known."""


EventKind: TypeAlias = RequestState | Literal["failed", "lost", "note", "retried", "unreadable"]
"""``failed``: an attempt. ``lost``: the worker of an attempt. ``note``: on a completion. ``retried``: made ready again
after its death. ``unreadable``: another program wrote its record. Otherwise the request's current state."""


class Event(Struct, frozen=True):
    """Something that happened to a request."""

    at: float
    kind: EventKind
    detail: str = ""
    worker: str = ""
    """The worker or cluster slot that held the lease. Empty if there was no lease, or its holder has no name."""
    attempt: int = 0
    """The number of an attempt that failed."""

    @property
    def what(self) -> str:
        """What happened, for people."""
        names = {
            "failed": f"attempt {self.attempt} failed",
            "lost": "lease lost",
            "leased": "in flight",
            "dead": "failed",
        }
        return names.get(self.kind, self.kind)


class History(Struct, frozen=True, kw_only=True):
    """What happened to a URL."""

    url: str
    state: RequestState
    depth: int
    priority: float
    attempts: int
    status: int
    items: int
    parent: str | None
    reason: str
    events: tuple[Event, ...]
    fingerprint: bytes = b""
    """Identifies the request in the run. Empty for a link that is not in the queue yet."""
    kind: str = ""
    """The kind of failure, if it is dead."""
    worker: str = ""
    """The worker or cluster slot that has leased it, or whose lease ended done or dead. Empty if it is ready or
    waiting, or its holder has no name."""


class LeaseKey(Struct, frozen=True):
    """Identifies a lease, also after its process has died."""

    fingerprint: bytes
    token: int


class LeaseHolder(Struct, frozen=True, kw_only=True):
    """Who has leased requests of a host."""

    host: str
    run_id: str
    worker: str
    """A worker or a slot of a cluster. Empty if the holder has no name."""
    leases: int
    silent_for: float = 0.0
    """Seconds since its last heartbeat, if it is late. 0: it is not, or sends none."""


class Waits(Struct, frozen=True, kw_only=True):
    """What a run waits for, apart from the politeness of its hosts."""

    holders: list[LeaseHolder]
    retry_in: float | None = None
    """Seconds until the next request that waits for another attempt is ready. None: no request does."""
    retry_reason: str = ""
    """Why its last attempt failed."""


LeaseOutcome: TypeAlias = Literal["done", "leased", "lost"]
"""What became of a lease. ``done``: the request is done under it. ``leased``: it is still held. ``lost``: neither."""


class Inspection(Protocol):
    """Shows the state of a run. Only ``repair`` changes leases."""

    async def stats(self) -> Stats:
        """The counters. Cheap enough to call every second."""
        ...

    async def audit(self) -> Stats:
        """The same counters, recounted from the requests themselves, and all faults: requests that no worker can get,
        records that are missing, counters that differ. Workers may change the run meanwhile: that is no fault."""
        ...

    async def repair(self) -> list[str]:
        """Restore what is missing from what is left, as far as that is possible. Audit again to see the result.

        Roles, documents, settings of hosts and counters cannot be restored. Their loss is accepted, so that an audit no
        longer reports it, and returned, a phrase for each one: the answer of this call is its only record.

        A lease whose end was lost ends after `REPAIRED_LEASE` seconds, unless its holder renews it. A request whose
        state was lost is ready again. Workers may go on meanwhile, except on a store that only one process can use."""
        ...

    async def rewinds(self) -> list[Rewind]:
        """The rewinds of the store that clients of this run noticed, oldest first."""
        ...

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        """The history of a request. If the run has its URL only under other fingerprints (not filtered, or not a GET),
        the history of the first one; that search may read the whole run. ``exact``: without that search.

        ``parent``: of the request that the page with this fingerprint redirects to, if that request was not filtered
        because its URL is earlier in the chain: see `shoal.frontier.rules.sought_fingerprint`."""
        ...

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        """What became of each of these leases. So a process can find out what another one achieved before it died."""
        ...

    async def waits(self, hosts: Sequence[str]) -> Waits:
        """The next request that waits for another attempt, and who has leased requests of these hosts, of any run.

        For a worker that has nothing to do. Its cost is limited: in a store with thousands of leases, some holders may
        be left out."""
        ...

    async def dead_kinds(self) -> dict[str, int]:
        """The number of dead requests by kind of failure."""
        ...

    def dead(self) -> AsyncIterator[History]:
        """The dead requests, in any order."""
        ...

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        """Make dead requests ready again with all their attempts. Without ``kinds``: all but those that robots.txt
        or the scope forbids. Returns how many.

        ``only``: limit this to the requests with these fingerprints, at most `MAX_RETRIED`, in one atomic step.
        Fingerprints of other requests have no effect.

        With ``overflow="refuse"``, links that were refused return only while the queue has room, in the order in which
        they would be leased. The rest stay dead, so call it again later. Requests that died otherwise have been in the
        queue before: they return first, and always."""
        ...
