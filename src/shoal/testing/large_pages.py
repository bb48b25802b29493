"""Pages with thousands of links (laws 1, 2, 4 and 9). A store may stage them: see ``Stats.incoming``."""

from __future__ import annotations

import asyncio

from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, Pushed
from shoal.testing.harness import Harness
from shoal.testing.steps import (
    TTL,
    ContractTests,
    all_items,
    check_balance,
    complete,
    fail,
    finish_seeding,
    history,
    lease_one,
    names,
    page,
    push,
)

WIDE = FrontierOptions(max_attempts=3, concurrency_per_host=100_000)


def links(count: int, hosts: int = 20, start: int = 0) -> list[Request]:
    """Requests for different pages of some hosts."""
    return [page(number, host=f"{number % hosts}.example") for number in range(start, start + count)]


async def lease_rest(frontier: Frontier) -> list[Lease]:
    """Lease all remaining requests, including links that are still incoming."""
    leases: list[Lease] = []
    while True:
        leases += (await frontier.lease(5000, TTL)).leases
        stats = await frontier.stats()
        assert stats.balanced  # another process may still move links, so the requests are counted at the end
        if not stats.ready and not stats.incoming:
            break
    await check_balance(frontier)
    return leases


class LargePagesContract(ContractTests):
    """A page may have more links than a store adds in one step. It is done in one step all the same: with its items,
    and with all its links, which belong to the run from then on. Each enters the queue once."""

    async def test_a_page_with_thousands_of_links_is_completed(self, harness: Harness) -> None:
        frontier = await harness.open(WIDE)
        await push(frontier, "large", *links(3))
        large = await lease_one(frontier)
        children = [*links(2500), page("best", priority=9), *links(100)]
        completion = Completion(lease=large, items=[b"x"], children=children, duplicates=7, note="many")
        assert await frontier.complete([completion]) == [Pushed(2498, 110)]
        stats = await frontier.stats()
        assert (stats.pushed, stats.done, stats.items, stats.duplicates, stats.incoming) == (2502, 1, 1, 110, 0)
        await check_balance(frontier)
        assert [item.payload for item in await all_items(frontier)] == [b"x"]
        assert (await history(frontier, page(2499, host="19.example"))).parent == large.request.url
        assert names(await lease_rest(frontier)) == ["best", *map(str, range(2500))]

    async def test_of_two_equal_links_the_first_counts(self, harness: Harness) -> None:
        frontier = await harness.open(WIDE)
        await push(frontier, "large")
        twice = [page("twice", priority=5), page("twice", priority=8)]
        unfiltered = [page("again", priority=7, dont_filter=True) for _ in range(2)]
        large = Completion(lease=await lease_one(frontier), children=[*twice, *unfiltered, *links(2500)])
        assert await frontier.complete([large]) == [Pushed(2503, 1)]
        leases = await lease_rest(frontier)
        assert [(lease.request.priority, *names([lease])) for lease in leases[:3]] == [
            (7, "again"),
            (7, "again"),
            (5, "twice"),
        ]

    async def test_several_large_pages_end_in_one_step(self, harness: Harness) -> None:
        frontier = await harness.open(WIDE)
        await push(frontier, *(f"large{number}" for number in range(4)))
        one, two, three, four = (await frontier.lease(4, TTL)).leases
        small = [page(f"small{number}") for number in range(1500)]
        pages = [
            Completion(lease=one, children=links(2500), duplicates=3),
            Completion(lease=two, children=small),
            Completion(lease=three, children=links(2600)),
        ]
        assert await frontier.complete(pages) == [Pushed(2500, 3), Pushed(1500, 0), Pushed(100, 2500)]
        children = [page(f"d{number}") for number in range(2100)]
        assert await fail(frontier, four, children=children, items=[b"from the errback"]) == "dead"
        stats = await frontier.stats()
        assert (stats.incoming, stats.pushed, stats.duplicates, stats.items) == (0, 4 + 4100 + 2100, 2503, 1)

    async def test_links_of_a_lease_that_was_lost_or_waits_are_dropped(self, harness: Harness) -> None:
        frontier = await harness.open(WIDE)
        await push(frontier, 1, 2)
        lost, waits = (await frontier.lease(2, TTL)).leases
        await frontier.release([lost])
        assert await frontier.complete([Completion(lease=lost, children=links(2500))]) == [None]
        again = Failure(lease=waits, kind="k", reason="r", retry_in=5, children=links(2500))
        assert await frontier.fail([again]) == ["waiting"]
        stats = await frontier.stats()
        assert (stats.pushed, stats.ready, stats.waiting, stats.incoming) == (2, 1, 1, 0)

    async def test_links_of_a_caller_that_was_cancelled_belong_to_the_run(self, harness: Harness) -> None:
        frontier = await harness.open(WIDE)
        await push(frontier, "large")
        await finish_seeding(frontier)
        large = Completion(lease=await lease_one(frontier), items=[b"x"], children=links(5000))
        ending = asyncio.create_task(frontier.complete([large]))
        while not (await frontier.stats()).done:
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        stats = await frontier.stats()
        assert (stats.items, stats.pushed + stats.incoming) == (1, 5001)
        assert not stats.finished
        found = await history(frontier, page(4999, host="19.example"))
        assert (found.state, found.parent) == ("ready", large.lease.request.url)
        leases = await lease_rest(frontier)
        assert names(leases) == [str(number) for number in range(5000)]
        await complete(frontier, *leases)
        assert (await frontier.stats()).finished
