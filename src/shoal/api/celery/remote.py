"""Distributed batches for the API. If Celery or its store is down, each request tries again.

Servers import this module also if Celery is not installed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.service import BatchService, Executor
from shoal.api.batch.urls import redacted
from shoal.api.celery.settings import celery_settings, distributed_frontier
from shoal.api.celery.watch import BrokerAwayError, CeleryWatch
from shoal.config import Config
from shoal.errors import ConfigError, FrontierError, ShoalError, StoreAwayError
from shoal.frontier import open_store
from shoal.messages import pip_install
from shoal.ports import Store

log = logging.getLogger("shoal.tasks")

_STATUS_TIMEOUT = 4.0  # seconds
_RETRY_EVERY = 5.0
_CLOSE_TIMEOUT = 2.0


class RemoteBatches:
    """Opens the store of distributed sessions, resumes the sessions in it, and watches the workers."""

    def __init__(self, config: Config, make_service: Callable[[Store, Executor], BatchService]) -> None:
        self._config = config
        self._settings = celery_settings()
        self._broker = self._settings.broker_url.partition(":")[0].capitalize()
        self._make_service = make_service
        self._watch = CeleryWatch()
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._background: list[asyncio.Task[None]] = []
        self.opened: BatchService | None = None

    @property
    def is_configured(self) -> bool:
        """Whether the environment names a broker, or the frontier is on a server."""
        return "CELERY_BROKER_URL" in os.environ or not self._config.frontier.startswith(("memory:", "sqlite:"))

    def start(self) -> None:
        """Open the store in the background, as it may have unfinished sessions."""
        if self.is_configured:
            self._background.append(asyncio.create_task(self._open_with_retries()))

    async def _open_with_retries(self) -> None:
        while self.opened is None:
            try:
                await self.service()
            except ConfigError:
                return
            except FrontierError:
                await asyncio.sleep(_RETRY_EVERY)

    async def service(self) -> BatchService:
        """The service for distributed batches. StoreAwayError while the store does not respond."""
        async with self._opening:
            if self.opened is None:
                dispatcher = _dispatcher(self._config, self._watch)
                store = await open_store(distributed_frontier(self._config, self._settings))
                service = self._make_service(store, dispatcher)
                await service.open()
                self._background.append(asyncio.create_task(self._watch.run()))
                self.opened, self._store = service, store
            return self.opened

    def with_defaults(self, options: BatchOptions) -> BatchOptions:
        """The caller's options, with the number of retries from Celery's settings if the caller sent none."""
        if "retries" in options.model_fields_set:
            return options
        return options.model_copy(update={"retries": min(10, self._settings.max_retries)})

    async def status(self) -> dict[str, object]:
        """Whether the store and the broker respond, and how many workers do."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT):
                await self.service()
                assert self._store is not None
                await self._store.run_state("none")
                workers = await self._watch.count_workers()
        except (BrokerAwayError, StoreAwayError, TimeoutError) as exc:
            log.debug("not available: %s", exc)
            message = f"{self._broker} not available"
        except ShoalError as exc:
            log.warning("not available: %s", exc)
            message = redacted(str(exc))
        else:
            return self._status(workers, f"{self._broker} connected")
        return {"distributed_available": False, "message": message, "workers": None}

    def last_status(self) -> dict[str, object]:
        """The last known status. It calls neither the store nor the broker."""
        if not self.is_configured and self.opened is None:
            message = "Celery is not configured: set CELERY_BROKER_URL, or use a frontier on Redis or PostgreSQL"
        elif self.workers is None:
            message = f"{self._broker} not available"
        else:
            message = f"{self._broker} connected"
        return self._status(self.workers, message)

    def _status(self, workers: int | None, message: str) -> dict[str, object]:
        members = self._watch.members
        return {
            "distributed_available": workers is not None,
            "message": message,
            "workers": workers,
            "members": members,
        }

    @property
    def workers(self) -> int | None:
        """How many workers replied to the last poll; None if unknown."""
        return self._watch.workers

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        if self.opened is not None:
            await self.opened.close()
        self._watch.close()
        if self._store is not None:
            with suppress(FrontierError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._store.close()


def _dispatcher(config: Config, watch: CeleryWatch) -> Executor:
    """Create the dispatcher. ConfigError if Celery is not installed."""
    try:
        from shoal.api.celery.dispatch import Dispatcher
    except ModuleNotFoundError as exc:
        raise ConfigError(f"distributed batches need {exc.name}; install it with: {pip_install('celery')}") from exc
    return Dispatcher(config, watch)


@asynccontextmanager
async def opened_service(config: Config) -> AsyncIterator[BatchService]:
    """Open batches on Celery workers, for a process that sends some and exits. It resumes no other sessions."""
    watch = CeleryWatch()
    dispatcher = _dispatcher(config, watch)
    store = await open_store(distributed_frontier(config))
    service = BatchService(store, dispatcher, config, distributed=True)
    watching = asyncio.create_task(watch.run())
    try:
        yield service
    finally:
        await service.close()
        watching.cancel()
        watch.close()
        await store.close()
