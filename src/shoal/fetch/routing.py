"""Chooses how each page is fetched: over HTTP, in a browser, or over HTTP first and then in a browser if needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from shoal.errors import FetchError, FrontierError
from shoal.fetch.page_needs import PageNeeds, is_shell, says_more
from shoal.http import Render, Request, Response
from shoal.http.navigation import Permit, permit
from shoal.ports import Fetcher, Hosts
from shoal.sessions.session import browser_cookies
from shoal.urls.normalize import host_of


class Renderer(Protocol):
    """A browser. See `BrowserFetcher`."""

    async def open(self) -> None: ...

    async def fetch(
        self, request: Request, options: Render, scope: str = "", upstream: str | None = None
    ) -> Response: ...

    def forget(self, scope: str) -> None: ...

    async def close(self) -> None: ...

    def status(self) -> str:
        """What the browser does, for people."""
        ...


class RoutingFetcher:
    """Fetches over HTTP, unless the request or the spider asks for a browser.

    ``default`` applies to requests without a choice of their own. ``scope``: pages of different scopes share no
    cookies and no storage in the browser.
    """

    def __init__(
        self,
        http: Fetcher,
        make_renderer: Callable[[], Renderer],
        *,
        default: Render | None = None,
        proxy: str | None = None,
        scope: str = "",
        hosts: Hosts | None = None,
    ) -> None:
        self._http = http
        self._make_renderer = make_renderer
        self._renderer: Renderer | None = None
        self._default = default
        self._proxy = proxy
        self._scope = scope
        self._hosts = hosts
        self._needs = PageNeeds(hosts)
        self.permit: Permit | None = None
        """Asked before actions of the user navigate."""

    def fetch(self, request: Request) -> Awaitable[Response]:
        render = request.render
        if render is None:
            render = self._default
        if render is None or render is False or render is True:  # True never: a request converts it
            return self._http.fetch(request)
        return self._render(request, render) if render.mode == "always" else self._choose(request, render)

    async def open(self) -> None:
        """If the spider renders its pages, start the browser. BrowserError if it cannot be started."""
        if self._default is not None and self._default.mode == "always":
            await self._browser().open()

    async def close(self) -> None:
        await self._http.close()
        if self._renderer is not None:
            await self._renderer.close()

    def browser_status(self) -> str:
        """What the browser does, for people. Empty if there is none."""
        return "" if self._renderer is None else self._renderer.status()

    def _browser(self) -> Renderer:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    async def _render(self, request: Request, options: Render) -> Response:
        sent = browser_cookies.get()
        permit.set(self._permit_login if sent is not None and sent.is_login else self.permit)
        return await self._browser().fetch(request, options, self._scope, request.proxy or self._proxy)

    async def _permit_login(self, url: str) -> float | None:
        """Wait for the delay of the host. As for other requests of a login, robots.txt and the scope do not matter. If
        the delay is too long for a page, the login makes the request itself."""
        try:
            return 0.0 if self._hosts is None else (await self._hosts.host_state(host_of(url))).delay
        except FrontierError:
            return None

    async def _choose(self, request: Request, options: Render) -> Response:
        """Fetch over HTTP, and render what turns out to be an empty shell."""
        needs = await self._needs.known(request.url)
        if needs == "browser":
            return await self._render(request, options)
        response = await self._http.fetch(request)
        if needs == "http" or not response.ok or not is_shell(response):
            if needs is None and response.ok:
                await self._needs.learn(request.url, "http")
            return response
        if (sent := browser_cookies.get()) is not None:
            sent.keep_answer(response)
        try:
            rendered = await self._render(request, options)
        except FetchError as error:  # a browser that fails teaches nothing
            error.contacted = True
            raise
        if rendered.ok:
            await self._needs.learn(request.url, "browser" if says_more(rendered, response) else "http")
        return rendered
