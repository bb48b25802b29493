"""What was sent and received for a page, as far as the fetcher knows it. Kept only if it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from msgspec import Struct

from shoal.http.request import Request
from shoal.urls.normalize import host_of, normalize_url


class Exchange(Struct, kw_only=True):
    """One request and its response, as they were on the wire."""

    url: str
    method: str
    sent: list[tuple[bytes, bytes]]
    """The headers of the request."""
    sent_body: bytes = b""
    version: str = "1.1"
    """The HTTP version of the response."""
    status: int
    reason: str = ""
    received: list[tuple[bytes, bytes]]
    """The headers of the response."""
    body: bytes
    """The body, without the codings in ``undone``."""
    undone: tuple[bytes, ...] = (b"transfer-encoding",)
    """Headers, in lower case, that do not describe ``body``: the fetcher has undone what they say."""
    began: float
    """When the request was sent, in seconds since 1970."""
    elapsed: float
    """Seconds until the headers of the response arrived."""
    address: str = ""
    """The IP address of the server; empty if it is not known, or a proxy was in between."""
    truncated: bool = False
    """Whether the fetcher left out the body."""
    rendered: bytes | None = None
    """The page after its scripts have run, if a browser showed it."""


captured: ContextVar[list[Exchange] | None] = ContextVar("captured", default=None)
"""Fetchers append their exchanges to this list. None: they are not wanted."""


# Redirects: the request that follows one, and what other hosts must not see of it.


# Headers that describe the client. All others may hold a secret (X-Api-Key, Private-Token, X-Amz-Security-Token ...):
# a list of secret headers is never complete, so this is the list of harmless ones.
_HARMLESS_HEADERS = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "dnt", "pragma", "priority",
     "save-data", "sec-gpc", "upgrade-insecure-requests", "user-agent"}
)  # fmt: skip
_BODY_HEADERS = frozenset({"content-type", "content-length", "content-encoding", "content-language"})


def headers_for(request: Request, url: str) -> tuple[dict[str, str], dict[str, str]]:
    """The headers and cookies of a request that may also be sent to ``url``.

    The same host and port gets all of them. Another host, or the same host without TLS after a request with TLS, gets
    only harmless headers and those that describe the body, and no cookies.
    """
    if is_same_site(request.url, url):
        return request.headers, request.cookies
    return harmless_headers(request.headers), {}


def is_same_site(before: str, after: str) -> bool:
    """Whether secrets for one URL may be sent to another: it has the same host and port, and TLS if the first has."""
    return host_of(before) == host_of(after) and (not before.startswith("https:") or after.startswith("https:"))


def harmless_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that hold no secret: they describe the client or the body."""
    return {name: value for name, value in headers.items() if name.lower() in _HARMLESS_HEADERS | _BODY_HEADERS}


def redirected_request(request: Request, url: str, status: int) -> Request:
    """The request that follows a redirect, as browsers make it: a POST becomes a GET unless the status is 307 or 308,
    and another host gets no secrets."""
    trail = [*request.redirects, request.url]
    keeps_body = status in (307, 308) or request.method in ("GET", "HEAD")
    headers, cookies = headers_for(request, url)
    if not keeps_body:
        headers = {name: value for name, value in headers.items() if name.lower() not in _BODY_HEADERS}
    return request.replace(
        url=url,
        redirects=trail,
        method=request.method if keeps_body else "GET",
        body=request.body if keeps_body else b"",
        headers=headers,
        cookies=cookies,
        # A page may set a cookie and redirect to itself, or to another spelling of its URL.
        dont_filter=request.dont_filter or normalize_url(url) in map(normalize_url, trail),
    )
