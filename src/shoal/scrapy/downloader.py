"""The layer around every fetch that does what Scrapy's downloader middlewares do.

If the project has no middlewares, this module applies Scrapy's rules for cookies, statuses and retries. Otherwise
`shoal.scrapy.chain` runs all hooks in Scrapy's order.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal import http
from shoal.errors import FetchError, FrontierError
from shoal.fetch.layers import Postponed, Replaced, current_attempt
from shoal.fetch.sessions.cookies import read_cookie
from shoal.fetch.sessions.jars import Jar, Jars
from shoal.fetch.sessions.session import fetch_with
from shoal.http.exchange import redirected_request
from shoal.ports import Fetch
from shoal.scrapy.conversion import Conversion
from shoal.scrapy.exceptions import HttpError, IgnoreRequest
from shoal.scrapy.failure import ScrapyFetchError
from shoal.scrapy.response import HtmlResponse, Response, response_class
from shoal.scrapy.scope import OffsiteFilter
from shoal.scrapy.values import Given, Values

if TYPE_CHECKING:
    from shoal.scrapy.request import Request
    from shoal.scrapy.settings import Settings
    from shoal.scrapy.spider import Spider

# The cookie jars of a spider: one for each value of ``meta["cookiejar"]``. They are those of the run.


class CookieJars:
    """Sends and stores cookies. A request's own cookies enter its jar, so later requests send them too."""

    def __init__(self) -> None:
        self.jars = Jars()
        """Those of the run, as soon as the crawl begins."""

    async def fetch(
        self, request: http.Request, fetch: Fetch, jar: object = None, verbose: list[Values] | None = None
    ) -> http.Response:
        """Fetch a page with the cookies of a jar, and store those that it sets. ``verbose``: cookies of the request
        with a domain or path of their own."""
        chosen = self._jar(jar)
        try:
            if not self.jars.is_fresh(chosen, request.url):
                await self.jars.refresh(chosen, request.url)
        except FrontierError as error:
            raise Postponed(f"the cookies of the run cannot be read: {error}", contacted=False) from error
        if request.cookies or verbose:
            self.add(jar, request.url, request.cookies, verbose or [])
        headers = request.headers
        if request.cookies or any(name.lower() == "cookie" for name in headers):
            headers = {name: value for name, value in headers.items() if name.lower() != "cookie"}
            request = request.replace(cookies={}, headers=headers)
        return await fetch_with(self.jars, chosen, request, fetch)

    def add(self, jar: object, url: str, cookies: dict[str, str], verbose: list[Values]) -> None:
        """Put cookies of a request into a jar."""
        lines = [f"{name}={value}; Path=/" for name, value in cookies.items()]
        for cookie in verbose:
            parts = [f"{cookie.get('name')}={cookie.get('value', '')}"]
            parts += [f"{key.capitalize()}={cookie[key]}" for key in ("domain", "path") if cookie.get(key)]
            if not cookie.get("path"):
                parts.append("Path=/")
            if cookie.get("secure"):
                parts.append("Secure")
            lines.append("; ".join(parts))
        chosen = self._jar(jar)
        for line in lines:
            if (read := read_cookie(line, url, chosen.cookies.clock())) is not None:
                self.jars.set(chosen, read, chosen.epoch)

    def _jar(self, key: object) -> Jar:
        return self.jars.jar("" if key is None else f"#{key if isinstance(key, str) else repr(key)}")


FOLLOWED = frozenset({301, 302, 303, 307, 308})
_REFRESH = re.compile(rb"http-equiv\s*=\s*[\"']?\s*refresh", re.IGNORECASE)
_REFRESH_WITHIN = 4096  # bytes of a page


class FinalResponse(http.Response):
    """A page that goes to the callback even if it is a redirect. ``scrapy``: the response that the middlewares
    returned."""

    __slots__ = ("scrapy",)

    scrapy: Response | None

    @property
    def location(self) -> str | None:
        return None

    @classmethod
    def of(cls, page: http.Response) -> FinalResponse:
        """The same page."""
        final = cls(
            page.url, status=page.status, headers=page.headers, body=page.body, request=page.request,
            elapsed=page.elapsed, from_cache=page.from_cache,
        )  # fmt: skip
        final.scrapy = None
        return final


class StatusRules:
    """What the settings and the spider say about statuses and retries."""

    def __init__(self, settings: Settings, spider: Spider, handled: Collection[int]) -> None:
        self._spider = spider
        self._handled = handled
        self._allow_all = settings.getbool("HTTPERROR_ALLOW_ALL")
        self.redirects = settings.getbool("REDIRECT_ENABLED")
        self.retries = settings.getint("RETRY_TIMES") if settings.getbool("RETRY_ENABLED") else 0
        self.refresh_within = settings.getint("METAREFRESH_MAXDELAY") if settings.getbool("METAREFRESH_ENABLED") else -1

    def handles(self, meta: Given, status: int) -> bool:
        """Whether a page with this status goes to the callback."""
        if 200 <= status < 300 or meta.get("handle_httpstatus_all"):
            return True
        if "handle_httpstatus_list" in meta:
            return status in meta["handle_httpstatus_list"]
        return self._allow_all or status in getattr(self._spider, "handle_httpstatus_list", self._handled)

    def follows(self, meta: Given, status: int) -> bool:
        """Whether a redirect with this status is followed."""
        return (
            self.redirects
            and status in FOLLOWED
            and not meta.get("dont_redirect")
            and not meta.get("handle_httpstatus_all")
            and status not in meta.get("handle_httpstatus_list", ())
            and status not in getattr(self._spider, "handle_httpstatus_list", ())
        )

    def may_retry(self, meta: Given) -> bool:
        """Whether the current request may be tried again."""
        if meta.get("dont_retry"):
            return False
        most = meta.get("max_retry_times")
        return current_attempt.get() <= (self.retries if most is None else min(int(most), self.retries))


class DownloaderLayer:
    """A layer of the engine: ``(request, fetch) -> response``."""

    def __init__(self, conversion: Conversion, settings: Settings, spider: Spider, offsite: OffsiteFilter) -> None:
        self._conversion = conversion
        self._offsite = offsite
        self.rules = StatusRules(settings, spider, set(map(int, settings.getlist("HTTPERROR_ALLOWED_CODES"))))
        self.jars = CookieJars() if settings.getbool("COOKIES_ENABLED") else None

    def use_jars(self, jars: Jars) -> None:
        """Keep cookies in the jars of the run."""
        if self.jars is not None:
            self.jars.jars = jars

    async def __call__(self, request: http.Request, fetch: Fetch) -> http.Response:
        meta = self._conversion.raw_meta(request)
        self.check_site(request, meta)
        try:
            page = await self.send(request, meta, fetch)
        except FetchError as error:
            return self._failed(request, meta, error)
        if 300 <= page.status < 400:
            if self.rules.follows(meta, page.status):
                return page
            return self._decided(request, meta, FinalResponse.of(page))
        self.check_refresh(page, meta)
        return page

    def check_site(self, request: http.Request, meta: Given) -> None:
        """Raise FetchError for a redirect that leaves the allowed domains."""
        if request.redirects and not request.dont_filter and not self._offsite.allows(request.url):
            if meta.get("allow_offsite"):
                return
            raise ScrapyFetchError(
                "redirected to a host outside allowed_domains", kind="scope", retryable=False, contacted=False
            ) from IgnoreRequest(f"Filtered offsite request to {request.url!r}")

    async def send(self, request: http.Request, meta: Given, fetch: Fetch) -> http.Response:
        """Fetch a page with its cookies."""
        if self.jars is None or meta.get("dont_merge_cookies"):
            return await fetch(request.replace(cookies={}) if request.cookies else request)
        verbose = self._conversion.verbose_cookies(request)
        return await self.jars.fetch(request, fetch, meta.get("cookiejar"), verbose)

    def check_refresh(self, page: http.Response, meta: Given) -> None:
        """Raise Replaced if the page redirects with ``<meta http-equiv="refresh">``."""
        if not _REFRESH.search(page.body, 0, _REFRESH_WITHIN) or meta.get("dont_redirect"):
            return
        kind = response_class(page.headers.get("Content-Type", ""), page.url, page.body)
        if self.rules.refresh_within < 0 or not issubclass(kind, HtmlResponse) or page.request.method == "HEAD":
            return
        from w3lib.html import get_meta_refresh

        interval, url = get_meta_refresh(page.text[:_REFRESH_WITHIN], page.base_url, page.encoding)
        if url and interval is not None and interval < self.rules.refresh_within and url.startswith("http"):
            raise Replaced(redirected_request(page.request, url, 302), contacted=not page.from_cache)

    def _failed(self, request: http.Request, meta: Given, error: FetchError) -> http.Response:
        if error.retryable:
            if self.rules.may_retry(meta):
                raise error
            error.retryable = False
        if isinstance(error.response, http.Response):
            return self._decided(request, meta, error.response, error)
        raise error

    def _decided(
        self, request: http.Request, meta: Given, page: http.Response, error: FetchError | None = None
    ) -> http.Response:
        """Return the page if the spider handles its status. Otherwise raise an error that contains it."""
        if self.rules.handles(meta, page.status):
            return page
        if error is not None and request.errback is None:
            raise error
        raise http_error(page_of(page, self._conversion.incoming(request)), error)


def page_of(page: http.Response, request: Request) -> Response:
    """The spider's view of a page."""
    meta = request.meta
    meta["download_latency"] = page.elapsed
    meta["download_slot"] = page.url.split("/", 3)[2].partition(":")[0]
    response = response_class(page.headers.get("Content-Type", ""), page.url, page.body).of(page, request)
    if page.from_cache:
        response.flags = ["cached"]
    return response


def http_error(response: Response, error: FetchError | None = None) -> FetchError:
    """The error of a page whose status the spider does not handle."""
    http_failure = ScrapyFetchError(
        f"the server answered {response.status}" if error is None else str(error),
        kind=f"http {response.status}", retryable=False, status=response.status,
        contacted=error is None or error.contacted,
    )  # fmt: skip
    http_failure.__cause__ = HttpError(response, "Ignoring non-200 response")
    http_failure.request = response.request
    return http_failure
