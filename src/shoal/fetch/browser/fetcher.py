"""The fetcher that renders pages in Chromium. It cannot hang: each step has a deadline; then the browser is killed.

A browser can end at any moment without losing anything: the pages in it are still leased, and are released or retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from msgspec import Struct

from shoal.config import BrowserSettings, DnsSettings, HttpSettings
from shoal.errors import BrowserError, FetchError
from shoal.fetch.browser.gateway import Gateway
from shoal.fetch.browser.gateway_conversation import GatewayLimits
from shoal.fetch.browser.pages import CLOSE_TIMEOUT, ContextKey, Pages, Tab
from shoal.fetch.browser.process import BrowserProcess, shortage, tolerated
from shoal.fetch.browser.rendering import Rendering
from shoal.fetch.connecting import without_verification
from shoal.fetch.guard import AddressGuard, check_upstream
from shoal.fetch.layers import Postponed
from shoal.fetch.sessions.session import SentCookies, browser_cookies, own_cookies
from shoal.http import Render, Request, Response
from shoal.http.response import RenderedResponse
from shoal.system import clock, threads
from shoal.urls.normalize import host_of

log = logging.getLogger("shoal.browser")

_CHECK_EVERY = 1.0
_UNCLEAN = frozenset({"timeout", "browser", "too many requests", "too large"})
"""Kinds of errors after which a tab is closed: its page may still be loading, which would count for the next one."""
_MAX_SUSPECTS = 10_000


class _Use(Struct, eq=False):
    """A page that is rendered now."""

    url: str
    tab: Tab | None = None
    unseen_before: int = 0
    """What `Context.unseen` was when this page began."""
    reusable: bool = False

    @property
    def received(self) -> int:
        """Bytes of the page. Bytes that cannot be assigned to one page of the context count for each of them."""
        assert self.tab is not None
        return self.tab.watch.received + max(0, self.tab.context.unseen - self.unseen_before)


class _Session:
    """A browser with its tabs, and the pages that are rendered in it now."""

    def __init__(self, process: BrowserProcess, pages: Pages) -> None:
        self.process = process
        self.pages = pages
        self.uses: set[_Use] = set()
        self.retired = False
        """It gets no further pages, and ends when its last page has ended."""
        self.guilty: _Use | None = None
        """The page that made it necessary to kill the browser."""
        self.crashed_with: int | None = None
        """How many pages it had when it crashed."""


class BrowserFetcher:
    """Renders requests, at most `browser.max_pages` at the same time."""

    def __init__(
        self,
        settings: BrowserSettings,
        user_agent: str,
        guard: AddressGuard | None = None,
        http: HttpSettings = HttpSettings(),
        upstreams: Collection[str] | None = None,
        dns: DnsSettings = DnsSettings(),
    ) -> None:
        """``upstreams``: the proxies that pages may go through. None: any."""
        self._settings = settings
        self._user_agent = user_agent
        self._upstreams = upstreams
        self._verify_tls = http.verify_tls
        limits = GatewayLimits(connect_timeout=http.connect_timeout, dns_cache_seconds=http.dns_cache_seconds)
        tls = None if http.verify_tls else without_verification()
        self._gateway = Gateway(guard, limits, tls, settings.public_networks, dns)
        self._slots = asyncio.Semaphore(settings.max_pages)
        self._session: _Session | None = None
        self._launching = asyncio.Lock()
        self._render_lock = _RenderLock()
        self._suspects: dict[str, None] = {}
        """Pages that were in a browser when it crashed. Each is rendered alone next time."""
        self._ending: set[asyncio.Task[None]] = set()
        self._watchdog: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the browser. BrowserError if it cannot be started."""
        await self._current()

    async def fetch(self, request: Request, options: Render, scope: str = "", upstream: str | None = None) -> Response:
        """Render a page with the cookies of this task's request. ``scope``: pages of different scopes share nothing.
        ``upstream``: a proxy."""
        if upstream is not None and self._upstreams is not None:
            check_upstream(upstream, self._upstreams)
        sent = browser_cookies.get()
        stack = AsyncExitStack()
        async with stack:
            await stack.enter_async_context(self._slots)
            await stack.enter_async_context(self._render_lock.join(alone=request.url in self._suspects))
            try:
                session = await self._current()
            except BrowserError as exc:
                raise FetchError(str(exc), kind="browser", retryable=True, contacted=False) from exc
            key = _context_key(scope, upstream, request, sent)
            use = _Use(request.url)
            session.uses.add(use)
            stack.callback(self._leave, session, use)
            try:
                response = await self._render(stack, session, use, key, request, options)
            except (FetchError, Postponed):
                raise
            except Exception as exc:  # the page, the browser or its driver ended: the library raises many kinds
                if not isinstance(exc, ConnectionError) or not session.process.is_connected:
                    self._kill(session, None)
                raise self._blame(session, use, exc) from exc
            if options.page and response.ok and isinstance(response, RenderedResponse):  # others get no callback
                self._lend(response, use, sent, stack.pop_all())
            return response

    def _leave(self, session: _Session, use: _Use) -> None:
        session.uses.discard(use)
        self._end_if_unused(session)

    def _lend(self, response: RenderedResponse, use: _Use, sent: SentCookies | None, stack: AsyncExitStack) -> None:
        """Lend the open page to the callback, until it returns or `browser.page_timeout` is over."""
        tab = use.tab
        assert tab is not None
        response.page = tab.page

        async def end() -> None:
            late.cancel()
            if sent is not None:
                async with tolerated("reading the cookies of a page", CLOSE_TIMEOUT):
                    await tab.context.cookies.take(sent)
            await stack.aclose()

        def expire() -> None:
            log.warning("the callback used its page for too long (browser.page_timeout): page released url=%s", use.url)
            self._do(response.release())

        late = asyncio.get_running_loop().call_later(self._settings.page_timeout, expire)
        response.on_release = end

    def forget(self, scope: str) -> None:
        """Remove the cookies and the storage of a scope, which has ended."""
        if self._session is not None:
            self._session.pages.forget(scope)

    def status(self) -> str:
        """What the browser does, for people."""
        session = self._session
        if session is None:
            return "not running"
        return f"{len(session.uses)} pages open, {session.process.pages} rendered"

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await self._end(session)
        if self._ending:
            await asyncio.wait(self._ending)
        await self._gateway.close()

    # -- one page

    async def _render(
        self, stack: AsyncExitStack, session: _Session, use: _Use, key: ContextKey, request: Request, options: Render
    ) -> Response:
        """Render a page. The tab is released when the stack is closed."""
        from playwright.async_api import Error

        try:
            tab = await session.pages.take(key)
        except TimeoutError:
            self._kill(session, use)
            raise ConnectionError("the browser opened no page in time") from None
        except Error as exc:  # a browser that opens no page is of no use, even if it seems to be connected
            self._kill(session, None)
            raise ConnectionError(str(exc).partition("\n")[0]) from exc
        use.tab, use.unseen_before = tab, tab.context.unseen
        stack.push_async_callback(self._release, session, use, tab)
        try:
            response = await Rendering(tab, request, options, self._settings).run()
            use.reusable = True
        except FetchError as error:
            use.reusable = error.kind not in _UNCLEAN
            raise _reason(tab, request, error) from error
        return response

    async def _release(self, session: _Session, use: _Use, tab: Tab) -> None:
        session.process.pages += 1
        try:
            await session.pages.release(tab, reusable=use.reusable)
        except Exception as exc:  # the page does not unload, and the tab does not close
            log.warning("killing the browser: a page cannot be closed url=%s %s", use.url, exc)
            self._kill(session, use)

    def _blame(self, session: _Session, use: _Use, exc: Exception) -> Exception:
        """The error of a page after a crash. A page that caused it loses an attempt; the others are released."""
        crashed = session.process.ended
        if crashed and session.guilty not in (None, use):
            return Postponed("the browser was killed because of another page", contacted=True)
        if crashed and session.crashed_with is None:
            session.crashed_with = len(session.uses)
        if crashed and session.guilty is None and session.crashed_with != 1:
            self._suspects[use.url] = None
            if len(self._suspects) > _MAX_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]
            return Postponed("the browser crashed with several pages", contacted=True)
        self._suspects.pop(use.url, None)
        what = "the browser" if crashed else "the page"
        reason = str(exc).partition("\n")[0][:200] or type(exc).__name__
        short = f". {shortage()}".removesuffix(". ")
        return FetchError(
            f"{what} crashed while it was rendered: {reason}{short}", kind="browser crashed", retryable=True
        )

    # -- browsers

    async def _current(self) -> _Session:
        async with self._launching:
            session = self._session
            if session is not None and (session.process.ended or session.retired):
                self._session = None
                self._end_if_unused(session)
                session = None
            if session is None:
                process = BrowserProcess(self._settings)
                await process.launch()
                pages = Pages(process, self._gateway, self._settings, self._user_agent, verify_tls=self._verify_tls)
                session = self._session = _Session(process, pages)
                if self._watchdog is None:
                    self._watchdog = asyncio.create_task(self._watch())
            return session

    def _end_if_unused(self, session: _Session) -> None:
        if not session.uses and (session.retired or session.process.ended) and session is not self._session:
            self._do(self._end(session))
        elif session.retired and session is self._session and not session.uses:
            self._session = None
            self._do(self._end(session))

    def _kill(self, session: _Session, use: _Use | None) -> None:
        """Kill a browser because of one of its pages, or because it does not work any more."""
        if session.guilty is None:
            session.guilty = use
        session.retired = session.process.ended = True
        if not session.process.killed:
            self._do(session.process.kill())

    async def _end(self, session: _Session) -> None:
        await session.pages.close()
        await session.process.close()

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _watch(self) -> None:
        """Check the limits of the browser and of its pages periodically."""
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            session = self._session
            if session is None or session.process.ended:
                continue
            for use in [*session.uses]:
                if use.tab is not None and use.received > self._settings.max_bytes:
                    use.tab.watch.exceed()
            await self._check_browser(session)

    async def _check_browser(self, session: _Session) -> None:
        settings, process = self._settings, session.process
        memory = await threads.call(process.memory)
        if memory > settings.max_memory:
            if memory > 2 * settings.max_memory or session.retired:
                log.warning("killing the largest page: the browser uses %d MB (browser.max_memory)", memory >> 20)
                await threads.call(process.kill_largest)
            session.retired = True
        if process.pages >= settings.recycle_pages or clock.monotonic() - process.started > settings.recycle_after:
            session.retired = True
        self._end_if_unused(session)


def _context_key(scope: str, upstream: str | None, request: Request, sent: SentCookies | None) -> ContextKey:
    """The context for a page that is about to be rendered, with the cookies of the last login."""
    host = host_of(request.url)
    if sent is None:
        return ContextKey(scope, upstream, host, own=frozenset(own_cookies(request).items()))
    sent.epoch = sent.jar.epoch  # there may have been a login while the page waited for its turn
    return ContextKey(scope, upstream, host, sent.jar.name, sent.epoch, frozenset(sent.own.items()), sent.only_own)


def _reason(tab: Tab, request: Request, error: FetchError) -> FetchError:
    """The error of the gateway, if it made no connection: the browser does not know why."""
    if error.kind not in ("connect", "browser"):
        return error
    parts = urlsplit(request.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return tab.context.listener.failure(parts.hostname or "", port) or error


class _RenderLock:
    """Lets many pages be rendered at the same time, or one alone."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._together = 0
        self._alone = False
        self._waiting = 0

    @asynccontextmanager
    async def join(self, *, alone: bool) -> AsyncIterator[None]:
        async with self._condition:
            if alone:
                self._waiting += 1
                try:
                    await self._condition.wait_for(lambda: not self._alone and not self._together)
                finally:
                    self._waiting -= 1
                self._alone = True
            else:
                await self._condition.wait_for(lambda: not self._alone and not self._waiting)
                self._together += 1
        try:
            yield
        finally:
            async with self._condition:
                if alone:
                    self._alone = False
                else:
                    self._together -= 1
                self._condition.notify_all()
