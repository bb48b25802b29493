"""Slots of a cluster: who has one under a later epoch takes over what was given to it before, at once."""

from __future__ import annotations

import pytest

from shoal.errors import FencedError
from shoal.ports import Frontier, FrontierOptions, Holder
from shoal.testing.harness import Harness
from shoal.testing.roles import claim_role
from shoal.testing.steps import TTL, ContractTests, check_refused, complete, history, lease_names, lease_one, page, push


class FencingContract(ContractTests):
    """Law 3 for whole workers."""

    async def test_what_a_slot_held_is_given_back_at_once(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        old = await harness.open_run("run", holder=Holder("cluster/0", 1))
        lost = (await old.lease(2, TTL)).leases
        assert len(lost) == 2
        new = await harness.open_run("run", holder=Holder("cluster/0", 2))
        assert await new.fence("cluster/0", 2) == 2
        for lease in lost:
            await check_refused(old, lease)
        assert await lease_names(new) == ["0", "1", "2", "3"]
        assert (await new.stats()).leased == 4

    async def test_an_attempt_that_was_fenced_counts(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(max_attempts=2))
        for epoch in (1, 2):
            holder = await harness.open_run("run", holder=Holder("s", epoch))
            await holder.push([page("deadly")])
            assert (await lease_one(holder)).attempt == epoch
            assert await holder.fence("s", epoch + 1) == 1
        found = await history(await harness.open_run("run"), page("deadly"))
        assert found.state == "dead"
        assert "lost" in found.reason
        assert [event.what for event in found.events].count("lease lost") == 2

    async def test_a_fetch_that_was_fenced_starts_the_delay(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(delay=10.0))
        old = await harness.open_run("run", holder=Holder("s", 1))
        await push(old, "a", "b")
        await lease_one(old)
        await harness.advance(5)
        new = await harness.open_run("run", holder=Holder("s", 2))
        assert await new.fence("s", 2) == 1
        assert await lease_names(new) == []
        await harness.advance(10)
        assert await lease_names(new) == ["a"]

    async def test_nothing_is_given_to_an_earlier_epoch(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        old = await harness.open_run("run", holder=Holder("s", 5))
        assert await frontier.fence("s", 6) == 0
        with pytest.raises(FencedError):
            await old.lease(1, TTL)
        with pytest.raises(FencedError):
            await old.claim("seed", TTL)
        assert (await frontier.stats()).ready == 1
        new = await harness.open_run("run", holder=Holder("s", 6))
        await complete(new, await lease_one(new))

    async def test_an_earlier_fence_changes_nothing(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        new = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(new)
        assert await frontier.fence("s", 8) == 1
        with pytest.raises(FencedError):
            await frontier.fence("s", 7)
        assert await frontier.fence("s", 8) == 0  # again: the same
        await check_refused(new, lease)

    async def test_the_own_epoch_is_not_fenced(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        holder = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(holder)
        assert await holder.fence("s", 7) == 0
        await complete(holder, lease)

    async def test_other_slots_and_other_runs_keep_what_they_have(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(3))
        mine = await lease_one(await harness.open_run("run", holder=Holder("s/0", 1)))
        plain = await lease_one(frontier)
        theirs = await lease_one(await harness.open_run("run", holder=Holder("s/1", 1)))
        other = await harness.open_run("other", holder=Holder("s/0", 1))
        await push(other, "x")
        elsewhere = await lease_one(other)
        assert await frontier.fence("s/0", 2) == 1
        await check_refused(frontier, mine)
        await complete(frontier, plain, theirs)
        await complete(other, elsewhere)

    async def test_what_was_leased_anew_is_not_taken_from_its_new_holder(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, "a")
        old = await harness.open_run("run", holder=Holder("s/0", 1))
        await lease_one(old, ttl=5)
        await harness.advance(6)
        lease = await lease_one(await harness.open_run("run", holder=Holder("s/1", 1)))
        assert await frontier.fence("s/0", 2) == 0
        await complete(frontier, lease)

    async def test_what_has_ended_is_not_given_back(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(3))
        old = await harness.open_run("run", holder=Holder("s", 1))
        first, second, third = (await old.lease(3, TTL)).leases
        await complete(old, first)
        assert await old.release([second]) == [True]
        assert (await old.renew([third], TTL))[0] is not None
        assert await frontier.fence("s", 2) == 1
        assert sorted(await lease_names(frontier)) == ["1", "2"]

    async def test_roles_are_free_with_their_cursor(self, harness: Harness, frontier: Frontier) -> None:
        old = await harness.open_run("run", holder=Holder("s", 1))
        claim = await claim_role(old, "drain")
        assert await old.advance(claim, b"here", TTL)
        finished = await claim_role(old, "seed")
        assert await old.relinquish(finished, finished=True)
        theirs = await claim_role(frontier, "other")
        await frontier.fence("s", 2)
        assert not await old.advance(claim, b"late", TTL)
        again = await claim_role(frontier, "drain")
        assert again.cursor == b"here"
        assert await frontier.advance(theirs, b"", TTL)
        assert await frontier.claim("seed", TTL) is None

    async def test_many_leases_are_given_back_in_one_step(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(concurrency_per_host=5000))
        old = await harness.open_run("run", holder=Holder("s", 1))
        await push(old, *range(2500))
        assert len((await old.lease(2500, TTL)).leases) == 2500
        assert await old.fence("s", 2) == 2500
        assert (await old.stats()).ready == 2500

    async def test_fences_outlive_the_process(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("not durable")
        frontier = await harness.open()
        await push(frontier, "a")
        await frontier.fence("s", 9)
        await harness.reopen()
        old = await harness.open_run("run", holder=Holder("s", 8))
        with pytest.raises(FencedError):
            await old.lease(1, TTL)
