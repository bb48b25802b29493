"""Law 3 for cluster slots: the holder of a slot under a later epoch takes over the leases and roles of earlier ones."""

from __future__ import annotations

import pytest

from shoal.errors import FencedError
from shoal.ports import Frontier, FrontierOptions, Holder
from shoal.testing.harness import Harness
from shoal.testing.roles import claim_role
from shoal.testing.steps import TTL, ContractTests, check_refused, complete, history, lease_names, lease_one, page, push


class FencingContract(ContractTests):
    """A node that takes over a slot fences it first. From then on, calls of the old holder have no effect, even if it
    is still alive. So a page is never completed by two nodes."""

    async def test_a_fence_ends_the_leases_of_earlier_epochs_at_once(
        self, harness: Harness, frontier: Frontier
    ) -> None:
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

    async def test_a_fenced_attempt_counts(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(max_attempts=2))
        for epoch in (1, 2):
            holder = await harness.open_run("run", holder=Holder("s", epoch))
            await holder.push([page("deadly")])
            assert (await lease_one(holder)).attempt == epoch
            assert await holder.fence("s", epoch + 1) == 1
        found = await history(await harness.open_run("run"), page("deadly"))
        assert found.state == "dead"
        assert "lost" in found.reason
        assert [event.kind for event in found.events].count("lost") == 2

    async def test_a_fenced_fetch_starts_the_delay(self, harness: Harness) -> None:
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

    async def test_an_earlier_epoch_gets_no_leases_and_no_roles(self, harness: Harness, frontier: Frontier) -> None:
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

    async def test_a_fence_under_an_earlier_epoch_is_refused(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        new = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(new)
        assert await frontier.fence("s", 8) == 1
        with pytest.raises(FencedError):
            await frontier.fence("s", 7)
        assert await frontier.fence("s", 8) == 0  # a repeat
        await check_refused(new, lease)

    async def test_a_fence_keeps_the_leases_of_its_own_epoch(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        holder = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(holder)
        assert await holder.fence("s", 7) == 0
        await complete(holder, lease)

    async def test_a_fence_does_not_affect_other_slots_and_runs(self, harness: Harness, frontier: Frontier) -> None:
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

    async def test_a_fence_keeps_a_lease_that_another_slot_has_now(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        old = await harness.open_run("run", holder=Holder("s/0", 1))
        await lease_one(old, ttl=5)
        await harness.advance(6)
        lease = await lease_one(await harness.open_run("run", holder=Holder("s/1", 1)))
        assert await frontier.fence("s/0", 2) == 0
        await complete(frontier, lease)

    async def test_a_fence_does_not_affect_leases_that_have_ended(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(3))
        old = await harness.open_run("run", holder=Holder("s", 1))
        first, second, third = (await old.lease(3, TTL)).leases
        await complete(old, first)
        assert await old.release([second]) == [True]
        assert (await old.renew([third], TTL))[0] is not None
        assert await frontier.fence("s", 2) == 1
        assert sorted(await lease_names(frontier)) == ["1", "2"]

    async def test_a_fence_frees_roles_and_keeps_their_cursors(self, harness: Harness, frontier: Frontier) -> None:
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

    async def test_a_fence_ends_thousands_of_leases_in_one_step(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(concurrency_per_host=5000))
        old = await harness.open_run("run", holder=Holder("s", 1))
        await push(old, *range(2500))
        assert len((await old.lease(2500, TTL)).leases) == 2500
        assert await old.fence("s", 2) == 2500
        assert (await old.stats()).ready == 2500

    async def test_fences_survive_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        await push(frontier, "a")
        await frontier.fence("s", 9)
        await harness.reopen()
        old = await harness.open_run("run", holder=Holder("s", 8))
        with pytest.raises(FencedError):
            await old.lease(1, TTL)
