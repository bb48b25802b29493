"""Sessions of the dashboard: a signed cookie for people who logged in with a token.

The cookie names the token and when it expires. All servers with the same tokens accept it. It ends when a token is
changed, and when its session ends (`shoal.server.logins`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping

from msgspec import Struct

COOKIE = "shoal_session"
LIFETIME = 3600.0
"""Seconds. A session that is used is renewed."""
_RENEW_AFTER = LIFETIME / 4


class DashboardSession(Struct, frozen=True):
    """The session of somebody who logged in."""

    name: str
    """The name of the token; empty for the main one."""
    expires_at: float
    session_id: str
    began_at: float
    csrf: str
    """What a request that changes something must repeat in its header ``X-CSRF-Token``."""

    @property
    def is_due(self) -> bool:
        """Whether the cookie should be renewed."""
        return time.time() > self.expires_at - LIFETIME + _RENEW_AFTER


class SessionCookies:
    """Makes and checks the cookies."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        secret = json.dumps(sorted(tokens.items())).encode()
        self._key = hashlib.blake2b(secret, key=b"shoal dashboard session 2", digest_size=32).digest()

    def make(self, name: str) -> str:
        """The value of the cookie of a new session."""
        return self._make(name, secrets.token_urlsafe(16), time.time())

    def renew(self, session: DashboardSession) -> str:
        """The value of a cookie that expires later."""
        return self._make(session.name, session.session_id, session.began_at)

    def _make(self, name: str, session_id: str, began_at: float) -> str:
        content = json.dumps([name, round(time.time() + LIFETIME), session_id, began_at]).encode()
        return f"{_encoded(content)}.{_encoded(self._sign(content))}"

    def read(self, value: str) -> DashboardSession | None:
        """The session of a cookie; None if it is expired or was not made by `make`."""
        if len(value) > 1000:
            return None
        content, _, signature = value.partition(".")
        try:
            decoded, signed = _decoded(content), _decoded(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(self._sign(decoded), signed):
            return None
        name, expires_at, session_id, began_at = json.loads(decoded)
        if time.time() >= expires_at:
            return None
        csrf = _encoded(self._sign(b"csrf " + session_id.encode())[:16])
        return DashboardSession(name, expires_at, session_id, began_at, csrf)

    def _sign(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
