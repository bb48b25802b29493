"""Random steps on a backend and on the model of `shoal.testing.model`, compared after each. Hypothesis finds the
shortest story that tells them apart."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import pytest
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

from shoal.errors import FencedError, QueueFullError
from shoal.http import Request
from shoal.ports import Claim, Completion, Failure, Frontier, FrontierOptions, Holder, HostUpdate, Lease, Pushed, Stats
from shoal.testing.harness import Harness
from shoal.testing.model import Held, Model, World
from shoal.testing.strategies import (
    AHEAD,
    CURSORS,
    HOSTS,
    ITEMS,
    NONCES,
    OPTIONS,
    PAGE,
    PAGES,
    PICKS,
    RECENT,
    SLOTS,
    TTLS,
    UPDATES,
    Page,
)

Result = TypeVar("Result")

SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
FOREVER = 1e6


class Taken(NamedTuple):
    """A lease of the backend, and the model's."""

    lease: Lease
    held: Held


class Role(NamedTuple):
    """A claim of the backend, and the model's."""

    claim: Claim
    token: int


def check_machine(make_harness: Callable[[], Harness], with_settings: settings = SETTINGS) -> None:
    """Run the machine over a backend. AssertionError tells the shortest story in which a law is broken."""

    class Machine(FrontierMachine):
        def make_harness(self) -> Harness:
            return make_harness()

    run_state_machine_as_test(Machine, settings=with_settings)


def aside(step: Callable[..., None]) -> Callable[..., None]:
    """A step that is taken now and then, so that most are leases and what becomes of them."""

    @wraps(step)
    def taken(self: FrontierMachine, *arguments: Any, **named: Any) -> None:
        self._since_aside = 0
        step(self, *arguments, **named)

    return precondition(lambda self: self._since_aside > 2)(taken)


class FrontierMachine(RuleBasedStateMachine):
    """One worker of one run, and now and then a neighbour: another run that meets the same hosts."""

    def make_harness(self) -> Harness:
        """The backend to run on."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._harness = self.make_harness()
        self._requests = 0
        self._deaths = 0
        self._since_aside = 0
        self._leases: list[Taken] = []
        """Those that were not used yet; some may have run out."""
        self._spent: list[Taken] = []
        self._neighbours: list[Taken] = []
        self._roles: list[Role] = []
        self._held: dict[Holder, Frontier] = {}
        """The run as those see it who have slots of a cluster."""
        self._fingerprints: dict[int, bytes] = {}
        self._tokens: dict[int, int] = {}
        """By the model's tokens of leases, those of the backend."""

    def _do(self, step: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.get_loop().run_until_complete(step)

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

    @initialize(options=OPTIONS, pages=st.lists(PAGE, max_size=6), seeded=st.booleans(), slot=SLOTS)
    def open(self, options: FrontierOptions, pages: list[Page], seeded: bool, slot: str | None) -> None:
        self.world = World()
        self.model, self.neighbour_model = Model(options, self.world), Model(options, self.world)
        self.frontier = self._do(self._harness.open(options))
        self.neighbour = self._do(self._harness.open_run("neighbour", options))
        self.use_a_role("claim", "seed", 0, b"", 100.0, slot)
        self.push(pages, None, b"")
        if seeded:
            self.use_a_role("finish", "seed", 0, b"", 0.0, None)

    # -- pushing

    def _push(
        self, frontier: Frontier, model: Model, requests: list[Request], role: Role | None, cursor: bytes
    ) -> None:
        expected: Pushed | None = None
        try:
            expected = model.push(requests, role.token if role else None, cursor)
            assert self._do(frontier.push(requests, seed=role.claim if role else None, cursor=cursor)) == expected
            if role is not None and model.holds("seed", role.token):
                self._move(role.token, cursor)
        except QueueFullError:
            if expected is not None:
                raise
            try:
                pushed = self._do(frontier.push(requests, seed=role.claim if role else None, cursor=cursor))
            except QueueFullError:
                return
            raise AssertionError(f"a full queue took {pushed}") from None

    @rule(pages=PAGES, seeder=st.none() | RECENT, cursor=CURSORS)
    def push(self, pages: list[Page], seeder: int | None, cursor: bytes) -> None:
        seeders = [role for role in self._roles if role.claim.role == "seed"]
        role = seeders[-1 - seeder % len(seeders)] if seeders and seeder is not None else None
        self._push(self.frontier, self.model, self._make(pages), role, cursor)

    # -- leasing

    def _holder(self, slot: str | None, ahead: int) -> Holder | None:
        return None if slot is None else Holder(slot, max(0, self.model.fences[slot] + ahead))

    def _frontier(self, holder: Holder | None) -> Frontier:
        if holder is None:
            return self.frontier
        if holder not in self._held:
            self._held[holder] = self._do(self._harness.open_run("run", holder=holder))
        return self._held[holder]

    def _lease(
        self,
        frontier: Frontier,
        model: Model,
        limit: int,
        ttl: float,
        holder: Holder | None = None,
        begun: bool = True,
    ) -> list[Taken]:
        if model.is_refused(holder):
            with pytest.raises(FencedError):
                self._do(frontier.lease(limit, ttl, begun=begun))
            return []
        leased = self._do(frontier.lease(limit, ttl, begun=begun))
        expected, wait = model.lease(limit, ttl, holder, begun=begun)
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

    @rule(
        limit=st.integers(0, 5),
        ttl=TTLS,
        seconds=st.sampled_from([0.0, 0.0, 10.0, 50.0]),
        slot=SLOTS,
        ahead=AHEAD,
        begun=st.sampled_from([True, True, False]),
    )
    def lease(self, limit: int, ttl: float, seconds: float, slot: str | None, ahead: int, begun: bool) -> None:
        self.advance(seconds)
        holder = self._holder(slot, ahead)
        self._leases += self._lease(self._frontier(holder), self.model, limit, ttl, holder, begun)

    @precondition(lambda self: self.model.holders() and not self.model.overdue())  # it may give those back first
    @rule(pick=RECENT, ahead=st.sampled_from([1, 1, 0, -1]))
    def fence(self, pick: int, ahead: int) -> None:
        holders = self.model.holders()
        held = holders[pick % len(holders)]
        holder = Holder(held.slot, max(0, held.epoch + ahead))
        if self.model.is_refused(holder):
            with pytest.raises(FencedError):
                self._do(self.frontier.fence(holder.slot, holder.epoch))
        else:
            assert self._do(self.frontier.fence(holder.slot, holder.epoch)) == self.model.fence(holder)
        for role in self._do(self.frontier.roles()):
            known = self.model.roles[role.role]
            assert (role.cursor, role.finished) == (known.cursor, known.finished)
            assert role.held == (known.until > self.world.now)

    def _renew(self, batch: list[Taken], ttl: float) -> None:
        renewed = self._do(self.frontier.renew([taken.lease for taken in batch], ttl))
        assert [lease is not None for lease in renewed] == [self.model.renew(taken.held, ttl) for taken in batch]

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, ttl=TTLS)
    def renew(self, picks: list[int], ttl: float) -> None:
        batch = self._take(picks)
        self._leases += batch
        self._renew(batch, ttl)

    def _reissue(self, batch: list[Taken], ttl: float, nonce: bytes) -> list[Taken]:
        reissued = self._do(self.frontier.reissue([taken.lease for taken in batch], ttl, nonce=nonce))
        expected = self.model.reissue([taken.held for taken in batch], ttl, nonce)
        assert [lease and (lease.request, lease.attempt) for lease in reissued] == [
            held and (held.entry.request, held.attempt) for held in expected
        ]
        taken = [Taken(lease, held) for lease, held in zip(reissued, expected, strict=True) if lease and held]
        for lease, held in taken:
            assert lease.token == self._tokens.setdefault(held.token, lease.token)
        return taken

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, twice=st.booleans(), ttl=TTLS, nonce=NONCES)
    def reissue(self, picks: list[int], twice: bool, ttl: float, nonce: bytes) -> None:
        batch = self._take(picks)
        self._spent += batch
        self._leases += self._reissue(batch * 2 if twice else batch, ttl, nonce)

    @precondition(lambda self: self._spent)
    @rule(picks=st.lists(RECENT, min_size=1, max_size=3), ttl=TTLS, nonce=NONCES)
    def repeat_a_reissue(self, picks: list[int], ttl: float, nonce: bytes) -> None:
        self._leases += self._reissue([self._spent[-1 - pick % len(self._spent)] for pick in picks], ttl, nonce)

    def _take(self, picks: list[int]) -> list[Taken]:
        """Some of the leases, which are no longer unused then."""
        return [self._leases.pop(pick % len(self._leases)) for pick in picks if self._leases]

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
        results = self._do(self.frontier.complete(completions))
        for taken, result, wanted in zip(batch, results, expected, strict=True):
            is_repeat = wanted is None and taken.held.entry.state == "done"
            assert result == wanted or (is_repeat and result == Pushed(0, 0))

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, twice=st.booleans(), pages=PAGES, items=ITEMS, contacted=st.booleans())
    def complete(self, picks: list[int], twice: bool, pages: list[Page], items: list[bytes], contacted: bool) -> None:
        batch = self._take(picks)
        self._spent += batch
        self._complete(batch * 2 if twice else batch, pages, items, contacted)

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
        self._fail(batch, retry_in, kind, pages, items, contacted)

    def _release(self, batch: list[Taken], contacted: bool) -> None:
        expected = [self.model.release(taken.held, contacted=contacted) for taken in batch]
        assert self._do(self.frontier.release([taken.lease for taken in batch], contacted=contacted)) == expected

    @precondition(lambda self: self._leases)
    @rule(picks=PICKS, contacted=st.booleans())
    def release(self, picks: list[int], contacted: bool) -> None:
        batch = self._take(picks)
        self._spent += batch
        self._release(batch, contacted)

    @precondition(lambda self: self._spent)
    @rule(pick=RECENT, how=st.sampled_from(["complete", "fail", "retry", "release", "renew"]), pages=PAGES)
    def use_a_spent_lease(self, pick: int, how: str, pages: list[Page]) -> None:
        successors = [taken for taken in self._spent if taken.held.entry.state == "leased"]
        taken = (successors or self._spent)[-1 - pick % len(successors or self._spent)]
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
                self._renew([taken], 100.0)

    @precondition(lambda self: self.model.in_state("dead"))
    @rule(kinds=st.sampled_from([None, ["robots"], ["timeout", "worker lost"]]))
    @aside
    def retry_dead(self, kinds: list[str] | None) -> None:
        assert self._do(self.frontier.retry_dead(kinds)) == self.model.retry_dead(kinds)

    # -- time, hosts, roles

    @rule(seconds=st.sampled_from([10.0, 20.0, 50.0, 100.0]))
    def advance(self, seconds: float) -> None:
        self._do(self._harness.advance(seconds))
        self.world.now += seconds

    @rule(host=HOSTS, update=UPDATES)
    @aside
    def update_host(self, host: str, update: HostUpdate) -> None:
        self._do(self.frontier.update_host(host, update))
        self.model.update_host(host, update)

    @rule(
        how=st.sampled_from(["claim", "advance", "relinquish", "finish"]),
        name=st.sampled_from(["seed", "drain"]),
        pick=RECENT,
        cursor=CURSORS,
        ttl=TTLS,
        slot=SLOTS,
    )
    @aside
    def use_a_role(self, how: str, name: str, pick: int, cursor: bytes, ttl: float, slot: str | None) -> None:
        if how == "claim" or not self._roles:
            holder = self._holder(slot, 0)
            made, expected = self._do(self._frontier(holder).claim(name, ttl)), self.model.claim(name, ttl, holder)
            assert (made and made.cursor) == (expected and expected[1])
            if made and expected:
                self._roles.append(Role(made, expected[0]))
            return
        claim, token = self._roles[-1 - pick % len(self._roles)]
        if how == "advance":
            kept = self.model.advance(claim.role, token, cursor, ttl)
            assert self._do(self.frontier.advance(claim, cursor, ttl)) == kept
            if kept:
                self._move(token, cursor)
        else:
            kept = self.model.relinquish(claim.role, token, finished=how == "finish")
            assert self._do(self.frontier.relinquish(claim, finished=how == "finish")) == kept

    def _move(self, token: int, cursor: bytes) -> None:
        """The holder of a role goes on with the cursor that it has saved."""
        self._roles = [
            Role(each.claim.moved_to(cursor), token) if each.token == token else each for each in self._roles
        ]

    # -- the neighbour

    @precondition(lambda self: not self.model.overdue())  # whether its lease gives them back too is left open
    @rule(pages=PAGES, limit=st.integers(0, 3), done=st.integers(0, 3), contacted=st.booleans())
    @aside
    def the_neighbour_works(self, pages: list[Page], limit: int, done: int, contacted: bool) -> None:
        self._push(self.neighbour, self.neighbour_model, self._make(pages), None, b"")
        self._neighbour_completes(done, contacted)
        self._neighbours += self._lease(self.neighbour, self.neighbour_model, limit, FOREVER)

    def _neighbour_completes(self, done: int, contacted: bool) -> None:
        for lease, held in self._neighbours[:done]:
            expected = self.neighbour_model.complete(held, [], [], status=200, duplicates=0, contacted=contacted)
            completion = Completion(lease=lease, status=200, contacted=contacted)
            assert self._do(self.neighbour.complete([completion])) == [expected]
        del self._neighbours[:done]

    # -- looking at it

    @rule(pick=RECENT, trim=st.sampled_from([0, 0, 1, 3]))
    @aside
    def look_back(self, pick: int, trim: int) -> None:
        self._look_at_a_url(pick)
        if items := self._do(self.frontier.read_items(0, trim)):
            self._do(self.frontier.trim_items(items[-1].seq))
            del self.model.log[: len(items)]
        self._check_log()

    def _look_at_a_url(self, pick: int) -> None:
        assert self._do(self.frontier.find(Request("http://a.example/never-pushed"))) is None
        known = [entry for entry in self.model.entries if not entry.request.dont_filter]
        if not known:
            return
        entry = known[-1 - pick % len(known)]
        found = self._do(self.frontier.find(entry.request))
        assert found is not None
        assert (found.url, found.attempts, found.status, found.items, found.parent) == (
            entry.request.url,
            entry.attempts,
            entry.status,
            entry.items,
            entry.parent.request.url if entry.parent else None,
        )
        if entry.state != "waiting":  # it may be ready already when its time has come
            assert found.state == entry.state
        if entry.state == "dead" and entry.reason:
            assert found.reason == entry.reason

    def _check_log(self) -> None:
        log = self._do(self.frontier.read_items(0, 10_000))
        assert [(item.fingerprint, item.index, item.payload) for item in log] == [
            (self._fingerprints[id(entry)], index, payload) for entry, index, payload in self.model.log
        ]

    @precondition(lambda self: self._harness.durable and not self._neighbours and self._deaths < 3)
    @rule()
    @aside
    def the_process_dies(self) -> None:
        self._deaths += 1
        self._held.clear()
        self.frontier = self._do(self._harness.reopen())
        self.neighbour = self._do(self._harness.open_run("neighbour"))
        if not self._harness.keeps_leases:
            self.model.lose_all()

    @invariant()
    def the_books_agree(self) -> None:
        self._since_aside += 1
        (stats, audit, finished), expected = self._do(self._books()), self.model.stats()
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
        assert audit == stats
        assert finished == (expected.remaining == 0 and not expected.seeding)

    async def _books(self) -> tuple[Stats, Stats, bool]:
        return await self.frontier.stats(), await self.frontier.audit(), (await self.frontier.stats()).finished

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # else there is something to tell already
                self._to_the_end()
        finally:
            self._do(self._harness.close())
            self._runner.close()

    def _to_the_end(self) -> None:
        """Whatever was done to it, the run can be finished, and is finished exactly then."""
        self._check_log()
        self._neighbour_completes(len(self._neighbours), False)
        self.advance(1000.0)
        while self.model.stats().remaining:
            batch = self._lease(self.frontier, self.model, 50, 100.0)
            if batch:
                self._complete(batch, [], [b"last"], True)
            self.the_books_agree()
            self.advance(100.0)
        if self.model.stats().seeding:
            claim, expected = self._do(self.frontier.claim("seed", 100.0)), self.model.claim("seed", 100.0)
            assert claim
            assert expected
            assert not self._do(self.frontier.stats()).finished
            self.model.relinquish("seed", expected[0], finished=True)
            assert self._do(self.frontier.relinquish(claim, finished=True))
        self.the_books_agree()
        assert self._do(self.frontier.stats()).finished
        self._check_log()
        kinds = [entry.kind for entry in self.model.in_state("dead")]
        assert self._do(self.frontier.dead_kinds()) == {kind: kinds.count(kind) for kind in kinds}
