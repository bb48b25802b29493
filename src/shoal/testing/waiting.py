"""What a run waits for, as a worker asks when it has nothing to do."""

from __future__ import annotations

from shoal.ports import Frontier, FrontierOptions, Holder, LeaseHolder, Waits
from shoal.testing.harness import Harness
from shoal.testing.steps import HOST, TTL, ContractTests, complete, fail, lease_names, lease_one, page, push
from shoal.testing.workers import heartbeat, stay_alive


class WaitingContract(ContractTests):
    """`Inspection.waits` says who uses hosts, of any run, and which request is tried again next."""

    async def test_nothing_to_wait_for(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        assert await frontier.waits([HOST, "unknown.example"]) == Waits(holders=[])
        assert await frontier.waits([]) == Waits(holders=[])

    async def test_the_next_retry(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        first, second = (await frontier.lease(2, TTL)).leases
        await fail(frontier, first, retry_in=30, kind="timeout", reason="no answer; none at all")
        await fail(frontier, second, retry_in=20, kind="status", reason="HTTP 503")
        await harness.advance(5)
        waits = await frontier.waits([HOST])
        assert (waits.holders, waits.retry_reason) == ([], "HTTP 503")
        assert waits.retry_in is not None
        assert 15 - harness.drift - 0.1 <= waits.retry_in <= 15
        await harness.advance(15)
        await complete(frontier, await lease_one(frontier))
        assert (await frontier.waits([])).retry_reason == "no answer; none at all"
        await harness.advance(10)
        assert len(await lease_names(frontier)) == 1
        assert (await frontier.waits([])).retry_in is None

    async def test_who_uses_a_host(self, harness: Harness, frontier: Frontier) -> None:
        wide = FrontierOptions(concurrency_per_host=10)
        await push(frontier, 1, 2, 3, page("elsewhere", host="b.example"))
        others = [await harness.open_run("other", wide, Holder(name, 1)) for name in ("a", "c")]
        await others[0].push([page(number) for number in range(3)])
        await others[0].beat(heartbeat("a"))
        await others[0].lease(2, 10 * TTL)
        await others[1].lease(1, 10 * TTL)
        mine = await harness.open_run("run", wide, Holder("b", 1))
        await mine.lease(9, 10 * TTL)
        assert await holders(frontier, HOST) == [("other", "a", 2, 0), ("other", "c", 1, 0), ("run", "b", 3, 0)]
        assert await holders(frontier, "b.example") == [("run", "b", 1, 0)]
        await stay_alive(harness, frontier, 12)
        first, *rest = sorted((await others[1].waits([HOST])).holders, key=lambda holder: holder.worker)
        assert 12 <= first.silent_for <= 12 + harness.drift + 0.1
        assert [holder.silent_for for holder in rest] == [0, 0]


async def holders(frontier: Frontier, host: str) -> list[tuple[str, str, int, float]]:
    found: list[LeaseHolder] = (await frontier.waits([host])).holders
    assert {holder.host for holder in found} == {host}
    return sorted((holder.run_id, holder.worker, holder.leases, holder.silent_for) for holder in found)
