"""The politeness of hosts, which all workers and runs on a store share (laws 6 and 7)."""

from __future__ import annotations

import asyncio

import pytest

from shoal.ports import Frontier, FrontierOptions, HostState, HostUpdate
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    check_wait,
    complete,
    fail,
    finish_seeding,
    lease_names,
    lease_one,
    names,
    page,
    push,
)

POLITE = FrontierOptions(delay=10)


class PolitenessContract(ContractTests):
    """Two requests to a host are at least its delay apart, and no more are in flight than its concurrency allows. That
    holds for all workers and runs of a store together, and across restarts. A delay counts from the end of one fetch to
    the lease of the next."""

    # -- delay

    async def test_a_delay_counts_from_the_end_of_a_fetch(self, harness: Harness) -> None:
        frontier = await harness.open(POLITE)
        await push(frontier, 1, 2, 3)
        first = await lease_one(frontier)
        await harness.advance(100)  # a slow page
        assert await lease_names(frontier) == []
        await complete(frontier, first)
        leased = await frontier.lease(5, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 10)
        await harness.advance(9)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert await lease_names(frontier) == ["2"]

    async def test_a_host_with_a_delay_has_one_request_in_flight(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(delay=1, concurrency_per_host=8))
        await frontier.push([page(number, host=f"{number % 2}.example") for number in range(6)])
        assert await lease_names(frontier) == ["0", "1"]
        await harness.advance(50)
        assert await lease_names(frontier) == []

    @pytest.mark.parametrize("ending", ["complete", "retry", "death", "release", "expiry"])
    async def test_every_end_of_a_fetch_starts_the_delay(self, harness: Harness, ending: str) -> None:
        frontier = await harness.open(POLITE)
        await push(frontier, 1, 2)
        lease = await lease_one(frontier, ttl=5)
        await harness.advance(5)
        match ending:
            case "complete":
                await complete(frontier, lease)
            case "retry":
                await fail(frontier, lease, retry_in=1)
            case "death":
                await fail(frontier, lease)
            case "release":
                await frontier.release([lease], contacted=True)
            case _:
                assert await lease_names(frontier) == []
        await harness.advance(9)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert len(await lease_names(frontier)) == 1

    async def test_a_lease_without_contact_starts_no_delay(self, harness: Harness) -> None:
        frontier = await harness.open(POLITE)
        await push(frontier, 1, 2, 3, 4)
        await complete(frontier, await lease_one(frontier), contacted=False)
        await fail(frontier, await lease_one(frontier), contacted=False, kind="robots")
        await frontier.release([await lease_one(frontier)])
        assert await lease_names(frontier) == ["3"]

    async def test_a_lease_without_contact_does_not_end_a_delay(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=2))
        await push(frontier, 1, 2, 3)
        first, second = (await frontier.lease(2, TTL)).leases
        await frontier.update_host(HOST, HostUpdate(delay=10))
        await complete(frontier, first)
        await complete(frontier, second, contacted=False)
        await harness.advance(9)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert await lease_names(frontier) == ["3"]

    async def test_a_delay_blocks_only_its_own_host(self, harness: Harness) -> None:
        frontier = await harness.open(POLITE)
        await push(frontier, page(1, priority=9), page(2, priority=9), page("other", host="b.example"))
        await complete(frontier, await lease_one(frontier))
        assert await lease_names(frontier) == ["other"]

    async def test_hosts_with_different_ports_are_different_hosts(self, harness: Harness) -> None:
        frontier = await harness.open(POLITE)
        await frontier.push([page(1), page(2, host=f"{HOST}:8080"), page(3, host=f"www.{HOST}"), page(4)])
        assert await lease_names(frontier) == ["1", "2", "3"]

    # -- sources of a delay

    async def test_the_largest_delay_counts_and_names_its_source(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        assert await self.in_force(frontier) == (0, "no delay", 8)
        for update, delay, source in (
            (HostUpdate(learned_delay=2), 2, "learned"),
            (HostUpdate(crawl_delay=3), 3, "Crawl-delay"),
            (HostUpdate(delay=4), 4, "set"),
            (HostUpdate(learned_delay=5), 5, "learned"),
            (HostUpdate(learned_delay=None), 4, "set"),
            (HostUpdate(delay=1), 3, "Crawl-delay"),
            (HostUpdate(crawl_delay=None), 1, "set"),
        ):
            await frontier.update_host(HOST, update)
            in_force, why, concurrency = await self.in_force(frontier)
            assert (in_force, concurrency) == (delay, 1)
            assert source in why
        await frontier.update_host(HOST, HostUpdate(delay=None))
        assert await self.in_force(frontier) == (0, "no delay", 8)

    async def test_a_host_can_have_a_shorter_delay_than_the_others(self, harness: Harness) -> None:
        frontier = await harness.open(POLITE)
        await push(frontier, *range(9))
        delay, why, concurrency = await self.in_force(frontier)
        assert (delay, concurrency) == (10, 1)
        assert "download_delay" in why
        await frontier.update_host(HOST, HostUpdate(delay=0))
        assert len(await lease_names(frontier)) == 8

    @pytest.mark.parametrize(
        ("set_it", "unset_it"),
        [
            pytest.param(HostUpdate(delay=5), HostUpdate(delay=None), id="own"),
            pytest.param(HostUpdate(crawl_delay=5), HostUpdate(crawl_delay=None), id="robots"),
            pytest.param(HostUpdate(learned_delay=5), HostUpdate(learned_delay=None), id="learned"),
        ],
    )
    async def test_each_kind_of_delay_is_respected(
        self, harness: Harness, frontier: Frontier, set_it: HostUpdate, unset_it: HostUpdate
    ) -> None:
        await frontier.update_host(HOST, set_it)  # before the first request of the host
        await push(frontier, 1, 2, 3)
        first = await lease_one(frontier)
        assert await lease_names(frontier) == []
        await complete(frontier, first)
        await harness.advance(4)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        second = await lease_one(frontier)
        await frontier.update_host(HOST, unset_it)
        assert await lease_names(frontier) == ["3"]
        await complete(frontier, second)

    async def test_a_new_delay_counts_from_the_end_of_the_last_fetch(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1, 2)
        await complete(frontier, await lease_one(frontier))
        await harness.advance(3)
        await frontier.update_host(HOST, HostUpdate(learned_delay=10))
        check_wait(harness, await frontier.lease(5, TTL), 7)
        await frontier.update_host(HOST, HostUpdate(learned_delay=2))
        assert await lease_names(frontier) == ["2"]

    # -- concurrency

    async def test_a_host_without_a_delay_is_limited_by_its_concurrency(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=3))
        await frontier.push([page(number, host=f"{number // 5}.example") for number in range(10)])
        leases = (await frontier.lease(100, TTL)).leases
        assert names(leases) == ["0", "1", "2", "5", "6", "7"]
        await complete(frontier, leases[0], leases[4])
        assert await lease_names(frontier) == ["3", "8"]

    async def test_a_host_can_have_its_own_concurrency(self, frontier: Frontier) -> None:
        await push(frontier, *range(12))
        await frontier.update_host(HOST, HostUpdate(concurrency=2))
        first = await frontier.lease(100, TTL)
        assert names(first) == ["0", "1"]
        await frontier.update_host(HOST, HostUpdate(concurrency=1))
        await complete(frontier, first.leases[0])
        assert await lease_names(frontier) == []
        await frontier.update_host(HOST, HostUpdate(concurrency=10))
        assert len(await lease_names(frontier)) == 9
        await frontier.update_host(HOST, HostUpdate(concurrency=None))
        assert await self.in_force(frontier) == (0, "no delay", 8)

    async def test_a_lost_worker_frees_its_place_on_the_host(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=2, max_attempts=1))
        await push(frontier, *range(4))
        assert await lease_names(frontier, ttl=5) == ["0", "1"]
        await harness.advance(5)
        assert await lease_names(frontier) == ["2", "3"]

    async def test_all_workers_share_the_concurrency_of_a_host(self, harness: Harness) -> None:
        options = FrontierOptions(concurrency_per_host=3)
        frontier = await harness.open(options)
        workers = [frontier, await harness.open_run("run", options)]
        await push(frontier, *range(40))
        answers = await asyncio.gather(*(worker.lease(2, TTL) for worker in workers * 4))
        assert sum(len(leased.leases) for leased in answers) == 3

    # -- blocking

    async def test_a_blocked_host_is_not_leased_until_the_block_ends(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1, page("other", host="b.example"))
        await frontier.update_host(HOST, HostUpdate(block_for=30, block_reason="429, Retry-After"))
        leased = await frontier.lease(5, TTL)
        assert names(leased) == ["other"]
        check_wait(harness, leased, 30)
        await complete(frontier, *leased.leases)
        state = await self.state(frontier)
        assert 30 - harness.drift <= state.blocked_for <= 30
        assert state.block_reason == "429, Retry-After"
        await harness.advance(29)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert (await self.state(frontier)).blocked_for == 0
        assert await lease_names(frontier) == ["1"]

    @pytest.mark.parametrize("unblocked", [0, None])
    async def test_a_host_can_be_unblocked(self, frontier: Frontier, unblocked: float | None) -> None:
        await push(frontier, 1)
        await frontier.update_host(HOST, HostUpdate(block_for=30))
        await frontier.update_host(HOST, HostUpdate(crawl_delay=1))  # does not change the block
        assert await lease_names(frontier) == []
        await frontier.update_host(HOST, HostUpdate(block_for=unblocked))
        assert await lease_names(frontier) == ["1"]

    # -- host states

    async def test_host_states_show_the_busiest_first(self, frontier: Frontier) -> None:
        for host, count in (("a.example", 2), ("b.example", 5), ("c.example", 3)):
            await frontier.push([page(number, host=host) for number in range(count)])
        states = await frontier.host_states()
        assert [(state.host, state.ready, state.in_flight) for state in states] == [
            ("b.example", 5, 0),
            ("c.example", 3, 0),
            ("a.example", 2, 0),
        ]
        await frontier.lease(4, TTL)
        assert [(state.host, state.ready, state.in_flight) for state in await frontier.host_states(2)] == [
            ("b.example", 3, 2),
            ("c.example", 3, 0),
        ]

    async def test_the_state_of_one_host(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, page("x", "b.example"))
        await frontier.lease(1, TTL)
        await frontier.update_host(HOST, HostUpdate(delay=2.0, block_for=60, block_reason="by hand"))
        state = await frontier.host_state(HOST)
        assert (state.host, state.ready, state.in_flight, state.block_reason) == (HOST, 1, 1, "by hand")
        assert (state.delay, state.why) == (2.0, "set for this host")
        assert 59 < state.blocked_for <= 60
        assert (await frontier.host_state("b.example")).ready == 1

    async def test_the_state_of_a_host_that_the_run_does_not_know(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        await frontier.update_host("*", HostUpdate(delay=7.0))
        state = await frontier.host_state("unknown.example")
        assert (state.host, state.delay, state.why) == ("unknown.example", 7.0, "set for all hosts")
        assert (state.ready, state.in_flight, state.blocked_for) == (0, 0, 0)
        assert {state.host for state in await frontier.host_states()} == {HOST}

    # -- several runs

    async def test_runs_on_one_store_share_the_delay_of_a_host(self, harness: Harness) -> None:
        one = await harness.open(POLITE)
        two = await harness.open_run("second", POLITE)
        await push(one, 1)
        await push(two, 1, 2)  # each run has its own URLs
        first = await lease_one(one)
        assert await lease_names(two) == []
        await complete(one, first)
        leased = await two.lease(5, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 10)
        await harness.advance(10)
        assert await lease_names(two) == ["1"]
        await finish_seeding(one)
        assert (await one.stats()).finished
        assert not (await two.stats()).finished

    async def test_runs_on_one_store_share_the_concurrency_of_a_host(self, harness: Harness) -> None:
        options = FrontierOptions(concurrency_per_host=3)
        one, two = await harness.open(options), await harness.open_run("second", options)
        await push(one, *range(5))
        await push(two, *range(5))
        held = (await one.lease(2, TTL)).leases
        assert await lease_names(two) == ["0"]
        assert await lease_names(one) == []
        await complete(one, *held)
        assert await lease_names(two) == ["1", "2"]

    async def test_runs_on_one_store_share_delays_and_blocks_of_a_host(self, harness: Harness) -> None:
        one, two = await harness.open(), await harness.open_run("second")
        await push(one, 1)
        await push(two, 1)
        await one.update_host(HOST, HostUpdate(crawl_delay=7))
        assert (await self.state(two)).delay == 7
        await one.update_host(HOST, HostUpdate(block_for=30))
        assert await lease_names(two) == []
        await two.update_host(HOST, HostUpdate(block_for=None))
        assert await lease_names(one) == ["1"]

    async def test_an_expired_lease_of_another_run_frees_its_place_on_the_host(self, harness: Harness) -> None:
        options = FrontierOptions(concurrency_per_host=1)
        one, two = await harness.open(options), await harness.open_run("second", options)
        await push(one, 1)
        await push(two, 2)
        await lease_one(one, ttl=5)
        assert await lease_names(two) == []
        await harness.advance(5)  # the first run has no worker now
        assert await lease_names(two) == ["2"]

    # -- across restarts

    async def test_politeness_survives_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open(POLITE)
        await frontier.push([page(number, host=host) for host in ("a.example", "b.example") for number in (1, 2)])
        await complete(frontier, *(await frontier.lease(2, TTL)).leases)
        update = HostUpdate(crawl_delay=20, concurrency=3, learned_delay=15, block_for=40, block_reason="asked to")
        await frontier.update_host("b.example", update)
        await harness.advance(5)
        frontier = await harness.reopen()
        leased = await frontier.lease(5, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 5)
        await harness.advance(5)
        leased = await frontier.lease(5, TTL)
        assert [lease.host for lease in leased.leases] == ["a.example"]
        check_wait(harness, leased, 30)
        state = await self.state(frontier, "b.example")
        assert (state.delay, state.block_reason) == (20, "asked to")
        await frontier.update_host("b.example", HostUpdate(crawl_delay=None, learned_delay=None, delay=0, block_for=0))
        assert (await self.state(frontier, "b.example")).concurrency == 3

    async def test_leases_of_a_dead_process_free_their_places_on_hosts(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        options = FrontierOptions(concurrency_per_host=1)
        frontier = await harness.open(options)
        await harness.open_run("second", options)
        await push(frontier, 1, 2)
        await lease_one(frontier, ttl=5)
        frontier = await harness.reopen()
        await harness.advance(5)
        lease = await lease_one(frontier)
        assert (names([lease]), lease.attempt) == (["1"], 2)
        assert (await self.state(frontier)).in_flight == 1

    async def state(self, frontier: Frontier, host: str = HOST) -> HostState:
        """The politeness in force for a host."""
        return next(state for state in await frontier.host_states() if state.host == host)

    async def in_force(self, frontier: Frontier) -> tuple[float, str, int]:
        """The delay of the first host, its source, and its concurrency."""
        state = await self.state(frontier)
        return state.delay, state.why, state.concurrency

    # -- defaults and learned delays

    async def test_the_default_applies_to_all_hosts_without_their_own_value(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=3))
        await push(frontier, *(page(f"{host}{i}", f"{host}.example") for host in "abc" for i in range(4)))
        await frontier.update_host("b.example", HostUpdate(concurrency=1))
        await frontier.update_host("*", HostUpdate(concurrency=2))
        assert sorted(await lease_names(frontier, 20)) == ["a0", "a1", "b0", "c0", "c1"]
        assert "*" not in {state.host for state in await frontier.host_states()}

    async def test_a_default_delay_is_respected_and_can_be_removed(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(delay=1.0))
        await push(frontier, "a", "b", "c", page("x", "own.example"), page("y", "own.example"))
        await frontier.update_host("own.example", HostUpdate(delay=2.0))
        await frontier.update_host("*", HostUpdate(delay=10.0))
        states = {state.host: (state.delay, state.why) for state in await frontier.host_states()}
        assert states == {HOST: (10.0, "set for all hosts"), "own.example": (2.0, "set for this host")}
        leased = await frontier.lease(10, TTL)
        assert names(leased) == ["a", "x"]
        await complete(frontier, *leased.leases)
        await harness.advance(2)
        assert await lease_names(frontier) == ["y"]
        await harness.advance(8)
        assert await lease_names(frontier) == ["b"]
        await frontier.update_host("*", HostUpdate(delay=None))
        states = {state.host: (state.delay, state.why) for state in await frontier.host_states()}
        assert states[HOST] == (1.0, "download_delay")

    async def test_a_lease_carries_the_learned_delay_of_its_host(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a", page("b", "b.example"))
        await frontier.update_host(HOST, HostUpdate(learned_delay=2.5))
        learned = {lease.host: lease.learned_delay for lease in (await frontier.lease(10, TTL)).leases}
        assert learned == {HOST: 2.5, "b.example": 0.0}
