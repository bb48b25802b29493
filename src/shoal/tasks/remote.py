"""Celery as a server of the API sees it: there or not, and tried again whenever it is asked for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.batch.admission import Desk, Work
from shoal.batch.options import BatchOptions
from shoal.batch.redaction import redacted
from shoal.config import Config
from shoal.errors import ConfigError, FrontierError, ShoalError, StoreAwayError
from shoal.frontier import open_store
from shoal.ports import Store
from shoal.tasks.settings import celery_settings, distributed_frontier
from shoal.tasks.watch import BrokerAwayError, CeleryWatch

log = logging.getLogger("shoal.tasks")

_ASKING = 4.0  # seconds that a look at the servers may take
_TRY_EVERY = 5.0
_CLOSING = 2.0


class Remote:
    """Opens the sessions' store, goes on with what an earlier process left there, and watches the workers."""

    def __init__(self, config: Config, make_desk: Callable[[Store, Work], Desk]) -> None:
        self._config = config
        self._settings = celery_settings()
        self._broker = self._settings.broker_url.partition(":")[0].capitalize()
        self._make_desk = make_desk
        self._watch = CeleryWatch()
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._helpers: list[asyncio.Task[None]] = []
        self.opened: Desk | None = None

    @property
    def is_meant(self) -> bool:
        """Whether somebody has said where it is."""
        return "CELERY_BROKER_URL" in os.environ or not self._config.frontier.startswith(("memory:", "sqlite:"))

    def begin(self) -> None:
        """Look for it in the background: sessions may be waiting there."""
        if self.is_meant:
            self._helpers.append(asyncio.create_task(self._try()))

    async def _try(self) -> None:
        while self.opened is None:
            try:
                await self.desk()
            except ConfigError:
                return
            except FrontierError:
                await asyncio.sleep(_TRY_EVERY)

    async def desk(self) -> Desk:
        """Where batches for Celery go. StoreAwayError while the store can't be reached."""
        async with self._opening:
            if self.opened is None:
                try:
                    from shoal.tasks.dispatch import Dispatcher
                except ModuleNotFoundError as exc:
                    raise ConfigError(f"it needs {exc.name}; install it with: pip install 'shoal[celery]'") from exc
                store = await open_store(distributed_frontier(self._config, self._settings))
                desk = self._make_desk(store, Dispatcher(self._config, self._watch))
                await desk.open()
                self._helpers.append(asyncio.create_task(self._watch.run()))
                self.opened, self._store = desk, store
            return self.opened

    def with_defaults(self, options: BatchOptions) -> BatchOptions:
        """What the caller did not say is as those who run Celery have set it."""
        if "retries" in options.model_fields_set:
            return options
        return options.model_copy(update={"retries": min(10, self._settings.max_retries)})

    async def status(self) -> dict[str, Any]:
        """Whether the store and the broker answer, and how many workers do."""
        try:
            async with asyncio.timeout(_ASKING):
                await self.desk()
                assert self._store is not None
                await self._store.run_state("none")
                workers = await self._watch.look()
        except (BrokerAwayError, StoreAwayError, TimeoutError) as exc:
            log.debug("not available: %s", exc)
            return {"distributed_available": False, "message": f"{self._broker} not available", "workers": None}
        except ShoalError as exc:
            log.warning("not available: %s", exc)
            return {"distributed_available": False, "message": redacted(str(exc)), "workers": None}
        return {"distributed_available": True, "message": f"{self._broker} connected", "workers": workers}

    @property
    def workers(self) -> int | None:
        """How many there were at the last look; None if nobody knows."""
        return self._watch.workers

    async def close(self) -> None:
        for helper in self._helpers:
            helper.cancel()
        if self.opened is not None:
            await self.opened.close()
        self._watch.close()
        if self._store is not None:
            with suppress(FrontierError, TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await self._store.close()
