"""Logins to the dashboard: signed cookies, and which sessions have ended. All servers of a store share this, so a
logout counts everywhere."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from shoal.errors import StoreAwayError
from shoal.ports import Documents
from shoal.ports.documents import StoredValue
from shoal.system import chance, clock

# -- the cookie
#
# The cookie names the token and when it expires. All servers with the same tokens accept it. It ends when a token
# is changed, and when its session ends (`shoal.api.server.logins`).


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
        return clock.time() > self.expires_at - LIFETIME + _RENEW_AFTER


class SessionCookies:
    """Makes and checks the cookies."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        secret = json.dumps(sorted(tokens.items())).encode()
        self._key = hashlib.blake2b(secret, key=b"shoal dashboard session 2", digest_size=32).digest()

    def make(self, name: str) -> str:
        """The value of the cookie of a new session."""
        return self._make(name, chance.token_urlsafe(16), clock.time())

    def renew(self, session: DashboardSession) -> str:
        """The value of a cookie that expires later."""
        return self._make(session.name, session.session_id, session.began_at)

    def _make(self, name: str, session_id: str, began_at: float) -> str:
        content = json.dumps([name, round(clock.time() + LIFETIME), session_id, began_at]).encode()
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
        if clock.time() >= expires_at:
            return None
        csrf = _encoded(self._sign(b"csrf " + session_id.encode())[:16])
        return DashboardSession(name, expires_at, session_id, began_at, csrf)

    def _sign(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


_KEY: Final = "dashboard/ended-logins"
_FRESH = 1.0  # seconds until another server notices a logout
_TIMEOUT = 2.0  # seconds for the store
_KEPT = LIFETIME + 600  # seconds: by then the cookies of a session have expired, also by a clock that is slow
_MAX_SESSIONS = 1000  # of one caller; beyond that, all its sessions end


class EndedLogins(Struct, frozen=True, kw_only=True):
    """The sessions that ended before their cookies expire."""

    since: float
    """Sessions that began before are unknown here, and so have ended: the store is new, or lost what it knew."""
    callers: dict[str, float] = {}
    """When all sessions of a caller were ended."""
    sessions: dict[str, tuple[str, float]] = {}
    """The caller and the end of single sessions, by id."""

    def has(self, session: DashboardSession) -> bool:
        """Whether a session has ended."""
        ended_at = max(self.since, self.callers.get(session.name, 0.0))
        return session.began_at < ended_at or session.session_id in self.sessions

    def with_session(self, session: DashboardSession, now: float) -> EndedLogins:
        """The same, without this session."""
        sessions = {key: value for key, value in self.sessions.items() if value[1] > now - _KEPT}
        if sum(name == session.name for name, _ in sessions.values()) >= _MAX_SESSIONS:
            return self.with_callers([session.name], now)
        return msgspec.structs.replace(self, sessions={**sessions, session.session_id: (session.name, now)})

    def with_callers(self, names: Collection[str], now: float) -> EndedLogins:
        """The same, without all sessions of these callers that began until now."""
        callers = {name: at for name, at in self.callers.items() if at > now - _KEPT}
        sessions = {key: value for key, value in self.sessions.items() if value[0] not in names}
        return msgspec.structs.replace(self, callers={**callers, **dict.fromkeys(names, now)}, sessions=sessions)


class Logins:
    """The ended logins of a store, as of a second ago."""

    def __init__(self, documents: Documents) -> None:
        self._stored = StoredValue(documents, _KEY, EndedLogins)
        self._known: EndedLogins | None = None
        self._read_at = -_FRESH
        self._lock = asyncio.Lock()
        self.is_current = False
        """Whether the store answered lately. If not, no cookie is renewed: its session may have ended elsewhere."""

    async def ended(self) -> EndedLogins:
        """Which logins have ended. While the store is away, those that are known; StoreAwayError if none are."""
        if self._known is None or clock.monotonic() - self._read_at >= _FRESH:
            self._read_at = clock.monotonic()  # others use what is known, and do not wait for this answer
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await self._change(lambda ended: ended)
                self.is_current = True
            except (StoreAwayError, TimeoutError) as exc:
                self.is_current = False
                if self._known is None:
                    raise StoreAwayError("the store did not say which logins have ended") from exc
        assert self._known is not None
        return self._known

    async def end(self, session: DashboardSession) -> None:
        """End one session."""
        await self._change(lambda ended: ended.with_session(session, clock.time()))

    async def end_all(self, names: Collection[str]) -> None:
        """End all sessions of these callers."""
        await self._change(lambda ended: ended.with_callers(names, clock.time()))

    async def _change(self, update: Callable[[EndedLogins], EndedLogins]) -> None:
        now = clock.time()
        async with self._lock:  # a slow read must not replace what a logout has changed since
            self._known = await self._stored.change(lambda ended: update(ended or EndedLogins(since=now)))
