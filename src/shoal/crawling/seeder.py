"""Pushes the start requests of a run exactly once, even if the process that does it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import TypeAlias, cast

from shoal.config import Config
from shoal.crawling.leases import Persistence
from shoal.crawling.run_queue import RunQueue
from shoal.crawling.stats import Counters
from shoal.errors import FrontierError, QueueFullError, RequestError, SpiderError, describe
from shoal.http import Request
from shoal.ports import Claim, Pushed
from shoal.spider import Spider
from shoal.system import chance, clock

log = logging.getLogger("shoal.seeder")

Source: TypeAlias = Callable[[], AsyncIterator[Request | RequestError]]
"""Yields the start requests, always the same ones in the same order. For an invalid URL it yields the error."""

_BATCH = 500
_FLUSH_EVERY = 0.1  # seconds that requests of a slow start() wait at most
_FULL_WAIT = 0.05
_CLAIM_POLL = 1.0
_ROLE_TTL = 60.0  # seconds without a renewal after which a seeder counts as dead
_RELEASE_TIMEOUT = 1.0
_CHECK_EVERY = 20.0  # seconds between checks that seeding is still finished
_LOGGED = 10  # bad start URLs that are logged one by one


class RoleLostError(FrontierError):
    """Another process has taken over pushing the start requests of this run."""


class Seeder:
    """Holds the ``seed`` role of the run. The cursor of the role counts the requests of the source that were pushed; it
    is stored in the same step as each batch."""

    def __init__(
        self,
        source: Source | None,
        queue: RunQueue,
        config: Config,
        counters: Counters,
        persist: Persistence,
        pushed: Callable[[], None] = lambda: None,
        *,
        shared: bool = False,
    ) -> None:
        """``source`` None: another process seeds. ``pushed`` is called after each batch. ``shared``: another process
        may hold the role, and die."""
        self._source = source
        self._persist = persist
        self._shared = shared
        self._scope = queue.scope
        self._queue = queue
        self._frontier = queue.frontier
        self._ttl = min(_ROLE_TTL, config.lease.ttl)
        self._size = min(_BATCH, config.queue.max_size or _BATCH)
        self._counters = counters
        self._pushed = pushed
        self._claim: Claim | None = None
        self.position = 0
        """How many start requests are stored in the frontier, or were out of scope."""
        self.added = self.duplicates = self.out_of_scope = 0
        """Counts of the requests that this seeder pushed."""
        self._batch: list[Request] = []
        self._pushing = asyncio.Lock()
        self._bad_url: RequestError | None = None
        """The first one among the start requests."""
        self.failure: SpiderError | None = None
        """The error of ``start``. Requests before it are crawled, and the run stays unfinished."""

    async def start_over(self) -> None:
        """The store went back in time: drop the position, and release the role if it is still held."""
        claim, self._claim = self._claim, None
        self._batch = []
        self.position = 0
        if claim is not None:
            await self._persist(lambda: self._frontier.relinquish(claim))

    async def keep(self) -> None:
        """Seed, and then check from time to time that seeding is still finished: a store that went back in time may
        have lost the last start requests. Never returns where other processes use the store too."""
        await self.run()
        while self._shared and self._source is not None and self.failure is None:
            await asyncio.sleep(_CHECK_EVERY)
            if (await self._persist(self._frontier.stats)).seeding:
                log.warning("the store has lost start requests: seeding resumes")
                await self.run()

    async def run(self) -> None:
        """Push the requests after the stored cursor. While another process holds the role, wait until it has finished
        or died."""
        if self._source is None:
            return
        logged = False
        while True:
            claiming = partial(self._frontier.claim, "seed", self._ttl, nonce=chance.token_bytes(16))
            self._claim = await self._persist(claiming)
            if self._claim is not None:
                try:
                    await self._seed(self._source)
                    return
                except RoleLostError as error:
                    log.warning("%s", error)
                    self._batch = []
            if not self._shared or not (await self._persist(self._frontier.stats)).seeding:
                return
            if not logged:
                logged = True
                log.info("another process holds the seed role; retrying for %g s", self._ttl)
            await asyncio.sleep(_CLAIM_POLL)

    async def _seed(self, source: Source) -> None:
        assert self._claim is not None
        self.position = skip = self._claim.position
        ended = asyncio.Event()
        timer = asyncio.create_task(self._flush_in_time(ended))
        try:
            async for request in source():
                if isinstance(request, RequestError):
                    self._log_bad_url(request)
                elif skip:
                    skip -= 1
                else:
                    self._batch.append(request)
                    if len(self._batch) >= self._size:
                        await self._flush()
        except SpiderError as error:
            self.failure = error
        except asyncio.CancelledError:
            timer.cancel()  # so that it pushes nothing more once the role is released
            await asyncio.gather(timer, return_exceptions=True)
            await self._leave()
            raise
        finally:
            ended.set()
            if not timer.cancelled():
                await timer
        await self._flush()
        if self.failure is None and not (await self._persist(self._frontier.stats)).pushed:
            log.warning("nothing to crawl: %s", self.why_nothing)
        claim, self._claim = self._claim, None
        await self._persist(lambda: self._frontier.relinquish(claim, finished=self.failure is None))
        self._pushed()

    @property
    def why_nothing(self) -> str:
        """Why no start request was pushed, if none was. Empty if another process seeds."""
        if self._source is None:
            return ""
        if self._bad_url is not None and not self.position:
            count = self._counters.errors["bad url"]
            which = "the only start URL is wrong" if count == 1 else f"all {count} start URLs are wrong, for example"
            return f"{which}: {self._bad_url}"
        return "none of the start requests is in scope" if self.position else "the spider has no start requests"

    def _log_bad_url(self, error: RequestError) -> None:
        self._bad_url = self._bad_url or error
        self._counters.errors["bad url"] += 1
        count = self._counters.errors["bad url"]
        if count <= _LOGGED:
            log.error("start: %s", error)
        elif count == _LOGGED + 1:
            log.error("start: further bad URLs are only counted")

    async def _leave(self) -> None:
        """Release the role, so that the next seeder need not wait until it expires."""
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                if self._claim is not None:
                    await self._frontier.relinquish(self._claim)

    async def _flush_in_time(self, ended: asyncio.Event) -> None:
        """Push requests of a slow ``start`` in time, and keep the role while ``start`` yields nothing."""
        renew_at = clock.monotonic() + self._ttl / 3
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _FLUSH_EVERY)
            if self._batch:
                await self._flush()
                renew_at = clock.monotonic() + self._ttl / 3
            elif clock.monotonic() >= renew_at and self._claim is not None:
                async with self._pushing:
                    await self._renew_role()
                renew_at = clock.monotonic() + self._ttl / 3

    async def _flush(self) -> None:
        """Push the collected requests. Waits while the queue is full."""
        async with self._pushing:
            batch, self._batch = self._batch, []
            inside = [request for request in batch if self._scope.refuses(request.url) is None]
            try:
                pushed = await self._push(inside, b"%d" % (self.position + len(batch)))
            except BaseException:
                self._batch[:0] = batch  # the next batch must not move the cursor past it
                raise
            self.position += len(batch)
            self.added += pushed.added
            self.duplicates += pushed.duplicates
            self.out_of_scope += len(batch) - len(inside)
            self._counters.out_of_scope += len(batch) - len(inside)
        self._pushed()
        await asyncio.sleep(0)  # a start() that never waits must not block the crawl

    async def _push(self, requests: list[Request], cursor: bytes) -> Pushed:
        claim = self._claim
        assert claim is not None
        duplicates = await self._queue.look_up(requests)
        while True:
            try:
                pushed = await self._persist(lambda: self._frontier.push(requests, seed=claim, cursor=cursor))
                await self._queue.log_pushed(requests, duplicates)
                break
            except QueueFullError:
                await asyncio.sleep(_FULL_WAIT)
                await self._renew_role()
        self._claim = claim.moved_to(cursor)
        await self._renew_role()  # raises if the role was lost; then nothing was pushed
        return pushed

    async def _renew_role(self) -> None:
        claim = self._claim
        assert claim is not None
        if not await self._persist(lambda: self._frontier.advance(claim, claim.cursor, self._ttl)):
            raise RoleLostError("another process has taken over pushing the start requests of this run")


async def start_requests(spider: Spider) -> AsyncIterator[Request | RequestError]:
    """The requests of ``start``, which may be a generator, an async generator, a list, or a coroutine that returns one.

    For an invalid URL it yields the error, and continues. All other failures are a SpiderError.
    """
    try:
        requests: object = spider.start()
        if isawaitable(requests):
            requests = await requests
        if isinstance(requests, AsyncIterator):
            async for request in requests:
                yield _start_request(request)
        else:
            for request in cast("Iterable[object]", requests or ()):
                yield _start_request(request)
    except SpiderError:
        raise
    except Exception as exc:  # the user's code may raise anything
        raise SpiderError(f"start() failed: {describe(exc)}") from exc


async def url_requests(urls: Iterable[str | Request]) -> AsyncIterator[Request | RequestError]:
    """The start requests of a list of URLs."""
    for url in urls:
        yield _start_request(url)


def _start_request(value: object) -> Request | RequestError:
    if isinstance(value, str):
        try:
            return Request(value)
        except RequestError as error:
            return error
    if not isinstance(value, Request):
        raise SpiderError(f"start() returned a {type(value).__name__}; it must return Request objects or URLs")
    return value
