"""Converts requests of a Scrapy spider to Shoal's, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shoal import http
from shoal.errors import RequestError
from shoal.http.files import FILE_CALLBACK
from shoal.scrapy.request import NO_CALLBACK, Request
from shoal.scrapy.spider import Spider
from shoal.scrapy.values import Cookies, Function, Given, NotStorableError, Values, decode, encode, is_scalar

# Objects that stay in memory while their request is queued: lambdas, loaders, shared dicts.
#
# Only a crawl whose frontier is in the memory of this process can keep them. An entry belongs to one request. It is
# dropped some time after the request was handled, because a request whose lease was lost may be handled again.


_KEPT = 1000
"""How many entries of handled requests are kept."""


class LiveParts(NamedTuple):
    """The parts of a request that stay in memory and are not stored."""

    callback: Function | str | None
    errback: Function | str | None
    meta: Values | None
    cb_kwargs: Values | None


class LiveObjects:
    """The live parts of the queued requests, by number."""

    def __init__(self) -> None:
        self._entries: dict[int, LiveParts] = {}
        self._numbers: dict[bytes, int] = {}
        """By fingerprint, for requests that the frontier filters: a duplicate does not get an entry of its own."""
        self._handled: deque[int] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, parts: LiveParts, fingerprint: bytes | None) -> int:
        """Keep the parts of a request, and return their number. ``fingerprint``: None if the frontier does
        not drop duplicates of the request."""
        if fingerprint is not None and (number := self._numbers.get(fingerprint)) is not None:
            return number
        self._last += 1
        self._entries[self._last] = parts
        if fingerprint is not None:
            self._numbers[fingerprint] = self._last
        return self._last

    def get(self, number: int) -> LiveParts | None:
        return self._entries.get(number)

    def handled(self, number: int) -> None:
        """Report that the request of an entry was handled."""
        self._handled.append(number)
        if len(self._handled) > _KEPT:
            self._entries.pop(self._handled.popleft(), None)


PRIORITY_STEP = 1_000_000
"""The factor of the spider's own priority. Among requests with the same one, deeper pages come first: nearly Scrapy's
last in, first out."""
ERRBACK = "!"
"""The prefix of an errback's name. The rest names a method of the spider, or is empty if there is none."""
_EXTRAS = "$"
"""The key in ``meta`` for values that Shoal's requests have no field for."""
_LIVE = "live"
_OF_THE_PAGE = frozenset(
    {"depth", "download_latency", "redirect_urls", "redirect_times", "redirect_reasons", "download_slot"}
)
"""Keys that say how a page was fetched. A spider that writes ``meta=response.meta`` passes them on, so they are
removed."""


class Conversion:
    """Converts the requests of one spider."""

    def __init__(self, spider: Spider, depth_priority: int = 0, *, filters_nothing: bool = False) -> None:
        """``filters_nothing``: duplicates are fetched too."""
        self._spider = spider
        self._attributes = getattr(spider, "__dict__", {})
        self._methods: Values = {}
        """Functions of the class that are methods of the spider, by name. They need no second check."""
        self._depth_priority = depth_priority
        self.filters_nothing = filters_nothing
        self.live: LiveObjects | None = None
        """Keeps the objects that cannot be stored. None if other processes may handle the requests."""
        self.is_known: Callable[[str], bool] = lambda url: False
        """Returns True only if the frontier has the page of a URL."""
        self.is_in_scope: Callable[[str], bool] = lambda url: True
        """Whether the run takes a request for a URL."""

    # -- from the spider

    def priority(self, own: int, depth: int) -> int:
        """The priority in the frontier. ``own`` is the priority that the spider gave the request."""
        return (own - depth * self._depth_priority) * PRIORITY_STEP + depth

    def as_link(self, request: Request) -> tuple[str | None, str | None, int] | None:
        """The callback, errback and priority of a plain link; None if the request has more than these."""
        if (
            request._meta
            or request._cb_kwargs
            or request._headers
            or request._cookies
            or request._flags
            or request.dont_filter
            or self.filters_nothing
            or request._body
            or request.method != "GET"
        ):
            return None
        callback, errback = self._name(request.callback), self._name(request.errback)
        if (request.callback is not None and callback is None) or (request.errback is not None and errback is None):
            return None
        return callback, None if errback is None else ERRBACK + errback, request.priority

    def is_duplicate(self, request: Request) -> bool:
        """Return True only if the frontier has this request. Then it need not be converted."""
        return (
            not request.dont_filter
            and request.method == "GET"
            and not request._body
            and not self.filters_nothing
            and self.is_known(request._url.partition("#")[0])
        )

    def outgoing(self, request: Request, depth: int, referer: str = "") -> http.Request:
        """A request of the spider as the frontier stores it. RequestError if it cannot be stored."""
        priority = self.priority(request.priority, depth)
        callback, errback, meta, cb_kwargs, kept = self._parts(request)
        fields: Values = {}
        extras: Values = {}
        if request._headers:
            fields["headers"] = text_headers(request)
        if request._cookies:
            fields["cookies"], verbose = plain_cookies(request._cookies)
            if verbose:
                extras["cookies"] = verbose
        if request._flags:
            extras["flags"] = list(request._flags)
        if request._meta:
            fields |= _fetch_options(request._meta)
        downgraded = referer.startswith("https:") and request.url.startswith("http:")
        if referer and not downgraded and not (request._headers and "Referer" in request._headers):
            fields["headers"] = {**fields.get("headers", {}), "Referer": referer}
        if extras:
            meta = {**meta, _EXTRAS: {**meta.get(_EXTRAS, {}), **extras}}
        converted = http.Request(
            request.url, callback, request.method, body=request.body, meta=meta, cb_kwargs=cb_kwargs,
            priority=priority, errback=errback, dont_filter=bool(request.dont_filter) or self.filters_nothing,
            **fields,
        )  # fmt: skip
        # A request that is refused here, or by the engine, keeps nothing.
        if kept is not None and self.live is not None and self.is_in_scope(converted.url):
            number = self.live.add(kept, None if converted.dont_filter else converted.fingerprint())
            converted.meta = {**meta, _EXTRAS: {**meta.get(_EXTRAS, {}), _LIVE: number}}
        return converted

    def _parts(self, request: Request) -> tuple[str | None, str | None, Values, Values, LiveParts | None]:
        """The names of callback and errback, ``meta`` and ``cb_kwargs``, as they are stored; and what stays here."""
        meta, cb_kwargs = request._meta, request._cb_kwargs
        if meta and not _OF_THE_PAGE.isdisjoint(meta):
            meta = {key: value for key, value in meta.items() if key not in _OF_THE_PAGE}
        callback, errback = self._name(request.callback), self._name(request.errback)
        if (
            callback is None
            and self.live is None
            and isinstance(request.callback, partial)
            and not request.callback.args
        ):
            callback = self._name(request.callback.func)
            cb_kwargs = {**request.callback.keywords, **(cb_kwargs or {})}
        are_named = (callback or request.callback is None) and (errback or request.errback is None)
        if self.live is not None:
            if not (are_named and _is_plain(meta) and _is_plain(cb_kwargs)):
                return None, ERRBACK, {}, {}, LiveParts(request.callback, request.errback, meta, cb_kwargs)
            stored_meta, stored_kwargs = meta or {}, cb_kwargs or {}
        else:
            for role, name, call in (("callback", callback, request.callback), ("errback", errback, request.errback)):
                if call is not None and name is None:
                    raise NotStorableError(role, call)
            stored_meta = {} if not meta else _encode_all(meta, "meta")
            stored_kwargs = {} if not cb_kwargs else _encode_all(cb_kwargs, "cb_kwargs")
        return callback, None if errback is None else ERRBACK + errback, stored_meta, stored_kwargs, None

    def _name(self, function: object) -> str | None:
        """The name of this method of the spider; None if it is another function."""
        if function is None:
            return None
        if isinstance(function, str):
            self.method(function)
            return function
        spider = self._spider
        if getattr(function, "__self__", None) is not spider:
            return None
        name: str = getattr(function, "__name__", "")
        method = self._methods.get(name)
        if method is not None and method is getattr(function, "__func__", None) and name not in self._attributes:
            return name
        if getattr(spider, name, None) == function:
            self._methods[name] = getattr(function, "__func__", None)
            return name
        for kind in type(spider).__mro__:  # a method whose name begins with two underscores
            mangled = f"_{kind.__name__.lstrip('_')}{name}"
            if getattr(spider, mangled, None) == function:
                return mangled
        return None

    # -- to the spider

    def incoming(self, request: http.Request) -> Request:
        """The spider's view of a stored request."""
        extras = request.meta.get(_EXTRAS)
        meta: Values
        cb_kwargs: Values | None
        callback: Function | str | None
        errback: Function | str | None
        if request.callback == FILE_CALLBACK:  # it carries an item of Shoal's
            meta, cb_kwargs, callback, errback = {}, None, NO_CALLBACK, None
        elif extras is not None and _LIVE in extras:
            parts = self._live_parts(extras[_LIVE], request.url)
            callback, errback, cb_kwargs = parts.callback, parts.errback, parts.cb_kwargs
            meta = {} if parts.meta is None else parts.meta
        else:
            meta = {key: decode(value) for key, value in request.meta.items() if key != _EXTRAS}
            if "proxy" in meta and _fetch_options(meta).get("proxy") != request.proxy:
                meta["proxy"] = request.proxy  # another program wrote the request: a worker checks only this one
            cb_kwargs = decode(request.cb_kwargs) if request.cb_kwargs else None
            callback = None if request.callback is None else self.method(request.callback)
            named = (request.errback or ERRBACK)[len(ERRBACK) :]
            errback = self.method(named) if named else None
        meta["depth"] = request.depth
        if request.redirects:
            meta["redirect_urls"] = list(request.redirects)
            meta["redirect_times"] = len(request.redirects)
        converted = Request(
            request.url, callback, request.method, body=request.body, dont_filter=request.dont_filter,
            priority=self._own_priority(request), errback=errback,
        )  # fmt: skip
        converted._meta, converted._cb_kwargs = meta, cb_kwargs
        if request.headers:
            converted.headers = request.headers
        if request.cookies:
            converted.cookies = dict(request.cookies)
        if extras is not None:
            converted._flags = extras.get("flags")
            if "cookies" in extras:
                converted.cookies = [*_listed(converted.cookies), *extras["cookies"]]
        return converted

    def changed(self, stored: http.Request, request: Request) -> http.Request:
        """Apply the changes of middlewares to a stored request."""
        cookies, _ = plain_cookies(request._cookies) if request._cookies else ({}, [])
        return stored.replace(
            url=request.url, method=request.method, body=request.body, cookies=cookies,
            headers=text_headers(request) if request._headers else {},
            **{"proxy": None, "timeout": None, **_fetch_options(request.meta)},
        )  # fmt: skip

    def raw_meta(self, request: http.Request) -> Given:
        """The ``meta`` of a stored request, not decoded. The keys that Scrapy defines need no decoding."""
        extras = request.meta.get(_EXTRAS)
        if extras is not None and _LIVE in extras:
            return self._live_parts(extras[_LIVE], request.url).meta or {}
        return request.meta

    def verbose_cookies(self, request: http.Request) -> list[Values] | None:
        """The cookies of a stored request that have a domain or a path of their own."""
        extras = request.meta.get(_EXTRAS)
        return None if extras is None else extras.get("cookies")

    def handled(self, request: http.Request) -> None:
        """Report that the callback or errback of a request was called. Its live objects can be dropped."""
        extras = request.meta.get(_EXTRAS)
        if extras is not None and self.live is not None and _LIVE in extras:
            self.live.handled(extras[_LIVE])

    def method(self, name: str) -> Function:
        """The method of the spider with this name. RequestError if it has none."""
        method: Function | None = getattr(self._spider, name, None)
        if not callable(method):
            raise RequestError(
                f"{type(self._spider).__name__} has no method {name!r}, but a request has it as callback"
            )
        return method

    def _own_priority(self, request: http.Request) -> int:
        return int(request.priority // PRIORITY_STEP) + request.depth * self._depth_priority

    def _live_parts(self, number: int, url: str) -> LiveParts:
        parts = None if self.live is None else self.live.get(number)
        if parts is None:
            raise RequestError(
                f"the objects in meta or cb_kwargs of {url}, or its callback, are gone: they were in the memory of the "
                "process that made the request, or were handled long ago"
            )
        return parts


def _is_plain(values: Values | None) -> bool:
    """Whether all values are immutable and can be stored. Then a copy serves as well as the original."""
    return not values or (all(map(is_scalar, values.values())) and all(type(key) is str for key in values))


def _encode_all(values: Values, what: str) -> Values:
    for key in values:
        if type(key) is not str:
            raise NotStorableError(f"the key {key!r} of {what}", key)
    return {key: encode(value, f"{what}[{key!r}]") for key, value in values.items()}


def text_headers(request: Request) -> dict[str, str]:
    """The headers of a request as text, one value for each name."""
    headers = request.headers.items()
    return {name.decode("latin-1"): b", ".join(values).decode("utf-8", "replace") for name, values in headers if values}


def plain_cookies(cookies: Cookies) -> tuple[dict[str, str], list[Values]]:
    """The cookies by name, and those that have a domain or a path of their own."""
    plain: dict[str, str] = {}
    extra: list[Values] = []
    for cookie in _listed(cookies):
        name, value = _text(cookie.get("name", "")), _text(cookie.get("value", ""))
        if any(cookie.get(key) for key in ("domain", "path", "secure")):
            extra.append({key: _text(part) for key, part in cookie.items() if part})
        else:
            plain[name] = value
    return plain, extra


def _listed(cookies: Cookies) -> list[Values]:
    if isinstance(cookies, dict):
        return [{"name": name, "value": value} for name, value in cookies.items()]
    return list(cookies)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _fetch_options(meta: Values) -> Values:
    """The keys of ``meta`` that say how the page is fetched, as fields of a request."""
    proxy, timeout = meta.get("proxy"), meta.get("download_timeout")
    values: Values = {}
    if proxy:
        values["proxy"] = proxy if "://" in proxy else f"http://{proxy}"
    if timeout:
        values["timeout"] = float(timeout)
    return values
