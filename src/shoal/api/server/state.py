"""The state of the server: stores, batch sessions, connections."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request
from msgspec import Struct

from shoal.api.batch.local_work import LocalWork
from shoal.api.batch.service import BatchService, Executor, SessionSummary, send_webhook
from shoal.api.batch.session import Session
from shoal.api.batch.spider import BatchSpider
from shoal.api.celery.remote import RemoteBatches
from shoal.api.dashboard.attention import Attention, SharedSnapshot
from shoal.api.dashboard.live import LiveViews
from shoal.api.server.budgets import AnswerBudgets, Budget
from shoal.api.server.jobs import Jobs, ScheduledRuns
from shoal.api.server.logins import Logins
from shoal.config import Config, find_config_file, flatten, load_config, mask
from shoal.crawling.onion import SharedFetcher
from shoal.crawling.stats import Vitals
from shoal.errors import FrontierError, ShoalError, StoreAwayError
from shoal.frontier import join_store, open_store
from shoal.frontier.memory import MemoryStore
from shoal.operations.charts import SpeedHistory
from shoal.operations.notifications.watcher import Notifications
from shoal.operations.problem import Problem
from shoal.operations.problems import store_away
from shoal.operations.schedules.definitions import read_file
from shoal.operations.schedules.runner import ScheduleRunner
from shoal.operations.schedules.schedule import Definition
from shoal.operations.schedules.service import Schedules
from shoal.operations.snapshot import SnapshotTaker
from shoal.ports import Run, RunState, Store
from shoal.runs.crawl import open_served
from shoal.runs.orchestrator import Orchestrator
from shoal.runs.worker_session import new_worker_id
from shoal.system import clock

T = TypeVar("T")

_LIMIT = 300


class TimedCache:
    """Keeps each value for some seconds. Concurrent readers of a key share one call of ``make``."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[T]]) -> T:
        """The value of a key, from ``make`` if it is older than ``seconds``. Errors of ``make`` are not cached."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            made_at, value = self._values.get(key, (-seconds, None))
            if clock.monotonic() - made_at >= seconds or key not in self._values:
                value = await make()
                self._values.pop(key, None)
                self._values[key] = (clock.monotonic(), value)
                while len(self._values) > _LIMIT:
                    oldest = next(iter(self._values))
                    del self._values[oldest]
                    if oldest in self._locks and not self._locks[oldest].locked():
                        del self._locks[oldest]
            fresh: T = value
            return fresh


log = logging.getLogger("shoal.server")

_STORE_TIMEOUT = 2.0  # seconds for a check of the store, and for closing it
_OPEN_STREAMS = 500  # of batches, and of the dashboard
_OPEN_ANSWERS = 128  # large ones that clients are reading
_ANSWER_BYTES = 128 << 20  # of large results that are being sent, decoded
_WHOLE_BYTES = 64 << 20  # of answers that are sent at once
_BODY_BYTES = 64 << 20  # of all bodies that are being read
_PROBLEMS_FRESH = 5.0  # seconds


OVERRIDDEN = "command line or code"
"""Source of settings that come neither from the file nor from the environment."""


class SettingInForce(Struct, frozen=True):
    """A setting of the server."""

    key: str
    """Dotted key, as in `shoal.toml` and `--set`."""
    value: object
    """The value in force. Secrets are masked."""
    source: str
    """`default`, a file, an environment variable, or `command line or code`."""


class Server:
    """One process of the API. If a store or broker is unreachable, the next request that needs it tries again."""

    def __init__(self, config: Config, notifications: Notifications, *, ui_only: bool = False) -> None:
        """``ui_only``: see `shoal.api.server.app.create_app`."""
        config.refuse_tor("the API")
        self.config = config
        self.notifications = notifications
        self.ui_only = ui_only
        self.views = LiveViews()
        self.streams = Budget("open streams", _OPEN_STREAMS // 5, _OPEN_STREAMS)
        self.answers = AnswerBudgets(
            open=Budget("open answers", _OPEN_ANSWERS // 4, _OPEN_ANSWERS),
            decoded=Budget("bytes of results", _ANSWER_BYTES // 2, _ANSWER_BYTES),
            whole=Budget("bytes of answers", _WHOLE_BYTES // 2, _WHOLE_BYTES),
            turn=asyncio.Lock(),
        )
        largest = config.serve.max_request_bytes
        self.bodies = Budget("bytes of large bodies", max(_BODY_BYTES // 2, largest), max(_BODY_BYTES, 2 * largest))
        self.cache = TimedCache()
        self._overrides, self._sources = _find_overrides(config)
        self.worker_id = new_worker_id()
        self.fetcher = SharedFetcher(config, config.serve.allow)
        self._opened = AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []
        self.remote = RemoteBatches(config, partial(self._make_service, distributed=True))

    async def open(self) -> None:
        config = self.config
        self.store = await self._open_store()
        self.logins = Logins(self.store)
        self.snapshots = SharedSnapshot(SnapshotTaker(self.store, config, without=[BatchSpider.name]))
        self.speed_history = SpeedHistory(self.store, config.project_name, without=[BatchSpider.name])
        self.jobs = Jobs(self.store, config.serve.allow, config.serve.max_sessions)
        self.work = LocalWork(config, self.fetcher, self.worker_id, config.serve.max_in_flight)
        self.local = self._make_service(self.store, self.work, distributed=False)
        self.schedules = Schedules(self.store, config.project_name)
        self.scheduled_runs = ScheduledRuns(self.schedules, self.jobs, config, self.orchestrator)
        self.schedule_runner = ScheduleRunner(self.schedules, self.scheduled_runs)
        self.scheduled_runs.on_ended = self.schedule_runner.wake
        self.attention = Attention(self.store, config, self.notifications, self.schedules, without=[BatchSpider.name])
        if not self.ui_only:
            await self.local.open()
            self.remote.start()
            self.notifications.start(self.store, self.worker_id, without=(BatchSpider.name,))
            if (defined := schedules_of_file()) is not None:
                file = f"{socket.gethostname()}:{os.path.realpath(find_config_file(os.environ) or '')}"
                await self.schedules.load(defined, file)
            self._loops.append(asyncio.create_task(self.schedule_runner.run()))

    async def _open_store(self) -> Store:
        """Open the store. If it is in memory or in a file, commands of this machine use it through a socket."""
        url = self.config.frontier
        if not self.ui_only and url.startswith(("memory:", "sqlite:")):
            opened = (await open_served(url, "server", self._opened)).store
            if isinstance(opened, MemoryStore):
                opened.item_space.limit = self.config.serve.max_memory_bytes
            return opened
        store = await (join_store if self.ui_only else open_store)(url)
        self._opened.push_async_callback(store.close)
        return store

    def _make_service(self, store: Store, executor: Executor, *, distributed: bool) -> BatchService:
        return BatchService(
            store,
            executor,
            self.config,
            distributed=distributed,
            notify=lambda session: send_webhook(self.fetcher.http.limited_to(self.config.http.max_body_bytes), session),
        )

    @property
    def _services(self) -> list[BatchService]:
        """The services of batches that are open."""
        return [self.local] if self.remote.opened is None else [self.local, self.remote.opened]

    def orchestrator(self) -> Orchestrator:
        """The current registry. Its spiders use the server's frontier and the settings that were passed to the server
        on the command line or in code."""
        return Orchestrator(frontier=self.config.frontier, settings=self._overrides)

    def settings(self) -> list[SettingInForce]:
        """Every setting with its value and its source. Secrets are masked."""
        return [
            SettingInForce(key, value, OVERRIDDEN if key in self._overrides else self._sources.get(key, "default"))
            for key, value in flatten(self.config).items()
        ]

    def flags_for_workers(self) -> list[str]:
        """The frontier's URL without its password, if workers do not find it in the file or the environment."""
        return ["--frontier", mask(self.config.frontier)] if "frontier" in self._overrides else []

    async def list_runs(
        self, spider: str | None = None, *, states: Sequence[RunState] | None = None, limit: int | None = None
    ) -> list[Run]:
        """The runs of the project, newest first, without batches: each of those belongs to its caller. ``limit``: of
        both together."""
        runs = await self.store.list_runs(spider, self.config.project_name, states=states, limit=limit)
        return [run for run in runs if run.spider != BatchSpider.name]

    async def get_run(self, run_id: str) -> Run | None:
        """A run of the project. None for a batch."""
        run = await self.store.get_run(run_id)
        is_own = run is not None and run.spider != BatchSpider.name and run.project == self.config.project_name
        return run if is_own else None

    async def find_session(self, session_id: str) -> Session | None:
        session = await self.local.find(session_id)
        if session is None and (self.remote.opened is not None or self.remote.is_configured):
            session = await (await self.remote.service()).find(session_id)
        return session

    async def list_sessions(self, caller: str | None, limit: int) -> list[SessionSummary]:
        """The newest sessions of a caller, local and distributed, or those of all callers with None."""
        sessions = {
            session.session_id: session for service in self._services for session in await service.list(caller, limit)
        }
        return sorted(sessions.values(), key=lambda session: -session.created_at)[:limit]

    async def check_rendering(self, *, distributed: bool) -> None:
        """BrowserError if this server cannot start its browser, RequestError if it does not render pages. The browsers
        of Celery workers are not known: a page that they cannot render fails."""
        if distributed:
            self.fetcher.check_allowed()
        else:
            await self.fetcher.open_browser()

    async def current_problems(self) -> list[Problem]:
        """What needs attention now, as of some seconds ago. If that cannot be read, that is the problem."""
        snapshot = await self.snapshots.get()
        try:
            return await self.cache.get("problems", _PROBLEMS_FRESH, lambda: self.attention.find(snapshot))
        except ShoalError as exc:
            return [store_away(clock.time(), str(exc))]

    def vitals(self) -> Vitals:
        """Counters of the local batches."""
        return Vitals(
            worker=self.worker_id,
            run_id="batch local",
            spider=BatchSpider.name,
            counters=self.work.counters,
            in_flight=self.work.in_flight,
            looped_at=clock.monotonic(),  # the event loop runs: it serves this request
        )

    async def why_not_ready(self) -> str:
        """Return why the server is not ready, or an empty string."""
        try:
            async with asyncio.timeout(_STORE_TIMEOUT):
                await self.store.run_state("none")
                for service in self._services:
                    if await service.is_full():
                        return "the store has no room for more results"
        except (StoreAwayError, TimeoutError) as exc:
            log.warning("not ready: %s", str(exc) or "the store did not respond in time")
            return "the frontier does not respond"
        return ""

    def stop_waiting(self) -> None:
        """Respond to all callers that wait for a session: the server shuts down."""
        self.views.stop()
        for service in self._services:
            service.stop_waiting()

    async def close(self) -> None:
        await self.notifications.close()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        with suppress(FrontierError, TimeoutError):  # then the others notice it a minute later
            async with asyncio.timeout(_STORE_TIMEOUT):
                await self.schedules.declarations.leave()
        await self.jobs.close()
        await self.scheduled_runs.close()
        await self.local.close()
        await self.remote.close()
        await self.fetcher.close()
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout(_STORE_TIMEOUT):
                await self._opened.aclose()


def schedules_of_file() -> dict[str, Definition] | None:
    """The schedules of the shoal.toml in use; None without a file. ConfigError if one is invalid."""
    file = find_config_file(os.environ)
    return None if file is None else read_file(file)


def _find_overrides(config: Config) -> tuple[dict[str, object], dict[str, str]]:
    """The settings that come neither from the file nor from the environment, but from the command line or code; and
    the sources of the others."""
    loaded = load_config(file=find_config_file(os.environ), environ=os.environ)
    plain = flatten(loaded.config, reveal=True)
    changed = {key: value for key, value in flatten(config, reveal=True).items() if value != plain[key]}
    return changed, loaded.sources


def server_of(request: Request) -> Server:
    return cast(Server, request.app.state.server)
