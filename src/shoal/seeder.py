"""Pushes a spider's start requests, once, however often the process that does it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from shoal.callbacks import describe
from shoal.config import Config
from shoal.errors import FrontierError, QueueFullError, RequestError, SpiderError
from shoal.events import Counters
from shoal.http import Request
from shoal.ports import Claim
from shoal.scheduler import Scheduler
from shoal.spider import Spider

log = logging.getLogger("shoal.seeder")

_BATCH = 500
_EVERY = 0.1  # seconds that what a slow start() gave is held back at most
_FULL_WAIT = 0.05


class Seeder:
    """Holds the run's ``seed`` role. Its cursor counts what ``start`` gave, and is saved with each batch."""

    def __init__(
        self, spider: Spider, scheduler: Scheduler, config: Config, counters: Counters, pushed: Callable[[], None]
    ) -> None:
        """``pushed`` is called after each batch."""
        self._spider = spider
        self._scope = scheduler.scope
        self._frontier = scheduler.frontier
        self._ttl = config.lease.ttl
        self._size = min(_BATCH, config.queue.max_size or _BATCH)
        self._counters = counters
        self._pushed = pushed
        self._claim: Claim | None = None
        self._position = 0
        self._batch: list[Request] = []
        self._pushing = asyncio.Lock()
        self.failure: SpiderError | None = None
        """What ``start`` failed with. What it gave before is crawled; the run stays unfinished."""

    async def run(self) -> None:
        """Go on behind the cursor that an earlier seeder left; nothing if another has the role, or is done."""
        self._claim = await self._frontier.claim("seed", self._ttl)
        if self._claim is None:
            return
        self._position = skip = int(self._claim.cursor or b"0")
        ended = asyncio.Event()
        timer = asyncio.create_task(self._flush_in_time(ended))
        try:
            async for request in _start_requests(self._spider):
                if isinstance(request, RequestError):
                    self._counters.errors["bad url"] += 1
                    log.error("start: %s", request)
                elif skip:
                    skip -= 1
                else:
                    self._batch.append(request)
                    if len(self._batch) >= self._size:
                        await self._flush()
        except SpiderError as error:
            self.failure = error
        finally:
            ended.set()
            await timer
        await self._flush()
        if self.failure is None and not (await self._frontier.stats()).pushed:
            why = "none of the start requests is in scope" if self._position else "the spider has no start requests"
            log.warning("nothing to crawl: %s", why)
        await self._frontier.relinquish(self._claim, finished=self.failure is None)
        self._pushed()

    async def _flush_in_time(self, ended: asyncio.Event) -> None:
        """What a slow ``start`` gave is not held back."""
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _EVERY)
            if self._batch:
                await self._flush()

    async def _flush(self) -> None:
        """Push what was collected, and wait for room if need be."""
        async with self._pushing:
            assert self._claim is not None
            batch, self._batch = self._batch, []
            inside = [request for request in batch if self._scope.refuses(request.url) is None]
            self._counters.out_of_scope += len(batch) - len(inside)
            cursor = b"%d" % (self._position + len(batch))
            while True:
                try:
                    await self._frontier.push(inside, seed=self._claim, cursor=cursor)
                    break
                except QueueFullError:
                    await asyncio.sleep(_FULL_WAIT)
                    await self._frontier.advance(self._claim, b"%d" % self._position, self._ttl)
            if not await self._frontier.advance(self._claim, cursor, self._ttl):
                raise FrontierError("another process has taken over pushing the start requests of this run")
            self._position += len(batch)
        self._pushed()
        await asyncio.sleep(0)  # a start() that never waits must not keep its own pages from being fetched


async def _start_requests(spider: Spider) -> AsyncIterator[Request | RequestError]:
    """What ``start`` gives: a generator of either kind, a list, or a coroutine that gives one of them.

    A URL that is none comes as the error: it costs only itself. Whatever else goes wrong is a SpiderError.
    """
    try:
        requests: Any = spider.start()
        if isawaitable(requests):
            requests = await requests
        if isinstance(requests, AsyncIterator):
            async for request in requests:
                yield _start_request(request)
        else:
            for request in requests or ():
                yield _start_request(request)
    except SpiderError:
        raise
    except Exception as exc:  # whatever the user's code raises
        raise SpiderError(f"start() failed: {describe(exc)}") from exc


def _start_request(given: object) -> Request | RequestError:
    if isinstance(given, str):
        try:
            return Request(given)
        except RequestError as error:
            return error
    if not isinstance(given, Request):
        raise SpiderError(f"start() gave a {type(given).__name__}; it must give Request objects or URLs")
    return given
