"""Watches and controls the requests of a browser page through DevTools.

Playwright's own `route` would disable the browser's cache. So this module watches requests by events, and pauses only
documents and blocked types to decide about them.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin

from msgspec import Struct

from shoal.config import BrowserSettings
from shoal.errors import FetchError
from shoal.fetch.browser.process import tolerated
from shoal.http import Request
from shoal.http.rendering import Captured, Permit
from shoal.system import clock
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Page

log = logging.getLogger("shoal.browser")

T = TypeVar("T")
Event = dict[str, Any]
MAX_CAPTURED_BYTES = 16 * 1024 * 1024  # of all responses that are captured of one page
_MAX_CAPTURED = 200
_MAX_NAVIGATIONS = 10  # that actions may cause on one page
_HTML = ("text/html", "application/xhtml+xml")
_ENDLESS = frozenset({"EventSource", "WebSocket", "Media", "Ping"})
"""Types of requests that may never end. They do not keep a page from being quiet."""
_ONE_WINDOW = """(() => {
    const here = target => target && !["_self", "_top", "_parent"].includes(target.toLowerCase());
    window.open = url => { if (url) location.assign(url); return window; };
    addEventListener("click", event => {
        for (const each of event.composedPath()) {
            if (here(each.target)) each.target = "_self";
            if (here(each.formTarget)) each.formTarget = "_self";
        }
    }, true);
    addEventListener("submit", event => { if (here(event.target.target)) event.target.target = "_self"; }, true);
})()"""
"""A script that makes links and forms open in the page itself instead of a new window."""
_TYPES = {"image": "Image", "media": "Media", "font": "Font"}


class LoadedDocument(Struct, kw_only=True):
    """The answer to the navigation, if it is not shown in the page: a redirect, or something that is not HTML."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    url: str = ""
    """Where a redirect leads. Empty if it is not a redirect."""
    post: tuple[bytes, str] | None = None
    """The body and its type, if the page sends a form there."""


class PageWatch:
    """Watches one page object. `begin` prepares it for the next page."""

    def __init__(
        self, page: Page, session: CDPSession, settings: BrowserSettings, on_bytes: Callable[[int], None]
    ) -> None:
        """``on_bytes`` is called with the number of bytes that the page received."""
        self.page = page
        self._session = session
        self._settings = settings
        self._on_bytes = on_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._frame = ""
        self._script = ""
        self.number = 0
        """How many pages it has watched."""
        self._reset(Request("http://reset.invalid/"))

    def _reset(self, request: Request) -> None:
        self.request = request
        self.status = 0
        self.latency = 0.0
        """Seconds from sending the request to receiving the headers of the document."""
        self._sent = 0.0
        self.headers: list[tuple[str, str]] = []
        self.shown = (0, self.headers)
        """Status and headers of the document that the page shows: actions may have led to another one."""
        self.sent: dict[str, str] = {}
        """The headers of the request for the document, as far as DevTools knows them."""
        self.source: bytes | None = None
        """The document as it arrived, without content codings; None if it is not wanted, or was not read."""
        self.requests = 0
        self.captured: list[Captured] = []
        self.acting = False
        """Actions of the user are running: they may navigate within the host."""
        self.decided: asyncio.Future[LoadedDocument] = asyncio.get_running_loop().create_future()
        """Set when the navigation ends with something other than a page."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the page exceeds a limit, or crashes."""
        for future in (self.decided, self.failed):
            future.add_done_callback(_ignore)
        self._navigations = 0
        self._first = ""
        self.received = 0
        """Bytes that DevTools has seen the page receive."""
        self._sizes: dict[str, int] = {}
        self._pending: set[str] = set()
        self._changed = asyncio.Event()
        self._wanted: dict[str, Event] = {}
        self._capture: tuple[str, ...] = ()
        self._captured_bytes = 0
        self._chosen = 0
        """How many responses are captured, or will be."""
        self._left_out = False
        self._keeps_source = False
        self._permit: Permit | None = None

    async def attach(self) -> None:
        session = self._session
        session.on("Fetch.requestPaused", self._on_paused)
        session.on("Network.requestWillBeSent", self._on_request)
        session.on("Network.responseReceived", self._on_response)
        session.on("Network.dataReceived", self._on_data)
        session.on("Network.loadingFinished", self._on_finished)
        session.on("Network.loadingFailed", self._on_failed)
        tree = await session.send("Page.getFrameTree")
        self._frame = tree["frameTree"]["frame"]["id"]
        await session.send("Network.enable", {"maxTotalBufferSize": MAX_CAPTURED_BYTES * 2})
        await session.send("Network.setBypassServiceWorker", {"bypass": True})
        if self._settings.block_urls:
            await session.send("Network.setBlockedURLs", {"urls": list(self._settings.block_urls)})
        patterns: list[Event] = [
            {"resourceType": "Document", "requestStage": "Request"},
            {"resourceType": "Document", "requestStage": "Response"},
        ]
        patterns += [{"resourceType": _TYPES[kind]} for kind in self._settings.block]
        await session.send("Fetch.enable", {"patterns": patterns})

    def begin(
        self,
        request: Request,
        capture: tuple[str, ...],
        *,
        keeps_source: bool = False,
        permit: Permit | None = None,
    ) -> None:
        """Watch the next page, which is for this request. ``permit`` decides about navigations of actions."""
        self._reset(request)
        self.number += 1
        self._capture = capture
        self._keeps_source = keeps_source
        self._permit = permit

    async def begin_actions(self) -> None:
        """Let the page navigate within its host, for actions of the user. Links to a new window open in the page."""
        self.acting = True
        script = {"source": _ONE_WINDOW}
        await self._session.send("Page.enable")
        answer = await self._session.send("Page.addScriptToEvaluateOnNewDocument", script)
        self._script = answer["identifier"]
        await self._session.send("Runtime.evaluate", {"expression": _ONE_WINDOW})

    async def end_actions(self) -> None:
        self.acting = False
        await self._session.send("Page.removeScriptToEvaluateOnNewDocument", {"identifier": self._script})
        await self._session.send("Page.disable")

    async def collect_garbage(self) -> None:
        """Free the memory that earlier pages left in this page's process. It waits until the page responds."""
        await self._session.send("HeapProfiler.collectGarbage")

    async def layout(self) -> tuple[float, float, float, float]:
        """How far the page is scrolled, and the width and height of the whole page. Its scripts cannot forge this."""
        metrics = await self._session.send("Page.getLayoutMetrics")
        view, whole = metrics["cssVisualViewport"], metrics["cssContentSize"]
        return view["pageX"], view["pageY"], whole["width"], whole["height"]

    def crash(self) -> None:
        self._fail(ConnectionError("the page crashed"))

    def exceed(self) -> None:
        """Fail the page: it loads more bytes than it may."""
        self._fail(too_large(self._settings))

    async def settle(self, quiet: float) -> None:
        """Wait until no request of the page was in flight for ``quiet`` seconds."""
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if self._pending else quiet):
                    await self._changed.wait()
            except TimeoutError:
                return

    # -- events

    def _on_request(self, event: Event) -> None:
        self.requests += 1
        if self.requests > self._settings.max_requests:
            reason = f"the page makes more than {self._settings.max_requests} requests (browser.max_requests)"
            self._fail(FetchError(reason, kind="too many requests", retryable=False))
        if event.get("type") not in _ENDLESS:
            self._pending.add(event["requestId"])
            self._changed.set()

    def _on_response(self, event: Event) -> None:
        url = event["response"]["url"]
        if any(fnmatchcase(url, pattern) for pattern in self._capture):
            if self._chosen < _MAX_CAPTURED:
                self._chosen += 1
                self._wanted[event["requestId"]] = event["response"]
            else:
                self._leave_out(url)

    def _on_data(self, event: Event) -> None:
        self._count(event["requestId"], event["encodedDataLength"])

    def _count(self, request: str, size: int) -> None:
        """Count bytes of a request of the page."""
        self._sizes[request] = self._sizes.get(request, 0) + size
        self.received += size
        self._on_bytes(size)

    def _on_finished(self, event: Event) -> None:
        counted = self._sizes.get(event["requestId"], 0)
        self._count(event["requestId"], max(0, int(event["encodedDataLength"]) - counted))
        response = self._wanted.pop(event["requestId"], None)
        if response is not None:
            self._do(self._keep(event["requestId"], response))
        else:
            self._end(event["requestId"])

    def _on_failed(self, event: Event) -> None:
        self._wanted.pop(event["requestId"], None)
        self._end(event["requestId"])

    def _end(self, request: str) -> None:
        self._pending.discard(request)
        self._changed.set()

    async def _keep(self, request: str, response: Event) -> None:
        body = None
        try:
            body = _decode(await self._session.send("Network.getResponseBody", {"requestId": request}))
        finally:  # the browser has dropped a body that is too large for it
            if body is not None and self._captured_bytes + len(body) <= MAX_CAPTURED_BYTES:
                self._captured_bytes += len(body)
                self.captured.append(Captured(response["url"], response["status"], response["mimeType"], body))
            else:
                self._leave_out(response["url"])
            self._end(request)

    def _leave_out(self, url: str) -> None:
        """Say once for each page that not all responses are captured."""
        if not self._left_out:
            self._left_out = True
            most = f"{_MAX_CAPTURED} responses and {MAX_CAPTURED_BYTES >> 20} MB"
            log.warning("not captured: %.200r. At most %s of a page are url=%s", url, most, self.request.url)

    def _on_paused(self, event: Event) -> None:
        self._do(self._decide(event))

    async def _decide(self, event: Event) -> None:
        """Continue, change or end a request that DevTools paused."""
        request = event["requestId"]
        kind = event.get("resourceType")
        if kind != "Document":
            await self._session.send("Fetch.failRequest", {"requestId": request, "errorReason": "BlockedByClient"})
        elif event.get("frameId") != self._frame:
            await self._session.send("Fetch.continueRequest", {"requestId": request})
        elif "responseStatusCode" in event or "responseErrorReason" in event:
            await self._decide_response(request, event)
        else:
            await self._decide_navigation(request, event)

    async def _decide_navigation(self, request: str, event: Event) -> None:
        url = event["request"]["url"]
        begun_again = url == self._first and not self.status  # in another process of the browser
        self._navigations += not begun_again
        if self._navigations == 1:
            self._first = url
            self._sent = clock.monotonic()
            await self._session.send("Fetch.continueRequest", {"requestId": request, **self._changes(event)})
            return
        same_host = host_of(url) == host_of(self.request.url) if url.startswith("http") else False
        if self.acting and same_host and self._navigations <= _MAX_NAVIGATIONS and await self._permitted(request, url):
            await self._session.send("Fetch.continueRequest", {"requestId": request})
            return
        # The page navigates elsewhere: return that as a redirect, so that the frontier decides whether and when.
        await self._session.send("Fetch.failRequest", {"requestId": request, "errorReason": "Aborted"})
        self._decided(LoadedDocument(status=302, headers=[("Location", url)], url=url, post=_post(event["request"])))

    async def _permitted(self, request: str, url: str) -> bool:
        """Whether actions may navigate to this URL of the host. Waits for the delay of the host."""
        if self._permit is None:
            return True
        self._pending.add(request)  # the page is not quiet meanwhile
        try:
            wait = await self._permit(url)
            if wait is None or wait > self._settings.page_timeout / 6:
                return False
            await asyncio.sleep(wait)
            return True
        finally:
            self._end(request)

    def _changes(self, event: Event) -> Event:
        """Method, headers and body of the request. Only the document gets them: other requests get no secrets. Its
        cookies are in the context."""
        own = self.request
        added = {name: value for name, value in own.headers.items() if name.lower() != "cookie"}
        names = {name.lower() for name in added}
        headers = {name: value for name, value in event["request"]["headers"].items() if name.lower() not in names}
        headers.update(added)
        changes: Event = {"headers": [{"name": name, "value": value} for name, value in headers.items()]}
        if own.method != "GET":
            changes["method"] = own.method
        if own.body:
            changes["postData"] = base64.b64encode(own.body).decode()
        return changes if added or own.method != "GET" else {}

    async def _decide_response(self, request: str, event: Event) -> None:
        headers = [(header["name"], header["value"]) for header in event.get("responseHeaders", ())]
        status = event.get("responseStatusCode", 0)
        values = {name.lower(): value for name, value in headers}
        if self._navigations == 1:
            self.status, self.headers, self.sent = status, headers, event["request"]["headers"]
            self.latency = clock.monotonic() - self._sent
        self.shown = status, headers
        if values.get("proxy-status", "").startswith("shoal; error=") and event["request"]["url"].startswith("http:"):
            await self._session.send("Fetch.failRequest", {"requestId": request, "errorReason": "ConnectionFailed"})
            self._fail(FetchError("the gateway made no connection", kind="connect", retryable=True))
            return
        if 300 <= status < 400 and "location" in values:
            await self._session.send("Fetch.failRequest", {"requestId": request, "errorReason": "Aborted"})
            url = urljoin(event["request"]["url"], values["location"])  # actions may have led to another page
            headers = [pair for pair in headers if pair[0].lower() != "location"]
            self._decided(LoadedDocument(status=status, headers=[*headers, ("Location", url)], url=url))
            return
        content_type = values.get("content-type", "text/html").partition(";")[0].strip().lower()
        attached = values.get("content-disposition", "").strip().lower().startswith("attachment")
        if status in (204, 205) or attached or content_type not in _HTML:
            await self._take(request, LoadedDocument(status=status, headers=headers), attached)
            return
        if self._keeps_source and self._navigations == 1:
            self.source = _decode(await self._session.send("Fetch.getResponseBody", {"requestId": request}))
        await self._session.send("Fetch.continueRequest", {"requestId": request})

    async def _take(self, request: str, document: LoadedDocument, attached: bool) -> None:
        """Take the body of something that is not a page, with a limit on its size."""
        refused = attached and self._settings.downloads == "refuse"
        if not refused and document.status not in (204, 205):
            document.body = await self._read(request)
        async with tolerated("aborting a request"):
            await self._session.send("Fetch.failRequest", {"requestId": request, "errorReason": "Aborted"})
        if refused:
            self._fail(FetchError("the page is a download (browser.downloads)", kind="download", retryable=False))
        else:
            self._decided(document)

    async def _read(self, request: str) -> bytes:
        stream = (await self._session.send("Fetch.takeResponseBodyAsStream", {"requestId": request}))["stream"]
        body = bytearray()
        while len(body) <= self._settings.max_bytes:
            part = await self._session.send("IO.read", {"handle": stream, "size": 1 << 18})
            body += base64.b64decode(part["data"]) if part.get("base64Encoded") else part["data"].encode()
            if part["eof"]:
                return bytes(body)
        raise too_large(self._settings)

    def _decided(self, document: LoadedDocument) -> None:
        if not self.decided.done():
            self.decided.set_result(document)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except FetchError as exc:
            self._fail(exc)
        except Exception as exc:  # the page or the browser ended meanwhile; its other calls fail too
            log.debug("could not handle a request of the page: %s", exc)


def too_large(settings: BrowserSettings) -> FetchError:
    message = f"the page loads more than {settings.max_bytes} bytes (browser.max_bytes)"
    return FetchError(message, kind="too large", retryable=False)


def _post(sent: Event) -> tuple[bytes, str] | None:
    """What a form sends."""
    if sent["method"] != "POST":
        return None
    body = b"".join(base64.b64decode(part.get("bytes", "")) for part in sent.get("postDataEntries", ()))
    return body, next((value for name, value in sent["headers"].items() if name.lower() == "content-type"), "")


def _decode(answer: Event) -> bytes:
    body: str = answer["body"]
    return base64.b64decode(body) if answer["base64Encoded"] else body.encode()


def _ignore(future: asyncio.Future[T]) -> None:
    """Keep asyncio from logging an exception that nobody awaits."""
    if not future.cancelled():
        future.exception()
