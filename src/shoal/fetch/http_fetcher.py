"""Fetches pages over its own HTTP/1.1 connections, directly or through proxies.

`HttpFetcher` sends requests. `ConnectionPool` decides which connections stay open, and when to open a new one.

A TLS handshake costs as much CPU time as twenty requests over an open connection. So a request for a host that has TLS
connections waits a moment until one of them is free. While requests wait and this process has nothing to do, the number
of connections doubles every few milliseconds. So a fast server is used over a few connections, and a slow one soon over
as many as there are requests. A busy crawler spends its time on pages.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from shoal.config import DnsSettings, HttpSettings
from shoal.errors import ConfigError, FetchError, ProxyError
from shoal.fetch.bodies import FREE_BYTES, body_room
from shoal.fetch.connecting import (
    Connector,
    RefusedAddressError,
    TlsClient,
    TlsTransport,
    one_line,
    system_text,
    unresolved,
    without_verification,
)
from shoal.fetch.guard import AddressGuard, check_upstream, not_sent
from shoal.fetch.http_connection import HttpConnection, ResponseLimits
from shoal.fetch.resolving import Caller, Names, current_caller
from shoal.http import Request, Response
from shoal.http.decompress import ACCEPTED, decompress
from shoal.http.exchange import Exchange, captured
from shoal.http.files import FILE_CALLBACK
from shoal.ports import Fetcher
from shoal.system import clock, threads
from shoal.urls.normalize import host_of, origin_of

if TYPE_CHECKING:
    from shoal.fetch.pipe import Pipe
    from shoal.fetch.proxy import Proxy

_MAX_IDLE = 512  # connections that wait for another request, to all hosts together
_MANY_IDLE = 256  # beyond this number, no host keeps a second one: each needs 50 KB for TLS
_CHECK_AFTER = 0.002  # seconds between two checks whether waiting requests should open connections
_BUSY = 0.75  # the process is busy above this share of CPU time, in all threads: SQLite has one of its own
_MAX_WAITS = 64  # of so many requests that would wait, one opens a connection: waiting has a cost too
_MAX_WAIT = 0.06  # seconds (a few rounds of pages) until waiting requests open connections even in a busy process

Place = HttpConnection | None
"""A connection to use. None: the permission to open one."""


class _Connections:
    """The connections to one origin."""

    __slots__ = ("busy", "checked_at", "idle", "timer", "waiters", "waits", "waits_since", "worked")

    def __init__(self) -> None:
        self.idle: list[HttpConnection] = []
        self.busy = 0
        """Connections that are in use or being opened."""
        self.waits = 0
        """How many requests have waited since the last one that did not wait."""
        self.waiters: deque[asyncio.Future[Place]] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.waits_since = self.checked_at = self.worked = 0.0
        """When the wait began, when it was last checked, and the CPU time of the process at that check."""


class ConnectionPool:
    """Keeps at most ``_MAX_IDLE`` connections that can be used again, each for ``keep_alive_seconds``. Beyond
    ``_MANY_IDLE``, it keeps only one connection for each host.

    A request calls `take`, uses the connection or opens one, and calls `give_back`.
    """

    def __init__(self, keep_alive_seconds: float) -> None:
        self._keep_alive = keep_alive_seconds
        self._origins: dict[str, _Connections] = {}
        self._idle_since: dict[HttpConnection, float] = {}  # the one that is idle for longest comes first
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle_connections(self) -> int:
        """How many connections are idle."""
        return len(self._idle_since)

    def take(self, origin: str) -> Place | asyncio.Future[Place]:
        """A place for one request. If it is a future, pass it to `wait`."""
        connections = self._origins.get(origin)
        if connections is None:
            connections = self._origins[origin] = _Connections()
        if connections.idle:
            connections.busy += 1
            connection = connections.idle.pop()
            del self._idle_since[connection]
            return connection
        connections.waits += 1
        if connections.busy == 0 or connections.waits >= _MAX_WAITS or self._closed or not origin.startswith("https:"):
            connections.waits = 0
            connections.busy += 1
            return None
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        connections.waiters.append(waiter)
        if connections.timer is None:
            connections.waits_since = connections.checked_at = clock.monotonic()
            connections.worked = time.process_time()
            connections.timer = self._later(_CHECK_AFTER, lambda: self._check(origin, connections))
        return waiter

    async def wait(self, origin: str, waiter: asyncio.Future[Place]) -> Place:
        """Wait for the place that `take` promised."""
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # the place came at the same moment, and nobody else has it
                self.give_back(origin, waiter.result())
            raise

    def give_back(self, origin: str, connection: Place) -> None:
        """Return a place, with its connection if it has one. A connection that can't be used again is closed."""
        connections = self._origins[origin]
        if connection is not None:
            if connection.reusable and self._keep_alive > 0 and not self._closed:
                connection.remember_session()
            else:
                connection.abort()
                connection = None
        while connections.waiters:
            waiter = connections.waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)  # the waiter takes over the place too
                return
        connections.busy -= 1
        if connection is not None:
            self._keep(connections, connection)
        else:
            self._forget_unused(origin, connections)

    def _check(self, origin: str, connections: _Connections) -> None:
        """Let waiting requests double the number of connections, unless this process is busy."""
        now, worked = clock.monotonic(), time.process_time()
        is_busy = worked - connections.worked > _BUSY * (now - connections.checked_at)
        connections.checked_at, connections.worked = now, worked
        if not is_busy or now > connections.waits_since + _MAX_WAIT:
            connections.waits_since = now
            more = connections.busy
            while connections.waiters and more:
                waiter = connections.waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    connections.busy += 1
                    more -= 1
        connections.timer = None
        if connections.waiters:
            connections.timer = self._later(_CHECK_AFTER, lambda: self._check(origin, connections))
        else:
            self._forget_unused(origin, connections)

    def _keep(self, connections: _Connections, connection: HttpConnection) -> None:
        connections.idle.append(connection)
        self._idle_since[connection] = asyncio.get_running_loop().time()
        if len(self._idle_since) > _MANY_IDLE and len(connections.idle) > 1:
            self.drop(connections.idle[0])
        elif len(self._idle_since) > _MAX_IDLE:
            self.drop(next(iter(self._idle_since)))
        if self._sweeper is None:
            self._sweeper = self._later(self._keep_alive, self._sweep)

    def drop(self, connection: HttpConnection) -> None:
        """Close an idle connection, or forget one that closed by itself."""
        if self._idle_since.pop(connection, None) is not None:
            connections = self._origins[connection.origin]
            connections.idle.remove(connection)
            self._forget_unused(connection.origin, connections)
            connection.abort()

    def _forget_unused(self, origin: str, connections: _Connections) -> None:
        if not (connections.busy or connections.idle or connections.waiters or connections.timer):
            del self._origins[origin]

    def _sweep(self) -> None:
        """Close the connections that have been idle for too long."""
        self._sweeper = None
        expired = asyncio.get_running_loop().time() - self._keep_alive
        while self._idle_since:
            connection, since = next(iter(self._idle_since.items()))
            if since > expired:
                self._sweeper = self._later(since - expired, self._sweep)
                return
            self.drop(connection)

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)

    def close(self) -> None:
        """Close all idle connections. Let waiting requests open a connection: the fetcher refuses that."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._idle_since):
            self.drop(connection)
        for connections in self._origins.values():
            if connections.timer is not None:
                connections.timer.cancel()
                connections.timer = None
            for waiter in connections.waiters:
                if not waiter.done():
                    waiter.set_result(None)
                    connections.busy += 1
            connections.waiters.clear()


_BUFFER = 1 << 16  # bytes to receive at once
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})  # these have a body, even if it is empty
_FRAMING = ("content-length", "transfer-encoding")  # headers that say where a body ends
_URL = re.compile(r"[!-~]+")
_UNSAFE = re.compile(r"[\r\n\0]")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpFetcher:
    """Fetches pages over persistent connections. It does not follow redirects: each hop is a separate request, so that
    politeness, scope and robots.txt apply to it.

    With a guard, it never connects to a refused address. If a name has refused and other addresses, it uses the others:
    a public site with a wrong DNS entry still works, and nothing private is reached. It uses only the proxies in
    ``upstreams``, which the operator trusts, and asks them only for hosts that can be public.

    Requests through different proxies, or with different users of one, never share a connection or a TLS session. If
    the server closes a reused connection instead of answering, the fetcher repeats the request once on a new
    connection, if its method allows that.
    """

    def __init__(
        self,
        config: HttpSettings,
        user_agent: str,
        guard: AddressGuard | None = None,
        upstreams: Collection[str] = (),
        *,
        max_file_bytes: int | None = None,
        dns: DnsSettings = DnsSettings(),
    ) -> None:
        """``max_file_bytes`` replaces the size limit for requests of files."""
        if guard is not None and config.proxy is not None:
            raise ConfigError('"http.proxy" can\'t be used here: a proxy would bypass the address guard (serve.allow)')
        self._config = config
        self._guard = guard
        self._upstreams = frozenset(upstreams)
        self._max_file_bytes = max_file_bytes
        self._connector = Connector(guard, Names(dns, config.dns_cache_seconds))
        self._to_proxies = Connector(None, self._connector.names)
        headers = {
            "User-Agent": user_agent,
            "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            "Accept-Encoding": ACCEPTED,
            **config.headers,
        }
        self._headers = {name.lower(): (name, value) for name, value in headers.items()}
        self._default_lines = _lines(self._headers.values())
        self._buffer = memoryview(bytearray(_BUFFER))
        self._tls: asyncio.Task[TlsClient] | None = None
        self._pool = ConnectionPool(config.keep_alive_seconds)
        self._in_use: set[HttpConnection] = set()
        self._closed = False

    def limited_to(self, max_body_bytes: int) -> Fetcher:
        """A fetcher with another size limit that shares these connections. Closing it does not close them."""
        return _LimitedFetcher(self, max_body_bytes, self._connector.names.new_caller())

    async def fetch(self, request: Request, max_body_bytes: int | None = None) -> Response:
        """``max_body_bytes`` replaces the configured limit."""
        config = self._config
        proxy_url = request.proxy or config.proxy
        proxy = self._proxy_for(request, proxy_url) if proxy_url else None
        if max_body_bytes is None:
            max_body_bytes = config.max_body_bytes
            if request.callback == FILE_CALLBACK and self._max_file_bytes is not None:
                max_body_bytes = self._max_file_bytes
        exchanges = captured.get()
        began = 0.0 if exchanges is None else clock.time()
        started = clock.monotonic()
        read_timeout, total = config.read_timeout, config.total_timeout
        if request.timeout is not None:
            read_timeout = total = request.timeout
        deadline = asyncio.get_running_loop().time() + total
        room = body_room.get()
        limits = ResponseLimits(deadline, read_timeout, max_body_bytes, config.max_header_bytes, room)
        message = self._message(request, proxy)
        try:
            # Do not await anything between here and `_response`: another request may use the connection already.
            connection = await self._exchange(request, message, limits, proxy)
        except TimeoutError as exc:
            whose = "http.total_timeout" if request.timeout is None else "the request's timeout"
            problem = f"{_host_name(request, proxy)} did not send the whole page within {total:g} s ({whose})"
            raise FetchError(problem, kind="timeout", retryable=True) from exc
        elapsed = connection.answered_at - started
        if connection.status == 407 and proxy is not None and _is_forwarded(request, proxy):
            raise proxy.refusal(host_of(request.url), 407, connection.reason)
        if exchanges is not None:
            exchanges.append(_exchange_of(request, message, connection, began, elapsed))
        response, transfer_coding = _response(request, connection, elapsed)
        if response.body and (transfer_coding or "Content-Encoding" in response.headers):
            if room is not None and max_body_bytes > FREE_BYTES:
                try:
                    _decompress(response, transfer_coding, FREE_BYTES)
                    return response
                except FetchError as exc:
                    if exc.kind != "too large":
                        raise
                await room.reserve(max_body_bytes)
            _decompress(response, transfer_coding, max_body_bytes)
        return response

    async def _exchange(
        self, request: Request, message: bytes, limits: ResponseLimits, proxy: Proxy | None
    ) -> HttpConnection:
        """Send the request, and return the connection that has the response."""
        origin, head_only, pool = origin_of(request.url), request.method == "HEAD", self._pool
        if proxy is not None:
            origin = f"{origin} {proxy.url}"
        place = pool.take(origin)
        connection = await pool.wait(origin, place) if isinstance(place, asyncio.Future) else place
        try:
            if connection is not None:
                self._in_use.add(connection)
                try:
                    await connection.exchange(message, limits, head_only=head_only)
                    return connection
                except FetchError:
                    if not connection.unheard or request.method not in _REPEATABLE:
                        raise
                finally:
                    self._in_use.discard(connection)
            connection = None
            connection = await self._connect(request, origin, limits.deadline, proxy)
            self._in_use.add(connection)
            try:
                await connection.exchange(message, limits, head_only=head_only)
            finally:
                self._in_use.discard(connection)
            return connection
        finally:
            pool.give_back(origin, connection)

    def _proxy_for(self, request: Request, url: str) -> Proxy:
        """The proxy with this URL. FetchError if it cannot be used, or not for the host of the request."""
        if self._guard is not None:
            check_upstream(url, self._upstreams)
            self._guard.check_host(_address(origin_of(request.url))[1])
        from shoal.fetch.proxy import Proxy  # few crawls need it

        try:
            return Proxy(url, self._to_proxies)
        except ConfigError as exc:
            raise not_sent(str(exc), "proxy") from exc

    # -- what is sent

    def _message(self, request: Request, proxy: Proxy | None) -> bytes:
        """The request as bytes. FetchError if it cannot be sent."""
        url = request.url
        try:
            if not _URL.fullmatch(url):
                raise ValueError("a character of the URL is not quoted")
            path, host = url[url.index("/", 8) :], host_of(url)
            is_plain = not request.headers and request.method == "GET" and not request.body
            if is_plain and proxy is None and "@" not in url[: -len(path)]:
                return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{self._default_lines}\r\n".encode()
            headers = {"host": ("Host", host), **self._headers}
            if proxy is not None and _is_forwarded(request, proxy):
                path = f"http://{host}{path}"
                headers.update((name.lower(), (name, value)) for name, value in proxy.headers.items())
            if user := URL(url, encoded=True).user:
                login = f"{user}:{URL(url, encoded=True).password or ''}"
                headers["authorization"] = ("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
            headers.update((name.lower(), (name, value)) for name, value in request.headers.items())
            for name in _FRAMING:  # the caller's headers may describe another body, such as one of a browser
                headers.pop(name, None)
            if request.body or request.method in _WITH_LENGTH:
                headers["content-length"] = ("Content-Length", str(len(request.body)))
            return f"{request.method} {path} HTTP/1.1\r\n{_lines(headers.values())}\r\n".encode() + request.body
        except ValueError as exc:
            raise _unsendable(request, exc) from exc

    # -- connections

    async def _connect(self, request: Request, origin: str, deadline: float, proxy: Proxy | None) -> HttpConnection:
        """Open a connection. FetchError if that fails, TimeoutError after the deadline."""
        host, patience = _host_name(request, proxy), self._config.connect_timeout
        scheme, name, port = _address(origin_of(request.url))
        connection = HttpConnection(host, self._buffer, self._pool.drop)
        connection.origin = origin
        connect_timeout = asyncio.timeout(patience)
        pipe: Pipe | None = None
        try:
            async with asyncio.timeout_at(deadline):
                is_secure = scheme == "https"
                tls = await self._tls_client() if is_secure or (proxy is not None and proxy.is_secure) else None
                addresses = await self._connector.resolve(name) if proxy is None else []
                async with connect_timeout:
                    if proxy is None:
                        way: socket.socket | Pipe = await self._connector.connect_to(addresses, port)
                    else:
                        way = pipe = await proxy.connect(None if tls is None else tls.context)
                        if not _is_forwarded(request, proxy):
                            await proxy.tunnel(pipe, name, port)
                    await self._open(connection, way, tls if is_secure else None, name)
        except TimeoutError as exc:
            if exc.errno:  # the timeout is that of the system
                raise _explain(exc, host) from exc
            if not connect_timeout.expired():
                raise
            if proxy is not None and pipe is None:
                message = f"no connection to the proxy within {patience:g} s (http.connect_timeout)"
                raise ProxyError(message, retryable=True) from exc
            message = f"no connection to {host} within {patience:g} s (http.connect_timeout)"
            raise FetchError(message, kind="timeout", retryable=True) from exc
        except socket.gaierror as exc:
            if isinstance(exc.__cause__, ValueError):
                raise _unsendable(request, exc.__cause__) from exc
            raise unresolved(host, exc) from exc
        except OSError as exc:
            raise _explain(exc, host) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise _too_late(host) from exc  # `close` cancelled a task that requests share
        if self._closed:
            connection.abort()
            raise _too_late(host)
        if proxy is not None:
            connection.address = ""  # that of the proxy
        return connection

    async def _tls_client(self) -> TlsClient:
        """Make the TLS client on first use, in a thread: reading all authorities would delay other connections."""
        if self._tls is None or (self._tls.done() and (self._tls.cancelled() or self._tls.exception())):
            self._tls = asyncio.create_task(threads.call(_make_tls_client, self._config.verify_tls))
        return await asyncio.shield(self._tls)

    async def _open(
        self, connection: HttpConnection, way: socket.socket | Pipe, tls: TlsClient | None, name: str
    ) -> None:
        """Open the connection over a socket or a pipe that is connected to the server."""
        secure = None
        if tls is not None:
            secure = TlsTransport(tls, connection.origin, name.rstrip("."), connection, self._buffer)
        try:
            if isinstance(way, socket.socket):
                await asyncio.get_running_loop().create_connection(lambda: secure or connection, sock=way)
            else:
                way.hand_over(secure or connection)
        except BaseException:
            way.close() if isinstance(way, socket.socket) else way.abort()
            raise
        if secure is not None:
            try:
                await secure.ready
            except BaseException:
                secure.abort()
                raise

    @property
    def idle_connections(self) -> int:
        """How many connections are idle."""
        return self._pool.idle_connections

    async def close(self) -> None:
        self._closed = True
        self._pool.close()
        for connection in list(self._in_use):
            connection.abort()
        if self._tls is not None:
            self._tls.cancel()
        self._connector.close()
        await asyncio.sleep(0)  # the event loop closes the sockets


class _LimitedFetcher:
    """A fetcher that shares the connections of another, but not its limit of lookups."""

    def __init__(self, owner: HttpFetcher, max_body_bytes: int, caller: Caller) -> None:
        self._owner = owner
        self._max_body_bytes = max_body_bytes
        self._caller = caller

    async def fetch(self, request: Request) -> Response:
        token = current_caller.set(self._caller)
        try:
            return await self._owner.fetch(request, self._max_body_bytes)
        finally:
            current_caller.reset(token)

    async def close(self) -> None:
        pass


def _host_name(request: Request, proxy: Proxy | None) -> str:
    """The host, as messages name it."""
    host = host_of(request.url)
    return host if proxy is None else proxy.shown(host)


def _is_forwarded(request: Request, proxy: Proxy) -> bool:
    """Whether the proxy gets the request itself. Otherwise it connects to the host."""
    return proxy.forwards and request.url.startswith("http:")


def _lines(headers: Iterable[tuple[str, str]]) -> str:
    """The headers as lines. ValueError if one has a line break: a cookie from a server must not add a header."""
    text = ""
    for name, value in headers:
        if _UNSAFE.search(name) or _UNSAFE.search(value):
            raise ValueError(f"the header {name} has a line break")
        text += f"{name}: {value}\r\n"
    return text


def _address(origin: str) -> tuple[str, str, int]:
    """Scheme, host and port of ``scheme://host:port``."""
    scheme, _, rest = origin.partition("://")
    name, colon, port = rest.rpartition("@")[2].rpartition(":")
    if not colon or port.endswith("]"):  # no port; the colon is part of an IPv6 address
        return scheme, (name + colon + port).strip("[]"), _DEFAULT_PORTS[scheme]
    return scheme, name.strip("[]"), int(port)


def _exchange_of(
    request: Request, message: bytes, connection: HttpConnection, began: float, elapsed: float
) -> Exchange:
    _, *lines = message.partition(b"\r\n\r\n")[0].split(b"\r\n")
    parts = (line.partition(b": ") for line in lines)
    return Exchange(
        url=request.url, method=request.method, sent=[(name, value) for name, _, value in parts],
        sent_body=request.body, version=connection.version, status=connection.status, reason=connection.reason,
        received=list(connection.headers), body=bytes(connection.body), began=began, elapsed=elapsed,
        address=connection.address,
    )  # fmt: skip


def _response(request: Request, connection: HttpConnection, elapsed: float) -> tuple[Response, str]:
    """The response as it was received, and its transfer coding."""
    headers = CIMultiDictProxy(
        CIMultiDict(
            [
                (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
                for name, value in connection.headers
            ]
        )
    )
    body = connection.body if isinstance(connection.body, bytes) else bytes(connection.body)
    connection.forget()
    response = Response(
        request.url,
        status=connection.status,
        headers=headers,
        body=body,
        request=request,
        elapsed=elapsed,
        flags=connection.flags,
    )
    return response, connection.transfer_coding


def _decompress(response: Response, transfer_coding: str, limit: int) -> None:
    """Undo the codings of a body. FetchError if it is larger than ``limit`` then; the response is not changed."""
    body, flags = response.body, tuple(response.flags)
    for coding in (transfer_coding, response.headers.get("Content-Encoding")):
        if coding and body:
            body, odd = decompress(body, coding, limit)
            flags += odd
    response.body, response.flags = body, flags


def _make_tls_client(verify: bool) -> TlsClient:
    return TlsClient(ssl.create_default_context() if verify else without_verification())


def _unsendable(request: Request, exc: Exception) -> FetchError:
    return not_sent(f"can't fetch {request.url}: {one_line(exc)}", "request")


def _too_late(host: str) -> FetchError:
    return FetchError(f"no connection to {host}: the fetcher is closed", kind="reset", retryable=True, contacted=False)


def _explain(exc: OSError, host: str) -> FetchError:
    """Explain why a connection failed, and whether a retry can help."""
    match exc:
        case RefusedAddressError():
            return not_sent(exc.message, "address")
        case ssl.SSLCertVerificationError():
            message = f"the certificate of {host} is not trusted: {one_line(exc)} (http.verify_tls)"
            return FetchError(message, kind="tls", retryable=False)
        case ssl.SSLError():
            return FetchError(f"no secure connection to {host}: {one_line(exc)}", kind="tls", retryable=False)
    return FetchError(f"no connection to {host}: {system_text(exc)}", kind="connect", retryable=True)
