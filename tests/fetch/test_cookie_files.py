"""Files of cookies: what is written is read, and files of other programs are understood."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from http.cookiejar import MozillaCookieJar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.commands.session import write_file
from shoal.errors import ConfigError
from shoal.fetch.sessions.cookies import Cookie
from shoal.fetch.sessions.stored import read_cookie_file, to_netscape, to_storage_state

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters=";="), max_size=20)
COOKIES = st.builds(
    Cookie,
    name=TEXTS.filter(bool),
    value=TEXTS,
    domain=st.sampled_from(["a.example", "127.0.0.1", "[::1]", "localhost", "xn--bcher-kva.example"]),
    path=TEXTS.map(lambda text: f"/{text}"),
    host_only=st.just(True),
    secure=st.booleans(),
    expires=st.none() | st.integers(1, 2**40).map(float),
    http_only=st.booleans(),
    same_site=st.sampled_from(["Strict", "Lax", "None"]),
)


@given(st.lists(COOKIES, min_size=1, max_size=5))
def test_what_is_written_is_read(cookies: list[Cookie]) -> None:
    assert list(read_cookie_file(to_storage_state(cookies).encode()).cookies) == cookies
    lines = read_cookie_file(to_netscape(cookies).encode()).cookies
    assert list(map(_bare, lines)) == list(map(_bare, cookies))


def _bare(cookie: Cookie) -> tuple[object, ...]:
    """A cookies.txt does not have SameSite."""
    return (*cookie.key, cookie.value, cookie.host_only, cookie.secure, cookie.expires, cookie.http_only)


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: f"[{text}".encode()))
def test_any_bytes_are_cookies_or_an_error(data: bytes) -> None:
    with suppress(ConfigError):
        read_cookie_file(data)


def read(*entries: dict[str, Any]) -> list[Cookie]:
    return list(read_cookie_file(json.dumps(entries).encode()).cookies)


def test_lists_of_browser_extensions() -> None:
    (first, second, third, fourth) = read(
        {
            "domain": ".Shop.example", "expirationDate": 1893456000.5, "hostOnly": False, "httpOnly": True, "name": "a",
            "path": "/x", "sameSite": "no_restriction", "secure": True, "session": False, "storeId": "0", "value": "1",
        },
        {"domain": "shop.example", "hostOnly": True, "name": "b", "value": "2", "sameSite": None, "session": True},
        {"domain": "bücher.example", "name": "c", "value": "3", "expires": "2030-01-01T00:00:00Z"},
        {"domain": ".shop.example", "name": "d", "value": "", "expiry": 1893456000, "expires": None},
    )  # fmt: skip
    assert first == Cookie("a", "1", "shop.example", "/x", False, True, 1893456000.5, True, "None")
    assert second == Cookie("b", "2", "shop.example", "/", True)
    assert third == Cookie("c", "3", "xn--bcher-kva.example", "/", True, expires=1893456000.0)
    assert fourth == Cookie("d", "", "shop.example", "/", False, expires=1893456000.0)


def test_a_cookie_of_a_public_suffix_is_for_that_host_only() -> None:
    cookies = read(*({"name": "a", "value": "", "domain": domain} for domain in (".com", ".a.com")))
    assert [cookie.host_only for cookie in cookies] == [True, False]


@pytest.mark.parametrize(
    "domain", ["", ".", "a b", "a.example:80", "a.example/x", "user@a.example", "http://a.example"]
)
def test_bad_domains(domain: str) -> None:
    with pytest.raises(ConfigError, match="cookie 1: the domain is invalid"):
        read({"name": "a", "value": "", "domain": domain})


def test_a_cookies_txt_of_another_program() -> None:
    lines = (
        "# Netscape HTTP Cookie File", "", "#HttpOnly_.a.example\tTRUE\t/\tTRUE\t0\tsid\tx=y z",
        "a.example\tfalse\t/\tFALSE\t\te", "",
    )  # fmt: skip
    assert read_cookie_file("\r\n".join(lines).encode()).cookies == (
        Cookie("sid", "x=y z", "a.example", "/", False, True, None, True),
        Cookie("e", "", "a.example", "/", True),
    )


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    shared = Cookie("sid", "value", "shop.example", "/", False, True, 4e9, True)
    cookies = [shared, Cookie("b", "2", "localhost", "/", True)]
    file = tmp_path / "cookies.txt"
    write_file(str(file), to_netscape(cookies))
    jar = MozillaCookieJar(str(file))
    jar.load(ignore_discard=True, ignore_expires=True)
    assert {(each.name, each.value, each.domain) for each in jar} == {
        ("sid", "value", ".shop.example"), ("b", "2", "localhost")
    }  # fmt: skip
    if shutil.which("curl"):
        again = tmp_path / "again.txt"
        subprocess.run(["curl", "-s", "-b", file, "-c", again, f"file://{file}"], check=True, capture_output=True)
        assert {_bare(each) for each in read_cookie_file(again.read_bytes()).cookies} == set(map(_bare, cookies))


def test_a_file_of_secrets_is_for_its_owner_only(tmp_path: Path) -> None:
    target, link = tmp_path / "cookies.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o666)
    link.symlink_to(target)
    before = os.umask(0)
    try:
        write_file(str(link), "new")
    finally:
        os.umask(before)
    assert (target.read_text(), target.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o600, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cookies.txt", "link.txt"]
    with pytest.raises(ConfigError, match="it is not a file"):
        write_file("/dev/null", "x")
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        write_file(str(tmp_path / "missing" / "x"), "x")
