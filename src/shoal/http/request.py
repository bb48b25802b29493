"""Request and LinkBatch: what a spider yields."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeAlias, TypedDict
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from shoal.errors import RequestError
from shoal.http.rendering import RenderChoice, render_choice
from shoal.urls.normalize import resolve, url_fingerprint, written_url

Callback: TypeAlias = Callable[..., object] | str
"""A method of the spider, or its name."""
Values: TypeAlias = dict[str, Any]
"""Values by name that a spider stores with a request and reads again, of msgpack types."""

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_UNSAFE_IN_HEADER = re.compile("[\r\n\0\ud800-\udfff]")
_COOKIE_NAME = re.compile("[^\0-\x20\x7f;=\ud800-\udfff]+")
_UNSAFE_IN_COOKIE = re.compile("[\0-\x1f\x7f;\ud800-\udfff]")
_MAX_PRIORITY = 1e300
_MAX_TIMEOUT = 1e9
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class LinkOptions(TypedDict, total=False):
    """Options of requests and of batches of links, by name."""

    priority: float
    headers: dict[str, str]
    cookies: dict[str, str]
    meta: Values
    cb_kwargs: Values
    dont_filter: bool
    timeout: float | None
    proxy: str | None
    render: RenderChoice


class RequestOptions(LinkOptions, total=False):
    """Options of requests, by name."""

    errback: Callback | None
    method: str
    body: bytes
    json: object
    form: object


class Request(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A page to fetch. ``json`` or ``form`` set the body and its content type, and turn a GET into a POST.

    ``url`` is sent as it was written: only what is not allowed in a URL is quoted, and dot segments and the fragment
    are removed.

    ``callback`` and ``errback`` are methods of the spider, or their names. They are stored by name. ``cb_kwargs`` are
    passed to the callback as keyword arguments. ``meta`` is available on the response. The values of both must be
    msgpack types. ``priority`` is a number, higher first. ``dont_filter`` fetches the URL even if the run has seen it
    before. ``render`` is True, ``"auto"`` or a `Render`: a browser renders the page. The engine sets ``depth``.
    """

    url: str
    callback: Any = None
    method: str = "GET"
    headers: dict[str, str] = {}
    body: bytes = b""
    cookies: dict[str, str] = {}
    meta: Values = {}
    cb_kwargs: Values = {}
    priority: float = 0
    depth: int = 0
    errback: Any = None
    dont_filter: bool = False
    timeout: float | None = None
    proxy: str | None = None
    redirects: list[str] = []
    """The URLs that redirected here, the first one first."""
    render: RenderChoice = None
    json: Any = None
    form: Any = None

    def __post_init__(self) -> None:
        self.url = written_url(self.url)
        if self.callback is not None:
            if not isinstance(self.callback, str):
                self.callback = callback_name(self.callback)
            elif self.callback in _METHODS:
                raise RequestError(
                    f"{self.callback!r} is not a callback: write Request(url, method={self.callback!r}); "
                    "the second argument is the callback"
                )
        if self.errback is not None and not isinstance(self.errback, str):
            self.errback = callback_name(self.errback)
        if self.json is not None or self.form is not None:
            self._make_body()
        if self.headers is None or self.cookies is None or self.meta is None or self.cb_kwargs is None:
            self.headers, self.cookies = self.headers or {}, self.cookies or {}
            self.meta, self.cb_kwargs = self.meta or {}, self.cb_kwargs or {}
        if self.method != "GET" or self.headers or self.cookies or self.body:
            self._check_head()
        if self.meta or self.priority or self.dont_filter or self.redirects or self.proxy or self.timeout is not None:
            self._check_values()
        if self.cb_kwargs:
            _check_names("cb_kwargs", self.cb_kwargs)
        if self.render is not None:
            self.render = render_choice(self.render)
        if _created is not None:
            _record(self)

    def _make_body(self) -> None:
        if self.body or (self.json is not None and self.form is not None):
            raise RequestError(f"set only one of body, json and form: {self.url}")
        try:
            if self.json is not None:
                self.body, kind = msgspec.json.encode(self.json), "application/json"
            else:
                pairs = self.form.items() if isinstance(self.form, Mapping) else self.form
                self.body, kind = urlencode(list(pairs), doseq=True).encode(), "application/x-www-form-urlencoded"
        except (TypeError, ValueError) as exc:
            raise RequestError(f"cannot encode the body for {self.url}: {exc}") from exc
        self.json = self.form = None
        if self.method == "GET":
            self.method = "POST"
        if not any(name.lower() == "content-type" for name in self.headers):
            self.headers = {**self.headers, "Content-Type": kind}

    def _check_head(self) -> None:
        if isinstance(self.body, Mapping):
            raise RequestError("body must be bytes or text; to send a dict, write json={...} or form={...}")
        try:
            if not _TOKEN.fullmatch(self.method):
                raise RequestError(f"invalid HTTP method: {self.method!r}")
            self.method = self.method.upper()
            for name, value in self.headers.items():
                if not _TOKEN.fullmatch(name) or _UNSAFE_IN_HEADER.search(value):
                    raise RequestError(f"invalid HTTP header: {name!r}: {value[:80]!r}")
            for name, value in self.cookies.items():
                if not _COOKIE_NAME.fullmatch(name) or _UNSAFE_IN_COOKIE.search(value):
                    raise RequestError(f"invalid cookie: {name!r}: {value[:80]!r}")
            if not isinstance(self.body, bytes):
                self.body = self.body.encode() if isinstance(self.body, str) else bytes(memoryview(self.body))
        except (AttributeError, TypeError) as exc:
            raise RequestError(f"method, headers and cookies must be text, and body must be bytes: {exc}") from exc

    def _check_values(self) -> None:
        """Refuse values that would change when they are stored, or that would break the order of the queue."""
        if type(self.priority) not in (int, float) or not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY:
            raise RequestError(f"priority must be a finite number, not {self.priority!r}")
        if abs(self.priority) >= 2**63:
            self.priority = float(self.priority)
        if self.timeout is not None and not (type(self.timeout) in (int, float) and 0 < self.timeout < _MAX_TIMEOUT):
            raise RequestError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        _check_names("meta", self.meta)
        if self.proxy is not None and not (isinstance(self.proxy, str) and self.proxy.isascii()):
            raise RequestError(f"proxy must be a URL, not {self.proxy!r:.80}")
        if not isinstance(self.redirects, list) or not all(isinstance(url, str) for url in self.redirects):
            raise RequestError(f"redirects must be a list of URLs, not {self.redirects!r:.80}")
        self.dont_filter = bool(self.dont_filter)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal for requests with the same method, URL and body. The spelling of the URL does
        not matter: ``/%7Eann`` is ``/~ann``."""
        return url_fingerprint(self.url, self.method, self.body)

    def replace(self, **changes: Any) -> Request:
        """Return a copy with these values changed."""
        forget_created(self)
        return msgspec.structs.replace(self, **changes)


class LinkBatch(Struct, kw_only=True):
    """Many links of one page with the same callback and options, in one object. Yield the batch itself."""

    base: str
    hrefs: list[str]
    callback: str | None = None
    errback: str | None = None
    priority: float = 0
    headers: dict[str, str] = {}
    cookies: dict[str, str] = {}
    meta: Values = {}
    cb_kwargs: Values = {}
    dont_filter: bool = False
    timeout: float | None = None
    proxy: str | None = None
    render: RenderChoice = None

    def __post_init__(self) -> None:
        if _created is not None:
            _record(self)

    def __len__(self) -> int:
        return len(self.hrefs)

    def __iter__(self) -> Iterator[Request]:
        """Return a request for each URL, for ``yield from``: without duplicates and URLs that cannot be crawled."""
        forget_created(self)
        return map(self.request, resolve(self.base, self.hrefs))

    def request(self, url: str) -> Request:
        """Return the request for one of the links."""
        return Request(
            url, self.callback, errback=self.errback, priority=self.priority, headers=self.headers,
            cookies=self.cookies, meta=self.meta, cb_kwargs=self.cb_kwargs, dont_filter=self.dont_filter,
            timeout=self.timeout, proxy=self.proxy, render=self.render,
        )  # fmt: skip


class Duplicates(Struct):
    """Requests that a callback did not make, because the frontier has their pages (``RunControl.is_known``)."""

    count: int


Creation: TypeAlias = tuple[Request | LinkBatch, CodeType, int]
"""A request or a batch, and where the code of the user created it: a function, and the index of the instruction."""
_created: list[Creation] | None = None
"""What the callback that runs now has created. None while no callback runs."""


_MAX_CREATED = 1000  # that are recorded in one call of a callback: each may be searched for


def record_created(created: list[Creation] | None) -> None:
    """Add each request and batch that is created from now on to this list; None: to none."""
    global _created
    _created = created


def _record(link: Request | LinkBatch) -> None:
    frame = sys._getframe(2)
    while frame.f_globals.get("__package__") == "shoal.http" and frame.f_back is not None:
        frame = frame.f_back
    if _created is not None and len(_created) < _MAX_CREATED:
        _created.append((link, frame.f_code, frame.f_lasti))


def forget_created(link: Request | LinkBatch) -> None:
    """It need not be yielded: others are yielded in its place, or it is part of something else."""
    if _created:
        for index in range(len(_created) - 1, -1, -1):
            if _created[index][0] is link:
                del _created[index]
                break


def _check_names(field: str, value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"{field} must be a dict with text keys, not {value!r:.80}")


def callback_name(callback: Callable[..., object]) -> str:
    """Return the name of a spider's method. RequestError if the callback is not a method."""
    if getattr(callback, "__self__", None) is None:
        name = getattr(callback, "__qualname__", repr(callback))
        raise RequestError(f"{name} cannot be a callback: callbacks are stored by name, so use a method of the spider")
    return callback.__name__
