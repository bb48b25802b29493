"""The counters of a run, its item log, its end, and the history of each URL (laws 1, 4 and 9)."""

from __future__ import annotations

import asyncio
import os

import pytest

from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, HostUpdate, Lease, Pushed, Run, Stats
from shoal.testing.pushing import FULL_REQUEST
from shoal.testing.steps import (
    TTL,
    ContractTests,
    Harness,
    all_items,
    check_balance,
    check_refused,
    complete,
    fail,
    finish_seeding,
    history,
    lease_names,
    lease_one,
    page,
    push,
)


async def audit_live_run(frontier: Frontier, pages: int, audits: int) -> None:
    """Audit a run again and again while workers change it in all ways. No audit may find a fault."""
    total = 0
    is_over = False

    def links(lease: Lease) -> list[Request]:
        nonlocal total
        count = min(3, pages - total)
        total += count
        return [
            page(f"{total}-{number}", host=f"{(total + number) % 7}.example", priority=total % 3 - 1)
            for number in range(count)
        ]

    async def work(number: int) -> None:
        while not is_over:
            leases = (await frontier.lease(4, TTL, counts_attempt=number > 0)).leases
            for nth, lease in enumerate(leases):
                if lease.token % 5 == 0 and lease.attempt == 1:
                    await frontier.release([lease])
                elif nth == 3 and lease.attempt < 3:
                    await frontier.fail([Failure(lease=lease, kind="timeout", reason="slow", retry_in=0.001)])
                else:
                    await frontier.complete([Completion(lease=lease, items=[b"1", b"2"], children=links(lease))])
            await asyncio.sleep(0)

    async def drain() -> None:
        read = 0
        while not is_over:
            read += len(await frontier.read_items(read, 20))
            await frontier.trim_items(read)
            await asyncio.sleep(0)

    async def audit() -> None:
        count = 0
        while count < audits or total < pages:
            counted = await frontier.audit()
            assert counted.balanced, counted
            count += 1
            await asyncio.sleep(0)

    await push(frontier, *range(10))
    workers = [asyncio.create_task(work_item) for work_item in (*map(work, range(4)), drain())]
    try:
        await audit()
    finally:
        is_over = True
        await asyncio.gather(*workers)
    await check_balance(frontier)


class LedgerContract(ContractTests):
    """No request is lost: the counters balance after every step. Items enter the log in the step that completes their
    page, once. A run is finished exactly when no request is open and seeding is complete."""

    # -- audits

    async def test_an_audit_of_a_live_run_finds_no_fault(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=3, concurrency_per_host=6))
        await audit_live_run(frontier, pages=600, audits=40)

    async def test_a_repair_of_a_sound_run_changes_nothing(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2, concurrency_per_host=2))
        await push(frontier, *range(30), *(page(number, host="b.example", priority=number) for number in range(3)))
        leases = (await frontier.lease(4, TTL)).leases
        await complete(frontier, leases[0], items=[b"1", b"2"], children=[page("child")])
        await fail(frontier, leases[1], retry_in=50)
        await fail(frontier, leases[2])
        before = await frontier.stats(), await all_items(frontier), await frontier.dead_kinds()
        await frontier.repair()
        assert (await frontier.stats(), await all_items(frontier), await frontier.dead_kinds()) == before
        await check_balance(frontier)
        assert await frontier.renew([leases[3]], TTL) != [None]

    async def test_what_was_deleted_on_purpose_is_no_fault(self, harness: Harness) -> None:
        frontier = await harness.open()
        store, version = harness.store, os.urandom(8)
        for key in ("run/other/1", "kept", "deleted"):
            assert await store.put_document(key, b"1", replaces=b"", version=version)
        await store.create_run(Run(run_id="other", spider="s", state="running", created_at=0.0))
        other = await store.frontier("other")
        for client in (frontier, other):
            assert await client.claim("output", 1.0) is not None
            await client.update_host("a.example", HostUpdate(delay=1.0))
            await client.update_host("*", HostUpdate(delay=1.0))
        await harness.advance(2.0)
        assert await frontier.forget("output")
        assert await store.put_document("deleted", None, replaces=version, version=os.urandom(8))
        await store.delete_run("other")
        await frontier.update_host("a.example", HostUpdate(delay=None))
        assert (await frontier.audit()).faults == ()
        assert await frontier.repair() == []

    # -- conservation

    async def test_the_counters_balance_after_every_step(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))

        async def counts() -> tuple[int, ...]:
            await check_balance(frontier)
            stats = await frontier.stats()
            return stats.pushed, stats.ready, stats.waiting, stats.leased, stats.done, stats.dead

        assert await counts() == (0, 0, 0, 0, 0, 0)
        await push(frontier, *range(6))
        assert await counts() == (6, 6, 0, 0, 0, 0)
        leases = (await frontier.lease(5, ttl=5)).leases
        assert await counts() == (6, 1, 0, 5, 0, 0)
        await complete(frontier, leases[0], children=[page("child")])
        assert await counts() == (7, 2, 0, 4, 1, 0)
        await fail(frontier, leases[1])
        assert await counts() == (7, 2, 0, 3, 1, 1)
        await fail(frontier, leases[2], retry_in=20)
        assert await counts() == (7, 2, 1, 2, 1, 1)
        await frontier.release([leases[3]])
        assert await counts() == (7, 3, 1, 1, 1, 1)
        await harness.advance(5)
        await frontier.lease(0, TTL)
        leases = (await frontier.lease(10, TTL)).leases
        assert await counts() == (7, 0, 1, 4, 1, 1)
        await frontier.retry_dead()
        assert await counts() == (7, 1, 1, 4, 1, 0)
        await complete(frontier, *leases)
        await harness.advance(20)
        await complete(frontier, *(await frontier.lease(10, TTL)).leases)
        assert await counts() == (7, 0, 0, 0, 7, 0)

    # -- items

    async def test_items_are_logged_with_the_page_that_made_them(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        first, second, third = (await frontier.lease(3, TTL)).leases
        await frontier.complete([Completion(lease=second, items=[b"a", b""]), Completion(lease=first, items=[b"\x00"])])
        await complete(frontier, third)
        log = await all_items(frontier)
        assert [(item.fingerprint, item.index, item.payload) for item in log] == [
            (second.fingerprint, 0, b"a"),
            (second.fingerprint, 1, b""),
            (first.fingerprint, 0, b"\x00"),
        ]
        assert [item.key for item in log[:2]] == [f"{second.fingerprint.hex()}-0", f"{second.fingerprint.hex()}-1"]
        assert (await frontier.stats()).items == 3
        assert (await history(frontier, second.request)).items == 2

    async def test_a_page_logs_its_items_once_however_often_it_is_tried(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, 1)
        lost = await lease_one(frontier, ttl=5)
        await harness.advance(5)
        failed = await lease_one(frontier)
        assert await fail(frontier, failed, retry_in=5, items=[b"early"], children=[page("early")]) == "waiting"
        await harness.advance(5)
        last = await lease_one(frontier)
        await complete(frontier, last, items=[b"x"])
        for lease in (lost, failed, last):
            await check_refused(frontier, lease)
        (item,) = await all_items(frontier)
        assert (item.key, item.payload) == (f"{page(1).fingerprint().hex()}-0", b"x")
        assert await frontier.find(page("early")) is None

    async def test_items_and_children_of_a_failure_are_kept_only_if_the_request_dies(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        found = {"items": [b"from the errback"], "children": [page("elsewhere")]}
        assert await fail(frontier, await lease_one(frontier), retry_in=1, **found) == "waiting"
        assert (await frontier.stats()).items == 0
        assert await frontier.find(page("elsewhere")) is None
        await harness.advance(1)
        assert await fail(frontier, await lease_one(frontier), retry_in=1, **found) == "dead"
        assert [item.payload for item in await all_items(frontier)] == [b"from the errback"]
        assert (await history(frontier, page("elsewhere"))).parent == page(1).url

    async def test_no_item_key_is_used_twice(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        await fail(frontier, await lease_one(frontier), items=[b"a", b"b"])
        await frontier.retry_dead()
        await complete(frontier, await lease_one(frontier), items=[b"c", b"d"])
        log = await all_items(frontier)
        assert [(item.index, item.payload) for item in log] == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
        assert (await history(frontier, page(1))).items == 4

    async def test_the_log_is_read_after_a_sequence_number(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        for lease in (await frontier.lease(2, TTL)).leases:
            await complete(frontier, lease, items=[b"%d" % number for number in range(5)])
        log = await all_items(frontier)
        numbers = [item.seq for item in log]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0
        read, after = [], 0
        while some := await frontier.read_items(after, 3):
            assert len(some) <= 3
            read += some
            after = some[-1].seq
        assert read == log
        assert await frontier.read_items(numbers[6], 1) == [log[7]]
        assert await frontier.read_items(0, 0) == []

    async def test_a_page_of_the_log_is_limited_in_bytes(self, frontier: Frontier) -> None:
        sizes = [10, 10, 1000, 10, 300_000, 10, 10, 40, 0, 10]
        await push(frontier, *range(5))
        for number, lease in enumerate((await frontier.lease(5, TTL)).leases):
            await complete(frontier, lease, items=[b"x" * size for size in sizes[2 * number : 2 * number + 2]])
        log = await all_items(frontier)
        for max_bytes in (0, 9, 10, 20, 21, 1000, 1030, 10**6, 10**9):
            for after in range(len(log)):
                expected = log[after : after + 4]
                while len(expected) > 1 and sum(len(item.payload) for item in expected) > max_bytes:
                    expected.pop()
                some = await frontier.read_items(after and log[after - 1].seq, 4, max_bytes=max_bytes)
                assert some == expected, (max_bytes, after)
        assert await frontier.read_items(log[-1].seq, 4, max_bytes=10) == []
        assert await frontier.read_items(0, 0, max_bytes=10) == []

    async def test_the_log_is_trimmed_only_if_the_cursors_are_known(self, frontier: Frontier) -> None:
        """An output that was set back has moved its cursor back meanwhile."""
        await push(frontier, 1)
        (lease,) = (await frontier.lease(1, TTL)).leases
        await complete(frontier, lease, items=[b"0", b"1"])
        log = await all_items(frontier)
        claim = await frontier.claim("sink:out", TTL)
        assert claim is not None
        assert await frontier.advance(claim, b"moved back", TTL)
        for seen in ({"sink:out": b""}, {"sink:out": b"moved back", "sink:unknown": b""}):
            await frontier.trim_items(log[1].seq, cursors=seen)
            assert await all_items(frontier) == log
        await frontier.trim_items(log[1].seq, cursors={"sink:out": b"moved back"})
        assert await all_items(frontier) == []

    async def test_trimming_the_log_removes_only_its_beginning(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        first, second = (await frontier.lease(2, TTL)).leases
        await complete(frontier, first, items=[b"0", b"1", b"2"])
        log = await all_items(frontier)
        await frontier.trim_items(log[1].seq)
        assert await frontier.read_items(0, 10) == [log[2]]
        assert await frontier.read_items(log[0].seq, 10) == [log[2]]
        await frontier.trim_items(log[2].seq)
        await frontier.trim_items(log[0].seq)
        assert await all_items(frontier) == []
        assert (await frontier.stats()).items == 3
        await complete(frontier, second, items=[b"3"])
        (item,) = await frontier.read_items(log[2].seq, 10)
        assert item.seq > log[2].seq
        assert item.payload == b"3"
        assert (await frontier.stats()).items == 4

    # -- finished

    async def test_a_run_that_is_not_seeded_is_not_finished(self, harness: Harness, frontier: Frontier) -> None:
        assert not (await frontier.stats()).finished
        claim = await frontier.claim("seed", 5)
        assert claim is not None
        assert not (await frontier.stats()).finished
        await frontier.relinquish(claim)
        assert not (await frontier.stats()).finished
        await frontier.claim("seed", 5)
        await harness.advance(100)  # the role expires
        assert not (await frontier.stats()).finished
        await finish_seeding(frontier)
        assert (await frontier.stats()).finished

    async def test_a_run_is_unfinished_while_a_request_is_open(self, harness: Harness, frontier: Frontier) -> None:
        await finish_seeding(frontier)
        await push(frontier, 1, 2)
        assert not (await frontier.stats()).finished  # ready
        first, second = (await frontier.lease(2, ttl=30)).leases
        assert not (await frontier.stats()).finished  # leased
        await complete(frontier, second)
        await fail(frontier, first, retry_in=20)
        assert not (await frontier.stats()).finished  # waiting
        await harness.advance(20)
        assert not (await frontier.stats()).finished  # due again
        await lease_one(frontier, ttl=5)
        await harness.advance(100)
        assert not (await frontier.stats()).finished  # expired
        await fail(frontier, await lease_one(frontier))
        assert (await frontier.stats()).finished

    async def test_a_request_that_dies_with_its_worker_ends_the_run(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        await finish_seeding(frontier)
        await push(frontier, 1)
        await lease_one(frontier, ttl=5)
        await harness.advance(5)
        assert await lease_names(frontier) == []
        assert (await frontier.stats()).finished

    async def test_a_run_is_never_finished_between_a_page_and_its_children(self, frontier: Frontier) -> None:
        await finish_seeding(frontier)
        await push(frontier, 0)
        for depth in range(5):
            lease = await lease_one(frontier)
            if depth % 2:
                await fail(frontier, lease, children=[page(depth + 1)])
            else:
                await complete(frontier, lease, children=[page(depth + 1)])
            assert not (await frontier.stats()).finished
        await complete(frontier, await lease_one(frontier), children=[page(0)])  # nothing new
        assert (await frontier.stats()).finished

    async def test_a_finished_run_resumes_when_requests_are_added(self, frontier: Frontier) -> None:
        await finish_seeding(frontier)
        assert (await frontier.stats()).finished
        await push(frontier, 1)
        assert not (await frontier.stats()).finished
        await fail(frontier, await lease_one(frontier))
        assert (await frontier.stats()).finished
        await frontier.retry_dead()
        assert not (await frontier.stats()).finished

    # -- histories

    async def test_a_url_that_was_never_pushed_is_not_found(self, frontier: Frontier) -> None:
        assert await frontier.find(page(1)) is None

    async def test_a_request_with_another_name_is_found_by_its_url(self, frontier: Frontier) -> None:
        twice = Request("http://a.example/twice", dont_filter=True)
        await frontier.push([twice, Request("http://a.example/form", form={"a": "1"}), page("http-like")])
        assert (await history(frontier, Request("http://a.example/twice"))).state == "ready"
        assert (await history(frontier, Request("http://a.example/form"))).url == "http://a.example/form"
        assert await frontier.find(Request("http://a.example/tw")) is None
        assert await frontier.find(Request("http://a.example/twice"), exact=True) is None
        assert await frontier.find(Request("http://a.example/form"), exact=True) is None
        assert await frontier.find(page("http-like"), exact=True) is not None

    async def test_the_unfiltered_child_of_a_page_is_found_by_its_parent(self, frontier: Frontier) -> None:
        """So a chain of redirects that passes a URL twice can be followed."""
        await push(frontier, "loop")
        again = page("loop", dont_filter=True)
        await complete(frontier, await lease_one(frontier), children=[again], redirected=True)
        first = await history(frontier, page("loop"))
        second = await frontier.find(page("loop"), exact=True, parent=first.fingerprint)
        assert second is not None
        assert (first.state, second.state, second.parent) == ("done", "ready", page("loop").url)
        assert await frontier.find(page("loop"), exact=True, parent=second.fingerprint) is None

    async def test_the_history_of_a_url(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "parent")
        child = page("child", priority=1.5, depth=4)
        await complete(frontier, await lease_one(frontier), children=[child], status=200, note="a note")
        found = await history(frontier, child)
        assert (found.url, found.state, found.depth, found.priority) == (child.url, "ready", 4, 1.5)
        assert (found.attempts, found.status, found.items, found.parent) == (0, 0, 0, page("parent").url)
        assert found.reason == ""
        lease = await lease_one(frontier, ttl=5)
        assert (await history(frontier, child)).state == "leased"
        await harness.advance(5)
        lease = await lease_one(frontier)
        await fail(frontier, lease, retry_in=7, reason="it was slow", status=504)
        found = await history(frontier, child)
        assert (found.state, found.attempts, found.status) == ("waiting", 2, 504)
        await harness.advance(7)
        await complete(frontier, await lease_one(frontier), status=201, items=[b"1", b"2"])
        found = await history(frontier, child)
        assert (found.state, found.attempts, found.status, found.items) == ("done", 3, 201, 2)
        events = [f"{event.what} {event.detail}" for event in found.events]
        lost = next(number for number, text in enumerate(events) if "lost" in text)
        slow = next(number for number, text in enumerate(events) if "it was slow" in text)
        done = next(number for number, text in enumerate(events) if "done" in text)
        assert lost < slow < done
        times = [event.at for event in found.events]
        assert times == sorted(times)
        assert times[slow] - times[lost] < 1
        assert 7 <= times[done] - times[slow] < 8
        parent = await history(frontier, page("parent"))
        assert (parent.parent, parent.status) == (None, 200)
        assert any("a note" in event.detail for event in parent.events)

    # -- dead requests

    async def test_dead_requests_are_counted_by_kind_and_listed_with_reasons(self, frontier: Frontier) -> None:
        assert await frontier.dead_kinds() == {}
        await push(frontier, *range(4))
        kinds = ["timeout", "robots", "timeout"]
        for kind in kinds:
            await fail(frontier, await lease_one(frontier), kind=kind, reason=f"because of {kind}", status=7)
        assert await frontier.dead_kinds() == {"timeout": 2, "robots": 1}
        dead = [request async for request in frontier.dead()]
        assert sorted((request.url, request.state, request.reason, request.status) for request in dead) == [
            (page(number).url, "dead", f"because of {kind}", 7) for number, kind in enumerate(kinds)
        ]

    async def test_dead_requests_are_retried_with_all_their_attempts(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, 1)
        await fail(frontier, await lease_one(frontier), retry_in=1)
        await harness.advance(1)
        await fail(frontier, await lease_one(frontier), retry_in=1)
        assert await frontier.retry_dead() == 1
        assert await frontier.dead_kinds() == {}
        assert [request async for request in frontier.dead()] == []
        found = await history(frontier, page(1))
        assert (found.state, found.attempts) == ("ready", 0)
        lease = await lease_one(frontier)
        assert lease.attempt == 1
        assert await fail(frontier, lease, retry_in=1) == "waiting"
        assert await frontier.retry_dead() == 0

    async def test_robots_and_scope_deaths_are_retried_only_when_named(self, frontier: Frontier) -> None:
        kinds = ["timeout", "robots", "scope", "http 500", "dns"]
        await push(frontier, *kinds)
        for kind in kinds:
            await fail(frontier, await lease_one(frontier), kind=kind)
        assert await frontier.retry_dead(["dns", "no such kind"]) == 1
        assert await frontier.retry_dead([]) == 0
        assert await frontier.retry_dead() == 2
        assert await frontier.dead_kinds() == {"robots": 1, "scope": 1}
        assert await frontier.retry_dead(["robots"]) == 1
        assert await lease_names(frontier) == ["timeout", "robots", "http%20500", "dns"]

    async def test_dead_requests_are_retried_by_their_fingerprints(self, frontier: Frontier) -> None:
        """Only those that are dead, and of the kinds that are meant."""
        kinds = ["timeout", "robots", "timeout", "dns"]
        await push(frontier, *range(5))
        for kind in kinds:
            await fail(frontier, await lease_one(frontier), kind=kind)
        dead = {request.url: request async for request in frontier.dead()}
        assert [dead[page(number).url].kind for number in range(4)] == kinds
        names = [dead[page(number).url].fingerprint for number in range(4)]
        assert names == [page(number).fingerprint() for number in range(4)]
        others = [page(4).fingerprint(), page("unknown").fingerprint()]
        assert await frontier.retry_dead(only=[]) == 0
        assert await frontier.retry_dead(["timeout"], only=[names[3], *others]) == 0
        assert await frontier.retry_dead(["timeout"], only=[names[0], names[0], names[3], *others]) == 1
        assert await frontier.dead_kinds() == {"timeout": 1, "robots": 1, "dns": 1}
        assert await frontier.retry_dead(only=names) == 2
        assert await frontier.dead_kinds() == {"robots": 1}
        assert await frontier.retry_dead(["robots"], only=names) == 1
        assert await frontier.retry_dead(["robots"], only=names) == 0
        found = await history(frontier, page(0))
        assert (found.state, found.attempts, found.kind, found.reason) == ("ready", 0, "", "")
        assert [event.kind for event in found.events if event.kind == "retried"] == ["retried"]
        assert await lease_names(frontier) == ["0", "1", "2", "3", "4"]
        assert (await frontier.stats()).balanced

    async def test_redirects_and_item_errors_are_counted_once(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, *range(5))
        first, second, third, fourth, fifth = (await frontier.lease(5, TTL)).leases
        await complete(frontier, first, children=[page("target")], redirected=True)
        await complete(frontier, second, item_errors=2)
        assert await fail(frontier, third, item_errors=4) == "dead"
        assert await fail(frontier, fourth, retry_in=100, item_errors=8) == "waiting"
        await frontier.release([fifth])
        for _ in range(2):  # repeats
            await frontier.complete([Completion(lease=second, item_errors=2)])
            await frontier.complete([Completion(lease=first, children=[page("target")], redirected=True)])
        stats = await frontier.stats()
        assert (stats.redirects, stats.item_errors, stats.pages) == (1, 6, 1)
        assert await frontier.audit() == stats

    # -- across restarts

    async def test_everything_survives_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open(FrontierOptions(max_attempts=2))
        await push(frontier, *range(5))
        leases = (await frontier.lease(4, ttl=60)).leases
        children = [page("child"), FULL_REQUEST]
        await complete(
            frontier, leases[0], items=[b"x", b"y"], children=children, duplicates=4, item_errors=3, note="n"
        )
        await fail(frontier, leases[1], kind="http 404", reason="gone", status=404)
        await fail(frontier, leases[2], retry_in=100)
        pages = [page(number) for number in range(3)]
        before = [await history(frontier, request) for request in pages], await all_items(frontier)
        frontier = await harness.reopen()
        assert ([await history(frontier, request) for request in pages], await all_items(frontier)) == before
        assert await frontier.dead_kinds() == {"http 404": 1}
        stats = await frontier.stats()
        assert stats == Stats(
            pushed=7,
            ready=stats.ready,
            waiting=1,
            leased=stats.leased,
            done=1,
            dead=1,
            duplicates=4,
            items=2,
            item_errors=3,
            seeding=True,
        )
        assert await frontier.push(pages) == Pushed(0, 3)
        await harness.advance(60)
        leases = (await frontier.lease(9, TTL)).leases
        assert [(lease.request, lease.attempt) for lease in leases] == [
            (page(3), 2),  # it was leased when the process died
            (page(4), 1),
            (page("child"), 1),
            (FULL_REQUEST, 1),
        ]
        await harness.advance(40)
        last = await lease_one(frontier)
        assert (last.request, last.attempt) == (page(2), 2)
        await complete(frontier, *leases, last)

    async def test_no_token_repeats_after_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        await push(frontier, 1)
        before = await lease_one(frontier, ttl=5)
        frontier = await harness.reopen()
        await harness.advance(5)
        after = await lease_one(frontier)
        assert after.token != before.token
        await check_refused(frontier, before)
        assert await frontier.complete([Completion(lease=after), Completion(lease=before)]) == [Pushed(0, 0), None]

    async def test_a_url_that_kills_its_process_runs_out_of_attempts(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open(FrontierOptions(max_attempts=3))
        await push(frontier, "killer")
        for attempt in (1, 2, 3):
            assert (await lease_one(frontier, ttl=5)).attempt == attempt
            frontier = await harness.reopen()
            await harness.advance(5)
        assert await lease_names(frontier) == []
        assert (await history(frontier, page("killer"))).state == "dead"

    async def test_a_repeated_failure_changes_nothing(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        lease = await lease_one(frontier)
        failure = Failure(lease=lease, kind="k", reason="r", retry_in=1)
        assert await frontier.fail([failure]) == ["waiting"]
        await harness.advance(1)
        assert await frontier.fail([failure]) == [None]
        assert (await lease_one(frontier)).attempt == 2
