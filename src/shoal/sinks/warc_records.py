"""Records of WARC files: how they are made, and how they are read.

A page has these, each a gzip member of its own: response or revisit, request, rendered page, metadata. The metadata
record is the last one. It names the lease of the page, so that a later process can find out whether the page is done.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha1
from typing import BinaryIO, NamedTuple, TypeAlias

from msgspec import Struct

from shoal.http import Request
from shoal.http.exchange import Exchange
from shoal.ports import LeaseKey
from shoal.system import chance, clock

_LEVEL = 6
"""The level of compression. Level 9 takes far longer and saves one percent."""
_SECRET = frozenset({b"proxy-authorization"})
"""Headers for a proxy. They were not sent to the site."""
_ORIGINAL = b"X-Orig-"
"""The prefix for the name of a header that does not describe the body in the record."""
_ONE_LINE = bytes(32 if code in b"\r\n" else code for code in range(256))
_REVISIT_PROFILE = "http://netpreserve.org/warc/1.1/revisit/identical-payload-digest"
_FIELDS = "application/warc-fields"
_BLOCK = 1 << 16
_GZIP = b"\x1f\x8b\x08"
_LONGEST_HEAD = 1 << 20
"""How much of a record is read to index it. The headers of a response are far shorter."""
_LEASE = re.compile(rb"^shoalLease: ([0-9a-f]{32})-([0-9a-f]+)\r$", re.MULTILINE)
_REQUEST = re.compile(rb"^shoalRequest: ([0-9a-f]{32})\r$", re.MULTILINE)
_RUN = re.compile(r"^shoalRun: (.*) (\d+\.\d+)\r?$", re.MULTILINE)


# -- making records


class Original(Struct, frozen=True):
    """A stored response that a later one with the same payload refers to."""

    record: str
    """The UUID of the record."""
    url: str
    date: str
    filename: str = ""
    """Its file, if that is another one."""


Originals: TypeAlias = Callable[[str], Original | None]
"""Finds a stored response by the digest of its payload."""


class PageRecords(Struct, frozen=True):
    """The compressed records of a page."""

    data: bytes
    length: int
    """Of the first record, the response or revisit."""
    exchange: Exchange
    headers: list[tuple[bytes, bytes]]
    """The headers of the response, as they are in the record."""
    digest: str
    """The digest of the payload."""
    response: Original
    """The first record."""
    original: Original | None
    """The response that has the payload, if it is another one."""
    fingerprint: bytes
    """Of the request."""


def first_record(filename: str, fields: Mapping[str, str]) -> bytes:
    """The first record of a file, which says what the file is."""
    body = _fields(fields)
    return _packed(
        _new_id(), "warcinfo", f"WARC-Date: {_date(clock.time())}\r\nWARC-Filename: {filename}\r\n", _FIELDS, body
    )


def page_records(exchange: Exchange, request: Request, lease: LeaseKey, originals: Originals) -> PageRecords:
    """The records of a page."""
    date = _date(exchange.began)
    about = f"WARC-Target-URI: {exchange.url}\r\nWARC-Date: {date}\r\n"
    digest = payload_digest(exchange.body)
    original = originals(digest) if exchange.body else None
    received = [  # headers that do not describe the body in the record get another name
        (_ORIGINAL + name if name.lower() in exchange.undone else name, value) for name, value in exchange.received
    ]
    head = _http_head(f"HTTP/{exchange.version} {exchange.status} {exchange.reason}", received)
    record, kind, body, more = _new_id(), "response", exchange.body, f"WARC-Payload-Digest: {digest}\r\n"
    if exchange.address:
        more += f"WARC-IP-Address: {exchange.address}\r\n"
    if exchange.truncated:
        more += "WARC-Truncated: unspecified\r\n"
    if original is not None:
        kind, body = "revisit", b""
        more += _refers_to(original)
    first = _packed(record, kind, about + more, "application/http; msgtype=response", head + body)
    sent = [(name, value) for name, value in exchange.sent if name.lower() not in _SECRET]
    request_head = _http_head(f"{exchange.method} {_target(exchange.url)} HTTP/1.1", sent)
    beside = f"{about}WARC-Concurrent-To: <urn:uuid:{record}>\r\n"
    request_kind = "application/http; msgtype=request"
    parts = [first, _packed(_new_id(), "request", beside, request_kind, request_head + exchange.sent_body)]
    if exchange.rendered is not None:
        refers = f"{about}WARC-Refers-To: <urn:uuid:{record}>\r\n"
        parts.append(_packed(_new_id(), "conversion", refers, "text/html; charset=utf-8", exchange.rendered))
    fingerprint = request.fingerprint() if request.dont_filter else lease.fingerprint
    parts.append(_packed(_new_id(), "metadata", beside, _FIELDS, _metadata(exchange, request, lease, fingerprint)))
    return PageRecords(
        data=b"".join(parts), length=len(first), exchange=exchange, headers=received, digest=digest,
        response=Original(record, exchange.url, date), original=original, fingerprint=fingerprint,
    )  # fmt: skip


def _refers_to(original: Original) -> str:
    lines = (
        f"WARC-Profile: {_REVISIT_PROFILE}\r\nWARC-Refers-To: <urn:uuid:{original.record}>\r\n"
        f"WARC-Refers-To-Target-URI: {original.url}\r\nWARC-Refers-To-Date: {original.date}\r\n"
    )
    return lines + (f"WARC-Refers-To-Filename: {original.filename}\r\n" if original.filename else "")


def _packed(record: str, kind: str, headers: str, content_type: str, block: bytes) -> bytes:
    """A record as a gzip member."""
    head = (
        f"WARC/1.1\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{record}>\r\n{headers}"
        f"WARC-Block-Digest: {payload_digest(block)}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    ).encode()
    bits = (len(head) + len(block)).bit_length()  # a window that holds all of it: making a larger one takes longer
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + min(max(9, bits), 15), min(max(1, bits - 6), 8))
    return packer.compress(head + block + b"\r\n\r\n") + packer.flush()


def _new_id() -> str:
    """A random UUID."""
    digits = chance.token_hex(16)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def payload_digest(body: bytes) -> str:
    """The digest of a payload, as records have it."""
    return "sha1:" + base64.b32encode(sha1(body, usedforsecurity=False).digest()).decode()


def _http_head(line: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The first line and the headers, byte for byte."""
    lines = [line.rstrip().encode("latin-1", "replace"), *[name + b": " + value for name, value in headers], b"", b""]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        head = b"\r\n".join([line.translate(_ONE_LINE) for line in lines])
    return head


def _target(url: str) -> str:
    return url[url.index("/", 8) :]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _metadata(exchange: Exchange, request: Request, lease: LeaseKey, fingerprint: bytes) -> bytes:
    fields = {"fetchTimeMs": str(round(exchange.elapsed * 1000)), "hopsFromSeed": str(request.depth)}
    if request.redirects:
        fields["via"] = request.redirects[-1]
    fields["shoalLease"] = f"{lease.fingerprint.hex()}-{lease.token:x}"
    if fingerprint != lease.fingerprint:  # a request that may be made again has a lease of its own
        fields["shoalRequest"] = fingerprint.hex()
    return _fields(fields)


def _fields(fields: Mapping[str, str]) -> bytes:
    return "".join([f"{name}: {value}\r\n" for name, value in fields.items()]).encode()


# -- reading records


def read_lease(metadata: bytes) -> LeaseKey | None:
    """The lease that a metadata record names; None if it names none."""
    match = _LEASE.search(metadata)
    return None if match is None else LeaseKey(bytes.fromhex(match[1].decode()), int(match[2], 16))


def request_of(metadata: bytes) -> str:
    """The fingerprint of the request that a metadata record names, in hex; empty if it names none."""
    match = _REQUEST.search(metadata) or _LEASE.search(metadata)
    return "" if match is None else match[1].decode()


def run_of(info: bytes) -> tuple[str, float]:
    """The run that a first record names, and when it was created; nothing for a file of another program."""
    match = _RUN.search(info.decode("utf-8", "replace"))
    return ("", 0.0) if match is None else (match[1], float(match[2]))


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


class Damage(NamedTuple):
    """Bytes of a file that are no record."""

    begin: int
    end: int


def scan(file: BinaryIO, end: int) -> Iterator[Member | Damage]:
    """The records of a file up to an offset, also those after damaged ones."""
    at = 0
    while at < end:
        for member in members(file, at, end):
            yield member
            at = member.offset + member.length
        if at < end:
            begin, at = at, _next_record(file, at + 1, end)
            yield Damage(begin, at)


def _next_record(file: BinaryIO, at: int, end: int) -> int:
    """Where the next record begins; the end if there is none."""
    before = b""
    while at < end:
        file.seek(at)
        block = file.read(min(_BLOCK, end - at))
        if not block:  # it became shorter meanwhile
            break
        data = before + block
        start, at = at - len(before), at + len(data) - len(before)
        place = -1
        while (place := data.find(_GZIP, place + 1)) >= 0:
            file.seek(start + place)
            with suppress(zlib.error):
                if zlib.decompressobj(zlib.MAX_WBITS + 16).decompress(file.read(1024), 7) == b"WARC/1.":
                    return start + place
        before = data[-len(_GZIP) + 1 :]
    return end


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
