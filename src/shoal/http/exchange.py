"""What was sent and received for a page, as far as the fetcher knows it. Kept only if it is wanted."""

from __future__ import annotations

from contextvars import ContextVar

from msgspec import Struct


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
