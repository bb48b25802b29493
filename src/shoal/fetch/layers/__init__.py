"""Middleware: layers around the fetcher. Each layer is a callable ``(request, fetch) -> response``."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

from shoal.http import Request
from shoal.ports import Fetch, Middleware

current_attempt: ContextVar[int] = ContextVar("current_attempt", default=1)
"""The number of the current attempt at a page; 1 for the first. Each page has a task of its own."""


class Postponed(Exception):
    """The request was not fetched. The engine releases its lease, and the frontier hands it out again later.

    ``contacted``: the host was contacted for something else, so its delay starts again.
    """

    def __init__(self, reason: str, *, contacted: bool) -> None:
        super().__init__(reason)
        self.contacted = contacted


class Replaced(Exception):
    """A layer wants another request instead of this page. The engine completes the page with the request as its only
    child, so the request is filtered and queued like any other.

    ``contacted``: the host was contacted, so its delay starts again.
    """

    def __init__(self, request: Request, *, contacted: bool) -> None:
        super().__init__(f"replaced by {request.method} {request.url}")
        self.request = request
        self.contacted = contacted


def wrap(fetch: Fetch, layers: Sequence[Middleware]) -> Fetch:
    """``fetch`` inside the layers, the first of them outermost."""
    for layer in reversed(layers):
        fetch = partial(layer, fetch=fetch)
    return fetch
