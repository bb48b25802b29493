"""Read sitemaps: XML sitemaps and indexes, text files and feeds, compressed or not, in any encoding.

The reader is a pure function of a body. It decompresses, decodes and scans one portion after the other. Besides the
body, it needs memory for one portion and one entry only, whatever the file contains.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.errors import SitemapError
from shoal.fetch.decompress import gunzip
from shoal.selector.xml_pages import encoding_of
from shoal.sitemaps.entry import Alternate, SitemapEntry
from shoal.sitemaps.markup import Scanner, read_attributes

Format: TypeAlias = Literal["urlset", "sitemapindex", "text", "rss", "atom"]

_FORMATS: dict[str, Format] = {
    "urlset": "urlset",
    "url": "urlset",
    "sitemapindex": "sitemapindex",
    "sitemap": "sitemapindex",
    "rss": "rss",
    "rdf": "rss",
    "feed": "atom",
}
"""The format, by the first element of the file."""
_ENTRIES = {"urlset": ("url", "sitemap"), "sitemapindex": ("sitemap", "url"), "rss": ("item",), "atom": ("entry",)}
"""The elements that are entries. Some files mix URLs and sitemaps."""
_DATES = ("updated", "pubdate", "date", "published", "modified")
"""The elements of a feed that hold the date of an entry. The first one counts."""
_GZIP = b"\x1f\x8b"
_PORTION = 1 << 16  # bytes
_MAX_TEXT = 65_536  # characters of a URL
_MAX_FIELD = 1000  # characters of another element
_MAX_FIELDS = 50
_MAX_ALTERNATES = 1000  # of one entry
_MAX_ALTERNATE_TEXT = 1 << 18  # characters of the alternates of one entry
_SAMPLE = 40  # characters that an error shows
_ANY_RATIO = 16 << 20  # bytes
_BEGIN = 4096  # characters in which the first element must begin
_MARKUP = re.compile(r"^<|<(?:\?xml|urlset|sitemapindex|rss|feed)[\s>]")
_URL_LINE = re.compile("https?://[^\\s/]", re.IGNORECASE)
_SITEMAP_LINE = re.compile(r"[ \t]*sitemap[ \t]*:[ \t]*(\S+)", re.IGNORECASE)
_MAX_ROBOTS = 500 * 1024  # characters; the rest is ignored, as that of other rules
_CODECS = {
    "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs", "windows_874": "cp874", "macintosh": "mac_roman",
    "x_mac_cyrillic": "mac_cyrillic", "iso_8859_8_i": "iso8859_8", "x_user_defined": "latin_1",
    "utf_16le": "utf_16_le", "utf_16be": "utf_16_be",
}  # fmt: skip
"""Python's names for encodings that have another name on the web."""


class SitemapLimits(Struct, frozen=True, kw_only=True):
    """The limits for one file. The standard allows 50 MB and 50,000 URLs."""

    max_bytes: int = 100 << 20
    """After decompression."""
    max_ratio: int = 200
    """How many times larger than the body the content may be after decompression, if it has more than 16 MB."""
    max_tags: int = 2_000_000
    """Tags are the main cost: about a microsecond each."""


class SitemapReader:
    """Reads the entries of a file. Iterate over it once.

    SitemapError if the file is not a sitemap, is damaged, or exceeds a limit. Entries before the damage come first.
    """

    def __init__(self, body: bytes, charset: str | None = None, limits: SitemapLimits = SitemapLimits()) -> None:
        """``charset`` is the encoding from a header, if there is one."""
        self._body = body
        self._charset = charset
        self._limits = limits
        self.format: Format | None = None
        """Known after the first entry."""
        self.skipped = 0
        """Entries without a usable URL: it is missing or too long, or a line of a text file is not a URL."""

    def __iter__(self) -> Iterator[SitemapEntry]:
        text = self._decoded()
        begin = ""
        for portion in text:
            begin = (begin + portion).lstrip("\ufeff \t\r\n")
            if begin:
                break
        else:
            raise SitemapError("it is not a sitemap: it is empty")
        read = self._read_markup if _MARKUP.search(begin[:_BEGIN]) else self._read_lines
        yield from read(chain([begin], text))

    # -- bytes

    def _decoded(self) -> Iterator[str]:
        """The text of the file, in portions."""
        decoder: codecs.IncrementalDecoder | None = None
        for data in self._uncompressed():
            if decoder is None:
                decoder = _decoder(encoding_of(data, self._charset))
            yield decoder.decode(data)
        if decoder is not None:
            yield decoder.decode(b"", True)

    def _uncompressed(self) -> Iterator[bytes]:
        """The bytes of the file, in portions. Some servers compress a compressed file again."""
        body = self._body
        if not body.startswith(_GZIP):
            self._check_size(len(body))
            for begin in range(0, len(body), _PORTION):
                yield body[begin : begin + _PORTION]
            return
        inner = self._inflated(body)
        first = next(inner, b"")
        if first.startswith(_GZIP):
            inner = self._inflated(b"".join([first, *inner]))
            first = next(inner, b"")
        yield first
        yield from inner

    def _inflated(self, body: bytes) -> Iterator[bytes]:
        size = 0
        try:
            for chunk in gunzip(body):
                size += len(chunk)
                self._check_size(size)
                if chunk:
                    yield chunk
        except zlib.error as exc:
            raise SitemapError(f"the sitemap is not valid gzip: {exc}") from exc

    def _check_size(self, size: int) -> None:
        limit = min(self._limits.max_bytes, max(_ANY_RATIO, self._limits.max_ratio * len(self._body)))
        if size > limit:
            raise SitemapError(f"the sitemap is larger than {limit} bytes after decompression")

    # -- formats

    def _read_lines(self, text: Iterator[str]) -> Iterator[SitemapEntry]:
        """A text file with one URL per line."""
        self.format = "text"
        sample, found = "", False
        for line in _lines(text):
            sample = sample or line
            if _URL_LINE.match(line) and len(line) <= _MAX_TEXT:
                found = True
                yield SitemapEntry(line)
            elif line:
                self.skipped += 1
        if not found:
            raise SitemapError(f"it is not a sitemap: it begins with {sample[:_SAMPLE]!r}")

    def _read_markup(self, text: Iterator[str]) -> Iterator[SitemapEntry]:
        """A sitemap, an index or a feed."""
        entries = _Entries()
        scanner = Scanner(entries, self._limits.max_tags)
        try:
            for portion in text:
                scanner.feed(portion)
                yield from self._taken(entries)
            scanner.close()
        except SitemapError:
            yield from self._taken(entries)
            raise
        entries.close()
        yield from self._taken(entries)
        if entries.format is None:
            raise SitemapError("it is not a sitemap: it has no elements")

    def _taken(self, entries: _Entries) -> list[SitemapEntry]:
        self.format, self.skipped = entries.format, entries.skipped
        ready, entries.ready = entries.ready, []
        return ready


class _Entries:
    """Makes entries of the elements of a file. It keeps one entry at a time."""

    def __init__(self) -> None:
        self.format: Format | None = None
        self.ready: list[SitemapEntry] = []
        self.skipped = 0
        self._names: tuple[str, ...] = ()
        """The elements that are entries in this format."""
        self._entry = ""
        """The element of the entry that is open; empty if none is."""
        self._fields: dict[str, str] = {}
        self._alternates: list[Alternate] = []
        self._alternate_room = _MAX_ALTERNATE_TEXT
        self._field = ""
        """The element in the entry that is open; empty if none is."""
        self._depth = 0
        """How many elements in it are open. Their texts are not its own: the URL of an image is not that of a page."""
        self._parts: list[str] = []
        self._room = 0

    def start(self, name: str, attributes: str) -> None:
        if self.format is None:
            self.format = _FORMATS.get(name)
            if self.format is None:
                raise SitemapError(f"it is not a sitemap: its first element is <{name[:_SAMPLE]}>")
            self._names = _ENTRIES[self.format]
        if name in self._names:
            self.finish()
            self._entry = name
        elif self._entry:
            if self._field:
                self._depth += 1
            else:
                self._field, self._depth, self._parts = name, 0, []
                self._room = _MAX_TEXT if name in ("loc", "link", "guid") else _MAX_FIELD
                if name == "link" and attributes:
                    self._link(read_attributes(attributes))

    def end(self, name: str) -> None:
        if name == self._entry:
            self.finish()
        elif name == self._field:
            self._close_field()
        elif self._depth:
            self._depth -= 1

    def text(self, text: str) -> None:
        if self._field and not self._depth and self._room >= 0:
            self._room -= len(text)
            self._parts.append(text if self._room >= 0 else "")

    def _close_field(self) -> None:
        text = "".join(self._parts).strip()
        if text and self._room >= 0 and len(self._fields) < _MAX_FIELDS:
            self._fields.setdefault(self._field, text)
        self._field = ""

    def _link(self, attributes: dict[str, str]) -> None:
        """In a sitemap: the page in another language. In a feed: the page of the entry."""
        href = attributes.get("href", "").strip()
        if not href or attributes.get("rel", "alternate").lower() != "alternate" or len(href) > _MAX_TEXT:
            return
        if self._entry != "url":
            self._fields.setdefault("link", href)
        elif len(self._alternates) < _MAX_ALTERNATES and self._alternate_room >= len(href):
            self._alternate_room -= len(href)
            self._alternates.append(Alternate(attributes.get("hreflang", "")[:_SAMPLE], href))

    def close(self) -> None:
        """Report the end of the file. If it was cut off, its last text may be incomplete and is dropped."""
        self._field = ""
        self.finish()

    def finish(self) -> None:
        """The open entry ends, also if its end tag is missing."""
        if not self._entry:
            return
        if self._field:
            self._close_field()
        fields = self._fields
        if self.format in ("rss", "atom"):
            loc = fields.pop("link", "") or fields.get("guid", "")
            date = next((fields[name] for name in _DATES if name in fields), None)
            if date is not None:
                fields["lastmod"] = date
        else:
            loc = fields.pop("loc", "")
        if loc:
            self.ready.append(SitemapEntry(loc, self._entry == "sitemap", fields, tuple(self._alternates)))
        else:
            self.skipped += 1
        self._entry = ""
        self._fields, self._alternates, self._alternate_room = {}, [], _MAX_ALTERNATE_TEXT


def _lines(text: Iterable[str]) -> Iterator[str]:
    """The lines of a text, without spaces around them. A line that is far too long is cut."""
    carry = ""
    for portion in text:
        *lines, carry = (carry + portion.replace("\r", "\n")).split("\n")
        yield from map(str.strip, lines)
        carry = carry[: 2 * _MAX_TEXT]
    yield carry.strip()


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    """A decoder for an encoding of the web. Bytes of UTF-8 that are invalid are kept: in a URL, they become ``%E9``."""
    name = codecs.lookup(f"whatwg-{encoding}").name.removeprefix("whatwg_")
    try:
        make = codecs.getincrementaldecoder(_CODECS.get(name, name))
    except LookupError:
        name, make = "utf_8", codecs.getincrementaldecoder("utf_8")
    return make("surrogateescape" if name == "utf_8" else "replace")


def sitemaps_in_robots(text: str) -> list[str]:
    """The sitemaps that a robots.txt names, without duplicates."""
    found = (_SITEMAP_LINE.match(line) for line in text[:_MAX_ROBOTS].splitlines())
    return list(dict.fromkeys(match[1] for match in found if match))
