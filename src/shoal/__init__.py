"""Shoal: many crawlers that move as one.

Names are imported when they are first used, so ``import shoal`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.config import Config as Config
    from shoal.errors import DropItem as DropItem
    from shoal.errors import ShoalError as ShoalError
    from shoal.http import File as File
    from shoal.http import Render as Render
    from shoal.http import Request as Request
    from shoal.http import Response as Response
    from shoal.http.login import LoggedOut as LoggedOut
    from shoal.http.login import Login as Login
    from shoal.runs.cluster.node import Node as Node
    from shoal.runs.cluster.node import ZookeeperCrawler as ZookeeperCrawler
    from shoal.runs.crawl import Crawl as Crawl
    from shoal.runs.crawl import crawl as crawl
    from shoal.runs.orchestrator import Orchestrator as Orchestrator
    from shoal.runs.scheduler import Scheduler as Scheduler
    from shoal.runs.scheduler import SyncScheduler as SyncScheduler
    from shoal.runs.work_queue import SyncUrlWorkQueue as SyncUrlWorkQueue
    from shoal.runs.work_queue import UrlWorkQueue as UrlWorkQueue
    from shoal.selector import Selector as Selector
    from shoal.sitemap_spider import SitemapSpider as SitemapSpider
    from shoal.spider import Spider as Spider

_HOMES = {
    "Config": "shoal.config",
    "Crawl": "shoal.runs.crawl",
    "DropItem": "shoal.errors",
    "File": "shoal.http",
    "LoggedOut": "shoal.http.login",
    "Login": "shoal.http.login",
    "Node": "shoal.runs.cluster.node",
    "Orchestrator": "shoal.runs.orchestrator",
    "Render": "shoal.http",
    "Request": "shoal.http",
    "Response": "shoal.http",
    "Scheduler": "shoal.runs.scheduler",
    "Selector": "shoal.selector",
    "ShoalError": "shoal.errors",
    "SitemapSpider": "shoal.sitemap_spider",
    "Spider": "shoal.spider",
    "SyncScheduler": "shoal.runs.scheduler",
    "SyncUrlWorkQueue": "shoal.runs.work_queue",
    "UrlWorkQueue": "shoal.runs.work_queue",
    "ZookeeperCrawler": "shoal.runs.cluster.node",
    "crawl": "shoal.runs.crawl",
}

__version__ = "0.1.0"
__all__ = [  # noqa: RUF022 - in the order in which users meet them
    "Spider",
    "SitemapSpider",
    "Request",
    "Response",
    "Render",
    "File",
    "Selector",
    "Login",
    "LoggedOut",
    "Config",
    "crawl",
    "Crawl",
    "Orchestrator",
    "Scheduler",
    "SyncScheduler",
    "UrlWorkQueue",
    "SyncUrlWorkQueue",
    "Node",
    "ZookeeperCrawler",
    "DropItem",
    "ShoalError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
