"""Runs Scrapy spiders in this process, on pages in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.runs.crawl import Crawl
from shoal.scrapy.adapter import ScrapyAdapter, adapt
from shoal.scrapy.settings import Settings

SITE = "http://site.test"


@dataclass
class Answer:
    """A page that is not just HTML."""

    body: str | bytes = ""
    status: int = 200
    headers: Iterable[tuple[str, str]] = ()
    kind: str = "text/html; charset=utf-8"


Page = str | Answer | Exception | Callable[[Request], "str | Answer"]


@dataclass
class Web:
    """Answers requests from a table of pages by path and query. Other paths are 404."""

    pages: Mapping[str, Page]
    requests: list[Request] = field(default_factory=list)

    async def fetch(self, request: Request) -> Response:
        self.requests.append(request)
        url = urlsplit(request.url)
        page = self.pages.get(request.url) or self.pages.get(url.path + (f"?{url.query}" if url.query else ""))
        if page is None:
            page = Answer("not found", 404)
        if isinstance(page, Exception):
            raise page
        if callable(page):
            page = page(request)
        if isinstance(page, str):
            page = Answer(page)
        body = page.body.encode() if isinstance(page.body, str) else page.body
        headers = [("Content-Type", page.kind), *page.headers]
        return Response(request.url, status=page.status, headers=headers, body=body, request=request, elapsed=0.25)

    async def close(self) -> None:
        """Nothing is open."""

    def browser_status(self) -> str:
        return ""

    @property
    def paths(self) -> list[str]:
        return [urlsplit(request.url).path for request in self.requests]

    def header(self, path: str, name: str) -> list[str | None]:
        """The values of a header in the requests for a path."""
        found = [each for each in self.requests if urlsplit(each.url).path == path]
        return [next((v for key, v in each.headers.items() if key.lower() == name), None) for each in found]


@dataclass
class Outcome:
    """What a crawl did."""

    items: list[dict[str, Any]]
    web: Web
    adapter: Any
    crawl: Crawl

    @property
    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.adapter.crawler_view.stats.get_stats()
        return found


async def crawl(
    kind: type[Any],
    pages: Mapping[str, Page],
    *,
    settings: Mapping[str, Any] | None = None,
    arguments: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
) -> Outcome:
    """Run a spider class to its end."""
    return await crawl_adapter(adapt(kind, Settings(settings))(**(arguments or {})), pages, config=config)


async def crawl_adapter(
    adapter: ScrapyAdapter, pages: Mapping[str, Page], *, config: Mapping[str, object] | None = None
) -> Outcome:
    """Run an adapter to its end."""
    web = Web(pages)

    async def open_web(stack: AsyncExitStack, *options: object) -> tuple[Web, None]:
        return web, None

    with mock.patch("shoal.runs.lifecycle.open_fetcher", open_web):
        made = Crawl(adapter, {"retry.base_delay": 0, **(config or {})})
        await made
    return Outcome([] if made.outputs else list(made.items), web, adapter, made)


def refused() -> FetchError:
    return FetchError("no connection to site.test: Connection refused", kind="connect", retryable=True)


def timed_out() -> FetchError:
    return FetchError("site.test sent nothing for 180 s", kind="timeout", retryable=True)


def unknown_host() -> FetchError:
    return FetchError("can't resolve the host site.test", kind="dns", retryable=True, contacted=False)
