"""The options of a run: those of the processes that take part in it, whoever opens its frontier first."""

from __future__ import annotations

from shoal.ports import Frontier, FrontierOptions, HostUpdate, Run
from shoal.testing.harness import Harness
from shoal.testing.steps import HOST, ContractTests, complete, fail, lease_names, lease_one, push

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
