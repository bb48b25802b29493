"""Request and JsonRequest, as Scrapy has them."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import warnings
from base64 import b64encode
from http.cookies import SimpleCookie
from typing import Any, ClassVar, NoReturn, Self, TypeVar, overload

from shoal.scrapy.headers import Headers, Source
from shoal.scrapy.values import Cookies, Function, Given, Values

# Requests from command lines of curl, as the developer tools of browsers copy them.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"There was an error parsing the curl command: {message}")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("-H", "--header", dest="headers", action="append", default=[])
    parser.add_argument("-X", "--request", dest="method")
    parser.add_argument("-b", "--cookie", dest="cookie")
    parser.add_argument("-d", "--data", "--data-raw", "--data-binary", "--data-ascii", dest="data", action="append")
    parser.add_argument("-u", "--user", dest="user")
    parser.add_argument("-A", "--user-agent", dest="agent")
    parser.add_argument("-I", "--head", dest="head", action="store_true")
    for words in (
        ("--compressed",),
        ("-s", "--silent"),
        ("-v", "--verbose"),
        ("-k", "--insecure"),
        ("-L", "--location"),
    ):
        parser.add_argument(*words, action="store_true")
    return parser


def curl_arguments(command: str, *, strict: bool) -> dict[str, object]:
    """Return the arguments of a Request for a command line. ValueError if it is not a curl command, or if it has
    unknown options and ``strict`` is set."""
    words = shlex.split(command)
    if words[:1] != ["curl"]:
        raise ValueError('A curl command must start with "curl"')
    options, unknown = _parser().parse_known_args(words[1:])
    if unknown:
        message = f"Unrecognized options: {', '.join(unknown)}"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)
    url = options.url if "://" in options.url else f"http://{options.url}"
    method = options.method or ("HEAD" if options.head else "GET")
    arguments: dict[str, object] = {"url": url, "method": method.upper()}
    headers: list[tuple[str, str]] = []
    cookies: dict[str, str] = {}
    for header in options.headers:
        name, _, value = header.partition(":")
        if name.strip().lower() == "cookie":
            cookies |= {key: morsel.value for key, morsel in SimpleCookie(value.strip()).items()}
        else:
            headers.append((name.strip(), value.strip()))
    if options.cookie:
        cookies |= {key: morsel.value for key, morsel in SimpleCookie(options.cookie).items()}
    if options.agent:
        headers.append(("User-Agent", options.agent))
    if options.user:
        headers.append(("Authorization", "Basic " + b64encode(options.user.encode()).decode()))
    if options.data:
        arguments["body"] = "&".join(data.removeprefix("$") for data in options.data)
        if options.method is None:
            arguments["method"] = "POST"
    return arguments | ({"headers": headers} if headers else {}) | ({"cookies": cookies} if cookies else {})


# The base class of requests and responses.


T = TypeVar("T")


class Message:
    """A request or a response: it can be copied with changes, and has flags for the log."""

    attributes: ClassVar[tuple[str, ...]] = ()
    """The arguments, for ``replace``."""
    _flags: list[str] | None = None

    @property
    def flags(self) -> list[str]:
        if self._flags is None:
            self._flags = []
        return self._flags

    @flags.setter
    def flags(self, value: list[str] | None) -> None:
        self._flags = value

    def copy(self) -> Self:
        return self.replace()

    @overload
    def replace(self, *args: Any, cls: None = None, **changes: Any) -> Self: ...

    @overload
    def replace(self, *args: Any, cls: type[T], **changes: Any) -> T: ...

    def replace(self, *args: Any, cls: type[T] | None = None, **changes: Any) -> T | Self:
        """Return a copy with these attributes changed."""
        self._prepare(changes)
        for name in self.attributes:
            changes.setdefault(name, getattr(self, name))
        return type(self)(*args, **changes) if cls is None else cls(*args, **changes)

    def _prepare(self, changes: dict[str, object]) -> None:
        """Convert the arguments of ``replace``, in a subclass whose arguments are not its ``attributes``."""


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
        values: Values = {name: getattr(self, name) for name in self.attributes}
        values["headers"] = dict(self.headers.items())
        for name in ("callback", "errback"):
            function = values[name]
            if callable(function):
                if spider is None or getattr(function, "__self__", None) is not spider:
                    raise ValueError(f"Function {function} is not an instance method in: {spider}")
                values[name] = function.__name__
        if type(self) is not Request:
            values["_class"] = f"{type(self).__module__}.{type(self).__name__}"
        return values

    @classmethod
    def from_curl(cls, curl_command: str, ignore_unknown_options: bool = True, **changes: Any) -> Self:
        """Make a request from a command line of curl."""

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
