"""Content codings are decoded as far as the body goes, and never beyond the limit."""

from __future__ import annotations

import gzip
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import FetchError
from shoal.http.decompress import ACCEPTED, decompress

LIMIT = 1 << 20
PLAIN = b"<p>The same words.</p>" * 100


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def streamed_zstd(data: bytes) -> bytes:
    """Without the size in its header."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstandard.compress),
    "streamed zstd": ("zstd", streamed_zstd),
}
every_packer = pytest.mark.parametrize(("coding", "pack"), PACKERS.values(), ids=PACKERS)


def unpacked(body: bytes, coding: str, limit: int) -> bytes:
    """The body, if nothing about it is odd."""
    plain, flags = decompress(body, coding, limit)
    assert flags == ()
    return plain


def refusal(body: bytes, coding: str, limit: int = LIMIT) -> FetchError:
    with pytest.raises(FetchError) as caught:
        decompress(body, coding, limit)
    return caught.value


def test_all_are_accepted_here() -> None:
    assert ACCEPTED == "gzip, deflate, br, zstd"


@every_packer
@given(data=st.binary(max_size=300), times=st.sampled_from([1, 50, 3000]))
def test_what_was_packed_comes_out(coding: str, pack: Callable[[bytes], bytes], data: bytes, times: int) -> None:
    assert unpacked(pack(data * times), coding, LIMIT) == data * times
    assert unpacked(pack(data * times), f" {coding.upper()} ", LIMIT) == data * times


@every_packer
def test_the_limit_is_exact(coding: str, pack: Callable[[bytes], bytes]) -> None:
    assert unpacked(pack(bytes(LIMIT)), coding, LIMIT) == bytes(LIMIT)
    error = refusal(pack(bytes(LIMIT + 1)), coding)
    assert (error.kind, error.retryable) == ("too large", False)


@every_packer
def test_what_ends_too_early(coding: str, pack: Callable[[bytes], bytes]) -> None:
    plain = b"".join(b"%d %x " % (number, number * 7919) for number in range(100_000))
    body = pack(plain)
    for cut in (1, 2):
        error = refusal(body[:cut], coding)
        assert (error.kind, error.retryable) == ("bad encoding", True)
    for cut in (len(body) // 2, len(body) - 1):
        found, flags = decompress(body[:cut], coding, len(plain))
        assert len(found) > len(plain) // 3
        assert plain.startswith(found)
        assert flags == (f"truncated {coding}",)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@given(junk=st.binary(min_size=1, max_size=100))
def test_junk(coding: str, junk: bytes) -> None:
    with suppress(FetchError):  # and nothing else
        decompress(junk, coding, LIMIT)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_what_was_never_packed(coding: str) -> None:
    assert refusal(b"<html>this was never packed</html>", coding).kind == "bad encoding"


def test_a_body_that_was_changed_on_the_way() -> None:
    body = bytearray(gzip.compress(PLAIN))
    body[-8] ^= 1
    assert refusal(bytes(body), "gzip").kind == "bad encoding"


@pytest.mark.parametrize("coding", ["identity", "", ",", " , identity,", "IDENTITY"])
def test_no_coding(coding: str) -> None:
    assert unpacked(PLAIN, coding, 10) == PLAIN


@pytest.mark.parametrize("coding", ["gzip", "br", "nonsense", "gzip, br"])
def test_an_empty_body_is_one_in_any_coding(coding: str) -> None:
    assert unpacked(b"", coding, LIMIT) == b""


@pytest.mark.parametrize("coding", ["compress", "x-no-such", "utf-8", "\udcff"])
def test_an_unknown_coding(coding: str) -> None:
    assert decompress(PLAIN, coding, 10) == (PLAIN, (f"unknown content encoding {coding!r}",))
    assert decompress(PLAIN, f"gzip, {coding}", 10) == (PLAIN, (f"unknown content encoding {coding!r}",))
    assert decompress(gzip.compress(PLAIN), f"{coding}, gzip", LIMIT)[0] == PLAIN


def test_codings_are_undone_in_the_order_they_were_done() -> None:
    body = zstandard.compress(brotli.compress(gzip.compress(PLAIN)))
    assert unpacked(body, "gzip, br, identity, zstd", LIMIT) == PLAIN
    assert refusal(body, "zstd, br, gzip").kind == "bad encoding"


def test_too_many_codings() -> None:
    body = PLAIN
    for _ in range(5):
        body = gzip.compress(body)
    assert unpacked(body, ",".join(["gzip"] * 5), LIMIT) == PLAIN
    assert "has 6 content codings" in str(refusal(gzip.compress(body), ",".join(["gzip"] * 6)))


# -- several streams in one body


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_all_members_count(coding: str, pack: Callable[[bytes], bytes]) -> None:
    body = pack(b"one ") + pack(b"") + pack(bytes(100_000)) + pack(b"two")
    assert unpacked(body, coding, LIMIT) == b"one " + bytes(100_000) + b"two"
    assert unpacked(body + b"\0\0 padding", coding, LIMIT) == b"one " + bytes(100_000) + b"two"
    assert decompress(body[:-1], coding, LIMIT)[1] == (f"truncated {coding}",)
    assert refusal(body, coding, 100_000).kind == "too large"


def test_frames_to_be_skipped() -> None:
    skipped = b"\x5a\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"junk"
    packed = zstandard.compress(PLAIN)
    assert unpacked(skipped + packed + skipped + packed + skipped, "zstd", LIMIT) == PLAIN * 2


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_too_many_members(coding: str, pack: Callable[[bytes], bytes]) -> None:
    started = time.process_time()
    assert refusal(pack(b"") * 500_000, coding).kind == "bad encoding"
    assert time.process_time() - started < 3


# -- bombs


def zeros(packer: object, take: str, megabytes: int) -> bytes:
    """So many megabytes of zeros."""
    feed: Callable[[bytes], bytes] = getattr(packer, take)
    end: Callable[[], bytes] = getattr(packer, "finish", None) or getattr(packer, "flush")  # noqa: B009
    return b"".join(feed(bytes(1 << 20)) for _ in range(megabytes)) + end()


@pytest.mark.parametrize(
    ("coding", "packer", "take"),
    [
        ("gzip", lambda: zlib.compressobj(9, wbits=31), "compress"),
        ("deflate", lambda: zlib.compressobj(9), "compress"),
        ("br", lambda: brotli.Compressor(quality=5), "process"),
        ("zstd", lambda: zstandard.ZstdCompressor(level=3).compressobj(), "compress"),
    ],
)
def test_a_bomb_stops_early(coding: str, packer: Callable[[], object], take: str) -> None:
    body = zeros(packer(), take, 300)
    tracemalloc.start()
    started = time.process_time()
    try:
        assert refusal(body, coding).kind == "too large"
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
        assert time.process_time() - started < 1
    finally:
        tracemalloc.stop()


def test_a_bomb_in_a_bomb() -> None:
    body = gzip.compress(gzip.compress(bytes(200 << 20)))
    assert len(body) < 2000
    assert refusal(body, "gzip, gzip").kind == "too large"


def test_a_window_larger_than_the_standard_asks_for() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    body = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert refusal(body.compress(PLAIN) + body.flush(), "zstd").kind == "bad encoding"


def test_the_time_grows_with_the_body_and_no_faster() -> None:
    """What is left of the input must not be copied at each step."""
    stored = zlib.compressobj(0, wbits=31)
    body = stored.compress(bytes(64 << 20)) + stored.flush()
    started = time.process_time()
    assert len(unpacked(body, "gzip", 64 << 20)) == 64 << 20
    assert time.process_time() - started < 2
