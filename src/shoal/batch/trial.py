"""Tries one URL as a batch of its own: in this process, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from shoal.batch.local_work import LocalWork
from shoal.batch.options import BatchOptions
from shoal.batch.results import Result, SessionResults
from shoal.batch.service import BatchService
from shoal.config import Config
from shoal.crawling.shared_fetcher import SharedFetcher
from shoal.frontier.memory import MemoryStore
from shoal.runs.worker_session import new_worker_id

_EVERYWHERE = ("0.0.0.0/0", "::/0")


@asynccontextmanager
async def private_service(config: Config) -> AsyncIterator[BatchService]:
    """Batches of the user of this process, in memory. Unlike a server, it may contact every address, and render."""
    config = replace(config, serve=replace(config.serve, allow=_EVERYWHERE, render=True))
    fetcher = SharedFetcher(config, _EVERYWHERE)
    work = LocalWork(config, fetcher, new_worker_id(), config.serve.max_in_flight)
    service = BatchService(MemoryStore(), work, config, distributed=False)
    try:
        yield service
    finally:
        await service.close()
        await fetcher.close()


async def try_url(service: BatchService, url: str, options: BatchOptions, seconds: float) -> Result:
    """The result of one URL. After ``seconds`` without one, the batch is cancelled."""
    session = await service.create([url], options, caller="")
    await session.wait(seconds)
    if not await session.is_over():
        await service.cancel(session)
    entries = await anext((await SessionResults(session).read_all()).portions)
    return entries[0].decode(True)
