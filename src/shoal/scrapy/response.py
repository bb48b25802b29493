"""Response and its kinds for text, HTML, XML and JSON, as Scrapy has them. The page is parsed by Shoal's own parser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack
from urllib.parse import urljoin

from shoal import http
from shoal.http import href_of
from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.headers import Headers, Source
from shoal.scrapy.request import Message, Request
from shoal.scrapy.values import Followed, Function, RequestOptions, Values

if TYPE_CHECKING:
    from shoal.selector import Selector, SelectorList
    from shoal.selector.xpath import XPathValue

_NOT_READ = object()
_NO_TEXT = "Response content isn't text"


class Response(Message):
    """A fetched page. Its headers, text and parsed tree are created on first use."""

    attributes: ClassVar[tuple[str, ...]] = (
        "url", "status", "headers", "body", "flags", "request", "certificate", "ip_address", "protocol",
    )  # fmt: skip
    """The arguments, for ``replace``."""

    certificate: object = None
    ip_address: object = None
    protocol: str | None = None

    def __init__(
        self,
        url: str,
        status: int = 200,
        headers: Source = None,
        body: object = b"",
        flags: list[str] | None = None,
        request: Request | None = None,
        certificate: object = None,
        ip_address: object = None,
        protocol: str | None = None,
    ) -> None:
        if not isinstance(url, str):
            raise TypeError(f"{type(self).__name__} url must be str, got {type(url).__name__}")
        self._url = url
        self.status = int(status)
        self._headers: Headers | None = Headers(headers) if headers else None
        self._body: bytes = self._as_bytes(body)
        self._flags = list(flags) if flags else None
        self.request = request
        self._page: http.Response | None = None
        """The page that Shoal fetched. Its headers are used until ``_headers`` is set."""
        if certificate is not None or ip_address is not None or protocol is not None:
            self.certificate, self.ip_address, self.protocol = certificate, ip_address, protocol

    @classmethod
    def of(cls, page: http.Response, request: Request) -> Self:
        """The response of a page that Shoal fetched. Nothing is copied."""
        response = cls.__new__(cls)
        response._url = page.url
        response.status = page.status
        response._headers = None
        response._body = page.body
        response.request = request
        response._page = page
        if page.flags:
            response._flags = list(page.flags)
        response._begin()
        return response

    def _begin(self) -> None:
        """Set the attributes of the subclass."""

    def _as_bytes(self, body: object) -> bytes:
        if body is None:
            return b""
        if not isinstance(body, bytes):
            raise TypeError("Response body must be bytes. If you want to pass unicode body use TextResponse")
        return body

    @property
    def url(self) -> str:
        return self._url

    @property
    def body(self) -> bytes:
        return self._body

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = Headers()
            if self._page is not None:
                for name, value in self._page.headers.items():
                    self._headers.appendlist(name, value.encode("utf-8", "surrogateescape"))
        return self._headers

    @headers.setter
    def headers(self, value: Source) -> None:
        self._headers = value if isinstance(value, Headers) else Headers(value)

    @property
    def meta(self) -> Values:
        if self.request is None:
            raise AttributeError("Response.meta not available, this response is not tied to any request")
        return self.request.meta

    @property
    def cb_kwargs(self) -> Values:
        if self.request is None:
            raise AttributeError("Response.cb_kwargs not available, this response is not tied to any request")
        return self.request.cb_kwargs

    @property
    def text(self) -> str:
        raise AttributeError(_NO_TEXT)

    def css(self, query: str) -> SelectorList:
        raise NotSupported(_NO_TEXT)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        raise NotSupported(_NO_TEXT)

    def jmespath(self, query: str, **options: object) -> SelectorList:
        raise NotSupported(_NO_TEXT)

    def urljoin(self, url: str) -> str:
        """Return the absolute URL of a link on this page."""
        return join(self._url, url)

    def follow(
        self, url: Followed, callback: Function | str | None = None, *args: Any, **options: Unpack[RequestOptions]
    ) -> Request:
        """Return a request for a link: a URL, relative or absolute, or a Link."""
        if url is None:
            raise ValueError("url can't be None")
        address = url if isinstance(url, str) else getattr(url, "url", None)
        if not isinstance(address, str):
            raise TypeError(f"cannot follow {url!r:.80}: pass a URL or a Link")
        return Request(self.urljoin(address), callback, *args, **options)

    def follow_all(
        self,
        urls: Iterable[Followed],
        callback: Function | str | None = None,
        *args: Any,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Request]:
        """Return a request for each link, with the same arguments."""
        if not isinstance(urls, Iterable):
            raise TypeError("'urls' argument must be an iterable")
        return (self.follow(url, callback, *args, **options) for url in urls)

    def __repr__(self) -> str:
        return f"<{self.status} {self._url}>"

    __str__ = __repr__


class TextResponse(Response):
    """A page with text."""

    attributes: ClassVar[tuple[str, ...]] = (*Response.attributes, "encoding")

    def __init__(self, *args: Any, encoding: str | None = None, **options: Any) -> None:
        self._encoding = encoding
        self._begin()
        super().__init__(*args, **options)

    def _begin(self) -> None:
        if self.__dict__.get("_encoding") is None:
            self._encoding = None
        self._json: object = _NOT_READ
        self._base: str | None = None
        self._selector: Selector | None = None

    def _as_bytes(self, body: object) -> bytes:
        if isinstance(body, str):
            if self._encoding is None:
                raise TypeError(f"Cannot convert unicode body - {type(self).__name__} has no encoding")
            return body.encode(self._encoding)
        return super()._as_bytes(body)

    @property
    def page(self) -> http.Response:
        """The page as a response of Shoal."""
        if self._page is None:
            headers = dict(self.headers.to_tuple_list())
            if self._encoding is not None:
                kind = headers.get("Content-Type", self._content_type).partition(";")[0]
                headers["Content-Type"] = f"{kind}; charset={self._encoding}"
            elif "Content-Type" not in headers:
                headers["Content-Type"] = self._content_type
            request = None if self._url.startswith(("http://", "https://")) else http.Request("http://nowhere.invalid/")
            self._page = http.Response(self._url, headers=headers, body=self._body, request=request)
        return self._page

    _content_type = "text/plain"

    @property
    def encoding(self) -> str:
        return self._encoding or self.page.encoding.lower()

    @property
    def text(self) -> str:
        return self.page.text

    def json(self) -> Any:
        """Decode the body as JSON. The result is cached."""
        if self._json is _NOT_READ:
            try:
                self._json = json.loads(self._body)
            except UnicodeDecodeError:
                self._json = json.loads(self.text)
        return self._json

    @property
    def selector(self) -> Selector:
        if self._selector is None:
            self._selector = self.page.selector
        return self._selector

    def css(self, query: str) -> SelectorList:
        return self.selector.css(query)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        return self.selector.xpath(query, namespaces, **variables)

    def jmespath(self, query: str, **options: object) -> SelectorList:
        return self.page.jmespath(query, **options)

    def urljoin(self, url: str) -> str:
        if self._base is None:
            self._base = self.page.base_url
        if self._base.startswith("http"):  # not a data: or file: URL
            self.page.joiner.charge(url)
        return join(self._base, url)

    def follow(
        self, url: Followed, callback: Function | str | None = None, *args: Any, **options: Unpack[RequestOptions]
    ) -> Request:
        """Return a request for a link: a URL, a Link, or a selected element or attribute."""
        if type(url) is str:
            return Request(self.urljoin(url), callback, *args, **options)
        from shoal.selector import Selector, SelectorList

        if isinstance(url, SelectorList):
            raise ValueError("SelectorList is not supported")
        if not isinstance(url, Selector):
            return super().follow(url, callback, *args, **options)
        href = href_of(url)
        if href is None:
            raise ValueError(f"<{getattr(url.root, 'tag', 'text')}> element has no href attribute: {url}")
        return Request(self.urljoin(href.strip()), callback, *args, **options)

    def follow_all(
        self,
        urls: Iterable[Followed] | None = None,
        callback: Function | str | None = None,
        *args: Any,
        css: str | None = None,
        xpath: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Request]:
        """Return a request for each link: URLs, Links or selected elements, or what ``css`` or ``xpath`` selects.
        Selected elements without a link are left out."""
        if sum(choice is not None for choice in (urls, css, xpath)) != 1:
            raise ValueError("Please supply exactly one of the following arguments: urls, css, xpath")
        from shoal.selector import SelectorList

        if css is not None or xpath is not None:
            urls = self.css(css) if css is not None else self.xpath(xpath or "")
        if isinstance(urls, SelectorList):
            hrefs = (href_of(link) for link in urls)
            urls = [href.strip() for href in hrefs if href is not None]
        return super().follow_all(urls or (), callback, *args, **options)


class HtmlResponse(TextResponse):
    """A page in HTML."""

    _content_type = "text/html"


class XmlResponse(TextResponse):
    """A page in XML."""

    _content_type = "application/xml"


class JsonResponse(TextResponse):
    """A page in JSON."""

    _content_type = "application/json"

    @property
    def selector(self) -> Selector:
        from shoal.selector import Selector

        if self._selector is None:
            self._selector = Selector(text=self.text, type="json")
        return self._selector


_KINDS: dict[str, type[Response]] = {
    "text/html": HtmlResponse,
    "application/xhtml+xml": HtmlResponse,
    "application/vnd.wap.xhtml+xml": HtmlResponse,
    "application/atom+xml": XmlResponse,
    "application/rdf+xml": XmlResponse,
    "application/rss+xml": XmlResponse,
    "application/xml": XmlResponse,
    "text/xml": XmlResponse,
    "application/json": JsonResponse,
    "application/x-json": JsonResponse,
    "application/javascript": TextResponse,
    "application/x-javascript": TextResponse,
}


def response_class(content_type: str, url: str = "", body: bytes = b"") -> type[Response]:
    """Return the class for a content type. If the type is unknown, the file name in the URL decides, and then the
    body."""
    kind = content_type.partition(";")[0].strip().lower()
    response_kind = _KINDS.get(kind)
    if response_kind is not None:
        return response_kind
    if kind.startswith("text/"):
        return TextResponse
    if kind and kind not in ("application/octet-stream", "binary/octet-stream"):
        return Response
    return _guess(url, body)


def _guess(url: str, body: bytes) -> type[Response]:
    import mimetypes

    kind, encoding = mimetypes.guess_type(url.partition("?")[0])
    if kind and not encoding:
        return _KINDS.get(kind) or (TextResponse if kind.startswith("text/") else Response)
    start = body[:5000].lower()
    if any(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in start):
        return Response
    if b"<html" in start or b"<!doctype html" in start:
        return HtmlResponse
    return XmlResponse if b"<?xml" in start else TextResponse


def join(base: str, url: str) -> str:
    """Join a URL with its base. The common forms need no parsing."""
    if "/." not in url:
        if url[:8] == "https://" or url[:7] == "http://":
            return url
        if url[:1] == "/" and url[1:2] != "/":
            end = base.find("/", 8)
            return (base if end < 0 else base[:end]) + url
    return urljoin(base, url)
