"""The records of one page: response or revisit, request, rendered page, metadata. Each is a gzip member of its own.

The metadata record is the last one of a page. It names the lease of the page, so that a later process can find out
whether the page is done.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha1
from io import BytesIO
from typing import TYPE_CHECKING

from msgspec import Struct

from shoal.errors import ConfigError
from shoal.http import Request
from shoal.http.exchange import Exchange
from shoal.ports import LeaseKey
from shoal.suggestions import pip_install

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord
    from warcio.statusandheaders import StatusAndHeaders

_LEASE_FIELD = "shoalLease"
_LEASE = re.compile(rb"^%s: ([0-9a-f]{32})-([0-9a-f]+)\r$" % _LEASE_FIELD.encode(), re.MULTILINE)
_ONE_LINE = bytes(32 if code in b"\r\n" else code for code in range(256))
_LEVEL = 6
"""The level of compression. Level 9 takes far longer and saves one percent."""
_SECRET = frozenset({b"proxy-authorization"})
"""Headers for a proxy. They were not sent to the site."""
_ORIGINAL = b"X-Orig-"
"""The prefix for the name of a header that does not describe the body in the record."""


class Original(Struct, frozen=True):
    """A stored response that a later one with the same payload refers to."""

    record_id: str
    url: str
    date: str


class PageRecords(Struct, frozen=True):
    """The compressed records of a page."""

    data: bytes
    digest: str
    """The digest of the payload."""
    response: Original


def check_installed() -> None:
    """ConfigError if the library that writes WARC files is missing."""
    try:
        import warcio  # noqa: F401
    except ImportError:
        raise ConfigError(f'"warc.folder" is set, but warcio is not installed: {pip_install("warc")}') from None


class RecordMaker:
    """Makes records. One thread at a time may use it."""

    def __init__(self) -> None:
        from warcio.warcwriter import WARCWriter

        self._buffer = BytesIO()
        self._writer = WARCWriter(self._buffer, gzip=False, warc_version="1.1")

    def info(self, filename: str, fields: Mapping[str, str]) -> bytes:
        """The first record of a file."""
        return self._packed(self._writer.create_warcinfo_record(filename, fields))

    def page(
        self, exchange: Exchange, request: Request, lease: LeaseKey, originals: Mapping[str, Original]
    ) -> PageRecords:
        """``originals``: stored responses by the digest of their payload."""
        date = _date(exchange.began)
        digest = "sha1:" + base64.b32encode(sha1(exchange.body, usedforsecurity=False).digest()).decode()
        original = originals.get(digest) if exchange.body else None
        common = {"WARC-Date": date}
        if exchange.address:
            common["WARC-IP-Address"] = exchange.address
        if exchange.truncated:
            common["WARC-Truncated"] = "unspecified"
        head = _http_head(f"HTTP/{exchange.version} {exchange.status} {exchange.reason}", _described(exchange))
        if original is None:
            named = {**common, "WARC-Payload-Digest": digest}
            response = self._record("response", exchange.url, named, head, exchange.body)
        else:
            response = self._revisit(exchange.url, common, head, digest, original)
        record_id = response.rec_headers.get_header("WARC-Record-ID")
        sent = [(name, value) for name, value in exchange.sent if name.lower() not in _SECRET]
        asked = _http_head(f"{exchange.method} {_target(exchange.url)} HTTP/1.1", sent)
        beside = {"WARC-Date": date, "WARC-Concurrent-To": record_id}
        records = [response, self._record("request", exchange.url, beside, asked, exchange.sent_body)]
        if exchange.rendered is not None:
            refers = {"WARC-Date": date, "WARC-Refers-To": record_id, "Content-Type": "text/html; charset=utf-8"}
            records.append(self._record("conversion", exchange.url, refers, None, exchange.rendered))
        records.append(self._record("metadata", exchange.url, beside, None, _metadata(exchange, request, lease)))
        data = b"".join(map(self._packed, records))
        return PageRecords(data, digest, original or Original(record_id, exchange.url, date))

    def _record(
        self, kind: str, url: str, headers: Mapping[str, str], head: StatusAndHeaders | None, body: bytes
    ) -> ArcWarcRecord:
        return self._writer.create_warc_record(
            url, kind, payload=BytesIO(body), length=len(body), warc_headers_dict=headers, http_headers=head
        )

    def _revisit(
        self, url: str, headers: Mapping[str, str], head: StatusAndHeaders, digest: str, original: Original
    ) -> ArcWarcRecord:
        named = {**headers, "WARC-Refers-To": original.record_id}
        return self._writer.create_revisit_record(
            url, digest, original.url, original.date, http_headers=head, warc_headers_dict=named
        )

    def _packed(self, record: ArcWarcRecord) -> bytes:
        """The record as a gzip member."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self._writer.write_record(record)
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS + 16)
        return packer.compress(self._buffer.getbuffer()) + packer.flush()


def _http_head(line: str, headers: Sequence[tuple[bytes, bytes]]) -> StatusAndHeaders:
    """The first line and the headers, byte for byte: the library would change what is not ASCII."""
    from warcio.statusandheaders import StatusAndHeaders

    lines = [line.rstrip().encode("latin-1", "replace"), *(name + b": " + value for name, value in headers)]
    head = StatusAndHeaders(line, [])
    head.headers_buff = b"".join(each.translate(_ONE_LINE) + b"\r\n" for each in lines) + b"\r\n"
    head.compute_headers_buffer = lambda header_filter=None: None
    return head


def _described(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """The headers of the response. Those that do not describe the body in the record get another name."""
    return [(_ORIGINAL + name if name.lower() in exchange.undone else name, value) for name, value in exchange.received]


def _target(url: str) -> str:
    return url[url.index("/", 8) :]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _metadata(exchange: Exchange, request: Request, lease: LeaseKey) -> bytes:
    fields = {"fetchTimeMs": str(round(exchange.elapsed * 1000)), "hopsFromSeed": str(request.depth)}
    if request.redirects:
        fields["via"] = request.redirects[-1]
    fields[_LEASE_FIELD] = f"{lease.fingerprint.hex()}-{lease.token:x}"
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()


def read_lease(metadata: bytes) -> LeaseKey | None:
    """The lease that a metadata record names; None if it names none."""
    found = _LEASE.search(metadata)
    return None if found is None else LeaseKey(bytes.fromhex(found[1].decode()), int(found[2], 16))
