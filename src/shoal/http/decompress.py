"""Decompresses bodies, with a limit on the result: a small body must not become a huge one."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from importlib import import_module
from types import ModuleType

from shoal.errors import FetchError

try:
    import brotli

    if not hasattr(brotli.Decompressor, "can_accept_more_data"):  # before 1.2 it has no limit for its output
        brotli = None
except ImportError:  # an extra
    brotli = None

zstandard: ModuleType | None
try:
    zstandard = import_module("zstandard")
except ImportError:  # an extra
    zstandard = None

ACCEPTED = ", ".join(["gzip", "deflate", *(["br"] if brotli else []), *(["zstd"] if zstandard else [])])

_STEP = 1 << 18  # bytes of output at a time
_FEED = 1 << 14  # bytes of input at a time, so that little unused input has to be copied
_FEED_ZSTD = 1 << 8  # zstd has no limit for its output: these bytes become 8 MB at most
_MAX_CODINGS = 5
_MAX_MEMBERS = 10_000


class _TruncatedError(zlib.error):
    """The end of the compressed data is missing."""


def decompress(body: bytes, coding: str, limit: int) -> tuple[bytes, tuple[str, ...]]:
    """Undo ``coding``, the value of a Content-Encoding or Transfer-Encoding header, and say what was odd about the
    body. Chunks are joined already.

    If a coding is unknown, the body stays as it is: servers write ``none``, ``utf-8`` and the like. If the end is
    missing, the result is what came before. FetchError if the result is larger than ``limit`` bytes, or if the body is
    damaged, or too short to contain anything.
    """
    names = [part.strip().lower() for part in coding.split(",") if part.strip()]
    if len(names) > _MAX_CODINGS:
        message = f"the body has {len(names)} content codings; at most {_MAX_CODINGS} are allowed"
        raise FetchError(message, kind="bad encoding", retryable=False)
    flags: tuple[str, ...] = ()
    for name in reversed(names):
        if name in ("identity", "chunked") or not body:
            continue
        if (chunks := _chunks(body, name)) is None:
            return body, (*flags, f"unknown content encoding {name[:40]!r}")
        try:
            body, is_whole = _collect(chunks, limit)
        except _ERRORS as exc:
            raise FetchError(f"the body is not valid {name}: {exc}", kind="bad encoding", retryable=True) from exc
        if not is_whole:
            flags = (*flags, f"truncated {name}")
    return body, flags


def _collect(chunks: Iterator[bytes], limit: int) -> tuple[bytes, bool]:
    """The decompressed body, and whether its end was there."""
    parts, size, is_whole = [], 0, True
    try:
        for chunk in chunks:
            size += len(chunk)
            if size > limit:
                message = f"the decompressed body is larger than {limit} bytes (http.max_body_bytes)"
                raise FetchError(message, kind="too large", retryable=False)
            parts.append(chunk)
    except _TruncatedError:
        if not size:
            raise
        is_whole = False
    return parts[0] if len(parts) == 1 else b"".join(parts), is_whole


def _chunks(body: bytes, name: str) -> Iterator[bytes] | None:
    """The decompressed body in portions; None if the coding is unknown."""
    if name in ("gzip", "x-gzip"):
        return gunzip(body)
    if name == "deflate":
        # The standard means zlib's format, but many servers send the raw stream. zlib's first two bytes, as a number,
        # are divisible by 31.
        wrapped = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, 0, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    if name == "br" and brotli is not None:
        return _brotli(body)
    if name == "zstd" and zstandard is not None:
        return _zstd(body)
    return None


def gunzip(body: bytes) -> Iterator[bytes]:
    """Decompress all members, in portions, and ignore the bytes after them, as browsers do. zlib.error if the body is
    damaged."""
    position = 0
    for _ in range(_MAX_MEMBERS):
        position = yield from _inflate(body, position, 16 + zlib.MAX_WBITS)
        if not body.startswith(b"\x1f\x8b", position):
            return
    raise zlib.error(f"more than {_MAX_MEMBERS} members")


def _inflate(body: bytes, position: int, window: int) -> Generator[bytes, None, int]:
    """Decompress the stream that starts at this position, and return the position of its end."""
    engine = zlib.decompressobj(window)
    while not engine.eof and position < len(body):
        data = body[position : position + _FEED]
        yield engine.decompress(data, _STEP)
        position += len(data) - len(engine.unconsumed_tail) - len(engine.unused_data)
    if not engine.eof:
        yield engine.flush()
        if not engine.eof:
            raise _TruncatedError("it is truncated")
    return position


def _brotli(body: bytes) -> Iterator[bytes]:
    engine = brotli.Decompressor()
    yield engine.process(body, output_buffer_limit=_STEP)
    while not engine.is_finished():
        chunk = engine.process(b"", output_buffer_limit=_STEP)
        if not chunk:
            raise _TruncatedError("it is truncated")
        yield chunk


def _zstd(body: bytes) -> Iterator[bytes]:
    """Decompress all frames. Skippable frames have no output."""
    # A decoder keeps the window in memory. The standard asks decoders to support 8 MB.
    assert zstandard is not None
    decompressor = zstandard.ZstdDecompressor(max_window_size=8 << 20)
    position = 0
    for _ in range(_MAX_MEMBERS):
        engine = decompressor.decompressobj()
        while not engine.eof:
            data = body[position : position + _FEED_ZSTD]
            if not data:
                raise _TruncatedError("it is truncated")
            yield engine.decompress(data)
            position += len(data) - len(engine.unused_data)
        if not _is_frame_start(body[position : position + 4]):
            return
    raise zstandard.ZstdError(f"more than {_MAX_MEMBERS} frames")


def _is_frame_start(magic: bytes) -> bool:
    return magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5)


_ERRORS: tuple[type[Exception], ...] = (
    zlib.error,
    *([brotli.error] if brotli else []),
    *([zstandard.ZstdError] if zstandard else []),
)
