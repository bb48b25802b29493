"""Large pages on frontiers that live in one process.

To store thousands of links in one step would block all other calls for a second. So the links of a large page are
*staged*: encoded in portions before the step that ends the page, kept aside by that step, and moved into the queue one
portion at a time after it. Until then they are incoming: see `shoal.ports.Stats`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from shoal.frontier.rules import CHUNK, MAX_LINKS, child_fingerprint, encode_request
from shoal.http import Request
from shoal.ports import Completion, Failure, History, Pushed

E = TypeVar("E", Completion, Failure)

Portion: TypeAlias = list[tuple[bytes, bytes]]
"""The fingerprints of some links, and their msgpack."""


class MovedLinks(NamedTuple):
    """How many staged links of a page were queued, and how many were refused. The run had the others already."""

    added: int
    refused: int

    def plus(self, other: MovedLinks) -> MovedLinks:
        return MovedLinks(self.added + other.added, self.refused + other.refused)


POLL = 0.01
"""Seconds after which a caller that gets no leases polls again while links are incoming."""


async def split_large(
    pages: Sequence[E], encode: Callable[[Request], bytes]
) -> tuple[Sequence[E], dict[int, list[Portion]]]:
    """The pages, large ones without their links; and these links, by the position of their page.

    Other tasks take their turn between two portions. RequestError for a link that cannot be stored.
    """
    large = {place: page for place, page in enumerate(pages) if len(page.children) > MAX_LINKS}
    if not large:
        return pages, {}
    staged = {place: await _encode_links(page, encode) for place, page in large.items()}
    rest = [msgspec.structs.replace(page, children=()) if place in large else page for place, page in enumerate(pages)]
    return rest, staged


async def _encode_links(page: Completion | Failure, encode: Callable[[Request], bytes]) -> list[Portion]:
    parent = page.lease.fingerprint
    links = (
        (child_fingerprint(child, parent, index), encode_request(child, encode))
        for index, child in enumerate(page.children)
    )
    portions = []
    while portion := list(islice(links, CHUNK)):
        portions.append(portion)
        await asyncio.sleep(0)
    return portions


def first_of_each(portion: Portion) -> dict[bytes, bytes]:
    """The msgpack of each link by its fingerprint. If a page has a link twice, the first one counts."""
    links: dict[bytes, bytes] = {}
    for fingerprint, payload in portion:
        links.setdefault(fingerprint, payload)
    return links


def count_moved(page: Completion, links: MovedLinks) -> Pushed:
    """The result of a large page whose links were moved."""
    return Pushed(links.added, len(page.children) - sum(links) + page.duplicates, links.refused)


def incoming_history(link: Request, parent: str | None) -> History:
    """The history of a link that is not in the queue yet. ``parent``: the URL of its page."""
    return History(
        url=link.url,
        state="ready",
        depth=link.depth,
        priority=link.priority,
        attempts=0,
        status=0,
        items=0,
        parent=parent,
        reason="",
        events=(),
    )
