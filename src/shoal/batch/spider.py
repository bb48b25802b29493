"""The spider behind every batch: a result for each URL, whatever became of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from shoal.batch.content import content_of, content_type, title_of
from shoal.batch.options import BatchOptions
from shoal.batch.quota import PER_ENTRY, Room, request_size, size_of
from shoal.batch.redaction import REFUSED_ADDRESS, redacted
from shoal.batch.urls import GivenUrls, has_user
from shoal.crawling.page import meant_for
from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.spider import Spider
from shoal.urls.normalize import host_of

PLACE = "place"
"""In a request's meta: which of the given URLs it is for."""
SITE = "site"
"""In the meta of what was found: the host that is not left."""
ERRBACK = "failed"
"""The method that makes a result of a request that is given up."""
_NO_LIMIT = 1 << 62
_GIVEN_FIRST = 1.0  # their priority: before what is found on them
_LONGEST_MESSAGE = 500  # characters of an error: it may quote what a server sent


class BatchSpider(Spider):
    """Its items are results."""

    name = "(batch)"

    def __init__(
        self, options: BatchOptions, worker_id: str, given: Collection[str] = (), room: Room | None = None
    ) -> None:
        """``given``: the URLs of the batch, which are not followed once more when a page links to them."""
        super().__init__()
        self._options = options
        self._worker_id = worker_id
        self._given = given
        self._room = Room(_NO_LIMIT) if room is None else room
        self._pages = 0
        self._found: set[int] = set()
        """Hashes of the links that were counted: a page may have them again and again."""
        self.middlewares = (self._room,)  # type: ignore[misc]

    def start_request(self, url: str, place: int) -> Request:
        """For one of the given URLs."""
        options = self._options
        return self._request(
            url, headers=options.headers, cookies=options.cookies, meta={PLACE: place}, priority=_GIVEN_FIRST,
            dont_filter=True,
        )  # fmt: skip

    def _request(self, url: str, **more: Any) -> Request:
        return Request(url, timeout=self._options.timeout, errback=ERRBACK, **more)

    def parse(self, response: Response) -> Iterator[dict[str, Any] | Request]:
        result = {
            **self._about(response.request),
            "status": "success",
            "final_url": response.url,
            "http_status": response.status,
            "title": title_of(response),
            "content_type": content_type(response) or None,
            "content": content_of(response, self._options),
            "error": None,
        }
        if not self._room.take(PER_ENTRY + size_of(result)):
            yield from self.failed(response.request, self._room.full())
            return
        self._pages += 1
        yield result
        if response.request.depth < self._options.depth:
            # A page may have a hundred thousand links: no more are taken than may be fetched.
            yield from islice(self._found_on(response), max(0, self._options.max_pages - self._pages))

    def _found_on(self, response: Response) -> Iterator[Request]:
        """The links within the site: the host that a given URL led to. A link that was redirected away from it leads
        no further. What was not sent on to this page, after a redirect, is not sent to its links either."""
        host = host_of(response.url)
        if response.meta.get(SITE, host) == host:
            for url in response.links():
                if host_of(url) == host and url not in self._given and not has_user(url):
                    headers, cookies = meant_for(response.request, url)
                    request = self._request(url, headers=headers, cookies=cookies, meta={SITE: host})
                    if not self._has_room_for(request):
                        return
                    yield request

    def _has_room_for(self, request: Request) -> bool:
        name = hash(request.url)
        if name not in self._found:
            if not self._room.take(request_size(request)):
                return False
            self._found.add(name)
        return True

    def failed(self, request: Request, error: Exception) -> Iterator[dict[str, Any]]:
        """For one that is given up."""
        kind = error.kind if isinstance(error, FetchError) else "content"
        result = {
            **self._about(request),
            **no_page(kind, REFUSED_ADDRESS if kind == "address" else redacted(str(error))),
            "final_url": request.url,
            "http_status": (error.status or None) if isinstance(error, FetchError) else None,
        }
        # The store keeps the reason too. A failure is small, and each given URL has at most one: so it is kept also
        # where there is no room for a page.
        self._room.force(PER_ENTRY + size_of(result) + size_of(str(error)))
        yield result

    def _about(self, request: Request) -> dict[str, Any]:
        return {
            "place": request.meta.get(PLACE),
            "url": request.redirects[0] if request.redirects else request.url,
            "depth": request.depth,
            "worker_id": self._worker_id,
            "fetched_at": time.time(),
        }


def no_page(kind: str, message: str) -> dict[str, Any]:
    """The part of a result that says what went wrong."""
    return {
        "status": "failed",
        "http_status": None,
        "title": None,
        "content_type": None,
        "content": None,
        "error": {"kind": kind, "message": shortened(message)},
    }


def shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."


def start_requests(spider: BatchSpider, given: GivenUrls) -> list[Request]:
    """A request for each URL that is one, named by its place. A URL that is there twice is fetched once."""
    return [spider.start_request(url, place) for url, place in given.places.items()]
