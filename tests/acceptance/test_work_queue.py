"""`UrlWorkQueue`, the queue for your own scripts, on every durable store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shoal import SyncUrlWorkQueue, UrlWorkQueue
from shoal.errors import ConfigError, LeaseLostError, RequestError, StoreError
from shoal.frontier import open_store
from shoal.item import decode_item
from shoal.ports import Run
from shoal.system.clock import now
from tests.acceptance.fleets import KINDS, frontier_url
from tests.support import forking
from tests.support.forking import SHOAL

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


async def test_a_url_instead_of_its_claim_is_refused(tmp_path: Path) -> None:
    async with UrlWorkQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        url: Any = "http://a.example/"
        for call in (queue.complete_url(url), queue.fail_url(url, "x"), queue.release_url(url), queue.renew([url])):
            with pytest.raises(RequestError, match=r"needs a claim, not 'http://a.example/': pass what claim_batch"):
                await call


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lease_lasts_300_seconds_and_names_its_worker(kind: str) -> None:
    dsn = frontier_url(kind)
    async with UrlWorkQueue(dsn) as one, UrlWorkQueue(dsn, lease_seconds=60) as other:
        await one.enqueue_urls(URLS[:2])
        claims = [*await one.claim_batch(1), *await other.claim_batch(1)]
        seconds = [claim.lease.deadline - now() for claim in claims]
        assert all(wanted - 30 < left <= wanted + 1 for left, wanted in zip(seconds, (300, 60), strict=True))
        assert one.worker_id != other.worker_id


async def test_the_life_of_a_url(queue: UrlWorkQueue) -> None:
    await queue.enqueue_urls(URLS[:4], meta={"state": "Goa"})
    done, retried, failed, released = await queue.claim_batch(10)
    assert (done.attempt, dict(done.meta)) == (1, {"state": "Goa"})
    await queue.complete_url(done, status=200, items=[{"price": 3}])
    assert await queue.fail_url(retried, "timed out", retry_in=0.0) == "pending"
    assert await queue.fail_url(failed, "gone", retry_in=None) == "failed"
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


async def test_three_retries_are_four_attempts(dsn: str) -> None:
    for queue in (UrlWorkQueue(dsn, "default"), UrlWorkQueue(dsn, "same", max_retries=3)):
        async with queue:
            await queue.enqueue_urls(URLS[:1])
            states = [await queue.fail_url((await queue.claim_batch())[0], "timed out", retry_in=0.0) for _ in range(4)]
            assert states == ["pending", "pending", "pending", "failed"]
            assert await queue.claim_batch() == []
    with pytest.raises(ConfigError, match="contradict each other"):
        UrlWorkQueue(dsn, max_retries=3, max_attempts=3)
    with pytest.raises(ConfigError, match="has max_attempts 4, not 1"):
        await UrlWorkQueue(dsn, "same", max_retries=0).claim_batch()


async def state_of(dsn: str, name: str) -> str | None:
    store = await open_store(dsn)
    try:
        return await store.run_state(name)
    finally:
        await store.close()


async def test_a_drained_queue_is_finished_until_it_has_urls_again(dsn: str) -> None:
    async with UrlWorkQueue(dsn, "products") as queue:
        assert await queue.claim_batch() == []  # empty from the beginning: nothing has ended
        for number in (1, 2):
            await queue.enqueue_urls([f"http://shop.example/{number}"])
            (claim,) = await queue.claim_batch()
            await queue.complete_url(claim)
            if number == 1:
                assert (await queue.get_queue_stats())["remaining"] == 0
            else:
                assert await queue.claim_batch() == []
            run = (await queue._store.list_runs())[0]  # type: ignore[union-attr]
            assert run.state == "finished"
        await queue.enqueue_urls(["http://shop.example/3"])
        assert await queue._store.run_state("products") == "running"  # type: ignore[union-attr]
        await queue.complete_url((await queue.claim_batch())[0])
    assert await state_of(dsn, "products") == "finished"
    watch = [*SHOAL, "stats", "products", "--frontier", dsn, "--watch"]
    watched = await asyncio.to_thread(forking.run, watch, capture_output=True, timeout=60)
    assert "done 3  failed 0  left 0" in watched.stdout
    assert "seeding" not in watched.stdout


SCRIPT = """
import sys, time
from shoal import SyncUrlWorkQueue
from shoal.errors import LeaseLostError

queue = SyncUrlWorkQueue(sys.argv[1], "products", worker_id="script")
claims = queue.claim_batch(3)
print(len(claims), flush=True)
sys.stdin.readline()
try:
    queue.complete_url(claims[0])
    print("completed", flush=True)
except LeaseLostError:
    print("lost", flush=True)
print(len(queue.claim_batch(30)), flush=True)
queue.close()
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "frozen", "busy"])
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_send_heartbeats(kind: str, fault: signal.Signals | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKER__SESSION", "2")
    dsn = frontier_url(kind)
    with SyncUrlWorkQueue(dsn, "products") as queue:
        queue.enqueue_urls(URLS[:3])
        command = [sys.executable, "-c", SCRIPT, dsn]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
            assert script.stdin is not None
            assert script.stdout is not None
            assert script.stdout.readline() == "3\n"
            if fault is None:
                time.sleep(6)  # three sessions
                assert queue.get_queue_stats()["claimed"] == 3
                print(file=script.stdin, flush=True)
                assert [script.stdout.readline() for _ in range(2)] == ["completed\n", "0\n"]
                return
            os.kill(script.pid, fault)
            while not (claims := queue.claim_batch(1)):  # although the leases last five minutes
                time.sleep(0.1)
            assert claims[0].attempt == 2
            if fault == signal.SIGSTOP:
                os.kill(script.pid, signal.SIGCONT)
                print(file=script.stdin, flush=True)
                assert [script.stdout.readline() for _ in range(2)] == ["lost\n", "2\n"]


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
        assert queue.fail_url(two, "gone", retry_in=None) == "failed"
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
