"""Content codings, undone with a limit on what comes out: a small body must not become a huge one."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator

from shoal.errors import FetchError

try:
    import brotli

    if not hasattr(brotli.Decompressor, "can_accept_more_data"):  # before 1.2 it could not be told when to stop
        brotli = None
except ImportError:  # an extra
    brotli = None

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None  # type: ignore[assignment]

ACCEPTED = ", ".join(["gzip", "deflate", *(["br"] if brotli else []), *(["zstd"] if zstandard else [])])

_STEP = 1 << 18  # bytes of output at a time
_FEED = 1 << 14  # bytes of input at a time, so that what is left over need not be copied again and again
_FEED_ZSTD = 1 << 8  # zstd can't be told when to stop: up to 8 MB come of these
_MOST_CODINGS = 5
_MOST_MEMBERS = 10_000


def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """The body as it was before ``coding`` (a Content-Encoding header), at most ``limit`` bytes of it.

    FetchError when it would be more, is broken, or is in a coding that is not known here.
    """
    names = [part.strip().lower() for part in coding.split(",") if part.strip()]
    if len(names) > _MOST_CODINGS:
        raise FetchError(f"the body has {len(names)} content codings", kind="bad encoding", retryable=False)
    for name in reversed(names):
        if name == "identity" or not body:
            continue
        try:
            body = _collect(_chunks(body, name), limit)
        except _ERRORS as exc:
            raise FetchError(f"the body is no valid {name}: {exc}", kind="bad encoding", retryable=True) from exc
    return body


def _collect(chunks: Iterator[bytes], limit: int) -> bytes:
    parts, size = [], 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise FetchError(
                f"the body unpacks to more than {limit} bytes (http.max_body_bytes)", kind="too large", retryable=False
            )
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _chunks(body: bytes, name: str) -> Iterator[bytes]:
    if name in ("gzip", "x-gzip"):
        return _gzip(body)
    if name == "deflate":
        # Meant is zlib's format; many send the bare stream. The two first bytes of zlib's are divisible by 31.
        wrapped = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, 0, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    if name == "br" and brotli is not None:
        return _brotli(body)
    if name == "zstd" and zstandard is not None:
        return _zstd(body)
    raise FetchError(f"the body has the unknown content coding {name!r}", kind="bad encoding", retryable=False)


def _gzip(body: bytes) -> Iterator[bytes]:
    """All members, and nothing of what stands behind them: browsers bear that too."""
    position = 0
    for _ in range(_MOST_MEMBERS):
        position = yield from _inflate(body, position, 16 + zlib.MAX_WBITS)
        if not body.startswith(b"\x1f\x8b", position):
            return
    raise zlib.error(f"it has more than {_MOST_MEMBERS} members")


def _inflate(body: bytes, position: int, window: int) -> Generator[bytes, None, int]:
    """The stream that begins at this position; returns where it ended."""
    engine = zlib.decompressobj(window)
    while not engine.eof and position < len(body):
        data = body[position : position + _FEED]
        yield engine.decompress(data, _STEP)
        position += len(data) - len(engine.unconsumed_tail) - len(engine.unused_data)
    if not engine.eof:
        rest = engine.flush()
        if not engine.eof:
            raise zlib.error("it ends too early")
        yield rest
    return position


def _brotli(body: bytes) -> Iterator[bytes]:
    engine = brotli.Decompressor()
    yield engine.process(body, output_buffer_limit=_STEP)
    while not engine.is_finished():
        chunk = engine.process(b"", output_buffer_limit=_STEP)
        if not chunk:
            raise brotli.error("it ends too early")
        yield chunk


def _zstd(body: bytes) -> Iterator[bytes]:
    """All frames, of which some may be there only to be skipped."""
    # The window is what a decoder must hold in memory; 8 MB is what the standard asks decoders to bear.
    decompressor = zstandard.ZstdDecompressor(max_window_size=8 << 20)
    position = 0
    for _ in range(_MOST_MEMBERS):
        engine = decompressor.decompressobj()
        while not engine.eof:
            data = body[position : position + _FEED_ZSTD]
            if not data:
                raise zstandard.ZstdError("it ends too early")
            yield engine.decompress(data)
            position += len(data) - len(engine.unused_data)
        if not _begins_frame(body[position : position + 4]):
            return
    raise zstandard.ZstdError(f"it has more than {_MOST_MEMBERS} frames")


def _begins_frame(magic: bytes) -> bool:
    return magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5)


_ERRORS: tuple[type[Exception], ...] = (
    zlib.error,
    *([brotli.error] if brotli else []),
    *([zstandard.ZstdError] if zstandard else []),
)
