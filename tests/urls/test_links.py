"""URLs as browsers read them. The expected values are from the WHATWG standard, unless a test says otherwise."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from yarl import URL

from shoal.crawling.run_queue import KnownLinks
from shoal.errors import RequestError
from shoal.http import LinkBatch, Request
from shoal.urls import normalize as links
from shoal.urls.normalize import (
    MAX_PER_PAGE,
    ascii_host,
    derived_fingerprint,
    host_of,
    join_url,
    normalize_url,
    origin_of,
    resolve,
    typed_url,
    url_fingerprint,
    written_url,
)

BASE = "http://ex.com/a/b/c?x=1"

PIECES = st.sampled_from(
    [
        "/", "//", "..", ".", "a", "%2e", "%41", "%", " ", "?", "#", "&", "=", "+", "%2B", "ü", "\\", "\t", ":", "@",
        "http:", "https://", "ex.com", "EX.com", ":80", ":443", ":8080", "[::1]", "127.1", "0x7f", ";", "'", "~", "[",
        "]", "|", "%C3%BC", "%ff", "xn--a", "1", "\0", "\xa0", "\udce9", "//h/", "mailto:",
    ]
)  # fmt: skip
HREFS = st.lists(PIECES, max_size=7).map("".join) | st.text(max_size=20)


# -- normal form


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://ex.com", "http://ex.com/"),
        ("http://ex.com?q", "http://ex.com/?q"),
        ("http://ex.com#f", "http://ex.com/"),
        ("HTTPS://EX.com/Path", "https://ex.com/Path"),
        ("  http://ex.com/x \n", "http://ex.com/x"),
        ("http://ex.com/a\n\tb", "http://ex.com/ab"),
        ("http://ex.com:80/", "http://ex.com/"),
        ("https://ex.com:443/", "https://ex.com/"),
        ("http://ex.com:443/", "http://ex.com:443/"),
        ("http://ex.com:/", "http://ex.com/"),
        ("http://ex.com:0080/", "http://ex.com/"),
        ("http://ex.com:08000/", "http://ex.com:8000/"),
        ("http://user:pass@ex.com/", "http://user:pass@ex.com/"),
        ("http://a@b@ex.com/", "http://a%40b@ex.com/"),
        ("http://[::1]/", "http://[::1]/"),
        ("http://[0:0::0001]:80/", "http://[::1]/"),
        ("http://bücher.de/ü?ü", "http://xn--bcher-kva.de/%C3%BC?%C3%BC"),
        ("http://\uff25\uff38\u3002com/", "http://ex.com/"),
        ("http://my_host.ex.com/", "http://my_host.ex.com/"),
        ("http://ex%41.com/", "http://exa.com/"),
        ("http://b%C3%BCcher.de:81/", "http://xn--bcher-kva.de:81/"),
        ("http://%30%78%37f.1/", "http://127.0.0.1/"),
        # one address, many spellings: politeness must know them as one host
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://0x7f.0.0.1/", "http://127.0.0.1/"),
        ("http://0177.0.0.1/", "http://127.0.0.1/"),
        ("http://2130706433/", "http://127.0.0.1/"),
        ("http://127.0.0.1./", "http://127.0.0.1/"),
        ("http://ex.com/a b?c d", "http://ex.com/a%20b?c%20d"),
        ("http://ex.com/%7euser", "http://ex.com/~user"),
        ("http://ex.com/100%", "http://ex.com/100%25"),
        ("http://ex.com/a%2fb", "http://ex.com/a%2Fb"),
        ("http://ex.com/./a/../b", "http://ex.com/b"),
        ("http://ex.com/.well-known/x", "http://ex.com/.well-known/x"),
        ("http://ex.com//a", "http://ex.com//a"),
        ("http://ex.com\\a\\b?c\\d", "http://ex.com/a/b?c%5Cd"),
        ("http://ex.com/x?", "http://ex.com/x"),  # for us an empty query is none
        ("http://ex.com/?u=http%3A%2F%2Fx%2Fy&s=%27", "http://ex.com/?u=http://x/y&s='"),
        ("http:ex.com/x", "http://ex.com/x"),
        ("https:/ex.com", "https://ex.com/"),
        ("http:///ex.com", "http://ex.com/"),
    ],
)
def test_normal_form(url: str, expected: str) -> None:
    assert normalize_url(url) == expected
    assert normalize_url(expected) == expected
    assert normalize_url(written_url(url)) == expected
    assert url_fingerprint(written_url(url)) == url_fingerprint(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ex.com/%7e", "http://ex.com/%7e"),
        (" localhost:8000/x ", "http://localhost:8000/x"),
        ("https:/ex.com", "https://ex.com/"),
        ("HTTP:ex.com", "http://ex.com/"),
    ],
)
def test_what_a_user_types(text: str, expected: str) -> None:
    assert typed_url(text) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("HTTP://EX.com:80/%7euser", "http://ex.com/%7euser"),
        ("http://ex.com/?u=http%3A%2F%2Fx%2Fy&s=%7E%27", "http://ex.com/?u=http%3A%2F%2Fx%2Fy&s=%7E%27"),
        ("http://ex.com/%3a%40%28/%zz/100%", "http://ex.com/%3a%40%28/%zz/100%"),
        ("http://ex.com/[a]|b?{c}|^`\\'[d]", "http://ex.com/[a]|b?{c}|^`\\'[d]"),
        ("http://ex.com/{a}^`<b>", "http://ex.com/%7Ba%7D%5E%60%3Cb%3E"),
        ('http://ex.com/a b"?c d"<e>', "http://ex.com/a%20b%22?c%20d%22%3Ce%3E"),
        ("http://ex.com/ü%c3%bc?ü%C3%bc", "http://ex.com/%C3%BC%c3%bc?%C3%BC%C3%bc"),
        ("http://ex.com/x?", "http://ex.com/x?"),
        ("http://ex.com?", "http://ex.com/?"),
        ("http://ex.com/x??a#b?c", "http://ex.com/x??a"),
        ("http://ex.com/a/%2e%2E/b%2ec/.%2E/d", "http://ex.com/d"),
        ("http://ex.com/a%2eb", "http://ex.com/a%2eb"),
        ("http://ex.com/?a=/../b", "http://ex.com/?a=/../b"),
        ("http://ex.com//a//b", "http://ex.com//a//b"),
        ("http:ex.com", "http://ex.com/"),
        ("https:/ex.com/%7e", "https://ex.com/%7e"),
    ],
)
def test_written_form(url: str, expected: str) -> None:
    """Nothing is unquoted, and only what is not allowed is quoted."""
    assert written_url(url) == expected
    assert written_url(expected) == expected
    assert Request(url).url == expected


@pytest.mark.parametrize(
    "url",
    [
        "", " ", "ex.com", "/x", "//ex.com/", "mailto:a@b", "ftp://ex.com/", "javascript:x", "http:", "http:/",
        "http://", "http:///", "http://?q", "http://@/", "http://:80/", "http://ex.com:0/", "http://ex.com:65536/",
        "http://ex.com:99999/", "http://ex.com:-1/", "http://ex.com:x/", "http://ex com/", "http://ex<b>.com/",
        "http://ex%2F.com/", "http://ex%3Fa/", "http://a%40b/", "http://a%3A80/", "http://a%00b/", "http://a%2525/",
        "http://ex%ff.com/", "http://%5B::1%5D/", "http://ex\0.com/", "http://ex..\ud800/", "http://[::g]/", "http://[:8080]",
        "http://[bad/", "http://[fe80::1%25eth0]/", "http://1.2.3.4.5/", "http://999.1.1.1/", "http://ex.0x/",
    ],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(RequestError):
        normalize_url(url)


@pytest.mark.parametrize("url", [None, b"http://ex.com/", 5])
def test_what_is_no_text(url: object) -> None:
    with pytest.raises(RequestError, match="is not text"):
        normalize_url(url)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is not text"):
        join_url(BASE, url)  # type: ignore[arg-type]


def test_the_message_helps() -> None:
    with pytest.raises(RequestError, match=r"'ex\.com' has no scheme; add http://"):
        normalize_url("ex.com")
    for link in ("/next", "?page=2", "../up"):
        with pytest.raises(RequestError, match=r"has no scheme; for a link of a page, use response\.follow"):
            normalize_url(link)
    with pytest.raises(RequestError, match="only http and https"):
        normalize_url("ftp://ex.com/")


# -- joining


@pytest.mark.parametrize(
    ("href", "expected"),
    [
        ("d", "http://ex.com/a/b/d"),
        ("./d", "http://ex.com/a/b/d"),
        ("../d", "http://ex.com/a/d"),
        ("../../../../d", "http://ex.com/d"),
        ("..", "http://ex.com/a/"),
        (".", "http://ex.com/a/b/"),
        ("/d", "http://ex.com/d"),
        ("/a/./../d", "http://ex.com/d"),
        ("/a/%2e%2E/d", "http://ex.com/d"),
        ("/a/.d/...", "http://ex.com/a/.d/..."),
        ("?q", "http://ex.com/a/b/c?q"),
        ("?", "http://ex.com/a/b/c?"),
        ("#f", BASE),
        ("", BASE),
        ("d#f", "http://ex.com/a/b/d"),
        ("d?q#f", "http://ex.com/a/b/d?q"),
        ("?q=/../x", "http://ex.com/a/b/c?q=/../x"),
        ("//other/x", "http://other/x"),
        ("//other", "http://other/"),
        ("///other/x", "http://other/x"),
        ("/\\other/x", "http://other/x"),
        ("\\d", "http://ex.com/d"),
        ("sub\\d", "http://ex.com/a/b/sub/d"),
        ("http://other", "http://other/"),
        ("HTTP://OTHER/X", "http://other/X"),
        ("https:/other/x", "https://other/x"),
        ("https:other", "https://other/"),
        ("http:d", "http://ex.com/a/b/d"),  # relative, for the page is http too
        ("http:/d", "http://ex.com/d"),
        ("http:?q", "http://ex.com/a/b/c?q"),
        ("https:///other//x", "https://other//x"),
        ("d:e", None),
        ("./d:e", "http://ex.com/a/b/d:e"),
        (" d ", "http://ex.com/a/b/d"),
        ("\n/d\r\n/e\t", "http://ex.com/d/e"),
        ("ht\ntp://oth\ter/", "http://other/"),
        ("\0 /d\x1f", "http://ex.com/d"),
        ("/d\xa0", "http://ex.com/d%C2%A0"),  # only the spaces of ASCII are stripped
        ("/d e?f g", "http://ex.com/d%20e?f%20g"),
        ("/ü", "http://ex.com/%C3%BC"),
        ("/caf\udce9", "http://ex.com/caf%E9"),  # a byte that was no UTF-8, as in a Location header
        ("/\ud800", "http://ex.com/%EF%BF%BD"),
        ("http://bücher.de/", "http://xn--bcher-kva.de/"),
        ("//[::1]:8080/x", "http://[::1]:8080/x"),
        ("//user:pw@other:81/x", "http://user:pw@other:81/x"),
        ("mailto:a@b", None),
        ("javascript:void(0)", None),
        ("java\nscript:void(0)", None),
        ("data:text/html,<a href=/x>", None),
        ("tel:+1", None),
        ("ftp://other/", None),
        ("//", None),
        ("http://", None),
        ("http://[bad", None),
    ],
)
def test_join(href: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(RequestError):
            join_url(BASE, href)
        assert resolve(BASE, [href]) == []
    else:
        assert join_url(BASE, href) == expected


@pytest.mark.parametrize(
    ("base", "href", "expected"),
    [
        ("https://ex.com/", "//other/x", "https://other/x"),
        ("https://u:p@ex.com:81/a", "/x", "https://u:p@ex.com:81/x"),
        ("http://[::1]:81/a/", "x", "http://[::1]:81/a/x"),
        ("http://ex.com/", "x?y", "http://ex.com/x?y"),
        ("http://ex.com/?a=/b/c", "x", "http://ex.com/x"),
        ("http://a/", "/x", "http://a/x"),
    ],
)
def test_join_to_other_bases(base: str, href: str, expected: str) -> None:
    assert join_url(base, href) == expected


# -- laws


@given(HREFS)
@example("http://h:443\t \xa0")
def test_both_forms_are_the_same_again(href: str) -> None:
    try:
        url = join_url(BASE, href)
    except RequestError:
        assume(False)
    assert written_url(url) == url
    assert join_url(url, url) == url
    normal = normalize_url(url)
    assert normalize_url(normal) == written_url(normal) == normal
    assert url_fingerprint(url) == url_fingerprint(normal)
    assert url.startswith(("http://", "https://"))
    assert url.isascii()
    assert not set(url) & set(' #\r\n\t"<>')
    assert host_of(url)
    assert origin_of(url) + url[len(origin_of(url)) :] == url


@given(st.from_regex(links._WRITTEN_URL, fullmatch=True))
def test_the_fast_path_gives_what_the_slow_one_would(url: str) -> None:
    assume("/." not in url)
    assert links._write(url) == url


@given(st.from_regex(links._NORMAL_URL, fullmatch=True))
def test_the_fast_path_of_the_normal_form_gives_what_the_slow_one_would(url: str) -> None:
    assume("/." not in url)
    assert str(URL(url)) == written_url(url) == url


@given(st.from_regex(links._WRITTEN_PATH, fullmatch=True))
def test_the_fast_path_of_hrefs_gives_what_the_slow_one_would(href: str) -> None:
    assume("/." not in href)
    assert links._write("http://ex.com" + href) == join_url(BASE, href)


@given(st.lists(HREFS, max_size=10))
def test_resolve_is_join_for_each(hrefs: list[str]) -> None:
    expected: dict[str, None] = {}
    for href in hrefs:
        if href and href[0] != "#":
            try:
                expected[join_url(BASE, href)] = None
            except RequestError:
                continue
    assert resolve(BASE, hrefs) == list(expected)


# -- what a stranger's page may cost


@pytest.mark.parametrize(
    "href",
    [
        "/" + "a" * 2**22, "/" + "%" * 2**22, "../" * 2**20, "ü" * 2**22, "data:" + "x" * 2**22, "a" * 2**22 + ":",
        "http://" + "a" * 2**22, "http://" + "ü." * 2**20, "http://" + "[" * 2**22, "http://" + "@" * 2**22,
        "http://" + ":" * 2**22, "//" * 2**21, "\\" * 2**22, " " * 2**22 + "x" + " " * 2**22,
    ],
)  # fmt: skip
def test_a_huge_href_costs_little(href: str) -> None:
    started = time.process_time()
    resolve(BASE, [href])
    assert time.process_time() - started < 2


def test_what_is_too_long_is_no_url() -> None:
    with pytest.raises(RequestError, match="longer than 65536"):
        join_url(BASE, "a b" * 30_000)
    with pytest.raises(RequestError, match="longer than"):
        join_url(BASE, "ü" * 30_000)  # quoted it is too long
    with pytest.raises(RequestError, match="too long"):
        join_url(BASE, "http://" + "ü" * 300)
    assert join_url(BASE, "http://" + "u" * 300 + "@ex.com/") == "http://" + "u" * 300 + "@ex.com/"


def test_many_hosts_outside_ascii_cost_little() -> None:
    hrefs = [f"http://{'ü' * 50}{number}.de/" for number in range(20_000)]
    started = time.process_time()
    assert len(resolve(BASE, [*hrefs, "/last"])) == MAX_PER_PAGE + 1
    quoted = [quote(f"http://{'ü' * 8}{number}.de/", safe=":/") for number in range(20_000)]
    assert len(resolve(BASE, [*quoted, "/last"])) == MAX_PER_PAGE + 1
    assert len(resolve(BASE, [*hrefs, "/last"])) == MAX_PER_PAGE + 1
    assert time.process_time() - started < 10


def test_short_links_below_a_long_base_do_not_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    found = resolve("http://ex.com/" + "a" * 60_000 + "/", (f"x{number}" for number in range(100_000)))
    assert 500 < len(found) < 1000
    assert "too many links" in caplog.text
    assert len(caplog.text) < 1000


_LONG_BASE = "http://ex.com/" + "a/" * 30_000
_DEEP_BASE = "http://ex.com/" + "a/" * 2000


@pytest.mark.parametrize(
    ("base", "form"),
    [
        (BASE, "//[::{:x}]"),
        (BASE, "//0x{:x}"),
        (BASE, "é{}"),
        (BASE, "http://H{}/"),
        (_LONG_BASE, "é"),
        (_DEEP_BASE, "../é{}"),
    ],
)
def test_many_links_in_odd_forms_cost_little(form: str, base: str, caplog: pytest.LogCaptureFixture) -> None:
    """As many links as fit into 2 MB. Invalid and duplicate links count too."""
    started = time.process_time()
    found = resolve(base, [*map(form.format, range(100_000)), "/last"])
    assert time.process_time() - started < 6  # 1.3 s on a quiet machine
    assert found[-1] == "http://ex.com/last"
    assert len([record for record in caplog.records if "too many links" in record.message]) == 1


@pytest.mark.parametrize("form", ["page{}.html", "/page{}", "http://ex.com/{}", "?page={}"])
def test_ordinary_links_are_not_counted(form: str) -> None:
    assert len(resolve("http://ex.com/list", map(form.format, range(60_000)))) == 60_000


@pytest.mark.parametrize("start", ["http://", "//", "https:", "\\\\", " HTTPS:/", "ht\ntp://", "http:///", "//a@"])
def test_hosts_outside_ascii_are_counted_however_they_are_written(start: str) -> None:
    hrefs = [f"{start}ü{number}.de/" for number in range(MAX_PER_PAGE + 50)]
    assert len(resolve(BASE, hrefs)) == MAX_PER_PAGE


def test_paths_outside_ascii_are_not_counted_and_a_host_is_counted_once() -> None:
    hrefs = [f"{start}ü{number}" for number in range(500) for start in ("", "/", "?", "x/", "http://ü.de/")]
    assert len(resolve(BASE, hrefs)) == len(hrefs)


@pytest.mark.parametrize(
    "host",
    [
        "字" * 250,
        ".".join("字" * 60 for _ in range(4)),
        ".".join("字" * 126),
        "\ufdfa" * 63,
        "ü" * 60,
        ".".join(["ü" * 15] * 15),
    ],
)
def test_a_name_that_no_dns_could_hold_is_refused_before_it_is_encoded(host: str) -> None:
    started = time.process_time()
    for number in range(200):
        with pytest.raises(ValueError, match="a host name has at most 253 characters"):
            ascii_host(f"{host}{number}")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("bücher.example", "xn--bcher-kva.example"), ("BÜCHER。example", "xn--bcher-kva.example"),
        ("faß.de", "xn--fa-hia.de"), ("例え.テスト", "xn--r8jz45g.xn--zckzah"), ("é" * 30 + ".de",
        "xn--" + "9caaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + ".de"),
    ],
)  # fmt: skip
def test_internationalized_hosts(host: str, expected: str) -> None:
    assert ascii_host(host) == expected
    assert normalize_url(f"http://{host}:81/x") == f"http://{expected}:81/x"
    assert normalize_url(f"http://u:p@{host}/") == f"http://u:p@{expected}/"


@given(st.text(st.characters(min_codepoint=0x21, blacklist_characters="/?#\\@:[]%"), min_size=1, max_size=30))
def test_a_host_is_encoded_as_before(host: str) -> None:
    try:
        expected = URL(f"http://{host}/").raw_host
    except ValueError:
        expected = None
    try:
        assert ascii_host(host) == expected
    except ValueError as exc:
        assert expected is None or (len(expected) > 253 or "at most" in str(exc))  # noqa: PT017


# -- parts and names


def test_host_and_origin() -> None:
    assert host_of("http://ex.com/a") == "ex.com"
    assert host_of("https://user:pw@ex.com:81/@") == "ex.com:81"
    assert host_of("http://[::1]:81/") == "[::1]:81"
    assert origin_of("https://ex.com:81/a//b") == "https://ex.com:81"


def test_a_fingerprint_names_method_url_and_body() -> None:
    names = {
        url_fingerprint("http://ex.com/"),
        url_fingerprint("http://ex.com/?a=1"),
        url_fingerprint("http://ex.com/?a=1&a=1"),
        url_fingerprint("http://ex.com/", "HEAD"),
        url_fingerprint("http://ex.com/", "POST"),
        url_fingerprint("http://ex.com/", "POST", b"a"),
        url_fingerprint("http://ex.com/", "GET", b"a"),
        url_fingerprint("https://ex.com/"),
    }
    assert len(names) == 8
    assert all(len(name) == 16 for name in names)


@given(st.permutations(["a=1", "b=2", "a=0", "", "c"]))
def test_the_order_of_a_query_does_not_count(parts: list[str]) -> None:
    assert url_fingerprint("http://ex.com/?" + "&".join(parts)) == url_fingerprint("http://ex.com/?a=1&b=2&a=0&&c")


def test_derived_fingerprints() -> None:
    one = url_fingerprint("http://ex.com/")
    assert derived_fingerprint(one, b"x") == derived_fingerprint(one, b"x") != derived_fingerprint(one, b"y")
    assert derived_fingerprint(one, b"x") != one


def test_a_batch_of_links() -> None:
    batch = LinkBatch(base=BASE, hrefs=["/x", "/x#a", "mailto:a", "d"])
    assert len(batch) == 4
    assert [request.url for request in batch] == ["http://ex.com/x", "http://ex.com/a/b/d"]


# -- links that are known


def test_known_links_are_left_out() -> None:
    known = KnownLinks()
    hrefs = ["/x", "http://other/y", "/x", "z"]
    assert known.unknown(BASE, hrefs) == ["/x", "http://other/y", "z"]
    known.learn(BASE, hrefs)
    assert known.unknown("http://ex.com/elsewhere/", [*hrefs, "/new"]) == ["z", "/new"]
    assert known.unknown("http://ex.com/a/b/other", [*hrefs, "new"]) == ["new"]  # the same folder
    assert known.unknown("https://ex.com/", hrefs) == ["/x", "z"]  # another origin
    assert not known.has("http://ex.com/x")  # hrefs are not resolved
    known.learn_urls(["http://ex.com/x"])
    assert known.has("http://ex.com/x")
    assert known.new(["http://ex.com/x", "http://ex.com/z"]) == ["http://ex.com/z"]


@pytest.mark.parametrize(
    "href", ["z", "../z", "./z", "?q", "#f", "", "httpd.html", "http-guide/", "https.html", "http:z", "https:z", " /x"]
)
def test_what_means_another_url_on_another_page_is_never_known(href: str) -> None:
    known = KnownLinks()
    known.learn("http://ex.com/a/", [href])
    assert known.unknown("http://ex.com/b/", [href]) == [href]


@given(st.lists(HREFS, max_size=10), st.lists(HREFS, max_size=10))
def test_no_url_is_hidden_that_was_not_told(told: list[str], shown: list[str]) -> None:
    """Also on another page of the origin: a link that is filtered out was on the first page, with the same meaning."""
    here = "http://ex.com/a/b/c?x=1"
    known = KnownLinks()
    known.learn(here, told)
    for there in (here, "http://ex.com/other/", "http://ex.com/a/b/d?y=2/3", "http://ex.com/a/b"):
        left = known.unknown(there, shown)
        assert set(resolve(there, shown)) - set(resolve(there, left)) <= set(resolve(here, told))


@given(st.lists(st.lists(st.integers(0, 50).map("/{}".format)), max_size=20))
def test_known_links_are_bounded(pages: list[list[str]]) -> None:
    known = KnownLinks(limit=7)
    for number, hrefs in enumerate(pages):
        known.learn(f"http://h{number % 3}/", hrefs)
        known.learn_urls(f"http://h{number % 3}{href}" for href in hrefs[::2])
        assert sum(map(len, known._by_place.values())) + len(known._absolute) == known._size <= 7


def test_long_hrefs_are_not_kept() -> None:
    known = KnownLinks()
    long = "/" + "x" * 1000
    known.learn(BASE, [long, BASE + long])
    known.learn_urls([BASE + long])
    assert known.unknown(BASE, [long, BASE + long]) == [long, BASE + long]
