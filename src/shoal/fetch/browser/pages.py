"""The contexts of a browser and their pages, which are used again and again.

A context is like a private window: it has cookies, storage and a cache of its own. Each (scope, way out, host) has one,
so nothing is shared between runs, callers, identities or hosts, except the cookies of a run, which are put into each.
Each named jar, each login, and requests with cookies of their own have contexts apart.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shoal.config import BrowserSettings
from shoal.fetch.browser.devtools import PageWatch
from shoal.fetch.browser.gateway import Gateway, Listener
from shoal.fetch.browser.process import BrowserProcess, tolerated
from shoal.fetch.layers import Postponed
from shoal.fetch.sessions.cookies import Cookie, CookieKey
from shoal.fetch.sessions.session import SentCookies
from shoal.system import clock

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Page

# Keeps the cookies of a browser context equal to those of its jar.
#
# Several pages may use a context at the same time, so its cookies are never cleared: only what has changed in the
# jar is put into the context, and only what has changed in the context is put into the jar.

_MAX_AGE = 400 * 86400.0  # seconds; browsers allow no more, and Playwright no date after the year 9999
_OVER = 1.0
"""The end of a cookie that is removed. Playwright's ``clear_cookies`` may remove all for a moment."""
_HOST = re.compile(r"[\d.]+|\[.*|[^.]*")
"""What has no subdomains: addresses, and names without dots."""


class ContextCookies:
    """The cookies of one context."""

    def __init__(self, context: BrowserContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._put: dict[CookieKey, Cookie] = {}
        """What the jar had when both were last equal."""
        self._seen: dict[CookieKey, Cookie] = {}
        """The same, as the browser shows it. A cookie that it refuses is missing."""

    async def put(self, sent: SentCookies) -> None:
        """Before a page: put what has changed in the jar into the context. Postponed if there was a login since the
        context was chosen: each login has contexts of its own."""
        async with self._lock:
            if sent.jar.epoch != sent.epoch:
                raise Postponed("there is a newer login", contacted=False)
            before, wanted = self._put, sent.wanted(self._put)
            changed = [cookie for key, cookie in wanted.items() if before.get(key) != cookie]
            ended = [
                old for key, old in before.items() if key not in wanted or wanted[key].host_only != old.host_only
            ]  # the browser has both cookies: for the host only, and for its subdomains
            if changed or ended:
                await self._add([replace(cookie, expires=_OVER) for cookie in ended] + changed)
                self._put = wanted
                for cookie in ended:
                    self._seen.pop(cookie.key, None)
                shown = await self._read()
                for cookie in changed:
                    self._note_put(cookie, shown)

    def _note_put(self, cookie: Cookie, shown: Mapping[CookieKey, Cookie]) -> None:
        stored = shown.get(cookie.key)
        if stored is None:  # the site may have ended it meanwhile; mostly the browser does not accept it
            log.debug("the browser does not accept the cookie %.100r of %s", cookie.name, cookie.domain)
            self._seen.pop(cookie.key, None)
        else:  # if another page has changed it meanwhile, `take` must see that
            self._seen[cookie.key] = stored if stored.value == cookie.value else cookie

    async def take(self, sent: SentCookies) -> None:
        """After a page: put what has changed in the context into the jar."""
        async with self._lock:
            shown = await self._read()
            changed = [cookie for key, cookie in shown.items() if self._seen.get(key) != cookie]
            ended = [replace(cookie, expires=0.0) for key, cookie in self._seen.items() if key not in shown]
            self._seen = shown
            self._put.update((cookie.key, cookie) for cookie in changed)
            for cookie in ended:
                self._put.pop(cookie.key, None)
            sent.keep(ended + changed)  # at once: the next page compares with the jar
            sent.is_rendered = True

    async def _read(self) -> dict[CookieKey, Cookie]:
        cookies = [_from_browser(shown) for shown in await self._context.cookies() if shown["name"]]
        return {cookie.key: cookie for cookie in cookies}

    async def _add(self, cookies: list[Cookie]) -> None:
        """Add cookies. The browser refuses all if it refuses one; then each is added alone."""
        from playwright.async_api import Error

        now = clock.time()
        try:
            await self._context.add_cookies([_for_browser(cookie, now) for cookie in cookies])
        except Error:
            if len(cookies) == 1:
                return
            for cookie in cookies:
                await self._add([cookie])


def _for_browser(cookie: Cookie, now: float) -> Any:
    domain = cookie.domain if cookie.host_only or _HOST.fullmatch(cookie.domain) else f".{cookie.domain}"
    fields: dict[str, object] = {
        "name": cookie.name, "value": cookie.value, "domain": domain, "path": cookie.path,
        "secure": cookie.secure, "httpOnly": cookie.http_only,
        "expires": -1 if cookie.expires is None else min(cookie.expires, now + _MAX_AGE),
    }  # fmt: skip
    same_site = cookie.same_site.capitalize()
    if same_site in ("Lax", "Strict") or (same_site == "None" and cookie.secure):  # browsers drop it otherwise
        fields["sameSite"] = same_site
    return fields


def _from_browser(shown: Mapping[str, Any]) -> Cookie:
    domain: str = shown["domain"]
    return Cookie(
        name=shown["name"],
        value=shown["value"],
        domain=domain.removeprefix("."),
        path=shown["path"],
        host_only=not domain.startswith("."),
        secure=shown["secure"],
        expires=None if shown["expires"] == -1 else shown["expires"],
        http_only=shown["httpOnly"],
        same_site=shown["sameSite"],
    )


log = logging.getLogger("shoal.browser")

_MAX_CONTEXTS = 32
_OPEN_TIMEOUT = 15.0
CLOSE_TIMEOUT = 3.0
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
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await tab.page.close()

    def _leave_if_idle(self, tab: Tab, number: int) -> None:
        """End the scripts of a page if its tab has not been used since. Most tabs are used again at once."""
        if tab.watch.number == number and tab in tab.context.idle and not self._process.ended:
            tab.context.idle.remove(tab)
            self._do(self._leave(tab))

    async def _leave(self, tab: Tab) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
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
            async with asyncio.timeout(CLOSE_TIMEOUT):
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
        async with tolerated("closing a tab", CLOSE_TIMEOUT):  # it ends with the browser
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
            if len(self._contexts) >= _MAX_CONTEXTS:
                any(map(self._drop, [*self._contexts]))  # the one that was not used for longest
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

    def _drop(self, key: ContextKey) -> bool:
        """Close a context. False if it is in use."""
        task = self._contexts[key]
        if not task.done() or task.cancelled() or task.exception() is not None or task.result().in_use:
            return False
        del self._contexts[key]
        self._do(self._close_context(task.result()))
        return True

    async def _close_context(self, context: Context) -> None:
        async with tolerated("closing a context", CLOSE_TIMEOUT):  # it ends with the browser
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
    async with tolerated("dismissing a dialog"):
        await (dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())


async def _close_popup(page: Page) -> None:
    async with tolerated("closing a popup", CLOSE_TIMEOUT):
        await page.close()
