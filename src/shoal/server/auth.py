"""Who may come in, and with how much."""

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

_OPEN = ("/health", "/ready")
"""What may be asked for without a token: whether the server is well, and nothing else."""
_SWALLOWING = 2.0  # seconds
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""


def check_binding(config: ServerSettings) -> None:
    """ConfigError when anyone in the network could crawl from here."""
    if config.host not in _LOOPBACK and not (config.token or config.tokens):
        raise ConfigError(
            f"{config.host} can be reached from other machines, so a token is needed: set SHOAL_SERVE__TOKEN, or "
            "serve.token in shoal.toml; callers send it as `Authorization: Bearer TOKEN`"
        )


def operators_only(request: Request) -> None:
    """Runs, hosts and clusters are everybody's, and the figures tell of them: whoever has a token with a name has the
    batches that it sends."""
    if request.state.caller:
        message = "a token with a name is for batches; this needs the token of the server itself (serve.token)"
        raise ProblemError(403, "forbidden", message)


class Gate:
    """Around the application: refuses whoever has no token, and bodies that are too large.

    It refuses what a web page of another site has a browser send: everything that may change something, and without
    tokens also what only reads, as a browser on this machine could reach the server for that page.

    The name of the caller's token (none, if it is the one for all) and its address are in the scope's state.
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
        foreign = "" if scope["method"] in _SAFE else _from_elsewhere(headers)
        if not foreign and not self._tokens:
            foreign = self._foreign(headers)
        if foreign:
            await problem(403, "forbidden", foreign)(scope, receive, send)
            return
        caller = self._caller(scope, headers)
        if caller is None:
            refusal = problem(
                401,
                "no token",
                "send the token as `Authorization: Bearer TOKEN`",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        scope.setdefault("state", {}).update(caller=caller, address=address)
        if _length(headers) > self._max_bytes:
            await _swallow(receive)
            refusal = problem(413, "too large", self._too_large, headers={"Connection": "close"})
            await refusal(scope, receive, send)
            return
        await self._limited(scope, receive, send)

    def _foreign(self, headers: Headers) -> str:
        """What is wrong with a request that a web page of another site may have made, or nothing. Such a page can give
        a name of its own the address of this machine, but the name is what its requests have as their host."""
        if headers.get("sec-fetch-site") == "cross-site":
            return "without a token it can't be used by the pages of other sites"
        host = headers.get("host", "")
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if host and name.lower() not in self._hosts:
            return (
                f"without a token it is known as localhost, or by the address that it listens on, not as {name!r:.80}"
            )
        return ""

    def _caller(self, scope: Scope, headers: Headers) -> str | None:
        """The name of the token; None for a stranger."""
        if not self._tokens:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        found = None
        for name, token in self._tokens.items():  # all of them, so that the time says nothing
            if hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
                found = name
        return "" if found is None and scope["path"] in _OPEN else found

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body without a declared length is counted as it comes."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                await _swallow(receive)
                raise HTTPException(413, self._too_large, {"Connection": "close"})  # comes to whoever reads the body
            return message

        await self._app(scope, counted, send)


def _from_elsewhere(headers: Headers) -> str:
    """What is wrong with a request that may change something and comes from a web page of another origin; nothing if it
    is none. Browsers say where a request comes from, and no page can make them lie. Other clients send neither header.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        if site in ("same-origin", "none"):
            return ""
    elif origin is None or _authority(origin) == headers.get("host", "").lower():
        return ""
    return "a web page of another origin can't send this (Origin, Sec-Fetch-Site)"


def _authority(origin: str) -> str | None:
    """``host:port`` of an origin. Its scheme is not compared: a proxy may have taken TLS off."""
    scheme, mark, authority = origin.lower().partition("://")
    return authority if mark and scheme in ("http", "https") else None


async def _swallow(receive: Receive) -> None:
    """Read on for a moment: who is cut off while it sends does not see the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SWALLOWING):
            while (await receive()).get("more_body"):
                pass


def _length(headers: Headers) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0
