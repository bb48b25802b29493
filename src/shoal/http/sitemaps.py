"""Read sitemaps: XML sitemaps and indexes, text files and feeds, compressed or not, in any encoding.

The reader is a pure function of a body. It decompresses, decodes and scans one portion after the other. Besides the
body, it needs memory for one portion and one entry only, whatever the file contains.
"""

from __future__ import annotations

import codecs
import re
import zlib
from calendar import monthrange
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime
from html.entities import html5
from itertools import chain
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.errors import SitemapError
from shoal.http.decompress import gunzip
from shoal.selector.documents import encoding_of

# One URL of a sitemap, with its date and other values.

_W3C = re.compile(
    r"(\d{4})(?:-(\d\d?)(?:-(\d\d?)(?:[T ](\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?\s*(Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.IGNORECASE,
)
_MAX_DATE = 100  # characters


class Alternate(Struct, frozen=True):
    """The same page in another language."""

    hreflang: str
    url: str


class SitemapEntry(Struct, frozen=True):
    """A URL of a sitemap, or another sitemap of an index."""

    loc: str
    """The URL as the file has it. It may be relative or invalid."""
    is_sitemap: bool = False
    """Whether an index names it: it is another sitemap, not a page."""
    fields: dict[str, str] = {}
    """The texts of the other elements, such as ``lastmod``, ``changefreq`` and ``priority``. In a feed, ``lastmod`` is
    the date of the entry."""
    alternates: tuple[Alternate, ...] = ()

    @property
    def lastmod(self) -> datetime | None:
        """When the page was last changed, with a time zone. A date without a time means the start of that day. None if
        the sitemap has no date, or an invalid one."""
        period = read_period(self.fields.get("lastmod", ""))
        return None if period is None else period[0]

    def may_be_newer_than(self, since: datetime) -> bool:
        """Whether the page may have changed at this time or later. An entry without a date may have."""
        period = read_period(self.fields.get("lastmod", ""))
        return period is None or period[1] > since or period[0] >= since


def read_period(text: str) -> tuple[datetime, datetime] | None:
    """The first moment of a date, and the first moment after it: ``2026-05`` is a month, ``2026-05-01`` a day.

    Dates are those of sitemaps (ISO 8601) and of feeds (RFC 822). Without a time zone, they are in UTC. None for
    anything else."""
    text = text.strip()[:_MAX_DATE]
    try:
        if match := _W3C.fullmatch(text):
            return _w3c_period(match)
        moment = parsedate_to_datetime(text)
        moment = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
        return moment, moment + timedelta(seconds=1)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def _w3c_period(match: re.Match[str]) -> tuple[datetime, datetime]:
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    first = datetime(int(year), int(month or 1), int(day or 1), tzinfo=UTC)
    if month is None:
        return first, first + timedelta(days=366 if monthrange(first.year, 2)[1] == 29 else 365)
    if day is None:
        return first, first + timedelta(days=monthrange(first.year, first.month)[1])
    if hour is None:
        return first, first + timedelta(days=1)
    moment = first + timedelta(
        hours=int(hour),
        minutes=int(minute),
        seconds=int(second or 0),
        microseconds=int((fraction or "")[:6].ljust(6, "0")),
    )
    if zone and zone.upper() != "Z":
        digits = zone[1:].replace(":", "")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        moment += offset if zone[0] == "-" else -offset
    return moment, moment + (timedelta(seconds=1) if second else timedelta(minutes=1))


def read_since(value: datetime | date | str) -> datetime:
    """The moment that a user names: a datetime, a date, or text as in a sitemap. ValueError if it is not a date."""
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    period = read_period(value) if isinstance(value, str) else None
    if period is None:
        raise ValueError(f"{value!r:.80} is not a date: write it as 2026-05-01 or 2026-05-01T12:00:00Z")
    return period[0]


# A scanner for the XML of sitemaps and feeds: portion by portion, in bounded memory and linear time.
#
# It is not an XML parser, on purpose. Many sitemaps are not well-formed: an ampersand is not escaped, an entity is
# unknown, the file is cut off. Search engines read them all the same, and so does this scanner. It replaces
# references to single characters only, never the entities that a file defines: a small file cannot grow into a
# large text.

_ATTRIBUTE = re.compile(r"""(?<![^\s=<>"'/])([^\s=<>"'/]{1,200}+)\s*+=\s*+(?:"([^"<]*+)"|'([^'<]*+)')""")
_CLOSED_QUOTES = re.compile(r"""(?:[^"']++|"[^"]*+"|'[^']*+')*+""")
_REFERENCE = re.compile(r"&(?:#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6})|([A-Za-z][A-Za-z0-9]{1,31}));")
_TAG = re.compile("<[A-Za-z_:/!?]")
_COMMENT, _END_OF_COMMENT = "<!--", "-->"
_CDATA, _END_OF_CDATA = "<![CDATA[", "]]>"
_MAX_PIECE = 1 << 17
"""The longest tag, with the text that follows it, in characters. A longer one is handled before it is complete."""
_MAX_MARKS = 20
"""How many ``>`` the attribute values of a tag may contain."""


class Scanner:
    """Splits text that arrives in portions into tags and texts. Names are without their namespace, in lower case."""

    def __init__(self, handler: _Entries, max_tags: int) -> None:
        """SitemapError after ``max_tags`` tags, complete or not."""
        self._handler = handler
        self._max_tags = self._left = max_tags
        self._carry = ""
        """The end of the last portion, if the next one may continue it."""
        self._end_mark = ""
        """The text that ends the open comment or CDATA section. Empty outside of both."""

    def feed(self, text: str) -> None:
        buffer = self._carry + text
        self._carry = ""
        position = 0
        while 0 <= position < len(buffer):
            if self._end_mark:
                position = self._section(buffer, position)
            elif buffer.startswith(_COMMENT, position):
                self._end_mark = _END_OF_COMMENT
                position += len(_COMMENT)
            elif buffer.startswith(_CDATA, position):
                self._end_mark = _END_OF_CDATA
                position += len(_CDATA)
            else:
                position = self._piece(buffer, position)

    def close(self) -> None:
        """Report the end of the file."""
        carry, self._carry = self._carry, ""
        if not self._end_mark:
            self._tag(carry[1:]) if _TAG.match(carry) else self._handler.text(unescape(carry))

    def _section(self, buffer: str, position: int) -> int:
        """Read a comment or a CDATA section up to its end. Return the position there, or -1."""
        mark = self._end_mark
        end = buffer.find(mark, position)
        if end < 0:
            self._carry = buffer[max(position, len(buffer) - len(mark) + 1) :]
        else:
            self._end_mark = ""
        if mark == _END_OF_CDATA:
            self._handler.text(buffer[position : len(buffer) - len(self._carry) if end < 0 else end])
        return end if end < 0 else end + len(mark)

    def _piece(self, buffer: str, position: int) -> int:
        """Read a tag with its text, or a text, up to the next tag. Return the position there, or -1."""
        next_tag = _TAG.search(buffer, position + 1)
        if next_tag is not None:
            end = next_tag.start()
        elif len(buffer) - position <= _MAX_PIECE:
            self._carry = buffer[position:]
            return -1
        else:
            end = len(buffer)
        if _TAG.match(buffer, position):
            self._tag(buffer[position + 1 : end])
        else:
            self._handler.text(unescape(buffer[position:end]))
        return end

    def _tag(self, piece: str) -> None:
        """A tag without its ``<``, with the text after it. Declarations and instructions are ignored."""
        self._left -= 1
        if self._left < 0:
            raise SitemapError(f"the sitemap has more than {self._max_tags} tags")
        inside, mark, text = piece.partition(">")
        if not mark:
            return
        if inside[:1] not in ("!", "?"):
            if '"' in inside or "'" in inside:
                inside, text = _with_marks(inside, text)
            words = inside.strip("/").split(None, 1)
            if words:
                name = words[0].rpartition(":")[2].lower()
                if inside[0] != "/":
                    self._handler.start(name, words[1] if len(words) > 1 else "")
                if inside[0] == "/" or inside[-1] == "/":
                    self._handler.end(name)
        if text:
            self._handler.text(unescape(text))


def _with_marks(inside: str, text: str) -> tuple[str, str]:
    """A tag whose attributes contain ``>``: everything up to the one that ends it, and the text after that."""
    quote = _open_quote(inside)
    for _ in range(_MAX_MARKS):
        if not quote:
            break
        more, mark, rest = text.partition(">")
        if not mark:
            break
        quote = _open_quote(more, quote)
        inside, text = f"{inside}>{more}", rest
    return inside, text


def _open_quote(text: str, quote: str = "") -> str:
    """The quote that is open after this text, or an empty string. ``quote`` is the one that is open before it."""
    start = text.find(quote) + 1 if quote else 0
    if quote and not start:
        return quote
    closed = _CLOSED_QUOTES.match(text, start)
    end = closed.end() if closed else start
    return text[end : end + 1]


def read_attributes(text: str) -> dict[str, str]:
    """The attributes of a tag. Names are without their namespace, in lower case."""
    return {
        match[1].rpartition(":")[2].lower(): unescape(match[2] if match[2] is not None else match[3])
        for match in _ATTRIBUTE.finditer(text)
    }


def unescape(text: str) -> str:
    """Replace character references: those of XML, numeric ones, and those of HTML, which many files use. Each must end
    with a semicolon, because in ``?a=1&copy=2`` the ampersand was not escaped."""
    return _REFERENCE.sub(_character, text) if "&" in text else text


def _character(reference: re.Match[str]) -> str:
    decimal, hexadecimal, name = reference.groups()
    if name is not None:
        return html5.get(f"{name};", reference[0])
    code = int(decimal) if decimal is not None else int(hexadecimal, 16)
    is_character = 0 < code < 0xD800 or 0xDFFF < code <= 0x10FFFF
    return chr(code) if is_character else reference[0]


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
        sample, has_url = "", False
        for line in _lines(text):
            sample = sample or line
            if _URL_LINE.match(line) and len(line) <= _MAX_TEXT:
                has_url = True
                yield SitemapEntry(line)
            elif line:
                self.skipped += 1
        if not has_url:
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
    matches = (_SITEMAP_LINE.match(line) for line in text[:_MAX_ROBOTS].splitlines())
    return list(dict.fromkeys(match[1] for match in matches if match))
