"""The HTTP fetcher: aiohttp, with limits on everything that a stranger's server decides."""

from __future__ import annotations

import os
import ssl
import time

import aiohttp
from yarl import URL

from shoal.config import Http
from shoal.errors import ConfigError, FetchError
from shoal.fetch.decompress import ACCEPTED, decompress
from shoal.http import Request, Response
from shoal.links import host_of


class HttpFetcher:
    """Fetches pages over kept-open connections. Redirects are not followed: each hop is a request of its own, so that
    the frontier's politeness, scope and robots.txt hold for it."""

    def __init__(self, config: Http, user_agent: str) -> None:
        if config.proxy is not None and not config.proxy.startswith(("http://", "https://")):
            raise ConfigError('"http.proxy" must be an http:// or https:// URL; other kinds are not supported yet')
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
                total=request.timeout, sock_connect=timeout.sock_connect, sock_read=request.timeout
            )
        proxy = request.proxy or self._config.proxy
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
                body = await self._read(answer)
            finally:
                answer.release()  # drops the connection unless the body was read to its end
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise _explain(exc, request, timeout, proxy) from exc
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
