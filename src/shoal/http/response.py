"""Response: what a spider receives."""

from __future__ import annotations

import json as jsonlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack, cast

from multidict import CIMultiDict, CIMultiDictProxy

from shoal.errors import RequestError, SelectorError, TooComplexError
from shoal.http.rendering import Captured, Render
from shoal.http.request import (
    Callback,
    LinkBatch,
    LinkOptions,
    Request,
    RequestOptions,
    Values,
    callback_name,
    forget_created,
)
from shoal.urls.normalize import MAX_PER_PAGE, LinkJoiner, join_url, resolve

if TYPE_CHECKING:
    import turbohtml
    from playwright.async_api import Page

    from shoal.http.files import FileEntry
    from shoal.http.forms import Form
    from shoal.selector import Selector, SelectorList
    from shoal.selector.parsing import AttributeBudget
    from shoal.selector.xpath import XPathValue

log = logging.getLogger("shoal.http")

_ALL_LINKS = "a[href]"
_MAX_CHARACTERS = 48 << 20  # of all links that one query finds
_MAX_NAMES = 10 * MAX_PER_PAGE  # internationalized host names in links that a callback joins one by one
_MAX_SLOW = 50_000  # such links that need quoting
_MAX_CONTENT_TYPE = 1000  # characters; the rest is ignored
_TEXT = re.compile(
    r"\s*(?:text/(?:plain|csv|css|markdown|javascript|tab-separated-values)|application/(?:[\w.-]+\+)?(?:json|javascript))"
    r"\s*(?:;|$)",
    re.IGNORECASE,
)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\"';\s]+)", re.IGNORECASE)


class Response:
    """A fetched page. Its text and its parsed tree are created on first use."""

    __slots__ = (
        "_base_url", "_budget", "_document", "_encoding", "_joiner", "_json", "_selector", "_text", "body",
        "elapsed", "flags", "from_cache", "headers", "request", "saved", "status", "url",
    )  # fmt: skip

    # What a browser adds, see `RenderedResponse`.
    screenshot: bytes | None = None
    pdf: bytes | None = None
    captured: Sequence[Captured] = ()
    console: Sequence[str] = ()
    page: Page | None = None
    shown_url: str = ""
    """Where the browser was in the end, if scripts or actions led elsewhere."""
    next_render: Render | None = None
    """How the page is rendered that this one leads to. None: like this one."""
    next_post: tuple[bytes, str] | None = None
    """The body and its type, if the page leads elsewhere by sending a form. Only a login sends it."""

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
        flags: Sequence[str] = (),
    ) -> None:
        if request is None:
            request = Request(url)
            forget_created(request)
            url = request.url
        self.url = url
        self.status = status
        self.headers = headers if isinstance(headers, CIMultiDictProxy) else CIMultiDictProxy(CIMultiDict(headers))
        self.body = body
        self.request = request
        self.elapsed = elapsed
        """Seconds from sending the request to receiving all headers."""
        self.from_cache = from_cache
        self.flags = flags
        """What was odd about the answer, though it could be read: an unknown encoding, truncated compression ..."""
        self.saved: list[FileEntry] | None = None
        """The entries that ``save`` returned. The engine stores them after the callback."""
        self._base_url: str | None = None
        self._joiner: LinkJoiner | None = None
        self._text: str | None = None
        self._document: turbohtml.Document | None = None
        self._encoding: str | None = None
        self._budget: AttributeBudget | None = None
        self._selector: Selector | None = None
        self._json: Selector | None = None

    async def release(self) -> None:
        """Return the page to its browser, if there is one."""

    def __repr__(self) -> str:
        return f"<Response {self.status} {self.url}>"

    @property
    def location(self) -> str | None:
        """Where a redirect leads, as the server wrote it; None if the page is not a redirect."""
        return self.headers.get("Location") if 300 <= self.status < 400 else None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def meta(self) -> Values:
        return self.request.meta

    @property
    def cb_kwargs(self) -> Values:
        return self.request.cb_kwargs

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
            self._document, self._encoding = self._parse()
        return self._document

    def _parse(self) -> tuple[turbohtml.Document, str]:
        readers = _readers()
        content_type = self.headers.get("Content-Type", "")
        charset = charset_in(content_type)
        if readers.is_xml_page(content_type, self.body):
            try:
                return readers.parse_xml_page(self.body, charset)
            except SelectorError as exc:
                log.warning("parsed as HTML: %s url=%s", exc, self.url)
        document = readers.parse(self.body, charset)
        return document, document.encoding or "utf-8"

    @property
    def _attributes(self) -> AttributeBudget:
        if self._budget is None:
            self._budget = _readers().budget(self._tree, len(self.body))
        return self._budget

    @property
    def encoding(self) -> str:
        """The encoding, detected as browsers do: byte-order mark, header, meta tag, then the content."""
        if self._document is None and self._encoding is None:
            content_type = self.headers.get("Content-Type", "")
            if _TEXT.match(content_type) and not self.body.startswith(b"<"):
                self._encoding = _readers().text_encoding(self.body, charset_in(content_type))
        return self._encoding or (self._tree and self._encoding) or "utf-8"

    @property
    def text(self) -> str:
        if self._text is None:
            import turbohtml.detect  # noqa: F401 - registers the encodings of the web, which differ from Python's

            self._text = self.body.decode("whatwg-" + self.encoding.lower(), "replace").removeprefix("\ufeff")
        return self._text

    def json(self) -> Any:
        """Decode the body as JSON. ValueError names the position of an error."""
        return jsonlib.loads(self.body)

    def save(self) -> FileEntry:
        """Store the body as a file (setting ``files.store``), and return its entry for an item: ``url``, ``path``,
        ``checksum``, ``size`` and ``content_type``. It is stored after the callback, before its items are."""
        from shoal.http.files import describe_file

        entry = describe_file(self.body, self.url, self.headers.get("Content-Type", ""))
        self.saved = [*(self.saved or ()), entry]
        return entry

    @property
    def selector(self) -> Selector:
        if self._selector is None:
            self._selector = _readers().selector(root=self.document)
        return self._selector

    def css(self, query: str) -> SelectorList:
        if self._selector is None and self._attributes.are_unknown:
            strings = _readers().select_strings(self._tree, query, self._attributes)
            if strings is not None:
                return strings
        return self.selector.css(query)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        return self.selector.xpath(query, namespaces, **variables)

    def jmespath(self, query: str, **options: object) -> SelectorList:
        """Query the body as JSON. A body that is not valid JSON contains nothing; ``json()`` says why."""
        if self._json is None:
            from shoal.selector import Selector
            from shoal.selector.documents import load_json

            self._json = Selector(root=load_json(self.body))
        return self._json.jmespath(query, **options)

    def re(self, pattern: str | re.Pattern[str]) -> list[str]:
        """Return all matches in the text: the groups if the pattern has any, or else the whole match."""
        texts: list[str] = []
        for match in re.finditer(pattern, self.text):
            texts.extend(match.groups(default="") if match.re.groups else [match[0]])
        return texts

    @property
    def base_url(self) -> str:
        """The URL that relative links refer to: the page's ``<base>``, or its own URL."""
        if self._base_url is None:
            own = self._base_url = self.shown_url or self.url
            base = self._tree.select_one("base[href]")
            if base is not None:
                with suppress(RequestError):
                    self._base_url = join_url(own, base.attr("href") or "")
        return self._base_url

    def urljoin(self, href: str) -> str:
        """Return the absolute URL of a link on this page. RequestError if it is not an http(s) URL. TooComplexError
        after too many or too long links."""
        return self.joiner.join(href)

    @property
    def joiner(self) -> LinkJoiner:
        """Joins single links of this page, with limits for all of them together."""
        if self._joiner is None:
            self._joiner = LinkJoiner(self.base_url, max_foreign=_MAX_NAMES, max_slow=_MAX_SLOW)
        return self._joiner

    def links(self, within: str = _ALL_LINKS) -> list[str]:
        """Return the URLs of the page's links, without duplicates and URLs that cannot be crawled."""
        return resolve(self.base_url, self._hrefs(within))

    def to_markdown(self) -> str:
        """Convert the page to Markdown, with absolute links."""
        from shoal.selector import parsing

        self._attributes.check()
        document, _ = self._parse()  # a copy: the links of this response stay as they are
        make_absolute(document, self.base_url)
        return parsing.to_markdown(document, len(self.body))

    def main_text(self) -> str:
        """Return the text of the page's main content, without navigation; all its text if none is found."""
        from shoal.selector import parsing

        return parsing.main_text(self.document, len(self.body))

    @property
    def feed(self) -> turbohtml.Feed | None:
        """The page as a feed (RSS, Atom or RDF): ``title``, ``link``, ``entries`` ...; None if it is not a feed."""
        from shoal.selector.metadata import read_feed

        return read_feed(self.document, len(self.body))

    @property
    def article(self) -> turbohtml.Article:
        """The main content and what the page says about it: ``title``, ``byline``, ``date``, ``text``, ``tags`` ..."""
        from shoal.selector import parsing

        return parsing.article(self.document, len(self.body))

    @property
    def structured_data(self) -> turbohtml.StructuredData:
        """The structured data: ``json_ld``, ``microdata``, ``opengraph``, ``rdfa`` and ``dublin_core``.

        Relative URLs are absolute, except in JSON-LD. SelectorError if the records are nested too deeply.
        """
        from shoal.selector.metadata import read_structured_data

        return read_structured_data(self.document, len(self.body), self.url)

    def form(self, css: str | None = None, *, id: str | None = None, name: str | None = None) -> Form:
        """Return a form of the page: by CSS query, id or name, or the first one. RequestError if there is none."""
        from shoal.http.forms import find_form

        return find_form(self, css, id, name)

    def follow(
        self, link: str | Selector, callback: Callback | None = None, **options: Unpack[RequestOptions]
    ) -> Request:
        """Return a request for a link: a URL, relative or absolute, or a selected element or attribute."""
        href = href_of(link)
        if href is None:
            raise RequestError(f"{link!r:.80} has no href to follow")
        return Request(self.urljoin(href), callback=callback, **options)

    def follow_all(
        self,
        links: str | Iterable[str | Selector] = _ALL_LINKS,
        callback: Callback | None = None,
        *,
        allow: Patterns = (),
        deny: Patterns = (),
        restrict_css: str | None = None,
        errback: Callback | None = None,
        **options: Unpack[LinkOptions],
    ) -> LinkBatch:
        """Follow many links with the same options. ``links`` is a CSS query, or URLs, elements or attributes.

        ``allow`` and ``deny`` are regular expressions, one or several, that are searched in the absolute URL: a link
        must match one of ``allow``, if there are any, and none of ``deny``. ``restrict_css`` takes only the links
        inside the elements that this query finds. The result is one object for all links. Yield it as it is.
        """
        if options:
            _refuse_scrapy_arguments(options)
        if isinstance(links, str):
            hrefs = self._hrefs(links if restrict_css is None else _inside(restrict_css, links))
        elif restrict_css is not None:
            raise RequestError("restrict_css needs links as a CSS query")
        else:
            hrefs = [href for link in links if (href := href_of(link)) is not None]
        if allow or deny:
            hrefs = LinkFilter(allow, deny).of(resolve(self.base_url, hrefs))
        name = callback if callback is None or isinstance(callback, str) else callback_name(callback)
        if errback is not None and not isinstance(errback, str):
            errback = callback_name(errback)
        return LinkBatch(base=self.base_url, hrefs=hrefs, callback=name, errback=errback, **options)

    def _hrefs(self, query: str) -> list[str]:
        if "::" in query:
            return _up_to_limit(href_of(result) for result in self.css(query))
        try:
            elements = self._tree.select(query)
        except ValueError as exc:
            raise SelectorError(f"bad CSS query {query!r}: {exc}") from exc
        if query != _ALL_LINKS:
            from shoal.selector.selectors import counted

            counted(query, elements)
        hrefs = self._attributes.hrefs(elements, "a/@href" if query == _ALL_LINKS else "")
        return hrefs if len(hrefs) == len(elements) else _up_to_limit(map(_first_href, elements))


class _Readers(NamedTuple):
    """What reads a page."""

    is_xml_page: Callable[[str, bytes], bool]
    parse_xml_page: Callable[[bytes, str | None], tuple[turbohtml.Document, str]]
    parse: Callable[[bytes, str | None], turbohtml.Document]
    text_encoding: Callable[[bytes, str | None], str]
    budget: type[AttributeBudget]
    selector: type[Selector]
    select_strings: Callable[[turbohtml.Document, str, AttributeBudget], SelectorList | None]


@cache
def _readers() -> _Readers:
    """Imported with the first page, not with this module. An import statement costs time even the second time."""
    from shoal.selector import Selector
    from shoal.selector.documents import is_xml_page, parse_xml_page
    from shoal.selector.parsing import AttributeBudget, parse, text_encoding
    from shoal.selector.selectors import select_strings

    return _Readers(is_xml_page, parse_xml_page, parse, text_encoding, AttributeBudget, Selector, select_strings)


def _refuse_scrapy_arguments(options: Mapping[str, object]) -> None:
    for name in options.keys() & {"css", "xpath"}:
        query = f"{options[name]!r}" if name == "css" else f"response.xpath({options[name]!r})"
        raise RequestError(f"follow_all has no argument {name!r}: write follow_all({query}, ...)")


def _inside(region: str, links: str) -> str:
    if "::" in region + links:
        raise RequestError(f"restrict_css needs queries for elements, without ::, not {region!r} and {links!r}")
    return f":is({region}) :is({links})"


@lru_cache(maxsize=256)
def charset_in(content_type: str) -> str | None:
    match = _CHARSET.search(content_type[:_MAX_CONTENT_TYPE])
    # ASCII is a subset of every other encoding. A page that wrongly claims to be ASCII needs detection.
    return match[1] if match and match[1].lower() not in ("ascii", "us-ascii") else None


def _up_to_limit(links: Iterable[str | None]) -> list[str]:
    """Return the links up to a total length: nested elements around one link all yield that link."""
    hrefs: list[str] = []
    room = _MAX_CHARACTERS
    for href in links:
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


# Choose links by regular expression, and make the links of a document absolute.

Patterns: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]

_MAX_LINKS = 50_000
_MAX_LINK = 32 << 20  # of all links of one document that become absolute


class LinkFilter:
    """Regular expressions that choose URLs: one of ``allow``, if there are any, and none of ``deny``."""

    def __init__(self, allow: Patterns = (), deny: Patterns = ()) -> None:
        """RequestError for an invalid expression."""
        self._allow = _compile(allow)
        self._deny = _compile(deny)

    def accepts(self, url: str) -> bool:
        return (not self._allow or any(pattern.search(url) for pattern in self._allow)) and not any(
            pattern.search(url) for pattern in self._deny
        )

    def of(self, urls: Iterable[str]) -> list[str]:
        return [url for url in urls if self.accepts(url)]


def _compile(patterns: Patterns) -> list[re.Pattern[str]]:
    if isinstance(patterns, str | re.Pattern):
        patterns = [patterns]
    try:
        return [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as exc:
        raise RequestError(f"invalid regular expression in {patterns!r:.200}: {exc}") from exc


def make_absolute(document: turbohtml.Document, base: str) -> None:
    """Make the links of a document absolute, in place. Those beyond a limit, and invalid ones, stay as they are."""
    left, room = _MAX_LINKS, _MAX_LINK
    joiner = LinkJoiner(base)

    def absolute(href: str) -> str | None:
        nonlocal left, room
        left -= 1
        room -= len(base) + len(href)
        if left < 0 or room < 0:
            return None
        path, mark, fragment = href.partition("#")
        try:
            return joiner.join(path) + mark + fragment
        except (RequestError, TooComplexError):
            return None

    document.rewrite_links(absolute)


# RenderedResponse: a page as a browser shows it.


class RenderedResponse(Response):
    """A page as a browser shows it: ``body`` is the HTML after its scripts have run."""

    __slots__ = (
        "captured", "console", "next_post", "next_render", "on_release", "page", "pdf", "screenshot", "shown_url",
    )  # fmt: skip

    def rendered(
        self,
        *,
        screenshot: bytes | None = None,
        pdf: bytes | None = None,
        captured: list[Captured] | None = None,
        console: list[str] | None = None,
        shown_url: str = "",
    ) -> RenderedResponse:
        """Set what the browser returned besides the page."""
        self.screenshot = screenshot
        self.pdf = pdf
        self.captured = captured or []
        self.console = console or []
        self.shown_url = shown_url
        self.next_render: Render | None = None
        self.next_post: tuple[bytes, str] | None = None
        self.page: Page | None = None
        self.on_release: Callable[[], Awaitable[None]] | None = None
        return self

    async def release(self) -> None:
        """Return the page to its browser. The engine calls it after the callback."""
        release, self.on_release, self.page = self.on_release, None, None
        if release is not None:
            await release()
