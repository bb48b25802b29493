"""Connections and one browser for many sessions, which must not see each other's pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.crawling.onion import OWN_CLIENTS, make_http_fetcher, make_plugged_fetcher, make_renderer
from shoal.errors import BrowserError, FetchError, RequestError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.page_fetcher import FREE_BYTES, BodyBudget, BodyRoom, body_room
from shoal.fetch.routing import RoutingFetcher
from shoal.http import Render, Request, Response
from shoal.parsing import limit_trees
from shoal.ports import Fetcher, Hosts

if TYPE_CHECKING:
    from shoal.fetch.routing import Renderer

_RETRY_AFTER = 5.0  # seconds after which a browser that did not start is tried again


class SharedFetcher:
    """Fetches and renders pages for the sessions of a server. It contacts no private address outside ``networks``."""

    def __init__(self, config: Config, networks: Sequence[str]) -> None:
        if config.http.client not in OWN_CLIENTS:
            make_plugged_fetcher(config, is_guarded=True)  # ConfigError
        self._config = config
        self._guard = AddressGuard(networks)
        self.http = make_http_fetcher(config, self._guard)
        self._bodies = BodyBudget(config.serve.max_body_memory)
        limit_trees(config.serve.max_tree_memory)
        self._browser: Renderer | None = None
        self._failure: tuple[float, str] | None = None
        """When the browser did not start, and why."""

    def scoped(self, scope: str, config: Config, render: Render | None, hosts: Hosts) -> RoutingFetcher:
        """A fetcher for one session. It shares the connections and the browser, but no cookies and no storage.

        ``config`` has the limits of the session, ``render`` is for all of its pages. Closing it closes nothing.
        """
        limit = config.http.max_body_bytes
        return RoutingFetcher(
            _BudgetedFetcher(self.http.limited_to(limit), self._bodies),
            lambda: _BorrowedBrowser(self, config.browser.page_timeout, limit),
            default=render,
            scope=scope,
            hosts=hosts,
        )

    def forget(self, scope: str) -> None:
        """Remove the cookies and the storage of a session that has ended."""
        if self._browser is not None:
            self._browser.forget(scope)

    def check_allowed(self) -> None:
        """RequestError if the operator does not allow rendering."""
        if not self._config.serve.render:
            raise RequestError("this server does not render pages (serve.render)")

    async def open_browser(self) -> Renderer:
        """Start the browser, if it is not running. BrowserError if it cannot start; RequestError if the operator
        does not allow rendering."""
        self.check_allowed()
        if self._failure is not None and time.monotonic() - self._failure[0] < _RETRY_AFTER:
            raise BrowserError(self._failure[1])
        if self._browser is None:
            self._browser = make_renderer(self._config, self._guard)
        try:
            await self._browser.open()
        except BrowserError as exc:
            self._failure = time.monotonic(), str(exc)
            raise
        self._failure = None
        return self._browser

    async def close(self) -> None:
        await self.http.close()
        if self._browser is not None:
            await self._browser.close()


class _BudgetedFetcher:
    """A fetcher whose large bodies share the memory of the process with those of all other sessions."""

    def __init__(self, fetcher: Fetcher, budget: BodyBudget) -> None:
        self._fetcher = fetcher
        self._budget = budget

    async def fetch(self, request: Request) -> Response:
        room = body_room.get()
        if room is None:
            task = asyncio.current_task()
            assert task is not None
            room = BodyRoom(self._budget, task)
            body_room.set(room)  # for all requests of this task: if each of them waited, they could wait for each other
        response = await self._fetcher.fetch(request)
        if len(response.body) > FREE_BYTES:
            await room.reserve(len(response.body))  # unless it is reserved already
        return response

    async def close(self) -> None:
        await self._fetcher.close()


class _BorrowedBrowser:
    """The browser, as one session uses it."""

    def __init__(self, owner: SharedFetcher, timeout: float, max_bytes: int) -> None:
        self._owner = owner
        self._timeout = timeout
        self._max_bytes = max_bytes

    async def open(self) -> None:
        await self._owner.open_browser()

    async def fetch(self, request: Request, options: Render, scope: str = "", upstream: str | None = None) -> Response:
        """Render a page. A caller cannot exceed the operator's `browser.page_timeout`: all callers share the tabs."""
        try:
            browser = await self._owner.open_browser()
        except (BrowserError, RequestError) as exc:
            retryable = isinstance(exc, BrowserError)
            raise FetchError(str(exc), kind="browser", retryable=retryable, contacted=False) from exc
        limited = request
        if request.timeout is not None and request.timeout > self._timeout:
            limited = request.replace(timeout=None)
        response = await browser.fetch(limited, options, scope, upstream)
        response.request = request
        if size_with_extras(response) > self._max_bytes:
            raise FetchError(
                f"the page with its screenshot, PDF and captured responses is larger than {self._max_bytes} bytes",
                kind="too large", retryable=False,
            )  # fmt: skip
        return response

    def status(self) -> str:
        """Empty: the browser belongs to all sessions."""
        return ""

    def forget(self, scope: str) -> None:
        self._owner.forget(scope)

    async def close(self) -> None:
        """Do nothing: the owner closes the browser."""


def size_with_extras(response: Response) -> int:
    """Bytes of the page and of everything that the browser returned with it."""
    captured = sum(len(each.body) for each in response.captured)
    return len(response.body) + len(response.screenshot or b"") + len(response.pdf or b"") + captured
