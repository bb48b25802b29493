"""The contracts between the engine and what can be exchanged: one page of values, one of Protocols without behaviour.

The laws that every frontier keeps are in ``docs/architecture.md``; ``shoal.testing`` proves them on a backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from shoal.http import Request, Response

RunState: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]
RequestState: TypeAlias = Literal["ready", "waiting", "leased", "done", "dead"]


class FrontierOptions(Struct, frozen=True, kw_only=True):
    """What a frontier needs to know of the configuration."""

    max_attempts: int = 3
    delay: float = 0.0
    """Seconds from the end of one fetch to the lease of the next on a host, unless the host has its own."""
    concurrency_per_host: int = 8
    max_queue_size: int | None = None
    """Explicit pushes past it raise QueueFullError; children of a completed request always enter."""
    in_memory: int = 100_000
    """How many queued requests are held in memory before the rest goes to disk (memory frontier only)."""


class Lease(Struct, frozen=True):
    """The right to work on one request until ``deadline``, proven by ``token``."""

    request: Request
    fingerprint: bytes
    token: int
    attempt: int
    """1 for the first; a crash counts. Of a lease that is not begun: the number that it will have."""
    host: str
    deadline: float
    """On this process's `shoal.clock`, taken before the store was asked, so never later than the store's."""
    learned_delay: float = 0.0
    """What the fleet had learned of the host when it was leased."""


class Holder(Struct, frozen=True):
    """Whoever works under a slot of a cluster. Of two epochs of a slot the later one counts."""

    slot: str
    epoch: int


class Leased(Struct, frozen=True):
    """An answer to ``lease``."""

    leases: list[Lease]
    wait: float | None
    """Seconds until something that waits may become due; None when nothing waits for time alone."""
    poll_after: float = 0.0
    """Seconds that a caller who got nothing should wait at least before it asks again. A store that many idle callers
    poll raises it, so that all of them together cost little."""


class Completion(Struct, kw_only=True):
    """A page that was handled: becomes done, with its items and children, in one atomic step."""

    lease: Lease
    items: Sequence[bytes] = ()
    children: Sequence[Request] = ()
    status: int = 0
    duplicates: int = 0
    """Links that were left out because this run had them already; only counted."""
    contacted: bool = True
    """False when nothing was sent to the host (a cached page): its delay does not start again."""
    note: str = ""


class Failure(Struct, kw_only=True):
    """An attempt that failed: waits ``retry_in`` seconds and becomes ready again, or is dead if that is None.

    A request whose attempts are used up is dead whatever ``retry_in`` says. Items and children (of an errback) are
    committed only with a death.
    """

    lease: Lease
    kind: str
    reason: str
    retry_in: float | None = None
    items: Sequence[bytes] = ()
    children: Sequence[Request] = ()
    status: int = 0
    contacted: bool = True


class Pushed(Struct, frozen=True):
    """How many requests of a push were new, and how many were known already."""

    added: int
    duplicates: int


class LoggedItem(Struct, frozen=True):
    """An item in the run's item log. ``key`` is the same however often its page was tried."""

    seq: int
    fingerprint: bytes
    index: int
    payload: bytes
    token: int = 0
    """Token of the lease under which its page was completed. With ``seq`` it identifies this entry of the log, also in
    a store that was rewound and has other items under the same numbers. 0 where a store can't be rewound."""

    @property
    def key(self) -> str:
        return f"{self.fingerprint.hex()}-{self.index}"


class Claim(Struct, frozen=True):
    """The right to one role of a run (``seed``, or the drainer of one sink), with the cursor as it is stored.

    Moving the cursor is a compare-and-set on ``cursor``. After a successful move, continue with ``moved_to``.
    """

    role: str
    token: int
    cursor: bytes

    def moved_to(self, cursor: bytes) -> Claim:
        """The same claim after its cursor was moved."""
        return Claim(self.role, self.token, cursor)


class RoleState(Struct, frozen=True, kw_only=True):
    """A role of a run as it is now. ``held``: somebody has it, and it has not run out."""

    role: str
    cursor: bytes
    held: bool
    finished: bool


class Stats(Struct, frozen=True, kw_only=True):
    """The ledger of a run."""

    pushed: int = 0
    ready: int = 0
    waiting: int = 0
    leased: int = 0
    done: int = 0
    dead: int = 0
    duplicates: int = 0
    items: int = 0
    seeding: bool = False
    incoming: int = 0
    """Links of completed pages that the store is still moving into the queue, in portions. They are not pushed yet, but
    they remain to be done."""
    rewinds: int = 0
    """How often clients noticed that the store had gone back in time: see ``Frontier.rewinds``."""

    @property
    def balanced(self) -> bool:
        return self.pushed == self.ready + self.waiting + self.leased + self.done + self.dead

    @property
    def remaining(self) -> int:
        return self.ready + self.waiting + self.leased + self.incoming

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: no request remains, and seeding is complete."""
        return not (self.remaining or self.seeding)


class Rewind(Struct, frozen=True, kw_only=True):
    """The store went back in time: a restored backup, a promoted replica that lagged, a power cut before a sync."""

    at: float
    """When it was noticed, by the store's clock."""
    lost_seconds: float | None = None
    """At most so many seconds of changes were lost; None if that is not known."""


class Event(Struct, frozen=True):
    """Something that happened to a request."""

    at: float
    what: str
    detail: str = ""


class History(Struct, frozen=True, kw_only=True):
    """What became of a URL."""

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


class HostUpdate(Struct, frozen=True, kw_only=True):
    """What to change of a host's politeness. UNSET leaves a value as it is; None returns it to the default."""

    delay: float | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET
    crawl_delay: float | UnsetType | None = UNSET
    learned_delay: float | UnsetType | None = UNSET
    block_for: float | UnsetType | None = UNSET
    """Seconds from now during which nothing of this host is leased; a longer block stays. 0 or None unblocks."""
    block_reason: str = ""


class HostState(Struct, frozen=True, kw_only=True):
    """A host's politeness as it is in force."""

    host: str
    delay: float
    why: str
    concurrency: int
    in_flight: int
    ready: int
    blocked_for: float
    block_reason: str


class Run(Struct, frozen=True, kw_only=True):
    """One execution of a spider."""

    run_id: str
    spider: str
    state: RunState
    created_at: float
    settings: Mapping[str, Any] = {}


class Frontier(Protocol):
    """All URLs of one run. Every method may be called by many tasks and processes at the same time.

    Each call that changes something is one atomic step: after a crash it happened whole or not at all. Any of them
    may raise FrontierError; then nothing was changed.

    A frontier on a server remembers the last completion that the server acknowledged, and presents it with each
    ``lease``, ``complete``, ``fail``, ``release`` and ``push``. A server that does not know it any more was rewound:
    the call changes nothing and raises StoreRewoundError, and so does every later call until ``recover``.
    """

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        """Add what is new. QueueFullError leaves no trace.

        With ``seed``: fenced by its token, and ``cursor`` is stored in the same step, by compare-and-set: the stored
        cursor must be ``seed.cursor``, or already ``cursor`` (a repeat). Otherwise StoreRewoundError. Under a lost role
        nothing is pushed."""
        ...

    async def lease(self, limit: int, ttl: float, *, begun: bool = True, nonce: bytes = b"") -> Leased:
        """Up to ``limit`` requests whose host is due, best priority first, equal ones first-in first-out.

        Expired leases, of other runs too, are given back first. A run that is paused or cancelled gives nothing.
        ``begun=False`` is for leases that are sent to whoever is to work: the attempt counts from ``reissue`` on, and
        a lease that is lost before that is given back unused.

        ``nonce``: 8 to 32 random bytes. A call that is repeated with the nonce of this frontier object's last call
        returns what that call leased, as far as it is still held, and leases nothing more: so a lost answer costs
        nothing. Without one, the frontier makes one up. Tokens are derived from it, so they never repeat, also not
        after a rewind. At most 65,535 requests are leased in one call.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        """The same leases with a new deadline; None for each that is lost."""
        ...

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        """The same rights under new tokens and with a new deadline: whoever holds the old ones has lost them. None for
        each that was lost already. So of all who were sent a lease, one begins.

        ``nonce``: 8 to 32 bytes that the caller makes up at random. The same old token with the same nonce again has
        the same new token, as long as that is good: so a call whose answer did not come can be repeated."""
        ...

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        """What became of the children of each; None where the lease was lost, and then nothing was changed.

        A completion that is repeated under the token that made its request done changes nothing. It returns
        ``Pushed(0, 0)``, or None where no answer can be lost on the way (in one process). Remember nothing of it: it is
        no proof against a rewind."""
        ...

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        """The state each is in now; None where the lease was lost."""
        ...

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        """Give back unused: ready again in its old place, and the attempt does not count."""
        ...

    async def fence(self, slot: str, epoch: int) -> int:
        """Take from a slot what it was given under earlier epochs: leases are lost as if they had run out, roles are
        free. From then on ``lease`` and ``claim`` give nothing to an earlier epoch: FencedError. How many leases."""
        ...

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"") -> Claim | None:
        """Take a role; None while another holds it, or when it is finished. Repeated with the same ``nonce`` (8 to 32
        random bytes), it returns the claim that the first call took, if that is still good."""
        ...

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        """Move the cursor and keep the role; False when the role was lost.

        A compare-and-set: the stored cursor must be ``claim.cursor``, or already ``cursor`` (a repeat). With the right
        token and another cursor the store was rewound: StoreRewoundError, and nothing was changed. So it is if the item
        log does not have ``last`` any more, the last item that the cursor covers: see ``read_items``."""
        ...

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        """Release a role, for good when ``finished``; False when it was lost. A run whose ``seed`` is not finished is
        not finished. ``finished`` needs the stored cursor to be ``claim.cursor``: otherwise StoreRewoundError."""
        ...

    async def roles(self) -> list[RoleState]:
        """All roles that were ever claimed in this run."""
        ...

    async def read_items(self, after: int, limit: int, *, last: LoggedItem | None = None) -> list[LoggedItem]:
        """The item log in order, behind ``after``.

        ``last``: the item ``after``, as the caller read it. StoreRewoundError if the log ends before it, or has another
        one in its place. An item that was trimmed is not checked."""
        ...

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        """Forget the log through this sequence number; the count stays. With ``cursors`` only if these roles have these
        cursors: else nothing is forgotten, as the caller's view is not current."""
        ...

    async def update_host(self, host: str, update: HostUpdate) -> None:
        """For all runs on the store. Delay and concurrency of the host ``*`` are those of hosts without their own."""
        ...

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """The hosts with most to do first."""
        ...

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a small fact for all runs and workers of the store, so long: what a robots.txt says."""
        ...

    async def recall(self, key: str) -> bytes | None:
        """What was remembered, until its time is over."""
        ...

    async def stats(self) -> Stats:
        """The counters, cheap enough for every second."""
        ...

    async def audit(self) -> Stats:
        """The same, counted anew from the requests themselves."""
        ...

    async def recover(self) -> Rewind | None:
        """After StoreRewoundError: record the rewind in the run, make every host of the store wait one delay from now,
        and forget what this object remembers, so that it can be used again. None if the store was not rewound.

        The caller must drop all it knows of the store first: known links, cursors, leases. Clients that notice the
        same rewind record it once."""
        ...

    async def rewinds(self) -> list[Rewind]:
        """The rewinds of the store that clients of this run noticed, oldest first."""
        ...

    async def is_finished(self) -> bool:
        """Nothing ready, waiting, leased, incoming or still being seeded."""
        ...

    async def find(self, request: Request) -> History | None:
        """This request's history; if the run has it only under other names (it was not filtered, or is no GET), that of
        the first one with its URL. Such a search may read the whole run."""
        ...

    async def dead_kinds(self) -> dict[str, int]:
        """How many requests are dead, by kind."""
        ...

    def dead(self) -> AsyncIterator[History]:
        """In any order."""
        ...

    async def retry_dead(self, kinds: Sequence[str] | None = None) -> int:
        """Make dead requests ready again with all their attempts (all kinds but robots' unless named)."""
        ...

    async def close(self) -> None: ...


class Store(Protocol):
    """Where runs and their frontiers are kept, opened by a URL."""

    shared: ClassVar[bool]
    """Whether other processes may work on it at the same time."""

    async def create_run(self, run: Run) -> Run: ...

    async def transition(self, run_id: str, state: RunState) -> Run:
        """RunError when there is no such run or the step is not allowed."""
        ...

    async def get_run(self, run_id: str) -> Run | None: ...

    async def run_state(self, run_id: str) -> RunState | None:
        """As ``get_run``, for those who look often: its settings may be large."""
        ...

    async def run_states(self, spider: str) -> dict[str, RunState]:
        """Of all its runs, oldest first."""
        ...

    async def list_runs(self, spider: str | None = None) -> list[Run]:
        """Newest first."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Forget a run and all that belongs to it; what is known of the hosts stays. RunError if there is none."""
        ...

    async def frontier(self, run_id: str, options: FrontierOptions, holder: Holder | None = None) -> Frontier:
        """What is leased and claimed through it is the holder's, if there is one: see ``fence``."""
        ...

    async def close(self) -> None: ...


Fetch: TypeAlias = Callable[[Request], Awaitable[Response]]


class Fetcher(Protocol):
    """Request in, response out. FetchError says whether a retry can help."""

    async def fetch(self, request: Request) -> Response: ...

    async def close(self) -> None: ...


class Middleware(Protocol):
    """One layer of the onion around the fetcher."""

    async def __call__(self, request: Request, fetch: Fetch) -> Response: ...


class Sink(Protocol):
    """Where items go. It is opened at the state that its last ``flush`` returned; what was written after that flush
    is undone or overwritten, so a repeated write changes nothing."""

    async def open(self, state: bytes) -> None: ...

    async def write(self, items: Sequence[LoggedItem]) -> None: ...

    async def flush(self) -> bytes:
        """Make everything written so far durable, and return the state to open at."""
        ...

    async def close(self, *, finished: bool) -> None:
        """``finished``: the run is over and everything was written."""
        ...


class Counts(Struct, frozen=True):
    """How many members of a cluster work, and how many stand by."""

    runner: int
    backup: int


class Member(Struct, frozen=True, kw_only=True):
    """A living member of a cluster."""

    name: str
    age: float
    """Seconds since it was last heard of, by the coordinator's clock."""
    fit: bool = True
    """Whether it could work: it reaches the frontier."""
    doing: str = ""
    where: str = ""
    """Its machine and process."""


class Slot(Struct, frozen=True):
    """The right to work. ``epoch`` is that of its holder; without one, that of the last who had it."""

    index: int
    holder: str
    """A member's name, or nothing."""
    epoch: int


class ClusterView(Struct, frozen=True, kw_only=True):
    """A cluster at one moment: who lives, and every slot that somebody has or had, by index."""

    counts: Counts
    members: tuple[Member, ...]
    slots: tuple[Slot, ...]


ClusterStep: TypeAlias = Literal["joined", "left", "lost", "elected", "took over", "retired", "scaled"]


class ClusterEvent(Struct, frozen=True, kw_only=True):
    """Something that happened in a cluster: ``took over`` a slot from the lost member in ``detail``."""

    at: float
    what: ClusterStep
    member: str
    slot: int | None = None
    epoch: int = 0
    detail: str = ""


class Coordinator(Protocol):
    """The members of one cluster and their slots, as one of them sees it. Only the server's clock counts.

    Any method may raise CoordinatorAwayError, and then nobody knows whether it happened: each can be repeated.
    """

    ttl: float
    """Seconds after which a member that is not heard of is lost, with its slot; as the server granted it."""

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        """Become a member. NameTakenError while another of that name lives.

        A cluster without members gets these counts, one with members keeps its own. A member that joins `again` after
        its session was lost may not know the newest counts: a cluster that has counts keeps them."""
        ...

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        """Be heard of, and see the cluster. SessionLostError if this member was lost meanwhile."""
        ...

    async def take(self, index: int) -> int | None:
        """Hold a slot, under an epoch later than every one before; None if somebody has it. Again by the same member:
        the same epoch. SessionLostError if this member was lost meanwhile."""
        ...

    async def retire(self) -> None:
        """Give the slot back that this member has, if it has one."""
        ...

    async def leave(self) -> None:
        """Be no member any more, and hold nothing."""
        ...

    async def scale(self, counts: Counts) -> None:
        """Change how many there are to be; members see to it."""
        ...

    async def look(self) -> ClusterView:
        """The same as ``beat`` sees, for anyone. CoordinatorError if there never was such a cluster."""
        ...

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        """The last ones, oldest first."""
        ...

    async def wait(self, seconds: float) -> None:
        """Until something happens in the cluster, or for so long. It may return for no reason."""
        ...

    async def close(self) -> None: ...
