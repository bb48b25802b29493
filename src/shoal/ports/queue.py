"""The queue of a run, its roles, its item log, and what can be asked about it: what happens to requests and items."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from shoal.errors import StoreError
from shoal.http import Request

# Items on their way to outputs: the item log of a run, and sinks.


class LoggedItem(Struct, frozen=True):
    """An item in the item log of a run. ``key`` is the same however often its page was tried."""

    seq: int
    fingerprint: bytes
    index: int
    payload: bytes
    token: int = 0
    """Token of the lease under which its page was completed. Together with ``seq`` it identifies this entry, also in a
    store that was rewound and has other items under the same numbers. 0 in stores that cannot be rewound."""

    @property
    def key(self) -> str:
        return f"{self.fingerprint.hex()}-{self.index}"


class ItemLog(Protocol):
    """The items of a run in the order in which their pages were completed."""

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        """Up to ``limit`` items with a sequence number above ``after``, in order. With ``max_bytes``: as many as have
        no more bytes together, but at least one. The store does not read the others.

        ``last``: the item ``after`` as the caller read it. StoreRewoundError if the log ends before it, or has another
        item in its place. A trimmed item is not checked."""
        ...

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        """Forget the items through this sequence number; the count of items stays. With ``cursors``: only if these
        roles have these cursors. Otherwise the caller's view is outdated, and nothing is forgotten."""
        ...


class SinkOptions(Struct, frozen=True):
    """What a sink of a plugin gets besides its URL."""

    run_id: str = ""
    """The run whose items it writes. Empty in exports of a program."""
    on_reject: Callable[[int], None] | None = None
    """Call it in ``flush`` with the number of items that the output cannot hold."""


class OutputCount(Struct, frozen=True, kw_only=True):
    """What an output has of a run, counted in the output itself."""

    items: int | None
    """Lines, rows or documents of the run. None: this output cannot be counted."""
    position: int | None = None
    """The number of its last item, by its own record. None: it keeps no record."""
    rejected: int = 0
    """Items that it could not take."""
    key: tuple[str, ...] = ()
    """Items with equal values in these fields share a row, so there may be fewer rows than items."""


class Sink(Protocol):
    """An output for items.

    It is opened at the state that its last ``flush`` returned. Whatever was written after that flush is undone or
    overwritten, so repeating a write changes nothing.

    The output itself refuses an old writer: once it was opened under a newer epoch, calls of a sink with an older one
    raise OutputTakenError (or another SinkError) and change nothing, however late they arrive.
    """

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        """Open the output under this epoch. OutputTakenError if it has a newer one.

        None: the output has everything up to ``state``. Otherwise it was set back, for example restored from a backup:
        the number of the last item that it has, and the next ``flush`` returns the state there."""
        ...

    async def write(self, items: Sequence[LoggedItem]) -> None:
        """Write items in order. SinkError with a cause if the output was set back since ``open``: open it again."""
        ...

    async def flush(self) -> bytes:
        """Make everything written so far durable, and return the state to open at."""
        ...

    async def close(self, *, finished: bool) -> None:
        """``finished``: the run is over, and all its items were written. SinkError if the output no longer has them."""
        ...

    async def count(self, state: bytes) -> OutputCount:
        """Count the items of the run in the output. It need not be open, and another process may be writing it."""
        ...


Takeovers: TypeAlias = list[tuple[int, int]]
"""The writers of an output: the epoch of each, and the last item that the output had when it began. The items after it
may be others than those of earlier writers, because the store may have been rewound in between."""
_MAX_TAKEOVERS = 16


def with_takeover(takeovers: Takeovers, epoch: int, seq: int) -> Takeovers:
    """Add a writer that begins after item ``seq``, unless it only opens the output again."""
    if takeovers and takeovers[-1][0] == epoch:
        return takeovers
    takeovers = [*(takeover for takeover in takeovers if takeover[1] < seq), (epoch, seq)]
    if len(takeovers) > _MAX_TAKEOVERS:
        (_, first), (second, _) = takeovers[:2]
        takeovers[:2] = [(second, first)]
    return takeovers


def common_position(takeovers: Takeovers, epoch: int, seq: int) -> int:
    """Up to which item an output has the items of the log, if the writer of this epoch wrote it up to ``seq``. That is
    less than ``seq`` if the output was set back to a state before one of the takeovers."""
    return min([seq, *(start for later, start in takeovers if later > epoch)])


# Roles of a run: work that one process at a time does, such as seeding or writing an output.


_MAX_DIGITS = 18


class Claim(Struct, frozen=True):
    """The right to one role of a run (``seed``, or the drainer of one sink), with the stored cursor.

    Moving the cursor is a compare-and-set on ``cursor``. After a successful move, continue with ``moved_to``.
    """

    role: str
    token: int
    cursor: bytes
    epoch: int = 0
    """Larger than the epochs of all earlier claims of this role. Outputs refuse writers with an older one."""

    def moved_to(self, cursor: bytes) -> Claim:
        """The same claim after its cursor was moved."""
        return Claim(self.role, self.token, cursor, self.epoch)

    @property
    def position(self) -> int:
        """The cursor as a number; 0 if there is none. StoreError if another program wrote it."""
        if not self.cursor:
            return 0
        if not self.cursor.isdigit() or len(self.cursor) > _MAX_DIGITS:
            shown = self.cursor[:_MAX_DIGITS]
            raise StoreError(f"the cursor of role {self.role} is {shown!r}, no number: another program has changed it")
        return int(self.cursor)


class RoleState(Struct, frozen=True, kw_only=True):
    """A role of a run. ``held``: a process holds it, and its time has not run out."""

    role: str
    cursor: bytes
    held: bool
    finished: bool
    holder: str = ""
    """The worker or slot that claimed it last. Empty if it has no name."""


class Roles(Protocol):
    """Roles of a run, each with a cursor that says how far its work is."""

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"", above: int = 0) -> Claim | None:
        """Take a role. None while another process holds it, or if it is finished. A repeat with the same ``nonce`` (8
        to 32 random bytes) returns the claim that the first call took, if that is still valid.

        The epoch of the claim is the store's time in microseconds, or the last epoch of the role plus one, or ``above``
        plus one, whichever is largest."""
        ...

    async def forget(self, role: str) -> bool:
        """Remove a role with its cursor. False if a process holds it, or there is no such role."""
        ...

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        """Move the cursor and keep the role. False if the role was lost.

        This is a compare-and-set: the stored cursor must be ``claim.cursor``, or already ``cursor`` (a repeat). Another
        cursor under a valid token means that the store was rewound: StoreRewoundError, and nothing was changed. The
        same holds if the item log no longer has ``last``, the last item that the cursor covers: see ``read_items``."""
        ...

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        """Release a role, for good if ``finished``. False if it was lost. A run whose ``seed`` role is not finished is
        not finished. ``finished`` requires the stored cursor to be ``claim.cursor``; otherwise StoreRewoundError."""
        ...

    async def roles(self) -> list[RoleState]:
        """All roles that were ever claimed in this run."""
        ...


RequestState: TypeAlias = Literal["ready", "waiting", "leased", "done", "dead"]
Overflow: TypeAlias = Literal["accept", "refuse"]
"""What becomes of a link that does not fit into the queue."""


class FrontierOptions(Struct, frozen=True, kw_only=True):
    """The settings that a frontier needs."""

    max_attempts: int = 4
    delay: float = 0.0
    """Seconds from the end of one fetch to the next lease on the same host, unless the host has its own delay."""
    concurrency_per_host: int = 8
    weight: float = 1.0
    """The share of the turns at a host that other runs want too: twice the weight, twice the requests. Above 0."""
    max_queue_size: int | None = None
    """How many requests may be ready or waiting. An explicit push beyond it raises QueueFullError. For the links of
    pages see ``overflow``."""
    overflow: Overflow = "accept"
    """``accept``: links always enter the queue. ``refuse``: new links beyond ``max_queue_size`` are dead at once, with
    the kind "queue full". They are known to the run, and ``retry_dead`` queues them when there is room."""
    in_memory: int = 100_000
    """Queued requests that stay in memory before the rest goes to disk (memory frontier only)."""

    @property
    def link_limit(self) -> int | None:
        """The queue size at which new links are refused. None: they always enter."""
        return self.max_queue_size if self.overflow == "refuse" else None


class Lease(Struct, frozen=True):
    """The right to work on one request until ``deadline``, proven by ``token``."""

    request: Request
    fingerprint: bytes
    token: int
    attempt: int
    """1 for the first attempt. A crash counts. For a lease that is not begun: the number that the attempt will have."""
    host: str
    deadline: float
    """On `shoal.system.clock` of this process. Taken before the store is called: never later than the store's."""
    learned_delay: float = 0.0
    """The delay that the fleet had learned for the host at the time of the lease."""


class Holder(Struct, frozen=True):
    """A node that works under a slot of a cluster, or a worker under its own name. Of two epochs of a slot, the later
    one is valid."""

    slot: str
    epoch: int


class Leased(Struct, frozen=True):
    """The answer to ``lease``."""

    leases: list[Lease]
    wait: float | None
    """Seconds until a waiting request may become due. None if no request waits for time alone."""
    poll_after: float = 0.0
    """Minimum seconds before a caller that got nothing polls again. A store that many idle callers poll raises it, so
    that all of them together cost little."""
    cookies: int = 0
    """The version of the run's cookies: see ``Queue.store_cookies``."""


class CookieWrite(Struct, frozen=True):
    """A document with cookies of the run, as for ``Documents.put_document``."""

    key: str
    value: bytes | None
    """None: the document is deleted."""
    replaces: bytes
    version: bytes


class Completion(Struct, kw_only=True):
    """A page that was handled. It becomes done, with its items and children, in one atomic step."""

    lease: Lease
    items: Sequence[bytes] = ()
    children: Sequence[Request] = ()
    status: int = 0
    duplicates: int = 0
    """Links that this process left out because the run had them already. Only counted."""
    contacted: bool = True
    """False if nothing was sent to the host (a cached page): the delay of the host does not start again."""
    redirected: bool = False
    """Its child is where the server redirected it to. It continues this page, so it enters a full queue too."""
    note: str = ""
    item_errors: int = 0
    """Items of this page that could not be stored. Only counted."""


class Failure(Struct, kw_only=True):
    """A failed attempt. The request waits ``retry_in`` seconds and becomes ready again. With None it is dead.

    A request without attempts left is dead whatever ``retry_in`` says. Items and children (of an errback) are stored,
    and ``item_errors`` counted, only if the request dies.
    """

    lease: Lease
    kind: str
    reason: str
    retry_in: float | None = None
    items: Sequence[bytes] = ()
    children: Sequence[Request] = ()
    status: int = 0
    contacted: bool = True
    item_errors: int = 0


class Pushed(Struct, frozen=True):
    """How many requests of a push were new and queued, how many the run already had, and how many new links were
    refused because the queue was full."""

    added: int
    duplicates: int
    refused: int = 0


class Queue(Protocol):
    """Requests of a run: pushed, leased, and settled."""

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        """Add the requests that are new. QueueFullError: nothing was added.

        With ``seed``: the push is fenced by the token of the role, and ``cursor`` is stored in the same step by
        compare-and-set. The stored cursor must be ``seed.cursor``, or already ``cursor`` (a repeat); otherwise
        StoreRewoundError. If the role was lost, nothing is pushed."""
        ...

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        """Lease up to ``limit`` requests whose host is due: highest priority first, then first in, first out.

        Expired leases, also those of other runs, are released first. A paused or cancelled run leases nothing.
        ``counts_attempt=False`` is for leases that are sent to other processes: they are not begun. The attempt counts
        from ``reissue`` on, and a lease that is lost before that is released unused.

        ``nonce``: 8 to 32 random bytes. A call with the same nonce as this object's last call returns the leases of
        that call that are still held, and leases nothing more. So a lost answer costs nothing. Without a nonce the
        frontier makes one. Tokens are derived from it, so they never repeat, not even after a rewind. One call leases
        at most 65,535 requests.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        """Return the same leases with a new deadline, and None for each that is lost."""
        ...

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        """Return the same leases under new tokens and with a new deadline. The old tokens are no longer valid. None for
        each lease that was already lost. So of all processes that were sent a lease, only one begins.

        ``nonce``: 8 to 32 random bytes of the caller. A repeat with the same old token and nonce returns the same new
        token while that is valid. So a call whose answer was lost can be repeated."""
        ...

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        """Complete pages. Returns for each how many children were new; None if the lease was lost and nothing changed.

        With ``overflow="refuse"``, the children enter in order while the queue has room. The size that counts is the
        one before the call. The children of a page that the store stages (see ``Stats.incoming``) are checked as they
        enter the queue.

        A repeat under the token that made the request done changes nothing. It returns ``Pushed(0, 0)``, or None in
        stores where no answer can be lost (in one process). Do not treat the links of a repeat as known: a repeat does
        not rule out a rewind."""
        ...

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        """Record failed attempts. Returns the new state of each request; None if the lease was lost."""
        ...

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        """Release leases unused: each request is ready again in its old place, and the attempt does not count."""
        ...

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        """Write a document with cookies of the run. In the same step, the cookies of the run get a new version, which
        each later lease answers with. Then, or in the same step, these pages are completed. Returns that version, and
        the same as ``complete``. If the document has another version than ``replaces``, nothing is changed, and the
        version is 0. The version of a run without stored cookies is 0, too."""
        ...

    async def fence(self, slot: str, epoch: int) -> int:
        """Release everything that the slot holds under earlier epochs: leases count as expired, roles become free. From
        then on ``lease`` and ``claim`` of an earlier epoch raise FencedError. Returns the number of leases."""
        ...


# What can be asked about a run: its counters, its dead requests, the history of a URL.


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
    """The workers that hold leases on a host."""

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
