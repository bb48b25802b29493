"""A store is rewound while a run ends, a page is settled, or the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.api.batch.local_work import LocalWork
from shoal.api.batch.options import BatchOptions
from shoal.api.batch.session import Session
from shoal.api.celery.dispatch import _Dispatch
from shoal.api.celery.page_worker import _OpenSession, _TaskRunner
from shoal.api.celery.watch import CeleryWatch
from shoal.config import Config
from shoal.crawling.onion import SharedFetcher
from shoal.errors import StoreAwayError, StoreRewoundError
from shoal.frontier import open_store
from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request, Response
from shoal.item import encode_item
from shoal.ports import Completion, Frontier, FrontierOptions, Rewind, Run
from shoal.runs import worker as workers
from shoal.runs.start import start_run
from shoal.runs.worker import Worker
from shoal.sinks.drainer import Drainer
from shoal.sinks.files import CollectSink
from shoal.spider import Spider

CLOSED = "http://127.0.0.1:9/"
"""Nobody answers there, and a batch may not fetch it: so each page is settled at once."""
CONFIG = Config().with_settings({"download_delay": 0, "retry.max_attempts": 1})


class Rewinding:
    """A frontier that goes back in time at the first call that ``at`` accepts: one page must be crawled again.

    From then on it refuses each call until ``recover``, as real frontiers do."""

    def __init__(self, inner: Frontier, at: Callable[[str, tuple[Any, ...]], bool], *, page: str = "") -> None:
        self.inner = inner
        self._at = at
        self._page = page
        self._is_rewound: bool | None = None
        self.recovered = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(method) or name in ("stats", "audit"):
            return method

        async def call(*arguments: Any, **options: Any) -> Any:
            if self._is_rewound is None and self._at(name, arguments):
                self._is_rewound = True
                if self._page:
                    await self.inner.push([Request(self._page)])
            if self._is_rewound:
                raise StoreRewoundError("the store went back in time")
            return await method(*arguments, **options)

        return call

    async def recover(self) -> Rewind | None:
        self._is_rewound = False
        self.recovered += 1
        return Rewind(at=0.0, lost_seconds=1.0)


def ending(name: str, arguments: tuple[Any, ...]) -> bool:
    """The call that follows when a run was found to be finished."""
    return name == "lease" and arguments[0] == 0


class Told(MemoryStore):
    """Remembers the states that a run had."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []

    async def transition(self, run_id: str, state: Any, **options: Any) -> Run:
        self.states.append(state)
        return await super().transition(run_id, state, **options)


async def session_of(store: MemoryStore, at: Callable[[str, tuple[Any, ...]], bool], page: str = "") -> Session:
    session = await Session.create(store, CONFIG, [CLOSED], BatchOptions(), caller="me", distributed=False)
    session.frontier = Rewinding(session.frontier, at, page=page)
    return session


# -- at the end of a run


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> AsyncIterator[dict[str, str]] | None:
        return None


async def test_a_worker_does_not_end_a_run_that_went_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'crawl.db'}"
    store = await SQLiteStore.open(tmp_path / "crawl.db")
    config = CONFIG.with_settings({"frontier": url, "robots.obey": False})
    await start_run(store, Pages(), config, urls=[CLOSED + "1"], run_id="run")
    await store.close()
    made: list[Rewinding] = []
    states: list[str] = []
    opens, moves = SQLiteStore.frontier, SQLiteStore.transition

    async def frontier(self: SQLiteStore, *arguments: Any) -> Any:
        made.append(Rewinding(await opens(self, *arguments), ending, page=CLOSED + "2"))
        return made[0]

    async def transition(self: SQLiteStore, run_id: str, state: Any, **options: Any) -> Run:
        states.append(state)
        return await moves(self, run_id, state, **options)

    monkeypatch.setattr(SQLiteStore, "frontier", frontier)
    monkeypatch.setattr(SQLiteStore, "transition", transition)
    monkeypatch.setattr(workers, "share_store", open_store)  # in this process, not in one of its own
    worker = Worker(Pages(), config, "run")
    async with asyncio.timeout(30):
        summary = await worker
    assert worker.error is None
    assert made[0].recovered == 1
    assert states == ["running", "finished", "running", "finished"]
    assert (summary.stats.pushed, summary.stats.remaining) == (2, 0)


async def test_a_local_batch_goes_on_when_its_store_went_back_at_the_end() -> None:
    store = Told()
    session = await session_of(store, ending, CLOSED + "again")
    await session.seed()
    async with asyncio.timeout(30):
        fetcher = SharedFetcher(CONFIG, ["127.0.0.0/8"])
        await LocalWork(CONFIG, fetcher, "me", 4).run(session)
        await fetcher.close()
    assert store.states == ["finished", "running", "finished"]
    assert (await session.frontier.stats()).remaining == 0
    assert (await session.frontier.stats()).pushed == 2


async def test_a_dispatcher_goes_on_when_its_store_went_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Told()
    session = await session_of(store, ending, CLOSED + "again")
    await session.seed()
    frontier = session.frontier
    dispatch = _Dispatch(session, CONFIG.with_settings({"frontier": "redis://127.0.0.1:1/0"}), CeleryWatch())

    async def step(stats: Any) -> None:
        for lease in (await frontier.lease(5, 60)).leases:
            await frontier.complete([Completion(lease=lease)])

    monkeypatch.setattr(dispatch, "_step", step)
    async with asyncio.timeout(30):
        await dispatch.run()
    assert store.states == ["finished", "running", "finished"]
    assert (await frontier.stats()).done == 2


# -- while a page is settled


async def test_a_task_of_celery_releases_its_page_when_the_store_went_back() -> None:
    """The store may have the page leased for it still; without a release nobody would fetch it before that ends."""
    session = await session_of(MemoryStore(), lambda name, arguments: name == "fail")
    await session.seed()
    runner = _TaskRunner(CONFIG, "me")
    frontier = session.frontier
    (sent,) = (await frontier.lease(1, 60)).leases
    found = _OpenSession(session, CONFIG, runner._fetcher(()), "me")
    found.users = 1
    runner._open[session.id] = found
    try:
        answer = await runner.work(session.id, sent)
        assert answer["state"] == "lost"
        assert (await frontier.stats()).leased == 0
        assert len((await frontier.lease(1, 60)).leases) == 1
    finally:
        found.renewal.cancel()
        await runner._fetcher(()).close()


async def test_seeding_a_session_leaves_recovery_to_its_engine() -> None:
    """The engine has more to forget than the seeder knows of."""
    session = await session_of(MemoryStore(), lambda name, arguments: name == "claim")
    with pytest.raises(StoreRewoundError):
        await session.seed()
    frontier = session.frontier
    assert isinstance(frontier, Rewinding)
    assert frontier.recovered == 0


# -- while the store is away


async def test_a_drainer_starts_over_when_the_store_is_back() -> None:
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
    inner = await store.frontier("run", FrontierOptions())
    frontier = Away(inner)
    written: list[dict[str, object]] = []
    drainer = Drainer(frontier, CollectSink(written), "x")
    await drainer.start()
    frontier.failures = 3
    async with asyncio.timeout(30):
        await drainer.start_over()
    assert frontier.failures == 0
    task = asyncio.create_task(drainer.run())
    await inner.push([Request(CLOSED)])
    (lease,) = (await inner.lease(1, 60)).leases
    await inner.complete([Completion(lease=lease, items=[encode_item({"n": 1})])])
    await drainer.finish(True)
    await task
    assert written == [{"n": 1}]


class Away:
    """A frontier whose server does not answer the next calls."""

    def __init__(self, inner: Frontier) -> None:
        self._inner = inner
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreAwayError("the server is away")
            return await method(*arguments, **options)

        return call
