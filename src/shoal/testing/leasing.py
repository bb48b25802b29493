"""Leases: their order, tokens, attempts and waiting (laws 3, 5, 6 and 12)."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from shoal.frontier.rules import LOST_KIND
from shoal.ports import Completion, CookieWrite, Failure, Frontier, FrontierOptions, Pushed
from shoal.testing.steps import (
    TTL,
    ContractTests,
    Harness,
    all_items,
    check_balance,
    check_refused,
    check_wait,
    complete,
    fail,
    history,
    lease_names,
    lease_one,
    names,
    page,
    push,
)


class LeasingContract(ContractTests):
    """A request is leased by one worker at a time, best priority first. Only the current token can end the lease. Every
    attempt counts, even a crash. Retries wait in the frontier, and the wait hint says how long."""

    # -- order

    async def test_higher_priority_comes_first_and_equal_ones_are_first_in_first_out(self, frontier: Frontier) -> None:
        priorities = [0, 1, -1, 0.5, 10, 0, 1, -0.25, 1e9, -1e9]
        await frontier.push([page(number, priority=priority) for number, priority in enumerate(priorities)])
        order = sorted(range(len(priorities)), key=lambda number: -priorities[number])
        assert await lease_names(frontier, 4) == [str(number) for number in order[:4]]
        assert await lease_names(frontier, 4) == [str(number) for number in order[4:8]]

    async def test_the_order_holds_across_hosts(self, frontier: Frontier) -> None:
        requests = [page(number, host=f"{'abc'[number % 3]}.example", priority=number // 6) for number in range(12)]
        await frontier.push(requests)
        assert await lease_names(frontier) == ["6", "7", "8", "9", "10", "11", "0", "1", "2", "3", "4", "5"]

    async def test_children_come_after_queued_requests_of_their_priority(self, frontier: Frontier) -> None:
        await push(frontier, "parent", 1)
        await complete(frontier, await lease_one(frontier), children=[page(2), page("best", priority=1), page(3)])
        await push(frontier, 4)
        assert await lease_names(frontier) == ["best", "1", "2", "3", "4"]

    async def test_a_returned_request_keeps_its_old_place(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(concurrency_per_host=20))
        await push(frontier, *range(8))
        released, retried, _, buried = (await frontier.lease(4, ttl=5)).leases
        await push(frontier, "last", page("low", priority=-1))
        await frontier.release([released])
        await fail(frontier, retried, retry_in=5)
        await fail(frontier, buried)
        await harness.advance(5)  # the third lease expires
        assert await frontier.retry_dead() == 1
        assert await lease_names(frontier) == ["0", "1", "2", "3", "4", "5", "6", "7", "last", "low"]

    async def test_a_long_queue_keeps_its_order(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(in_memory=3, concurrency_per_host=1000))
        await push(frontier, *range(8))
        first = (await frontier.lease(2, TTL)).leases
        await push(frontier, *range(8, 12))
        await frontier.release(first)
        await push(frontier, *range(12, 16), page("best", priority=1), page("last", priority=-1))
        assert await frontier.find(page(15)) is not None
        order = ["best", *map(str, range(16)), "last"]
        assert await lease_names(frontier, 5) == order[:5]
        assert await lease_names(frontier) == order[5:]

    async def test_a_lease_takes_no_more_than_asked_for(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        assert (await frontier.lease(0, TTL)).leases == []
        assert await lease_names(frontier, 2) == ["1", "2"]
        assert await lease_names(frontier, 2) == ["3"]
        assert await lease_names(frontier, 2) == []

    async def test_many_workers_never_get_the_same_request(self, harness: Harness) -> None:
        options = FrontierOptions(concurrency_per_host=1000)
        frontier = await harness.open(options)
        workers = [frontier, await harness.open_run("run", options), await harness.open_run("run", options)]
        await frontier.push([page(number, host=f"{number % 7}.example") for number in range(200)])

        async def work(worker: Frontier) -> list[str]:
            done = []
            while leases := (await worker.lease(7, TTL)).leases:
                done += names(leases)
                await complete(worker, *leases)
            return done

        done = [name for some in await asyncio.gather(*map(work, workers * 2)) for name in some]
        assert sorted(done, key=int) == [str(number) for number in range(200)]

    async def test_a_lease_describes_its_request(self, frontier: Frontier) -> None:
        request = page("x", host="a.example:8080")
        await frontier.push([request])
        before = time.monotonic()
        lease = await lease_one(frontier, ttl=100)
        assert before + 100 <= lease.deadline <= time.monotonic() + 100
        assert (lease.request, lease.host, lease.attempt) == (request, "a.example:8080", 1)
        assert lease.fingerprint == request.fingerprint()

    # -- fencing

    async def test_a_lease_is_refused_after_completion(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        await complete(frontier, lease, items=[b"x"])
        await check_refused(frontier, lease)

    async def test_a_lease_is_refused_after_release(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        assert await frontier.release([lease]) == [True]
        await check_refused(frontier, lease)
        assert (await lease_one(frontier)).attempt == 1
        await check_refused(frontier, lease)

    async def test_a_lease_is_refused_after_failure(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        waiting, dead = (await frontier.lease(2, TTL)).leases
        await fail(frontier, waiting, retry_in=5)
        await fail(frontier, dead)
        await check_refused(frontier, waiting)
        await check_refused(frontier, dead)
        await frontier.retry_dead()
        await check_refused(frontier, dead)
        await harness.advance(5)
        assert await lease_names(frontier) == ["1", "2"]
        await check_refused(frontier, waiting)
        await check_refused(frontier, dead)

    async def test_a_worker_that_wakes_up_late_cannot_change_its_successors_work(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1)
        late = await lease_one(frontier, ttl=5)
        await harness.advance(5)
        successor = await lease_one(frontier)
        assert (successor.fingerprint, successor.attempt) == (late.fingerprint, 2)
        assert successor.token != late.token
        await check_refused(frontier, late)
        await complete(frontier, successor, items=[b"good"])
        await check_refused(frontier, late)
        assert [item.payload for item in await all_items(frontier)] == [b"good"]

    async def test_an_expired_lease_is_refused_once_its_request_is_ready_again(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1)
        late = await lease_one(frontier, ttl=5)
        await push(frontier, page("first", priority=1))
        await harness.advance(5)
        assert await lease_names(frontier, 1) == ["first"]
        assert (await frontier.stats()).ready == 1
        await check_refused(frontier, late)

    async def test_an_expired_lease_is_valid_until_the_next_lease_call(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1, 2, 3, 4)
        leases = (await frontier.lease(4, ttl=5)).leases
        await harness.advance(50)
        assert await frontier.complete([Completion(lease=leases[0])]) == [Pushed(0, 0)]
        assert await fail(frontier, leases[1], retry_in=5) == "waiting"
        assert await frontier.release([leases[2]]) == [True]
        (renewed,) = await frontier.renew([leases[3]], 20)
        assert renewed is not None
        assert await lease_names(frontier) == ["3"]
        await complete(frontier, renewed)

    async def test_an_unknown_token_is_refused(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        lease, other = (await frontier.lease(2, TTL)).leases
        await check_refused(frontier, replace(lease, token=lease.token + 1000))
        await check_refused(frontier, replace(lease, token=other.token))
        await check_refused(frontier, replace(lease, token=0))
        await check_refused(frontier, replace(lease, fingerprint=page("never pushed").fingerprint()))

    async def test_the_same_lease_twice_in_a_batch_counts_once(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        first, second, third = (await frontier.lease(3, TTL)).leases
        completion = Completion(lease=first, items=[b"x"], children=[page("child")])
        assert await frontier.complete([completion, completion]) == [Pushed(1, 0), None]
        failure = Failure(lease=second, kind="k", reason="r", retry_in=5)
        assert await frontier.fail([failure, failure]) == ["waiting", None]
        assert await frontier.release([third, third]) == [True, False]
        stats = await frontier.stats()
        assert (stats.ready, stats.waiting, stats.done, stats.items) == (2, 1, 1, 1)

    async def test_a_stale_lease_does_not_affect_the_rest_of_its_batch(self, frontier: Frontier) -> None:
        await push(frontier, *range(7))
        stale, *good = (await frontier.lease(7, TTL)).leases
        await frontier.release([stale])
        pushed = await frontier.complete(
            [Completion(lease=current, items=[b"i"]) for current in (good[0], stale, good[1])]
        )
        assert pushed == [Pushed(0, 0), None, Pushed(0, 0)]
        failures = [Failure(lease=current, kind="k", reason="r") for current in (good[2], stale, good[3])]
        assert await frontier.fail(failures) == ["dead", None, "dead"]
        assert await frontier.release([good[4], stale]) == [True, False]
        renewed = await frontier.renew([stale, good[5]], TTL)
        assert [lease and lease.token for lease in renewed] == [None, good[5].token]
        assert (await frontier.stats()).items == 2

    # -- renewing

    async def test_a_renewed_lease_stays_valid(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, ttl=5)
        for _ in range(4):
            await harness.advance(3)
            before = time.monotonic()
            (renewed,) = await frontier.renew([lease], 5)
            assert renewed is not None
            assert before + 5 <= renewed.deadline <= time.monotonic() + 5
            assert replace(renewed, deadline=lease.deadline) == lease
            assert await lease_names(frontier) == []
        await complete(frontier, lease)  # the old object is valid, too: only the token counts
        assert (await history(frontier, lease.request)).attempts == 1

    async def test_a_renewed_lease_expires_at_its_new_time(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier, ttl=50)
        await frontier.renew([lease], 5)
        await harness.advance(4)
        assert await lease_names(frontier) == []
        await harness.advance(1)
        assert await lease_names(frontier) == ["1"]
        assert await frontier.renew([lease], 5) == [None]

    # -- attempts

    async def test_every_attempt_counts_even_if_its_worker_was_lost(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=3))
        await push(frontier, 1)
        first = await lease_one(frontier, ttl=5)
        assert (await history(frontier, first.request)).attempts == 1
        await harness.advance(5)
        second = await lease_one(frontier)
        assert second.attempt == 2
        assert await fail(frontier, second, retry_in=1) == "waiting"
        await harness.advance(1)
        third = await lease_one(frontier, ttl=5)
        assert third.attempt == 3
        await harness.advance(5)
        assert await lease_names(frontier) == []
        request = await history(frontier, first.request)
        assert (request.state, request.attempts) == ("dead", 3)
        assert "worker" in request.reason
        assert await frontier.dead_kinds() == {LOST_KIND: 1}
        await check_refused(frontier, third)

    async def test_a_request_dies_when_its_attempts_are_used_up(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        assert await fail(frontier, await lease_one(frontier), retry_in=1, reason="first") == "waiting"
        await harness.advance(1)
        last = await lease_one(frontier)
        assert await fail(frontier, last, retry_in=1, kind="http 503", reason="second", status=503) == "dead"
        request = await history(frontier, last.request)
        assert (request.state, request.attempts, request.status, request.reason) == ("dead", 2, 503, "second")
        assert await frontier.dead_kinds() == {"http 503": 1}
        await harness.advance(100)
        assert await lease_names(frontier) == []

    async def test_a_failure_without_retry_is_final(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        assert await fail(frontier, lease, kind="http 404", reason="not there") == "dead"
        request = await history(frontier, lease.request)
        assert (request.state, request.attempts, request.reason) == ("dead", 1, "not there")

    async def test_a_release_uses_no_attempt(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        await push(frontier, 1)
        for _ in range(5):
            lease = await lease_one(frontier)
            assert lease.attempt == 1
            assert await frontier.release([lease]) == [True]
            assert (await history(frontier, lease.request)).attempts == 0
        assert (await frontier.stats()).ready == 1

    # -- waiting

    async def test_a_retry_waits_in_the_frontier(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        await fail(frontier, await lease_one(frontier), retry_in=30)
        stats = await frontier.stats()
        assert (stats.ready, stats.waiting, stats.leased) == (0, 1, 0)
        leased = await frontier.lease(1, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 30)
        await harness.advance(29)
        leased = await frontier.lease(1, TTL)
        assert leased.leases == []
        check_wait(harness, leased, 1)
        await harness.advance(1)
        assert (await lease_one(frontier)).attempt == 2

    async def test_a_waiting_request_does_not_block_others(self, frontier: Frontier) -> None:
        await push(frontier, page(1, priority=5), 2)
        await fail(frontier, await lease_one(frontier), retry_in=30)
        assert await lease_names(frontier) == ["2"]

    async def test_the_wait_hint_is_the_earliest_moment(self, harness: Harness, frontier: Frontier) -> None:
        assert (await frontier.lease(1, TTL)).wait is None
        await push(frontier, 1, 2, 3)
        first, second, _ = (await frontier.lease(3, ttl=50)).leases
        check_wait(harness, await frontier.lease(1, TTL), 50)  # a lease that expires
        await fail(frontier, first, retry_in=40)
        check_wait(harness, await frontier.lease(1, TTL), 40)
        await fail(frontier, second, retry_in=20)
        check_wait(harness, await frontier.lease(1, TTL), 20)
        await harness.advance(30)
        await complete(frontier, await lease_one(frontier))
        check_wait(harness, await frontier.lease(1, TTL), 10)

    async def test_there_is_no_wait_hint_when_nothing_waits_for_time(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1, 2)
        lease, other = (await frontier.lease(2, ttl=50)).leases
        await frontier.renew([lease], 70)
        await complete(frontier, other)
        check_wait(harness, await frontier.lease(1, TTL), 70)
        await complete(frontier, lease)
        assert (await frontier.lease(1, TTL)).wait is None
        await check_balance(frontier)

    async def test_a_lease_of_zero_requests_ends_expired_leases(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a", "b")
        await lease_one(frontier, ttl=5)
        assert (await frontier.lease(0, TTL)).leases == []
        assert (await frontier.stats()).leased == 1
        await harness.advance(5)
        assert (await frontier.lease(0, TTL)).leases == []
        stats = await frontier.stats()
        assert (stats.leased, stats.ready) == (0, 2)

    async def test_a_lost_worker_is_in_the_history(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        await lease_one(frontier, ttl=5)
        await harness.advance(5)
        await frontier.lease(0, TTL)
        history = await frontier.find(page("a"))
        assert history is not None
        assert [event.kind for event in history.events] == ["lost", "ready"]

    async def test_a_lease_has_the_version_of_the_cookies(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a", "b", "c")
        first = (await frontier.lease(1, TTL, nonce=b"12345678")).cookies
        key = "run/cookies/jar//a.example"
        version, _ = await frontier.store_cookies(CookieWrite(key, b"1", b"", b"version1"))
        assert version > first
        assert (await frontier.lease(1, TTL, nonce=b"12345678")).cookies == version  # a repeat
        assert (await frontier.lease(1, TTL)).cookies == version
        assert await frontier.store_cookies(CookieWrite(key, b"2", b"another0", b"version2")) == (0, [])
        document = await harness.store.get_document(key)
        assert document is not None
        assert (document.value, document.version) == (b"1", b"version1")
        assert (await frontier.store_cookies(CookieWrite(key, None, b"version1", b"version3")))[0] > version
        assert await harness.store.get_document(key) is None
        assert (await frontier.lease(1, TTL)).cookies > version

    async def test_the_version_of_the_cookies_survives_the_store(self, harness: Harness, frontier: Frontier) -> None:
        """A worker that knows a version learns of each change, also after a crash of the store."""
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        key, before, known = "run/cookies/jar//a.example", b"", 0
        for change in (b"version1", b"version2"):
            version, _ = await frontier.store_cookies(CookieWrite(key, change, before, change))
            assert version > known
            frontier = await harness.reopen()
            assert (await frontier.lease(1, TTL)).cookies == version
            before, known = change, version

    async def test_pages_are_completed_with_their_cookies(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a", "b")
        pages = [
            Completion(lease=lease, status=200, items=[b"item"], children=[page("child")])
            for lease in (await frontier.lease(2, TTL)).leases
        ]
        write = CookieWrite("run/cookies/jar//a.example", b"1", b"", b"version1")
        version, pushed = await frontier.store_cookies(write, pages)
        assert version > 0
        assert sorted(result.added for result in pushed if result) == [0, 1]
        document = await harness.store.get_document(write.key)
        assert document is not None
        assert document.value == b"1"
        stats = await frontier.stats()
        assert (stats.done, stats.ready, stats.items) == (2, 1, 2)
        # The answer was lost, and another process has changed the cookies since.
        again = CookieWrite(write.key, b"2", b"", b"version2")
        assert await frontier.store_cookies(again, pages) == (0, [])
        repeated = CookieWrite(write.key, b"1", b"", b"version1")
        version, pushed = await frontier.store_cookies(repeated, pages)
        assert version > 0
        assert [result is not None and result.added for result in pushed] == [0, 0]
        assert (await frontier.stats()).items == 2

    async def test_no_page_is_completed_without_its_cookies(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        (lease,) = (await frontier.lease(1, TTL)).leases
        completion = Completion(lease=lease, status=200, items=[b"item"], children=[page("child")])
        key = "run/cookies/jar//a.example"
        assert (await frontier.store_cookies(CookieWrite(key, b"1", b"", b"version1")))[0]
        assert await frontier.store_cookies(CookieWrite(key, b"2", b"", b"version2"), [completion]) == (0, [])
        stats = await frontier.stats()
        assert (stats.leased, stats.done, stats.items) == (1, 0, 0)
        version, pushed = await frontier.store_cookies(CookieWrite(key, b"2", b"version1", b"version2"), [completion])
        assert version
        assert pushed == [Pushed(1, 0)]
