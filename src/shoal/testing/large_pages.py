"""Pages with thousands of links, which a store may stage, and links that find the queue full (laws 1, 2, 4 and 9)."""

from __future__ import annotations

import asyncio

from shoal.frontier.rules import ADMITTED_DETAIL, FULL_KIND
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, Pushed, Stats
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    all_items,
    check_balance,
    complete,
    fail,
    finish_seeding,
    history,
    lease_names,
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
        link = await history(frontier, page(4999, host="19.example"))
        assert (link.state, link.parent) == ("ready", large.lease.request.url)
        leases = await lease_rest(frontier)
        assert names(leases) == [str(number) for number in range(5000)]
        await complete(frontier, *leases)
        assert (await frontier.stats()).finished


def limited(size: int) -> FrontierOptions:
    """Options that refuse links beyond this size."""
    return FrontierOptions(max_queue_size=size, overflow="refuse", concurrency_per_host=100_000)


async def overflow(frontier: Frontier, children: int, refused: int) -> None:
    """Complete a page with these children, numbered from 0, of which the last ones are refused."""
    await push(frontier, "parent")
    page_done = Completion(lease=await lease_one(frontier), children=[page(number) for number in range(children)])
    assert await frontier.complete([page_done]) == [Pushed(children - refused, 0, refused)]


class OverflowContract(ContractTests):
    """With ``overflow="refuse"``, a new link that finds the queue full is dead at once. It belongs to the run, it is
    counted, and it can be retried. It is never lost, and never fetched without a retry."""

    # -- refusing

    async def test_links_beyond_the_maximum_are_dead(self, harness: Harness) -> None:
        frontier = await harness.open(limited(3))
        await overflow(frontier, 5, 2)
        assert await frontier.stats() == Stats(pushed=6, ready=3, done=1, dead=2, seeding=True)
        assert await frontier.dead_kinds() == {FULL_KIND: 2}
        assert sorted([dead.url async for dead in frontier.dead()]) == [page(3).url, page(4).url]
        found = await history(frontier, page(4))
        assert (found.state, found.attempts, found.status, found.parent) == ("dead", 0, 0, page("parent").url)
        assert found.reason == "refused: the queue had its maximum of 3 requests"
        assert await lease_names(frontier) == ["0", "1", "2"]

    async def test_links_enter_without_the_option(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=3))
        await overflow(frontier, 5, 0)
        assert (await frontier.stats()).ready == 5

    async def test_waiting_requests_count_and_leased_ones_do_not(self, harness: Harness) -> None:
        frontier = await harness.open(limited(3))
        await push(frontier, "one", "two", "three")
        one, two, _ = (await frontier.lease(3, TTL)).leases
        await fail(frontier, two, retry_in=5)
        done = Completion(lease=one, children=[page(number) for number in range(4)])
        assert await frontier.complete([done]) == [Pushed(2, 0, 2)]

    async def test_a_known_link_is_a_duplicate_even_if_the_queue_is_full(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await overflow(frontier, 2, 1)
        known = [page("parent"), page(0), page(1), page(1), page("new"), page("new")]
        assert await frontier.complete([Completion(lease=await lease_one(frontier), children=known)]) == [
            Pushed(1, 5, 0)
        ]
        assert await frontier.push([page(1)]) == Pushed(0, 1)
        assert (await history(frontier, page(1))).state == "dead"

    async def test_pages_of_one_call_share_the_room(self, harness: Harness) -> None:
        frontier = await harness.open(limited(4))
        await push(frontier, "a", "b", "c")
        one, two, three = (await frontier.lease(3, TTL)).leases
        first, second, third = ([page(f"{name}{number}") for number in range(3)] for name in "xyz")
        pages = [
            Completion(lease=one, children=first),
            Completion(lease=two, children=[*first, *second]),
            Completion(lease=three, children=[second[0], second[2], *third]),
        ]
        assert await frontier.complete(pages) == [Pushed(3, 0), Pushed(1, 3, 2), Pushed(0, 2, 3)]
        assert await lease_names(frontier) == ["x0", "x1", "x2", "y0"]

    async def test_links_of_a_failed_page_are_limited_too(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await push(frontier, "parent")
        assert await fail(frontier, await lease_one(frontier), children=[page(1), page(2)]) == "dead"
        assert await frontier.dead_kinds() == {"timeout": 1, FULL_KIND: 1}

    async def test_a_redirect_enters_a_full_queue(self, harness: Harness) -> None:
        frontier = await harness.open(limited(2))
        await push(frontier, "moved", "other")
        moved, other = (await frontier.lease(2, TTL)).leases
        await push(frontier, 1, 2)
        pages = [
            Completion(lease=moved, children=[page("target")], redirected=True),
            Completion(lease=other, children=[page("link")]),
        ]
        assert await frontier.complete(pages) == [Pushed(1, 0), Pushed(0, 0, 1)]
        assert await lease_names(frontier) == ["1", "2", "target"]

    async def test_requests_return_to_a_full_queue(self, harness: Harness) -> None:
        """Only links are refused, not requests that were in the queue before."""
        frontier = await harness.open(limited(1))
        await push(frontier, "one")
        one = await lease_one(frontier)
        await push(frontier, "two")
        assert await frontier.release([one]) == [True]
        assert (await frontier.stats()).ready == 2

    async def test_a_repeated_completion_refuses_and_adds_nothing(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await push(frontier, "parent")
        done = Completion(lease=await lease_one(frontier), children=[page(1), page(2)])
        assert await frontier.complete([done]) == [Pushed(1, 0, 1)]
        before = await frontier.stats()
        await complete(frontier, await lease_one(frontier))  # there is room now
        assert (await frontier.complete([done]))[0] in (None, Pushed(0, 0))
        assert (await frontier.stats()).dead == before.dead == 1
        assert (await frontier.stats()).ready == 0

    async def test_a_run_with_refused_links_is_finished(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await finish_seeding(frontier)
        await overflow(frontier, 3, 2)
        assert not (await frontier.stats()).finished
        await complete(frontier, await lease_one(frontier))
        assert (await frontier.stats()).finished

    async def test_completions_at_the_same_time_do_not_exceed_the_maximum(self, harness: Harness) -> None:
        frontier = await harness.open(limited(10))
        other = await harness.open_run("run")
        await push(frontier, *(f"parent{number}" for number in range(10)))
        leases = (await frontier.lease(10, TTL)).leases
        results = await asyncio.gather(
            *(
                (frontier, other)[place % 2].complete(
                    [Completion(lease=lease, children=[page(f"{place}-{number}") for number in range(5)])]
                )
                for place, lease in enumerate(leases)
            )
        )
        assert sum(pushed.added for (pushed,) in results if pushed) == 10
        assert sum(pushed.refused for (pushed,) in results if pushed) == 40
        stats = await frontier.stats()
        assert (stats.ready, stats.dead, stats.pushed) == (10, 40, 60)

    # -- retrying

    async def test_refused_links_are_retried_while_there_is_room(self, harness: Harness) -> None:
        frontier = await harness.open(limited(2))
        await overflow(frontier, 5, 3)
        assert await frontier.retry_dead() == 0
        await complete(frontier, await lease_one(frontier))
        assert await frontier.retry_dead() == 1
        assert await frontier.dead_kinds() == {FULL_KIND: 2}
        retried = await history(frontier, page(2))
        assert (retried.state, retried.reason, retried.attempts) == ("ready", "", 0)
        assert [(event.kind, event.detail) for event in retried.events][-2:] == [
            ("retried", ADMITTED_DETAIL),
            ("ready", ""),
        ]
        assert await lease_names(frontier) == ["1", "2"]
        assert await frontier.retry_dead([FULL_KIND]) == 2
        assert await frontier.dead_kinds() == {}
        assert await lease_names(frontier) == ["3", "4"]

    async def test_the_best_refused_links_return_first(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await push(frontier, "parent")
        children = [page("first"), page("low", priority=-1), page("late"), page("high", priority=5), page("last")]
        await complete(frontier, await lease_one(frontier), children=children)
        order = []
        for _ in range(5):
            order += await lease_names(frontier)
            await frontier.retry_dead()
        assert order == ["first", "high", "late", "last", "low"]

    async def test_other_failures_are_retried_first_and_always(self, harness: Harness) -> None:
        frontier = await harness.open(limited(2))
        await push(frontier, "one", "two")
        one, two = (await frontier.lease(2, TTL)).leases
        await fail(frontier, one)
        await fail(frontier, two, kind="dns", children=[page(1), page(2), page(3)])
        assert await frontier.dead_kinds() == {"timeout": 1, "dns": 1, FULL_KIND: 1}
        assert await frontier.retry_dead(["timeout"]) == 1
        assert await frontier.retry_dead() == 1
        assert await frontier.dead_kinds() == {FULL_KIND: 1}
        assert await lease_names(frontier) == ["one", "two", "1", "2"]
        assert await frontier.retry_dead(["dns"]) == 0
        assert await frontier.retry_dead() == 1

    async def test_named_links_return_while_there_is_room(self, harness: Harness) -> None:
        """The best of them first, and after other failures that are named."""
        frontier = await harness.open(limited(3))
        await push(frontier, "one", "parent")
        one, parent = (await frontier.lease(2, TTL)).leases
        await fail(frontier, one)
        low, *refused = page("low", priority=-1), page("late"), page("high", priority=5), page("not named", priority=9)
        await complete(frontier, parent, children=[*map(page, range(3)), low, *refused])
        assert await frontier.dead_kinds() == {"timeout": 1, FULL_KIND: 4}
        await complete(frontier, *(await frontier.lease(3, TTL)).leases)
        fingerprints = [request.fingerprint() for request in (low, *refused[:2], page("one"))]
        assert await frontier.retry_dead(only=fingerprints) == 3
        assert await frontier.dead_kinds() == {FULL_KIND: 2}
        assert await lease_names(frontier) == ["high", "one", "late"]
        assert await frontier.retry_dead([FULL_KIND], only=fingerprints) == 1
        assert await frontier.retry_dead() == 1
        assert await lease_names(frontier) == ["not%20named", "low"]

    async def test_a_retried_link_can_fail_and_be_retried_again(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await overflow(frontier, 2, 1)
        await complete(frontier, await lease_one(frontier))
        assert await frontier.retry_dead() == 1
        lease = await lease_one(frontier)
        assert (lease.request, lease.attempt) == (page(1), 1)
        assert await fail(frontier, lease) == "dead"
        assert await frontier.dead_kinds() == {"timeout": 1}
        assert await frontier.retry_dead([FULL_KIND]) == 0
        assert await frontier.retry_dead(["timeout"]) == 1
        await complete(frontier, await lease_one(frontier))

    async def test_a_host_that_only_refused_links_have_can_be_retried(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1))
        await push(frontier, "parent")
        await complete(frontier, await lease_one(frontier), children=[page(1), page(2, host="new.example")])
        assert [state.host for state in await frontier.host_states() if state.ready] == [HOST]
        await complete(frontier, await lease_one(frontier))
        assert await frontier.retry_dead() == 1
        assert (await lease_one(frontier)).host == "new.example"

    # -- large pages

    async def test_a_large_page_fills_the_queue_and_no_more(self, harness: Harness) -> None:
        frontier = await harness.open(limited(1500))
        await push(frontier, "large", *links(10))
        large = await lease_one(frontier)
        children = [*links(2500), *links(100), page("again", dont_filter=True)]
        done = Completion(lease=large, items=[b"x"], children=children, duplicates=7)
        assert await frontier.complete([done]) == [Pushed(1490, 117, 1001)]
        stats = await frontier.stats()
        assert (stats.ready, stats.dead, stats.pushed, stats.incoming) == (1500, 1001, 2502, 0)
        assert await frontier.dead_kinds() == {FULL_KIND: 1001}
        await check_balance(frontier)
        leases = await lease_rest(frontier)
        assert names(leases) == [str(number) for number in range(1500)]
        await complete(frontier, *leases)
        assert await frontier.retry_dead() == 1001
        assert names(await lease_rest(frontier)) == [*map(str, range(1500, 2500)), "again"]

    async def test_links_that_others_move_are_limited_too(self, harness: Harness) -> None:
        """The caller that completed the page is gone: leases move its links."""
        frontier = await harness.open(limited(2100))
        await push(frontier, "large")
        large = Completion(lease=await lease_one(frontier), children=links(5000))
        ending = asyncio.create_task(frontier.complete([large]))
        while not (await frontier.stats()).done:
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        while (await frontier.stats()).incoming:
            await frontier.lease(0, TTL)
        stats = await frontier.stats()
        assert (stats.ready, stats.dead, stats.pushed) == (2100, 2900, 5001)
        assert await frontier.dead_kinds() == {FULL_KIND: 2900}

    # -- crashes

    async def test_refused_links_survive_a_crash(self, harness: Harness) -> None:
        frontier = await harness.open(limited(2))
        await overflow(frontier, 5, 3)
        if harness.durable:
            frontier = await harness.reopen()
        assert (await frontier.stats()).dead == 3
        assert (await history(frontier, page(4))).state == "dead"
        leases = (await frontier.lease(5, TTL)).leases
        assert names(leases) == ["0", "1"]
        assert await frontier.complete([Completion(lease=leases[0], children=[page(4), page(5)])]) == [Pushed(1, 1)]
        assert await frontier.retry_dead() == 1
        assert await lease_names(frontier) == ["2", "5"]
