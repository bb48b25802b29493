"""The spider behind every batch: it yields a result for each URL, also for failures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from typing import TypeAlias

from turbohtml import Document, Node

from shoal.api.batch.options import BatchOptions, FieldQuery, Format
from shoal.api.batch.queries import effort_of
from shoal.api.batch.quota import PER_ENTRY, Quota, request_size, size_of
from shoal.api.batch.urls import REFUSED_ADDRESS, UrlList, has_user, redacted
from shoal.errors import FetchError, SelectorError
from shoal.http import Request, Response
from shoal.http.exchange import headers_for
from shoal.http.response import RenderedResponse
from shoal.spider import Spider
from shoal.system import clock
from shoal.urls.normalize import host_of, normalize_url

# Runs a caller's queries on a page in bounded time.
#
# `shoal.api.batch.queries` accepts only queries that visit each node a few times. This module refuses pages on which
# even that takes too long: all callers share one event loop.


_MAX_ELEMENTS = 100_000
_MAX_DEPTH = 128
_MAX_SIBLINGS = 2500
_TOO_DEEP = "/*" * (_MAX_DEPTH + 1)
_TOO_WIDE = f"//*/*[{_MAX_SIBLINGS + 1}]"
_SMALL_PAGE = 3000  # nodes of a page on which any query is fast
_MAX_REPEATED = 300_000  # pairs of a node and an ancestor: about a second
_MAX_SORTED = 200_000_000  # pairs of siblings: about a second
_MAX_CHARACTERS, _MAX_CHARACTERS_PER_BYTE = 1 << 20, 4  # of all fields: the larger of both limits
_TIMEOUT = 0.5  # seconds of CPU time for all fields of a page: matches may repeat the same text many times

Found: TypeAlias = str | list[str] | None
Shape: TypeAlias = tuple[int, int]


def fields_of(response: Response, fields: Mapping[str, FieldQuery]) -> dict[str, Found]:
    """The texts of all fields. SelectorError if the page is too large or takes too long."""
    if not _count(response, "//*") <= _MAX_ELEMENTS:
        raise SelectorError(f"the page has more than {_MAX_ELEMENTS} elements, which is too much for fields")
    if response.xpath(_TOO_DEEP):
        raise SelectorError(f"the page is nested more than {_MAX_DEPTH} deep, which is too much for fields")
    if response.xpath(_TOO_WIDE):
        raise SelectorError(f"an element has more than {_MAX_SIBLINGS} elements in it, which is too much for fields")
    end = time.thread_time() + _TIMEOUT
    max_characters = max(_MAX_CHARACTERS, _MAX_CHARACTERS_PER_BYTE * len(response.body))
    shape = cache(partial(_shape, response.document))
    values: dict[str, Found] = {}
    total = 0
    for name, query in fields.items():
        texts: list[str] = []
        for text in _texts(response, query, shape, end):
            total += len(text)
            if total > max_characters:
                raise SelectorError(f"the fields of this page have more than {max_characters} characters")
            texts.append(text)
            if not query.all:
                break
        values[name] = texts if query.all else next(iter(texts), None)
    return values


def _count(response: Response, nodes: str) -> int:
    """Count nodes of the tree: a page may have many more elements than tags."""
    return int(response.xpath(f"count({nodes})").get("0").partition(".")[0])


def _texts(response: Response, query: FieldQuery, shape: Callable[[], Shape], end: float) -> Iterator[str]:
    """The texts of all matches, lazily: the caller may need only the first."""
    _check_time(end)
    if query.xpath is not None:
        _check_effort(response, query.xpath, shape)
    nodes = response.css(query.css) if query.css is not None else response.xpath(query.xpath or "")
    for node in nodes:
        _check_time(end)
        if text := node.text_content().strip():
            yield text


def _check_effort(response: Response, xpath: str, shape: Callable[[], Shape]) -> None:
    """Refuse an XPath with several steps on a page that is so deep or wide that it would be slow."""
    effort = effort_of(xpath)
    if effort == (0, 0) or _count(response, "//node()") <= _SMALL_PAGE:
        return
    below, beside = shape()
    if below * effort.repeated > _MAX_REPEATED or beside * effort.sorted > _MAX_SORTED:
        raise SelectorError(f"{xpath!r:.80} is too costly for this page: use fewer steps, or CSS")


def _shape(document: Document) -> Shape:
    """The number of (node, ancestor) pairs, and of sibling pairs."""
    below = beside = depth = 0
    level: list[Node] = [document]
    while level:
        families = [list(node.children) for node in level]
        level = [child for family in families for child in family]
        depth += 1
        below += depth * len(level)
        beside += sum(len(family) ** 2 for family in families)
    return below, beside


def _check_time(end: float) -> None:
    if time.thread_time() > end:
        raise SelectorError(f"the fields of this page take more than {_TIMEOUT:g} s of CPU time")


# Extracts title and content from a page.


_TEXT = re.compile(
    r"text/.* | .*[/+](?:x-)?(?:json|ndjson|xml|html|javascript|yaml|csv|www-form-urlencoded)", re.VERBOSE
)


def content_type(response: Response) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def title_of(response: Response) -> str | None:
    """The title of a page; None if it has none or is not HTML."""
    if not _is_html(response):
        return None
    titles = response.css("title")
    return (titles[0].text_content().strip() or None) if titles else None


def content_of(response: Response, options: BatchOptions, format: Format | None = None) -> object:
    """The content in a format, or in the one that was requested. None if the page is not text."""
    kind = content_type(response)
    if kind and not _TEXT.fullmatch(kind):
        return None
    match format or options.format:
        case "links":
            return response.links() if _is_html(response) else []
        case "fields":
            return fields_of(response, options.fields)
        case "text" if _is_html(response):
            return response.main_text()
        case "markdown" if _is_html(response):
            return response.to_markdown()
    return response.text


def further_content(response: Response, options: BatchOptions) -> dict[str, object]:
    """The page in each additional format that was requested."""
    formats: list[Format] = [*options.also]
    if options.fields and options.format != "fields":
        formats.append("fields")
    return {name: content_of(response, options, name) for name in formats}


def browser_content(response: Response) -> dict[str, object]:
    """What the browser returned besides the page. Bytes become Base64 in JSON."""
    return {
        "rendered": isinstance(response, RenderedResponse),
        "screenshot": response.screenshot,
        "pdf": response.pdf,
        "captured": [
            {"url": page.url, "status": page.status, "content_type": page.content_type, "body": _text_of(page.body)}
            for page in response.captured
        ],
    }


def _text_of(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _is_html(response: Response) -> bool:
    kind = content_type(response)
    return not kind or "html" in kind


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
            "fetched_at": clock.time(),
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
