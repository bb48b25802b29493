"""What every crawl is put together from, whether it is alone or one worker of a fleet."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from shoal.config import Config
from shoal.crawling.engine import Drain, Engine
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.seeder import Source
from shoal.http import Request, Response
from shoal.middleware import Postponed, wrap
from shoal.ports import Fetch, Fetcher, Frontier, FrontierOptions, Lease, Middleware
from shoal.spider import Spider
from shoal.urls.scope import Scope


def frontier_options(config: Config) -> FrontierOptions:
    """The frontier's slice of the configuration."""
    return FrontierOptions(
        max_attempts=config.retry.max_attempts,
        delay=config.download_delay,
        concurrency_per_host=config.concurrency_per_host,
        max_queue_size=config.queue.max_size,
        in_memory=config.queue.in_memory,
    )


def new_run_id() -> str:
    """A name that sorts by time: ``20260215_120000_3fa9``."""
    return time.strftime("%Y%m%d_%H%M%S") + "_" + secrets.token_hex(2)


def make_scheduler(spider: Spider, config: Config, frontier: Frontier, *, shared: bool) -> Scheduler:
    scope = Scope(config.scope, spider.allowed_domains)
    return Scheduler(frontier, scope, ttl=config.lease.ttl, max_pages=config.scope.max_pages, shared=shared)


def make_engine(
    spider: Spider,
    config: Config,
    scheduler: Scheduler,
    stack: AsyncExitStack,
    drains: Sequence[Drain],
    *,
    source: Source | None,
    shared: bool,
    keep_items: bool,
    stay: bool = False,
    may_work: Callable[[], bool] = lambda: True,
    fetcher: Fetcher | None = None,
) -> Engine:
    """The engine with the onion around its fetcher, which the stack closes; unless it is given one that others use."""
    if fetcher is None:
        fetcher = make_fetcher(config)
        stack.push_async_callback(fetcher.close)
    onion = make_onion(spider, config, scheduler.frontier, fetcher, may_work)
    return Engine(
        spider, config, scheduler, onion.fetch, drains, source=source, shared=shared, keep_items=keep_items, stay=stay,
        on_lease=onion.on_lease, on_rewind=onion.forget, may_work=may_work,
    )  # fmt: skip


def preload() -> None:
    """Import what a crawl needs, for one who may have to begin at once: it takes a good part of a second."""
    for name in ("fetch.http", "middleware.cache", "middleware.cookies", "middleware.robots", "middleware.throttle"):
        importlib.import_module(f"shoal.{name}")


def make_fetcher(config: Config, networks: Sequence[str] | None = None) -> Fetcher:
    """``networks``: private addresses are refused, but for these; None: nothing is."""
    from shoal.fetch.guard import AddressGuard
    from shoal.fetch.http import HttpFetcher

    guard = None if networks is None else AddressGuard(networks)
    return HttpFetcher(config.http, config.user_agent, guard)


class Onion(NamedTuple):
    """The layers around a fetcher."""

    fetch: Fetch
    on_lease: Callable[[Lease], None]
    """Called with each lease before its page is fetched."""
    forget: Callable[[], None]
    """Drops what the layers cached of the store's knowledge."""


def make_onion(
    spider: Spider,
    config: Config,
    frontier: Frontier,
    fetcher: Fetcher,
    may_work: Callable[[], bool] = lambda: True,
) -> Onion:
    """The layers around the fetcher, outermost first."""
    from shoal.middleware.cache import Cache
    from shoal.middleware.cookies import Cookies
    from shoal.middleware.retry import StatusCheck
    from shoal.middleware.robots import Robots
    from shoal.middleware.throttle import Throttle

    on_lease: Callable[[Lease], None] = _ignore
    forget: Callable[[], None] = _nothing
    layers: list[Middleware] = []
    if config.robots.obey:
        robots = Robots(config.robots, config.user_agent, frontier)
        layers.append(robots)
        forget = robots.forget
    layers.extend(spider.middlewares)
    layers.append(Cookies(keep=config.cookies))
    if config.throttle.enabled:
        throttle = Throttle(config.throttle, frontier.update_host)
        layers.append(throttle)
        on_lease = throttle.adopt
    layers.append(StatusCheck(config.retry.statuses, spider.handle_statuses))
    if config.cache.enabled:
        layers.append(Cache(config.cache))
    return Onion(wrap(_guarded(fetcher.fetch, may_work), layers), on_lease, forget)


def _guarded(fetch: Fetch, may_work: Callable[[], bool]) -> Fetch:
    """Nothing is sent by a process that has lost the right to it, not even what had to wait for a robots.txt."""

    async def guarded(request: Request) -> Response:
        if not may_work():
            raise Postponed("this process may not work any more", contacted=False)
        return await fetch(request)

    return guarded


def _ignore(lease: Lease) -> None:
    pass


def _nothing() -> None:
    pass
