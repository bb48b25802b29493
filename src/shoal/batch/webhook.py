"""The message that a batch is done: signed, so that its receiver can tell who sent it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time

import msgspec

from shoal.batch.session import Session
from shoal.errors import FetchError, RequestError
from shoal.http import Request
from shoal.ports import Fetcher

log = logging.getLogger("shoal.batch")

SIGNATURE = "X-Shoal-Signature"
_PAUSES = (1.0, 5.0, 25.0)  # seconds before another attempt
_TIMEOUT = 10.0


def sign(secret: str, at: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 of the time, a dot and the body. The time lets the receiver refuse old ones."""
    return f"t={at},v1={hmac.new(secret.encode(), b'%d.' % at + body, hashlib.sha256).hexdigest()}"


async def send_webhook(fetcher: Fetcher, session: Session) -> None:
    """Tell whoever wants to know that a session is over. A receiver that does not answer well is tried again."""
    webhook = session.settings.webhook
    if webhook is None:
        return
    message = {
        "event": "batch.done",
        "session_id": session.id,
        "state": await session.state(),
        "stats": await session.progress(),
    }
    body = msgspec.json.encode(message)
    why = ""
    for pause in (0.0, *_PAUSES):
        await asyncio.sleep(pause)
        try:
            headers = {"Content-Type": "application/json", SIGNATURE: sign(webhook.secret, int(time.time()), body)}
            answer = await fetcher.fetch(
                Request(webhook.url, method="POST", body=body, headers=headers, timeout=_TIMEOUT)
            )
        except RequestError as exc:
            why = str(exc)
            break
        except FetchError as exc:
            why = str(exc)
            if not exc.retryable:
                break
        else:
            if answer.ok:
                return
            why = f"it answered {answer.status}"
    log.warning("the webhook of session %s was not delivered: %s", session.id, why)
