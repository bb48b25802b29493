"""Leases that are sent to workers in messages: an attempt begins when a worker reissues its lease (law 5)."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from shoal.ports import Frontier, FrontierOptions, Holder, HostUpdate, Lease
from shoal.testing.harness import Harness
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
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
            asked = [*zip(callers, nonces, strict=True)] * 2
            answers = await asyncio.gather(*(each.reissue([lease], TTL, nonce=nonce) for each, nonce in asked))
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
            (lease,) = [each for each in await frontier.reissue([lease], TTL, nonce=nonce) if each]
        assert await reissue(frontier, [lease]) != [None]
