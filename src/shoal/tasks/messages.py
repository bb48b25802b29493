"""A lease as text, for the way through the broker. Data only: nothing in it is executed."""

from __future__ import annotations

from base64 import b64decode, b64encode

import msgspec
from msgspec import Struct

from shoal.errors import RequestError
from shoal.http import Request
from shoal.ports import Lease


class _Travelling(Struct, array_like=True):
    """All of it but the deadline, which is one of the sender's clock."""

    request: Request
    fingerprint: bytes
    token: int
    attempt: int
    host: str
    learned_delay: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Travelling).decode


def pack(lease: Lease) -> str:
    travelling = _Travelling(
        lease.request, lease.fingerprint, lease.token, lease.attempt, lease.host, lease.learned_delay
    )
    return b64encode(_encode(travelling)).decode()


def unpack(text: str) -> Lease:
    """It is good for nothing but to be reissued. RequestError for what is none."""
    try:
        found = _decode(b64decode(text, validate=True))
    except (ValueError, msgspec.MsgspecError) as exc:
        raise RequestError(f"not a lease: {exc}") from exc
    return Lease(found.request, found.fingerprint, found.token, found.attempt, found.host, 0.0, found.learned_delay)
