"""Random steps on a backend and on the model of `shoal.testing.model`, compared after each. Hypothesis finds the
shortest sequence of steps after which they differ."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import SearchStrategy

from shoal.frontier.rules import FULL_KIND
from shoal.http import Request
from shoal.ports import Completion, Frontier, FrontierOptions, Holder, HostUpdate
from shoal.testing.model import Model, World
from shoal.testing.pair import BatchOutcome, ClaimedRole, LeasePair, Pair
from shoal.testing.steps import Harness

# The values that the machine draws. There are few hosts and URLs, and times in tens of seconds, so that many steps use
# the same request.


class Page(NamedTuple):
    """A request that the machine makes."""

    host: str
    number: int
    priority: float
    dont_filter: bool


HOSTS = st.sampled_from(["a.example", "b.example", "c.example:81"])
PAGE: SearchStrategy[Page] = st.builds(
    Page, HOSTS, st.integers(0, 7), st.sampled_from([0, 0, 0, 1, -1, 0.5]), st.sampled_from([False, False, False, True])
)
PAGES = st.lists(PAGE, max_size=3)
ITEMS = st.lists(st.binary(max_size=2), max_size=2)
PICKS = st.lists(st.integers(0, 9), min_size=1, max_size=3)
"""Positions in a list, modulo its length."""
RECENT = st.sampled_from([0, 0, 0, 1, 2, 5])
"""A position in a list, counted from its end, modulo its length."""
CURSORS = st.sampled_from([b"", b"1", b"2"])
TTLS = st.sampled_from([20.0, 50.0, 100.0])
NONCES = st.sampled_from([b"nonce-of-one", b"nonce-of-one", b"nonce-of-another"])
SLOTS = st.sampled_from([None, "s", "s", "t"])
"""A cluster slot, or none."""
AHEAD = st.sampled_from([0, 0, 0, 1, -1])
"""How far the epoch of a holder is ahead of the last fence of its slot."""
DELAYS = st.sampled_from([None, 0.0, 10.0, 20.0])
UPDATES: SearchStrategy[HostUpdate] = st.one_of(
    st.builds(HostUpdate, delay=DELAYS),
    st.builds(HostUpdate, crawl_delay=DELAYS),
    st.builds(HostUpdate, learned_delay=DELAYS),
    st.builds(HostUpdate, concurrency=st.sampled_from([None, 1, 2, 9])),
    st.builds(HostUpdate, block_for=st.sampled_from([None, 0.0, 20.0, 50.0])),
)
OPTIONS: SearchStrategy[FrontierOptions] = st.builds(
    FrontierOptions,
    max_attempts=st.integers(1, 3),
    delay=st.sampled_from([0.0, 10.0]),
    concurrency_per_host=st.sampled_from([1, 2, 8]),
    max_queue_size=st.sampled_from([None, None, 6]),
    overflow=st.sampled_from(["accept", "refuse"]),
    in_memory=st.sampled_from([1, 3, 100_000]),
)
SHORT_QUEUE: SearchStrategy[FrontierOptions] = st.builds(
    FrontierOptions,
    max_attempts=st.integers(1, 3),
    max_queue_size=st.sampled_from([1, 1, 2]),
    overflow=st.just("refuse"),
    in_memory=st.sampled_from([1, 100_000]),
)
"""A queue that is nearly always full, and refuses links."""


# The machine.


Result = TypeVar("Result")

SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
_SHORT_QUEUE_PART = 5
"""There is one further example with a short queue for this many examples."""
FOREVER = 1e6


def check_machine(make_harness: Callable[[], Harness], with_settings: settings = SETTINGS) -> None:
    """Run the machine on a backend. AssertionError shows the shortest sequence of steps that breaks a law."""
    examples = with_settings.max_examples
    for kind, count in ((FrontierMachine, examples), (ShortQueueMachine, max(1, examples // _SHORT_QUEUE_PART))):
        machine = type("Machine", (kind,), {"make_harness": lambda self: make_harness()})
        run_state_machine_as_test(machine, settings=settings(with_settings, max_examples=count))


def rare(step: Callable[..., None]) -> Callable[..., None]:
    """Make this step rare, so that most steps lease requests or end leases."""

    @wraps(step)
    def taken(self: FrontierMachine, *arguments: object, **named: object) -> None:
        self._since_rare = 0
        step(self, *arguments, **named)

    return precondition(lambda self: self._since_rare > 2)(taken)


class FrontierMachine(RuleBasedStateMachine):
    """A worker of one run, and sometimes a neighbour: another run that uses the same hosts."""

    def make_harness(self) -> Harness:
        """The backend to run on."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._harness = self.make_harness()
        self._requests = 0
        self._crashes = 0
        self._since_rare = 0
        self._leases: list[LeasePair] = []
        """Leases that were not used yet; some may have expired."""
        self._spent: list[LeasePair] = []
        self._neighbour_leases: list[LeasePair] = []
        self._roles: list[ClaimedRole] = []
        self._epochs: dict[str, int] = {}
        """The epoch of the last claim of each role."""
        self._views: dict[Holder, Frontier] = {}
        """The frontiers of the run for the holders of cluster slots."""

    def _do(self, call: Coroutine[object, object, Result]) -> Result:
        return self._runner.get_loop().run_until_complete(call)

    def _make(self, pages: Sequence[Page]) -> list[Request]:
        """Requests that differ in their meta even if they have the same URL."""
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

    @initialize(options=OPTIONS, pages=st.lists(PAGE, max_size=6), seeded=st.booleans(), slot=SLOTS)
    def open(self, options: FrontierOptions, pages: list[Page], seeded: bool, slot: str | None) -> None:
        self._open(options, pages, seeded, slot)

    def _open(self, options: FrontierOptions, pages: list[Page], seeded: bool, slot: str | None) -> None:
        self.world = World()
        self.pair = Pair(self._do, self._do(self._harness.open(options)), Model(options, self.world))
        neighbour = self._do(self._harness.open_run("neighbour", options))
        self.neighbour = Pair(self._do, neighbour, Model(options, self.world))
        self.use_a_role("claim", "seed", 0, b"", 100.0, slot)
        self.push(pages, None, b"")
        if seeded:
            self.use_a_role("finish", "seed", 0, b"", 0.0, None)

    # -- pushing and leasing

    @rule(pages=PAGES, seeder=st.none() | RECENT, cursor=CURSORS)
    def push(self, pages: list[Page], seeder: int | None, cursor: bytes) -> None:
        seeders = [role for role in self._roles if role.claim.role == "seed"]
        role = seeders[-1 - seeder % len(seeders)] if seeders and seeder is not None else None
        if self.pair.push(self._make(pages), role, cursor) and role is not None:
            self._move_cursor(role.token, cursor)

    def _holder(self, slot: str | None, ahead: int) -> Holder | None:
        return None if slot is None else Holder(slot, max(0, self.pair.model.fences[slot] + ahead))

    def _view(self, holder: Holder | None) -> Frontier:
        if holder is None:
            return self.pair.frontier
        if holder not in self._views:
            self._views[holder] = self._do(self._harness.open_run("run", holder=holder))
        return self._views[holder]

    @rule(
        limit=st.integers(0, 5),
        ttl=TTLS,
        seconds=st.sampled_from([0.0, 0.0, 10.0, 50.0]),
        slot=SLOTS,
        ahead=AHEAD,
        counts_attempt=st.sampled_from([True, True, False]),
    )
    def lease(self, limit: int, ttl: float, seconds: float, slot: str | None, ahead: int, counts_attempt: bool) -> None:
        self.advance(seconds)
        holder = self._holder(slot, ahead)
        self._leases += self.pair.lease(limit, ttl, holder, counts_attempt, self._view(holder))

    # A fence may end expired leases first.
    @precondition(lambda self: self.pair.model.holders() and not self.pair.model.overdue())
    @rule(pick=RECENT, ahead=st.sampled_from([1, 1, 0, -1]))
    def fence(self, pick: int, ahead: int) -> None:
        holders = self.pair.model.holders()
        held = holders[pick % len(holders)]
        self.pair.fence(Holder(held.slot, max(0, held.epoch + ahead)))

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, ttl=TTLS)
    def renew(self, picks: list[int], ttl: float) -> None:
        batch = self._take(picks)
        self._leases += batch
        self.pair.renew(batch, ttl)

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, twice=st.booleans(), ttl=TTLS, nonce=NONCES)
    def reissue(self, picks: list[int], twice: bool, ttl: float, nonce: bytes) -> None:
        batch = self._take(picks)
        self._spent += batch
        self._leases += self.pair.reissue(batch * 2 if twice else batch, ttl, nonce)

    @precondition(lambda self: self._spent)
    @rule(picks=st.lists(RECENT, min_size=1, max_size=3), ttl=TTLS, nonce=NONCES)
    def repeat_a_reissue(self, picks: list[int], ttl: float, nonce: bytes) -> None:
        batch = [self._spent[-1 - pick % len(self._spent)] for pick in picks]
        self._leases += self.pair.reissue(batch, ttl, nonce)

    def _take(self, picks: list[int]) -> list[LeasePair]:
        """Remove some leases from the unused ones."""
        return [self._leases.pop(pick % len(self._leases)) for pick in picks if self._leases]

    # -- ending leases

    def _outcome(
        self, pages: list[Page], items: list[bytes], contacted: bool, redirected: bool = False
    ) -> BatchOutcome:
        """The first page of a batch has all children, the others only the first child."""
        return BatchOutcome(items, contacted, redirected, lambda place: self._make(pages if place == 0 else pages[:1]))

    @precondition(lambda self: self._leases)
    @rule(
        picks=PICKS,
        twice=st.booleans(),
        pages=PAGES,
        items=ITEMS,
        contacted=st.booleans(),
        redirected=st.sampled_from([False, False, True]),
    )
    def complete(
        self,
        picks: list[int],
        twice: bool,
        pages: list[Page],
        items: list[bytes],
        contacted: bool,
        redirected: bool,
    ) -> None:
        batch = self._take(picks)
        self._spent += batch
        self.pair.complete(batch * 2 if twice else batch, self._outcome(pages, items, contacted, redirected))

    @precondition(lambda self: self._leases)
    @rule(
        picks=PICKS,
        retry_in=st.sampled_from([None, None, 10.0, 50.0]),
        kind=st.sampled_from(["timeout", "robots"]),
        pages=PAGES,
        items=ITEMS,
        contacted=st.booleans(),
    )
    def fail(
        self,
        picks: list[int],
        retry_in: float | None,
        kind: str,
        pages: list[Page],
        items: list[bytes],
        contacted: bool,
    ) -> None:
        batch = self._take(picks)
        self._spent += batch
        self.pair.fail(batch, retry_in, kind, self._outcome(pages, items, contacted))

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, contacted=st.booleans())
    def release(self, picks: list[int], contacted: bool) -> None:
        batch = self._take(picks)
        self._spent += batch
        self.pair.release(batch, contacted)

    @precondition(lambda self: self._spent)
    @rule(pick=RECENT, how=st.sampled_from(["complete", "fail", "retry", "release", "renew"]), pages=PAGES)
    def use_a_spent_lease(self, pick: int, how: str, pages: list[Page]) -> None:
        successors = [taken for taken in self._spent if taken.held.entry.state == "leased"]
        taken = (successors or self._spent)[-1 - pick % len(successors or self._spent)]
        stale = self._outcome(pages, [b"stale"], True)
        match how:
            case "complete":
                self.pair.complete([taken, taken], stale)
            case "fail":
                self.pair.fail([taken], None, "stale", stale)
            case "retry":
                self.pair.fail([taken], 10.0, "stale", stale)
            case "release":
                self.pair.release([taken], True)
            case _:
                self.pair.renew([taken], 100.0)

    @precondition(lambda self: self.pair.model.in_state("dead"))
    @rule(kinds=st.sampled_from([None, ["robots"], ["timeout", "worker lost"]]))
    @rare
    def retry_dead(self, kinds: list[str] | None) -> None:
        self._retry(kinds)

    @precondition(lambda self: self.pair.model.in_state("dead"))
    @rule(kinds=st.sampled_from([None, ["timeout", "worker lost", FULL_KIND]]), numbers=st.sets(st.integers(0, 9)))
    @rare
    def retry_some_of_the_dead(self, kinds: list[str] | None, numbers: set[int]) -> None:
        """Retry dead requests by their fingerprints."""
        urls = sorted({entry.request.url for entry in self.pair.model.in_state("dead")})
        urls = [url for number, url in enumerate(urls) if number in numbers]
        assert self._do(self._retry_urls(kinds, urls)) == self.pair.model.retry_dead(kinds, urls)

    async def _retry_urls(self, kinds: list[str] | None, urls: list[str]) -> int:
        frontier = self.pair.frontier
        only = [request.fingerprint async for request in frontier.dead() if request.url in urls]
        return await frontier.retry_dead(kinds, only=only)

    @precondition(lambda self: any(entry.kind == FULL_KIND for entry in self.pair.model.in_state("dead")))
    @rule(kinds=st.sampled_from([None, [FULL_KIND]]))
    def retry_refused_links(self, kinds: list[str] | None) -> None:
        self._retry(kinds)

    def _retry(self, kinds: list[str] | None) -> None:
        assert self._do(self.pair.frontier.retry_dead(kinds)) == self.pair.model.retry_dead(kinds)

    # -- time, hosts, roles

    @rule(seconds=st.sampled_from([10.0, 20.0, 50.0, 100.0]))
    def advance(self, seconds: float) -> None:
        self._do(self._harness.advance(seconds))
        self.world.now += seconds

    @rule(host=HOSTS, update=UPDATES)
    @rare
    def update_host(self, host: str, update: HostUpdate) -> None:
        self._do(self.pair.frontier.update_host(host, update))
        self.pair.model.update_host(host, update)

    @rule(
        how=st.sampled_from(["claim", "advance", "relinquish", "finish", "forget"]),
        name=st.sampled_from(["seed", "drain"]),
        pick=RECENT,
        cursor=CURSORS,
        ttl=TTLS,
        slot=SLOTS,
    )
    @rare
    def use_a_role(self, how: str, name: str, pick: int, cursor: bytes, ttl: float, slot: str | None) -> None:
        model = self.pair.model
        if how == "forget":
            forgets = model.forget(name)
            assert self._do(self.pair.frontier.forget(name)) == forgets
            if forgets:
                self._epochs.pop(name)
            return
        if how == "claim" or not self._roles:
            holder, last_epoch = self._holder(slot, 0), self._epochs.get(name, 0)
            above = last_epoch + 1000 * (pick - 1)
            claimed = self._do(self._view(holder).claim(name, ttl, above=above))
            expected = model.claim(name, ttl, holder)
            assert (claimed and claimed.cursor) == (expected and expected[1])
            if claimed and expected:
                assert claimed.epoch > max(last_epoch, above)
                self._epochs[name] = claimed.epoch
                self._roles.append(ClaimedRole(claimed, expected[0]))
            return
        claim, token = self._roles[-1 - pick % len(self._roles)]
        if how == "advance":
            is_held = model.advance(claim.role, token, cursor, ttl)
            assert self._do(self.pair.frontier.advance(claim, cursor, ttl)) == is_held
            if is_held:
                self._move_cursor(token, cursor)
        else:
            is_held = model.relinquish(claim.role, token, finished=how == "finish")
            assert self._do(self.pair.frontier.relinquish(claim, finished=how == "finish")) == is_held

    def _move_cursor(self, token: int, cursor: bytes) -> None:
        """The holder of a role continues with the cursor that it has saved."""
        self._roles = [
            ClaimedRole(claimed.claim.moved_to(cursor), token) if claimed.token == token else claimed
            for claimed in self._roles
        ]

    # -- the neighbour

    # A backend may or may not expire the leases of other runs when the neighbour leases.
    @precondition(lambda self: not self.pair.model.overdue())
    @rule(pages=PAGES, limit=st.integers(0, 3), done=st.integers(0, 3), contacted=st.booleans())
    @rare
    def the_neighbour_works(self, pages: list[Page], limit: int, done: int, contacted: bool) -> None:
        self.neighbour.push(self._make(pages))
        self._neighbour_completes(done, contacted)
        self._neighbour_leases += self.neighbour.lease(limit, FOREVER)

    def _neighbour_completes(self, done: int, contacted: bool) -> None:
        for lease, held in self._neighbour_leases[:done]:
            expected = self.neighbour.model.complete(held, [], [], status=200, duplicates=0, contacted=contacted)
            completion = Completion(lease=lease, status=200, contacted=contacted)
            assert self._do(self.neighbour.frontier.complete([completion])) == [expected]
        del self._neighbour_leases[:done]

    # -- inspecting

    @rule(pick=RECENT, trim=st.sampled_from([0, 0, 1, 3]))
    @rare
    def inspect(self, pick: int, trim: int) -> None:
        self.pair.check_history(pick)
        if items := self._do(self.pair.frontier.read_items(0, trim)):
            self._do(self.pair.frontier.trim_items(items[-1].seq))
            del self.pair.model.log[: len(items)]
        self.pair.check_log()

    @precondition(lambda self: self._harness.durable and not self._neighbour_leases and self._crashes < 3)
    @rule()
    @rare
    def the_process_crashes(self) -> None:
        self._crashes += 1
        self._views.clear()
        self.pair.frontier = self._do(self._harness.reopen())
        self.neighbour.frontier = self._do(self._harness.open_run("neighbour"))
        if not self._harness.keeps_leases:
            self.pair.model.lose_all()

    @invariant()
    def the_counters_agree(self) -> None:
        self._since_rare += 1
        self.pair.check_stats()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # no step has failed
                self._run_to_the_end()
        finally:
            self._do(self._harness.close())
            self._runner.close()

    def _run_to_the_end(self) -> None:
        """Finish the run: it is reported as finished exactly when no request is left."""
        pair, frontier, model = self.pair, self.pair.frontier, self.pair.model
        pair.check_log()
        self._neighbour_completes(len(self._neighbour_leases), False)
        self.advance(1000.0)
        while model.stats().remaining:
            if batch := pair.lease(50, 100.0):
                pair.complete(batch, self._outcome([], [b"last"], True))
            pair.check_stats()
            self.advance(100.0)
        if model.stats().seeding:
            claim, expected = self._do(frontier.claim("seed", 100.0)), model.claim("seed", 100.0)
            assert claim
            assert expected
            assert not self._do(frontier.stats()).finished
            model.relinquish("seed", expected[0], finished=True)
            assert self._do(frontier.relinquish(claim, finished=True))
        pair.check_stats()
        assert self._do(frontier.stats()).finished
        pair.check_log()
        kinds = [entry.kind for entry in model.in_state("dead")]
        assert self._do(frontier.dead_kinds()) == {kind: kinds.count(kind) for kind in kinds}


class ShortQueueMachine(FrontierMachine):
    """The same on a queue that is nearly always full."""

    @initialize(options=SHORT_QUEUE, pages=st.lists(PAGE, min_size=1, max_size=1), slot=SLOTS)
    def open(self, options: FrontierOptions, pages: list[Page], slot: str | None) -> None:
        self._open(options, pages, True, slot)
