"""Fetches pages with aiohttp, through proxies too, with limits on everything that a server controls."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from shoal.errors import FetchError, ProxyError
from shoal.fetch.connecting import (
    Connector,
    RefusedAddressError,
    one_line,
    refused_by_socks,
    system_text,
    through_proxy,
    unresolved,
)
from shoal.fetch.guard import check_upstream, not_sent
from shoal.fetch.http_connection import too_large
from shoal.fetch.page_fetcher import PageFetcher, default_headers, make_response, without_verification
from shoal.fetch.resolving import ResolvedAddress
from shoal.http import Request, Response
from shoal.http.exchange import Exchange, captured
from shoal.http.files import FILE_CALLBACK
from shoal.messages import pip_install
from shoal.system import clock
from shoal.urls.normalize import host_of


class HttpFetcher(PageFetcher):
    """Fetches pages with aiohttp, directly or through a proxy."""

    def _set_up(self) -> None:
        config = self._config
        self._session: aiohttp.ClientSession | None = None
        self._to_proxies: aiohttp.ClientSession | None = None
        """The session for HTTP proxies if there is a guard: the guard does not apply to the addresses of proxies."""
        self._proxy_connector = self._connector if self._guard is None else Connector(None, self._connector.names)
        self._socks = SocksSessions(self._open_session, self._proxy_connector.resolve)
        self._timeout = aiohttp.ClientTimeout(
            total=config.total_timeout, sock_connect=config.connect_timeout, sock_read=config.read_timeout
        )

    def _session_for(self, proxy: str | None) -> aiohttp.ClientSession:
        """The session for pages that are fetched directly or through an HTTP proxy."""
        if proxy is None or self._guard is None:
            self._session = self._session or self._open_session(partial(_TcpConnector, self._connector))
            return self._session
        if self._to_proxies is None:
            self._to_proxies = self._open_session(partial(_TcpConnector, self._proxy_connector))
        return self._to_proxies

    def _open_session(self, connect: Connect) -> aiohttp.ClientSession:
        config = self._config
        return aiohttp.ClientSession(
            connector=connect(
                limit=0,  # the engine and the frontier limit the concurrency
                keepalive_timeout=config.keep_alive_seconds,
                ssl=True if config.verify_tls else without_verification(),
            ),
            headers=default_headers(config, self._user_agent),
            timeout=self._timeout,
            skip_auto_headers=("Content-Type",),  # a body has the type that the request says, or none
            auto_decompress=False,  # `decompress` does it, with a limit
            cookie_jar=aiohttp.DummyCookieJar(),  # the cookies middleware keeps them
            response_class=_AnswerWithAddress if self._knows_addresses and not config.proxy else aiohttp.ClientResponse,
            max_line_size=min(config.max_header_bytes, 65536),
            max_field_size=config.max_header_bytes,
        )

    async def fetch(self, request: Request, max_body_bytes: int | None = None) -> Response:
        limit = self._config.max_body_bytes if max_body_bytes is None else max_body_bytes
        if request.callback == FILE_CALLBACK and max_body_bytes is None and self._max_file_bytes is not None:
            limit = self._max_file_bytes
        timeout = self._timeout
        if request.timeout is not None:
            timeout = aiohttp.ClientTimeout(
                total=request.timeout, sock_connect=timeout.sock_connect, sock_read=request.timeout
            )
        proxy = request.proxy or self._config.proxy
        if proxy is not None and self._guard is not None:
            check_upstream(proxy, self._upstreams)
            self._guard.check_host(URL(request.url, encoded=True).host or "")
        try:
            if proxy is None or proxy.startswith(("http://", "https://")):
                return await self._exchange(self._session_for(proxy), request, proxy, timeout, limit)
            if proxy.startswith(SCHEMES):
                async with self._socks.use(proxy, host_of(request.url)) as session:
                    return await self._exchange(session, request, None, timeout, limit)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise _explain(exc, request, timeout, proxy) from exc
        scheme = proxy.partition(":")[0]
        raise not_sent(f"the proxy {scheme}:// is not supported; use http://, https:// or socks5://", "proxy")

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        request: Request,
        proxy: str | None,
        timeout: aiohttp.ClientTimeout,
        limit: int,
    ) -> Response:
        exchanges = captured.get()
        began = 0.0 if exchanges is None else clock.time()
        started = clock.monotonic()
        answer = await session.request(
            request.method,
            _exact_url(request.url),
            headers=request.headers or None,
            data=request.body or None,
            allow_redirects=False,
            proxy=proxy,
            timeout=timeout,
        )
        elapsed = clock.monotonic() - started
        if proxy is not None and answer.status == 407:  # to a request for http://; a tunnel fails in the library
            answer.release()
            raise ProxyError(_refused_login(host_of(request.url), answer.reason or ""), retryable=False)
        try:
            body = await self._read(answer, limit)
        finally:
            answer.release()  # closes the connection unless the whole body was read
        if exchanges is not None:
            exchanges.append(_exchange_of(answer, request, body, began, elapsed))
        return make_response(request, (answer.status, answer.headers, body, "", ()), elapsed, limit)

    async def _read(self, answer: aiohttp.ClientResponse, limit: int) -> bytes:
        """Read the body. FetchError as soon as it is too large."""
        content = answer.content
        if answer.content_length is not None and answer.content_length > limit and not content.at_eof():
            raise too_large(limit)  # at_eof: the answer to HEAD has no body, whatever length it declares
        chunk = await content.readany()
        if len(chunk) > limit:
            raise too_large(limit)
        if content.at_eof():
            return chunk
        body = bytearray(chunk)  # not a list of chunks: a server that sends single bytes would fill the memory
        while chunk := await content.readany():
            if len(body) + len(chunk) > limit:
                raise too_large(limit)
            body += chunk
        return bytes(body)

    async def close(self) -> None:
        for session in (self._session, self._to_proxies):
            if session is not None:
                await session.close()
        self._session = self._to_proxies = None
        await self._socks.close()
        self._connector.close()


class _TcpConnector(aiohttp.TCPConnector):
    """Connects as Shoal's own client does: with the same limits for lookups, and the same guard."""

    def __init__(self, connector: Connector, **options: Any) -> None:
        super().__init__(resolver=_Resolver(connector), use_dns_cache=False, **options)
        self._opener = connector

    async def _wrap_create_connection(
        self,
        *args: Any,
        addr_infos: list[AddrInfoType],
        req: aiohttp.ClientRequest,
        timeout: aiohttp.ClientTimeout,
        client_error: type[Exception] = aiohttp.ClientConnectorError,
        **options: Any,
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        try:
            async with asyncio.timeout(timeout.sock_connect):
                sock = await self._opener.open_socket(addr_infos)
        except OSError as exc:
            if isinstance(exc, TimeoutError) and exc.errno is None:
                raise
            raise client_error(req.connection_key, exc) from exc
        try:
            return await self._wrap_existing_connection(
                *args, req=req, timeout=timeout, client_error=client_error, sock=sock, **options
            )
        except BaseException:
            sock.close()
            raise


class _Resolver(AbstractResolver):
    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._connector.resolve(host)
        return [
            ResolveResult(
                hostname=host, host=address.host, port=port, family=address.family, proto=address.protocol, flags=0
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


class _AnswerWithAddress(aiohttp.ClientResponse):
    """A response that remembers its server's address: a short one releases its connection before it can be asked."""

    address = ""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        peer = None if connection.transport is None else connection.transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        return await super().start(connection)


def _exchange_of(
    answer: aiohttp.ClientResponse, request: Request, body: bytes, began: float, elapsed: float
) -> Exchange:
    version = answer.version
    return Exchange(
        url=request.url,
        method=request.method,
        sent=[(name.encode(), value.encode()) for name, value in answer.request_info.headers.items()],
        sent_body=request.body,
        version="1.1" if version is None else f"{version.major}.{version.minor}",
        status=answer.status,
        reason=answer.reason or "",
        received=list(answer.raw_headers),
        body=body,
        began=began,
        elapsed=elapsed,
        address=getattr(answer, "address", "") if request.proxy is None else "",
    )


def _exact_url(url: str) -> URL:
    """The URL as the library sends it byte for byte. It would drop an empty query."""
    exact = URL(url, encoded=True)
    return exact.with_path(exact.raw_path + "?", encoded=True) if url.find("?") == len(url) - 1 else exact


def _asks_for_plain_http(request: Request, proxy: str | None) -> bool:
    """Whether a connection goes to an HTTP proxy and no further: a tunnel ends at the host."""
    return proxy is not None and proxy.startswith("http") and request.url.startswith("http:")


def _refused_login(host: str, reason: str) -> str:
    return f"the proxy did not connect to {host}: it answered 407 {reason:.160}. Check its user and password"


_PASSING = frozenset({"timeout", "proxy", "dns", "connect", "reset", "half body"})
"""Kinds of errors that a retry may not meet."""
_NOT_CONTACTED = frozenset({"address", "proxy", "request", "dns"})


def _explain_proxy(
    exc: Exception, request: Request, timeout: aiohttp.ClientTimeout, proxy: str | None
) -> ProxyError | None:
    """The error of a proxy that cannot be used; None if it is an error of something else."""
    match exc:
        case aiohttp.ConnectionTimeoutError() if _asks_for_plain_http(request, proxy):
            message = f"no connection to the proxy within {timeout.sock_connect:g} s (http.connect_timeout)"
            return ProxyError(message, retryable=True)
        case aiohttp.ClientConnectorDNSError() if proxy is not None:  # it resolves all names but its own
            return ProxyError(str(unresolved("of the proxy", exc.os_error)), retryable=True)
        case aiohttp.ClientProxyConnectionError():
            message = f"no connection to the proxy {exc.host}:{exc.port}: {system_text(exc.os_error)}"
            return ProxyError(message, retryable=True)
        case aiohttp.ClientHttpProxyError(status=407):
            return ProxyError(_refused_login(host_of(request.url), exc.message), retryable=False)
    return None


def _explain(exc: Exception, request: Request, timeout: aiohttp.ClientTimeout, proxy: str | None) -> FetchError:
    """Turn the library's error into one line that names the setting, and say whether a retry can help."""
    host = host_of(request.url)
    detail = one_line(exc)
    if failed_proxy := _explain_proxy(exc, request, timeout, proxy):
        return failed_proxy
    match exc:
        case aiohttp.ConnectionTimeoutError():
            kind, message = (
                "timeout",
                f"no connection to {host} within {timeout.sock_connect:g} s (http.connect_timeout)",
            )
        case aiohttp.SocketTimeoutError():
            kind, message = "timeout", f"{host} sent nothing for {timeout.sock_read:g} s (http.read_timeout)"
        case TimeoutError():
            whose = "http.total_timeout" if request.timeout is None else "the request's timeout"
            kind, message = "timeout", f"{host} did not send the whole page within {timeout.total:g} s ({whose})"
        case aiohttp.ClientConnectorError(os_error=RefusedAddressError(message=message)):
            kind = "address"
        case aiohttp.ClientHttpProxyError():
            kind, message = "proxy", f"the proxy did not connect to {host}: it answered {exc.status} {exc.message}"
        case aiohttp.ClientConnectorDNSError() if isinstance(exc.os_error.__cause__, ValueError):
            kind, message = "request", f"can't fetch {request.url}: {one_line(exc.os_error.__cause__)}"
        case aiohttp.ClientConnectorDNSError():
            kind, message = "dns", str(unresolved(host, exc.os_error))
        case aiohttp.ClientConnectorCertificateError():
            reason = one_line(exc.certificate_error)
            kind, message = "tls", f"the certificate of {host} is not trusted: {reason} (http.verify_tls)"
        case aiohttp.ClientSSLError():
            kind, message = "tls", f"no secure connection to {host}: {detail}"
        case aiohttp.ClientConnectorError():
            kind, message = "connect", f"no connection to {host}: {system_text(exc.os_error)}"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            reason = system_text(exc) if isinstance(exc, OSError) else detail
            kind, message = "reset", f"{host} closed the connection: {reason}"
        case aiohttp.ClientPayloadError():
            kind, message = "half body", f"the body is incomplete: {one_line(exc.__cause__ or exc)}"
        case aiohttp.ClientResponseError() if exc.message.startswith("Got more than"):
            kind, message = "protocol", f"{host} sent a header that is too long (http.max_header_bytes)"
        case aiohttp.ClientResponseError():
            kind, message = "protocol", f"{host} sent invalid HTTP: {detail}"
        case OSError():
            kind, message = "connect", f"no connection to {host}: {system_text(exc)}"
        case _:
            kind, message = "request", f"can't fetch {request.url}: {detail}"
    if proxy is not None and kind != "proxy":
        message += " (through the proxy)"
    return FetchError(message, kind=kind, retryable=kind in _PASSING, contacted=kind not in _NOT_CONTACTED)


# SOCKS5 proxies. The proxy resolves the host names, so no name leaves this machine by another way.

SCHEMES = ("socks5://", "socks5h://")
"""They mean the same here: the proxy resolves the names."""
Connect = Callable[..., aiohttp.TCPConnector]
"""Makes a connector whose connections go through a proxy. It takes the arguments of `aiohttp.TCPConnector`."""
_MAX_SESSIONS = 256


class SocksSessions:
    """Keeps connections open through any number of proxies.

    Each proxy URL, with its user and password, has connections of its own. So requests with different credentials never
    share one. The sessions that were not used for longest are closed when there are too many.
    """

    def __init__(
        self,
        open_session: Callable[[Connect], aiohttp.ClientSession],
        resolve: Callable[[str], Awaitable[Sequence[ResolvedAddress]]],
    ) -> None:
        self._open_session = open_session
        self._resolve = resolve
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._in_use: Counter[str] = Counter()

    @asynccontextmanager
    async def use(self, proxy: str, host: str) -> AsyncIterator[aiohttp.ClientSession]:
        """The session of this proxy. FetchError if the proxy does not connect to the host."""
        library = _library()
        proxy = await self._with_address(proxy, host)
        connect = partial(library.ProxyConnector.from_url, proxy.replace("socks5h:", "socks5:", 1), rdns=True)
        session = self._sessions.pop(proxy, None) or self._open_session(connect)
        self._sessions[proxy] = session  # the one that was used last is the last one
        self._in_use[proxy] += 1
        try:
            yield session
        except library.ProxyConnectionError as exc:
            raise ProxyError(through_proxy(host, f"no connection to the proxy: {exc}"), retryable=True) from exc
        except library.ProxyTimeoutError as exc:
            raise ProxyError(through_proxy(host, f"the proxy did not answer in time: {exc}"), retryable=True) from exc
        except library.ProxyError as exc:
            if exc.error_code is None:  # it refused the password, or does not speak SOCKS5
                raise ProxyError(through_proxy(host, f"the proxy refused: {exc}"), retryable=False) from exc
            raise refused_by_socks(host, int(exc.error_code), exc) from exc
        except EOFError as exc:  # the library does not wrap it
            raise ProxyError(through_proxy(host, "the proxy closed the connection"), retryable=True) from exc
        finally:
            self._in_use[proxy] -= 1
            if len(self._sessions) > _MAX_SESSIONS:
                await self._close_oldest()

    async def _with_address(self, proxy: str, host: str) -> str:
        """The URL with an address instead of a name, which the library would look up in a thread without a deadline.
        IPv4 comes first, as in the library."""
        url = URL(proxy, encoded=True)
        try:
            addresses = await self._resolve(url.host or "")
        except socket.gaierror as exc:
            raise ProxyError(through_proxy(host, str(unresolved("of the proxy", exc))), retryable=True) from exc
        return str(url.with_host(min(addresses, key=lambda address: address.family).host))

    async def _close_oldest(self) -> None:
        unused = [proxy for proxy in self._sessions if not self._in_use[proxy]]
        closing = []
        for proxy in unused[: len(self._sessions) - _MAX_SESSIONS]:
            del self._in_use[proxy]
            closing.append(self._sessions.pop(proxy))
        for session in closing:  # other requests may change the sessions meanwhile
            await session.close()

    async def close(self) -> None:
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()


def _library() -> ModuleType:
    try:
        import aiohttp_socks
    except ImportError:
        raise not_sent(f"SOCKS proxies need aiohttp-socks: {pip_install('socks')}", "proxy") from None
    return aiohttp_socks
