"""Request and JsonRequest, as Scrapy has them."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, NoReturn, Self

from shoal.scrapy.headers import Headers, Source
from shoal.scrapy.message import Message
from shoal.scrapy.shared_types import Cookies, Function, Given, Values

_SAFE_URL = re.compile(r"[a-zA-Z][\w+.\-]*://[\w\-.~!$&'()*+,;=:@/?%#]*", re.ASCII)


def NO_CALLBACK(*args: object, **kwargs: object) -> NoReturn:
    """Marks a request that must not have a callback."""
    raise RuntimeError("NO_CALLBACK was called: this request is not meant to have a callback")


class Request(Message):
    """A page to fetch. The order of the arguments is Scrapy's: URL, callback, method."""

    attributes: ClassVar[tuple[str, ...]] = (
        "url", "callback", "method", "headers", "body", "cookies", "meta", "encoding", "priority", "dont_filter",
        "errback", "flags", "cb_kwargs",
    )  # fmt: skip
    """The arguments, for ``replace`` and ``to_dict``."""

    def __init__(
        self,
        url: str,
        callback: Function | str | None = None,
        method: str = "GET",
        headers: Source = None,
        body: bytes | str | None = None,
        cookies: Cookies | None = None,
        meta: Given | None = None,
        encoding: str = "utf-8",
        priority: int = 0,
        dont_filter: bool = False,
        errback: Function | str | None = None,
        flags: list[str] | None = None,
        cb_kwargs: Given | None = None,
    ) -> None:
        """``callback`` and ``errback`` may also be the name of a method of the spider."""
        if not isinstance(priority, int):
            raise TypeError(f"Request priority not an integer: {priority!r}")
        for name, function in (("callback", callback), ("errback", errback)):
            if function is not None and not callable(function) and not isinstance(function, str):
                raise TypeError(f"{name} must be a callable, got {type(function).__name__}")
        self._encoding = encoding
        self.method = method if method == "GET" else str(method).upper()
        self._url = _safe_url(url, encoding)
        self._body = b"" if not body else body if isinstance(body, bytes) else body.encode(encoding)
        self.callback = callback
        self.errback = errback
        self.priority = priority
        self.dont_filter = dont_filter
        self._meta: Values | None = dict(meta) if meta else None
        self._cb_kwargs: Values | None = dict(cb_kwargs) if cb_kwargs else None
        self._cookies: Cookies | None = cookies or None
        self._headers: Headers | None = Headers(headers, encoding) if headers else None
        self._flags = list(flags) if flags else None

    @property
    def url(self) -> str:
        return self._url

    def _set_url(self, url: str) -> None:
        self._url = _safe_url(url, self._encoding)

    @property
    def body(self) -> bytes:
        return self._body

    def _set_body(self, body: bytes | str | None) -> None:
        self._body = b"" if not body else body if isinstance(body, bytes) else body.encode(self._encoding)

    @property
    def encoding(self) -> str:
        return self._encoding

    @property
    def meta(self) -> Values:
        if self._meta is None:
            self._meta = {}
        return self._meta

    @property
    def cb_kwargs(self) -> Values:
        if self._cb_kwargs is None:
            self._cb_kwargs = {}
        return self._cb_kwargs

    @property
    def cookies(self) -> Cookies:
        if self._cookies is None:
            self._cookies = {}
        return self._cookies

    @cookies.setter
    def cookies(self, value: Cookies | None) -> None:
        self._cookies = value

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = Headers(encoding=self._encoding)
        return self._headers

    @headers.setter
    def headers(self, value: Source) -> None:
        self._headers = value if isinstance(value, Headers) else Headers(value, self._encoding)

    def to_dict(self, *, spider: object = None) -> Values:
        """The attributes by name. Methods of the spider are replaced by their names."""
        found: Values = {name: getattr(self, name) for name in self.attributes}
        found["headers"] = dict(self.headers.items())
        for name in ("callback", "errback"):
            function = found[name]
            if callable(function):
                if spider is None or getattr(function, "__self__", None) is not spider:
                    raise ValueError(f"Function {function} is not an instance method in: {spider}")
                found[name] = function.__name__
        if type(self) is not Request:
            found["_class"] = f"{type(self).__module__}.{type(self).__name__}"
        return found

    @classmethod
    def from_curl(cls, curl_command: str, ignore_unknown_options: bool = True, **changes: Any) -> Self:
        """Make a request from a command line of curl."""
        from shoal.scrapy.curl import curl_arguments

        return cls(**{**curl_arguments(curl_command, strict=not ignore_unknown_options), **changes})

    def __repr__(self) -> str:
        return f"<{self.method} {self._url}>"

    __str__ = __repr__


class JsonRequest(Request):
    """A request with a JSON body. ``data`` is its content, and makes it a POST unless ``method`` is given."""

    attributes: ClassVar[tuple[str, ...]] = (*Request.attributes, "dumps_kwargs")

    def __init__(self, *args: Any, data: object = None, dumps_kwargs: Given | None = None, **options: Any) -> None:
        self.dumps_kwargs: Values = {"sort_keys": True, **(dumps_kwargs or {})}
        if data is not None and not options.get("body"):
            options["body"] = self._dump(data)
            if len(args) < 3:
                options.setdefault("method", "POST")
        super().__init__(*args, **options)
        self.headers.setdefault("Content-Type", "application/json")
        self.headers.setdefault("Accept", "application/json, text/javascript, */*; q=0.01")

    def _prepare(self, changes: Values) -> None:
        if changes.get("body") is None and changes.get("data") is not None:
            changes["body"] = self._dump(changes.pop("data"))

    def _dump(self, data: object) -> str:
        return json.dumps(data, **self.dumps_kwargs)


def _safe_url(url: str, encoding: str) -> str:
    """Quote what a URL must not contain. ValueError if it has no scheme."""
    try:
        if _SAFE_URL.fullmatch(url):
            return url
    except TypeError:
        raise TypeError(f"Request url must be str, got {type(url).__name__}") from None
    from w3lib.url import safe_url_string

    safe: str = safe_url_string(url, encoding)
    if "://" not in safe and not safe.startswith(("about:", "data:")):
        raise ValueError(f"Missing scheme in request url: {safe}")
    return safe
