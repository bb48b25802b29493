"""The downloader middlewares of a project, called in Scrapy's order.

The built-in middlewares are steps of the same chain, so a project may move them or switch them off. Its own middlewares
see what they would see in Scrapy: one with an order below 550 sees an error only when no retry is left, and one below
600 sees no redirect.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal import http
from shoal.errors import FetchError, RequestError, describe
from shoal.fetch.layers import Postponed, Replaced
from shoal.http.files import FILE_CALLBACK
from shoal.ports import Fetch
from shoal.scrapy.components import Hook, ProjectComponent, class_path, hooks_of, load_components
from shoal.scrapy.downloader import DownloaderLayer, FinalResponse, http_error, page_of
from shoal.scrapy.exceptions import IgnoreRequest
from shoal.scrapy.failure import ScrapyFetchError, exception_of
from shoal.scrapy.request import Request
from shoal.scrapy.response import Response, TextResponse
from shoal.scrapy.scope import OffsiteFilter

if TYPE_CHECKING:
    from shoal.scrapy.adapter import ScrapyAdapter
    from shoal.scrapy.settings import Settings
    from shoal.scrapy.spider import Spider

_PATH = "scrapy.downloadermiddlewares."
BUILT_IN = {
    "offsite.OffsiteMiddleware": 50,
    "robotstxt.RobotsTxtMiddleware": 100,
    "httpauth.HttpAuthMiddleware": 300,
    "downloadtimeout.DownloadTimeoutMiddleware": 350,
    "defaultheaders.DefaultHeadersMiddleware": 400,
    "useragent.UserAgentMiddleware": 500,
    "retry.RetryMiddleware": 550,
    "redirect.MetaRefreshMiddleware": 580,
    "httpcompression.HttpCompressionMiddleware": 590,
    "redirect.RedirectMiddleware": 600,
    "cookies.CookiesMiddleware": 700,
    "httpproxy.HttpProxyMiddleware": 750,
    "stats.DownloaderStats": 850,
    "httpcache.HttpCacheMiddleware": 900,
}
"""The middlewares that Scrapy has by default, and their order."""


class _Out(Exception):
    """Raised by a step to end the chain with this page or error."""

    def __init__(self, result: http.Response | FetchError) -> None:
        super().__init__()
        self.result = result


class _Exchange:
    """One request on its way through the chain."""

    def __init__(self, stored: http.Request, request: Request) -> None:
        self.stored = stored
        self.request = request
        self.page: http.Response | None = None
        """The response of the host."""
        self.error: FetchError | None = None
        """Why the fetch failed."""

    @property
    def contacted(self) -> bool:
        if self.error is not None:
            return self.error.contacted
        return self.page is not None and not self.page.from_cache


class _HeaderStep:
    """Sets the default headers or the user agent, so that later steps can see them."""

    def __init__(self, headers: Mapping[str, str | None]) -> None:
        self._headers = headers

    def process_request(self, request: Request) -> None:
        for name, value in self._headers.items():
            if value is not None:
                request.headers.setdefault(name, value)


class _LoginStep:
    """Sends user and password to their domain, or to every host if no domain is set."""

    def __init__(self, user: str, password: str, domain: str | None) -> None:
        self._value = b"Basic " + b64encode(f"{user}:{password}".encode())
        self._offsite = OffsiteFilter([domain] if domain else None)

    def process_request(self, request: Request) -> None:
        if self._offsite.allows(request.url):
            request.headers.setdefault("Authorization", self._value)


class _RetryStep:
    def __init__(self, layer: DownloaderLayer, codes: frozenset[int]) -> None:
        self._layer = layer
        self._codes = codes

    def process_response(self, exchange: _Exchange, response: Response) -> Response:
        if response.status in self._codes and self._layer.rules.may_retry(exchange.request.meta):
            error = exchange.error
            if error is None or error.status != response.status:
                kind = f"http {response.status}"
                error = FetchError(
                    f"the server answered {response.status}", kind=kind, retryable=True, status=response.status
                )
            error.retryable = True
            raise _Out(error)
        return response

    def process_exception(self, exchange: _Exchange, exception: Exception) -> None:
        error = exchange.error
        if error is not None and error.retryable and self._layer.rules.may_retry(exchange.request.meta):
            raise _Out(error)


class _RedirectStep:
    def __init__(self, layer: DownloaderLayer) -> None:
        self._layer = layer

    def process_response(self, exchange: _Exchange, response: Response) -> Response:
        if "Location" in response.headers and self._layer.rules.follows(exchange.request.meta, response.status):
            raise _Out(shoal_response(response, exchange.stored, final=False))
        return response


class _RefreshStep:
    def __init__(self, layer: DownloaderLayer) -> None:
        self._layer = layer

    def process_response(self, exchange: _Exchange, response: Response) -> Response:
        if isinstance(response, TextResponse):
            self._layer.check_refresh(shoal_response(response, exchange.stored, final=False), exchange.request.meta)
        return response


class _StepHook(Hook):
    """A hook of a built-in step."""

    def __init__(self, component: ProjectComponent, method: str) -> None:
        super().__init__(component, method, None)


class MiddlewareChain:
    """Runs all hooks for a request. It is a layer of the engine."""

    def __init__(self, adapter: ScrapyAdapter, layer: DownloaderLayer, components: Sequence[ProjectComponent]) -> None:
        self._conversion = adapter.conversion
        self._layer = layer
        disabled, orders = _built_in(adapter.scrapy_settings)
        steps = [
            ProjectComponent(orders[name], "", step)
            for name, step in _steps(adapter, layer).items()
            if name not in disabled
        ]
        hooks = sorted([*steps, *components], key=lambda hook: hook.order)
        self._requests = _hooks(hooks, "process_request", adapter.spider)
        self._responses = _hooks(hooks, "process_response", adapter.spider)[::-1]
        self._exceptions = _hooks(hooks, "process_exception", adapter.spider)[::-1]
        self._sends_cookies = "cookies.CookiesMiddleware" not in disabled
        self.use_jars = layer.use_jars

    async def __call__(self, request: http.Request, fetch: Fetch) -> http.Response:
        scrapy_request = self._conversion.incoming(request)
        self._layer.check_site(request, scrapy_request.meta)
        exchange = _Exchange(request, scrapy_request)
        try:
            try:
                result = await self._begin(exchange, fetch)
            except (Postponed, Replaced, _Out):
                raise
            except Exception as exc:  # a middleware may raise anything
                result = await self._recover(exchange, exc)
            if isinstance(result, Response):
                result = await self._finish(exchange, result)
        except _Out as out:
            if isinstance(out.result, FetchError):
                raise out.result from None
            return out.result
        except (Postponed, Replaced, FetchError):
            raise
        except Exception as exc:
            raise self._refused(exchange, exc) from exc
        if isinstance(result, Request):
            raise Replaced(self._again(exchange, result), contacted=exchange.contacted)
        return self._decided(exchange, result)

    async def _begin(self, exchange: _Exchange, fetch: Fetch) -> Request | Response:
        for hook in self._requests:
            result = await hook(request=exchange.request)
            if result is not None:
                return _checked(hook, result)
        request = self._conversion.changed(exchange.stored, exchange.request)
        try:
            if self._sends_cookies:
                exchange.page = await self._layer.send(request, exchange.request.meta, fetch)
            else:
                exchange.page = await fetch(request)
        except FetchError as error:
            exchange.error = error
            if not isinstance(error.response, http.Response):
                raise exception_of(error) from error
            exchange.page = error.response
        return page_of(exchange.page, exchange.request)

    async def _finish(self, exchange: _Exchange, response: Response) -> Request | Response:
        """Call ``process_response`` of all middlewares, from the downloader to the engine."""
        result: Request | Response = response
        for hook in self._responses:
            if isinstance(hook, _StepHook):
                result = _checked(hook, hook.call(exchange=exchange, response=result))
                continue
            result = _checked(hook, await hook(request=exchange.request, response=result))
            if isinstance(result, Request):
                return result
        return result

    async def _recover(self, exchange: _Exchange, exc: Exception) -> Request | Response:
        """Call ``process_exception`` of the middlewares until one returns a request or a response. If none does, raise
        the error."""
        for hook in self._exceptions:
            if isinstance(hook, _StepHook):
                hook.call(exchange=exchange, exception=exc)
                continue
            result = await hook(request=exchange.request, exception=exc)
            if result is not None:
                return _checked(hook, result)
        raise exc

    def _refused(self, exchange: _Exchange, exc: Exception) -> FetchError:
        """The error of a request that a middleware refused, or whose fetch failed."""
        if exchange.error is not None and exc.__cause__ is exchange.error:
            error = exchange.error
            failure = ScrapyFetchError(
                str(error), kind=error.kind, retryable=False, status=error.status, contacted=error.contacted
            )
        else:
            ignored = isinstance(exc, IgnoreRequest)
            text = f"a middleware ignored the request: {exc}" if ignored else f"a middleware failed: {describe(exc)}"
            kind = "ignored" if ignored else "middleware"
            failure = ScrapyFetchError(text, kind=kind, retryable=False, contacted=exchange.contacted)
        failure.request = exchange.request
        return failure

    def _again(self, exchange: _Exchange, request: Request) -> http.Request:
        stored = exchange.stored
        if stored.callback == FILE_CALLBACK:  # the new request must carry the item too
            return self._conversion.changed(stored, request).replace(dont_filter=True)
        try:
            outgoing = self._conversion.outgoing(request, exchange.stored.depth)
        except RequestError as exc:
            raise self._refused(exchange, exc) from exc
        outgoing.depth = exchange.stored.depth
        outgoing.redirects = [str(url) for url in request.meta.get("redirect_urls", ())]
        self._conversion.handled(exchange.stored)
        return outgoing

    def _decided(self, exchange: _Exchange, response: Response) -> http.Response:
        response.request = exchange.request
        if not self._layer.rules.handles(exchange.request.meta, response.status):
            raise http_error(response, exchange.error)
        return shoal_response(response, exchange.stored, final=True)


def shoal_response(response: Response, stored: http.Request, *, final: bool) -> http.Response:
    """Convert a response of the middlewares for the engine. ``final``: it goes to the callback."""
    page = response._page
    kind = FinalResponse if final else http.Response
    headers = page.headers if page is not None and response._headers is None else response.headers.to_tuple_list()
    found = kind(
        stored.url if page is None else page.url, status=response.status, headers=headers, body=response.body,
        request=stored, elapsed=0.0 if page is None else page.elapsed, from_cache=page is None or page.from_cache,
        flags=() if page is None else page.flags,
    )  # fmt: skip
    if isinstance(found, FinalResponse):
        found.scrapy = response
    return found


def _checked(hook: Hook, result: object) -> Request | Response:
    if not isinstance(result, Request | Response):
        raise TypeError(f"{hook.name} must return a Response or a Request, not a {type(result).__name__}")
    return result


def _hooks(components: list[ProjectComponent], method: str, spider: Spider) -> list[Hook]:
    return [
        _StepHook(component, method) if not component.name else hooks_of([component], method, spider)[0]
        for component in components
        if hasattr(component.instance, method)
    ]


def _steps(adapter: ScrapyAdapter, layer: DownloaderLayer) -> dict[str, object]:
    settings, spider = adapter.scrapy_settings, adapter.spider
    agent = getattr(spider, "user_agent", None) or settings.get("USER_AGENT")
    return {
        "httpauth.HttpAuthMiddleware": _LoginStep(*adapter.login) if adapter.login else None,
        "defaultheaders.DefaultHeadersMiddleware": _HeaderStep(settings.getdict("DEFAULT_REQUEST_HEADERS")),
        "useragent.UserAgentMiddleware": _HeaderStep({"User-Agent": agent} if agent else {}),
        "retry.RetryMiddleware": _RetryStep(layer, frozenset(map(int, settings.getlist("RETRY_HTTP_CODES")))),
        "redirect.MetaRefreshMiddleware": _RefreshStep(layer),
        "redirect.RedirectMiddleware": _RedirectStep(layer),
    }


def _built_in(settings: Settings) -> tuple[set[str], dict[str, float]]:
    """The built-in middlewares that are switched off, and the order of each of them."""
    disabled: set[str] = set()
    orders: dict[str, float] = dict(BUILT_IN)
    for key, order in settings.getdict("DOWNLOADER_MIDDLEWARES").items():
        name = built_in_name(key)
        if name is not None and order is None:
            disabled.add(name)
        elif name is not None:
            orders[name] = float(order)
    return disabled, orders


def built_in_name(key: object) -> str | None:
    """The short name of a middleware that Scrapy has by default; None for another one."""
    path = class_path(key).replace("scrapy.contrib.downloadermiddleware.", _PATH)
    name = path.removeprefix(_PATH).removeprefix("shoal.scrapy.downloadermiddlewares.")
    if name in BUILT_IN:
        return name
    return next((key for key in BUILT_IN if path.startswith("shoal.scrapy.") and key.endswith(f".{name}")), None)


def make_layer(adapter: ScrapyAdapter) -> DownloaderLayer | MiddlewareChain:
    """The layer of a spider: a chain if the project has middlewares or has changed the built-in ones, otherwise the
    simple layer."""
    settings = adapter.scrapy_settings
    layer = DownloaderLayer(adapter.conversion, settings, adapter.spider, adapter.offsite)
    middlewares = settings.getdict("DOWNLOADER_MIDDLEWARES")
    own = {key: order for key, order in middlewares.items() if built_in_name(key) is None}
    components = load_components(own, "DOWNLOADER_MIDDLEWARES", adapter.crawler_view)
    if not components and not any(order is None for order in middlewares.values()) and not adapter.login:
        return layer
    return MiddlewareChain(adapter, layer, components)
