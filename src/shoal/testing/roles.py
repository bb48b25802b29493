"""The roles of a run (seeder, drainers), and the runs of a store."""

from __future__ import annotations

import asyncio
import time
from itertools import permutations
from typing import get_args

import pytest

from shoal.errors import QueueFullError, RunError
from shoal.ports import Claim, Frontier, FrontierOptions, Holder, HostUpdate, Pushed, RoleState, Run, RunState
from shoal.testing.steps import (
    TTL,
    ContractTests,
    Harness,
    complete,
    finish_seeding,
    lease_names,
    lease_one,
    page,
    push,
)

ALLOWED: set[tuple[RunState, RunState]] = {
    ("queued", "running"), ("queued", "paused"), ("queued", "cancelled"),
    ("running", "queued"), ("running", "paused"), ("running", "finished"), ("running", "cancelled"),
    ("paused", "running"), ("paused", "finished"), ("paused", "cancelled"),
    ("finished", "running"), ("cancelled", "running"),
}  # fmt: skip


NONCE = bytes(range(16))


async def claim_role(frontier: Frontier, role: str = "seed", ttl: float = TTL, *, above: int = 0) -> Claim:
    """Claim a role that must be free."""
    claim = await frontier.claim(role, ttl, above=above)
    assert claim is not None
    assert claim.role == role
    return claim


class RolesContract(ContractTests):
    """A role has one holder at a time, and keeps its cursor when the holder changes.

    A seeder pushes and moves its cursor in one step, so a successor neither skips nor repeats seeds. Runs are
    independent of each other.
    """

    # -- roles

    async def test_a_role_has_one_holder(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("run")
        claims = await asyncio.gather(*(worker.claim("seed", TTL) for worker in [frontier, other] * 3))
        assert sum(claim is not None for claim in claims) == 1
        assert (await claim_role(other, "drain")).cursor == b""  # roles are independent

    async def test_a_relinquished_role_is_free_and_keeps_its_cursor(self, frontier: Frontier) -> None:
        claim = await claim_role(frontier)
        assert await frontier.advance(claim, b"\x00 cursor", TTL)
        assert await frontier.relinquish(claim)
        again = await claim_role(frontier)
        assert again.cursor == b"\x00 cursor"
        assert again.token != claim.token

    async def test_a_role_is_taken_over_when_its_holder_is_lost(self, harness: Harness, frontier: Frontier) -> None:
        lost = await claim_role(frontier, "drain", ttl=5)
        assert await frontier.advance(lost, b"here", 10)
        await harness.advance(9)
        assert await frontier.claim("drain", TTL) is None
        await harness.advance(1)
        successor = await claim_role(frontier, "drain")
        assert successor.cursor == b"here"
        assert not await frontier.advance(lost, b"late", TTL)
        assert not await frontier.relinquish(lost, finished=True)
        assert await frontier.advance(successor, b"there", TTL)
        assert await frontier.claim("drain", TTL) is None
        assert await frontier.relinquish(successor)
        assert not await frontier.advance(successor, b"late", TTL)
        assert not await frontier.relinquish(successor, finished=True)
        assert (await claim_role(frontier, "drain")).cursor == b"there"

    async def test_a_finished_role_cannot_be_claimed_again(self, harness: Harness, frontier: Frontier) -> None:
        claim = await claim_role(frontier)
        assert await frontier.relinquish(claim, finished=True)
        await harness.advance(1000)
        assert await frontier.claim("seed", TTL) is None
        assert not await frontier.advance(claim, b"late", TTL)
        assert not await frontier.relinquish(claim)
        assert not (await frontier.stats()).seeding

    async def test_roles_belong_to_a_run(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("second")
        await finish_seeding(frontier)
        claim = await claim_role(other)
        assert (await frontier.stats()).finished
        assert not (await other.stats()).finished
        assert not await frontier.advance(claim, b"x", TTL)

    # -- epochs

    async def test_every_claim_of_a_role_has_a_larger_epoch(self, harness: Harness, frontier: Frontier) -> None:
        epochs = []
        for _ in range(4):  # the clock may stand still
            claim = await claim_role(frontier, "drain")
            epochs.append(claim.epoch)
            assert claim.moved_to(b"1").epoch == claim.epoch
            assert await frontier.relinquish(claim)
        expired = await claim_role(frontier, "drain", ttl=5)
        await harness.advance(5)
        epochs += [expired.epoch, (await claim_role(await harness.open_run("run"), "drain")).epoch]
        assert epochs == sorted(set(epochs))
        assert epochs[0] > 0

    async def test_an_epoch_is_the_time_of_the_store_in_microseconds(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        first = await claim_role(frontier, "a")
        await harness.advance(10)
        second = await claim_role(frontier, "b")
        assert 0 <= second.epoch - first.epoch - 10_000_000 <= 1_000_000 * harness.drift

    async def test_a_claim_above_an_epoch(self, harness: Harness, frontier: Frontier) -> None:
        before = await claim_role(frontier, "drain")
        ahead = before.epoch + 3_600_000_000
        assert await frontier.relinquish(before)
        claim = await claim_role(frontier, "drain", above=ahead)
        assert claim.epoch == ahead + 1
        assert await frontier.relinquish(claim)
        claim = await claim_role(frontier, "drain", above=before.epoch)  # the role has a larger one
        assert claim.epoch == ahead + 2
        assert (await claim_role(frontier, "other", above=ahead)).epoch == ahead + 1
        assert (await claim_role(frontier, "third")).epoch < ahead

    async def test_a_repeated_claim_has_the_same_epoch(self, harness: Harness, frontier: Frontier) -> None:
        claim = await frontier.claim("drain", 5, nonce=NONCE)
        assert claim is not None
        assert await frontier.claim("drain", 5, nonce=NONCE, above=claim.epoch + 9) == claim
        await harness.advance(6)  # it has expired, but nobody else has claimed it
        assert await frontier.claim("drain", 5, nonce=NONCE) == claim
        assert await frontier.relinquish(claim)
        later = await frontier.claim("drain", 5, nonce=NONCE)
        assert later is not None
        assert later.epoch > claim.epoch

    async def test_the_epoch_of_a_role_survives_a_fence(self, harness: Harness, frontier: Frontier) -> None:
        old = await harness.open_run("run", holder=Holder("s", 1))
        claim = await claim_role(old, "drain")
        assert await old.relinquish(claim)
        ahead = (await claim_role(old, "drain", above=claim.epoch + 3_600_000_000)).epoch
        await frontier.fence("s", 2)
        assert (await claim_role(frontier, "drain")).epoch == ahead + 1

    async def test_the_epoch_of_a_role_survives_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        claim = await claim_role(frontier, "drain", ttl=5)
        ahead = claim.epoch + 3_600_000_000
        assert await frontier.relinquish(claim)
        assert (await claim_role(frontier, "drain", ttl=5, above=ahead)).epoch == ahead + 1
        frontier = await harness.reopen()
        await harness.advance(5)
        assert (await claim_role(frontier, "drain")).epoch == ahead + 2

    # -- forgotten roles

    async def test_a_role_that_nobody_holds_can_be_forgotten(self, harness: Harness, frontier: Frontier) -> None:
        free, finished = await claim_role(frontier, "free"), await claim_role(frontier, "finished")
        assert await frontier.advance(free, b"far", TTL)
        assert await frontier.relinquish(free)
        assert await frontier.relinquish(finished, finished=True)
        expired = await claim_role(frontier, "expired", ttl=5)
        held = await claim_role(frontier, "held", ttl=50)
        await harness.advance(10)
        forgotten = {name: await frontier.forget(name) for name in ("free", "finished", "expired", "held", "unknown")}
        assert forgotten == {"free": True, "finished": True, "expired": True, "held": False, "unknown": False}
        assert [state.role for state in await frontier.roles()] == ["held"]
        assert not await frontier.forget("free")
        assert not await frontier.advance(expired, b"late", TTL)
        assert not await frontier.relinquish(expired)
        assert await frontier.advance(held, b"on", TTL)
        again = await claim_role(frontier, "free")
        assert again.cursor == b""
        assert again.epoch > free.epoch  # the time orders them
        assert (await claim_role(frontier, "finished")).cursor == b""

    async def test_only_the_role_of_its_own_run_is_forgotten(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("second")
        for run in (frontier, other):
            await run.relinquish(await claim_role(run, "drain"))
        assert await frontier.forget("drain")
        assert await frontier.roles() == []
        assert [state.role for state in await other.roles()] == ["drain"]

    async def test_a_forgotten_role_stays_forgotten_after_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        await frontier.relinquish(await claim_role(frontier, "drain"))
        assert await frontier.forget("drain")
        assert await (await harness.reopen()).roles() == []

    # -- seeding

    async def test_seeds_and_their_cursor_are_saved_together(self, harness: Harness, frontier: Frontier) -> None:
        claim = await claim_role(frontier, ttl=5)
        assert await frontier.push([page(1), page(2)], seed=claim, cursor=b"2") == Pushed(2, 0)
        assert await frontier.push([page(2), page(3)], seed=claim.moved_to(b"2"), cursor=b"4") == Pushed(1, 1)
        await harness.advance(5)
        assert (await claim_role(frontier)).cursor == b"4"

    async def test_a_seeder_that_was_taken_over_pushes_nothing(self, harness: Harness, frontier: Frontier) -> None:
        lost = await claim_role(frontier, ttl=5)
        await frontier.push([page(1)], seed=lost, cursor=b"1")
        await harness.advance(5)
        successor = await claim_role(frontier)
        before = await frontier.stats()
        assert await frontier.push([page(1), page(2)], seed=lost, cursor=b"2") == Pushed(0, 0)
        assert await frontier.stats() == before
        assert await frontier.find(page(2)) is None
        assert await frontier.push([page(2)], seed=successor, cursor=b"2") == Pushed(1, 0)
        successor = successor.moved_to(b"2")
        await frontier.relinquish(successor, finished=True)
        assert await frontier.push([page(3)], seed=successor, cursor=b"3") == Pushed(0, 0)
        assert await frontier.find(page(3)) is None

    async def test_a_refused_batch_of_seeds_does_not_move_the_cursor(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=1))
        claim = await claim_role(frontier)
        await frontier.push([page(1)], seed=claim, cursor=b"1")
        claim = claim.moved_to(b"1")
        with pytest.raises(QueueFullError):
            await frontier.push([page(2)], seed=claim, cursor=b"2")
        await frontier.relinquish(claim)
        assert (await claim_role(frontier)).cursor == b"1"

    async def test_unfiltered_seeds_that_are_pushed_again_are_added_once(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        seeds = [page(1, dont_filter=True), page(1, dont_filter=True), page(1)]
        claim = await claim_role(frontier, ttl=5)
        assert await frontier.push(seeds, seed=claim, cursor=b"3") == Pushed(3, 0)
        assert await frontier.push(seeds, seed=claim, cursor=b"3") == Pushed(0, 3)  # the answer was lost
        await harness.advance(5)
        successor = await claim_role(frontier)
        assert await frontier.push(seeds, seed=successor, cursor=b"3") == Pushed(0, 3)
        assert await frontier.push(seeds[:1], seed=successor, cursor=b"4") == Pushed(1, 0)
        assert await lease_names(frontier) == ["1"] * 4

    async def test_an_empty_batch_of_seeds_moves_the_cursor(self, frontier: Frontier) -> None:
        claim = await claim_role(frontier)
        assert await frontier.push([], seed=claim, cursor=b"0") == Pushed(0, 0)
        await frontier.relinquish(claim)
        assert (await claim_role(frontier)).cursor == b"0"

    async def test_roles_survive_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        claim = await claim_role(frontier, ttl=5)
        await frontier.push([page(1, dont_filter=True)], seed=claim, cursor=b"1")
        drain = await claim_role(frontier, "drain")
        await frontier.relinquish(drain, finished=True)
        frontier = await harness.reopen()
        await harness.advance(5)
        successor = await claim_role(frontier)
        assert successor.cursor == b"1"
        assert successor.token != claim.token
        assert await frontier.push([page(2)], seed=claim, cursor=b"2") == Pushed(0, 0)
        assert await frontier.push([page(1, dont_filter=True)], seed=successor, cursor=b"1") == Pushed(0, 1)
        assert await frontier.claim("drain", TTL) is None
        await frontier.relinquish(successor, finished=True)
        frontier = await harness.reopen()
        assert not (await frontier.stats()).seeding

    # -- runs

    async def test_runs_are_created_and_found(self, harness: Harness, frontier: Frontier) -> None:
        store = harness.store
        run = Run(
            run_id="r-1", spider="books", state="queued", created_at=5.5, settings={"delay": 1.5, "x": {"y": [1]}},
            project="shop", ended_at=7.25,
        )  # fmt: skip
        assert await store.create_run(run) == run
        assert await store.get_run("r-1") == run
        assert await store.get_run("r-2") is None
        assert await store.run_state("r-1") == "queued"
        assert await store.run_state("r-2") is None
        with pytest.raises(RunError):
            await store.create_run(run)

    async def test_runs_are_listed_newest_first(self, harness: Harness, frontier: Frontier) -> None:
        for number in range(4):
            run = Run(run_id=f"r-{number}", spider=f"s-{number % 2}", state="queued", created_at=1000.0 + number)
            await harness.store.create_run(run)
        runs = [run.run_id for run in await harness.store.list_runs()]
        assert runs == ["r-3", "r-2", "r-1", "r-0", "run"]
        assert [run.run_id for run in await harness.store.list_runs("s-1")] == ["r-3", "r-1"]
        assert await harness.store.list_runs("nothing") == []
        await harness.store.transition("r-1", "running")
        assert list((await harness.store.run_states("s-1")).items()) == [("r-1", "running"), ("r-3", "queued")]
        assert await harness.store.run_states("nothing") == {}

    async def test_projects_do_not_see_each_others_runs(self, harness: Harness, frontier: Frontier) -> None:
        store = harness.store
        for number, (spider, project) in enumerate([("s", "a"), ("s", "b"), ("t", "a"), ("s", "a")]):
            run = Run(run_id=f"r-{number}", spider=spider, state="queued", created_at=0.0, project=project)
            await store.create_run(run)
        assert [run.run_id for run in await store.list_runs("s", "a")] == ["r-3", "r-0"]
        assert [run.run_id for run in await store.list_runs(project="a")] == ["r-3", "r-2", "r-0"]
        assert [run.run_id for run in await store.list_runs("s")] == ["r-3", "r-1", "r-0"]
        assert [run.project for run in await store.list_runs(project="b")] == ["b"]
        assert await store.list_runs("s", "c") == []
        await store.transition("r-3", "cancelled")
        active = await store.list_runs("s", states=("queued", "running"))
        assert [run.run_id for run in active] == ["r-1", "r-0"]
        assert [run.run_id for run in await store.list_runs(states=["cancelled"])] == ["r-3"]
        assert [run.run_id for run in await store.list_runs("s", limit=2)] == ["r-3", "r-1"]
        assert await store.list_runs(states=[]) == []
        assert list(await store.run_states("s", "a")) == ["r-0", "r-3"]
        assert list(await store.run_states("s")) == ["r-0", "r-1", "r-3"]
        with pytest.raises(RunError):  # the name of a run is unique in the store
            await store.create_run(Run(run_id="r-1", spider="s", state="queued", created_at=0.0, project="a"))

    async def test_of_runs_created_at_once_only_the_first_sees_no_earlier_one(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        """This lets processes that start together agree on one run."""
        store = harness.store

        async def create(number: int) -> bool:
            run_id = f"r-{number}"
            await store.create_run(Run(run_id=run_id, spider="s", state="queued", created_at=0.0))
            return (await store.list_runs("s"))[-1].run_id == run_id

        assert sum(await asyncio.gather(*map(create, range(12)))) == 1

    async def test_a_run_has_the_time_of_its_end(self, harness: Harness, frontier: Frontier) -> None:
        before = time.time()
        store = harness.store
        for state in ("finished", "running", "cancelled"):
            changed = await store.transition("run", state)
            assert await store.get_run("run") == changed
            assert (changed.ended_at is None) == (state == "running")
            assert changed.ended_at is None or before <= changed.ended_at <= time.time()
        again = await store.transition("run", "cancelled")  # it stays in its state
        assert again == changed

    async def test_a_run_moves_only_from_the_states_that_the_caller_names(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        store = harness.store
        cancelled = await store.transition("run", "cancelled")
        with pytest.raises(RunError, match="run is cancelled"):
            await store.transition("run", "running", among=["queued", "finished"])
        assert await store.get_run("run") == cancelled
        assert (await store.transition("run", "running", among=["cancelled"])).state == "running"
        assert (await store.transition("run", "running", among=["queued"])).state == "running"  # it is there already

    async def test_a_run_makes_only_allowed_transitions(self, harness: Harness, frontier: Frontier) -> None:
        store = harness.store
        for number, (old, new) in enumerate(permutations(get_args(RunState), 2)):
            run = await store.create_run(Run(run_id=f"r-{number}", spider="s", state=old, created_at=0.0))
            assert (await store.transition(run.run_id, old)).state == old
            if (old, new) in ALLOWED:
                assert (await store.transition(run.run_id, new)).state == new
            else:
                with pytest.raises(RunError):
                    await store.transition(run.run_id, new)
            after = await store.get_run(run.run_id)
            assert after is not None
            assert after.state == (new if (old, new) in ALLOWED else old)
            assert await store.run_state(run.run_id) == after.state

    async def test_a_run_that_does_not_exist_has_no_frontier(self, harness: Harness, frontier: Frontier) -> None:
        with pytest.raises(RunError):
            await harness.store.frontier("nothing", FrontierOptions())
        with pytest.raises(RunError):
            await harness.store.transition("nothing", "running")

    async def test_runs_are_independent(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("second")
        await push(frontier, 1)
        assert await other.find(page(1)) is None
        await push(other, 1, 2)
        await complete(frontier, await lease_one(frontier), items=[b"one"])
        assert [item.payload for item in await frontier.read_items(0, 9)] == [b"one"]
        assert await other.read_items(0, 9) == []
        assert (await frontier.stats()).pushed == 1
        assert await lease_names(other) == ["1", "2"]

    async def test_a_closed_frontier_loses_nothing(self, harness: Harness) -> None:
        options = FrontierOptions(in_memory=2, concurrency_per_host=20)
        frontier = await harness.open(options)
        await push(frontier, *range(10))
        await frontier.update_host("a.example", HostUpdate(block_for=5))
        await frontier.close()
        frontier = await harness.open_run("run", options)
        assert await lease_names(frontier) == []
        await harness.advance(5)
        assert await lease_names(frontier) == [str(number) for number in range(10)]

    async def test_runs_survive_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        await harness.open()
        await harness.store.create_run(Run(run_id="r", spider="s", state="queued", created_at=5.5, settings={"a": [1]}))
        run = await harness.store.transition("r", "running")
        await harness.reopen()
        assert await harness.store.get_run("r") == run

    # -- role states

    async def test_the_states_of_roles_are_listed(self, harness: Harness, frontier: Frontier) -> None:
        assert await frontier.roles() == []
        seed = await claim_role(frontier)
        drain = await claim_role(frontier, "sink:x", ttl=5)
        assert await frontier.advance(drain, b"far", 5)
        await frontier.relinquish(seed, finished=True)
        await harness.open_run("other")
        states = {state.role: state for state in await frontier.roles()}
        assert states == {
            "seed": RoleState(role="seed", cursor=b"", held=False, finished=True, holder=states["seed"].holder),
            "sink:x": RoleState(
                role="sink:x", cursor=b"far", held=True, finished=False, holder=states["sink:x"].holder
            ),
        }
        await harness.advance(5)
        assert [state.held for state in await frontier.roles()] == [False, False]
        assert await harness.frontiers["other"].roles() == []

    async def test_a_role_names_who_claimed_it_last(self, harness: Harness, frontier: Frontier) -> None:
        first = await harness.open_run("run", holder=Holder("worker-1", 1))
        second = await harness.open_run("run", holder=Holder("wörker/2", 1))
        for worker in (first, second):
            await worker.relinquish(await claim_role(worker, "drain"))
        seed = await claim_role(first, ttl=5)
        await first.push([], seed=seed, cursor=b"1")
        await claim_role(first, "fenced")
        await claim_role(first, "unnamed", ttl=5)
        await frontier.fence("worker-1", 2)
        await claim_role(frontier, "unnamed")  # a store in another process names the process that claimed it
        holders = {state.role: state.holder for state in await frontier.roles()}
        assert holders.pop("unnamed") != "worker-1"
        assert holders == {"drain": "wörker/2", "seed": "worker-1", "fenced": "worker-1"}

    # -- halted and deleted runs

    @pytest.mark.parametrize("state", ["paused", "cancelled"])
    async def test_a_halted_run_grants_no_leases(self, harness: Harness, frontier: Frontier, state: RunState) -> None:
        await push(frontier, "a", "b")
        lease = await lease_one(frontier)
        await harness.store.transition("run", state)
        worker = await harness.open_run("run")
        for user in (frontier, worker):
            leased = await user.lease(10, TTL)
            assert (leased.leases, leased.wait) == ([], None)
        await complete(frontier, lease, children=[page("c")])  # leases that are out can be completed
        assert (await frontier.stats()).done == 1
        await harness.store.transition("run", "running")
        assert await lease_names(frontier) == ["b", "c"]

    async def test_leases_of_a_halted_run_expire(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        await lease_one(frontier, ttl=10)
        await harness.store.transition("run", "paused")
        await harness.advance(10)
        await frontier.lease(1, TTL)
        assert (await frontier.stats()).ready == 1

    async def test_a_deleted_run_is_gone(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a", "b")
        lease = await lease_one(frontier)
        await complete(frontier, lease, items=[b"item"], children=[page("c")])
        await claim_role(frontier, "drain")
        del harness.frontiers["run"]
        await harness.store.delete_run("run")
        assert await harness.store.get_run("run") is None
        assert await harness.store.list_runs() == []
        with pytest.raises(RunError):
            await harness.store.delete_run("run")
        again = await harness.open_run("run")  # a new run of the same name starts empty
        stats = await again.stats()
        assert (stats.pushed, stats.items, stats.seeding) == (0, 0, True)
        assert await again.read_items(0, 10) == []
        assert await again.roles() == []
        assert await again.find(page("a")) is None
        await push(again, "a")
        assert await lease_names(again) == ["a"]

    async def test_a_deleted_run_frees_its_hosts_for_other_runs(self, harness: Harness) -> None:
        options = FrontierOptions(concurrency_per_host=1)
        frontier = await harness.open(options)
        other = await harness.open_run("other", options)
        await push(frontier, "a")
        await push(other, "b")
        await frontier.update_host("slow.example", HostUpdate(delay=7.0))
        await lease_one(frontier)
        assert await lease_names(other) == []
        del harness.frontiers["run"]
        await harness.store.delete_run("run")
        assert await lease_names(other) == ["b"]
        await push(other, page("c", "slow.example"))
        assert {state.host: state.delay for state in await other.host_states()}["slow.example"] == 7.0

    # -- shared facts

    async def test_facts_are_shared_by_all_runs_until_they_expire(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("other")
        assert await frontier.recall("robots") is None
        await frontier.remember("robots", b"\x00 first", 10)
        assert await other.recall("robots") == b"\x00 first"
        assert await other.recall("other") is None
        await other.remember("robots", b"second", 20)
        await harness.advance(18)
        assert await frontier.recall("robots") == b"second"
        await harness.advance(2)
        assert await frontier.recall("robots") is None
