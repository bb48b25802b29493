"""Links against two other implementations: the slow path of our own, and ada, which browsers' URL tests check."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import ada_url
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shoal.errors import RequestError
from shoal.urls import normalize as links
from shoal.urls.normalize import join_url, normalize_url, resolve, written_url

PIECES = st.sampled_from(
    [
        "a", "Z", "0", "é", "/", "//", ".", "..", "../", "/.", "?", "#", "&", "=", ":", ";", "@", "%", "%2", "%20",
        "%2F", "%2f", "%41", "%7E", "%00", "%C3%BC", "%2E", "%2e", "%25", "%5B", "|", "\\", "\t", "\n", " ", "\0",
        "\x1f", "\x7f", "\xa0", "+", "~", "!", "$", "'", "(", "*", ",", "[", "]", "{", "<", '"', "^", "`", "_", "-",
        "http:", "HTTPS:", "http://", "https://", "HtTp://", "mailto:", "example.com", "EX.com", "127.0.0.1", "127.1",
        "0x7f.1", "1.2.3.4.", "[::1]", ":80", ":443", ":0", ":8080", ":65536", ":080", "user@", "u:p@", "xn--a",
        "a..b", "\u3002", "\u017f",
    ]
)  # fmt: skip
HREFS = st.lists(PIECES, max_size=7).map("".join)
STARTS = st.sampled_from(["", "", "http://", "https://", "//", "HTTPS://EX.com", "?", "/", "../"])
LINKS = st.tuples(STARTS, HREFS | st.text(max_size=12)).map("".join)
BASES = st.sampled_from(
    [
        "http://example.com/", "http://example.com/a/b?c=d", "https://example.com/a//b/", "http://u:p@example.com/x",
        "https://[::1]/a", "http://example.com:8080/.a/b", "http://example.com/a%2Fb/c?x=/./y", "http://example.com//a",
        "http://example.com/a:b/c", "http://1.2.3.4/?/../x",
    ]
)  # fmt: skip
_AUTHORITY = re.compile(r"(?:https?:[/\\]*|[/\\]{2,})([^/\\?#]*)", re.IGNORECASE)


def examples(thorough: bool, some: int) -> settings:
    return settings(max_examples=20 * some if thorough else some, deadline=None, database=None)


def or_none(function: Callable[..., str], *arguments: str) -> str | None:
    """The result; None if the URL is invalid."""
    try:
        return function(*arguments)
    except RequestError:
        return None


def slow_join(base: str, href: str) -> str:
    return links._write(links._join(base, links._clean(href)))


def test_the_quick_path_gives_what_the_slow_one_would(thorough: bool) -> None:
    @examples(thorough, 300)
    @given(BASES, LINKS)
    def check(base: str, href: str) -> None:
        quick, slow = links._Base(base).quick(href), or_none(slow_join, base, href)
        assert quick in ("", slow)
        if href and href[0] != "#":
            assert resolve(base, [href]) == ([] if slow is None else [slow])

    check()


def test_links_mean_what_the_standard_says(thorough: bool) -> None:
    """Except in hosts. We refuse those with escapes, and those with odd characters. The libraries differ about which
    international names are valid. A user with an empty password stays as it is written, and so does "'" in a query:
    browsers quote it, but it is allowed."""

    @examples(thorough, 300)
    @given(BASES, LINKS)
    @example("http://example.com/", "?q=a b")
    def check(base: str, href: str) -> None:
        assume(not links._SURROGATE.search(href))
        found = _AUTHORITY.match(links._clean(href))
        host = found[1] if found else ""
        assume(host.isascii() and not set(host) & set("%@[") and "xn--" not in host.lower())
        try:
            standard = ada_url.join_url(base, href)
        except ValueError:
            standard = ""
        written = or_none(join_url, base, href)
        assert written == or_none(written_url, standard.replace("%27", "'") if "'" in (written or "") else standard)
        assert written is None or normalize_url(written) == normalize_url(standard)

    check()


@pytest.mark.parametrize(
    "href",
    [
        "/" + "a%" * 30_000, "/" + "%20" * 20_000 + "\0", "http://" + "a." * 30_000, "http://" + "1." * 30_000 + "/",
        "a" * 60_000 + ":", "?" + "%41" * 20_000, "/." * 30_000, "../" * 20_000, "http://a" + ":1" * 30_000,
        "//" + "@" * 60_000, "http:" + "/" * 60_000, "\\" * 60_000, " " * 60_000 + "x", "http://" + "a-" * 30_000 + "0",
    ],
)  # fmt: skip
def test_no_link_takes_long(href: str) -> None:
    """No regular expression tries every combination."""
    began = time.process_time()
    resolve("http://example.com/a/b", [href])
    assert time.process_time() - began < 0.5
