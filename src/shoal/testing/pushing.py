"""Requests enter a frontier once, unchanged, or not at all (laws 2 and 11)."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import QueueFullError, ShoalError
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, HostUpdate, Pushed, Stats
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    all_items,
    complete,
    fail,
    history,
    lease_names,
    lease_one,
    names,
    page,
    push,
    reissue,
)

FULL_REQUEST = Request(
    "http://a.example/whole?b=2&a=1",
    method="PUT",
    headers={"X-Token": "t", "Accept-Language": "de, en;q=0.5"},
    body=b"\x00\xff\r\n body",
    cookies={"session": "über=1 x", "empty": ""},
    meta={
        "list": [1, -2.5, None, True, "ß\x00\U0001f41f"],
        "map": {"deep": {"bytes": b"\x00\xff", "big": 2**63}},
        "": [],
    },
    cb_kwargs={"place": 3, "path": ["a", None], "note": "ß"},
    priority=-2.5,
    depth=7,
    callback="parse_item",
    errback="went_wrong",
    timeout=12.5,
    proxy="socks5://127.0.0.1:9050",
    redirects=["http://a.example/", "https://a.example/moved"],
)
"""A request with a value in every field."""


class PushingContract(ContractTests):
    """A request that is new is recorded and queued in one step. A push that is refused leaves no trace, so it can be
    repeated. No field of a request is lost on the way."""

    # -- once

    async def test_a_push_counts_new_and_known_requests(self, frontier: Frontier) -> None:
        assert await frontier.push([page(1), page(2), page(1)]) == Pushed(2, 1)
        assert await frontier.push([page(2), page(3)]) == Pushed(1, 1)
        assert await frontier.stats() == Stats(pushed=3, ready=3, duplicates=2, seeding=True)

    async def test_a_url_is_known_in_every_state(self, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        done, dead, waiting, leased = (await frontier.lease(4, TTL)).leases
        await complete(frontier, done)
        await fail(frontier, dead)
        await fail(frontier, waiting, retry_in=5)
        await push(frontier, "ready")
        known = [done.request, dead.request, waiting.request, leased.request, page("ready")]
        assert await frontier.push(known) == Pushed(0, 5)

    async def test_requests_are_equal_by_normalized_url_method_and_body(self, frontier: Frontier) -> None:
        await frontier.push([page("search?a=1&b=2")])
        assert await frontier.push([page("search?b=2&a=1"), page("search?a=1&b=2#part")]) == Pushed(0, 2)
        others = [
            page("search?a=1&b=3"),
            page("search?a=1&b=2", method="HEAD"),
            page("search?a=1&b=2", method="POST", body=b"x"),
            page("search?a=1&b=2", method="POST", body=b"y"),
            page("search?a=1&b=2", host="b.example"),
        ]
        assert await frontier.push(others) == Pushed(5, 0)

    async def test_unfiltered_requests_are_added_every_time(self, frontier: Frontier) -> None:
        again = page(1, dont_filter=True)
        assert await frontier.push([page(1), again, again]) == Pushed(3, 0)
        assert await frontier.push([again]) == Pushed(1, 0)
        assert await frontier.push([page(1)]) == Pushed(0, 1)
        leases = (await frontier.lease(9, TTL)).leases
        assert names(leases) == ["1"] * 4
        assert len({lease.fingerprint for lease in leases}) == 4
        await complete(frontier, *leases)

    async def test_requests_that_two_workers_push_are_added_once(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("run")
        batches = [[page(number) for number in range(start, start + 40)] for start in range(0, 40, 10)]
        pushes = [worker.push(batch) for worker in (frontier, other) for batch in batches]
        added = sum(pushed.added for pushed in await asyncio.gather(*pushes))
        assert added == (await frontier.stats()).pushed == 70

    # -- not at all

    async def test_a_full_queue_refuses_the_whole_batch_and_leaves_no_trace(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=3))
        await push(frontier, 1, 2)
        before = await frontier.stats()
        with pytest.raises(QueueFullError):
            await frontier.push([page(1), page(3), page(4)])
        assert await frontier.stats() == before
        assert await frontier.find(page(3)) is None
        assert await frontier.push([page(3), page(1)]) == Pushed(1, 1)
        assert await lease_names(frontier) == ["1", "2", "3"]

    async def test_a_request_that_was_refused_can_be_pushed_later(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=1))
        await push(frontier, 1)
        with pytest.raises(QueueFullError):
            await frontier.push([page(2)])
        await complete(frontier, await lease_one(frontier))
        assert await frontier.push([page(2)]) == Pushed(1, 0)
        assert await lease_names(frontier) == ["2"]

    async def test_children_are_added_to_a_full_queue(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=1))
        await push(frontier, "parent")
        children = [page(number) for number in range(5)]
        await complete(frontier, await lease_one(frontier), children=children)
        assert (await frontier.stats()).ready == 5
        with pytest.raises(QueueFullError):
            await frontier.push([page("more")])

    async def test_a_push_without_new_requests_fits_a_full_queue(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=1))
        await push(frontier, "parent")
        await complete(frontier, await lease_one(frontier), children=[page(1), page(2)])
        assert await frontier.push([]) == Pushed(0, 0)
        assert await frontier.push([page(1), page(2)]) == Pushed(0, 2)

    async def test_waiting_requests_count_towards_the_queue_size(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_queue_size=1))
        await push(frontier, 1)
        await fail(frontier, await lease_one(frontier), retry_in=5)
        with pytest.raises(QueueFullError):
            await frontier.push([page(2)])

    async def test_a_request_that_cannot_be_stored_leaves_no_trace(self, frontier: Frontier) -> None:
        await push(frontier, "parent", "other")
        lease, other = (await frontier.lease(2, TTL)).leases
        bad = [page("good"), page("bad")]
        bad[1].meta["lock"] = object()
        before = await frontier.stats()
        with pytest.raises((ShoalError, TypeError)):
            await frontier.push(bad)
        completions = [Completion(lease=other, items=[b"x"]), Completion(lease=lease, items=[b"y"], children=bad)]
        with pytest.raises((ShoalError, TypeError)):
            await frontier.complete(completions)
        with pytest.raises((ShoalError, TypeError)):
            await frontier.fail([Failure(lease=lease, kind="k", reason="r", items=[b"y"], children=bad)])
        assert await frontier.stats() == before
        assert await all_items(frontier) == []
        assert await frontier.find(page("good")) is None
        await complete(frontier, lease, other, children=[page("good")])

    async def test_empty_batches_change_nothing(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        before = await frontier.stats()
        assert await frontier.push([]) == Pushed(0, 0)
        assert await frontier.complete([]) == []
        assert await frontier.fail([]) == []
        assert await frontier.renew([], TTL) == []
        assert await reissue(frontier, []) == []
        assert await frontier.release([]) == []
        assert (await frontier.lease(0, TTL)).leases == []
        assert await frontier.stats() == before

    # -- children

    async def test_children_are_filtered_against_all_requests_of_the_run(self, frontier: Frontier) -> None:
        await push(frontier, "parent", "sister")
        parent, sister = (await frontier.lease(2, TTL)).leases
        first = Completion(lease=parent, children=[page("parent"), page(1), page(1), page("sister")], duplicates=10)
        second = Completion(lease=sister, children=[page(1), page(2)])
        assert await frontier.complete([first, second]) == [Pushed(1, 13), Pushed(1, 1)]
        stats = await frontier.stats()
        assert (stats.pushed, stats.ready, stats.done, stats.duplicates) == (4, 2, 2, 14)
        assert await lease_names(frontier) == ["1", "2"]

    async def test_unfiltered_children_are_added_even_if_their_url_is_known(self, frontier: Frontier) -> None:
        await push(frontier, "parent")
        again = page("parent", dont_filter=True)
        completion = Completion(lease=await lease_one(frontier), children=[again, again])
        assert await frontier.complete([completion]) == [Pushed(2, 0)]
        assert await lease_names(frontier) == ["parent", "parent"]

    # -- unchanged

    async def test_a_pushed_request_is_leased_unchanged(self, frontier: Frontier) -> None:
        await frontier.push([FULL_REQUEST])
        assert (await lease_one(frontier)).request == FULL_REQUEST

    async def test_a_child_is_leased_unchanged(self, frontier: Frontier) -> None:
        await push(frontier, "parent")
        child = FULL_REQUEST.replace(dont_filter=True)
        await complete(frontier, await lease_one(frontier), children=[child])
        assert (await lease_one(frontier)).request == child

    async def test_a_request_is_unchanged_at_every_attempt(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=4))
        await frontier.push([FULL_REQUEST])
        await fail(frontier, await lease_one(frontier), retry_in=1)
        await harness.advance(1)
        await frontier.release([await lease_one(frontier)])
        await lease_one(frontier, ttl=2)
        await harness.advance(2)
        await fail(frontier, await lease_one(frontier))
        await frontier.retry_dead()
        assert (await lease_one(frontier)).request == FULL_REQUEST

    async def test_changing_a_request_after_its_push_has_no_effect(self, frontier: Frontier) -> None:
        request = page(1, meta={"list": [1]})
        await frontier.push([request])
        request.meta["list"].append(2)
        assert (await lease_one(frontier)).request.meta == {"list": [1]}

    async def test_urls_in_all_scripts_are_kept(self, frontier: Frontier) -> None:
        urls = [
            "http://пример.example/путь/страница?ключ=значение",
            "http://例え.example:8080/パス/🐟?q=100%25%20%26",
            "http://a.example/%FF%FE/it's;a=b/(c)?x=[1]&&=",
            "http://[::1]:8080/v6",
            "http://a.example/" + "long/" * 1000,
        ]
        requests = [Request(url) for url in urls]
        assert await frontier.push(requests) == Pushed(len(urls), 0)
        leases = (await frontier.lease(9, TTL)).leases
        assert [lease.request for lease in leases] == requests
        assert [lease.host for lease in leases][3:] == ["[::1]:8080", "a.example"]
        assert (await history(frontier, requests[1])).url == requests[1].url

    async def test_two_spellings_of_a_url_are_one_request_as_it_was_first_written(self, frontier: Frontier) -> None:
        first, second = Request("http://a.example/%7eann?u=http%3a%2F%2Fx"), Request("http://a.example/~ann?u=http://x")
        assert await frontier.push([first, second]) == Pushed(1, 1)
        assert await frontier.push([second]) == Pushed(0, 1)
        assert (await history(frontier, second)).url == first.url
        assert (await lease_one(frontier)).request == first

    async def test_a_request_that_is_not_filtered_is_found_as_it_was_written_and_in_normal_form(
        self, frontier: Frontier
    ) -> None:
        written = Request("http://a.example/%7eann?u=http%3a%2F%2Fx", dont_filter=True)
        normal = Request("http://b.example/~ann?u=http://x", dont_filter=True)  # an older version stored that
        await frontier.push([written, normal])
        assert (await history(frontier, written)).url == written.url
        assert (await history(frontier, Request("http://b.example/%7eann?u=http%3a%2F%2Fx"))).url == normal.url

    async def test_a_request_can_have_a_megabyte_of_meta(self, frontier: Frontier) -> None:
        meta = {"text": "ä" * 500_000, "bytes": bytes(range(256)) * 2000}
        await frontier.push([page(1, meta=meta, body=b"x" * 1_000_000, method="POST")])
        lease = await lease_one(frontier)
        assert lease.request.meta == meta
        await complete(frontier, lease, items=[b"y" * 1_000_000])
        assert (await all_items(frontier))[0].payload == b"y" * 1_000_000

    async def test_a_page_can_have_ten_thousand_children(self, frontier: Frontier) -> None:
        await push(frontier, "parent")
        children = [page(number) for number in range(10_000)]
        completion = Completion(lease=await lease_one(frontier), children=children)
        assert await frontier.complete([completion]) == [Pushed(10_000, 0)]
        await frontier.update_host(HOST, HostUpdate(concurrency=20_000))
        assert await lease_names(frontier, limit=10_001) == [str(number) for number in range(10_000)]
