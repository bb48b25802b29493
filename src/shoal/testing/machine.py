"""Random steps on a backend and on the model of `shoal.testing.model`, compared after each. Hypothesis finds the
shortest story that tells them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import SearchStrategy

from shoal.errors import QueueFullError
from shoal.http import Request
from shoal.ports import Claim, Completion, Failure, Frontier, FrontierOptions, HostUpdate, Lease, Pushed
from shoal.testing.harness import Harness
from shoal.testing.model import Held, Model, World

Result = TypeVar("Result")

SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
FOREVER = 1e6


class Page(NamedTuple):
    """A request to be made."""

    host: str
    number: int
    priority: float
    dont_filter: bool


class Taken(NamedTuple):
    """A lease of the backend, and the model's."""

    lease: Lease
    held: Held


class Role(NamedTuple):
    """A claim of the backend, and the model's."""

    claim: Claim
    token: int


HOSTS = st.sampled_from(["a.example", "b.example", "c.example:81"])
PAGE: SearchStrategy[Page] = st.builds(
    Page, HOSTS, st.integers(0, 7), st.sampled_from([0, 0, 0, 1, -1, 0.5]), st.sampled_from([False, False, False, True])
)
PAGES = st.lists(PAGE, max_size=5)
ITEMS = st.lists(st.binary(max_size=2), max_size=2)
CURSORS = st.sampled_from([b"", b"1", b"2"])
TTLS = st.sampled_from([20.0, 50.0, 100.0])
DELAYS = st.sampled_from([None, 0.0, 10.0, 30.0])
UPDATES: SearchStrategy[HostUpdate] = st.one_of(
    st.builds(HostUpdate, delay=DELAYS),
    st.builds(HostUpdate, crawl_delay=DELAYS),
    st.builds(HostUpdate, learned_delay=DELAYS),
    st.builds(HostUpdate, concurrency=st.sampled_from([None, 1, 2, 9])),
    st.builds(HostUpdate, block_for=st.sampled_from([None, 0.0, 20.0, 60.0])),
)
OPTIONS: SearchStrategy[FrontierOptions] = st.builds(
    FrontierOptions,
    max_attempts=st.integers(1, 3),
    delay=st.sampled_from([0.0, 0.0, 10.0]),
    concurrency_per_host=st.sampled_from([1, 2, 8]),
    max_queue_size=st.sampled_from([None, None, 6]),
    in_memory=st.sampled_from([1, 3, 100_000]),
)


def check_machine(make_harness: Callable[[], Harness], with_settings: settings = SETTINGS) -> None:
    """Run the machine over a backend. AssertionError tells the shortest story in which a law is broken."""

    class Machine(FrontierMachine):
        def make_harness(self) -> Harness:
            return make_harness()

    run_state_machine_as_test(Machine, settings=with_settings)


class FrontierMachine(RuleBasedStateMachine):
    """One worker of one run, and now and then a neighbour: another run that meets the same hosts."""

    leases: Bundle[Taken] = Bundle("leases")
    spent: Bundle[Taken] = Bundle("spent")
    roles: Bundle[Role] = Bundle("roles")

    def make_harness(self) -> Harness:
        """The backend to run on."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._harness = self.make_harness()
        self._requests = 0
        self._neighbours: list[Taken] = []
        self._fingerprints: dict[int, bytes] = {}

    def _do(self, step: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(step)

    def _make(self, pages: Sequence[Page]) -> list[Request]:
        """Requests that can be told apart, also when their URLs can't."""
        self._requests += len(pages)
        return [
            Request(
                f"http://{page.host}/{page.number}",
                priority=page.priority,
                dont_filter=page.dont_filter,
                meta={"number": self._requests - place},
            )
            for place, page in enumerate(pages)
        ]

    @initialize(options=OPTIONS)
    def open(self, options: FrontierOptions) -> None:
        self.world = World()
        self.model, self.neighbour_model = Model(options, self.world), Model(options, self.world)
        self.frontier = self._do(self._harness.open(options))
        self.neighbour = self._do(self._harness.open_run("neighbour", options))

    # -- pushing

    def _push(
        self, frontier: Frontier, model: Model, requests: list[Request], role: Role | None, cursor: bytes
    ) -> None:
        expected: Pushed | None = None
        try:
            expected = model.push(requests, role.token if role else None, cursor)
            assert self._do(frontier.push(requests, seed=role.claim if role else None, cursor=cursor)) == expected
        except QueueFullError:
            if expected is not None:
                raise
            try:
                pushed = self._do(frontier.push(requests, seed=role.claim if role else None, cursor=cursor))
            except QueueFullError:
                return
            raise AssertionError(f"a full queue took {pushed}") from None

    @rule(pages=PAGES)
    def push(self, pages: list[Page]) -> None:
        self._push(self.frontier, self.model, self._make(pages), None, b"")

    @rule(pages=PAGES, role=roles, cursor=CURSORS)
    def push_seeds(self, pages: list[Page], role: Role, cursor: bytes) -> None:
        if role.claim.role == "seed":
            self._push(self.frontier, self.model, self._make(pages), role, cursor)

    # -- leasing

    def _lease(self, frontier: Frontier, model: Model, limit: int, ttl: float) -> list[Taken]:
        leased = self._do(frontier.lease(limit, ttl))
        expected, wait = model.lease(limit, ttl)
        assert [(lease.request, lease.attempt) for lease in leased.leases] == [
            (held.entry.request, held.attempt) for held in expected
        ]
        if len(expected) < limit:
            assert leased.wait is None or leased.wait > 0, "asks to be asked again at once"
            assert wait is None or (leased.wait is not None and leased.wait <= wait + 0.01), "asks to be asked too late"
        taken = [Taken(lease, held) for lease, held in zip(leased.leases, expected, strict=True)]
        for lease, held in taken:
            assert lease.host == held.entry.host
            name = lease.request.fingerprint() if not lease.request.dont_filter else lease.fingerprint
            assert lease.fingerprint == self._fingerprints.setdefault(id(held.entry), name)
        return taken

    @rule(target=leases, limit=st.integers(0, 5), ttl=TTLS)
    def lease(self, limit: int, ttl: float) -> Any:
        return multiple(*self._lease(self.frontier, self.model, limit, ttl))

    @rule(batch=st.lists(leases, max_size=3), ttl=TTLS)
    def renew(self, batch: list[Taken], ttl: float) -> None:
        renewed = self._do(self.frontier.renew([taken.lease for taken in batch], ttl))
        assert [lease is not None for lease in renewed] == [self.model.renew(taken.held, ttl) for taken in batch]

    # -- ending leases

    def _complete(self, batch: list[Taken], pages: list[Page], items: list[bytes], contacted: bool) -> None:
        completions = [
            Completion(
                lease=taken.lease,
                items=items,
                children=self._make(pages) if place == 0 else self._make(pages[:1]),
                status=200 + place,
                duplicates=place,
                contacted=contacted,
            )
            for place, taken in enumerate(batch)
        ]
        expected = [
            self.model.complete(
                taken.held, items, each.children, status=each.status, duplicates=each.duplicates, contacted=contacted
            )
            for taken, each in zip(batch, completions, strict=True)
        ]
        assert self._do(self.frontier.complete(completions)) == expected

    @rule(
        target=spent,
        batch=st.lists(consumes(leases), min_size=1, max_size=3),
        pages=PAGES,
        items=ITEMS,
        contacted=st.booleans(),
    )
    def complete(self, batch: list[Taken], pages: list[Page], items: list[bytes], contacted: bool) -> Any:
        self._complete(batch, pages, items, contacted)
        return multiple(*batch)

    def _fail(
        self,
        batch: list[Taken],
        retry_in: float | None,
        kind: str,
        pages: list[Page],
        items: list[bytes],
        contacted: bool,
    ) -> None:
        failures = [
            Failure(
                lease=taken.lease,
                kind=kind,
                reason=f"because of {kind}",
                retry_in=retry_in,
                items=items,
                children=self._make(pages),
                status=500 + place,
                contacted=contacted,
            )
            for place, taken in enumerate(batch)
        ]
        expected = [
            self.model.fail(
                taken.held, retry_in, items, each.children,
                status=each.status, kind=kind, reason=each.reason, contacted=contacted,
            )
            for taken, each in zip(batch, failures, strict=True)
        ]  # fmt: skip
        assert self._do(self.frontier.fail(failures)) == expected

    @rule(
        target=spent,
        batch=st.lists(consumes(leases), min_size=1, max_size=2),
        retry_in=st.sampled_from([None, 10.0, 20.0, 60.0]),
        kind=st.sampled_from(["timeout", "robots"]),
        pages=PAGES,
        items=ITEMS,
        contacted=st.booleans(),
    )
    def fail(
        self,
        batch: list[Taken],
        retry_in: float | None,
        kind: str,
        pages: list[Page],
        items: list[bytes],
        contacted: bool,
    ) -> Any:
        self._fail(batch, retry_in, kind, pages, items, contacted)
        return multiple(*batch)

    def _release(self, batch: list[Taken], contacted: bool) -> None:
        expected = [self.model.release(taken.held, contacted=contacted) for taken in batch]
        assert self._do(self.frontier.release([taken.lease for taken in batch], contacted=contacted)) == expected

    @rule(target=spent, batch=st.lists(consumes(leases), min_size=1, max_size=3), contacted=st.booleans())
    def release(self, batch: list[Taken], contacted: bool) -> Any:
        self._release(batch, contacted)
        return multiple(*batch)

    @rule(taken=spent, how=st.sampled_from(["complete", "fail", "retry", "release", "renew"]), pages=PAGES)
    def use_a_spent_lease(self, taken: Taken, how: str, pages: list[Page]) -> None:
        match how:
            case "complete":
                self._complete([taken, taken], pages, [b"stale"], True)
            case "fail":
                self._fail([taken], None, "stale", pages, [b"stale"], True)
            case "retry":
                self._fail([taken], 10.0, "stale", pages, [b"stale"], True)
            case "release":
                self._release([taken], True)
            case _:
                self.renew([taken], 100.0)

    @rule(kinds=st.sampled_from([None, ["robots"], ["timeout", "worker lost"]]))
    def retry_dead(self, kinds: list[str] | None) -> None:
        assert self._do(self.frontier.retry_dead(kinds)) == self.model.retry_dead(kinds)

    # -- time, hosts, roles

    @rule(seconds=st.sampled_from([10.0, 20.0, 50.0, 100.0]))
    def advance(self, seconds: float) -> None:
        self._do(self._harness.advance(seconds))
        self.world.now += seconds

    @rule(host=HOSTS, update=UPDATES)
    def update_host(self, host: str, update: HostUpdate) -> None:
        self._do(self.frontier.update_host(host, update))
        self.model.update_host(host, update)

    @rule(target=roles, role=st.sampled_from(["seed", "drain"]), ttl=TTLS)
    def claim(self, role: str, ttl: float) -> Any:
        claim, expected = self._do(self.frontier.claim(role, ttl)), self.model.claim(role, ttl)
        assert (claim and claim.cursor) == (expected and expected[1])
        return multiple(Role(claim, expected[0])) if claim and expected else multiple()

    @rule(role=roles, cursor=CURSORS, ttl=TTLS)
    def advance_role(self, role: Role, cursor: bytes, ttl: float) -> None:
        expected = self.model.advance(role.claim.role, role.token, cursor, ttl)
        assert self._do(self.frontier.advance(role.claim, cursor, ttl)) == expected

    @rule(role=roles, finished=st.booleans())
    def relinquish(self, role: Role, finished: bool) -> None:
        expected = self.model.relinquish(role.claim.role, role.token, finished=finished)
        assert self._do(self.frontier.relinquish(role.claim, finished=finished)) == expected

    # -- the neighbour

    @rule(pages=PAGES)
    def neighbour_pushes(self, pages: list[Page]) -> None:
        self._push(self.neighbour, self.neighbour_model, self._make(pages), None, b"")

    @rule(limit=st.integers(1, 3))
    def neighbour_leases(self, limit: int) -> None:
        self._neighbours += self._lease(self.neighbour, self.neighbour_model, limit, FOREVER)

    @precondition(lambda self: self._neighbours)
    @rule(contacted=st.booleans())
    def neighbour_completes(self, contacted: bool) -> None:
        lease, held = self._neighbours.pop()
        expected = self.neighbour_model.complete(held, [], [], status=200, duplicates=0, contacted=contacted)
        done = self._do(self.neighbour.complete([Completion(lease=lease, status=200, contacted=contacted)]))
        assert done == [expected]

    # -- looking at it

    @rule(page=PAGE)
    def look_at_a_url(self, page: Page) -> None:
        request = Request(f"http://{page.host}/{page.number}")
        found = self._do(self.frontier.find(request))
        entries = [entry for entry in self.model.entries if entry.request.url == request.url]
        filtered = next((entry for entry in entries if not entry.request.dont_filter), None)
        if filtered is None:
            assert entries or found is None
            return
        assert found is not None
        assert (found.url, found.attempts, found.status, found.items, found.parent) == (
            request.url,
            filtered.attempts,
            filtered.status,
            filtered.items,
            filtered.parent.request.url if filtered.parent else None,
        )
        if filtered.state != "waiting":  # it may be ready already when its time has come
            assert found.state == filtered.state
        if filtered.state == "dead" and filtered.reason:
            assert found.reason == filtered.reason

    def _check_log(self) -> None:
        log = self._do(self.frontier.read_items(0, 10_000))
        assert [(item.fingerprint, item.index, item.payload) for item in log] == [
            (self._fingerprints[id(entry)], index, payload) for entry, index, payload in self.model.log
        ]

    @rule(count=st.integers(1, 3))
    def trim_items(self, count: int) -> None:
        if items := self._do(self.frontier.read_items(0, count)):
            self._do(self.frontier.trim_items(items[-1].seq))
            del self.model.log[: len(items)]
        self._check_log()

    @precondition(lambda self: self._harness.durable and not self._neighbours)
    @rule()
    def the_process_dies(self) -> None:
        self.frontier = self._do(self._harness.reopen())
        self.neighbour = self._do(self._harness.open_run("neighbour"))
        if not self._harness.keeps_leases:
            for entry in self.model.in_state("leased"):
                self.model.lose(entry)

    @invariant()
    def the_books_agree(self) -> None:
        stats, expected = self._do(self.frontier.stats()), self.model.stats()
        due = sum(entry.until <= self.world.now for entry in self.model.in_state("waiting"))
        # A request whose time has come may be counted as ready at once, or when it is next looked for.
        early = expected.waiting - stats.waiting
        assert 0 <= early <= due
        assert stats.balanced
        assert (stats.ready, stats.pushed, stats.leased, stats.done, stats.dead) == (
            expected.ready + early,
            expected.pushed,
            expected.leased,
            expected.done,
            expected.dead,
        )
        assert (stats.duplicates, stats.items, stats.seeding) == (expected.duplicates, expected.items, expected.seeding)
        assert self._do(self.frontier.audit()) == stats
        assert self._do(self.frontier.is_finished()) == (expected.remaining == 0 and not expected.seeding)

    def teardown(self) -> None:
        try:
            if hasattr(self, "frontier"):
                self._check_log()
                kinds = [entry.kind for entry in self.model.in_state("dead")]
                assert self._do(self.frontier.dead_kinds()) == {kind: kinds.count(kind) for kind in kinds}
        finally:
            self._do(self._harness.close())
            self._runner.close()
