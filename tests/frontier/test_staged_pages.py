"""The links of large pages on frontiers that live in one process, while they are staged."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shoal.errors import FrontierError, StoreError
from shoal.frontier import open_store
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request
from shoal.ports import Completion, Frontier, FrontierOptions, Pushed, Run, Stats, Store
from tests.support import forking

OPTIONS = FrontierOptions(max_attempts=3, concurrency_per_host=100_000)
LARGE = Request("http://large.example/")
RUN = Run(run_id="r", spider="s", state="running", created_at=1.0)


def links(count: int, start: int = 0) -> list[Request]:
    return [Request(f"http://{number % 20}.example/{number}") for number in range(start, start + count)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "frontier.db"


@pytest.fixture(params=["memory", "sqlite"])
async def store(path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = await open_store("memory:" if request.param == "memory" else f"sqlite:///{path}")
    await store.create_run(RUN)
    yield store
    await store.close()


async def stage(frontier: Frontier, count: int) -> Stats:
    """Complete a page with this many links, as a caller that is cancelled before they are moved."""
    await frontier.push([LARGE])
    (lease,) = (await frontier.lease(1, 600)).leases
    ending = asyncio.create_task(frontier.complete([Completion(lease=lease, items=[b"i"], children=links(count))]))
    while not (await frontier.stats()).incoming:
        await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    return await check_balance(frontier)


async def check_balance(frontier: Frontier) -> Stats:
    stats = await frontier.stats()
    assert stats.balanced
    assert await frontier.audit() == stats
    return stats


async def crawl(frontier: Frontier) -> list[str]:
    """Complete all that remains, each time with a link that the run has. Returns the URLs in order."""
    urls = []
    while (await check_balance(frontier)).remaining:
        leased = await frontier.lease(1500, 600)
        assert leased.leases or leased.wait == pytest.approx(0.01, abs=0.01)
        urls += [lease.request.url for lease in leased.leases]
        await frontier.complete([Completion(lease=lease, children=[LARGE]) for lease in leased.leases])
    return urls


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """The garbage collector looks at objects of other tests too, of which there may be millions."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_page_with_100_000_links_is_stored_in_short_steps(store: Store) -> None:
    """CPU time counts, so that other programs do not matter. The links lead to as many hosts."""
    frontier = await store.frontier("r", OPTIONS)
    await frontier.push([LARGE])
    (lease,) = (await frontier.lease(1, 600)).leases
    children = [Request(f"http://h{number}/") for number in range(100_000)]
    ending = asyncio.create_task(frontier.complete([Completion(lease=lease, items=[b"i"], children=children)]))
    waits, seen_incoming = [], 0
    while not ending.done():
        began = time.process_time()
        await asyncio.sleep(0)
        stats = await frontier.stats()
        waits.append(time.process_time() - began)
        assert stats.balanced
        assert (stats.items, stats.pushed - 1 + stats.incoming) == (stats.done, 100_000 * stats.done)
        seen_incoming += stats.incoming > 0
    assert await ending == [Pushed(100_000, 0)]
    assert seen_incoming > 10
    print(f"others waited at most {max(waits):.3f} s")
    assert max(waits) < 1  # a step takes 0.05 s, and on a busy machine twice that


async def test_each_lease_moves_a_portion_that_was_left_behind(store: Store) -> None:
    frontier = await store.frontier("r", OPTIONS)
    before = await stage(frontier, 5000)
    assert (before.done, before.items, before.pushed + before.incoming) == (1, 1, 5001)
    assert 0 < before.incoming <= 5000
    await frontier.push(links(1, start=4999))  # now a duplicate on the page
    (lease,) = (await frontier.lease(1, 600)).leases
    after = await check_balance(frontier)
    assert after.incoming == before.incoming - 1000
    await frontier.release([lease])
    assert sorted(await crawl(frontier)) == sorted(link.url for link in links(5000))
    end = await check_balance(frontier)
    assert (end.pushed, end.done, end.incoming, end.duplicates) == (5001, 5001, 0, 5001)


async def test_links_enter_the_queue_in_the_order_of_their_page(store: Store) -> None:
    frontier = await store.frontier("r", OPTIONS)
    await stage(frontier, 5000)
    assert await crawl(frontier) == [link.url for link in links(5000)]


async def test_two_calls_that_move_links_count_their_own(store: Store) -> None:
    frontier = await store.frontier("r", OPTIONS)
    await frontier.push([LARGE, *links(1)])
    pages = [Completion(lease=lease, children=links(4500)) for lease in (await frontier.lease(2, 600)).leases]
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(frontier.complete([each])) for each in pages]
        while not all(call.done() for call in calls):
            assert (await frontier.stats()).balanced
            await asyncio.sleep(0)
            for lease in (await frontier.lease(50, 600)).leases:
                await frontier.complete([Completion(lease=lease)])
    results = [result for call in calls for result in call.result() if result]
    assert sum(result.added for result in results) == 4499
    assert [result.added + result.duplicates for result in results] == [4500, 4500]
    assert (await check_balance(frontier)).duplicates == 4501


async def test_a_paused_run_moves_nothing(store: Store) -> None:
    frontier = await store.frontier("r", OPTIONS)
    staged = await stage(frontier, 5000)
    await store.transition("r", "paused")
    assert (await frontier.lease(10, 600)).wait is None
    assert await frontier.stats() == staged
    await store.transition("r", "running")
    assert len(await crawl(frontier)) == 5000


async def test_a_deleted_run_takes_its_staged_links_along(store: Store) -> None:
    await stage(await store.frontier("r", OPTIONS), 5000)
    await store.delete_run("r")
    await store.create_run(RUN)
    frontier = await store.frontier("r", OPTIONS)
    assert await check_balance(frontier) == Stats(seeding=True)
    if isinstance(store, SQLiteStore):
        assert await store._file.read(lambda: store._file.db.execute("SELECT count(*) FROM stage").fetchone()) == (0,)


# -- files


in_a_file = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
KILLED = """
import asyncio, os, signal, sys
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request
from shoal.ports import Completion, FrontierOptions, Run

async def main(path, portions):
    store = await SQLiteStore.open(path)
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
    frontier = await store.frontier("r", FrontierOptions())
    await frontier.push([Request("http://large.example/")])
    (lease,) = (await frontier.lease(1, 600)).leases
    children = [Request(f"http://{number % 20}.example/{number}") for number in range(20_000)]
    ending = asyncio.create_task(frontier.complete([Completion(lease=lease, items=[b"i"], children=children)]))
    while not 0 < (await frontier.stats()).incoming <= 20_000 - 1000 * portions:
        assert not ending.done()
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("portions", [0, 3])
async def test_links_of_a_process_that_was_killed_are_moved_by_the_next_one(path: Path, portions: int) -> None:
    process = await asyncio.to_thread(
        forking.run, [sys.executable, "-c", KILLED, path, str(portions)], capture_output=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    looking = await open_store(f"sqlite:///{path}", readonly=True)
    found = await (await looking.frontier("r", OPTIONS)).find(links(1, start=19_999)[0])
    assert found is not None
    assert (found.state, found.parent) == ("ready", LARGE.url)
    await looking.close()
    store = await SQLiteStore.open(path)
    frontier = await store.frontier("r", OPTIONS)
    stats = await check_balance(frontier)
    assert (stats.done, stats.items, stats.pushed + stats.incoming) == (1, 1, 20_001)
    assert 0 < stats.incoming <= 20_000 - 1000 * portions
    assert await crawl(frontier) == [link.url for link in links(20_000)]
    await store.close()


@in_a_file
async def test_a_portion_that_finds_no_room_on_the_disk_is_moved_later(store: SQLiteStore) -> None:
    frontier = await store.frontier("r", OPTIONS)
    staged = await stage(frontier, 5000)
    db = store._file.db

    def limit(pages: int) -> None:
        db.execute(f"PRAGMA max_page_count = {pages}")

    await store._file.read(lambda: limit(db.execute("PRAGMA page_count").fetchone()[0]))
    for _ in range(2):
        with pytest.raises(FrontierError, match="no room on the disk"):
            await frontier.lease(10, 600)
        assert await check_balance(frontier) == staged
    await store._file.read(lambda: limit(2**30))
    assert await crawl(frontier) == [link.url for link in links(5000)]


@in_a_file
async def test_a_damaged_portion_is_an_error(store: SQLiteStore) -> None:
    frontier = await store.frontier("r", OPTIONS)
    staged = await stage(frontier, 5000)
    db = store._file.db
    await store._file.write(lambda: db.execute("UPDATE stage SET links = substr(links, 1, 99)"))
    with pytest.raises(StoreError, match="the links of request 1 can't be read"):
        await frontier.lease(10, 600)
    assert await check_balance(frontier) == staged
