"""The loop: lease, fetch, parse, complete. Read it from top to bottom.

`Engine.run` starts the helpers (seeder, renewer, drainers) and pumps: what has been worked on is settled with the
frontier in one batch, free places are filled with new leases, and each lease is a task of its own. No task waits for
anything but its own page: delays, backoff and blocks are waited for in the frontier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct

from shoal.callbacks import Callbacks, Found, describe
from shoal.config import Config
from shoal.errors import FetchError, FrontierError, RequestError, ShoalError, SpiderError
from shoal.events import Counters, Snapshot
from shoal.http import Request, Response
from shoal.links import host_of, join_url
from shoal.middleware import Postponed
from shoal.middleware.retry import RetryPolicy
from shoal.ports import Completion, Failure, Fetch, Frontier, Lease
from shoal.scheduler import Admitted, Scheduler
from shoal.seeder import Seeder
from shoal.spider import Spider

log = logging.getLogger("shoal.engine")

T = TypeVar("T")

_MAX_LAG = 50_000  # items that the slowest drainer may be behind before leasing pauses
_COMMIT_TRIES = 5
_SECRETS = frozenset({"authorization", "cookie", "proxy-authorization"})
_OF_THE_BODY = frozenset({"content-type", "content-length", "content-encoding"})


class Drain(Protocol):
    """What the engine needs of a drainer: it is started and finished by whoever made it."""

    @property
    def position(self) -> int: ...

    def nudge(self) -> None: ...

    async def run(self) -> None: ...


class Released(Struct):
    """A lease that goes back unused."""

    lease: Lease
    contacted: bool


class Parsed(Struct):
    """A page that was handled, with what the scheduler has to learn once it is committed."""

    completion: Completion
    admitted: Admitted


Settlement: TypeAlias = Parsed | Failure | Released


class Engine:
    """Crawls one run with one spider until it is finished, asked to stop, or has failed."""

    def __init__(
        self,
        spider: Spider,
        config: Config,
        scheduler: Scheduler,
        fetch: Fetch,
        drains: Sequence[Drain] = (),
        *,
        keep_items: bool = True,
    ) -> None:
        """``keep_items``: the item log stays after all drains have passed it."""
        self.counters = Counters()
        self._config = config
        self._scheduler = scheduler
        self._frontier: Frontier = scheduler.frontier
        self._fetch = fetch
        self._drains = drains
        self._retry = RetryPolicy(config.retry)
        self._handled = frozenset(spider.handle_statuses)
        self._callbacks = Callbacks(spider, self.counters)
        self._seeder = Seeder(spider, scheduler, config, self.counters, self._wake)
        self._active: dict[asyncio.Task[None], Lease] = {}
        self._settled: list[Settlement] = []
        self._helpers: list[asyncio.Task[None]] = []
        self._waker: asyncio.Future[None] | None = None
        self._keep_items = keep_items
        self._logged_before = 0
        self._failure: BaseException | None = None
        self._woken = False
        self.stopping = False

    # -- the loop

    async def run(self) -> None:
        """Until the run is finished, its page limit is reached, or ``stop``. What it could not finish is given back.

        Raises what made it impossible to go on: an error of the frontier, of a sink, or of the spider's ``start``.
        """
        stats = await self._frontier.stats()
        self._logged_before = stats.items
        for work in (self._seeder.run(), self._keep_leases(), self._trim(), *(drain.run() for drain in self._drains)):
            task = asyncio.create_task(work)
            task.add_done_callback(self._helper_ended)
            self._helpers.append(task)
        try:
            await self._pump()
        finally:
            await self._wind_down()
        failure = self._failure or self._seeder.failure
        if failure is not None:
            raise failure

    async def _pump(self) -> None:
        while True:
            self._woken = False
            if self._settled:
                await self._settle()
            wait: float | None = None
            if not self.stopping:
                wait = await self._lease_more()
            if not self._active and not self._settled and await self._is_over():
                return
            if not self._settled:
                await self._sleep(wait)

    async def _is_over(self) -> bool:
        if self.stopping or self._scheduler.limit_reached or await self._frontier.is_finished():
            return True
        return self._seeder.failure is not None and (await self._frontier.stats()).remaining == 0

    async def _lease_more(self) -> float | None:
        """Fill the free places. How long until there may be more, if time alone can tell."""
        free = self._config.concurrency - len(self._active)
        if free <= 0:
            return None
        if self._drains and self._lag() > _MAX_LAG:
            return 0.05
        leased = await self._persist(lambda: self._scheduler.next_requests(free))
        if self.stopping:  # asked to while the frontier was
            self._settled.extend(Released(lease, contacted=False) for lease in leased.leases)
            return None
        for lease in leased.leases:
            task = asyncio.create_task(self._work(lease))
            self._active[task] = lease
            task.add_done_callback(self._task_ended)
        return leased.wait

    def stop(self) -> None:
        """Lease nothing more; end what is in flight, or give it back after ``shutdown_grace``."""
        if not self.stopping:
            self.stopping = True
            asyncio.get_running_loop().call_later(self._config.shutdown_grace, self._cancel_active)
            self._wake()

    def _cancel_active(self) -> None:
        for task in self._active:
            task.cancel()

    async def _sleep(self, seconds: float | None) -> None:
        """Until something happens, or for so long. What happened since the top of the loop counts too."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._waker = loop.create_future()
        timer = None if seconds is None else loop.call_later(max(0.001, seconds), self._wake)
        try:
            await self._waker
        finally:
            self._waker = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._woken = True
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # -- one request

    async def _work(self, lease: Lease) -> None:
        """The life of a lease. Whatever happens, it ends as a settlement."""
        task = asyncio.current_task()
        assert task is not None
        settlement: Settlement
        try:
            settlement = await self._handle(lease)
        except asyncio.CancelledError:
            settlement = Released(lease, contacted=True)
        except Exception as exc:  # the end of a task: a bug here costs one request and says so
            log.exception("internal error url=%s", lease.request.url)
            settlement = Failure(lease=lease, kind="internal error", reason=f"{type(exc).__name__}: {exc}")
        self._active.pop(task, None)
        self._settled.append(settlement)
        self._wake()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began has settled nothing."""
        lease = self._active.pop(task, None)
        if lease is not None:
            self._settled.append(Released(lease, contacted=False))
            self._wake()

    async def _handle(self, lease: Lease) -> Settlement:
        request = lease.request
        try:
            response = await self._fetch(request)
        except Postponed as postponed:
            return Released(lease, postponed.contacted)
        except FetchError as error:
            return await self._failed(lease, error)
        self.counters.fetched += 1
        self.counters.bytes += len(response.body)
        if response.from_cache:
            self.counters.from_cache += 1
        status = response.status
        if 300 <= status < 400 and "Location" in response.headers and status not in self._handled:
            return await self._redirected(lease, response)
        try:
            return self._parsed(lease, response, await self._callbacks.call(request.callback, request, response))
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return await self._callback_failed(lease, response, exc)  # something that the callback waited for
        except Exception as exc:  # whatever the user's code raises: it costs this page, and says where
            return await self._callback_failed(lease, response, exc)

    def _parsed(self, lease: Lease, response: Response, found: Found) -> Parsed:
        admitted = self._scheduler.admit(found.links, lease.request)
        self.counters.out_of_scope += admitted.out_of_scope
        completion = Completion(
            lease=lease,
            items=found.items,
            children=admitted.children,
            status=response.status,
            duplicates=admitted.duplicates,
            contacted=not response.from_cache,
        )
        return Parsed(completion, admitted)

    async def _redirected(self, lease: Lease, response: Response) -> Settlement:
        """A redirect is done, and its target a child: so scope, robots.txt and the host's delay hold for each hop."""
        request = lease.request
        trail = [*request.redirects, request.url]
        if len(trail) > self._config.http.max_redirects:
            message = f"more than {self._config.http.max_redirects} redirects, from {trail[0]}"
            return await self._failed(lease, FetchError(message, kind="redirects", retryable=False))
        try:
            url = join_url(request.url, response.headers["Location"])
        except RequestError as exc:
            return await self._failed(lease, FetchError(f"redirect: {exc}", kind="redirects", retryable=False))
        reason = self._scheduler.scope.refuses(url)
        if reason is not None:
            self.counters.out_of_scope += 1
            message = f"redirects to {url}, which is {reason}"
            return await self._failed(lease, FetchError(message, kind="scope", retryable=False))
        target = redirected_request(request, url, response.status)
        self.counters.redirected += 1
        completion = Completion(
            lease=lease,
            children=[target],
            status=response.status,
            contacted=not response.from_cache,
            note=f"redirected to {url}",
        )
        return Parsed(completion, Admitted([target]))

    # -- failures

    async def _failed(self, lease: Lease, error: FetchError) -> Failure:
        """Wait for another attempt, or die; the errback hears of a death."""
        self.counters.errors[error.kind] += 1
        retry_in = self._retry.retry_in(error, lease.attempt)
        failure = Failure(
            lease=lease,
            kind=error.kind,
            reason=str(error),
            retry_in=retry_in,
            status=error.status,
            contacted=error.contacted,
        )
        if retry_in is not None:
            self.counters.retried += 1
            log.info("retry in %.1f s url=%s attempt=%d %s", retry_in, lease.request.url, lease.attempt, error)
            return failure
        level = logging.DEBUG if error.kind == "robots" else logging.WARNING
        log.log(level, "gave up url=%s %s", lease.request.url, error)
        if lease.request.errback is not None:
            await self._errback(lease, error, failure)
        return failure

    async def _errback(self, lease: Lease, error: ShoalError, failure: Failure) -> None:
        try:
            request = lease.request
            found = await self._callbacks.call(request.errback, request, request, error)
            failure.items = found.items
            failure.children = self._scheduler.admit(found.links, request).children
        except Exception as exc:  # the user's code again
            self.counters.errors["errback"] += 1
            log.error("errback failed url=%s %s", lease.request.url, describe(exc))

    async def _callback_failed(self, lease: Lease, response: Response, exc: BaseException) -> Failure:
        """The page is dead: nothing of it is stored. Once the spider is mended, `retry-failed` fetches it again."""
        self.counters.errors["callback"] += 1
        reason = describe(exc)
        log.error("callback failed url=%s %s", response.url, reason, exc_info=log.isEnabledFor(logging.DEBUG))
        failure = Failure(lease=lease, kind="callback", reason=reason, status=response.status)
        if lease.request.errback is not None:
            await self._errback(lease, SpiderError(reason), failure)
        return failure

    # -- settling with the frontier

    async def _settle(self) -> None:
        """One batch for all that has ended since the last; what ends meanwhile is in the next."""
        batch, self._settled = self._settled, []
        parsed = [each for each in batch if isinstance(each, Parsed)]
        failures = [each for each in batch if isinstance(each, Failure)]
        if parsed:
            await self._commit(parsed)
        if failures:
            states = await self._persist(lambda: self._frontier.fail(failures))
            self._scheduler.not_a_page(len(failures))
            self._count_items(failures, states)
        for contacted in (True, False):
            leases = [each.lease for each in batch if isinstance(each, Released) and each.contacted is contacted]
            if leases:
                await self._release(leases, contacted=contacted)

    async def _release(self, leases: list[Lease], *, contacted: bool) -> None:
        await self._persist(lambda: self._frontier.release(leases, contacted=contacted))
        self._scheduler.not_a_page(len(leases))

    async def _commit(self, parsed: list[Parsed]) -> None:
        completions = [each.completion for each in parsed]
        results = await self._persist(lambda: self._frontier.complete(completions))
        for each, pushed in zip(parsed, results, strict=True):
            if pushed is not None:
                self._scheduler.learn(each.admitted)
        self._count_items(completions, results)

    def _count_items(self, settled: Sequence[Completion | Failure], results: Sequence[object]) -> None:
        count = 0
        for each, result in zip(settled, results, strict=True):
            if result is None:
                self.counters.leases_lost += 1
                log.warning("lease lost; its work is not counted url=%s", each.lease.request.url)
            elif result != "waiting":
                count += len(each.items)
        if count:
            self.counters.items += count
            for drain in self._drains:
                drain.nudge()

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """A step of the frontier, tried again a few times: a full disk may have room in a moment."""
        for attempt in range(1, _COMMIT_TRIES + 1):
            try:
                return await step()
            except FrontierError as error:
                if attempt == _COMMIT_TRIES:
                    raise
                log.warning("the frontier could not store it, trying again: %s", error)
                await asyncio.sleep(0.1 * 4**attempt)
        raise AssertionError("not reached")

    def _lag(self) -> int:
        """How many items the slowest drain is behind."""
        logged = self._logged_before + self.counters.items
        return logged - min((drain.position for drain in self._drains), default=logged)

    # -- helpers

    async def _trim(self) -> None:
        """Forget the part of the item log that everybody has."""
        while not self._keep_items:
            await asyncio.sleep(0.2)
            logged = self._logged_before + self.counters.items
            await self._persist(partial(self._frontier.trim_items, logged - self._lag()))

    async def _keep_leases(self) -> None:
        """Renew in good time. What could not be renewed is dropped before its lease ends, so nobody works twice."""
        ttl = self._config.lease.ttl
        while True:
            await asyncio.sleep(ttl / 4)
            tasks = list(self._active.items())
            leases = [lease for _, lease in tasks]
            try:
                renewed: list[Lease | None] = list(await self._frontier.renew(leases, ttl))
            except FrontierError as error:
                log.warning("leases could not be renewed: %s", error)
                ends = time.monotonic() + ttl / 4
                renewed = [lease if lease.deadline > ends else None for lease in leases]
            for (task, _), lease in zip(tasks, renewed, strict=True):
                if lease is None:
                    task.cancel()
                elif task in self._active:
                    self._active[task] = lease

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self.stop()

    async def _wind_down(self) -> None:
        """Give back what is still out, whatever the reason."""
        for task in (*self._helpers, *self._active):
            task.cancel()
        await asyncio.gather(*self._helpers, *self._active, return_exceptions=True)
        if self._settled:
            await self._settle()

    async def snapshot(self, hosts: int = 8) -> Snapshot:
        """The crawl at this moment."""
        return Snapshot(
            stats=await self._frontier.stats(),
            hosts=await self._frontier.host_states(hosts),
            in_flight=len(self._active),
            counters=self.counters,
        )


def redirected_request(request: Request, url: str, status: int) -> Request:
    """The request that a redirect leads to, as browsers make it: a POST becomes a GET unless the status forbids that,
    and another host is not told what was meant for this one."""
    trail = [*request.redirects, request.url]
    keeps_body = status in (307, 308) or request.method in ("GET", "HEAD")
    elsewhere = host_of(url) != host_of(request.url)
    left_out = (_SECRETS if elsewhere else frozenset()) | (frozenset() if keeps_body else _OF_THE_BODY)
    return request.replace(
        url=url,
        redirects=trail,
        method=request.method if keeps_body else "GET",
        body=request.body if keeps_body else b"",
        headers={name: value for name, value in request.headers.items() if name.lower() not in left_out},
        cookies={} if elsewhere else request.cookies,
        dont_filter=request.dont_filter or url in trail,  # a page may set a cookie and send back to itself
    )
