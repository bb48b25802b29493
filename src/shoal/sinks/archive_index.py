"""The index of a WARC file: which pages it has, where each is, and what a later crawl needs to know of it.

Beside ``X.warc.gz`` are ``X.cdxj``, one line for each page in the order of its SURT, as other tools read it, and
``X.keys``, which finds these lines by the fingerprint of a request or by the digest of a payload. Both can be searched
on disk, and both can be made again from the WARC file: the result is equal, byte for byte.
"""

from __future__ import annotations

import errno
import heapq
import mmap
import os
import re
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import IO, BinaryIO, NamedTuple, TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS, RequestError, ShoalError
from shoal.sinks.storage import replace_file
from shoal.sinks.warc_records import (
    Member,
    PagePart,
    PageRecords,
    Record,
    parse_head,
    parse_record,
    plain_id,
    request_of,
    run_of,
    scan,
)
from shoal.urls.normalize import join_url, url_fingerprint

ENDING = ".warc.gz"
INDEX = ".cdxj"
KEYS = ".keys"
ARCHIVE_MODE = 0o600  # requests have cookies and passwords
REVISIT = "warc/revisit"
"""What an index has as the type of a page whose payload is in another record."""

_LONGEST_VALUE = 1000
"""Longer validators and lists of headers are not kept."""
_BUFFER = 4 << 20
"""Bytes of lines that are kept in memory before they are sorted into a temporary file."""


class ArchiveError(ShoalError):
    """A file of an archive is missing or damaged, or has another content than its index says."""


# -- the key of a URL


_URL = re.compile(r"(https?)://(?:[^/?#@]*@)?([^/?#@:]*|\[[^]/]*\])(:\d+)?", re.ASCII | re.IGNORECASE)
_WWW = re.compile(r"www\d*\.")
_PLAIN = re.compile(r"[!$&-;=?-Z_a-z|~\[\]]*", re.ASCII)
_PATH_SESSIONS = [
    re.compile(r"^(.*/)(\((?:[a-z]\([0-9a-z]{24}\))+\)/)([^?]+\.aspx.*)$", re.IGNORECASE | re.ASCII),
    re.compile(r"^(.*/)(\([0-9a-z]{24}\)/)([^?]+\.aspx.*)$", re.IGNORECASE | re.ASCII),
]
_QUERY_SESSIONS = [
    re.compile(rf"^(.*)(?:{session})(?:&(.*))?$", re.IGNORECASE | re.ASCII)
    for session in (
        "jsessionid=[0-9a-zA-Z]{32}", "phpsessid=[0-9a-zA-Z]{32}", "sid=[0-9a-zA-Z]{32}",
        "ASPSESSIONID[a-zA-Z]{8}=[a-zA-Z]{24}", "cfid=[^&]+&cftoken=[^&]+",
    )
]  # fmt: skip
_PORTS = {"http": ":80", "https": ":443"}
_PERCENTS = re.compile(b"%(?:25)+")
_LONGEST_ORIGIN = 300
_SAFE = "!\"$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def surt(url: str) -> str:
    """The key of a URL in an index, as pywb and the Wayback Machine make it: ``com,example)/path?a=1&b=2``. Different
    URLs may have the same one."""
    slash = url.find("/", 8)
    origin = _origin_key(url[:slash]) if 0 < slash < _LONGEST_ORIGIN else ""
    if not origin:
        match = _URL.match(url)
        if match is None:
            return re.sub(r"\s", "%20", url.lower()) or "-"
        slash, origin = match.end(), _origin_key.__wrapped__(match[0])
    path, _, query = url[slash:].partition("#")[0].partition("?")
    if not _PLAIN.fullmatch(path):
        path = _escaped(path)
    if "//" in path or "/." in path:
        path = _without_dots(path)
    path = path.lower() or "/"
    if ".aspx" in path:
        for session in _PATH_SESSIONS:
            path = session.sub(r"\1\3", path)
    if len(path) > 1 and path[-1] == "/":
        path = path[:-1]
    return f"{origin}{path}?{query}" if query and (query := _query_key(query)) else origin + path


@lru_cache(1024)
def _origin_key(origin: str) -> str:
    match = _URL.fullmatch(origin)
    if match is None:
        return ""
    scheme, host, port = match.groups()
    host = _WWW.sub("", host.lower(), count=1) if host[:3].lower() == "www" else host.lower()
    port = "" if port is None or port == _PORTS[scheme.lower()] else port
    return f"{','.join(reversed(host.split('.')))}{port})"


def _query_key(query: str) -> str:
    if not _PLAIN.fullmatch(query):
        query = _escaped(query)
    query = query.lower()
    if "sid=" in query or "sessionid" in query or "cftoken=" in query:
        for session in _QUERY_SESSIONS:
            query = session.sub(r"\1\2", query)
    return "&".join(sorted(query.split("&"), key=_name_and_value)) if "&" in query else query


def _name_and_value(part: str) -> list[str]:
    return part.split("=", 1)


def _escaped(text: str) -> str:
    """Unquoted as often as possible, then quoted where it must be."""
    data = text.encode("utf-8", "surrogatepass")
    while (plain := unquote_to_bytes(_PERCENTS.sub(b"%", data))) != data:  # without it, %252525... takes minutes
        data = plain
    return quote_from_bytes(data, safe=_SAFE)


def _without_dots(path: str) -> str:
    kept: list[str] = []
    for part in path.split("/")[1:]:
        if part == ".." and kept:
            kept.pop()
        elif part != ".":
            kept.append(part)
    return "/" + "/".join([part for part in kept[:-1] if part] + kept[-1:])


# -- lines of an index


class IndexEntry(Struct, omit_defaults=True, kw_only=True):
    """What an index says of a page. The first eight fields are those of other tools, and all of them are texts."""

    url: str
    mime: str
    """`REVISIT` if the payload is in another record."""
    status: str
    digest: str
    """Of the payload, such as ``sha1:`` and base32."""
    length: str = ""
    """Of the compressed record."""
    offset: str = ""
    """Of the compressed record, in the file."""
    filename: str = ""
    record: str
    """The UUID of the record."""
    fingerprint: str = ""
    """Of the request, in hex. Empty if the file was written by another program."""
    etag: str = ""
    """As it was received; so is ``modified``."""
    modified: str = ""
    vary: str = ""
    """The names of the request's headers on which the response depends, in lower case and sorted."""
    redirect: str = ""
    """Where the response redirects to, as an absolute URL."""
    refers: str = ""
    """Of a revisit: the UUID of the record that has the payload."""
    original: str = ""
    """Of a revisit: the file with that record, if it is another file. It may have been moved since."""
    truncated: bool = False
    """Whether the body is missing or incomplete."""
    rendered: bool = False
    """Whether the page after its scripts have run is there, too."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(IndexEntry)
_NO_DIGIT = re.compile(r"[^0-9]")
_MIME = re.compile(r"[^;\s]*")


def make_entry(
    url: str, status: str, received: Iterable[tuple[bytes, bytes]], digest: str, record: str, *, is_revisit: bool
) -> IndexEntry:
    """The entry of a response or revisit. ``received``: the headers of the response; ``record``: the UUID of the
    record."""
    entry = IndexEntry(url=url, mime=REVISIT if is_revisit else "unk", status=status, digest=digest, record=record)
    varying: list[str] = []
    for name, value in received:
        match _WANTED.get(name) or _WANTED.get(name.lower()):
            case "mime" if entry.mime == "unk":
                entry.mime = _mime(value[:_LONGEST_VALUE])
            case "etag" if not entry.etag:
                entry.etag = _short(value)
            case "modified" if not entry.modified:
                entry.modified = _short(value)
            case "vary":
                varying.append(_names(value) if len(value) <= _LONGEST_VALUE else "*")
            case "redirect" if not entry.redirect and status[:1] == "3":
                with suppress(RequestError):
                    entry.redirect = join_url(url, value.strip().decode("utf-8", "surrogateescape"))
    if varying:
        entry.vary = varying[0] if len(varying) == 1 else _names(",".join(varying).encode("latin-1"))
    return entry


_WANTED = {
    b"content-type": "mime", b"etag": "etag", b"last-modified": "modified", b"vary": "vary", b"location": "redirect"
}  # fmt: skip
"""Headers in lower case, and in their usual spelling."""
_WANTED |= {name.title(): field for name, field in _WANTED.items()}


@lru_cache(1024)
def _mime(value: bytes) -> str:
    match = _MIME.match(value.strip().decode("latin-1"))
    return (match[0] if match is not None else "") or "unk"


@lru_cache(1024)
def _names(value: bytes) -> str:
    """The names in a header, in lower case and sorted."""
    return ",".join(sorted({name.strip().lower() for name in value.decode("latin-1").split(",")} - {""}))


def _short(value: bytes) -> str:
    value = value.strip()
    return value.decode("latin-1") if len(value) <= _LONGEST_VALUE else ""


_PUNCTUATION = str.maketrans("", "", "-T:")


def key_of(url: str, date: str) -> str:
    """What a line begins with: the SURT of the URL and the time in 14 digits. ``date`` is that of the record."""
    digits = date[:19].translate(_PUNCTUATION)
    if len(digits) != 14 or not (digits.isascii() and digits.isdigit()):
        digits = f"{_NO_DIGIT.sub('', digits):0<14}"
    return f"{surt(url)} {digits}"


def page_line(page: PageRecords, filename: str) -> IndexLine:
    """The line of a page that is being stored, without its place."""
    exchange, response, original = page.exchange, page.response, page.original
    is_revisit = original is not None
    entry = make_entry(
        exchange.url, str(exchange.status), page.headers, page.digest, response.record, is_revisit=is_revisit
    )
    entry.filename = filename
    entry.fingerprint = page.fingerprint.hex()
    entry.truncated = exchange.truncated
    entry.rendered = exchange.rendered is not None
    if original is not None:
        entry.refers, entry.original = original.record, original.filename
    return IndexLine(key_of(exchange.url, response.date), entry)


class IndexLine(NamedTuple):
    """A line of an index."""

    key: str
    """The SURT of the URL and the time."""
    entry: IndexEntry

    @property
    def date(self) -> str:
        return self.key.rpartition(" ")[2]

    def encode(self) -> bytes:
        return b"%s %s\n" % (self.key.encode("utf-8", "surrogatepass"), _encoder.encode(self.entry))


def read_line(line: bytes) -> IndexLine:
    """ArchiveError if this is no line of an index."""
    try:
        surt_key, date, values = line.split(b" ", 2)
        return IndexLine(f"{surt_key.decode()} {date.decode()}", _decoder.decode(values))
    except (ValueError, *DECODING_ERRORS) as exc:
        raise ArchiveError(f"a line of an index cannot be read: {exc}") from exc


Mapped: TypeAlias = mmap.mmap | bytes


# -- making an index


class Summary(Struct, omit_defaults=True):
    """What the keys of a file say of it."""

    run: str = ""
    """The run whose pages it has; empty if it has pages that other runs refer to, or another program wrote it."""
    created: float = 0.0
    """When that run was created."""
    pages: int = 0
    revisits: int = 0
    first: str = ""
    """The time of the oldest page, in 14 digits."""
    last: str = ""
    warc_bytes: int = 0
    index_bytes: int = 0
    index_check: str = ""
    bits: int = 0
    """How many bits of a key choose its bucket."""
    tables: int = 0
    """How many entries each table has."""
    tables_check: str = ""


_MAGIC = b"SHOALKEY1"
_HEAD = struct.Struct("<9sI")
_CHECK = 16
_KEY = 8
"""Bytes of a fingerprint or a digest that a table has. The line has all of it."""


class IndexBuilder:
    """Collects the entries of a file, and writes its index. Memory is bounded: the lines are sorted on disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lines: list[bytes] = []
        self._size = 0
        self._runs: list[IO[bytes]] = []
        self.is_broken = False
        """Whether an entry could not be kept. Then the index is made from the file."""

    def add(self, line: IndexLine, offset: int, length: int) -> None:
        """Add a page. Its first record, compressed, has this place."""
        line.entry.offset, line.entry.length = str(offset), str(length)
        data = line.encode()
        self._lines.append(data)
        self._size += len(data)
        if self._size >= _BUFFER:
            try:
                self._spill()
            except OSError:  # the disk is full, for example; the page itself is stored
                self.is_broken = True
                self._lines.clear()
                self._size = 0

    def _spill(self) -> None:
        run = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - `close` closes it
        self._runs.append(run)
        self._lines.sort()
        run.writelines(self._lines)
        self._lines.clear()
        self._size = 0

    def lines(self, dropped: Sequence[PagePart] = ()) -> Iterator[bytes]:
        """The lines in order, without those of dropped parts, and with the offsets that the others have then.
        ArchiveError if some could not be kept."""
        if self.is_broken:
            raise ArchiveError(f"there is no room to sort an index in {self._folder}: free some space")
        for run in self._runs:
            run.seek(0)
        self._lines.sort()
        merged = heapq.merge(*self._runs, self._lines)
        return _moved(merged, sorted(dropped)) if dropped else merged

    def close(self) -> None:
        for run in self._runs:
            run.close()
        self._runs.clear()
        self._lines.clear()


def _moved(lines: Iterable[bytes], dropped: Sequence[PagePart]) -> Iterator[bytes]:
    from bisect import bisect_right

    begins = [part.begin for part in dropped]
    gone = [0, *accumulate(part.end - part.begin for part in dropped)]
    for data in lines:
        line = read_line(data)
        at = int(line.entry.offset)
        before = bisect_right(begins, at)
        if before and at < dropped[before - 1].end:
            continue
        line.entry.offset = str(at - gone[before])
        yield line.encode()


class _Table:
    """Collects keys and where their lines are. Sorted part by part, so it needs little more memory than its content."""

    _ENTRY = struct.Struct(">8sQ")

    def __init__(self) -> None:
        self._parts = [bytearray() for _ in range(256)]
        self.count = 0

    def add(self, key: bytes, at: int) -> None:
        self._parts[key[0]] += self._ENTRY.pack(key[:_KEY], at)
        self.count += 1

    def pack(self, bits: int) -> bytes:
        starts, keys, places, shift = array("I", [0]) * (1 << bits), bytearray(), array("Q"), 64 - bits
        for part in self._parts:
            for begin in sorted(part[begin : begin + 16] for begin in range(0, len(part), 16)):
                starts[int.from_bytes(begin[:_KEY]) >> shift] += 1
                keys += begin[:_KEY]
                places.append(int.from_bytes(begin[_KEY:]))
            part.clear()
        ends = array("I", accumulate(starts, initial=0))
        return ends.tobytes() + bytes(keys) + places.tobytes()


def digest_key(digest: str) -> bytes:
    """The key of a payload's digest in a table."""
    return blake2b(digest.encode("utf-8", "surrogatepass"), digest_size=_KEY).digest()


def fingerprint_key(fingerprint: str) -> bytes | None:
    """The key of a fingerprint in hex; None if it is none."""
    try:
        key = bytes.fromhex(fingerprint)[:_KEY]
    except ValueError:
        return None
    return key if len(key) == _KEY else None


def write_index(path: str, lines: Iterable[bytes], run: tuple[str, float], warc_bytes: int) -> Summary:
    """Write both files of the index of a WARC file, durably. ``path`` is that of the WARC file without its ending."""
    summary = Summary(run[0], run[1], warc_bytes=warc_bytes)
    by_fingerprint, by_digest, check = _Table(), _Table(), blake2b(digest_size=_CHECK)

    def write(file: BinaryIO) -> None:
        at = 0
        for line in lines:
            file.write(line)
            check.update(line)
            _, date, values = line.split(b" ", 2)
            entry, moment = _decoder.decode(values), date.decode()
            by_fingerprint.add(fingerprint_key(entry.fingerprint) or bytes(_KEY), at)
            by_digest.add(digest_key(entry.digest), at)
            at += len(line)
            summary.pages += 1
            summary.revisits += entry.mime == REVISIT
            summary.first = min(summary.first or moment, moment)
            summary.last = max(summary.last, moment)
        summary.index_bytes = at

    os.close(replace_file(path + INDEX, write, mode=ARCHIVE_MODE))
    summary.index_check = check.hexdigest()
    summary.tables = by_digest.count
    summary.bits = max(1, (by_digest.count // 16).bit_length())
    tables = by_fingerprint.pack(summary.bits) + by_digest.pack(summary.bits)
    summary.tables_check = _check(tables)
    head = _encoder.encode(summary)
    data = _HEAD.pack(_MAGIC, len(head)) + head
    data += bytes(-len(data) % 8) + tables
    os.close(replace_file(path + KEYS, lambda file: _write_all(file, data), mode=ARCHIVE_MODE))
    return summary


def _check(content: Mapped) -> str:
    return blake2b(content, digest_size=_CHECK).hexdigest()


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def index_records(found: Iterable[Member], filename: str, builder: IndexBuilder) -> tuple[str, float]:
    """Add the pages of a WARC file, and return its run. Records of other programs are indexed, too."""
    run = ("", 0.0)
    page: tuple[IndexLine, int, int] | None = None  # its other records may follow

    for member in found:
        record = parse_record(member.content)
        if record is None:
            continue
        match record.kind:
            case "warcinfo":
                run = run_of(record.block)
            case "response" | "revisit" if _is_http(record):
                if page is not None:
                    builder.add(*page)
                entry = _entry_of(record)
                entry.filename = filename
                line = IndexLine(key_of(entry.url, record.headers.get("warc-date", "")), entry)
                page = line, member.offset, member.length
            case "conversion" if page is not None and _belongs(record, page[0].entry, "warc-refers-to"):
                page[0].entry.rendered = True
            case "request" if page is not None and _belongs(record, page[0].entry) and not page[0].entry.fingerprint:
                page[0].entry.fingerprint = _fingerprint(record)
            case "metadata" if page is not None and _belongs(record, page[0].entry):
                page[0].entry.fingerprint = request_of(record.block) or page[0].entry.fingerprint
    if page is not None:
        builder.add(*page)
    return run


def _entry_of(record: Record) -> IndexEntry:
    """The entry of a response or revisit, as far as this record tells it."""
    line, received, _ = parse_head(record.block)
    status = line.split(" ", 2)[1] if " " in line else ""
    headers, is_revisit = record.headers, record.kind == "revisit"
    entry = make_entry(
        record.url,
        status if status.isascii() and status.isdigit() else "-",
        received,
        headers.get("warc-payload-digest", "-"),
        record.record_id,
        is_revisit=is_revisit,
    )
    entry.truncated = "warc-truncated" in headers
    if is_revisit:
        entry.refers = plain_id(headers.get("warc-refers-to", ""))
        entry.original = headers.get("warc-refers-to-filename", "")
    return entry


def _is_http(record: Record) -> bool:
    return record.headers.get("content-type", "").startswith("application/http")


def _belongs(record: Record, entry: IndexEntry, link: str = "warc-concurrent-to") -> bool:
    """Whether a record belongs to a page. The first record of its own page may be damaged."""
    named = record.headers.get(link)
    return record.url == entry.url if named is None else plain_id(named) == entry.record


def _fingerprint(record: Record) -> str:
    """Of a request in a file of another program."""
    line, _, at = parse_head(record.block)
    with suppress(RequestError, ValueError):
        return url_fingerprint(record.url, line.partition(" ")[0], record.block[at:]).hex()
    return ""


def rebuild_index(path: str, source: str | None = None, *, size: int, dropped: Sequence[PagePart] = ()) -> Summary:
    """Write the index of a WARC file anew, from its records. ``path`` is that of the file without its ending, and
    ``source`` where it is now; ``dropped`` parts will be left out of it."""
    builder = IndexBuilder(os.path.dirname(path))
    try:
        with open(source or path + ENDING, "rb") as file:
            found = (member for member in scan(file, size) if isinstance(member, Member))
            run = index_records(found, os.path.basename(path) + ENDING, builder)
        if builder.is_broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        gone = sum(part.end - part.begin for part in dropped)
        return write_index(path, builder.lines(dropped), run, size - gone)
    finally:
        builder.close()


# -- reading an index


class FileIndex:
    """The index of a WARC file, searched on disk. ArchiveError if it is missing or damaged."""

    def __init__(self, path: str) -> None:
        """``path``: of the WARC file without its ending."""
        self.path = path
        self.filename = os.path.basename(path) + ENDING
        self._keys: Mapped = b""
        self._lines: Mapped | None = None
        with self._errors():
            self._keys = _mapped(path + KEYS)
            magic, length = _HEAD.unpack_from(self._keys)
            if magic != _MAGIC:
                raise ValueError("its first bytes are wrong")
            self.summary = summary = msgspec.json.decode(self._keys[_HEAD.size : _HEAD.size + length], type=Summary)
            if not 1 <= summary.bits <= 32:
                raise ValueError("it names an impossible size")
            at: int = -(-(_HEAD.size + length) // 8) * 8
            buckets = 4 * ((1 << summary.bits) + 1)
            table = buckets + 2 * _KEY * summary.tables
            if len(self._keys) != at + 2 * table:
                raise ValueError("its size is wrong")
            self._shift = 64 - summary.bits
            self._tables = [(at, at + buckets), (at + table, at + table + buckets)]

    def by_fingerprint(self, fingerprint: str) -> Iterator[IndexLine]:
        """The pages of a request, whose fingerprint is in hex."""
        key = fingerprint_key(fingerprint)
        for line in self._found(0, key) if key is not None else ():
            if line.entry.fingerprint == fingerprint:
                yield line

    def by_digest(self, digest: str) -> Iterator[IndexLine]:
        """The pages with a payload."""
        for line in self._found(1, digest_key(digest)):
            if line.entry.digest == digest:
                yield line

    def _found(self, table: int, key: bytes) -> Iterator[IndexLine]:
        at = self._first(table, key)
        return iter(()) if at < 0 else self._from(table, key, at)

    def has_digest(self, key: bytes) -> bool:
        """Whether a page may have the payload of this key."""
        return self._first(1, key) >= 0

    def is_whole(self, run: tuple[str, float], warc_bytes: int) -> bool:
        """Whether both files are as they were written, for this run and a WARC file of this size."""
        summary = self.summary
        begin = self._tables[0][0]
        return (summary.run, summary.created, summary.warc_bytes) == (*run, warc_bytes) and (
            summary.index_check == _check(self.lines) and summary.tables_check == _check(self._keys[begin:])
        )

    def digest_keys(self) -> bytes:
        """The keys of all payloads, one after the other."""
        _, keys = self._tables[1]
        return self._keys[keys : keys + _KEY * self.summary.tables]

    def _first(self, table: int, key: bytes) -> int:
        """The number of the first entry with a key; -1 if there is none."""
        buckets, keys = self._tables[table]
        begin, end = struct.unpack_from("<II", self._keys, buckets + 4 * (int.from_bytes(key) >> self._shift))
        at, end = keys + _KEY * begin, keys + _KEY * end
        while (at := self._keys.find(key, at, end)) >= 0:
            if (at - keys) % _KEY == 0:
                return (at - keys) // _KEY
            at += 1
        return -1

    def _from(self, table: int, key: bytes, number: int) -> Iterator[IndexLine]:
        _, keys = self._tables[table]
        places = keys + _KEY * self.summary.tables
        while number < self.summary.tables and self._keys[keys + _KEY * number : keys + _KEY * (number + 1)] == key:
            (at,) = struct.unpack_from("<Q", self._keys, places + 8 * number)
            yield self._line(at)
            number += 1

    def _line(self, at: int) -> IndexLine:
        lines = self.lines
        with self._errors():
            return read_line(lines[at : lines.find(b"\n", at)])

    @property
    def lines(self) -> Mapped:
        if self._lines is None:
            with self._errors(INDEX):
                self._lines = _mapped(self.path + INDEX)
                if len(self._lines) != self.summary.index_bytes:
                    raise ValueError("its size is wrong")
        return self._lines

    def by_url(self, url: str) -> Iterator[IndexLine]:
        """The pages of a URL, oldest first. Spellings of a URL with the same key are different URLs."""
        prefix = surt(url).encode("utf-8", "surrogatepass") + b" "
        lines = self.lines
        at = _bisect(lines, prefix)
        while at < len(lines) and lines[at : at + len(prefix)] == prefix:
            line = self._line(at)
            if line.entry.url == url:
                yield line
            at = lines.find(b"\n", at) + 1 or len(lines)

    def __iter__(self) -> Iterator[IndexLine]:
        lines, at = self.lines, 0
        while at < len(lines):
            yield self._line(at)
            at = lines.find(b"\n", at) + 1 or len(lines)

    def close(self) -> None:
        for content in (self._keys, self._lines):
            if isinstance(content, mmap.mmap):
                content.close()

    def _errors(self, ending: str = KEYS) -> _IndexErrors:
        return _IndexErrors(self.path + ending)


class _IndexErrors:
    """Turns what goes wrong with an index into an ArchiveError that says what to do."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, ArchiveError | OSError | ValueError | struct.error | IndexError | msgspec.MsgspecError):
            folder = os.path.dirname(self._path) or "."
            missing = isinstance(exc, FileNotFoundError)
            what = "is missing" if missing else f"is damaged ({getattr(exc, 'strerror', None) or exc})"
            raise ArchiveError(f"{self._path} {what}; `shoal archive check {folder} --repair` makes it again") from exc


def _mapped(path: str) -> Mapped:
    with open(path, "rb") as file:
        is_empty = not os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
        return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bisect(lines: Mapped, prefix: bytes) -> int:
    """Where the first line begins that is not before a prefix."""
    low, high = 0, len(lines)
    while low < high:
        begin = lines.rfind(b"\n", low, (low + high) // 2) + 1 or low
        end = lines.find(b"\n", begin, high) + 1 or high
        if lines[begin : begin + len(prefix)] < prefix:
            low = end
        else:
            high = begin
    return low
