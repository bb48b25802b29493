"""Content codings, undone with a limit on what comes out: a small body must not become a huge one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

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

_STEP = 1 << 20  # bytes of output at a time: what is left of the input is copied at each
_FEED = 1 << 10  # bytes of input at a time, where a library can't be told when to stop


def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """The body as it was before ``coding`` (a Content-Encoding header), at most ``limit`` bytes of it.

    FetchError when it would be more, is broken, or is in a coding that is not known here.
    """
    for name in reversed([part.strip().lower() for part in coding.split(",") if part.strip()]):
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
        return _inflate(body, 16 + zlib.MAX_WBITS)
    if name == "deflate":
        # Meant is zlib's format; many send the bare stream. The two first bytes of zlib's are divisible by 31.
        wrapped = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    if name == "br" and brotli is not None:
        return _brotli(body)
    if name == "zstd" and zstandard is not None:
        return _zstd(body)
    raise FetchError(f"the body has the unknown content coding {name!r}", kind="bad encoding", retryable=False)


def _inflate(body: bytes, window: int) -> Iterator[bytes]:
    engine = zlib.decompressobj(window)
    while body and not engine.eof:
        yield engine.decompress(body, _STEP)
        body = engine.unconsumed_tail
    if not engine.eof:
        rest = engine.flush()
        if not engine.eof:
            raise zlib.error("it ends too early")
        yield rest


def _brotli(body: bytes) -> Iterator[bytes]:
    engine = brotli.Decompressor()
    yield engine.process(body, output_buffer_limit=_STEP)
    while not engine.is_finished():
        chunk = engine.process(b"", output_buffer_limit=_STEP)
        if not chunk:
            raise brotli.error("it ends too early")
        yield chunk


def _zstd(body: bytes) -> Iterator[bytes]:
    # The window is what a decoder must hold in memory; 8 MB is what the standard asks decoders to bear.
    engine = zstandard.ZstdDecompressor(max_window_size=8 << 20).decompressobj()
    for start in range(0, len(body), _FEED):
        yield engine.decompress(body[start : start + _FEED])
        if engine.eof:
            return
    raise zstandard.ZstdError("it ends too early")


_ERRORS: tuple[type[Exception], ...] = (
    zlib.error,
    *([brotli.error] if brotli else []),
    *([zstandard.ZstdError] if zstandard else []),
)
