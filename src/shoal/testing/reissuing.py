"""Reissued leases: a lease may be sent to several workers, but only one of them may use it (law 3)."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from shoal.ports import Completion, Frontier, FrontierOptions, Holder, RunState
from shoal.testing.harness import Harness
from shoal.testing.steps import (
    TTL,
    ContractTests,
    all_items,
    check_refused,
    check_wait,
    complete,
    fail,
    history,
    lease_names,
    lease_one,
    push,
    reissue,
    reissue_one,
)


class ReissuingContract(ContractTests):
    """A reissue gives a lease a new token; the old one is stale from then on.

    A worker that receives a lease as a message reissues it before it begins. So if the message is delivered twice, one
    worker begins and the other is refused.
    """

    # -- the reissued lease

    async def test_a_reissue_changes_only_token_and_deadline(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        before = await history(frontier, lease.request), await frontier.stats(), await frontier.host_states()
        started = time.monotonic()
        reissued = await reissue_one(frontier, lease, 5)
        assert started + 5 <= reissued.deadline <= time.monotonic() + 5
        assert reissued.token != lease.token
        assert replace(reissued, token=lease.token, deadline=lease.deadline) == lease
        after = await history(frontier, lease.request), await frontier.stats(), await frontier.host_states()
        assert after == before

    @pytest.mark.parametrize("ending", ["complete", "retry", "death", "release", "renew", "reissue"])
    async def test_after_a_reissue_only_the_new_token_is_valid(self, frontier: Frontier, ending: str) -> None:
        await push(frontier, 1)
        old = await lease_one(frontier)
        new = await reissue_one(frontier, old)
        await check_refused(frontier, old)
        match ending:
            case "complete":
                await complete(frontier, new, items=[b"good"])
                assert [item.payload for item in await all_items(frontier)] == [b"good"]
            case "retry":
                assert await fail(frontier, new, retry_in=5) == "waiting"
            case "death":
                assert await fail(frontier, new) == "dead"
            case "release":
                assert await frontier.release([new]) == [True]
            case "renew":
                (renewed,) = await frontier.renew([new], TTL)
                assert renewed is not None
                assert renewed.token == new.token
            case _:
                await complete(frontier, await reissue_one(frontier, new))
        await check_refused(frontier, old)

    @pytest.mark.parametrize(("old_ttl", "new_ttl"), [(5, 50), (50, 5)])
    async def test_a_reissued_lease_expires_at_its_new_time(
        self, harness: Harness, frontier: Frontier, old_ttl: float, new_ttl: float
    ) -> None:
        await push(frontier, 1)
        old = await lease_one(frontier, old_ttl)
        await harness.advance(3)
        new = await reissue_one(frontier, old, new_ttl)
        check_wait(harness, await frontier.lease(1, TTL), new_ttl)
        await harness.advance(new_ttl - 1)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert (await lease_one(frontier)).attempt == 2
        await check_refused(frontier, old)
        await check_refused(frontier, new)

    async def test_a_reissue_is_the_same_attempt(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        lease = await lease_one(frontier)
        for _ in range(5):
            lease = await reissue_one(frontier, lease)
        assert (lease.attempt, (await history(frontier, lease.request)).attempts) == (1, 1)
        assert await fail(frontier, lease, retry_in=1) == "waiting"
        await harness.advance(1)
        last = await reissue_one(frontier, await lease_one(frontier))
        assert last.attempt == 2
        assert await fail(frontier, last, retry_in=1) == "dead"

    async def test_a_reissued_and_released_request_keeps_its_place(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        first, second = (await frontier.lease(2, TTL)).leases
        assert await frontier.release([await reissue_one(frontier, second)]) == [True]
        assert await frontier.release([await reissue_one(frontier, first)]) == [True]
        assert await lease_names(frontier) == ["1", "2", "3"]

    # -- stale leases

    async def test_stale_leases_do_not_affect_the_rest_of_a_reissued_batch(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, *range(8))
        ran_out = await lease_one(frontier, ttl=5)
        await harness.advance(5)
        await frontier.lease(0, TTL)
        _, done, failed, dead, released, reissued, *good = (await frontier.lease(8, TTL)).leases
        await complete(frontier, done)
        await fail(frontier, failed, retry_in=50)
        await fail(frontier, dead)
        await frontier.release([released])
        await reissue_one(frontier, reissued)
        before = await frontier.stats()
        never = replace(good[0], token=good[1].token)
        batch = [ran_out, good[0], done, failed, never, dead, released, good[1], reissued, good[0]]
        answer = await reissue(frontier, batch)
        assert [lease is not None for lease in answer] == [False, True, *[False] * 5, True, False, False]
        new = [lease for lease in answer if lease is not None]
        assert [lease.fingerprint for lease in new] == [lease.fingerprint for lease in good]
        assert len({lease.token for lease in (*new, *good)}) == 4
        assert await frontier.stats() == before
        await complete(frontier, *new)

    async def test_an_expired_lease_can_be_reissued_until_the_next_lease_call(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, ttl=5)
        await harness.advance(50)
        reissued = await reissue_one(frontier, lease, 20)
        assert await lease_names(frontier) == []
        await complete(frontier, reissued)

    # -- concurrent calls

    async def test_of_concurrent_reissues_of_a_lease_one_succeeds(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=1000))
        callers = [frontier, await harness.open_run("run"), await harness.open_run("run")]
        await push(frontier, *range(20))
        leases = (await frontier.lease(20, TTL)).leases
        for _ in range(5):
            tries = [reissue(caller, [lease]) for lease in leases for caller in callers]
            answers = [lease for (lease,) in await asyncio.gather(*tries)]
            winners = [[lease for lease in answers[at : at + 3] if lease] for at in range(0, len(answers), 3)]
            assert [len(each) for each in winners] == [1] * 20
            for old in leases[:3]:
                await check_refused(frontier, old)
            leases = [lease for (lease,) in winners]
        for _ in range(5):  # in batches, in both directions
            batches = [leases, leases[::-1], leases] * 2
            calls = zip(callers * 2, batches, strict=True)
            answers_in_batches = await asyncio.gather(*(reissue(caller, batch) for caller, batch in calls))
            won = [lease for answer in answers_in_batches for lease in answer if lease is not None]
            assert len({lease.fingerprint for lease in won}) == len(won) == 20
            leases = won
        await complete(frontier, *leases)

    async def test_of_a_reissue_and_a_completion_at_the_same_time_one_succeeds(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=1000))
        other = await harness.open_run("run")
        await push(frontier, *range(40))
        for number, lease in enumerate((await frontier.lease(40, TTL)).leases):
            reissuing = reissue(other, [lease])
            ending = frontier.complete([Completion(lease=lease, items=[b"x"])])
            if number % 2:
                (reissued,), (ended,) = await asyncio.gather(reissuing, ending)
            else:
                (ended,), (reissued,) = await asyncio.gather(ending, reissuing)
            assert (reissued is None) != (ended is None)
            if reissued is not None:
                await complete(other, reissued, items=[b"x"])
        stats = await frontier.stats()
        assert (stats.done, stats.items) == (40, 40)

    async def test_a_cancelled_reissue_releases_its_lease(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        task = asyncio.ensure_future(reissue(frontier, [lease]))
        await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:  # the call did not wait
            assert await frontier.release([each for each in await task if each]) == [True]
        await check_refused(frontier, lease)
        assert (await lease_one(frontier)).attempt == 1

    # -- politeness

    async def test_the_delay_of_a_host_counts_from_the_end_of_the_reissued_lease(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(delay=10))
        await push(frontier, 1, 2)
        old = await lease_one(frontier)
        await harness.advance(100)
        new = await reissue_one(frontier, old)
        assert await frontier.release([old], contacted=True) == [False]
        assert await lease_names(frontier) == []
        await harness.advance(100)
        assert await lease_names(frontier) == []
        await complete(frontier, new)
        await harness.advance(9)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert await lease_names(frontier) == ["2"]

    async def test_a_reissue_does_not_free_a_place_on_its_host(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=2))
        await push(frontier, 1, 2, 3)
        leases = (await frontier.lease(3, TTL)).leases
        assert len(leases) == 2
        for _ in range(3):
            old, leases = leases, [await reissue_one(frontier, lease) for lease in leases]
            assert await frontier.complete([Completion(lease=lease) for lease in old]) == [None, None]
            assert [state.in_flight for state in await frontier.host_states()] == [2]
            assert await lease_names(frontier) == []
        await complete(frontier, leases[0])
        assert await lease_names(frontier) == ["3"]

    # -- halted runs, slots, restarts

    @pytest.mark.parametrize("state", ["paused", "cancelled"])
    async def test_leases_of_a_halted_run_can_be_reissued(
        self, harness: Harness, frontier: Frontier, state: RunState
    ) -> None:
        await push(frontier, 1)
        old = await lease_one(frontier)
        await harness.store.transition("run", state)
        assert None not in await frontier.renew([old], TTL)
        new = await reissue_one(frontier, old)
        await check_refused(frontier, old)
        await complete(frontier, new)

    async def test_a_reissued_lease_stays_with_its_slot(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        holder = await harness.open_run("run", holder=Holder("s", 1))
        another = await harness.open_run("run", holder=Holder("t", 1))
        leases = (await holder.lease(3, TTL)).leases
        plain = await reissue_one(holder, await lease_one(frontier))
        reissued = [await reissue_one(by, lease) for by, lease in zip((holder, another, frontier), leases, strict=True)]
        assert await frontier.fence("t", 2) == 0
        assert await frontier.fence("s", 2) == 3
        for lease in (*leases, *reissued):
            await check_refused(holder, lease)
            await check_refused(frontier, lease)
        await complete(frontier, plain)

    async def test_thousands_of_leases_are_reissued_in_one_step(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(concurrency_per_host=5000))
        holder = await harness.open_run("run", holder=Holder("s", 1))
        await push(holder, *range(2500))
        reissued = await reissue(holder, (await holder.lease(2500, TTL)).leases)
        assert len({lease.token for lease in reissued if lease}) == 2500
        assert await holder.fence("s", 2) == 2500

    async def test_the_new_token_survives_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        await push(frontier, 1)
        old = await lease_one(frontier)
        new = await reissue_one(frontier, old)
        frontier = await harness.reopen()
        await check_refused(frontier, old)
        if harness.keeps_leases:
            await complete(frontier, new)
        else:
            await check_refused(frontier, new)
            assert (await lease_one(frontier)).attempt == 2
