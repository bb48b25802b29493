"""Which URLs a run may crawl."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import ScopeSettings
from shoal.errors import ConfigError
from shoal.urls import normalize as scope_module
from shoal.urls.normalize import Scope, normalize_url


def test_without_rules_all_belongs() -> None:
    scope = Scope(ScopeSettings())
    assert scope.refuses("http://ex.com/") is None
    assert not scope.too_deep(10**6)


@pytest.mark.parametrize(
    ("domain", "url", "inside"),
    [
        ("ex.com", "http://ex.com/", True),
        ("ex.com", "https://ex.com:8080/x", True),
        ("ex.com", "http://user:pw@ex.com/", True),
        ("ex.com", "http://www.ex.com/", True),
        ("ex.com", "http://a.b.ex.com:81/", True),
        ("ex.com", "http://notex.com/", False),
        ("ex.com", "http://ex.com.evil.org/", False),
        ("ex.com", "http://evil.org/ex.com", False),
        ("ex.com", "http://ex.com@evil.org/", False),
        ("ex.com", "http://com/", False),
        ("www.ex.com", "http://ex.com/", False),
        ("EX.Com", "http://ex.com/", True),
        (".ex.com", "http://ex.com/", True),
        ("*.ex.com", "http://www.ex.com/", True),
        (" ex.com ", "http://ex.com/", True),
        ("ex.com:81", "http://ex.com:81/", True),
        ("ex.com:81", "http://www.ex.com:81/", True),
        ("ex.com:81", "http://ex.com/", False),
        ("ex.com:81", "http://ex.com:82/", False),
        ("ex.com:80", "http://ex.com/", True),
        ("bücher.de", "http://www.bücher.de/", True),
        ("xn--bcher-kva.de", "http://bücher.de/", True),
        ("127.0.0.1", "http://127.1:81/", True),
        ("127.0.0.1", "http://1.127.0.0.1.evil.org/", False),
        ("[::1]", "http://[::1]:81/", True),
        ("[::1]", "http://[::2]/", False),
        ("localhost", "http://localhost:81/", True),
    ],
)
def test_domains(domain: str, url: str, inside: bool) -> None:
    for scope in (
        Scope(ScopeSettings(allowed_domains=(domain.strip(),))),
        Scope(ScopeSettings(), [domain]),
        Scope(ScopeSettings(), domain),
    ):
        for _ in range(2):  # the second time from its memory
            reason = scope.refuses(normalize_url(url))
            assert reason == (None if inside else "outside the allowed domains")


def test_domains_of_the_configuration_and_the_spider() -> None:
    scope = Scope(ScopeSettings(allowed_domains=("a.com",)), ["b.com"])
    assert scope.refuses("http://a.com/") is scope.refuses("http://b.com/") is None
    assert scope.refuses("http://c.com/")


@pytest.mark.parametrize("domain", ["http://ex.com", "ex.com/", "", "*", "a b", "::1", "ex.com:x"])
def test_what_is_no_domain(domain: str) -> None:
    with pytest.raises(ConfigError, match='"allowed_domains" must contain host names such as'):
        Scope(ScopeSettings(), [domain])


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({}, None),
        ({"allow": ("/b/", "/item/")}, None),
        ({"allow": (r"\d+$",)}, None),
        ({"allow": ("/nope/", "^/item")}, "matches no allow rule"),
        ({"deny": ("/nope/",)}, None),
        ({"deny": ("nope", "item")}, "denied by the rule 'item'"),
        ({"allow": ("item",), "deny": ("12",)}, "denied by the rule '12'"),
        ({"max_url_length": 22}, None),
        ({"max_url_length": 21}, "longer than 21 characters"),
    ],
)
def test_rules(rules: dict[str, Any], reason: str | None) -> None:
    assert Scope(ScopeSettings(**rules)).refuses("http://ex.com/item/123") == reason


def test_depth() -> None:
    scope = Scope(ScopeSettings(max_depth=2))
    assert [scope.too_deep(depth) for depth in (0, 2, 3)] == [False, False, True]
    assert Scope(ScopeSettings(max_depth=0)).too_deep(1)


@given(st.lists(st.text("ab.", min_size=1, max_size=5), max_size=30))
def test_many_hosts_do_not_fill_the_memory(hosts: list[str]) -> None:
    scope = Scope(ScopeSettings(), ["b"])
    scope_module._MAX_HOSTS, before = 5, scope_module._MAX_HOSTS
    try:
        for host in hosts:
            inside = host == "b" or host.endswith(".b")
            assert (scope.refuses(f"http://{host}/") is None) is inside
        assert len(scope._hosts) <= 5
    finally:
        scope_module._MAX_HOSTS = before


def test_a_long_host_is_not_kept() -> None:
    scope = Scope(ScopeSettings(), ["b"])
    assert scope.refuses(f"http://{'a' * 3000}.b/") == "longer than 2083 characters"
    assert scope._hosts == {}
