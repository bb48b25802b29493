"""One page, from its navigation to its response."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from shoal.config import BrowserSettings
from shoal.errors import FetchError
from shoal.fetch.browser.devtools import LoadedDocument
from shoal.fetch.browser.pages import Tab
from shoal.fetch.browser.process import shortage
from shoal.fetch.sessions.jars import Jars
from shoal.fetch.sessions.session import SentCookies, browser_cookies, own_cookies
from shoal.http import Render, Request, Response
from shoal.http.exchange import Exchange, captured
from shoal.http.rendering import LOAD_STATES, Action, Click, Evaluate, Fill, Press, Scroll, Wait, permit
from shoal.http.response import RenderedResponse
from shoal.system import clock
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from playwright.async_api import FloatRect, Page

log = logging.getLogger("shoal.browser")

T = TypeVar("T")

_QUIET = 0.1
"""Seconds without a request after which a page is complete."""
_REPLACED = frozenset({"content-type", "content-length", "content-encoding", "transfer-encoding"})
_UNDONE = (b"content-encoding", b"content-length", b"transfer-encoding")
_NET_ERROR = re.compile(r"net::(ERR_\w+)")
_NO_ROOM = ("ERR_INSUFFICIENT_RESOURCES", "ERR_OUT_OF_MEMORY", "ERR_FILE_NO_SPACE")
_MAX_SIDE = 16_384
_MAX_PIXELS = 1280 * _MAX_SIDE
"""Of a screenshot. Chromium needs several bytes for each, and crashes with more than about 1280 x 100,000."""
_GROWS = """async () => {
    const before = document.scrollingElement.scrollHeight;
    window.scrollTo(0, before);
    return before;
}"""
_FILLED = """() => new Promise(resolve => {
    const isFilled = () => document.body && document.body.innerText.trim() !== "";
    if (isFilled() || !document.scripts.length || [...document.querySelectorAll("*")].some(each => each.shadowRoot))
        return resolve(false);
    new MutationObserver((changes, observer) => {
        if (isFilled()) { observer.disconnect(); resolve(true); }
    }).observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
})"""
"""Waits until an empty page has text. Returns whether it had to wait. A page without scripts stays as it is, and the
text of a shadow tree is not part of the page."""
_HEIGHT = "() => document.scrollingElement.scrollHeight"


class _NotAPageError(Exception):
    """The navigation ended with something that is not shown in the page."""

    def __init__(self, document: LoadedDocument) -> None:
        super().__init__()
        self.document = document


class Rendering:
    """Renders one request in a tab."""

    def __init__(self, tab: Tab, request: Request, options: Render, settings: BrowserSettings) -> None:
        self._tab = tab
        self._page: Page = tab.page
        self._watch = tab.watch
        self._request = request
        self._options = options
        self._settings = settings
        self._limit = request.timeout or settings.page_timeout
        self._started = clock.monotonic()
        self._began = clock.time()
        self._sent = browser_cookies.get()
        self._done = 0
        """How many actions have begun."""

    async def run(self) -> Response:
        """Return the rendered page. FetchError if there is none; ConnectionError if the page or the browser crashed."""
        try:
            async with asyncio.timeout(self._limit):
                return await self._run()
        except TimeoutError:
            host = host_of(self._request.url)
            whose = "browser.page_timeout" if self._request.timeout is None else "the request's timeout"
            raise FetchError(
                f"{host} was not rendered within {self._limit:g} s ({whose})", kind="timeout", retryable=True
            ) from None

    async def _run(self) -> Response:
        from playwright.async_api import Error

        keeps_source = captured.get() is not None
        self._watch.begin(self._request, self._options.capture, keeps_source=keeps_source, permit=permit.get())
        try:
            await self._put_cookies()
            response = await self._show()
            if self._sent is not None:
                await self._tab.context.cookies.take(self._sent)
            return response
        except Error as exc:
            raise self._explain(str(exc)) from exc

    async def _show(self) -> Response:
        watch, options = self._watch, self._options
        try:
            timeout = self._limit * 1000
            await self._race(self._page.goto(self._request.url, wait_until="domcontentloaded", timeout=timeout))
            if options.wait_for is None:
                await self._race(self._settled())
            else:
                await self._wait_for(options.wait_for)
            if options.actions:
                await self._race(watch.begin_actions())
                for number, action in enumerate(options.actions, 1):
                    self._done = number
                    await self._act(number, action)
                await self._race(watch.settle(_QUIET))
                await self._race(watch.end_actions())
            return await self._collect()
        except _NotAPageError as exc:
            return self._other(exc.document)

    async def _race(self, work: Coroutine[object, object, T]) -> T:
        """Wait for the work, unless the page turns out to be something else, or fails."""
        watch = self._watch
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, watch.decided, watch.failed), return_when=asyncio.FIRST_COMPLETED)
            if watch.failed.done():
                watch.failed.result()
            if watch.decided.done():
                raise _NotAPageError(watch.decided.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    # -- loading

    async def _put_cookies(self) -> None:
        sent, own = self._sent, own_cookies(self._request)
        if sent is None and own:  # cookies belong to the request only
            jars = Jars()
            sent = SentCookies(jars, jars.jar(""), 0, self._request.url, own)
        if sent is not None:
            await self._tab.context.cookies.put(sent)

    async def _settled(self) -> None:
        """Wait until the page has loaded, is quiet and has text; if it never is, not longer than `browser.settle`."""
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(self._settings.settle):
                await self._page.wait_for_load_state("load", timeout=0)
                await self._watch.settle(_QUIET)
                with suppress(Error):  # the page was replaced meanwhile: it is collected as it is then
                    if await self._page.evaluate(_FILLED):
                        await self._watch.settle(_QUIET)
        except TimeoutError:
            return

    async def _wait_for(self, condition: str | int) -> None:
        from playwright.async_api import TimeoutError as Late

        seconds = self._left()
        if isinstance(condition, int):
            await self._race(asyncio.sleep(min(condition / 1000, seconds)))
        elif condition in LOAD_STATES:
            await self._race(self._page.wait_for_load_state(condition, timeout=seconds * 1000))
        else:
            try:
                await self._race(self._page.wait_for_selector(condition, state="attached", timeout=seconds * 1000))
            except Late:
                message = f"no element {condition!r:.100} appeared within {self._limit:g} s (wait_for)"
                raise FetchError(message, kind="wait_for", retryable=True) from None

    def _left(self) -> float:
        """Seconds until shortly before the deadline."""
        return max(0.1, self._started + self._limit * 0.95 - clock.monotonic())

    # -- actions

    async def _act(self, number: int, action: Action) -> None:
        from playwright.async_api import TimeoutError as Late

        try:
            await self._race(self._do(action))
        except Late:
            selector = getattr(action, "selector", None)
            what = f"there is no element {selector!r:.100}" if selector else "it took too long"
            raise FetchError(
                f"action {number} ({type(action).__name__.lower()}) failed: {what}", kind="action", retryable=False
            ) from None

    async def _do(self, action: Action) -> None:
        page, patience = self._page, min(self._left(), self._settings.page_timeout / 3) * 1000
        match action:
            case Click(selector=selector):
                await page.locator(selector).first.click(timeout=patience)
            case Fill(selector=selector, text=text):
                await page.locator(selector).first.fill(text, timeout=patience)
            case Press(key=key, selector=None):
                await page.keyboard.press(key)
            case Press(key=key, selector=str(selector)):
                await page.locator(selector).first.press(key, timeout=patience)
            case Wait(wait_for=condition):
                await self._wait_for(condition)
            case Evaluate(script=script):
                await page.evaluate(script)
            case Scroll(times=times):
                await self._scroll(times)

    async def _scroll(self, times: int) -> None:
        for _ in range(times):
            before = await self._page.evaluate(_GROWS)
            await asyncio.sleep(0.05)
            await self._watch.settle(_QUIET)
            if await self._page.evaluate(_HEIGHT) <= before:
                return

    # -- the result

    async def _collect(self) -> Response:
        page, options, watch = self._page, self._options, self._watch
        screenshot = pdf = None
        if options.screenshot:
            screenshot = await self._race(self._take_screenshot(options.screenshot))
        if options.pdf:
            pdf = await self._race(page.pdf())
        html = await self._race(page.content())
        body = html.encode("utf-8", "replace")
        if max(len(body), len(screenshot or b""), len(pdf or b"")) > self._settings.max_bytes:
            most = f"{self._settings.max_bytes} bytes (browser.max_bytes)"
            message = f"the page, its screenshot or its PDF is larger than {most}"
            raise FetchError(message, kind="too large", retryable=False)
        status, received = watch.shown
        headers = [(name, value) for name, value in received if name.lower() not in _REPLACED]
        self._keep_exchange(watch.source, body)
        headers.append(("Content-Type", "text/html; charset=utf-8"))
        return self._response(status or 200, headers, body).rendered(
            screenshot=screenshot, pdf=pdf, captured=list(watch.captured), console=list(self._tab.console),
            shown_url=page.url.partition("#")[0] if page.url.startswith("http") else "",
        )  # fmt: skip

    async def _take_screenshot(self, what: bool | str) -> bytes:
        timeout = self._left() * 1000
        if what is True:
            return await self._page.screenshot(timeout=timeout)
        left, top, width, height = await self._watch.layout()
        if what == "full":
            left = top = 0.0
        else:
            element = self._page.locator(str(what)).first
            box = await element.bounding_box(timeout=timeout)
            if box is None or _fits(box["width"], box["height"]):
                return await element.screenshot(timeout=timeout)
            left, top, width, height = left + box["x"], top + box["y"], box["width"], box["height"]
        if _fits(width, height):
            return await self._page.screenshot(full_page=True, timeout=timeout)
        log.warning("the screenshot is cut: %d x %d pixels are too many url=%s", width, height, self._request.url)
        wide = min(width, _MAX_SIDE)
        clip: FloatRect = {"x": left, "y": top, "width": wide, "height": min(height, _MAX_PIXELS // wide)}
        return await self._page.screenshot(full_page=True, clip=clip, timeout=timeout)

    def _other(self, document: LoadedDocument) -> Response:
        """The response for a redirect or a file."""
        self._keep_exchange(self._watch.source if document.url else document.body, None)
        response = self._response(document.status, document.headers, document.body)
        response.rendered(console=list(self._tab.console))
        response.next_post = document.post
        if self._watch.acting:  # the next page does not need what was done to reach it
            actions = self._options.actions[self._done :]
            response.next_render = structs.replace(self._options, actions=actions, wait_for=None)
        return response

    def _response(self, status: int, headers: list[tuple[str, str]], body: bytes) -> RenderedResponse:
        request, latency = self._request, self._watch.latency
        return RenderedResponse(
            request.url, status=status, headers=headers, body=body, request=request, elapsed=latency
        )

    def _keep_exchange(self, source: bytes | None, rendered: bytes | None) -> None:
        """Keep what was sent and received for the document, if the exchange is wanted."""
        exchanges, watch, request = captured.get(), self._watch, self._request
        if exchanges is None or not watch.status:
            return
        exchanges.append(
            Exchange(
                url=request.url, method=request.method, sent_body=request.body, status=watch.status,
                sent=[(name.encode(), value.encode()) for name, value in watch.sent.items()],
                received=[(name.encode(), value.encode()) for name, value in watch.headers],
                body=source or b"", truncated=source is None, undone=_UNDONE, rendered=rendered,
                began=self._began, elapsed=watch.latency,
            )
        )  # fmt: skip

    def _explain(self, message: str) -> FetchError | ConnectionError:
        host = host_of(self._request.url)
        match = _NET_ERROR.search(message)
        if match is None:
            if "crash" in message.lower() or "closed" in message.lower():
                return ConnectionError(message.splitlines()[0])
            is_late = "Timeout" in message and "exceeded" in message  # Playwright has a deadline of its own
            kind = "timeout" if is_late else "browser"
            return FetchError(
                f"the browser could not show {host}: {message.splitlines()[0][:200]}", kind=kind, retryable=True
            )
        code = match.group(1)
        text = f"the browser got no page from {host}: {code}"
        if code.startswith(("ERR_CERT", "ERR_SSL")):
            return FetchError(f"{text} (http.verify_tls)", kind="tls", retryable=False)
        if code == "ERR_NAME_NOT_RESOLVED":
            return FetchError(text, kind="dns", retryable=True, contacted=False)
        if code in _NO_ROOM:
            reason = f"the browser could not show {host}: {code}"
            return FetchError(f"{reason}. {shortage()}".removesuffix(". "), kind="browser", retryable=True)
        if code == "ERR_UNSAFE_PORT":
            return FetchError(f"{text}: browsers refuse this port", kind="connect", retryable=False, contacted=False)
        return FetchError(text, kind="connect", retryable=True)


def _fits(width: float, height: float) -> bool:
    """Whether a picture of this size is not too much for the browser."""
    return width <= _MAX_SIDE and width * height <= _MAX_PIXELS
