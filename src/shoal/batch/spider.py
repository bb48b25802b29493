"""The spider behind every batch: it yields a result for each URL, also for failures."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import islice

from shoal.batch.content import browser_content, content_of, content_type, further_content, title_of
from shoal.batch.options import BatchOptions
from shoal.batch.quota import PER_ENTRY, Quota, request_size, size_of
from shoal.batch.redaction import REFUSED_ADDRESS, redacted
from shoal.batch.urls import UrlList, has_user
from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.http.redirects import headers_for
from shoal.spider import Spider
from shoal.urls.normalize import host_of, normalize_url

POSITION = "place"
"""Key in the meta of a start request: the position of its URL in the batch."""
SITE = "site"
"""Key in the meta of a followed link: the host that its links must stay on."""
ERRBACK = "failed"
"""The method that yields the result of a failed request."""
_NO_LIMIT = 1 << 62
_START_PRIORITY = 1.0  # before followed links
_MAX_MESSAGE_LENGTH = 500  # an error may quote what a server sent


class BatchSpider(Spider):
    """Fetches the URLs of a batch. Its items are results."""

    name = "(batch)"

    def __init__(
        self, options: BatchOptions, worker_id: str, urls: Collection[str] = (), quota: Quota | None = None
    ) -> None:
        """``urls``: the normalized URLs of the batch. Links to them are not followed: they are fetched anyway."""
        super().__init__()
        self._options = options
        self._worker_id = worker_id
        self._urls = urls
        self._quota = Quota(_NO_LIMIT) if quota is None else quota
        self._pages = 0
        self._counted: set[int] = set()
        """Hashes of the links that the quota has counted. Pages repeat links."""
        self.middlewares = (self._quota,)

    def start_request(self, url: str, position: int) -> Request:
        """The request for a URL of the batch."""
        options = self._options
        return Request(
            url, headers=options.headers, cookies=options.cookies, meta={POSITION: position}, priority=_START_PRIORITY,
            dont_filter=True, timeout=options.timeout, errback=ERRBACK,
        )  # fmt: skip

    def parse(self, response: Response) -> Iterator[dict[str, object] | Request]:
        result = {
            **self._base_result(response.request),
            "status": "success",
            "final_url": response.url,
            "http_status": response.status,
            "title": title_of(response),
            "content_type": content_type(response) or None,
            "content": content_of(response, self._options),
            "error": None,
        }
        if also := further_content(response, self._options):
            result["also"] = also
        if self._options.render is not None:
            result |= browser_content(response)
        if not self._quota.use(PER_ENTRY + size_of(result)):
            yield from self.failed(response.request, self._quota.exceeded())
            return
        self._pages += 1
        yield result
        if response.request.depth < self._options.depth:
            # A page may have a hundred thousand links: take no more than may be fetched.
            yield from islice(self._follow_links(response), max(0, self._options.max_pages - self._pages))

    def _follow_links(self, response: Response) -> Iterator[Request]:
        """Requests for the links that stay on the site, which is the host that a URL of the batch led to. A page to
        which a link was redirected on another host is not followed. Headers and cookies that a redirect dropped are
        not sent to the links either."""
        host = host_of(response.url)
        if response.meta.get(SITE, host) == host:
            for url in response.links():
                if host_of(url) == host and not has_user(url) and not (self._urls and normalize_url(url) in self._urls):
                    headers, cookies = headers_for(response.request, url)
                    request = Request(
                        url, headers=headers, cookies=cookies, meta={SITE: host}, timeout=self._options.timeout,
                        errback=ERRBACK,
                    )  # fmt: skip
                    if not self._count_link(request):
                        return
                    yield request

    def _count_link(self, request: Request) -> bool:
        """Count a link against the quota, once. False if the quota is used up."""
        key = hash(request.url)
        if key not in self._counted:
            if not self._quota.use(request_size(request)):
                return False
            self._counted.add(key)
        return True

    def failed(self, request: Request, error: Exception) -> Iterator[dict[str, object]]:
        """Yield the result of a failed request."""
        kind = error.kind if isinstance(error, FetchError) else "content"
        result = {
            **self._base_result(request),
            **failed_result(kind, REFUSED_ADDRESS if kind == "address" else redacted(str(error))),
            "final_url": request.url,
            "http_status": (error.status or None) if isinstance(error, FetchError) else None,
        }
        # The store keeps the reason too. Failures are small, and a URL has at most one: so they are stored even when
        # the quota is used up.
        self._quota.use_anyway(PER_ENTRY + size_of(result) + size_of(str(error)))
        yield result

    def _base_result(self, request: Request) -> dict[str, object]:
        return {
            "place": request.meta.get(POSITION),
            "url": request.redirects[0] if request.redirects else request.url,
            "depth": request.depth,
            "worker_id": self._worker_id,
            "fetched_at": time.time(),
        }


def failed_result(kind: str, message: str) -> dict[str, object]:
    """The part of a result that describes a failure."""
    return {
        "status": "failed",
        "http_status": None,
        "title": None,
        "content_type": None,
        "content": None,
        "error": {"kind": kind, "message": shortened(message)},
    }


def shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_LENGTH else f"{message[:_MAX_MESSAGE_LENGTH]}..."


def start_requests(spider: BatchSpider, urls: UrlList) -> list[Request]:
    """One request for each distinct valid URL."""
    return [spider.start_request(urls.urls[position], position) for position in urls.positions.values()]
