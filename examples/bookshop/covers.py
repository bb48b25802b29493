"""The covers of the books: small PNG images, one colour each."""

from __future__ import annotations

import struct
import zlib

HEADERS = (("Content-Type", "image/png"),)
_WIDTH, _HEIGHT = 120, 180


def cover(colour: bytes) -> bytes:
    """A cover in a colour of three bytes: red, green, blue."""
    rows = (b"\0" + colour * _WIDTH) * _HEIGHT  # each row starts with the type of its filter
    head = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
