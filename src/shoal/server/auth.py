"""Authentication, protection against requests from web pages of other sites, and the size limit of bodies."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.config import ServerSettings
from shoal.errors import ConfigError
from shoal.server.errors import ProblemError, problem

_PUBLIC_PATHS = ("/health", "/ready")
"""Paths that need no token."""
_DRAIN_TIMEOUT = 2.0  # seconds
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def check_binding(config: ServerSettings) -> None:
    """ConfigError if the server would accept anyone on the network."""
    if config.host not in _LOOPBACK and not (config.token or config.tokens):
        raise ConfigError(
            f"other machines can reach {config.host}, so the server needs a token: set SHOAL_SERVE__TOKEN, or "
            "serve.token in shoal.toml. Clients send it as `Authorization: Bearer TOKEN`"
        )


def operators_only(request: Request) -> None:
    """Refuse callers with a named token. They may use batches only: runs, hosts, clusters and metrics are shared."""
    if request.state.caller:
        message = "a named token may use batches only; this route needs the server's main token (serve.token)"
        raise ProblemError(403, "forbidden", message)


class AuthMiddleware:
    """Rejects requests without a valid token, requests from web pages of other sites, and bodies that are too large.

    A web page can make its visitor's browser send requests. Those that may change something are always refused. On a
    server without tokens, reads are refused too: a browser on this machine could reach the server for the page.

    It sets two values in the scope's state: ``caller``, the name of the token (empty for the main token), and
    ``address``.
    """

    def __init__(self, app: ASGIApp, config: ServerSettings) -> None:
        self._app = app
        self._tokens: Mapping[str, str] = {**config.tokens, **({"": config.token} if config.token else {})}
        self._hosts = {*_LOOPBACK, config.host}
        self._max_bytes = config.max_request_bytes
        self._too_large = f"the body is larger than {self._max_bytes} bytes (serve.max_request_bytes)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = "" if scope["method"] in _SAFE_METHODS else _cross_origin_refusal(headers)
        if not refusal and not self._tokens:
            refusal = self._untrusted_refusal(headers)
        if refusal:
            await problem(403, "forbidden", refusal)(scope, receive, send)
            return
        caller = self._find_caller(scope, headers)
        if caller is None:
            message = "missing or unknown token: send it as `Authorization: Bearer TOKEN`"
            response = problem(401, "no token", message, headers={"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        scope.setdefault("state", {}).update(caller=caller, address=address)
        if _content_length(headers) > self._max_bytes:
            await _drain(receive)
            response = problem(413, "too large", self._too_large, headers={"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._call_with_limit(scope, receive, send)

    def _untrusted_refusal(self, headers: Headers) -> str:
        """Why a server without tokens refuses this request, or an empty string.

        A page of another site can let its own host name resolve to this machine (DNS rebinding). Its requests then
        carry that name in the Host header.
        """
        if headers.get("sec-fetch-site") == "cross-site":
            return "web pages of other sites cannot use a server without a token"
        host = headers.get("host", "")
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if host and name.lower() not in self._hosts:
            return (
                f"unknown host name {name!r:.80}: without a token, the server answers only to localhost and to the "
                "address it listens on"
            )
        return ""

    def _find_caller(self, scope: Scope, headers: Headers) -> str | None:
        """The name of the caller's token, or None if the token is missing or unknown."""
        if not self._tokens:
            return ""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            sent = headers.get("x-api-key", "")
        found = None
        for name, token in self._tokens.items():  # compare with all, so that the time reveals nothing
            if hmac.compare_digest(sent.strip().encode("latin-1"), token.encode()):
                found = name
        return "" if found is None and scope["path"] in _PUBLIC_PATHS else found

    async def _call_with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes of the body as they arrive: a chunked body declares no length."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                await _drain(receive)
                raise HTTPException(413, self._too_large, {"Connection": "close"})  # raised where the body is read
            return message

        await self._app(scope, counted, send)


def _cross_origin_refusal(headers: Headers) -> str:
    """Why a request that may change something is refused, or an empty string if it does not come from another origin.

    Browsers always send one of the two headers, and a page cannot forge them. Other clients send neither.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        if site in ("same-origin", "none"):
            return ""
    elif origin is None or _authority(origin) == headers.get("host", "").lower():
        return ""
    return "web pages of another origin cannot send this request (see the headers Origin and Sec-Fetch-Site)"


def _authority(origin: str) -> str | None:
    """``host:port`` of an origin. The scheme is ignored: a proxy may terminate TLS."""
    scheme, mark, authority = origin.lower().partition("://")
    return authority if mark and scheme in ("http", "https") else None


async def _drain(receive: Receive) -> None:
    """Read the rest of the body for a moment: a client whose connection is closed while it sends sees no response."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT):
            while (await receive()).get("more_body"):
                pass


def _content_length(headers: Headers) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0
