"""The spider behind every batch: a result for each URL, whatever became of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from msgspec import Struct

from shoal.batch.content import content_of, content_type, title_of
from shoal.batch.options import BatchOptions
from shoal.errors import FetchError, RequestError
from shoal.handling import meant_for
from shoal.http import Request, Response
from shoal.links import host_of, normalize_url
from shoal.ports import Fetch
from shoal.spider import Spider

PLACE = "place"
"""In a request's meta: which of the given URLs it is for."""
_SITE = "site"
"""In the meta of what was found: the host that is not left."""
_GIVEN_FIRST = 1.0  # their priority: before what is found on them


class Room(Struct):
    """How much a session may keep of its pages, and how much this process has made for it."""

    limit: int
    used: int = 0

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        """A layer around the fetcher: when the room is used up, nothing more is fetched."""
        if self.used >= self.limit:
            message = f"the session has its {self.limit} bytes of results (serve.max_session_bytes)"
            raise FetchError(message, kind="limit", retryable=False, contacted=False)
        return await fetch(request)


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
        self._room = room
        self._pages = 0
        if room is not None:
            self.middlewares = (room,)  # type: ignore[misc]

    def start_request(self, url: str, place: int) -> Request:
        """For one of the given URLs."""
        options = self._options
        return self._request(
            url, headers=options.headers, cookies=options.cookies, meta={PLACE: place}, priority=_GIVEN_FIRST,
            dont_filter=True,
        )  # fmt: skip

    def _request(self, url: str, **more: Any) -> Request:
        return Request(url, timeout=self._options.timeout, errback="failed", **more)

    def parse(self, response: Response) -> Iterator[dict[str, Any] | Request]:
        content = content_of(response, self._options)
        if self._room is not None:
            self._room.used += _size(content)
        self._pages += 1
        yield {
            **self._about(response.request),
            "status": "success",
            "final_url": response.url,
            "http_status": response.status,
            "title": title_of(response),
            "content_type": content_type(response) or None,
            "content": content,
            "error": None,
        }
        if response.request.depth < self._options.depth:
            # A page may have a hundred thousand links: no more are taken than may be fetched.
            yield from islice(self._found_on(response), max(0, self._options.max_pages - self._pages))

    def _found_on(self, response: Response) -> Iterator[Request]:
        """The links within the site: the host that a given URL led to. A link that was redirected away from it leads
        no further. What was not sent on to this page, after a redirect, is not sent to its links either."""
        host = host_of(response.url)
        if response.meta.get(_SITE, host) == host:
            for url in response.links():
                if host_of(url) == host and url not in self._given and not has_user(url):
                    headers, cookies = meant_for(response.request, url)
                    yield self._request(url, headers=headers, cookies=cookies, meta={_SITE: host})

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


def _size(content: Any) -> int:
    """Roughly, in bytes: of a text, or of the texts in it."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, dict):
        return sum(map(_size, content.values()))
    return sum(map(_size, content)) if isinstance(content, list) else 0


def has_user(url: str) -> bool:
    """Whether a URL in normal form has a user in it, or a password."""
    return "@" in url.split("/", 3)[2]


def given_url(url: str) -> str:
    """The normal form of a URL that a caller gave. RequestError for what is none, or has a password in it."""
    known = normalize_url(url)
    if has_user(known):
        raise RequestError("a URL with a user or a password in it would be in logs; send them in headers instead")
    return known


def start_requests(spider: BatchSpider, urls: Sequence[str]) -> list[Request]:
    """A request for each URL that is one, named by its place. A URL that is there twice is fetched once."""
    requests: dict[str, Request] = {}
    for place, url in enumerate(urls):
        with suppress(RequestError):
            known = given_url(url)
            if known not in requests:
                requests[known] = spider.start_request(known, place)
    return list(requests.values())
