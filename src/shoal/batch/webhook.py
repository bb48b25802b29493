"""Sends a signed message to the caller's webhook when a batch ends."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from shoal.batch.results import SessionResults
from shoal.batch.session import Session
from shoal.batch.settings import Webhook
from shoal.fetch.signed_post import post_signed
from shoal.ports import Claim, Fetcher

log = logging.getLogger("shoal.batch")

_RETRY_DELAYS = (1.0, 5.0, 25.0)  # seconds
_TIMEOUT = 10.0
_ROLE = "webhook"
_ROLE_MARGIN = 5.0  # seconds that the role lasts beyond an attempt


async def send_webhook(fetcher: Fetcher, session: Session) -> bool:
    """Send the webhook of a session that is over, with retries. Only one process sends it, however many try. False
    while another process holds the role, even if it has died: try again later."""
    webhook = session.settings.webhook
    if webhook is None:
        return True
    claim = await session.frontier.claim(_ROLE, _TIMEOUT + _ROLE_MARGIN)
    if claim is None:
        return any(role.role == _ROLE and role.finished for role in await session.frontier.roles())
    is_done = False
    try:
        error = await _deliver(fetcher, session, webhook, claim)
        is_done = True
    finally:
        await session.frontier.relinquish(claim, finished=is_done)
    if error:
        log.warning("the webhook of session %s was not delivered: %s", session.id, error)
    return True


async def _deliver(fetcher: Fetcher, session: Session, webhook: Webhook, claim: Claim) -> str:
    """Deliver the message. Returns why that failed, or an empty string. Each attempt renews the role."""
    message = {
        "event": "batch.done",
        "session_id": session.id,
        "state": await session.state(),
        "stats": (await SessionResults(session).read_all()).stats,  # the same as in the answer
    }
    body = msgspec.json.encode(message)
    error = ""
    for delay in (0.0, *_RETRY_DELAYS):
        if not await session.frontier.advance(claim, b"", delay + _TIMEOUT + _ROLE_MARGIN):
            return "another process has taken over"
        await asyncio.sleep(delay)
        failure = await post_signed(fetcher, webhook.url, webhook.secret, body, timeout=_TIMEOUT)
        if failure is None:
            return ""
        error = failure.reason
        if not failure.retryable:
            break
    return error
