"""Several users of a store: runs that want the same host share its turns and keep the longest delay (law 7), and all
who open a run see the options of those that take part in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.ports import Frontier, FrontierOptions, HostUpdate, Lease, Run
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    check_wait,
    complete,
    fail,
    lease_names,
    lease_one,
    page,
    push,
)


class _Worker:
    """A worker of one run. A page takes until its next poll."""

    def __init__(self, frontier: Frontier, limit: int = 10) -> None:
        self.frontier = frontier
        self.turns: list[int] = []
        """When it leased."""
        self.ends: list[int] = []
        """When its pages ended."""
        self._limit = limit
        self._held: list[Lease] = []

    async def poll(self, tick: int) -> None:
        if self._held:
            await complete(self.frontier, *self._held)
            self.ends += [tick] * len(self._held)
        self._held = (await self.frontier.lease(self._limit, TTL)).leases
        self.turns += [tick] * len(self._held)


async def _crawl(harness: Harness, workers: Sequence[_Worker], ticks: range) -> None:
    """Let workers poll once a second."""
    for tick in ticks:
        for worker in workers:
            await worker.poll(tick)
        await harness.advance(1)


def _shortest_gap(workers: Sequence[_Worker]) -> int:
    """From the end of a page to the next lease, of all runs together."""
    turns = sorted(turn for worker in workers for turn in worker.turns)
    ends = sorted(end for worker in workers for end in worker.ends)
    return min(turn - end for end, turn in zip(ends, turns[1:], strict=False))


class SharingContract(ContractTests):
    """While several runs want a host, the longest of their delays counts, and they take turns by their weights. A run
    that does not ask for its turn loses it."""

    async def _open(self, harness: Harness, *options: FrontierOptions, pages: int = 100) -> list[_Worker]:
        """Runs named 0, 1, 2 ... with pages on the same host."""
        await harness.open()
        workers = []
        for number, each in enumerate(options):
            frontier = await harness.open_run(str(number), each)
            await push(frontier, *range(pages))
            workers.append(_Worker(frontier))
        return workers

    # -- the longest delay

    async def test_runs_with_different_delays_take_turns_at_the_longest(self, harness: Harness) -> None:
        fast, slow = workers = await self._open(harness, FrontierOptions(delay=1), FrontierOptions(delay=6))
        await _crawl(harness, workers, range(60))
        assert abs(len(fast.turns) - len(slow.turns)) <= 1
        assert len(slow.turns) >= 3
        assert _shortest_gap(workers) >= 6

    async def test_a_run_without_a_delay_keeps_that_of_another_run(self, harness: Harness) -> None:
        fast, slow = workers = await self._open(harness, FrontierOptions(delay=0), FrontierOptions(delay=6))
        await slow.poll(0)
        await harness.advance(1)
        await _crawl(harness, workers, range(1, 60))
        assert abs(len(fast.turns) - len(slow.turns)) <= 1
        assert _shortest_gap(workers) >= 6

    async def test_the_longest_delay_holds_when_another_run_comes(self, harness: Harness) -> None:
        fast, slow = await self._open(harness, FrontierOptions(delay=0), FrontierOptions(delay=20))
        await complete(slow.frontier, await lease_one(slow.frontier))
        await harness.advance(5)
        assert await lease_names(fast.frontier) == []
        await harness.advance(14)
        assert await lease_names(fast.frontier) == []
        await harness.advance(1)
        assert len(await lease_names(fast.frontier)) == 1

    async def test_a_run_in_flight_keeps_its_delay(self, harness: Harness) -> None:
        fast, slow = await self._open(harness, FrontierOptions(delay=0), FrontierOptions(delay=20))
        lease = await lease_one(slow.frontier)
        assert await lease_names(fast.frontier) == []
        await harness.advance(3)
        assert await lease_names(fast.frontier) == []
        await complete(slow.frontier, lease)
        assert await lease_names(fast.frontier) == []
        await harness.advance(19)
        assert await lease_names(fast.frontier) == []
        await harness.advance(1)
        assert len(await lease_names(fast.frontier)) == 1

    async def test_the_state_of_a_host_names_the_run_with_the_longest_delay(self, harness: Harness) -> None:
        fast, slow = workers = await self._open(harness, FrontierOptions(delay=1), FrontierOptions(delay=6))
        await _crawl(harness, workers, range(3))
        for state in (await fast.frontier.host_state(HOST), (await fast.frontier.host_states())[0]):
            assert (state.delay, state.why, state.concurrency) == (6, "download_delay of run 1", 1)
        state = await slow.frontier.host_state(HOST)
        assert (state.delay, state.why) == (6, "download_delay")
        await fast.frontier.update_host(HOST, HostUpdate(crawl_delay=9))
        assert (await fast.frontier.host_state(HOST)).why == "robots.txt Crawl-delay"

    @pytest.mark.parametrize("host", [HOST, "*"])
    async def test_the_delay_of_an_operator_replaces_those_of_runs(self, harness: Harness, host: str) -> None:
        fast, slow = workers = await self._open(harness, FrontierOptions(delay=1), FrontierOptions(delay=9))
        await _crawl(harness, workers, range(3))
        await fast.frontier.update_host(host, HostUpdate(delay=3))
        state = await fast.frontier.host_state(HOST)
        assert (state.delay, state.why[:3]) == (3, "set")
        await _crawl(harness, workers, range(3, 43))
        assert abs(len(fast.turns) - len(slow.turns)) <= 1
        assert len(fast.turns) + len(slow.turns) >= 9
        assert _shortest_gap(workers) >= 3

    # -- turns

    async def test_runs_with_equal_delays_alternate(self, harness: Harness) -> None:
        workers = await self._open(harness, FrontierOptions(delay=2), FrontierOptions(delay=2))
        await _crawl(harness, workers, range(40))
        first, second = (worker.turns for worker in workers)
        assert abs(len(first) - len(second)) <= 1
        assert len(first) + len(second) >= 12
        both = sorted([(turn, 0) for turn in first] + [(turn, 1) for turn in second])
        assert all(one[1] != other[1] for one, other in zip(both, both[1:], strict=False))

    async def test_turns_are_shared_by_weight(self, harness: Harness) -> None:
        weights = (1.0, 1.0, 2.0)
        workers = await self._open(harness, *(FrontierOptions(delay=1, weight=weight) for weight in weights))
        await _crawl(harness, workers, range(66))
        counts = [len(worker.turns) for worker in workers]
        assert sum(counts) >= 30
        shares = [count / sum(counts) for count in counts]
        assert shares == pytest.approx([0.25, 0.25, 0.5], abs=0.04)

    async def test_runs_without_a_delay_share_the_concurrency(self, harness: Harness) -> None:
        """The first run polls three times as often, and would take every place."""
        one, two = await self._open(harness, *[FrontierOptions(concurrency_per_host=8)] * 2, pages=400)
        for tick in range(30):
            await one.poll(tick)
            await one.poll(tick)
            await one.poll(tick)
            await two.poll(tick)
        assert abs(len(one.turns) - len(two.turns)) <= 16
        assert len(one.turns) + len(two.turns) >= 200

    async def test_a_run_with_urgent_requests_gets_no_more_turns(self, harness: Harness) -> None:
        await harness.open()
        calm, urgent = [await harness.open_run(name, FrontierOptions(delay=1)) for name in ("calm", "urgent")]
        await push(calm, *range(30))
        await push(urgent, *range(30), priority=9)
        await push(urgent, "first", priority=10)
        workers = [_Worker(urgent), _Worker(calm)]
        await _crawl(harness, workers, range(24))
        assert abs(len(workers[0].turns) - len(workers[1].turns)) <= 1
        request = await urgent.find(page("first"))
        assert request is not None
        assert request.state == "done"

    async def test_a_run_that_was_away_has_no_credit(self, harness: Harness) -> None:
        one, two = workers = await self._open(harness, FrontierOptions(delay=1), FrontierOptions(delay=1))
        await _crawl(harness, workers, range(6))
        await _crawl(harness, [one], range(6, 36))
        await _crawl(harness, workers, range(36, 60))
        since = [[turn for turn in worker.turns if turn >= 36] for worker in workers]
        assert abs(len(since[0]) - len(since[1])) <= 1
        assert len(two.turns) < len(one.turns)

    # -- a run that does not ask

    async def test_a_run_that_stops_asking_does_not_block_others(self, harness: Harness) -> None:
        """It counts for ten seconds with its delay, and for one second with its turn."""
        one, two = workers = await self._open(harness, FrontierOptions(delay=2), FrontierOptions(delay=2))
        await _crawl(harness, workers, range(9))
        await complete(one.frontier, *one._held)
        await complete(two.frontier, *two._held)
        one._held, two._held = [], []
        before = len(two.turns)
        await _crawl(harness, [two], range(9, 39))
        assert len(two.turns) - before >= 9

    async def test_a_run_that_is_busy_elsewhere_does_not_block_others(self, harness: Harness) -> None:
        await harness.open()
        busy, other = [await harness.open_run(name, FrontierOptions(delay=2)) for name in ("busy", "other")]
        await push(busy, *(page(number, host=f"{number}.example", priority=1) for number in range(40)), *range(40))
        await push(other, *range(40))
        workers = [_Worker(busy, 1), _Worker(other)]
        await _crawl(harness, workers, range(30))
        assert len(workers[1].turns) >= 9

    async def test_a_run_that_is_busy_elsewhere_keeps_its_delay(self, harness: Harness) -> None:
        """Even if it leases rarely, and gets all that it wants from other hosts."""
        slow, fast = await self._open(harness, FrontierOptions(delay=6), FrontierOptions(delay=0))
        await _crawl(harness, [slow, fast], range(2))
        await push(slow.frontier, *(page(number, host=f"{number}.example", priority=1) for number in range(40)))
        slow._limit = 1
        for tick in range(2, 100):
            if tick % 4 == 0:
                await slow.poll(tick)
            await fast.poll(tick)
            await harness.advance(1)
        assert len(fast.turns) >= 10
        assert _shortest_gap([fast]) >= 6

    @pytest.mark.parametrize("every", [25, 50])
    async def test_a_run_that_leases_rarely_keeps_its_delay(self, harness: Harness, every: int) -> None:
        slow, fast = workers = await self._open(harness, FrontierOptions(delay=60), FrontierOptions(delay=0))
        for tick in range(200):
            await _crawl(harness, [slow, fast] if tick % every == 0 else [fast], range(tick, tick + 1))
        assert _shortest_gap(workers) >= 60

    @pytest.mark.parametrize("ending", ["paused", "finished", "cancelled", "deleted"])
    async def test_a_run_that_ends_takes_its_delay_with_it(self, harness: Harness, ending: str) -> None:
        fast, slow = workers = await self._open(harness, FrontierOptions(delay=1), FrontierOptions(delay=50))
        await _crawl(harness, workers, range(3))
        assert (await fast.frontier.host_state(HOST)).delay == 50
        if ending == "deleted":
            await self._drop(harness, slow)
        else:
            await harness.store.transition("1", ending)  # type: ignore[arg-type]
        await harness.advance(3)
        await fast.poll(6)
        await harness.advance(3)
        await fast.poll(9)
        assert len(fast.turns) >= 2
        assert (await fast.frontier.host_state(HOST)).delay == 1

    async def _drop(self, harness: Harness, worker: _Worker) -> None:
        await harness.store.delete_run("1")
        del harness.frontiers["1"]

    async def test_a_waiting_run_is_told_when_to_ask_again(self, harness: Harness) -> None:
        one, two = await self._open(harness, FrontierOptions(delay=20), FrontierOptions(delay=20))
        lease = await lease_one(one.frontier)
        leased = await two.frontier.lease(5, TTL)
        assert leased.leases == []
        assert leased.wait is not None
        assert 0 < leased.wait <= 0.25
        await complete(one.frontier, lease)
        leased = await two.frontier.lease(5, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 20)
        await harness.advance(20)
        leased = await one.frontier.lease(5, TTL)
        assert leased.leases == []  # it is the turn of the other
        assert leased.wait is not None
        assert 0 < leased.wait <= 0.25
        assert len(await lease_names(two.frontier)) == 1

    async def test_runs_on_different_hosts_do_not_wait_for_each_other(self, harness: Harness) -> None:
        await harness.open()
        one, two = [await harness.open_run(name, FrontierOptions(delay=2)) for name in ("one", "two")]
        await push(one, *range(9))
        await push(two, *(page(number, host="b.example") for number in range(9)))
        workers = [_Worker(one), _Worker(two)]
        await _crawl(harness, workers, range(13))
        assert [worker.turns for worker in workers] == [[0, 3, 6, 9, 12]] * 2


POLITE = FrontierOptions(delay=10, max_attempts=2)


class OptionsContract(ContractTests):
    """A call to `Store.frontier` with options sets those of the run. A call without looks at the run."""

    async def test_who_looks_first_changes_no_option(self, harness: Harness, frontier: Frontier) -> None:
        """Monitoring may open a run before its crawl begins."""
        await harness.store.create_run(Run(run_id="new", spider="spider", state="queued", created_at=1))
        looking = await harness.store.frontier("new")
        assert (await looking.host_state(HOST)).delay == 0
        await looking.update_host(HOST, HostUpdate(learned_delay=1))
        crawl = await harness.store.frontier("new", POLITE)
        await self.check_polite(harness, crawl, looking)

    async def test_who_looks_later_changes_no_option(self, harness: Harness) -> None:
        crawl = await harness.open(POLITE)
        looking = await harness.store.frontier("run")
        await looking.update_host(HOST, HostUpdate(learned_delay=1))
        await self.check_polite(harness, crawl, looking)

    @staticmethod
    async def check_polite(harness: Harness, crawl: Frontier, looking: Frontier) -> None:
        """Check that the run has the options `POLITE`, and that both see them."""
        await push(crawl, 1, 2)
        assert [state.delay for state in await looking.host_states()] == [10]
        await fail(crawl, await lease_one(crawl), retry_in=1)
        assert (await looking.host_state(HOST)).delay == 10
        assert await lease_names(looking) == await lease_names(crawl) == []
        await harness.advance(9)
        assert await lease_names(crawl) == []
        await harness.advance(1)
        assert await fail(crawl, await lease_one(crawl), retry_in=1) == "dead"  # after two attempts

    async def test_new_options_hold_at_once_for_everybody(self, harness: Harness) -> None:
        slow = await harness.open(FrontierOptions(delay=100))
        await push(slow, 1, 2, 3, 4)
        await complete(slow, await lease_one(slow))
        assert await lease_names(slow) == []
        quick = await harness.store.frontier("run", FrontierOptions(concurrency_per_host=2))
        assert [(state.delay, state.concurrency) for state in await slow.host_states()] == [(0, 2)]
        assert len(await lease_names(slow, 1)) == 1
        assert len(await lease_names(quick)) == 1
        polite = await harness.store.frontier("run", POLITE)
        assert await lease_names(quick) == await lease_names(polite) == []
        assert (await quick.host_state(HOST)).delay == 10

    async def test_the_store_keeps_the_options(self, harness: Harness) -> None:
        if not harness.durable:
            return
        await push(await harness.open(POLITE), 1, 2)
        harness.frontiers.clear()
        harness.store = await harness.revive_store()
        looking = await harness.store.frontier("run")
        assert (await looking.host_state(HOST)).delay == 10
        await complete(looking, await lease_one(looking))
        assert await lease_names(looking) == []
