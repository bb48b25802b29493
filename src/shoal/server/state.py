"""What a server has open: its stores, its sessions, its connections."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any, cast

from fastapi import Request

from shoal.batch.admission import Desk, Work
from shoal.batch.local import LocalWork
from shoal.batch.session import Session
from shoal.batch.spider import BatchSpider
from shoal.batch.webhook import send_webhook
from shoal.config import Config, find_config_file, flatten, load_config, mask
from shoal.crawling.stats import Vitals
from shoal.errors import FrontierError, StoreAwayError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http import HttpFetcher
from shoal.frontier import open_store
from shoal.ports import Store
from shoal.runs.orchestrator import Orchestrator
from shoal.runs.worker import new_worker_id
from shoal.server.jobs import Jobs
from shoal.tasks.remote import Remote

log = logging.getLogger("shoal.server")

_ASKING = 2.0  # seconds that a look at a server may take


class Server:
    """One process of the API. What it can't reach now it tries again when it is asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._given = _beside_the_layers(config)
        self.worker_id = new_worker_id()
        self.started = time.time()
        self.fetcher = HttpFetcher(config.http, config.user_agent, AddressGuard(config.serve.allow))
        self.store: Store
        self.jobs: Jobs
        self.local: Desk
        self.work: LocalWork
        self.remote = Remote(config, partial(self._desk, distributed=True))

    async def open(self) -> None:
        config = self.config
        self.store = await open_store(config.frontier)
        self.jobs = Jobs(self.store, AddressGuard(config.serve.allow), config.serve.max_sessions)
        self.work = LocalWork(config, self.fetcher, self.worker_id, config.serve.max_in_flight)
        self.local = self._desk(self.store, self.work, distributed=False)
        await self.local.open()
        self.remote.begin()

    def _desk(self, store: Store, work: Work, *, distributed: bool) -> Desk:
        serve = self.config.serve
        return Desk(
            store, work, self.config, distributed=distributed, max_sessions=serve.max_sessions,
            keep=serve.keep_results, told=lambda session: send_webhook(self.fetcher, session),
        )  # fmt: skip

    def orchestrator(self) -> Orchestrator:
        """The registry as it is now. Its spiders have the settings that they have anywhere, under those that this
        server was given beside the file and the environment; their frontier is the server's."""
        return Orchestrator(frontier=self.config.frontier, settings=self._given)

    def frontier_to_name(self) -> str | None:
        """What a worker has to be told that does not find the frontier by itself. Its password is never told."""
        return mask(self.config.frontier) if "frontier" in self._given else None

    async def find_session(self, session_id: str) -> Session | None:
        found = await self.local.find(session_id)
        if found is None and (self.remote.opened is not None or self.remote.is_meant):
            found = await (await self.remote.desk()).find(session_id)
        return found

    def vitals(self) -> Vitals:
        """What it has done, of batches that are its own to work on."""
        return Vitals(
            worker=self.worker_id, run_id="batch local", spider=BatchSpider.name, counters=self.work.counters,
            in_flight=self.work.in_flight, looped_at=time.monotonic(),  # it answers, so its loop does
        )  # fmt: skip

    async def is_ready(self) -> str:
        """What keeps it from working, or nothing."""
        try:
            async with asyncio.timeout(_ASKING):
                await self.store.run_state("none")
        except (StoreAwayError, TimeoutError) as exc:
            log.warning("not ready: %s", str(exc) or "no answer in time")
            return "the frontier does not answer"
        return ""

    def leave(self) -> None:
        """It is about to close: nobody is kept waiting."""
        for desk in (self.local, self.remote.opened):
            if desk is not None:
                desk.leave()

    async def close(self) -> None:
        await self.jobs.close()
        await self.local.close()
        await self.remote.close()
        await self.fetcher.close()
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout(_ASKING):
                await self.store.close()


def _beside_the_layers(config: Config) -> dict[str, Any]:
    """What it has that neither the file nor the environment says: from the command line, or from code."""
    plain = flatten(load_config(file=find_config_file(os.environ), environ=os.environ).config, reveal=True)
    return {key: value for key, value in flatten(config, reveal=True).items() if value != plain[key]}


def server_of(request: Request) -> Server:
    return cast(Server, request.app.state.server)
