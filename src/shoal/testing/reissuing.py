"""Reissued leases. A lease may be sent to several workers in messages, but only one of them may use it (law 3), and an
attempt begins when a worker reissues its lease (law 5)."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from shoal.ports import Completion, Frontier, FrontierOptions, Holder, HostUpdate, Lease, RunState
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    all_items,
    check_refused,
    check_wait,
    complete,
    fail,
    history,
    lease_names,
    lease_one,
    names,
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
            assert [len(winner) for winner in winners] == [1] * 20
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
            assert await frontier.release([reissued for reissued in await task if reissued]) == [True]
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


ONE, ANOTHER = b"nonce-of-one", b"nonce-of-another"


async def summary(frontier: Frontier, lease: Lease) -> tuple[str, int, list[str]]:
    """The history of a leased request: its state, its attempts, its earlier events."""
    found = await history(frontier, lease.request)
    return found.state, found.attempts, [event.what for event in found.events[:-1]]


class SendingContract(ContractTests):
    """A dispatcher leases with ``counts_attempt=False`` and sends the leases as messages. A lost message costs no
    attempt: the attempt counts from the reissue on. A receiver whose reissue was not answered repeats it with the
    same nonce."""

    # -- when the attempt counts

    async def test_a_lease_that_is_not_begun_costs_no_attempt(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1, 2)
        for _ in range(6):
            first, second = (await frontier.lease(2, 5, counts_attempt=False)).leases
            assert (names([first, second]), first.attempt, second.attempt) == (["1", "2"], 1, 1)
            assert await summary(frontier, first) == ("leased", 0, [])
            assert (await frontier.stats()).leased == 2
            await harness.advance(5)
            await frontier.lease(0, TTL)
            assert await summary(frontier, first) == ("ready", 0, [])
            assert (await frontier.stats()).ready == 2
            await check_refused(frontier, first)
        assert await frontier.dead_kinds() == {}
        assert (await lease_one(frontier)).attempt == 1

    async def test_the_attempt_counts_from_the_reissue_on(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        for attempt in (1, 2):
            sent = await lease_one(frontier, counts_attempt=False)
            begun = await reissue_one(frontier, sent, 5)
            assert (sent.attempt, begun.attempt) == (attempt, attempt)
            assert replace(begun, token=sent.token, deadline=sent.deadline) == sent
            assert (await summary(frontier, sent))[:2] == ("leased", attempt)
            await harness.advance(5)
            await frontier.lease(0, TTL)
            await check_refused(frontier, begun)
        assert await summary(frontier, sent) == ("dead", 2, ["lease lost", "lease lost"])
        assert await frontier.dead_kinds() == {"worker lost": 1}

    async def test_the_attempt_counts_once(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, counts_attempt=False)
        for _ in range(4):
            lease = await reissue_one(frontier, lease)
            assert (await summary(frontier, lease))[1] == 1
        assert await fail(frontier, lease, retry_in=1) == "waiting"
        await harness.advance(1)
        assert (await lease_one(frontier, counts_attempt=False)).attempt == 2

    @pytest.mark.parametrize("ending", ["complete", "retry", "death", "release"])
    async def test_ending_a_lease_without_a_reissue_counts_as_an_attempt(self, frontier: Frontier, ending: str) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, counts_attempt=False)
        match ending:
            case "complete":
                await complete(frontier, lease)
                expected: tuple[str, int, list[str]] = ("done", 1, [])
            case "retry":
                assert await fail(frontier, lease, retry_in=50) == "waiting"
                expected = ("waiting", 1, ["attempt 1 failed"])
            case "death":
                assert await fail(frontier, lease) == "dead"
                expected = ("dead", 1, ["attempt 1 failed"])
            case _:
                assert await frontier.release([lease]) == [True]
                expected = ("ready", 0, [])
        assert await summary(frontier, lease) == expected
        await check_refused(frontier, lease)

    async def test_failures_without_a_reissue_use_up_the_attempts(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        assert await fail(frontier, await lease_one(frontier, counts_attempt=False), retry_in=5) == "waiting"
        await harness.advance(5)
        last = await lease_one(frontier, counts_attempt=False)
        assert last.attempt == 2
        assert await fail(frontier, last, retry_in=5) == "dead"

    async def test_renewing_does_not_begin_a_lease(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, 5, counts_attempt=False)
        (renewed,) = await frontier.renew([lease], 50)
        assert renewed is not None
        assert (renewed.token, renewed.attempt) == (lease.token, 1)
        check_wait(harness, await frontier.lease(1, TTL), 50)
        await harness.advance(50)
        assert (await lease_one(frontier, counts_attempt=False)).attempt == 1

    async def test_only_begun_leases_cost_an_attempt_when_they_expire(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        await push(frontier, 1, 2, 3)
        begun = await lease_one(frontier, 5)
        sent = await lease_one(frontier, 5, counts_attempt=False)
        reissued = await reissue_one(frontier, await lease_one(frontier, counts_attempt=False), 5)
        await harness.advance(5)
        assert await lease_names(frontier) == ["2"]
        states = [(await summary(frontier, lease))[0] for lease in (begun, sent, reissued)]
        assert states == ["dead", "leased", "dead"]

    async def test_a_fence_releases_leases_that_are_not_begun(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        holder = await harness.open_run("run", holder=Holder("s", 1))
        sent, reissued, begun = [*(await holder.lease(2, TTL, counts_attempt=False)).leases, await lease_one(holder)]
        reissued = await reissue_one(frontier, reissued)
        assert await frontier.fence("s", 2) == 3
        assert await summary(frontier, sent) == ("ready", 0, [])
        for lease in (reissued, begun):
            assert await summary(frontier, lease) == ("ready", 1, ["lease lost"])
        for lease in (sent, reissued, begun):
            await check_refused(frontier, lease)
        assert [lease.attempt for lease in (await frontier.lease(3, TTL)).leases] == [1, 2, 2]

    async def test_leases_that_are_not_begun_survive_a_restart_or_are_released(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        await push(frontier, 1, 2)
        sent, other = (await frontier.lease(2, TTL, counts_attempt=False)).leases
        (reissued,) = await frontier.reissue([other], TTL, nonce=ONE)
        assert reissued is not None
        frontier = await harness.reopen()
        if harness.keeps_leases:
            assert await summary(frontier, sent) == ("leased", 0, [])
            assert (await reissue_one(frontier, sent)).attempt == 1
            (again,) = await frontier.reissue([other], TTL, nonce=ONE)
            assert again is not None
            assert again == replace(reissued, deadline=again.deadline)
        else:
            assert await summary(frontier, sent) == ("ready", 0, [])
            assert await summary(frontier, other) == ("dead", 1, ["lease lost"])

    # -- its host

    async def test_a_lease_that_is_not_begun_takes_a_place_on_its_host(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=2))
        await push(frontier, 1, 2, 3)
        sent = (await frontier.lease(3, 5, counts_attempt=False)).leases
        assert len(sent) == 2
        assert [state.in_flight for state in await frontier.host_states()] == [2]
        assert await lease_names(frontier) == []
        await reissue_one(frontier, sent[0])
        assert [state.in_flight for state in await frontier.host_states()] == [2]
        await harness.advance(5)
        assert await lease_names(frontier) == ["2"]
        assert [state.in_flight for state in await frontier.host_states()] == [2]

    async def test_a_lease_that_is_not_begun_starts_no_delay(self, harness: Harness) -> None:
        """Nobody contacts a host for a lease that is not begun."""
        frontier = await harness.open(FrontierOptions(delay=10))
        await push(frontier, 1, 2)
        await lease_one(frontier, 50, counts_attempt=False)
        await harness.advance(40)
        assert await lease_names(frontier) == []
        await harness.advance(10)
        sent = await lease_one(frontier, 50, counts_attempt=False)
        assert names([sent]) == ["1"]
        await reissue_one(frontier, sent, 50)
        await harness.advance(50)
        assert await lease_names(frontier) == []  # the worker may have contacted it until now
        await harness.advance(9)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert await lease_names(frontier) == ["1"]

    async def test_a_lease_that_is_not_begun_does_not_end_a_delay(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(delay=10))
        await push(frontier, 1, 2)
        await complete(frontier, await lease_one(frontier))
        assert (await frontier.lease(1, TTL, counts_attempt=False)).leases == []
        await harness.advance(10)
        await lease_one(frontier, 5, counts_attempt=False)
        await frontier.update_host(HOST, HostUpdate(delay=100))
        await harness.advance(5)
        assert await lease_names(frontier) == []
        await harness.advance(85)
        assert await lease_names(frontier) == ["2"]

    # -- repeated reissues

    @pytest.mark.parametrize("begun", [True, False])
    async def test_a_repeated_reissue_returns_the_same_token(
        self, harness: Harness, frontier: Frontier, begun: bool
    ) -> None:
        await push(frontier, 1)
        old = await lease_one(frontier, counts_attempt=begun)
        (new,) = await frontier.reissue([old], 5, nonce=ONE)
        assert new is not None
        for _ in range(3):
            await harness.advance(4)
            (again,) = await frontier.reissue([old], 5, nonce=ONE)
            assert again is not None
            assert replace(again, deadline=new.deadline) == new
            assert again.deadline > new.deadline
            assert await lease_names(frontier) == []
            assert await frontier.reissue([old], TTL, nonce=ANOTHER) == [None]
        assert (await summary(frontier, old))[1] == 1
        await frontier.renew([new], TTL)
        (again,) = await frontier.reissue([old], TTL, nonce=ONE)
        assert again is not None
        await complete(frontier, again)
        await check_refused(frontier, new)

    @pytest.mark.parametrize("end", ["complete", "retry", "death", "release", "reissue", "run out", "fence"])
    async def test_a_reissue_can_be_repeated_until_the_lease_ends(
        self, harness: Harness, frontier: Frontier, end: str
    ) -> None:
        holder = await harness.open_run("run", holder=Holder("s", 1))
        await push(frontier, 1)
        old = await lease_one(holder, counts_attempt=False)
        (new,) = await frontier.reissue([old], 5, nonce=ONE)
        assert new is not None
        match end:
            case "complete":
                await complete(frontier, new)
            case "retry":
                await fail(frontier, new, retry_in=0)
            case "death":
                await fail(frontier, new)
            case "release":
                await frontier.release([new])
            case "reissue":
                (newer,) = await frontier.reissue([new], TTL, nonce=ONE)
                assert newer is not None
                assert newer.token not in (old.token, new.token)
            case "run out":
                await harness.advance(5)
                await frontier.lease(0, TTL)
            case _:
                assert await frontier.fence("s", 2) == 1
        assert await frontier.reissue([old], TTL, nonce=ONE) == [None]
        if end != "reissue":
            assert await frontier.reissue([new], TTL, nonce=ONE) == [None]
        for lease in (await frontier.lease(1, TTL)).leases:  # a new lease has no origin
            assert await frontier.reissue([old], TTL, nonce=ONE) == [None]
            await complete(frontier, lease)

    async def test_a_repeated_batch_of_reissues_has_the_same_answer(self, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        lost, *sent = (await frontier.lease(4, TTL, counts_attempt=False)).leases
        await complete(frontier, lost)
        batch = [sent[0], lost, sent[1], sent[0]]
        answer = await frontier.reissue(batch, TTL, nonce=ONE)
        assert [lease is not None for lease in answer] == [True, False, True, False]
        more = await frontier.reissue([sent[2], *batch], TTL, nonce=ONE)
        assert more[0] is not None
        assert [lease and lease.token for lease in more[1:]] == [lease and lease.token for lease in answer]
        assert await frontier.reissue(sent, TTL, nonce=ANOTHER) == [None] * 3

    async def test_of_several_receivers_of_a_lease_one_begins(self, harness: Harness) -> None:
        """Each of them repeats its call."""
        frontier = await harness.open(FrontierOptions(concurrency_per_host=1000))
        callers = [frontier, await harness.open_run("run"), await harness.open_run("run")]
        nonces = [b"receiver-%d" % number for number in range(3)]
        await push(frontier, *range(20))
        for lease in (await frontier.lease(20, TTL, counts_attempt=False)).leases:
            calls = [*zip(callers, nonces, strict=True)] * 2
            answers = await asyncio.gather(*(caller.reissue([lease], TTL, nonce=nonce) for caller, nonce in calls))
            tokens = [won and won.token for (won,) in answers]
            assert tokens[:3] == tokens[3:]
            (winner,) = {won.token: won for (won,) in answers if won}.values()
            assert tokens.count(winner.token) == 2
            await complete(frontier, winner)
        assert (await frontier.stats()).done == 20

    @pytest.mark.parametrize("length", [0, 7, 33])
    async def test_a_nonce_of_the_wrong_length_is_refused(self, frontier: Frontier, length: int) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, counts_attempt=False)
        with pytest.raises(ValueError, match="8 to 32 bytes"):
            await frontier.reissue([lease], TTL, nonce=bytes(length))
        for nonce in (bytes(8), bytes(range(32))):
            (lease,) = [reissued for reissued in await frontier.reissue([lease], TTL, nonce=nonce) if reissued]
        assert await reissue(frontier, [lease]) != [None]
