"""One connection of the browser to the gateway, with all requests that it carries."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import FetchError, ProxyError
from shoal.fetch.browser.gateway_http import (
    CHUNKED,
    UNTIL_CLOSE,
    Chunks,
    RequestHead,
    ResponseHead,
    absolute_target,
    authority,
    forwarded,
    parse_request,
    parse_response,
    written,
)
from shoal.fetch.connecting import Connector, system_text, unresolved
from shoal.fetch.guard import PageReach, not_sent
from shoal.fetch.pipe import Meter, Pipe, open_pipe
from shoal.fetch.proxy import Proxy
from shoal.system import clock

if TYPE_CHECKING:
    from shoal.fetch.browser.gateway import Listener


class Upstream:
    """How the pages of one browser context reach sites: directly, or through a proxy, which resolves the names.

    The guard and the reach of the pages decide about the address that is connected to; with a proxy, about the name.
    """

    def __init__(self, connector: Connector, reach: PageReach, proxy: Proxy | None, tls: ssl.SSLContext | None) -> None:
        self.reach = reach
        self.meter = Meter()
        self.absolute = proxy is not None and proxy.forwards
        """Whether requests for http:// URLs are sent to the proxy, with the whole URL and ``headers``."""
        self.headers = [] if proxy is None else [(name.encode(), text.encode()) for name, text in proxy.headers.items()]
        self._proxy = proxy
        self._tls = tls
        self._connector = connector
        self._caller = connector.names.new_caller()

    def check(self, host: str) -> None:
        """FetchError if the proxy may not be asked for this host."""
        if self._proxy is not None and (reason := self.reach.refuses_host(host)) is not None:
            raise refusal(host, reason)

    async def connect(self, host: str, port: int, *, tunnel: bool) -> Pipe:
        """Connect to the site. Without ``tunnel``, an ``absolute`` upstream connects to the proxy only. FetchError if
        that fails."""
        if self._proxy is None:
            return await self._connect_directly(host, port)
        pipe = await self._proxy.connect(self._tls, self.meter)
        if tunnel or not self.absolute:
            await self._proxy.tunnel(pipe, host, port)
        return pipe

    async def _connect_directly(self, host: str, port: int) -> Pipe:
        try:
            addresses = await self._connector.resolve(host, self._caller)
            selected, reason = self.reach.select(host, [address.host for address in addresses])
            if not selected:
                raise refusal(host, reason)
            allowed = [address for address in addresses if address.host in selected]
            sock = await self._connector.connect_to(allowed, port)
            return await open_pipe(sock, self.meter)
        except socket.gaierror as exc:
            raise unresolved(host, exc) from exc
        except OSError as exc:
            message = f"no connection to {host}: {system_text(exc)}"
            raise FetchError(message, kind="connect", retryable=True) from exc


def refusal(host: str, reason: str) -> FetchError:
    """The error for a refused host. It does not show the address: callers must not explore private networks."""
    return not_sent(f"{host} {reason}", "address")


_log = logging.getLogger(__name__)

_MAX_INTERIM = 16  # responses with a status below 200 before the real one
_MAX_STEP = 65536  # bytes in chunks that are read at once; they may be thousands of chunks
_LINGER_SECONDS = 1.0
_MAX_LINGER_BYTES = 1024 * 1024
_REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")
_STATUSES = {"address": 403, "request": 400, "timeout": 504}
_REASONS = {400: b"Bad Request", 403: b"Forbidden", 502: b"Bad Gateway", 504: b"Gateway Timeout"}
# The texts are the same for all: a page that reads one learns nothing about the network of this machine.
_TEXTS = {
    400: b"The gateway of the browser does not understand this request.\n",
    403: b"The gateway of the browser refuses this request.\n",
    502: b"The gateway of the browser can't connect.\n",
    504: b"The gateway of the browser got no answer in time.\n",
}


class GatewayLimits(NamedTuple):
    """Limits of the gateway. Times are in seconds."""

    max_connections: int = 256
    """Connections from the browser to one listener."""
    max_header_bytes: int = 65536
    header_timeout: float = 10.0
    connect_timeout: float = 10.0
    idle_timeout: float = 60.0
    dns_cache_seconds: float = 60.0


class Site(NamedTuple):
    host: str
    port: int


class Conversation:
    """Serves one connection until it ends. It never raises."""

    def __init__(self, client: Pipe, listener: Listener) -> None:
        self._client = client
        self._listener = listener
        self._upstream: Pipe | None = None
        self._limits = listener.limits
        self._deadline = inf
        self._touched = clock.monotonic()
        self._answered = False
        """Whether a part of the response was sent."""
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._end)
        client.on_end = self.task.cancel

    def check(self, now: float) -> None:
        """End the connection if it takes too long. Call it periodically."""
        for pipe in (self._client, self._upstream):
            if pipe is not None and pipe.active:
                pipe.active = False
                self._touched = now
        if now > self._deadline:
            self._listener.report(_timeout(f"no request within {self._limits.header_timeout:g} s"), None)
            self.task.cancel()
        elif now - self._touched > self._limits.idle_timeout:
            if self._upstream is None or self._answered:
                self.task.cancel()
            else:
                self._upstream.fail(_timeout(f"no answer within {self._limits.idle_timeout:g} s"))

    async def _run(self) -> None:
        try:
            while await self._serve():
                pass
            await self._linger()
        except (EOFError, OSError, FetchError):
            self._client.reset()  # one side is gone, and the other must see it
        except Exception:
            _log.exception("the gateway of the browser failed")

    def _end(self, _: object) -> None:
        """Close the connections after the task, however it ended, even before its first step."""
        self._client.on_end = None
        self._client.abort()
        if self._upstream is not None:
            self._upstream.abort()

    async def _linger(self) -> None:
        """Read what the browser still sends: closing a connection with unread bytes could destroy the response."""
        await self._client.flush()
        self._client.on_end = None
        self._client.finish()
        most = _MAX_LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while most > 0 and (data := await self._client.read()):
                    most -= len(data)

    async def _serve(self) -> bool:
        """Serve one request. False if it was the last one."""
        self._answered = False
        if not await self._client.wait():
            return False
        self._deadline = clock.monotonic() + self._limits.header_timeout
        site = None
        try:
            request = parse_request(await self._client.read_head(self._limits.max_header_bytes))
            self._deadline = inf
            site, path = _site(request)
        except ValueError as exc:
            return await self._answer(_bad_request(exc), site, last=True)
        try:
            if request.method == b"CONNECT":
                return await self._tunnel(site)
            return await self._forward(request, site, path)
        except FetchError as failure:
            if self._answered:
                self._listener.report(failure, site)
                raise
            return await self._answer(failure, site, last=request.length != 0 or not request.persistent)

    async def _answer(self, failure: FetchError, site: Site | None, *, last: bool) -> bool:
        """Send the browser an error response for this failure."""
        self._listener.report(failure, site)
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        status = _STATUSES.get(failure.kind, 502)
        text = _TEXTS[status]
        headers = [
            (b"Content-Type", b"text/plain"),
            (b"Content-Length", b"%d" % len(text)),
            (b"Cache-Control", b"no-store"),
            (b"Proxy-Status", b"shoal; error=%b" % failure.kind.replace(" ", "_").encode()),
            (b"Connection", b"close" if last else b"keep-alive"),
        ]
        await self._client.write(written(b"HTTP/1.1 %d %b" % (status, _REASONS[status]), headers) + text)
        return not last

    async def _connect(self, site: Site, *, tunnel: bool, reuse: bool = False) -> Pipe:
        listener = self._listener
        listener.upstream.check(site.host)
        pipe = listener.take(site) if reuse else None
        if pipe is None:
            timeout = self._limits.connect_timeout
            try:
                async with asyncio.timeout(timeout):
                    pipe = await listener.upstream.connect(site.host, site.port, tunnel=tunnel)
            except TimeoutError as exc:
                raise _timeout(f"no connection to {site.host} within {timeout:g} s (http.connect_timeout)") from exc
        self._upstream = pipe
        listener.report(None, site)
        return pipe

    # -- CONNECT

    async def _tunnel(self, site: Site) -> bool:
        upstream = await self._connect(site, tunnel=True)
        client = self._client
        self._answered = True
        client.on_end = None
        client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        client.join(upstream)
        await client.wait_closed()
        await upstream.wait_closed()
        if upstream.failure is not None:
            raise upstream.failure
        return False

    # -- http:// URLs

    async def _forward(self, request: RequestHead, site: Site, path: str) -> bool:
        reuse = request.length == 0 and request.method in _REPEATABLE
        while True:
            upstream = await self._connect(site, tunnel=False, reuse=reuse)
            was_kept, upstream.kept = upstream.kept, True
            try:
                return await self._exchange(request, site, path, upstream)
            except (EOFError, OSError) as exc:
                if self._answered:
                    raise
                upstream.abort()
                if not was_kept:
                    message = f"{site.host} closed the connection"
                    raise FetchError(message, kind="reset", retryable=True) from exc
                reuse = False  # the site closed a connection that was kept for too long
            except ValueError as exc:
                raise FetchError(f"{site.host} sent invalid HTTP: {exc}", kind="protocol", retryable=False) from exc

    async def _exchange(self, request: RequestHead, site: Site, path: str, upstream: Pipe) -> bool:
        out = self._listener.upstream
        host, _ = absolute_target(request.target)
        target = f"http://{host}{path}" if out.absolute else path
        headers = [(b"Host", host.encode())]
        headers += [header for header in forwarded(request) if header[0].lower() != b"host"]
        headers += out.headers
        await upstream.write(written(b"%b %b HTTP/1.1" % (request.method, target.encode()), headers))
        upload = asyncio.create_task(self._upload(upstream, request.length)) if request.length else None
        try:
            response = await self._read_response(request, upstream)
            last = not request.persistent or response.length == UNTIL_CLOSE
            if upload is not None and not (upload.done() and upload.result()):
                last = True  # the rest of the request must not be read as the next one
            headers = [*forwarded(response), (b"Connection", b"close" if last else b"keep-alive")]
            self._answered = True
            await self._client.write(written(b"HTTP/1.1 %d %b" % (response.status, response.reason), headers))
            complete = await _pass_body(upstream, self._client, response.length)
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)
        self._upstream = None
        if not complete:
            self._listener.report(FetchError("the body is incomplete", kind="half body", retryable=True), site)
        if complete and response.persistent and upload is None and not upstream.pending:
            self._listener.keep(site, upstream)
        else:
            upstream.abort()
        return complete and not last

    async def _upload(self, upstream: Pipe, length: int) -> bool:
        """Send the body of a request. False if a part of it was not sent."""
        try:
            return await _pass_body(self._client, upstream, length)
        except ValueError as exc:
            upstream.fail(_bad_request(exc))
        except (OSError, FetchError):
            pass  # the response tells more
        return False

    async def _read_response(self, request: RequestHead, upstream: Pipe) -> ResponseHead:
        for _ in range(_MAX_INTERIM):
            head = await upstream.read_head(self._limits.max_header_bytes)
            response = parse_response(head, to_head=request.method == b"HEAD")
            if response.status == 407:  # the browser would ask for the password of the gateway
                if not self._listener.upstream.absolute:
                    raise ValueError("it answers like a proxy")
                raise ProxyError("the proxy refused the user and password", retryable=False)
            if response.status == 101:
                raise ValueError("it changes the protocol")
            if response.status >= 200:
                return response
        raise ValueError("too many interim responses")


def _site(request: RequestHead) -> tuple[Site, str]:
    """The host and port, and the path for a URL."""
    if request.method == b"CONNECT":
        return Site(*authority(request.target, 0)), ""
    where, path = absolute_target(request.target)
    return Site(*authority(where, 80)), path


async def _pass_body(source: Pipe, target: Pipe, length: int) -> bool:
    """False if the stream ends before the body does."""
    if length == UNTIL_CLOSE:
        while data := await source.read():
            await target.write(data)
        return True
    chunks = Chunks() if length == CHUNKED else None
    while not chunks.done if chunks is not None else length:
        data = await source.read(_MAX_STEP if chunks is not None else length)
        if not data:
            return False
        if chunks is not None:
            used = chunks.feed(data)
            if used < len(data):
                source.unread(data[used:])
                data = data[:used]
        else:
            length -= len(data)
        await target.write(data)
    return True


def _bad_request(exc: ValueError) -> FetchError:
    return not_sent(f"invalid request: {exc}", "request")


def _timeout(message: str) -> FetchError:
    return FetchError(message, kind="timeout", retryable=True)
