"""Heads and framing of HTTP/1.1 messages, for the gateway. It does no I/O.

Bad input raises ValueError with a short reason. Messages are forwarded as they were parsed, not as they arrived, so the
other side can't read them differently: sites that do not trust each other share connections.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

Headers = list[tuple[bytes, bytes]]

UNTIL_CLOSE = -1
"""The length of a body that ends with its connection."""
CHUNKED = -2
"""The length of a body in chunks."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::([0-9]{0,5}))?")
_HTTP_URL = re.compile(r"http://([^/?#]*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n\x00]*)?[ \t]*")
_PLAIN_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_MAX_CHUNK_LINE = 4096
_MAX_TRAILER = 16384
# Headers for one connection, or for a proxy. They are not forwarded.
_HOP_BY_HOP = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"transfer-encoding",
     b"content-length", b"proxy-authorization", b"proxy-authenticate", b"proxy-authentication-info", b"proxy-status")
)  # fmt: skip


class RequestHead(NamedTuple):
    method: bytes
    target: str
    headers: Headers
    persistent: bool
    length: int
    declared: int | None


class ResponseHead(NamedTuple):
    status: int
    reason: bytes
    headers: Headers
    persistent: bool
    length: int
    declared: int | None


def parse_request(head: bytes) -> RequestHead:
    lines = _lines(head)
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise ValueError("not an HTTP/1.1 request")
    headers = _headers(lines)
    method, target, version = match.groups()
    coding, lengths = _framing(headers)
    if coding and (lengths or coding != b"chunked" or version == b"0"):
        raise ValueError("ambiguous length of the body")
    declared = _length(lengths)
    length = CHUNKED if coding else declared or 0
    return RequestHead(method, target.decode("ascii"), headers, _persistent(headers, version), length, declared)


def parse_response(head: bytes, *, to_head: bool = False) -> ResponseHead:
    """``to_head``: it answers a HEAD request, so it has no body."""
    lines = _lines(head)
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise ValueError("not an HTTP/1.1 response")
    headers = _headers(lines)
    version, status = match[1], int(match[2])
    persistent = _persistent(headers, version)
    coding, lengths = _framing(headers)
    declared = None if coding else _length(lengths)
    if to_head or status < 200 or status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        length = 0
    elif coding:
        if coding != b"chunked" or version == b"0":
            raise ValueError("unknown transfer coding")
        length = CHUNKED
        persistent = persistent and not lengths  # the sender declared the length twice
    else:
        length = UNTIL_CLOSE if declared is None else declared
    persistent = persistent and length != UNTIL_CLOSE
    return ResponseHead(status, match[3] or b"", headers, persistent, length, declared)


def _lines(head: bytes) -> list[bytes]:
    return [line.removesuffix(b"\r") for line in head.lstrip(b"\r\n").rstrip(b"\r\n").split(b"\n")]


def _headers(lines: Sequence[bytes]) -> Headers:
    """Lines that are not headers are dropped."""
    headers: Headers = []
    for line in lines[1:]:
        if _CONTROL.search(line):
            raise ValueError("a control character in a header")
        if line[:1] in (b" ", b"\t"):
            if headers:  # a header in several lines
                name, value = headers[-1]
                headers[-1] = (name, value + b" " + line.strip(b" \t"))
            continue
        name, colon, value = line.partition(b":")
        if colon and _TOKEN.fullmatch(name):
            headers.append((name, value.strip(b" \t")))
    return headers


def _framing(headers: Headers) -> tuple[bytes, list[bytes]]:
    """The transfer coding, and all lengths that are declared."""
    coding = b", ".join(value for name, value in headers if name.lower() == b"transfer-encoding")
    lengths = [
        part.strip() for name, value in headers if name.lower() == b"content-length" for part in value.split(b",")
    ]
    return coding.lower().strip(), lengths


def _length(lengths: list[bytes]) -> int | None:
    if not lengths:
        return None
    if not all(map(_LENGTH.fullmatch, lengths)) or len(set(map(int, lengths))) != 1:
        raise ValueError("ambiguous length of the body")
    return int(lengths[0])


def _options(headers: Headers) -> set[bytes]:
    """The options in the Connection headers."""
    return {
        option.strip().lower()
        for name, value in headers
        if name.lower() in (b"connection", b"proxy-connection")
        for option in value.split(b",")
    }


def _persistent(headers: Headers, version: bytes) -> bool:
    options = _options(headers)
    return b"close" not in options and (version == b"1" or b"keep-alive" in options)


def authority(text: str, default_port: int) -> tuple[str, int]:
    """The host, without brackets, and the port."""
    match = _AUTHORITY.fullmatch(text)
    if match is None or len(match[1]) > 255:
        raise ValueError("invalid host or port")
    port = int(match[2] or default_port)
    if not 0 < port < 65536:
        raise ValueError("invalid host or port")
    return match[1].strip("[]"), port


def absolute_target(target: str) -> tuple[str, str]:
    """The authority and the path of an ``http://`` URL."""
    match = _HTTP_URL.match(target)
    if match is None:
        raise ValueError("not an http:// URL")
    path = target[match.end() :].partition("#")[0]
    return match[1], path if path.startswith("/") else "/" + path


def forwarded(head: RequestHead | ResponseHead) -> Headers:
    """The headers for the next connection, with the framing that was understood."""
    dropped = _HOP_BY_HOP | _options(head.headers)
    headers = [header for header in head.headers if header[0].lower() not in dropped]
    if head.length == CHUNKED:
        headers.append((b"Transfer-Encoding", b"chunked"))
    elif head.declared is not None:
        headers.append((b"Content-Length", b"%d" % head.declared))
    return headers


def written(first_line: bytes, headers: Headers) -> bytes:
    return b"".join([first_line, b"\r\n", *(b"%b: %b\r\n" % header for header in headers), b"\r\n"])


class Chunks:
    """Follows a body in chunks, to find its end. It accepts only what every receiver reads in the same way."""

    def __init__(self) -> None:
        self.done = False
        self._left = 0  # of the chunk, with its line end
        self._line = b""
        self._trailer: int | None = None

    def feed(self, data: bytes) -> int:
        """How many of these bytes belong to the body."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left > 2:
                step = min(self._left - 2, size - at)
                self._left -= step
                at += step
                continue
            if self._left:
                expected = b"\r\n"[2 - self._left :]
                part = data[at : at + self._left]
                if not expected.startswith(part):
                    raise ValueError("invalid chunk")
                self._left -= len(part)
                at += len(part)
                continue
            if not self._line and self._trailer is None:
                at = _after_whole_chunks(data, at)
            end = data.find(b"\n", at)
            line = self._line + data[at : end if end >= 0 else size]
            if len(line) > _MAX_CHUNK_LINE:
                raise ValueError("invalid chunk")
            if end < 0:
                self._line = line
                return size
            self._line = b""
            at = end + 1
            self._take_line(line)
        return at

    def _take_line(self, line: bytes) -> None:
        if line[-1:] != b"\r":
            raise ValueError("invalid chunk")
        line = line[:-1]
        if self._trailer is not None:
            self._trailer += len(line)
            if self._trailer > _MAX_TRAILER or b"\r" in line:
                raise ValueError("invalid trailer")
            self.done = not line
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise ValueError("invalid chunk")
        size = int(match[1], 16)
        if size:
            self._left = size + 2
        else:
            self._trailer = 0


def _after_whole_chunks(data: bytes, at: int) -> int:
    """The position after all chunks that are complete and have no extension: a site may send thousands of tiny ones."""
    while (match := _PLAIN_CHUNK_LINE.match(data, at)) is not None:
        size = int(match[1], 16)
        end = match.end() + size + 2
        if not size or data[end - 2 : end] != b"\r\n":
            break
        at = end
    return at
