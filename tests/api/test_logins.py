"""Logins that ended, and what proxies say about clients."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from shoal.api.server import logins
from shoal.api.server.auth import TrustedProxies
from shoal.api.server.logins import LIFETIME, DashboardSession, EndedLogins, SessionCookies


def session(name: str = "ann", number: int = 1, began_at: float = 200.0) -> DashboardSession:
    return DashboardSession(name, began_at + LIFETIME, str(number), began_at, "")


def test_a_session_ends_alone_or_with_its_caller() -> None:
    ended = EndedLogins(since=100).with_session(session(), 300)
    assert [ended.has(session()), ended.has(session(number=2)), ended.has(session(number=3, began_at=99))] == [
        True, False, True,
    ]  # fmt: skip
    ended = ended.with_callers(["ann"], 400)
    assert [ended.has(session(number=2)), ended.has(session("bob", 5)), ended.has(session(began_at=401, number=6))] == [
        True, False, False,
    ]  # fmt: skip


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "_MAX_SESSIONS", 10)
    ended = EndedLogins(since=100).with_session(session("bob", 99), 300)
    for number in range(11):
        ended = ended.with_session(session(number=number), 300)
    assert all(ended.has(session(number=number)) for number in range(11))
    assert ended.sessions.keys() == {"99"}
    later = ended.with_session(session(number=12, began_at=9000), 9000)
    assert later.sessions.keys() == {"12"}


def test_a_renewed_cookie_is_of_the_same_session() -> None:
    cookies = SessionCookies({"": "the-main-token-of-all"})
    first = cookies.read(cookies.make(""))
    assert first is not None
    again = cookies.read(cookies.renew(first))
    assert again is not None
    assert (again.session_id, again.began_at, again.csrf) == (first.session_id, first.began_at, first.csrf)


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1", ["192.0.2.1"], "192.0.2.1"), ("10.0.0.1", ["6.6.6.6, 192.0.2.1"], "192.0.2.1"),
        ("10.0.0.1", ["6.6.6.6", "192.0.2.1, 10.0.0.2"], "192.0.2.1"), ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"), ("192.0.2.9", ["192.0.2.1"], "192.0.2.9"),
        ("::ffff:10.0.0.1", ["192.0.2.1:4711"], "192.0.2.1"), ("10.0.0.1", ["[2001:db8::1]:80"], "2001:db8::1"),
        ("10.0.0.1", ["2001:DB8::1"], "2001:db8::1"), ("10.0.0.1", ["192.0.2.1, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, x, 192.0.2.1"], "192.0.2.1"), ("10.0.0.1", [",,"], "10.0.0.1"),
    ],
)  # fmt: skip
def test_the_address_behind_a_proxy(peer: str, forwarded: list[str], address: str) -> None:
    scope = {"type": "http", "client": (peer, 1), "scheme": "http"}
    raw = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    TrustedProxies(["10.0.0.0/8"]).apply(scope, Headers(raw=[*raw, (b"x-forwarded-proto", b"https")]))
    assert scope["client"][0] == address
    assert scope["scheme"] == ("http" if peer == "192.0.2.9" else "https")
