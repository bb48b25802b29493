"""A simple, slow model of a frontier: plain lists, and one line for each rule.

It has its own clock and no store. `shoal.testing.machine` takes the same steps on it and on a backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shoal.errors import QueueFullError
from shoal.frontier.rules import FULL_KIND, FULL_REASON, LOST_KIND, is_retried
from shoal.http import Request
from shoal.ports import FrontierOptions, Holder, HostUpdate, Pushed, RequestState, Stats
from shoal.urls.normalize import host_of


@dataclass(eq=False)
class Entry:
    """A request and its state."""

    request: Request
    name: Hashable
    place: int
    parent: Entry | None
    state: RequestState = "ready"
    attempts: int = 0
    token: int = 0
    until: float = 0.0
    """When it is ready again, or when its lease expires."""
    holder: Holder | None = None
    begun: bool = True
    """Whether the attempt of its lease counts yet."""
    origin: tuple[int, bytes] | None = None
    """The token before its lease was reissued, and the nonce of the reissue."""
    items: int = 0
    status: int = 0
    kind: str = ""
    reason: str = ""

    @property
    def host(self) -> str:
        return host_of(self.request.url)


class ModelLease(NamedTuple):
    """A lease."""

    entry: Entry
    token: int
    attempt: int


@dataclass
class Host:
    """The delays and limits of a host."""

    delay: float | None = None
    concurrency: int | None = None
    crawl_delay: float | None = None
    learned_delay: float | None = None
    blocked_until: float = 0.0
    ended_at: float | None = None


@dataclass
class Role:
    """A role of a run."""

    token: int = 0
    until: float = 0.0
    cursor: bytes = b""
    finished: bool = False
    holder: Holder | None = None
    claimed_by: Holder | None = None
    """The last holder, also when the role is free."""
    claims: int = 0

    def free(self) -> None:
        self.token, self.until, self.holder = 0, 0.0, None


@dataclass
class World:
    """The clock and the hosts, which all runs of a store share."""

    now: float = 0.0
    hosts: dict[str, Host] = field(default_factory=lambda: defaultdict(Host))
    runs: list[Model] = field(default_factory=list)

    def in_flight(self, host: str) -> int:
        return sum(entry.host == host for run in self.runs for entry in run.in_state("leased"))


class Room(NamedTuple):
    """How many links may enter the queue in one call."""

    model: Model
    base: int
    """The number of queued requests when the call began, minus ``Model.entered`` at that time."""

    def is_used_up(self) -> bool:
        limit = self.model.options.link_limit
        return limit is not None and self.base + self.model.entered >= limit


class Model:
    """One run. A refused step returns the value that the port defines (None, False)."""

    def __init__(self, options: FrontierOptions, world: World) -> None:
        self.options = options
        self.world = world
        self.entries: list[Entry] = []
        self.log: list[tuple[Entry, int, bytes]] = []
        self.logged = 0
        self.duplicates = 0
        self.roles: dict[str, Role] = defaultdict(Role)
        self.fences: dict[str, int] = defaultdict(int)
        self.entered = 0
        """How many requests were added to the queue."""
        self._tokens = 0
        self.asked: float | None = None
        """When it last leased, if it got less than it wanted."""
        world.runs.append(self)

    def in_state(self, *states: RequestState) -> list[Entry]:
        return [entry for entry in self.entries if entry.state in states]

    def stats(self) -> Stats:
        pushed, seeding = len(self.entries), not self.roles["seed"].finished
        stats = Stats(pushed=pushed, duplicates=self.duplicates, items=self.logged, seeding=seeding)
        counts = {state: len(self.in_state(state)) for state in ("ready", "waiting", "leased", "done", "dead")}
        return msgspec.structs.replace(stats, **counts)

    # -- pushing

    def push(self, requests: Sequence[Request], seed: int | None = None, cursor: bytes = b"") -> Pushed:
        if seed is not None and not self.holds("seed", seed):
            return Pushed(0, 0)
        if seed is None:
            named_requests = [
                (object() if request.dont_filter else request.fingerprint(), request) for request in requests
            ]
        else:
            named_requests = [
                (
                    ("seed", cursor, number, request.fingerprint()) if request.dont_filter else request.fingerprint(),
                    request,
                )
                for number, request in enumerate(requests)
            ]
        new = len({name for name, _ in named_requests} - {entry.name for entry in self.entries})
        max_size = self.options.max_queue_size
        if max_size is not None and new and len(self.in_state("ready", "waiting")) + new > max_size:
            raise QueueFullError
        if seed is not None:
            self.roles["seed"].cursor = cursor
        return self._add(named_requests, None)

    def _add(
        self, named_requests: Iterable[tuple[Hashable, Request]], parent: Entry | None, room: Room | None = None
    ) -> Pushed:
        """Add requests. ``room``: how many may enter the queue. None: all."""
        added = known = refused = 0
        for name, request in named_requests:
            if any(entry.name == name for entry in self.entries):
                known += 1
                continue
            entry = Entry(request, name, len(self.entries), parent)
            self.entries.append(entry)
            if room is not None and room.is_used_up():
                refused += 1
                entry.state, entry.kind, entry.reason = "dead", FULL_KIND, FULL_REASON % self.options.max_queue_size
            else:
                added += 1
                self.entered += 1
        self.duplicates += known
        return Pushed(added, known, refused)

    def measure_room(self) -> Room:
        """The room for links in a call that begins now."""
        return Room(self, len(self.in_state("ready", "waiting")) - self.entered)

    def _add_children(self, parent: Entry, children: Sequence[Request], room: Room | None) -> Pushed:
        named_children = [
            (("child", parent.name, number, child.fingerprint()) if child.dont_filter else child.fingerprint(), child)
            for number, child in enumerate(children)
        ]
        return self._add(named_children, parent, room)

    # -- leasing

    def lease(
        self,
        limit: int,
        ttl: float,
        holder: Holder | None = None,
        *,
        counts_attempt: bool = True,
        granted: Sequence[Request] | None = None,
    ) -> tuple[list[ModelLease], float | None]:
        """``granted``: what the backend leased. It may leave out a host for another run that has asked for it; the
        tests of turns say when it does. None: it leaves out nothing."""
        now = self.world.now
        for entry in self.overdue():
            self.lose(entry)
        for entry in self.in_state("waiting"):
            if entry.until <= now:
                entry.state = "ready"
        leases: list[ModelLease] = []
        left_out: set[str] = set()
        while len(leases) < limit and (due := self._due_entries(left_out)):
            best = min(due, key=lambda entry: (-entry.request.priority, entry.place))
            if granted is not None and best.request not in granted and self._is_shared(best.host):
                left_out.add(best.host)
                continue
            leases.append(self.grant(best, ttl, holder, counts_attempt=counts_attempt))
        self.asked = now if len(leases) < limit else None
        waiting_hosts = {entry.host for entry in self.in_state("ready") if self._has_room(entry.host)}
        moments = [entry.until for entry in self.in_state("waiting", "leased")]
        moments += [self._due_at(host) for host in waiting_hosts if not self.is_due(host)]
        return leases, min(moments) - now if moments else None

    def grant(
        self, entry: Entry, ttl: float, holder: Holder | None = None, *, counts_attempt: bool = True
    ) -> ModelLease:
        """Lease a ready request, whose host must be due."""
        self._tokens += 1
        entry.state, entry.token, entry.until = "leased", self._tokens, self.world.now + ttl
        entry.holder, entry.begun, entry.origin = holder, False, None
        lease = ModelLease(entry, entry.token, entry.attempts + 1)
        if counts_attempt:
            self._begin(entry)
        return lease

    def _due_entries(self, left_out: Collection[str]) -> list[Entry]:
        return [entry for entry in self.in_state("ready") if entry.host not in left_out and self.is_due(entry.host)]

    def _is_shared(self, host: str) -> bool:
        """Whether it may be the turn of another run: it wants the host, and asked now, or before the host was due."""
        return any(
            run is not self
            and run.asked is not None
            and self.world.now <= max(run.asked, self._due_at(host))
            and any(entry.host == host for entry in run.in_state("ready"))
            for run in self.world.runs
        )

    def _begin(self, entry: Entry) -> None:
        """Count the attempt of the lease, if it does not count yet."""
        if not entry.begun:
            entry.attempts, entry.begun = entry.attempts + 1, True

    def overdue(self) -> list[Entry]:
        """The leased requests whose leases have expired."""
        return [entry for entry in self.in_state("leased") if entry.until <= self.world.now]

    def lose(self, entry: Entry) -> None:
        """End the lease of a request whose worker is lost."""
        entry.state = "ready"
        if entry.begun and entry.attempts >= self.options.max_attempts:
            entry.state, entry.kind = "dead", LOST_KIND
        self._end_lease(entry, contacted=entry.begun)

    def lose_all(self) -> None:
        """The only process is dead: end all its leases and free its roles."""
        for entry in self.in_state("leased"):
            self.lose(entry)
        for role in self.roles.values():
            role.free()

    def _delay(self, host: str) -> float:
        known = self.world.hosts[host]
        own = self.options.delay if known.delay is None else known.delay
        return max(own, known.crawl_delay or 0.0, known.learned_delay or 0.0)

    def _due_at(self, host: str) -> float:
        known, delay = self.world.hosts[host], self._delay(host)
        delayed = known.ended_at + delay if known.ended_at is not None and delay else 0.0
        return max(delayed, known.blocked_until)

    def _has_room(self, host: str) -> bool:
        own = self.world.hosts[host].concurrency
        limit = self.options.concurrency_per_host if own is None else own
        return self.world.in_flight(host) < (1 if self._delay(host) else limit)

    def is_due(self, host: str) -> bool:
        """Whether politeness allows a lease now."""
        return self._has_room(host) and self._due_at(host) <= self.world.now

    # -- ending a lease

    def is_current(self, held: ModelLease) -> bool:
        return held.entry.state == "leased" and held.entry.token == held.token

    def _end_lease(self, entry: Entry, *, contacted: bool) -> None:
        if contacted:
            self.world.hosts[entry.host].ended_at = self.world.now

    def renew(self, held: ModelLease, ttl: float) -> bool:
        if not self.is_current(held):
            return False
        held.entry.until = self.world.now + ttl
        return True

    def reissue(self, batch: Sequence[ModelLease], ttl: float, nonce: bytes) -> list[ModelLease | None]:
        reissued: list[ModelLease | None] = []
        for held in batch:
            before = any(lease is not None and lease.entry is held.entry for lease in reissued)
            reissued.append(None if before else self._reissue(held, ttl, nonce))
        return reissued

    def _reissue(self, held: ModelLease, ttl: float, nonce: bytes) -> ModelLease | None:
        entry, origin = held.entry, (held.token, nonce)
        if self.is_current(held):
            self._tokens += 1
            entry.token, entry.origin = self._tokens, origin
            self._begin(entry)
        elif entry.state != "leased" or entry.origin != origin:
            return None
        entry.until = self.world.now + ttl
        return held._replace(token=entry.token)

    def complete(
        self,
        held: ModelLease,
        items: Sequence[bytes],
        children: Sequence[Request],
        *,
        status: int,
        duplicates: int,
        contacted: bool,
        room: Room | None = None,
    ) -> Pushed | None:
        if not self.is_current(held):
            return None
        entry = held.entry
        self._begin(entry)
        entry.state, entry.status = "done", status
        self._log_items(entry, items)
        self.duplicates += duplicates
        pushed = self._add_children(entry, children, room)
        self._end_lease(entry, contacted=contacted)
        return Pushed(pushed.added, pushed.duplicates + duplicates, pushed.refused)

    def fail(
        self,
        held: ModelLease,
        retry_in: float | None,
        items: Sequence[bytes],
        children: Sequence[Request],
        *,
        status: int,
        kind: str,
        reason: str,
        contacted: bool,
        room: Room | None = None,
    ) -> RequestState | None:
        if not self.is_current(held):
            return None
        entry = held.entry
        self._begin(entry)
        entry.status = status
        if retry_in is not None and entry.attempts < self.options.max_attempts:
            entry.state, entry.until = "waiting", self.world.now + retry_in
        else:
            entry.state, entry.kind, entry.reason = "dead", kind, reason
            self._log_items(entry, items)
            self._add_children(entry, children, room)
        self._end_lease(entry, contacted=contacted)
        return entry.state

    def release(self, held: ModelLease, *, contacted: bool) -> bool:
        if not self.is_current(held):
            return False
        self._begin(held.entry)
        held.entry.state = "ready"
        held.entry.attempts -= 1
        self._end_lease(held.entry, contacted=contacted)
        return True

    # -- slots

    def is_refused(self, holder: Holder | None) -> bool:
        return holder is not None and holder.epoch < self.fences[holder.slot]

    def holders(self) -> list[Holder]:
        """The holders of leases and roles."""
        holders = [entry.holder for entry in self.in_state("leased")] + [role.holder for role in self.roles.values()]
        return [holder for holder in holders if holder is not None]

    def fence(self, holder: Holder) -> int:
        self.fences[holder.slot] = holder.epoch
        lost = [entry for entry in self.in_state("leased") if self.is_refused(entry.holder)]
        for entry in lost:
            self.lose(entry)
        for role in self.roles.values():
            if self.is_refused(role.holder):
                role.free()
        return len(lost)

    # -- items and dead requests

    def _log_items(self, entry: Entry, items: Sequence[bytes]) -> None:
        for payload in items:
            self.log.append((entry, entry.items, payload))
            entry.items += 1
            self.logged += 1

    def retry_dead(self, kinds: Sequence[str] | None, only: Collection[str] | None = None) -> int:
        """``only``: the URLs that are meant."""
        dead = [entry for entry in self.in_state("dead") if is_retried(entry.kind, kinds)]
        if only is not None:
            dead = [entry for entry in dead if entry.request.url in only]
        others = [entry for entry in dead if entry.kind != FULL_KIND]
        for entry in others:
            entry.state, entry.attempts, entry.kind, entry.reason = "ready", 0, "", ""
        refused = sorted(
            (entry for entry in dead if entry.kind == FULL_KIND),
            key=lambda entry: (-entry.request.priority, entry.place),
        )
        limit = self.options.link_limit
        if limit is not None:
            refused = refused[: max(0, limit - len(self.in_state("ready", "waiting")))]
        for entry in refused:
            entry.state, entry.kind, entry.reason = "ready", "", ""
        return len(others) + len(refused)

    # -- roles and hosts

    def holds(self, role: str, token: int) -> bool:
        return token != 0 and self.roles[role].token == token

    def claim(self, role: str, ttl: float, holder: Holder | None = None) -> tuple[int, bytes] | None:
        """The token and the cursor."""
        held = self.roles[role]
        if held.finished or held.until > self.world.now:
            return None
        self._tokens += 1
        held.token, held.until, held.holder = self._tokens, self.world.now + ttl, holder
        held.claimed_by, held.claims = holder, held.claims + 1
        return held.token, held.cursor

    def claimed_roles(self) -> dict[str, Role]:
        """The roles that exist: those that were claimed, and not forgotten since."""
        return {name: role for name, role in self.roles.items() if role.claims}

    def forget(self, role: str) -> bool:
        if role not in self.claimed_roles() or self.roles[role].until > self.world.now:
            return False
        del self.roles[role]
        return True

    def advance(self, role: str, token: int, cursor: bytes, ttl: float) -> bool:
        if not self.holds(role, token):
            return False
        self.roles[role].cursor, self.roles[role].until = cursor, self.world.now + ttl
        return True

    def relinquish(self, role: str, token: int, *, finished: bool) -> bool:
        if not self.holds(role, token):
            return False
        self.roles[role].free()
        self.roles[role].finished = finished
        return True

    def update_host(self, host: str, update: HostUpdate) -> None:
        known = self.world.hosts[host]
        for name in ("delay", "concurrency", "crawl_delay", "learned_delay"):
            if (value := getattr(update, name)) is not UNSET:
                setattr(known, name, value)
        if update.block_for is not UNSET:
            until = self.world.now + update.block_for if update.block_for else 0.0
            known.blocked_until = max(known.blocked_until, until) if until else 0.0
