"""The spider behind every batch: a result for each URL, whatever became of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from shoal.batch.content import content_of, content_type, title_of
from shoal.batch.options import BatchOptions
from shoal.errors import FetchError, RequestError
from shoal.http import Request, Response
from shoal.links import host_of
from shoal.spider import Spider

PLACE = "place"
"""In a request's meta: which of the given URLs it is for."""
_SITE = "site"
"""In the meta of what was found: the host that is not left."""
_GIVEN_FIRST = 1.0  # their priority: before what is found on them


class BatchSpider(Spider):
    """Its items are results."""

    name = "(batch)"

    def __init__(self, options: BatchOptions, worker_id: str, given: Collection[str] = ()) -> None:
        """``given``: the URLs of the batch, which are not followed once more when a page links to them."""
        super().__init__()
        self._options = options
        self._worker_id = worker_id
        self._given = given

    def request(self, url: str, **more: Any) -> Request:
        options = self._options
        return Request(
            url, headers=options.headers, cookies=options.cookies, timeout=options.timeout, errback="failed", **more
        )

    def parse(self, response: Response) -> Iterator[dict[str, Any] | Request]:
        yield {
            **self._about(response.request),
            "status": "success",
            "final_url": response.url,
            "http_status": response.status,
            "title": title_of(response),
            "content_type": content_type(response) or None,
            "content": content_of(response, self._options),
            "error": None,
        }
        if response.request.depth < self._options.depth:
            yield from self._found_on(response)

    def _found_on(self, response: Response) -> Iterator[Request]:
        """The links within the site: the host that a given URL led to. A link that was redirected away from it leads
        no further."""
        host = host_of(response.url)
        if response.meta.get(_SITE, host) == host:
            for url in response.links():
                if host_of(url) == host and url not in self._given:
                    yield self.request(url, meta={_SITE: host})

    def failed(self, request: Request, error: Exception) -> Iterator[dict[str, Any]]:
        """For one that is given up."""
        known = isinstance(error, FetchError)
        yield {
            **self._about(request),
            **no_page(error.kind if known else "content", str(error)),  # type: ignore[attr-defined]
            "final_url": request.url,
            "http_status": (error.status or None) if isinstance(error, FetchError) else None,
        }

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
        "error": {"kind": kind, "message": message},
    }


def start_requests(spider: BatchSpider, urls: Sequence[str]) -> list[Request]:
    """A request for each URL that is one, named by its place. A URL that is there twice is fetched once."""
    requests: dict[str, Request] = {}
    for place, url in enumerate(urls):
        with suppress(RequestError):
            request = spider.request(url, meta={PLACE: place}, priority=_GIVEN_FIRST, dont_filter=True)
            requests.setdefault(request.url, request)
    return list(requests.values())
