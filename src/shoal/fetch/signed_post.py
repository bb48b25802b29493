"""Sends a signed message to a webhook."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping

from msgspec import Struct

from shoal.errors import FetchError, RequestError
from shoal.http import Request
from shoal.ports import Fetcher

SIGNATURE = "X-Shoal-Signature"


class Undelivered(Struct, frozen=True):
    """Why a message was not delivered, and whether a retry can help."""

    reason: str
    retryable: bool


def sign(secret: str, at: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 of the time, a dot and the body. The receiver can refuse old messages by the
    time."""
    return f"t={at},v1={hmac.new(secret.encode(), b'%d.' % at + body, hashlib.sha256).hexdigest()}"


async def post_signed(
    fetcher: Fetcher, url: str, secret: str, body: bytes, *, timeout: float, headers: Mapping[str, str] | None = None
) -> Undelivered | None:
    """Send a JSON body once. None if the receiver accepted it. The address guard is that of the fetcher."""
    signed = {
        "Content-Type": "application/json",
        SIGNATURE: sign(secret, int(time.time()), body),
        **(headers or {}),
    }
    try:
        response = await fetcher.fetch(Request(url, method="POST", body=body, headers=signed, timeout=timeout))
    except RequestError as exc:
        return Undelivered(str(exc), retryable=False)
    except FetchError as exc:
        return Undelivered(str(exc), exc.retryable)
    if response.ok:
        return None
    return Undelivered(f"the receiver responded with HTTP {response.status}", retryable=True)
