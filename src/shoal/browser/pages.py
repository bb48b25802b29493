"""The contexts of a browser and their pages, which are used again and again.

A context is like a private window: it has cookies, storage and a cache of its own. Each (scope, way out, host) has one,
so nothing is shared between runs, callers, identities or hosts, except the cookies of a run, which are put into each.
Each named jar, each login, and requests with cookies of their own have contexts apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from shoal.browser.cookies import ContextCookies
from shoal.browser.devtools import PageWatch
from shoal.browser.gateway import Gateway, Listener
from shoal.browser.process import BrowserProcess, tolerated
from shoal.config import BrowserSettings

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Page

log = logging.getLogger("shoal.browser")

_MAX_CONTEXTS = 32
_OPEN_TIMEOUT = 15.0
_CLOSE_TIMEOUT = 3.0
_MAX_CONSOLE = (100, 1000)  # lines of a page, and characters of a line
_IDLE = 0.3
"""Seconds after which the scripts of a page in an idle tab are ended."""
_NOTHING = "data:,"
_COLLECT_EVERY = 5
"""Pages of a tab after which its garbage is collected. V8 alone lets it grow to several times the size of a page."""


class ContextKey(NamedTuple):
    """Pages with the same key share cookies and storage."""

    scope: str
    """A run, or a caller of the API."""
    upstream: str | None
    """A proxy URL. None: no proxy."""
    host: str
    jar: str = ""
    epoch: int = 0
    """Of the login. A context of an earlier one may hold its storage."""
    own: frozenset[tuple[str, str]] = frozenset()
    """The cookies of the request itself: they are not for other pages."""
    only_own: bool = False
    """Those of the jar are not for this page."""

    def supersedes(self, other: ContextKey) -> bool:
        """Whether this is the same, after a newer login."""
        return self[:4] == other[:4] and self.epoch > other.epoch


class Context(Struct, kw_only=True, eq=False):
    """A context with its listener at the gateway, and its idle pages."""

    key: ContextKey
    browser_context: BrowserContext
    cookies: ContextCookies
    listener: Listener
    idle: list[Tab] = []
    in_use: int = 0
    seen: int = 0
    """Bytes that its pages received, as far as DevTools has seen them."""

    def see(self, size: int) -> None:
        self.seen += size

    @property
    def unseen(self) -> int:
        """Bytes that DevTools has not seen: of WebSockets, workers and frames of other sites."""
        return self.listener.received - self.seen


class Tab(Struct, kw_only=True, eq=False):
    """A page object of the browser. It shows one page after the other."""

    page: Page
    watch: PageWatch
    context: Context
    console: list[str] = []


class Pages:
    """Hands out tabs of one browser."""

    def __init__(
        self,
        process: BrowserProcess,
        gateway: Gateway,
        settings: BrowserSettings,
        user_agent: str,
        *,
        verify_tls: bool = True,
    ) -> None:
        self._process = process
        self._gateway = gateway
        self._settings = settings
        self._user_agent = user_agent
        self._verify_tls = verify_tls
        self._contexts: dict[ContextKey, asyncio.Task[Context]] = {}
        """In order of use, the one used last is the last."""
        self._closing: set[asyncio.Future[None]] = set()

    async def take(self, key: ContextKey) -> Tab:
        """A tab in the context of this key. TimeoutError if the browser does not open one in time."""
        async with asyncio.timeout(_OPEN_TIMEOUT):
            context = await self._context(key)
            context.in_use += 1
            try:
                while context.idle:
                    tab = context.idle.pop()
                    if await self._responds(tab):
                        tab.console.clear()
                        return tab
                return await self._open_tab(context)
            except BaseException:
                context.in_use -= 1
                raise

    async def release(self, tab: Tab, *, reusable: bool) -> None:
        """Take a tab back. TimeoutError if it can be neither used again nor closed: then kill the browser."""
        context = tab.context
        context.in_use -= 1
        if reusable and not tab.page.is_closed():
            context.idle.append(tab)
            asyncio.get_running_loop().call_later(_IDLE, self._leave_if_idle, tab, tab.watch.number)
        elif not tab.page.is_closed() and not self._process.ended:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await tab.page.close()

    def _leave_if_idle(self, tab: Tab, number: int) -> None:
        """End the scripts of a page if its tab has not been used since. Most tabs are used again at once."""
        if tab.watch.number == number and tab in tab.context.idle and not self._process.ended:
            tab.context.idle.remove(tab)
            self._do(self._leave(tab))

    async def _leave(self, tab: Tab) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await tab.page.goto(_NOTHING, wait_until="commit")
                await tab.watch.collect_garbage()
        except Exception as exc:  # its page does not unload
            log.debug("closing a tab whose page does not unload: %s: %s", type(exc).__name__, exc)
            await self._close_tab(tab)
            return
        context = tab.context
        if len(context.idle) + context.in_use < self._settings.max_pages:
            context.idle.append(tab)
        else:  # others were opened meanwhile
            await self._close_tab(tab)

    async def _responds(self, tab: Tab) -> bool:
        """Whether the page in an idle tab responds. If not, the tab is closed, or ends with its browser."""
        if tab.page.is_closed():
            return False
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                if tab.watch.number % _COLLECT_EVERY == 0:
                    await tab.watch.collect_garbage()
                else:
                    await tab.page.evaluate("0")
        except Exception as exc:  # it hangs, or has crashed
            log.debug("an idle tab does not respond: %s: %s", type(exc).__name__, exc)
            self._do(self._close_tab(tab))
            return False
        return True

    async def _close_tab(self, tab: Tab) -> None:
        with tolerated("closing a tab"):  # it ends with the browser
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await tab.page.close()

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for opening in self._contexts.values():
            opening.cancel()
        for work in self._closing:
            work.cancel()
        results = await asyncio.gather(*self._contexts.values(), return_exceptions=True)
        for context in results:
            if isinstance(context, Context):
                await context.listener.close()
        self._contexts.clear()

    # -- contexts

    async def _context(self, key: ContextKey) -> Context:
        task = self._contexts.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._open_context(key))
            for old in [old for old in self._contexts if key.supersedes(old)]:
                self._drop(old)
            self._drop_oldest()
        self._contexts[key] = task
        return await asyncio.shield(task)

    async def _open_context(self, key: ContextKey) -> Context:
        listener = await self._gateway.open(key.upstream)
        try:
            browser_context = await self._process.browser.new_context(
                proxy={"server": listener.url},
                user_agent=self._user_agent,
                accept_downloads=False,
                ignore_https_errors=not self._verify_tls,
                service_workers="block",
                permissions=[],
            )
        except BaseException:
            await listener.close()
            raise
        return Context(
            key=key, browser_context=browser_context, cookies=ContextCookies(browser_context), listener=listener
        )

    def forget(self, scope: str) -> None:
        """Close the contexts of a scope."""
        for key in [key for key in self._contexts if key.scope == scope]:
            self._drop(key)

    def _drop_oldest(self) -> None:
        """Close the context that was not used for longest, if there are too many."""
        if len(self._contexts) >= _MAX_CONTEXTS:
            any(map(self._drop, [*self._contexts]))

    def _drop(self, key: ContextKey) -> bool:
        """Close a context. False if it is in use."""
        task = self._contexts[key]
        if not task.done() or task.cancelled() or task.exception() is not None or task.result().in_use:
            return False
        del self._contexts[key]
        self._do(self._close_context(task.result()))
        return True

    async def _close_context(self, context: Context) -> None:
        with tolerated("closing a context"):  # it ends with the browser
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await context.browser_context.close()
        await context.listener.close()

    # -- tabs

    async def _open_tab(self, context: Context) -> Tab:
        page = await context.browser_context.new_page()
        session = await context.browser_context.new_cdp_session(page)
        watch = PageWatch(page, session, self._settings, context.see)
        tab = Tab(page=page, watch=watch, context=context)
        page.on("crash", lambda _: watch.crash())
        page.on("dialog", _dismiss)
        page.on("console", _keep_line(tab.console))
        page.on("popup", _close_popup)
        await watch.attach()
        return tab


def _keep_line(lines: list[str]) -> Callable[[ConsoleMessage], None]:
    def keep(message: ConsoleMessage) -> None:
        if len(lines) < _MAX_CONSOLE[0]:
            lines.append(f"{message.type}: {message.text}"[: _MAX_CONSOLE[1]])

    return keep


async def _dismiss(dialog: Dialog) -> None:
    """Dismiss a dialog, so that the page continues. Accept the question whether to leave the page."""
    with tolerated("dismissing a dialog"):
        await (dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())


async def _close_popup(page: Page) -> None:
    with tolerated("closing a popup"):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await page.close()
