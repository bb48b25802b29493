"""Histories: the calls of clients that work on one run at the same time, and the search for an order that explains all
answers.

A `Recording` notes when each call of each client began and ended, and what it answered. `Recording.check` looks for an
order in which a frontier that does one step after the other would have given the same answers: for each request, for
each host, and for the counters. This is what linearizable means. A call without an answer, because its connection was
lost, may have happened at any time since, or not at all.

`shoal.testing.driving` makes histories of random calls.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, combinations, islice
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from shoal.errors import ShoalError, StoreAwayError, StoreFullError
from shoal.frontier.rules import HALTED
from shoal.http import Request
from shoal.ports import (
    Completion,
    Failure,
    Frontier,
    FrontierOptions,
    History,
    Holder,
    HostUpdate,
    Lease,
    Leased,
    Pushed,
    RequestState,
    Run,
    RunState,
    Stats,
    Store,
)
from shoal.system import clock
from shoal.testing.model import Entry, Host, Model, ModelLease, World
from shoal.urls.normalize import host_of

T = TypeVar("T")

SLACK = 0.005
"""Seconds by which the clock of the store and that of this process may drift apart during a history."""
MAX_STEPS = 30_000
"""How many steps a search may try before it gives up."""

# -- recording


@dataclass(eq=False)
class Operation:
    """A call of a client."""

    client: str
    name: str
    """The method."""
    arguments: tuple[Any, ...]
    called: float
    holder: Holder | None = None
    """On whose behalf it leases."""
    returned: float = inf
    answer: Any = None
    outcome: Literal["answered", "refused", "unknown"] = "unknown"
    """``refused``: an error that says that nothing was changed. ``unknown``: the answer was lost."""
    guess: bytes = b""
    """Of a lease whose answer was lost: a request that it may have got."""


class Recording:
    """What the clients of a run called, and what they were answered.

    The run has no limit for its queue and no seed role, and no other run of the store works meanwhile. Its requests are
    filtered, their pages are not large enough to be staged, and the host ``*`` has no settings. Do not cancel calls: a
    frontier may release what a cancelled call has leased.
    """

    def __init__(self, options: FrontierOptions, seed: int = 0) -> None:
        """``options``: of the run. ``seed``: what a failed check prints."""
        self.options = options
        self.seed = seed
        self.operations: list[Operation] = []

    async def call(
        self, client: str, name: str, arguments: tuple[Any, ...], step: Awaitable[T], holder: Holder | None = None
    ) -> T:
        """Await a step, and record it as a call of this client."""
        operation = Operation(client, name, arguments, clock.monotonic(), holder)
        self.operations.append(operation)
        try:
            operation.answer = answer = await step
        except ShoalError as exc:
            if isinstance(exc, StoreAwayError) and not isinstance(exc, StoreFullError):
                raise
            operation.answer, operation.outcome = exc, "refused"
            operation.returned = clock.monotonic()
            raise
        operation.outcome, operation.returned = "answered", clock.monotonic()
        return answer

    def check(self) -> None:
        """AssertionError if no order of the calls explains their answers. The message shows the calls about the
        request or host that contradict each other. RuntimeError if there are too many orders to try."""
        contradiction = find_contradiction(self.operations, self.options)
        if contradiction:
            raise AssertionError(f"seed {self.seed}: {contradiction}")


class RecordedFrontier:
    """The frontier of one client. It records the calls that are checked; `frontier` has all others.

    One client makes one call at a time. Each client needs its own connections, or its calls wait for each other.
    """

    def __init__(self, recording: Recording, client: str, frontier: Frontier, holder: Holder | None = None) -> None:
        """``holder``: the one that the frontier was opened with."""
        self.frontier = frontier
        self.client = client
        self.holder = holder
        self._recording = recording

    async def _call(self, name: str, step: Awaitable[T], *arguments: Any) -> T:
        return await self._recording.call(self.client, name, arguments, step, self.holder)

    async def push(self, requests: Sequence[Request]) -> Pushed:
        return await self._call("push", self.frontier.push(requests), requests)

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        step = self.frontier.lease(limit, ttl, counts_attempt=counts_attempt, nonce=nonce)
        call = self.client, nonce or os.urandom(16)
        return await self._call("lease", step, limit, ttl, counts_attempt, call)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        return await self._call("renew", self.frontier.renew(leases, ttl), leases, ttl)

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        return await self._call("reissue", self.frontier.reissue(leases, ttl, nonce=nonce), leases, ttl, nonce)

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        return await self._call("complete", self.frontier.complete(completions), completions)

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        return await self._call("fail", self.frontier.fail(failures), failures)

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        step = self.frontier.release(leases, contacted=contacted)
        return await self._call("release", step, leases, contacted)

    async def fence(self, slot: str, epoch: int) -> int:
        return await self._call("fence", self.frontier.fence(slot, epoch), slot, epoch)

    async def retry_dead(self, kinds: Sequence[str] | None = None) -> int:
        return await self._call("retry_dead", self.frontier.retry_dead(kinds), kinds)

    async def update_host(self, host: str, update: HostUpdate) -> None:
        return await self._call("update_host", self.frontier.update_host(host, update), host, update)

    async def find(self, request: Request) -> History | None:
        return await self._call("find", self.frontier.find(request, exact=True), request)

    async def stats(self) -> Stats:
        return await self._call("stats", self.frontier.stats())

    async def transition(self, store: Store, run_id: str, state: RunState) -> Run:
        """Move the run to another state: pause it, for example."""
        return await self._call("transition", store.transition(run_id, state), state)

    def hold(self, holder: Holder) -> None:
        """Not a call: see `shoal.ports.Frontier`."""
        self.frontier.hold(holder)
        self.holder = holder


# -- checking


def find_contradiction(operations: Sequence[Operation], options: FrontierOptions) -> str:
    """Calls of a history that contradict each other, as text. Empty if an order of the calls explains all answers."""
    if found := _repeated_token(operations) or _wrong_counter(operations):
        return found
    requests = {request.fingerprint(): request for operation in operations for request in _offered(operation)}
    by_host: dict[str, dict[bytes, Request]] = {}
    for fingerprint, request in requests.items():
        by_host.setdefault(host_of(request.url), {})[fingerprint] = request
    sweeps = _Sweeps(operations)
    parts = [_Checker({fingerprint: request}, None, options, sweeps) for fingerprint, request in requests.items()]
    parts += [_Checker(of_host, host, options, sweeps) for host, of_host in by_host.items()]
    for part in parts:
        relevant = [operation for operation in operations if part.concerns(operation)]
        if not part.explains(relevant):
            return part.describe(relevant)
    return ""


def _offered(operation: Operation) -> Iterator[Request]:
    """The requests that a call may add."""
    if operation.name == "push":
        yield from operation.arguments[0]
    elif operation.name in ("complete", "fail"):
        for ended in operation.arguments[0]:
            yield from ended.children


def _leases(operation: Operation) -> list[Lease]:
    """The leases that a call is about."""
    if operation.name in ("complete", "fail"):
        return [ended.lease for ended in operation.arguments[0]]
    return list(operation.arguments[0]) if operation.name in ("renew", "reissue", "release") else []


def _repeated_token(operations: Sequence[Operation]) -> str:
    """Each token is given to one request by one call, which may be repeated."""
    givers: dict[int, tuple[object, Operation]] = {}
    for operation in operations:
        given: list[tuple[Lease, object]] = []
        if operation.outcome == "answered" and operation.name == "lease":
            given = [(lease, operation.arguments[3]) for lease in operation.answer.leases]
        elif operation.outcome == "answered" and operation.name == "reissue":
            before, _, nonce = operation.arguments
            pairs = zip(before, operation.answer, strict=True)
            given = [(lease, (old.token, nonce)) for old, lease in pairs if lease is not None]
        for lease, call in given:
            giver = givers.setdefault(lease.token, ((lease.fingerprint, call), operation))
            if giver[0] != (lease.fingerprint, call):
                return f"two calls gave the token {lease.token}:\n" + show([giver[1], operation])
    return ""


def _wrong_counter(operations: Sequence[Operation]) -> str:
    """The counters that never go down lie between what had surely happened and what may have happened."""
    for read in operations:
        if read.name != "stats" or read.outcome != "answered":
            continue
        stats: Stats = read.answer
        if not stats.balanced:
            return "the counters do not balance:\n" + show([read])
        for name in ("pushed", "done"):
            least = sum(_counted(operation, name)[0] for operation in operations if operation.returned < read.called)
            most = sum(_counted(operation, name)[1] for operation in operations if operation.called < read.returned)
            if not least <= getattr(stats, name) <= most:
                before = [operation for operation in operations if _counted(operation, name)[1]]
                before = [operation for operation in before if operation.called < read.returned]
                return f"{name} is {getattr(stats, name)}, not {least} to {most}:\n" + show([*before[-20:], read])
    return ""


def _counted(operation: Operation, name: str) -> tuple[int, int]:
    """By how much a call raised a counter: at least, and at most."""
    if operation.outcome == "refused":
        return 0, 0
    if operation.outcome == "unknown" or (operation.name == "fail" and name == "pushed"):
        most = len(list(_offered(operation))) if name == "pushed" else len(_leases(operation))
        return 0, most if name == "pushed" or operation.name == "complete" else 0
    if operation.name == "push" and name == "pushed":
        return operation.answer.added, operation.answer.added
    if operation.name != "complete":
        return 0, 0
    pushed = [answer for answer in operation.answer if answer is not None]
    if name == "pushed":
        added = sum(answer.added for answer in pushed)
        return added, added
    may_be_repeat = sum(answer == Pushed(0, 0) for answer in pushed)
    return len(pushed) - may_be_repeat, len(pushed)


class _Sweeps:
    """The lease calls of a history: only they release expired leases."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        calls = sorted((call.called, call.returned) for call in operations if call.name == "lease")
        self._called = [called for called, _ in calls]
        self._latest = list(accumulate((returned for _, returned in calls), max))

    def before(self, moment: float) -> float:
        """The last moment at which a lease call may have looked for expired leases, of those called until then."""
        place = bisect_right(self._called, moment)
        return self._latest[place - 1] + SLACK if place else -inf


class _State(NamedTuple):
    """What a frontier knows of the requests of a part, after some of the calls."""

    entries: tuple[tuple[Any, ...], ...]
    """The name and the other values of each `Entry`. Times are the earliest possible ones."""
    host: tuple[Any, ...]
    fences: tuple[tuple[str, int], ...]
    halted: bool


_Done: TypeAlias = tuple[int, _State, int]
"""A set of calls as bits, the state after them, and those lost calls among them that have mattered to no other yet."""


class _Checker:
    """Some requests, which are independent of all others: one alone, or all of a host with its politeness.

    Each call happens at one moment between its begin and its end. The store reads its clock at such a moment, too,
    but perhaps at another one. So what counts from a call counts from its begin, and what must be over is compared with
    its end: no answer is refused that a correct store can give."""

    def __init__(
        self, requests: dict[bytes, Request], host: str | None, options: FrontierOptions, sweeps: _Sweeps
    ) -> None:
        """``host``: the one whose politeness counts."""
        self._requests = requests
        self._host = host
        self._sweeps = sweeps
        self._world = World()
        self._model = Model(options, self._world)
        self._halted = False
        self._calls: dict[object, int] = {}
        self._first = self._save()

    def concerns(self, operation: Operation) -> bool:
        """Whether a call can depend on this part, or change it."""
        if operation.outcome == "refused" or operation.name == "stats":
            return False
        if operation.name == "update_host":
            return bool(operation.arguments[0] == self._host)
        if operation.name == "retry_dead" and operation.answer == 0:  # it changed nothing
            return False
        touched = self._touched(operation)
        return operation.name == "transition" or touched is None or bool(touched)

    def _touched(self, operation: Operation) -> set[bytes] | None:
        """The requests that a call names; None if it may concern any."""
        if operation.name in ("fence", "retry_dead") or (
            operation.name == "lease" and operation.outcome == "unknown" and not operation.guess
        ):
            return None
        named = {request.fingerprint() for request in _offered(operation)}
        named |= {lease.fingerprint for lease in _leases(operation)}
        if operation.name == "find":
            named.add(operation.arguments[0].fingerprint())
        if operation.name == "lease":
            named |= {operation.guess} if operation.guess else {each.fingerprint for each in operation.answer.leases}
        return named & self._requests.keys()

    # -- the search

    def explains(self, operations: Iterable[Operation]) -> bool:
        """Whether there is an order of these calls that explains their answers."""
        return next(self._orders(self._prepare(operations)), None) is not None

    def _prepare(self, operations: Iterable[Operation]) -> list[Operation]:
        """Those that must happen first, in the order of their ends. Each request is a call of its own in a lease whose
        answer was lost."""
        prepared: list[Operation] = []
        for operation in operations:
            if operation.name == "lease" and operation.outcome == "unknown":
                if operation.arguments[0] > 0:
                    prepared += [replace(operation, guess=fingerprint) for fingerprint in self._requests]
            else:
                prepared.append(operation)
        return sorted(prepared, key=lambda operation: (operation.returned, operation.called))

    def _orders(self, operations: Sequence[Operation]) -> Iterator[_State]:
        """The states after all answered calls, for each order that explains them.

        A call whose answer was lost can also happen later, or not at all. So it is tried only just before a call to
        which it matters."""
        every = sum(1 << bit for bit, operation in enumerate(operations) if operation.outcome == "answered")
        matters = [
            sum(1 << bit for bit, earlier in enumerate(operations) if self._matters(earlier, later))
            for later in operations
        ]
        seen: set[_Done] = set()
        stack: list[Iterator[_Done]] = [iter([(0, self._first, 0)])]
        while stack:
            reached = next(stack[-1], None)
            if reached is None:
                stack.pop()
            elif reached not in seen:
                seen.add(reached)
                if len(seen) > MAX_STEPS:
                    raise RuntimeError("these calls have too many orders: record a shorter history, or lose less")
                if reached[0] & every == every:
                    yield reached[1]
                else:
                    stack.append(self._steps(operations, matters, *reached))

    def _matters(self, earlier: Operation, later: Operation) -> bool:
        """Whether the answer to ``later`` may depend on whether ``earlier`` has happened."""
        names = {earlier.name, later.name}
        if "transition" in names:
            return names <= {"lease", "transition"}
        if "update_host" in names:
            return names <= {"lease", "update_host"}
        if later.name == "fence" and earlier.guess:
            return earlier.holder is not None and earlier.holder.slot == later.arguments[0]
        before, after = self._touched(earlier), self._touched(later)
        if before is None or after is None or before & after:
            return True
        return self._host is not None and later.name == "lease" and earlier.name not in ("push", "find")

    def _steps(
        self, operations: Sequence[Operation], matters: Sequence[int], done: int, state: _State, idle: int
    ) -> Iterator[_Done]:
        """One more call: one that began before any other of those that are left has ended."""
        left = [(bit, operation) for bit, operation in enumerate(operations) if not done & (1 << bit)]
        horizon = min(operation.returned for _, operation in left)
        possible = [(bit, operation) for bit, operation in left if operation.called <= horizon]
        useful, added = 0, sum(1 << bit for bit, operation in possible if operation.outcome == "answered")
        while added:
            useful |= added
            wanted = [matters[bit] for bit, _ in possible if added & 1 << bit]
            added = reduce(int.__or__, wanted, 0) & ~useful
        for bit, operation in possible:
            is_known, still_idle = operation.outcome == "answered", idle & ~matters[bit]
            if useful & 1 << bit and not (is_known and still_idle):
                for after in self._after(state, operation):
                    if is_known:
                        yield done | 1 << bit, after, 0
                    elif after != state:
                        yield done | 1 << bit, after, still_idle | 1 << bit

    def _after(self, state: _State, operation: Operation) -> Iterator[_State]:
        """The possible states after a call. Leases that have expired may have been released before it. As they may also
        be released later, only those are that must be."""
        self._load(state)
        self._world.now = self._sweeps.before(operation.returned)
        touched, overdue = self._touched(operation), self._model.overdue()
        if operation.guess and not self._may_be_granted(operation.guess, overdue):
            return
        expired = [
            number
            for number, entry in enumerate(self._model.entries)
            if entry in overdue
            and (touched is None or entry.name in touched or (self._host is not None and operation.name == "lease"))
        ]
        for count in range(len(expired) + 1):
            found = False
            for lost in combinations(expired, count):
                self._load(state)
                for number in lost:
                    entry = self._model.entries[number]
                    self._world.now = entry.until
                    self._model.lose(entry)
                self._world.now = operation.called
                if self._take(operation):
                    found = True
                    yield self._save()
            if found and touched is not None:
                return

    def _may_be_granted(self, fingerprint: bytes, overdue: Sequence[Entry]) -> bool:
        entry = self._entry(fingerprint)
        return entry is not None and (entry.state in ("ready", "waiting") or entry in overdue) and not self._halted

    def _save(self) -> _State:
        model = self._model
        entries = tuple(
            (
                entry.name, entry.state, entry.attempts, entry.token, entry.until, entry.holder, entry.begun,
                entry.origin, entry.kind,
            )
            for entry in model.entries
        )  # fmt: skip
        host = () if self._host is None else tuple(vars(self._world.hosts[self._host]).values())
        return _State(entries, host, tuple(sorted(model.fences.items())), self._halted)

    def _load(self, state: _State) -> None:
        model = self._model
        model.entries = [
            Entry(
                self._requests[name], name, place, None, request_state, attempts, token, until, holder, begun, origin,
                kind=kind,
            )
            for place, (name, request_state, attempts, token, until, holder, begun, origin, kind)
            in enumerate(state.entries)
        ]  # fmt: skip
        if self._host is not None:
            self._world.hosts[self._host] = Host(*state.host)
        model.fences.clear()
        model.fences.update(state.fences)
        self._halted = state.halted

    # -- one call

    def _take(self, operation: Operation) -> bool:
        """Take a step on the model. Returns whether the model gives the same answer."""
        arguments, answer, is_known = operation.arguments, operation.answer, operation.outcome == "answered"
        match operation.name:
            case "push":
                return self._add(arguments[0], answer.added if is_known else None)
            case "lease" if operation.guess:
                return self._grant(operation, operation.guess, None)
            case "lease":
                return all(
                    self._grant(operation, lease.fingerprint, lease)
                    for lease in answer.leases
                    if lease.fingerprint in self._requests
                )
            case "renew":
                renewed = [(held and self._model.renew(held, arguments[1])) for held in self._held(operation)]
                return not is_known or self._agree(operation, renewed, [lease is not None for lease in answer])
            case "release":
                released = [
                    held and self._model.release(held, contacted=arguments[1]) for held in self._held(operation)
                ]
                return not is_known or self._agree(operation, released, answer)
            case "reissue":
                return self._reissue(operation)
            case "complete":
                return all(
                    self._complete(page, held, answer[place] if is_known else None, is_known)
                    for place, (page, held) in enumerate(zip(arguments[0], self._held(operation), strict=True))
                )
            case "fail":
                return all(
                    self._fail(page, held, answer[place] if is_known else None, is_known)
                    for place, (page, held) in enumerate(zip(arguments[0], self._held(operation), strict=True))
                )
            case "fence":
                fenced = Holder(*arguments)
                lost = 0 if self._model.is_refused(fenced) else self._model.fence(fenced)
                return not is_known or lost <= answer
            case "retry_dead":
                retried = self._model.retry_dead(arguments[0])
                return not is_known or retried <= answer
            case "update_host":
                self._model.update_host(*arguments)
            case "transition":
                self._halted = arguments[0] in HALTED
            case "find":
                return self._has(arguments[0], answer, operation.returned)
        return True

    def _entry(self, fingerprint: bytes) -> Entry | None:
        return next((entry for entry in self._model.entries if entry.name == fingerprint), None)

    def _held(self, operation: Operation) -> list[ModelLease | None]:
        """The leases that a call is about, in the model. None for those of other parts, and of requests that were
        never added."""
        entries = ((lease, self._entry(lease.fingerprint)) for lease in _leases(operation))
        return [ModelLease(entry, lease.token, lease.attempt) if entry else None for lease, entry in entries]

    def _agree(self, operation: Operation, results: Sequence[object], answers: Sequence[object]) -> bool:
        """Whether the answers about leases of this part are those of the model."""
        return all(
            bool(result) == bool(answer)
            for lease, result, answer in zip(_leases(operation), results, answers, strict=True)
            if lease.fingerprint in self._requests
        )

    def _add(self, requests: Sequence[Request], added: int | None) -> bool:
        """``added``: how many of them were new, also of those that belong to other parts. None: not known."""
        own = [request for request in requests if request.fingerprint() in self._requests]
        new = self._model.push(own).added
        return added is None or new <= added <= new + len(requests) - len(own)

    def _grant(self, operation: Operation, fingerprint: bytes, lease: Lease | None) -> bool:
        """``lease``: what the call answered; None if the answer was lost."""
        entry, model = self._entry(fingerprint), self._model
        _, ttl, counts_attempt, call = operation.arguments
        if entry is None:
            return False
        unknown_token = self._token_of(call)
        if entry.state == "leased":  # the answer to a call that is repeated
            if lease is None or entry.token not in (lease.token, unknown_token):
                return False
            entry.token, entry.until = lease.token, self._world.now + ttl
            return lease.attempt == entry.attempts + (not entry.begun)
        self._world.now = operation.returned + SLACK
        is_ready = entry.state == "ready" or (entry.state == "waiting" and entry.until <= self._world.now)
        is_due = self._host is None or model.is_due(self._host)
        self._world.now = operation.called
        if not is_ready or not is_due or self._halted or model.is_refused(operation.holder):
            return False
        held = model.grant(entry, ttl, operation.holder, counts_attempt=counts_attempt)
        entry.token = unknown_token if lease is None else lease.token
        return lease is None or lease.attempt == held.attempt

    def _token_of(self, call: object) -> int:
        """Stands for the token that a call gives, until an answer shows it."""
        return -1 - self._calls.setdefault(call, len(self._calls))

    def _reissue(self, operation: Operation) -> bool:
        leases, ttl, nonce = operation.arguments
        answers = operation.answer if operation.outcome == "answered" else [None] * len(leases)
        reissued: set[bytes] = set()
        for lease, held, answer in zip(leases, self._held(operation), answers, strict=True):
            if lease.fingerprint not in self._requests:
                continue
            entry, token = self._entry(lease.fingerprint), self._token_of((lease.token, nonce))
            is_first = entry is not None and lease.fingerprint not in reissued
            before = entry.token if entry else 0
            (after,) = self._model.reissue([held], ttl, nonce) if held and is_first else (None,)
            if operation.outcome == "answered" and (after is None) != (answer is None):
                return False
            if after is None or entry is None:
                continue
            reissued.add(lease.fingerprint)
            is_repeat = entry.token == before
            if answer is None:
                entry.token = before if is_repeat else token
            elif is_repeat and entry.token not in (answer.token, token):
                return False
            else:
                entry.token = answer.token
        return True

    def _complete(self, page: Completion, held: ModelLease | None, answer: Pushed | None, is_known: bool) -> bool:
        children = page.children
        if page.lease.fingerprint not in self._requests:
            is_done = answer is not None and (answer != Pushed(0, 0) or not children) if is_known else True
            return not is_done or self._add(children, answer.added if answer else None)
        done = held and self._model.complete(
            held, [], [], status=page.status, duplicates=page.duplicates, contacted=page.contacted
        )
        if done is None:
            is_repeat = held is not None and held.entry.state == "done" and held.entry.token == held.token
            return not is_known or answer is None or (is_repeat and answer == Pushed(0, 0))
        return not (is_known and answer is None) and self._add(children, answer.added if answer else None)

    def _fail(self, page: Failure, held: ModelLease | None, answer: RequestState | None, is_known: bool) -> bool:
        if page.lease.fingerprint in self._requests:
            state = held and self._model.fail(
                held, page.retry_in, [], [],
                status=page.status, kind=page.kind, reason=page.reason, contacted=page.contacted,
            )  # fmt: skip
            if is_known and state != answer:
                return False
        else:
            state = answer if is_known else "dead"
        return state != "dead" or self._add(page.children, None)

    def _has(self, request: Request, found: History | None, returned: float) -> bool:
        entry = self._entry(request.fingerprint())
        if entry is None or found is None:
            return entry is None and found is None
        is_due = entry.state == "waiting" and entry.until <= returned + SLACK
        return found.attempts == entry.attempts and found.state in (entry.state, "ready" if is_due else entry.state)

    # -- a contradiction

    def describe(self, operations: Sequence[Operation]) -> str:
        """The shortest beginning of the history that nothing explains, without the calls that change nothing. Those
        with a star are the last, and overlap each other: they contradict what was known before them."""
        ends = sorted(operation.returned for operation in operations if operation.outcome == "answered")
        shortest = bisect_left(ends, 1, key=lambda end: 0 if self.explains(_until(operations, end)) else 1)
        calls = sorted(_until(operations, ends[shortest]), key=lambda operation: operation.called)
        answered = [operation for operation in calls if operation.outcome == "answered"]
        first = max(
            operation.called
            for operation in answered
            if all(other.returned < operation.called or other.called >= operation.called for other in answered)
        )
        stars = [operation for operation in calls if operation.called >= first]
        before = [operation for operation in calls if operation.called < first]
        states = self._states(before)
        for operation in list(before):  # leave out what changes nothing
            fewer = [other for other in before if other is not operation]
            if self._states(fewer).keys() == states.keys() and not self.explains(fewer + stars):
                before = fewer
        start = min(operation.called for operation in operations)
        known = " or ".join(sorted({self._describe_state(state, start) for state in states.values()})[:4])
        subject = self._host or next(iter(self._requests.values())).url
        table = show(before + stars, frozenset(stars), start)
        return f"no order of the calls explains the answers about {subject}.\n{table}\nBefore the stars: {known}"

    def _states(self, operations: Sequence[Operation]) -> dict[object, _State]:
        """The possible states after these calls."""
        states = islice(self._orders(self._prepare(operations)), 50)
        return {(state.entries, state.host, state.halted): state for state in states}

    def _describe_state(self, state: _State, start: float) -> str:
        self._load(state)
        texts = []
        for entry in self._model.entries:
            text = f"{entry.request.url} is {entry.state}, attempts: {entry.attempts}"
            if entry.state in ("leased", "waiting"):
                text += f", at least until {entry.until - start:.4f}"
            texts.append(text)
        if self._host and self._world.hosts[self._host].ended_at is not None:
            texts.append(f"the last fetch ended at {(self._world.hosts[self._host].ended_at or 0) - start:.4f}")
        return "; ".join(texts) or "nothing was added"


def _until(operations: Sequence[Operation], end: float) -> list[Operation]:
    """The history up to a moment: the answers of later calls are not known."""
    return [
        operation
        if operation.returned <= end
        else replace(operation, returned=inf, answer=None, outcome="unknown")
        for operation in operations
        if operation.called <= end
    ]  # fmt: skip


def show(operations: Sequence[Operation], starred: frozenset[Operation] = frozenset(), start: float = -1.0) -> str:
    """The calls, one in a line: client, begin, end, arguments and answer. Tokens are numbered as they occur."""
    if start < 0:
        start = min(operation.called for operation in operations)
    lines, tokens, leased = [], _Tokens(), set[object]()
    for operation in operations:
        end = "   lost" if operation.outcome == "unknown" else f"{operation.returned - start:7.4f}"
        answer = "?" if operation.outcome == "unknown" else _shown(operation.answer, tokens)
        what = f"{operation.name}({_shown(operation.arguments[:3], tokens)})"
        if operation.name == "lease":
            what += " again" if operation.arguments[3] in leased else ""
            leased.add(operation.arguments[3])
        mark = "*" if operation in starred else " "
        lines.append(f"{mark} {operation.client:4} {operation.called - start:7.4f} {end}  {what} -> {answer}")
    return "\n".join(lines)


class _Tokens(dict[int, str]):
    def __missing__(self, token: int) -> str:
        self[token] = name = f"t{len(self) + 1}"
        return name


def _shown(value: object, tokens: _Tokens) -> str:
    """A value, without what the checks do not look at."""
    match value:
        case Request():
            return value.url
        case Lease():
            return f"{value.request.url} under {tokens[value.token]}, attempt {value.attempt}"
        case Leased():
            return _shown(value.leases, tokens)
        case Completion() | Failure():
            return " + ".join(_shown(part, tokens) for part in (value.lease, *value.children))
        case History():
            return f"{value.state}, attempts: {value.attempts}"
        case Stats():
            return f"pushed {value.pushed}, done {value.done}"
        case Pushed():
            return f"{value.added} new"
        case Run():
            return value.state
        case HostUpdate():
            return f"delay {value.delay}, concurrency {value.concurrency}"
        case list():
            return f"[{'; '.join(_shown(each, tokens) for each in value)}]"
        case tuple():
            return ", ".join(_shown(each, tokens) for each in value)
        case bytes():
            return value.hex()[:8]
    return repr(value)
