"""The HTTP fetcher: aiohttp, with limits on everything that a stranger's server decides."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from shoal.config import HttpSettings
from shoal.errors import ConfigError, FetchError
from shoal.fetch.decompress import ACCEPTED, decompress
from shoal.fetch.guard import AddressGuard
from shoal.http import Request, Response
from shoal.ports import Fetcher
from shoal.urls.normalize import host_of


class HttpFetcher:
    """Fetches pages over kept-open connections. Redirects are not followed: each hop is a request of its own, so that
    the frontier's politeness, scope and robots.txt hold for it.

    With a guard, an address that it refuses is never connected to. A name that has others too has only those: a public
    site with a slip in its DNS can be had, and nobody gets anywhere by it.
    """

    def __init__(self, config: HttpSettings, user_agent: str, guard: AddressGuard | None = None) -> None:
        if guard is not None and config.proxy is not None:
            raise ConfigError('"http.proxy" can\'t be used here: a proxy would contact what must not be (serve.allow)')
        if config.proxy is not None and not config.proxy.startswith(("http://", "https://")):
            raise ConfigError('"http.proxy" must be an http:// or https:// URL; other kinds are not supported yet')
        self._config = config
        self._user_agent = user_agent
        self._guard = guard
        self._session: aiohttp.ClientSession | None = None
        self._timeout = aiohttp.ClientTimeout(
            total=config.total_timeout, sock_connect=config.connect_timeout, sock_read=config.read_timeout
        )

    def _open(self) -> aiohttp.ClientSession:
        config, guard = self._config, self._guard
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the engine and the frontier decide how many at once
                ttl_dns_cache=int(config.dns_cache_seconds),
                keepalive_timeout=config.keep_alive_seconds,
                ssl=True if config.verify_tls else _no_verification(),
                resolver=_GuardedResolver(guard) if guard is not None else None,
                socket_factory=_guarded(guard) if guard is not None else None,
            ),
            headers={
                "User-Agent": self._user_agent,
                "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
                "Accept-Encoding": ACCEPTED,
                **config.headers,
            },
            timeout=self._timeout,
            auto_decompress=False,  # done here, with a limit
            cookie_jar=aiohttp.DummyCookieJar(),  # the cookies middleware has the jar
            max_line_size=min(config.max_header_bytes, 65536),
            max_field_size=config.max_header_bytes,
        )
        return self._session

    def limited_to(self, max_body_bytes: int) -> Fetcher:
        """The same connections, for pages of at most this size. They are closed where they were opened."""
        return _Limited(self, max_body_bytes)

    async def fetch(self, request: Request, max_body_bytes: int | None = None) -> Response:
        """``max_body_bytes`` instead of the configured ones."""
        limit = self._config.max_body_bytes if max_body_bytes is None else max_body_bytes
        session = self._session or self._open()
        timeout = self._timeout
        if request.timeout is not None:
            timeout = aiohttp.ClientTimeout(
                total=request.timeout, sock_connect=timeout.sock_connect, sock_read=request.timeout
            )
        proxy = request.proxy or self._config.proxy
        if proxy is not None and self._guard is not None:
            raise FetchError(
                "a proxy can't be used here: it would contact what must not be (serve.allow)",
                kind="proxy", retryable=False, contacted=False,
            )  # fmt: skip
        if proxy is not None and not proxy.startswith(("http://", "https://")):
            raise FetchError(
                f"the proxy {proxy.partition(':')[0]}:// is not supported; use an http:// or https:// one",
                kind="proxy", retryable=False, contacted=False,
            )  # fmt: skip
        started = time.monotonic()
        try:
            answer = await session.request(
                request.method,
                URL(request.url, encoded=True),
                headers=request.headers or None,
                data=request.body or None,
                allow_redirects=False,
                proxy=proxy,
                timeout=timeout,
            )
            elapsed = time.monotonic() - started
            try:
                body = await self._read(answer, limit)
            finally:
                answer.release()  # drops the connection unless the body was read to its end
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise _explain(exc, request, timeout, proxy) from exc
        coding = answer.headers.get("Content-Encoding")
        if coding and body:
            body = decompress(body, coding, limit)
        return Response(
            request.url, status=answer.status, headers=answer.headers, body=body, request=request, elapsed=elapsed
        )

    async def _read(self, answer: aiohttp.ClientResponse, limit: int) -> bytes:
        """The body, unless it is too large: then the download stops."""
        content = answer.content
        if answer.content_length is not None and answer.content_length > limit and not content.at_eof():
            raise _too_large(limit)  # but the answer to HEAD may declare what it likes
        chunk = await content.readany()
        if len(chunk) > limit:
            raise _too_large(limit)
        if content.at_eof():
            return chunk
        body = bytearray(chunk)  # not a list of parts: a server that sends byte by byte would fill the memory
        while chunk := await content.readany():
            if len(body) + len(chunk) > limit:
                raise _too_large(limit)
            body += chunk
        return bytes(body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Limited:
    """A fetcher with another one's connections."""

    def __init__(self, owner: HttpFetcher, max_body_bytes: int) -> None:
        self._owner = owner
        self._max_body_bytes = max_body_bytes

    async def fetch(self, request: Request) -> Response:
        return await self._owner.fetch(request, self._max_body_bytes)

    async def close(self) -> None:
        pass


class _RefusedAddressError(OSError):
    """All of them have the same text: of errors that differ, the library makes a new one that is none of them."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(errno.EACCES, "the address is refused")
        self.message = f"{address} is {reason}, which is not to be contacted from here (serve.allow)"


class _GuardedResolver(aiohttp.ThreadedResolver):
    """Leaves out refused addresses while others are left: of several failures the library tells the last, and that of a
    site that is down for a moment must not look like a refusal. It refuses nothing itself."""

    def __init__(self, guard: AddressGuard) -> None:
        super().__init__()
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        return [each for each in found if self._guard.refuses(each["host"]) is None] or found


def _guarded(guard: AddressGuard) -> aiohttp.SocketFactoryType:
    """Makes the socket for a connection, when all names are resolved: the address is the one that is connected to."""

    def make(target: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, (address, *_) = target
        reason = guard.refuses(address)
        if reason is not None:
            raise _RefusedAddressError(address, reason)
        return socket.socket(family, kind, protocol)

    return make


def _no_verification() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _too_large(limit: int) -> FetchError:
    return FetchError(f"the body is larger than {limit} bytes (http.max_body_bytes)", kind="too large", retryable=False)


def _explain(exc: Exception, request: Request, timeout: aiohttp.ClientTimeout, proxy: str | None) -> FetchError:
    """What the library said, in one line, with the setting that decided, and whether a retry can help."""
    host = host_of(request.url)
    detail = _one_line(exc)
    contacted = True
    match exc:
        case aiohttp.ConnectionTimeoutError():
            kind, retryable = "timeout", True
            message = f"no connection to {host} within {timeout.sock_connect:g} s (http.connect_timeout)"
        case aiohttp.SocketTimeoutError():
            kind, retryable = "timeout", True
            message = f"{host} sent nothing for {timeout.sock_read:g} s (http.read_timeout)"
        case TimeoutError():
            kind, retryable = "timeout", True
            whose = "http.total_timeout" if request.timeout is None else "the request's timeout"
            message = f"{host} did not send the whole page within {timeout.total:g} s ({whose})"
        case aiohttp.ClientConnectorError(os_error=_RefusedAddressError(message=message)):
            kind, retryable, contacted = "address", False, False
        case aiohttp.ClientProxyConnectionError():
            kind, retryable, contacted = "proxy", True, False
            message = f"no connection to the proxy {exc.host}:{exc.port}: {_system(exc.os_error)}"
        case aiohttp.ClientHttpProxyError():
            kind, retryable, contacted = "proxy", exc.status != 407, False
            message = f"the proxy did not connect to {host}: it answered {exc.status} {exc.message}"
        case aiohttp.ClientConnectorDNSError():
            kind, retryable, contacted = "dns", True, False
            message = f"the host {host} could not be found"
        case aiohttp.ClientConnectorCertificateError():
            kind, retryable = "tls", False
            message = (
                f"the certificate of {host} can't be trusted: {_one_line(exc.certificate_error)} (http.verify_tls)"
            )
        case aiohttp.ClientSSLError():
            kind, retryable = "tls", False
            message = f"no secure connection to {host}: {detail}"
        case aiohttp.ClientConnectorError():
            kind, retryable = "connect", True
            message = f"no connection to {host}: {_system(exc.os_error)}"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            kind, retryable = "reset", True
            message = f"{host} broke the connection: {_system(exc) if isinstance(exc, OSError) else detail}"
        case aiohttp.ClientPayloadError():
            kind, retryable = "half body", True
            message = f"the body broke off: {_one_line(exc.__cause__ or exc)}"
        case aiohttp.ClientResponseError() if exc.message.startswith("Got more than"):
            kind, retryable = "protocol", False
            message = f"{host} sent a header that is too long (http.max_header_bytes)"
        case aiohttp.ClientResponseError():
            kind, retryable = "protocol", False
            message = f"{host} does not keep to HTTP: {detail}"
        case OSError():
            kind, retryable = "connect", True
            message = f"no connection to {host}: {_system(exc)}"
        case _:
            kind, retryable, contacted = "request", False, False
            message = f"{request.url} can't be fetched: {detail}"
    if proxy is not None and kind != "proxy":
        message += " (through the proxy)"
    return FetchError(message, kind=kind, retryable=retryable, contacted=contacted)


def _system(exc: OSError) -> str:
    """The system's own words; event loops put an address in their place."""
    return os.strerror(exc.errno) if exc.errno and exc.errno > 0 else _one_line(exc)


def _one_line(exc: BaseException) -> str:
    """What an error says, without the pages of bytes that some of them quote."""
    text = " ".join((getattr(exc, "message", "") or str(exc) or type(exc).__name__).split())
    return text if len(text) <= 160 else text[:160] + "..."
