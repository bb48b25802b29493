"""`UrlWorkQueue`, the queue for your own scripts, on every durable store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shoal.errors import ConfigError, LeaseLostError, StoreError
from shoal.frontier import open_store
from shoal.item import decode_item
from shoal.ports import Run
from shoal.runs.work_queue import SyncUrlWorkQueue, UrlWorkQueue
from tests.acceptance.fleets import KINDS, frontier_url

URLS = [f"http://shop.example/{number}" for number in range(25)]


@pytest.fixture(params=["sqlite", *KINDS])
def dsn(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db" if request.param == "sqlite" else frontier_url(request.param)


@pytest_asyncio.fixture
async def queue(dsn: str) -> AsyncIterator[UrlWorkQueue]:
    async with UrlWorkQueue(dsn, "products") as made:
        yield made


async def test_urls_are_enqueued_once(queue: UrlWorkQueue) -> None:
    first = await queue.enqueue_urls([*URLS, "not a url", "http://"])
    assert (first.added, first.duplicates, len(first.invalid)) == (25, 0, 2)
    again = await queue.enqueue_urls(iter([*URLS, "http://shop.example/new"]))
    assert (again.added, again.duplicates, again.invalid) == (1, 25, ())
    assert await queue.get_queue_stats() == {
        "pending": 26, "claimed": 0, "completed": 0, "failed": 0, "remaining": 26,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_url_is_claimed_by_one(kind: str) -> None:
    dsn = frontier_url(kind)
    async with UrlWorkQueue(dsn) as one, UrlWorkQueue(dsn) as other:
        await one.enqueue_urls(URLS)
        batches = await asyncio.gather(*(queue.claim_batch(4) for queue in (one, other) * 4))
        claimed = Counter(claim.url for batch in batches for claim in batch)
        assert set(claimed.values()) == {1}
        assert len(claimed) == 25


async def test_the_life_of_a_url(queue: UrlWorkQueue) -> None:
    await queue.enqueue_urls(URLS[:4], meta={"state": "Goa"})
    done, retried, failed, released = await queue.claim_batch(10)
    assert (done.attempt, dict(done.meta)) == (1, {"state": "Goa"})
    await queue.complete_url(done, status=200, items=[{"price": 3}])
    assert await queue.fail_url(retried, "timed out", retry_in=0.0) == "waiting"
    assert await queue.fail_url(failed, "gone", retry_in=None) == "dead"
    await queue.release_url(released)
    assert {claim.url: claim.attempt for claim in await queue.claim_batch(10)} == {retried.url: 2, released.url: 1}
    stats = await queue.get_queue_stats()
    assert (stats["completed"], stats["failed"], stats["claimed"]) == (1, 1, 2)


async def test_who_comes_too_late_changes_nothing(queue: UrlWorkQueue) -> None:
    await queue.enqueue_urls(URLS[:1])
    (claim,) = await queue.claim_batch()
    assert await queue.renew([claim]) == [True]
    await queue.release_url(claim)
    for late in (queue.complete_url(claim), queue.fail_url(claim, "late"), queue.release_url(claim)):
        with pytest.raises(LeaseLostError, match=r"shop\.example/0"):
            await late
    assert await queue.renew([claim]) == [False]
    assert (await queue.get_queue_stats())["completed"] == 0


async def test_urls_of_dead_workers_come_back(dsn: str) -> None:
    async with UrlWorkQueue(dsn, lease_seconds=0.3, max_attempts=2) as queue:
        await queue.enqueue_urls(URLS[:3])
        assert len(await queue.claim_batch(3)) == 3
        assert await queue.release_expired_leases() == 0
        await asyncio.sleep(0.4)
        assert await queue.release_expired_leases() == 3
        assert [claim.attempt for claim in await queue.claim_batch(3)] == [2, 2, 2]
        await asyncio.sleep(0.4)
        assert await queue.claim_batch(3) == []  # twice is enough
        assert (await queue.get_queue_stats())["failed"] == 3


async def test_items_of_urls_are_in_the_log(dsn: str) -> None:
    async with UrlWorkQueue(dsn, "products") as queue:
        await queue.enqueue_urls(URLS[:1])
        (claim,) = await queue.claim_batch()
        await queue.complete_url(claim, items=[{"price": 3}, {"price": 4}])
    store = await open_store(dsn)
    frontier = await store.frontier("products")
    assert [decode_item(item.payload)[1] for item in await frontier.read_items(0, 10)] == [{"price": 3}, {"price": 4}]
    await store.close()


async def test_a_name_of_a_spiders_run_is_refused(dsn: str) -> None:
    store = await open_store(dsn)
    await store.create_run(Run(run_id="products", spider="shop", state="running", created_at=1.0))
    await store.close()
    with pytest.raises(StoreError, match="is not a work queue"):
        await UrlWorkQueue(dsn, "products").enqueue_urls(URLS)


def test_the_sync_front(dsn: str) -> None:
    with SyncUrlWorkQueue(dsn, lease_seconds=60) as queue:
        assert queue.enqueue_urls(URLS).added == 25
        one, two, three = queue.claim_batch(3)
        queue.complete_url(one)
        assert queue.fail_url(two, "gone", retry_in=None) == "dead"
        assert queue.renew([three]) == [True]
        queue.release_url(three)
        assert queue.release_expired_leases() == 0
        assert queue.get_queue_stats()["remaining"] == 23


async def test_politeness_is_the_queues(dsn: str) -> None:
    async with UrlWorkQueue(dsn, delay=60.0) as one:
        await one.enqueue_urls(URLS)
        assert len(await one.claim_batch(10)) == 1
    async with UrlWorkQueue(dsn) as other:  # whoever says nothing keeps to it too
        assert await other.claim_batch(10) == []
    with pytest.raises(ConfigError, match="has delay 60, not 0"):
        await UrlWorkQueue(dsn, delay=0.0).claim_batch(10)
