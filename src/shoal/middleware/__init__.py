"""The onion around the fetcher. Each layer is a callable ``(request, fetch) -> response``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shoal.ports import Fetch, Middleware


class Postponed(Exception):
    """The request was not fetched. The engine releases its lease, and the frontier hands it out again later.

    ``contacted``: the host was contacted for something else, so its delay starts again.
    """

    def __init__(self, reason: str, *, contacted: bool) -> None:
        super().__init__(reason)
        self.contacted = contacted


def wrap(fetch: Fetch, layers: Sequence[Middleware]) -> Fetch:
    """``fetch`` inside the layers, the first of them outermost."""
    for layer in reversed(layers):
        fetch = partial(layer, fetch=fetch)
    return fetch
