"""``LinkExtractor`` and ``Link``: the links of a page, chosen by their URL, their place and their text.

Most links occur on many pages of a site. The decision about a link is cached by its href and the relevant part of the
base URL, so most links cost one dictionary lookup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote, urljoin

from turbohtml import Document, Element

from shoal.errors import RequestError, SelectorError
from shoal.selector.documents import attributes_of
from shoal.urls.normalize import LinkJoiner

if TYPE_CHECKING:
    from shoal.scrapy.http import TextResponse
    from shoal.selector import SelectorList

Regexes: TypeAlias = str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | None
Texts: TypeAlias = str | Iterable[str] | None

_EXTENSIONS = """
7z 7zip bz2 rar tar tar.gz xz zip
mng pct bmp gif jpg jpeg png pst psp tif tiff ai drw dxf eps ps svg cdr ico webp
mp3 wma ogg wav ra aac mid au aiff
3gp asf asx avi mov mp4 mpg qt rm swf wmv m4a m4v flv webm
xls xlsm xlsx xltm xltx potm potx ppt pptm pptx pps doc docb docm docx dotm dotx odt ods odg odp
css pdf exe bin rss dmg iso apk jar sh rb js hta bat cpl msi msp py
"""
IGNORED_EXTENSIONS = _EXTENSIONS.split()
"""File endings that are not followed, unless ``deny_extensions`` is set."""

_SPACE = " \t\n\x0c\r"
_DEPENDENT = _SPACE + "?#"  # with these, or empty, an href depends on the whole URL of its page
_UTF_8 = ("utf-8", "utf8", "ascii")
_MAX_REMEMBERED = 200_000  # decisions of one extractor, up to the end of a page
_REMEMBERED_LENGTH = 200  # characters: a longer link counts several times
_UNKNOWN = ""  # no decision was made about this href
_SAFE = "%/:=&?~#+!$,;'@()*[]"  # in a query


class Link:
    """A link of a page. ``text`` is all text of its element; it is read from the page on first use."""

    __slots__ = ("_element", "_nofollow", "_text", "fragment", "url")

    def __init__(self, url: str, text: str = "", fragment: str = "", nofollow: bool = False) -> None:
        if not isinstance(url, str):
            raise TypeError(f"the URL of a Link must be a str, not {type(url).__name__}")
        self.url = url
        self.fragment = fragment
        self._text: str | None = text
        self._nofollow: bool | None = nofollow
        self._element: Element | None = None

    @classmethod
    def of(cls, element: Element, url: str) -> Link:
        """Make the link of an element. Its text and ``rel`` are read on first use."""
        link = cls.__new__(cls)
        link.url = url
        link.fragment = ""
        link._element = element
        link._text = link._nofollow = None  # not read
        return link

    @property
    def text(self) -> str:
        if self._text is None:
            self._text = self._element.text if self._element is not None else ""
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text = text

    @property
    def nofollow(self) -> bool:
        if self._nofollow is None:
            rel = (self._element.attr("rel") if self._element is not None else None) or ""
            self._nofollow = "nofollow" in rel.lower().replace(",", " ").split()
        return self._nofollow

    @nofollow.setter
    def nofollow(self, nofollow: bool) -> None:
        self._nofollow = nofollow

    def _values(self) -> tuple[str, str, str, bool]:
        return self.url, self.text, self.fragment, self.nofollow

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, Link) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        url, text, fragment, nofollow = self._values()
        return f"Link(url={url!r}, text={text!r}, fragment={fragment!r}, nofollow={nofollow!r})"

    def __reduce__(self) -> tuple[type[Link], tuple[str, str, str, bool]]:
        return Link, self._values()


class LinkExtractor:
    """Finds the links of a response: those that the patterns, domains and regions allow.

    Its arguments are those of Scrapy, also by position. Use one extractor for many pages: it remembers what it decided
    about each URL.
    """

    def __init__(
        self,
        allow: Regexes = (),
        deny: Regexes = (),
        allow_domains: Texts = (),
        deny_domains: Texts = (),
        restrict_xpaths: Texts = (),
        tags: Texts = ("a", "area"),
        attrs: Texts = ("href",),
        canonicalize: bool = False,
        unique: bool = True,
        process_value: Callable[[str], str | None] | None = None,
        deny_extensions: Texts = None,
        restrict_css: Texts = (),
        strip: bool = True,
        restrict_text: Regexes = None,
        deny_tags: Texts = (),
        deny_attrs: Texts = (),
    ) -> None:
        self.allow_res = _patterns(allow)
        self.deny_res = _patterns(deny)
        self.restrict_text = _patterns(restrict_text)
        self.allow_domains = set(_several(allow_domains))
        self.deny_domains = set(_several(deny_domains))
        self.restrict_xpaths = tuple(_several(restrict_xpaths))
        self.restrict_css = tuple(_several(restrict_css))
        extensions = IGNORED_EXTENSIONS if deny_extensions is None else _several(deny_extensions)
        self.deny_extensions = {"." + extension for extension in extensions}
        self.canonicalize = canonicalize
        self.unique = unique
        self.process_value = process_value
        self.strip = strip
        self._source = _Source(tags, attrs, deny_tags, deny_attrs)
        self._ends = tuple(self.deny_extensions)
        self._decided: dict[str, dict[str, str | None]] = {}
        self._remembered = 0

    def extract_links(self, response: TextResponse) -> list[Link]:
        """Return the links in the order of the page, without duplicates unless ``unique`` is False."""
        links: list[Link] = []
        seen: set[str] = set()
        resolve = self._resolver(response)
        for region in self._regions(response):
            for element, href in self._source.values(region):
                url = resolve(href)
                if url is None or (self.unique and url in seen):
                    continue
                link = Link.of(element, url)
                if self.restrict_text and not any(pattern.search(link.text) for pattern in self.restrict_text):
                    continue
                seen.add(url)
                links.append(link)
        return links

    def matches(self, url: str) -> bool:
        """Whether the domains and patterns allow a URL. Regions, extensions and texts are not checked."""
        return self._matches_domains(url) and self._matches_patterns(url)

    def _regions(self, response: TextResponse) -> Iterator[Document | Element]:
        if not self.restrict_xpaths and not self.restrict_css:
            yield response.page.document
            return
        queries: list[tuple[Callable[[str], SelectorList], str]] = [
            (response.xpath, query) for query in self.restrict_xpaths
        ]
        queries += [(response.css, query) for query in self.restrict_css]
        for search, query in queries:
            for selector in search(query):
                if not isinstance(selector.root, Document | Element):
                    raise SelectorError(
                        f"a region of a LinkExtractor must be an element, but {query!r} finds {selector}"
                    )
                yield selector.root

    def _resolver(self, response: TextResponse) -> Callable[[str], str | None]:
        """Return a function that turns an href of this page into a URL to follow, or into None."""
        base, joiner = response.page.base_url, response.page.joiner
        encoding = response.encoding.lower()
        if self.process_value is not None:
            own = LinkJoiner(response.page.url)
            return lambda href: self._decide(self._processed(joiner, own, base, href, encoding))
        if not self.strip or encoding not in _UTF_8:
            return lambda href: self._decide(self._absolute(joiner, href, encoding))
        if self._remembered + len(self._decided) >= _MAX_REMEMBERED:
            self._decided.clear()
            self._remembered = 0
        origin = self._decided.setdefault(base[: base.index("/", 8)], {})
        folder = self._decided.setdefault(base.partition("?")[0].rpartition("/")[0] + "/", {})

        def resolve(href: str) -> str | None:
            kept = origin if href[:1] == "/" else folder
            url = kept.get(href, _UNKNOWN)
            if url == _UNKNOWN:
                url = self._decide(self._absolute(joiner, href, encoding))
                if href[:1] not in _DEPENDENT:
                    kept[href] = url
                    self._remembered += 1 + (len(href) + len(url or "")) // _REMEMBERED_LENGTH
            return url

        return resolve

    def _decide(self, url: str | None) -> str | None:
        """Return the URL if the rules allow it, or else None."""
        if url is None or not self._matches_patterns(url) or not self._matches_domains(url):
            return None
        if self._ends and url.partition("#")[0].partition("?")[0].lower().endswith(self._ends):
            return None
        if self.canonicalize:
            from w3lib.url import canonicalize_url

            return canonicalize_url(url)
        return url

    def _absolute(self, joiner: LinkJoiner, href: str, encoding: str) -> str | None:
        return _join(joiner, href.strip(_SPACE) if self.strip else href, encoding)

    def _processed(self, joiner: LinkJoiner, own: LinkJoiner, base: str, href: str, encoding: str) -> str | None:
        """Return the absolute URL of a link after ``process_value``.

        ``process_value`` receives every link, even one that is not the URL of a page: ``javascript:open('/p')``.
        """
        joiner.charge(href)
        try:
            value = self.process_value and self.process_value(urljoin(base, href.strip(_SPACE) if self.strip else href))
        except ValueError:  # urljoin refuses a few malformed hosts
            return None
        return None if value is None else _join(own, value, encoding)

    def _matches_patterns(self, url: str) -> bool:
        if self.allow_res and not any(pattern.search(url) for pattern in self.allow_res):
            return False
        return not any(pattern.search(url) for pattern in self.deny_res)

    def _matches_domains(self, url: str) -> bool:
        if not self.allow_domains and not self.deny_domains:
            return True
        host = url.split("/", 3)[2].partition("?")[0].lower() if "://" in url else ""
        return (not self.allow_domains or _is_below(host, self.allow_domains)) and not _is_below(
            host, self.deny_domains
        )


LxmlLinkExtractor = LinkExtractor
"""The name of LinkExtractor in Scrapy's module ``linkextractors.lxmlhtml``."""


class _Source:
    """The attributes of elements that hold links."""

    def __init__(self, tags: Texts, attrs: Texts, deny_tags: Texts, deny_attrs: Texts) -> None:
        self._attrs = set(_several(attrs))
        self._denied = set(_several(deny_attrs))
        tag_names, denied = list(_several(tags)), list(_several(deny_tags))
        head = "" if "*" in tag_names else f":is({', '.join(map(_escaped, tag_names))})"
        without = "".join(f":not({_escaped(name)})" for name in denied)
        self._any = "*" in self._attrs
        names = sorted(self._attrs - self._denied)
        self._only = names[0] if len(names) == 1 and not self._any else None
        with_one = "" if self._any else f":is({', '.join(f'[{_escaped(name)}]' for name in names)})"
        self._query = (head + without + with_one) or "*"
        self._nothing = not tag_names or not (self._any or names)

    def values(self, region: Document | Element) -> Iterator[tuple[Element, str]]:
        """Yield the values of the attributes at and below an element, in the order of the page."""
        if self._nothing:
            return
        elements = region.select(self._query)
        if not isinstance(region, Document) and region.matches(self._query):
            elements.insert(0, region)
        if (name := self._only) is not None:
            for element in elements:
                yield element, element.attr(name) or ""
            return
        for element in elements:
            for name, value in attributes_of(element).items():
                if (self._any or name in self._attrs) and name not in self._denied:
                    yield element, value


def _escaped(name: str) -> str:
    """Return a name as CSS writes it: ``xlink:href`` is ``xlink\\:href``."""
    return re.sub(r"([^\w-])", r"\\\1", name)


def _join(joiner: LinkJoiner, href: str, encoding: str) -> str | None:
    """Return the absolute URL of an href with its fragment; None if it is not the URL of a page."""
    address, mark, fragment = href.partition("#")
    if " " in address or (encoding not in _UTF_8 and not address.isascii()):
        path, question, query = address.partition("?")
        with suppress(LookupError, UnicodeError):  # or else it is sent as UTF-8
            address = path + question + quote(query, safe=_SAFE, encoding=encoding)
    try:
        return joiner.join(address) + mark + fragment
    except RequestError:
        return None


def _is_below(host: str, domains: set[str]) -> bool:
    return any(host == domain or host.endswith("." + domain) for domain in map(str.lower, domains))


def _several(value: Texts) -> Iterable[str]:
    return (value,) if isinstance(value, str) else () if value is None else value


def _patterns(value: Regexes) -> list[re.Pattern[str]]:
    several = (value,) if isinstance(value, str | re.Pattern) else () if value is None else value
    return [re.compile(pattern) for pattern in several]
