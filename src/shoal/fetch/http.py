"""The HTTP fetcher: aiohttp, with limits on everything that a stranger's server decides."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NoReturn

import aiohttp
from yarl import URL

from shoal.config import Http
from shoal.errors import FetchError
from shoal.fetch.decompress import ACCEPTED, decompress
from shoal.http import Request, Response


class HttpFetcher:
    """Fetches pages over kept-open connections. Redirects are not followed: each hop is a request of its own, so that
    the frontier's politeness, scope and robots.txt hold for it."""

    def __init__(self, config: Http, user_agent: str) -> None:
        self._config = config
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._timeout = aiohttp.ClientTimeout(
            total=config.total_timeout, sock_connect=config.connect_timeout, sock_read=config.read_timeout
        )

    def _open(self) -> aiohttp.ClientSession:
        config = self._config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the engine and the frontier decide how many at once
                ttl_dns_cache=int(config.dns_cache_seconds),
                keepalive_timeout=config.keep_alive_seconds,
                ssl=True if config.verify_tls else _no_verification(),
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

    async def fetch(self, request: Request) -> Response:
        session = self._session or self._open()
        timeout = self._timeout
        if request.timeout is not None:
            timeout = aiohttp.ClientTimeout(
                total=request.timeout, sock_connect=timeout.sock_connect, sock_read=timeout.sock_read
            )
        proxy = request.proxy or self._config.proxy
        if proxy is not None and not proxy.startswith(("http://", "https://")):
            raise FetchError(
                f"the proxy {URL(proxy).scheme}:// is not supported; use an http:// or https:// one",
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
                body = await self._read(answer)
            finally:
                answer.release()  # drops the connection unless the body was read to its end
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            _wrap(exc, request)
        coding = answer.headers.get("Content-Encoding")
        if coding and body:
            body = decompress(body, coding, self._config.max_body_bytes)
        return Response(
            request.url, status=answer.status, headers=answer.headers, body=body, request=request, elapsed=elapsed
        )

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        """The body, unless it is too large: then the download stops."""
        limit = self._config.max_body_bytes
        content = answer.content
        if answer.content_length is not None and answer.content_length > limit:
            raise _too_large(limit)
        chunk = await content.readany()
        if content.at_eof():
            return chunk
        parts, size = [chunk], len(chunk)
        while chunk := await content.readany():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            parts.append(chunk)
        return b"".join(parts)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _no_verification() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _too_large(limit: int) -> FetchError:
    return FetchError(
        f"the body is larger than {limit} bytes (http.max_body_bytes)", kind="too large", retryable=False
    )


def _wrap(exc: Exception, request: Request) -> NoReturn:
    """Raise what the library said as a FetchError that knows whether a retry can help."""
    host = URL(request.url, encoded=True).host
    detail = str(exc) or type(exc).__name__
    match exc:
        case aiohttp.ConnectionTimeoutError():
            message, kind, retryable = f"no connection to {host} in time", "timeout", True
        case TimeoutError() | asyncio.TimeoutError():
            message, kind, retryable = f"{host} did not answer in time", "timeout", True
        case aiohttp.ClientConnectorDNSError():
            message, kind, retryable = f"the host {host} could not be found", "dns", True
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            message, kind, retryable = f"no trusted connection to {host}: {detail}", "tls", False
        case aiohttp.ClientProxyConnectionError() | aiohttp.ClientHttpProxyError():
            message, kind, retryable = f"the proxy refused: {detail}", "proxy", True
        case aiohttp.ClientConnectorError():
            message, kind, retryable = f"no connection to {host}: {exc.os_error.strerror or detail}", "connect", True
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            message, kind, retryable = f"{host} broke the connection: {detail}", "reset", True
        case aiohttp.ClientPayloadError():
            message, kind, retryable = f"the body broke off: {detail}", "half body", True
        case aiohttp.ClientResponseError():
            message, kind, retryable = f"{host} sent what is no HTTP: {detail}", "protocol", False
        case OSError():
            message, kind, retryable = f"no connection to {host}: {detail}", "connect", True
        case _:
            message, kind, retryable = f"{request.url} can't be fetched: {detail}", "request", False
    raise FetchError(message, kind=kind, retryable=retryable) from exc
