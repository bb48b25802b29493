"""The message that a batch is done: signed, so that its receiver can tell who sent it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time

import msgspec

from shoal.batch.session import Session
from shoal.batch.settings import Webhook
from shoal.errors import FetchError, RequestError
from shoal.http import Request
from shoal.ports import Claim, Fetcher

log = logging.getLogger("shoal.batch")

SIGNATURE = "X-Shoal-Signature"
_PAUSES = (1.0, 5.0, 25.0)  # seconds before another attempt
_TIMEOUT = 10.0
_ROLE = "webhook"
_MARGIN = 5.0  # seconds that the role is kept beyond an attempt


def sign(secret: str, at: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 of the time, a dot and the body. The time lets the receiver refuse old ones."""
    return f"t={at},v1={hmac.new(secret.encode(), b'%d.' % at + body, hashlib.sha256).hexdigest()}"


async def send_webhook(fetcher: Fetcher, session: Session) -> bool:
    """Tell whoever wants to know that a session is over; once, whatever number of processes try. A receiver that does
    not answer well is tried again. False while another process is about it, or was killed while it was."""
    webhook = session.settings.webhook
    if webhook is None:
        return True
    claim = await session.frontier.claim(_ROLE, _TIMEOUT + _MARGIN)
    if claim is None:
        return any(role.role == _ROLE and role.finished for role in await session.frontier.roles())
    settled = False
    try:
        why = await _deliver(fetcher, session, webhook, claim)
        settled = True
    finally:
        await session.frontier.relinquish(claim, finished=settled)
    if why:
        log.warning("the webhook of session %s was not delivered: %s", session.id, why)
    return True


async def _deliver(fetcher: Fetcher, session: Session, webhook: Webhook, claim: Claim) -> str:
    """Why it could not be, or nothing. The role is kept from one attempt to the next, and no longer."""
    message = {
        "event": "batch.done",
        "session_id": session.id,
        "state": await session.state(),
        "stats": await session.progress(),
    }
    body = msgspec.json.encode(message)
    why = ""
    for pause in (0.0, *_PAUSES):
        if not await session.frontier.advance(claim, b"", pause + _TIMEOUT + _MARGIN):
            return "another process has taken over"
        await asyncio.sleep(pause)
        try:
            headers = {"Content-Type": "application/json", SIGNATURE: sign(webhook.secret, int(time.time()), body)}
            answer = await fetcher.fetch(
                Request(webhook.url, method="POST", body=body, headers=headers, timeout=_TIMEOUT)
            )
        except RequestError as exc:
            return str(exc)
        except FetchError as exc:
            why = str(exc)
            if not exc.retryable:
                break
        else:
            if answer.ok:
                return ""
            why = f"it answered {answer.status}"
    return why
