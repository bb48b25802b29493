"""Request and Response: what a spider yields and receives."""

from __future__ import annotations

import json as jsonlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlencode

import msgspec
from msgspec import Struct
from multidict import CIMultiDict, CIMultiDictProxy

from shoal.errors import RequestError, SelectorError
from shoal.urls.normalize import join_url, normalize_url, resolve, url_fingerprint

if TYPE_CHECKING:
    import turbohtml

    from shoal.parsing import AttributeBudget
    from shoal.selector import Selector, SelectorList
    from shoal.selector.xpath import XPathValue

log = logging.getLogger("shoal.http")

Callback: TypeAlias = Callable[..., object] | str
"""A method of the spider, or its name."""

_MAX_CHARACTERS = 48 << 20  # of all links that one query finds
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_UNSAFE_IN_HEADER = re.compile("[\r\n\0\ud800-\udfff]")
_COOKIE_NAME = re.compile("[^\0-\x20\x7f;=\ud800-\udfff]+")
_UNSAFE_IN_COOKIE = re.compile("[\0-\x1f\x7f;\ud800-\udfff]")
_MAX_PRIORITY = 1e300
_MAX_TIMEOUT = 1e9
_MAX_CONTENT_TYPE = 1000  # characters; the rest is ignored
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\"';\s]+)", re.IGNORECASE)


class Request(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A page to fetch. ``json`` or ``form`` set the body and its content type, and turn a GET into a POST.

    ``callback`` and ``errback`` are methods of the spider, or their names. They are stored by name. ``priority`` is a
    number, higher first. ``dont_filter`` fetches the URL even if the run has seen it before. ``meta`` is available
    on the response; its values must be msgpack types. The engine sets ``depth``.
    """

    url: str
    method: str = "GET"
    headers: dict[str, str] = {}
    body: bytes = b""
    cookies: dict[str, str] = {}
    meta: dict[str, Any] = {}
    priority: float = 0
    depth: int = 0
    callback: Any = None
    errback: Any = None
    dont_filter: bool = False
    timeout: float | None = None
    proxy: str | None = None
    redirects: list[str] = []
    """The URLs that redirected here, the first one first."""
    json: Any = None
    form: Any = None

    def __post_init__(self) -> None:
        self.url = normalize_url(self.url)
        if self.callback is not None and not isinstance(self.callback, str):
            self.callback = callback_name(self.callback)
        if self.errback is not None and not isinstance(self.errback, str):
            self.errback = callback_name(self.errback)
        if self.json is not None or self.form is not None:
            self._make_body()
        if self.headers is None or self.cookies is None or self.meta is None:
            self.headers, self.cookies, self.meta = self.headers or {}, self.cookies or {}, self.meta or {}
        if self.method != "GET" or self.headers or self.cookies or self.body:
            self._check_head()
        if self.meta or self.priority or self.dont_filter or self.redirects or self.proxy or self.timeout is not None:
            self._check_values()

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
        if not isinstance(self.meta, dict) or not all(isinstance(key, str) for key in self.meta):
            raise RequestError(f"meta must be a dict with text keys, not {self.meta!r:.80}")
        if self.proxy is not None and not (isinstance(self.proxy, str) and self.proxy.isascii()):
            raise RequestError(f"proxy must be a URL, not {self.proxy!r:.80}")
        if not isinstance(self.redirects, list) or not all(isinstance(url, str) for url in self.redirects):
            raise RequestError(f"redirects must be a list of URLs, not {self.redirects!r:.80}")
        self.dont_filter = bool(self.dont_filter)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal for requests with the same method, URL and body."""
        return url_fingerprint(self.url, self.method, self.body)

    def replace(self, **changes: Any) -> Request:
        """Return a copy with these values changed."""
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
    meta: dict[str, Any] = {}
    dont_filter: bool = False
    timeout: float | None = None
    proxy: str | None = None

    def __len__(self) -> int:
        return len(self.hrefs)

    def __iter__(self) -> Iterator[Request]:
        """Return a request for each URL, for ``yield from``: without duplicates and URLs that cannot be crawled."""
        return map(self.request, resolve(self.base, self.hrefs))

    def request(self, url: str) -> Request:
        """Return the request for one of the links."""
        return Request(
            url, callback=self.callback, errback=self.errback, priority=self.priority, headers=self.headers,
            cookies=self.cookies, meta=self.meta, dont_filter=self.dont_filter, timeout=self.timeout, proxy=self.proxy,
        )  # fmt: skip


def callback_name(callback: Callable[..., object]) -> str:
    """Return the name of a spider's method. RequestError if the callback is not a method."""
    if getattr(callback, "__self__", None) is None:
        name = getattr(callback, "__qualname__", repr(callback))
        raise RequestError(f"{name} cannot be a callback: callbacks are stored by name, so use a method of the spider")
    return callback.__name__


class Response:
    """A fetched page. Its text and its parsed tree are created on first use."""

    __slots__ = (
        "_base_url", "_budget", "_document", "_json", "_selector", "_text", "body", "elapsed", "from_cache", "headers",
        "request", "status", "url",
    )  # fmt: skip

    def __init__(
        self,
        url: str,
        *,
        status: int = 200,
        headers: CIMultiDictProxy[str] | Mapping[str, str] | Iterable[tuple[str, str]] = (),
        body: bytes = b"",
        request: Request | None = None,
        elapsed: float = 0.0,
        from_cache: bool = False,
    ) -> None:
        if request is None:
            request = Request(url)
            url = request.url
        self.url = url
        self.status = status
        self.headers = headers if isinstance(headers, CIMultiDictProxy) else CIMultiDictProxy(CIMultiDict(headers))
        self.body = body
        self.request = request
        self.elapsed = elapsed
        """Seconds from sending the request to receiving all headers."""
        self.from_cache = from_cache
        self._base_url: str | None = None
        self._text: str | None = None
        self._document: turbohtml.Document | None = None
        self._budget: AttributeBudget | None = None
        self._selector: Selector | None = None
        self._json: Selector | None = None

    def __repr__(self) -> str:
        return f"<Response {self.status} {self.url}>"

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def meta(self) -> dict[str, Any]:
        return self.request.meta

    @property
    def redirects(self) -> list[str]:
        """The URLs that redirected here, the first one first."""
        return self.request.redirects

    @property
    def document(self) -> turbohtml.Document:
        """The page as a turbohtml document. TooComplexError if it would need too much memory."""
        self._attributes.check()
        return self._tree

    @property
    def _tree(self) -> turbohtml.Document:
        """The document without the check of its attributes, for code that reads few of them."""
        if self._document is None:
            from shoal import parsing

            self._document = parsing.parse(self.body, _charset_in(self.headers.get("Content-Type", "")))
        return self._document

    @property
    def _attributes(self) -> AttributeBudget:
        if self._budget is None:
            from shoal.parsing import AttributeBudget

            self._budget = AttributeBudget(self._tree, len(self.body))
        return self._budget

    @property
    def encoding(self) -> str:
        """The encoding, detected as browsers do: byte-order mark, header, meta tag, then the content."""
        return self._tree.encoding or "utf-8"

    @property
    def text(self) -> str:
        if self._text is None:
            import turbohtml.detect  # noqa: F401 - registers the encodings of the web, which differ from Python's

            self._text = self.body.decode("whatwg-" + self.encoding.lower(), "replace").removeprefix("\ufeff")
        return self._text

    def json(self) -> Any:
        """Decode the body as JSON. ValueError names the position of an error."""
        return jsonlib.loads(self.body)

    @property
    def selector(self) -> Selector:
        if self._selector is None:
            from shoal.selector import Selector

            self._selector = Selector(root=self.document)
        return self._selector

    def css(self, query: str) -> SelectorList:
        return self.selector.css(query)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        return self.selector.xpath(query, namespaces, **variables)

    def jmespath(self, query: str, **options: Any) -> SelectorList:
        """Query the body as JSON. A body that is not valid JSON contains nothing; ``json()`` says why."""
        if self._json is None:
            from shoal.selector import Selector
            from shoal.selector.documents import load_json

            self._json = Selector(root=load_json(self.body))
        return self._json.jmespath(query, **options)

    def re(self, pattern: str | re.Pattern[str]) -> list[str]:
        """Return all matches in the text: the groups if the pattern has any, or else the whole match."""
        found: list[str] = []
        for match in re.finditer(pattern, self.text):
            found.extend(match.groups(default="") if match.re.groups else [match[0]])
        return found

    @property
    def base_url(self) -> str:
        """The URL that relative links refer to: the page's ``<base>``, or its own URL."""
        if self._base_url is None:
            self._base_url = self.url
            base = self._tree.select_one("base[href]")
            if base is not None:
                with suppress(RequestError):
                    self._base_url = join_url(self.url, base.attr("href") or "")
        return self._base_url

    def urljoin(self, href: str) -> str:
        """Return the absolute URL of a link on this page."""
        return join_url(self.base_url, href)

    def links(self, within: str = "a[href]") -> list[str]:
        """Return the URLs of the page's links, without duplicates and URLs that cannot be crawled."""
        return resolve(self.base_url, self._hrefs(within))

    def to_markdown(self) -> str:
        """Convert the page to Markdown."""
        from shoal import parsing

        return parsing.to_markdown(self.document, len(self.body))

    def main_text(self) -> str:
        """Return the text of the page's main content, without navigation; all its text if none is found."""
        from shoal import parsing

        return parsing.main_text(self.document, len(self.body))

    def follow(self, link: str | Selector, callback: Callback | None = None, **options: Any) -> Request:
        """Return a request for a link: a URL, relative or absolute, or a selected element or attribute."""
        href = href_of(link)
        if href is None:
            raise RequestError(f"{link!r:.80} has no href to follow")
        return Request(self.urljoin(href), callback=callback, **options)

    def follow_all(
        self,
        links: str | Iterable[str | Selector] = "a[href]",
        callback: Callback | None = None,
        **options: Any,
    ) -> LinkBatch:
        """Follow many links with the same options. ``links`` is a CSS query, or URLs, elements or attributes.

        The result is one object for all links. Yield it as it is.
        """
        if isinstance(links, str):
            hrefs = self._hrefs(links)
        else:
            hrefs = [href for link in links if (href := href_of(link)) is not None]
        name = callback if callback is None or isinstance(callback, str) else callback_name(callback)
        errback = options.pop("errback", None)
        if errback is not None and not isinstance(errback, str):
            errback = callback_name(errback)
        return LinkBatch(base=self.base_url, hrefs=hrefs, callback=name, errback=errback, **options)

    def _hrefs(self, query: str) -> list[str]:
        if "::" in query:
            return _up_to_limit(href_of(each) for each in self.css(query))
        try:
            elements = self._tree.select(query)
        except ValueError as exc:
            raise SelectorError(f"bad CSS query {query!r}: {exc}") from exc
        hrefs = self._attributes.values(elements, "href")
        if None not in hrefs:
            return cast(list[str], hrefs)
        return _up_to_limit(map(_first_href, elements))


@lru_cache(maxsize=256)
def _charset_in(content_type: str) -> str | None:
    match = _CHARSET.search(content_type[:_MAX_CONTENT_TYPE])
    # ASCII is a subset of every other encoding. A page that wrongly claims to be ASCII needs detection.
    return match[1] if match and match[1].lower() not in ("ascii", "us-ascii") else None


def _up_to_limit(found: Iterable[str | None]) -> list[str]:
    """Return the links up to a total length: nested elements around one link all yield that link."""
    hrefs: list[str] = []
    room = _MAX_CHARACTERS
    for href in found:
        if href is not None:
            room -= len(href)
            if room < 0:
                log.warning("too many links: ignored those after the first %d characters", _MAX_CHARACTERS)
                break
            hrefs.append(href)
    return hrefs


def _first_href(element: turbohtml.Element) -> str | None:
    """Return the href of the element or of the first link in it: ``li.next`` works as well as ``li.next a``."""
    inner = element if element.attr("href") is not None else element.select_one("a[href]")
    return inner.attr("href") if inner is not None else None


def href_of(link: str | Selector) -> str | None:
    """Return the link in a string, a selected attribute or a selected element; None if the element has none."""
    if isinstance(link, str):
        return link
    root = getattr(link, "root", None)
    if isinstance(root, str):
        return root
    if not hasattr(root, "attr"):
        raise RequestError(f"cannot follow {link!r:.80}: pass a URL, or one selected element or attribute")
    return _first_href(cast("turbohtml.Element", root))
