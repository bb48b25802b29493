"""The built-in downloader middlewares that projects inherit from or call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from shoal import http
from shoal.errors import RequestError
from shoal.http.exchange import harmless_headers, is_same_site
from shoal.scrapy import exceptions
from shoal.scrapy.conversion import text_headers
from shoal.scrapy.exceptions import NotConfigured
from shoal.scrapy.request import Request
from shoal.scrapy.response import Response
from shoal.scrapy.settings import Settings
from shoal.scrapy.values import RequestOptions

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.spider import Spider

log = logging.getLogger("shoal.scrapy")


class _Middleware:
    """A middleware that is created with the settings."""

    crawler: Crawler | None = None

    def __init__(self, settings: Settings | None = None, *args: object, **kwargs: object) -> None:
        self.settings = Settings() if settings is None else settings

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        middleware = cls(crawler.settings)
        middleware.crawler = crawler
        return middleware


def get_retry_request(
    request: Request,
    *,
    spider: Spider,
    reason: object = "unspecified",
    max_retry_times: int | None = None,
    priority_adjust: int | None = None,
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger] = log,
    stats_base_key: str = "retry",
    **options: object,
) -> Request | None:
    """Return a copy of the request for another attempt; None if no attempt is left."""
    settings, stats = spider.crawler.settings, spider.crawler.stats
    times = request.meta.get("retry_times", 0) + 1
    if max_retry_times is None:
        max_retry_times = request.meta.get("max_retry_times")
    if max_retry_times is None:
        max_retry_times = settings.getint("RETRY_TIMES")
    text = reason() if callable(reason) and not isinstance(reason, type) else reason
    if isinstance(text, Exception):
        text = f"{type(text).__module__}.{type(text).__name__}"
    if times > max_retry_times:
        stats.inc_value(f"{stats_base_key}/max_reached")
        logger.error("gave up retrying %s (failed %d times): %s", request, times, text)
        return None
    logger.debug("retrying %s (failed %d times): %s", request, times, text)
    again: Request = request.copy()
    again.meta["retry_times"] = times
    again.dont_filter = True
    again.priority = request.priority + (
        settings.getint("RETRY_PRIORITY_ADJUST") if priority_adjust is None else priority_adjust
    )
    stats.inc_value(f"{stats_base_key}/count")
    stats.inc_value(f"{stats_base_key}/reason_count/{text}")
    return again


class RetryMiddleware(_Middleware):
    """Retries pages with certain statuses and errors. A subclass replaces Shoal's own retries."""

    EXCEPTIONS_TO_RETRY: tuple[type[Exception], ...] = (
        exceptions.TimeoutError, exceptions.DNSLookupError, exceptions.ConnectError, exceptions.ConnectionLost,
        exceptions.ResponseFailed, exceptions.TunnelError, OSError,
    )  # fmt: skip

    def __init__(self, settings: Settings, *args: object, **kwargs: object) -> None:
        if not settings.getbool("RETRY_ENABLED"):
            raise NotConfigured
        super().__init__(settings)
        self.max_retry_times = settings.getint("RETRY_TIMES")
        self.retry_http_codes = {int(status) for status in settings.getlist("RETRY_HTTP_CODES")}
        self.priority_adjust = settings.getint("RETRY_PRIORITY_ADJUST")
        self.exceptions_to_retry = self.EXCEPTIONS_TO_RETRY

    def process_response(
        self, request: Request, response: Response, spider: Spider | None = None
    ) -> Request | Response:
        if request.meta.get("dont_retry", False) or response.status not in self.retry_http_codes:
            return response
        return self._retry(request, response_status_message(response.status), self._spider(spider)) or response

    def process_exception(self, request: Request, exception: Exception, spider: Spider | None = None) -> Request | None:
        if isinstance(exception, self.exceptions_to_retry) and not request.meta.get("dont_retry", False):
            return self._retry(request, exception, self._spider(spider))
        return None

    def _spider(self, spider: Spider | None) -> Spider | None:
        return spider if spider is not None or self.crawler is None else self.crawler.spider

    def _retry(self, request: Request, reason: object, spider: Spider | None = None) -> Request | None:
        chosen = self._spider(spider)
        if chosen is None:
            raise TypeError(f"{type(self).__name__} has no crawler: pass the spider, or create it with from_crawler()")
        return get_retry_request(
            request, spider=chosen, reason=reason,
            max_retry_times=request.meta.get("max_retry_times", self.max_retry_times),
            priority_adjust=request.meta.get("priority_adjust", self.priority_adjust),
        )  # fmt: skip


class UserAgentMiddleware(_Middleware):
    """Sets the user agent."""

    def __init__(self, user_agent: str | None = "Scrapy", *args: object, **kwargs: object) -> None:
        super().__init__()
        self.user_agent = user_agent

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        middleware = cls(crawler.settings.get("USER_AGENT"))
        middleware.crawler = crawler
        return middleware

    def spider_opened(self, spider: Spider) -> None:
        self.user_agent = getattr(spider, "user_agent", self.user_agent)

    def process_request(self, request: Request, spider: Spider | None = None) -> Request | Response | None:
        if self.user_agent:
            request.headers.setdefault("User-Agent", self.user_agent)
        return None


class DefaultHeadersMiddleware(_Middleware):
    """Sets the headers of DEFAULT_REQUEST_HEADERS."""

    def process_request(self, request: Request, spider: Spider | None = None) -> Request | Response | None:
        for name, value in self.settings.getdict("DEFAULT_REQUEST_HEADERS").items():
            if value is not None:
                request.headers.setdefault(name, value)
        return None


class HttpProxyMiddleware(_Middleware):
    """Shoal sends a request through the proxy in ``meta["proxy"]`` itself."""

    def process_request(self, request: Request, spider: Spider | None = None) -> Request | Response | None:
        """Do nothing."""
        return None


class DownloadTimeoutMiddleware(HttpProxyMiddleware):
    """Shoal takes the timeout from ``meta["download_timeout"]`` itself."""


class RedirectMiddleware(_Middleware):
    """Shoal follows redirects itself. A subclass receives their responses first."""

    def process_response(
        self, request: Request, response: Response, spider: Spider | None = None
    ) -> Request | Response:
        location = response.headers.get("Location")
        if location is None or response.status not in (301, 302, 303, 307, 308) or request.meta.get("dont_redirect"):
            return response
        url = response.urljoin(location.decode("utf-8", "replace"))
        if urlsplit(url).scheme not in ("http", "https"):
            return response
        keeps = response.status in (307, 308) or request.method in ("GET", "HEAD")
        changes: RequestOptions = {} if keeps else {"method": "GET", "body": b""}
        before = http.Request(request.url, headers=text_headers(request))
        try:
            stays = is_same_site(before.url, http.Request(url).url)
        except RequestError:
            return response
        if not stays:  # another host gets no secrets
            changes |= {"headers": harmless_headers(before.headers), "cookies": {}}
        return self._redirect(request.replace(url=url, **changes), request, spider, response.status)

    def _redirect(self, redirected: Request, request: Request, spider: Spider | None, reason: object) -> Request:
        trail = [*request.meta.get("redirect_urls", []), request.url]
        if len(trail) > self.settings.getint("REDIRECT_MAX_TIMES"):
            raise exceptions.IgnoreRequest("max redirections reached")
        redirected.meta["redirect_urls"] = trail
        return redirected


class CookiesMiddleware(HttpProxyMiddleware):
    """Shoal keeps the cookies itself."""


class HttpCacheMiddleware(HttpProxyMiddleware):
    """Shoal has its own cache: HTTPCACHE_ENABLED."""


_PHRASES = {408: "Request Timeout", 429: "Too Many Requests", 500: "Internal Server Error", 502: "Bad Gateway",
            503: "Service Unavailable", 504: "Gateway Timeout"}  # fmt: skip


def response_status_message(status: int | str) -> str:
    """The status with its meaning: ``404 Not Found``."""
    from http import HTTPStatus

    try:
        return f"{int(status)} {_PHRASES.get(int(status)) or HTTPStatus(int(status)).phrase}"
    except ValueError:
        return f"{int(status)} Unknown Status"
