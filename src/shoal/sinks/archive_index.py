"""The index of a WARC file: which pages it has, where each is, and what a later crawl needs to know of it.

Beside ``X.warc.gz`` are ``X.cdxj``, one line for each page in the order of its SURT, as other tools read it, and
``X.keys``, which finds these lines by the fingerprint of a request or by the digest of a payload. Both can be searched
on disk, and both can be made again from the WARC file: the result is equal, byte for byte.
"""

from __future__ import annotations

import heapq
import math
import mmap
import os
import re
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from typing import IO, BinaryIO, NamedTuple, TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS, RequestError, ShoalError
from shoal.sinks.storage import replace_file
from shoal.urls.normalize import join_url, url_fingerprint

ENDING = ".warc.gz"
INDEX = ".cdxj"
KEYS = ".keys"
ARCHIVE_MODE = 0o600  # requests have cookies and passwords
REVISIT = "warc/revisit"
"""What an index has as the type of a page whose payload is in another record."""

_BLOCK = 1 << 16
_LONGEST_HEAD = 1 << 20
"""How much of a record is read to index it. The headers of a response are far shorter."""
_LONGEST_VALUE = 1000
"""Longer validators and lists of headers are not kept."""
_BUFFER = 4 << 20
"""Bytes of lines that are kept in memory before they are sorted into a temporary file."""


class ArchiveError(ShoalError):
    """A file of an archive is missing or damaged, or has another content than its index says."""


# -- records


class PagePart(NamedTuple):
    """The records of one page in a file."""

    begin: int
    end: int


class Member(NamedTuple):
    """A record in a file: a gzip member."""

    offset: int
    length: int
    content: bytes
    """Shortened, unless it is metadata or a request."""


def members(file: BinaryIO, at: int = 0, end: float = math.inf) -> Iterator[Member]:
    """The complete gzip members of a file from an offset on, up to another one or the first that is damaged."""
    file.seek(at)
    rest = b""
    while at < end:
        unpacker, content, used = zlib.decompressobj(zlib.MAX_WBITS + 16), bytearray(), 0
        while not unpacker.eof:
            block = unpacker.unconsumed_tail or rest or file.read(_BLOCK)
            if not block:
                return
            try:
                unpacked = unpacker.decompress(block, _LONGEST_HEAD)
            except zlib.error:  # torn, or zeros that a file system left after a power cut
                return
            if len(content) < _LONGEST_HEAD:
                content += unpacked
            used += len(block) - len(unpacker.unused_data) - len(unpacker.unconsumed_tail)
            rest = unpacker.unused_data
        yield Member(at, used, bytes(content))
        at += used


class Record(NamedTuple):
    """A record: its own headers, with names in lower case, and what they describe."""

    headers: dict[str, str]
    block: bytes

    @property
    def kind(self) -> str:
        return self.headers.get("warc-type", "")

    @property
    def url(self) -> str:
        return self.headers.get("warc-target-uri", "")

    @property
    def record_id(self) -> str:
        return plain_id(self.headers.get("warc-record-id", ""))


def plain_id(record_id: str) -> str:
    """The UUID of a record."""
    return record_id.strip("<>").removeprefix("urn:uuid:")


def parse_record(content: bytes) -> Record | None:
    """None if this is no record of a WARC file."""
    head, separator, block = content.partition(b"\r\n\r\n")
    if not separator or not head.startswith(b"WARC/1."):
        return None
    lines = head.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length = headers.get("content-length", "")
    return Record(headers, block[: int(length)] if length.isascii() and length.isdigit() else block)


def parse_head(block: bytes) -> tuple[str, list[tuple[bytes, bytes]], int]:
    """The first line and the headers of an HTTP message, and where its body begins."""
    end = block.find(b"\r\n\r\n")
    end = len(block) if end < 0 else end
    first, *lines = block[:end].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return first.decode("latin-1"), [(name.strip(), value.strip()) for name, _, value in pairs], end + 4


# -- the key of a URL


_URL = re.compile(
    r"(https?)://(?:[^/?#@]*@)?([^/?#@:]*|\[[^]/]*\])(:\d+)?([^?#]*)(?:\?([^#]*))?", re.ASCII | re.IGNORECASE
)
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
_SAFE = "!\"$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def surt(url: str) -> str:
    """The key of a URL in an index, as pywb and the Wayback Machine make it: ``com,example)/path?a=1&b=2``. Different
    URLs may have the same one."""
    match = _URL.match(url)
    if match is None:
        return re.sub(r"\s", "%20", url.lower()) or "-"
    scheme, host, port, path, query = match.groups()
    host = _WWW.sub("", host.lower(), count=1) if host[:3].lower() == "www" else host.lower()
    port = "" if port is None or port == _PORTS[scheme.lower()] else port
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
    key = f"{','.join(reversed(host.split('.')))}{port}){path}"
    return f"{key}?{query}" if query and (query := _query_key(query)) else key


def _query_key(query: str) -> str:
    if not _PLAIN.fullmatch(query):
        query = _escaped(query)
    query = query.lower()
    if "id" in query:
        for session in _QUERY_SESSIONS:
            query = session.sub(r"\1\2", query)
    return "&".join(sorted(query.split("&"), key=lambda part: part.split("=", 1))) if "&" in query else query


def _escaped(text: str) -> str:
    """Unquoted as often as possible, then quoted where it must be."""
    data = text.encode("utf-8", "surrogateescape")
    while (plain := unquote_to_bytes(data)) != data:
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
_DIGITS = re.compile(r"\D")
_MIME = re.compile(r"[^;\s]*")


def make_entry(headers: dict[str, str], head: bytes) -> IndexEntry:
    """The entry of a response or revisit. ``headers``: those of the record, with names in lower case; ``head``: the
    first line and the headers of the HTTP message."""
    line, received, _ = parse_head(head)
    found: dict[bytes, list[str]] = {}
    for name, value in received:
        lower = name.lower()
        if lower in _WANTED:
            found.setdefault(lower, []).append(value.decode("latin-1"))
    url = headers.get("warc-target-uri", "")
    status = line.split(" ", 2)[1] if " " in line else ""
    is_revisit = headers.get("warc-type") == "revisit"
    entry = IndexEntry(
        url=url,
        mime=REVISIT if is_revisit else _first(_MIME, found.get(b"content-type")) or "unk",
        status=status if status.isascii() and status.isdigit() else "-",
        digest=headers.get("warc-payload-digest", "-"),
        record=plain_id(headers.get("warc-record-id", "")),
        truncated="warc-truncated" in headers,
    )
    if is_revisit:
        entry.refers = plain_id(headers.get("warc-refers-to", ""))
        entry.original = headers.get("warc-refers-to-filename", "")
    if len(found) > 1 or b"content-type" not in found:
        entry.etag = _short(found.get(b"etag"))
        entry.modified = _short(found.get(b"last-modified"))
        if varying := found.get(b"vary"):
            names = {name.strip().lower() for value in varying for name in value.split(",")} - {""}
            entry.vary = _short([",".join(sorted(names))]) or "*"
        if status[:1] == "3" and (target := found.get(b"location")):
            with suppress(RequestError):
                entry.redirect = join_url(url, target[0].encode("latin-1").decode("utf-8", "surrogateescape"))
    return entry


_WANTED = frozenset({b"content-type", b"etag", b"last-modified", b"vary", b"location"})


def _short(values: list[str] | None) -> str:
    return values[0] if values and len(values[0]) <= _LONGEST_VALUE else ""


def _first(pattern: re.Pattern[str], values: list[str] | None) -> str:
    match = pattern.match(values[0]) if values else None
    return match[0][:_LONGEST_VALUE] if match is not None else ""


def key_of(url: str, date: str) -> str:
    """What a line begins with: the SURT of the URL and the time in 14 digits. ``date`` is that of the record."""
    return f"{surt(url)} {_DIGITS.sub('', date[:19]):0<14}"


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
_RUN = re.compile(r"^shoalRun: (.*) (\d+\.\d+)\r?$", re.MULTILINE)
_KEY = 8
"""Bytes of a fingerprint or a digest that a table has. The line has all of it."""


def run_of(info: bytes) -> tuple[str, float]:
    """The run that a first record names, and when it was created; nothing for a file of another program."""
    match = _RUN.search(info.decode("utf-8", "replace"))
    return ("", 0.0) if match is None else (match[1], float(match[2]))


class IndexBuilder:
    """Collects the entries of a file, and writes its index. Memory is bounded: the lines are sorted on disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lines: list[bytes] = []
        self._size = 0
        self._runs: list[IO[bytes]] = []
        self.is_broken = False
        """Whether an entry could not be kept. Then the index is made from the file."""

    def add(self, key: str, entry: IndexEntry, part: Member | PagePart, length: int) -> None:
        """Add a page. Its first record is at the beginning of ``part``."""
        entry.offset, entry.length = str(part[0]), str(length)
        line = IndexLine(key, entry).encode()
        self._lines.append(line)
        self._size += len(line)
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
        """The lines in order, without those of dropped parts, and with the offsets that the others have then."""
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
    by_fingerprint, by_digest, check = _Table(), _Table(), blake2b(digest_size=16)

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
    summary.tables_check = blake2b(tables, digest_size=16).hexdigest()
    head = _encoder.encode(summary)
    data = _HEAD.pack(_MAGIC, len(head)) + head
    data += bytes(-len(data) % 8) + tables
    os.close(replace_file(path + KEYS, lambda file: _write_all(file, data), mode=ARCHIVE_MODE))
    return summary


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


_LEASE = re.compile(rb"^shoalLease: ([0-9a-f]{32})-([0-9a-f]+)\r$", re.MULTILINE)
_REQUEST = re.compile(rb"^shoalRequest: ([0-9a-f]{32})\r$", re.MULTILINE)


def request_of(metadata: bytes) -> str:
    """The fingerprint of the request that a metadata record names, in hex; empty if it names none."""
    match = _REQUEST.search(metadata) or _LEASE.search(metadata)
    return "" if match is None else match[1].decode()


class _Pending(NamedTuple):
    """A page whose other records may follow."""

    key: str
    entry: IndexEntry
    member: Member


def index_records(found: Iterable[Member], filename: str, builder: IndexBuilder) -> tuple[str, float]:
    """Add the pages of a WARC file, and return its run. Records of other programs are indexed, too."""
    run, page = ("", 0.0), None

    def end_page() -> None:
        if page is not None:
            builder.add(page.key, page.entry, page.member, page.member.length)

    for member in found:
        record = parse_record(member.content)
        if record is None:
            continue
        match record.kind:
            case "warcinfo":
                run = run_of(record.block)
            case "response" | "revisit" if _is_http(record):
                end_page()
                entry = make_entry(record.headers, record.block[: parse_head(record.block)[2]])
                entry.filename = filename
                page = _Pending(key_of(entry.url, record.headers.get("warc-date", "")), entry, member)
            case "conversion" if page is not None:
                page.entry.rendered = True
            case "request" if page is not None and not page.entry.fingerprint:
                page.entry.fingerprint = _fingerprint(record)
            case "metadata" if page is not None and (fingerprint := request_of(record.block)):
                page.entry.fingerprint = fingerprint
    end_page()
    return run


def _is_http(record: Record) -> bool:
    return record.headers.get("content-type", "").startswith("application/http")


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
            run = index_records(members(file, end=size), os.path.basename(path) + ENDING, builder)
        if builder.is_broken:
            raise OSError(28, "No space left on device")
        gone = sum(part.end - part.begin for part in dropped)
        return write_index(path, builder.lines(dropped), run, size - gone)
    finally:
        builder.close()


# -- reading an index


_Mapped: TypeAlias = mmap.mmap | bytes


class FileIndex:
    """The index of a WARC file, searched on disk. ArchiveError if it is missing or damaged."""

    def __init__(self, path: str) -> None:
        """``path``: of the WARC file without its ending."""
        self.path = path
        self.filename = os.path.basename(path) + ENDING
        self._keys: _Mapped = b""
        self._lines: _Mapped | None = None
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
    def lines(self) -> _Mapped:
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


def _mapped(path: str) -> _Mapped:
    with open(path, "rb") as file:
        is_empty = not os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
        return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bisect(lines: _Mapped, prefix: bytes) -> int:
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
