"""The onion around the fetcher: each layer is a callable ``(request, fetch) -> response`` in a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shoal.ports import Fetch, Middleware


class Postponed(Exception):
    """The request was not fetched yet and goes back to the frontier unused; it will come again in its turn."""

    def __init__(self, reason: str, *, contacted: bool) -> None:
        super().__init__(reason)
        self.contacted = contacted


def wrap(fetch: Fetch, layers: Sequence[Middleware]) -> Fetch:
    """``fetch`` inside the layers, the first of them outermost."""
    for layer in reversed(layers):
        fetch = partial(layer, fetch=fetch)
    return fetch
