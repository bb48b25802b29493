"""Requests: what they refuse, and that encoding loses nothing. Responses: how a page is decoded and queried."""

from __future__ import annotations

import hashlib
import re
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import RequestError, SelectorError, TooComplexError
from shoal.http import LinkBatch, Request, Response
from shoal.spider import Spider
from tests.support.names import steady
from tests.support.servers import BROKEN_HTML, CHARSETS

URL = "http://ex.com/a/b?x=1"


class Books(Spider):
    def parse(self, response: Response) -> None: ...

    def book(self, response: Response) -> None: ...

    @classmethod
    def of_class(cls, response: Response) -> None: ...

    @staticmethod
    def of_nobody(response: Response) -> None: ...


def page(html: str | bytes, content_type: str | None = "text/html; charset=utf-8", url: str = URL) -> Response:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return Response(url, headers=headers, body=html.encode() if isinstance(html, str) else html)


def sent(request: Request) -> Request:
    """Encode and decode a request as a store does."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)


# -- requests


def test_a_bare_request() -> None:
    request = Request("HTTP://EX.com")
    assert (request.url, request.method, request.body, request.depth) == ("http://ex.com/", "GET", b"", 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request)) == {"url": "http://ex.com/"}


@pytest.mark.parametrize(
    ("options", "method", "body", "kind"),
    [
        ({"json": {"a": [1, None]}}, "POST", b'{"a":[1,null]}', "application/json"),
        ({"json": []}, "POST", b"[]", "application/json"),
        ({"json": False, "method": "put"}, "PUT", b"false", "application/json"),
        ({"form": {"a": "ü &", "b": [1, 2]}}, "POST", b"a=%C3%BC+%26&b=1&b=2", "application/x-www-form-urlencoded"),
        ({"form": [("a", 1), ("a", 2)]}, "POST", b"a=1&a=2", "application/x-www-form-urlencoded"),
        ({"form": {}}, "POST", b"", "application/x-www-form-urlencoded"),
        ({"json": 1, "headers": {"content-TYPE": "x/y"}}, "POST", b"1", "x/y"),
        ({"body": b"\0\xff", "method": "PATCH"}, "PATCH", b"\0\xff", None),
        ({"body": bytearray(b"x")}, "GET", b"x", None),
        ({"body": "ü"}, "GET", b"\xc3\xbc", None),
    ],
)
def test_bodies(options: dict[str, Any], method: str, body: bytes, kind: str | None) -> None:
    request = Request(URL, **options)
    assert (request.method, request.body, request.json, request.form) == (method, body, None, None)
    assert next((value for name, value in request.headers.items() if name.lower() == "content-type"), None) == kind
    assert sent(request) == request


def test_a_dict_as_body_says_what_to_write() -> None:
    with pytest.raises(RequestError, match=r"write json=\{\.\.\.\} or form="):
        Request("http://a.example/", body={"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"json": {}, "form": {}},
        {"json": {}, "body": b"x"},
        {"json": object()},
        {"form": "a=b"},
        {"form": 5},
        {"body": 5},
        {"method": "G T"},
        {"method": "GET\r\nX: y"},
        {"method": ""},
        {"method": None},
        {"headers": {"X": "a\r\nInjected: b"}},
        {"headers": {"X": "a\nInjected: b"}},
        {"headers": {"X": "a\0"}},
        {"headers": {"X\r\nInjected": "b"}},
        {"headers": {"X y": "b"}},
        {"headers": {"X:": "b"}},
        {"headers": {"": "b"}},
        {"headers": {"X": 5}},
        {"headers": {"X": None}},
        {"headers": ["X"]},
        {"cookies": {"a": "b\r\nInjected: c"}},
        {"cookies": {"a": "b; c=d"}},
        {"cookies": {"a b": "c"}},
        {"cookies": {"a": 5}},
        {"priority": float("nan")},
        {"priority": float("inf")},
        {"priority": "high"},
        {"timeout": "5"},
        {"timeout": -1},
        {"meta": {1: "x"}},
        {"meta": ["x"]},
        {"callback": lambda response: None},
        {"callback": partial(print)},
        {"callback": Books.book},
        {"callback": Books.of_nobody},
        {"callback": 5},
        {"errback": lambda request, error: None},
    ],
    ids=steady,
)
def test_what_no_request_can_be_made_of(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Request(URL, **options)


def test_no_callback_by_value() -> None:
    with pytest.raises(RequestError, match=r"<lambda> cannot be a callback: callbacks are stored by name"):
        Request(URL, callback=lambda response: None)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="calback"):
        Request(URL, calback="x")  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="calback"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"url": URL, "calback": "x"}), type=Request)


@pytest.mark.parametrize("bad", [{"url": "nonsense"}, {"url": URL, "headers": {"a": "b\r\nc"}}])
def test_a_stored_request_is_checked_too(bad: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Request)


def test_callbacks_travel_by_name() -> None:
    books = Books()
    request = Request(URL, callback=books.book, errback=books.of_class)
    assert (request.callback, request.errback) == ("book", "of_class")
    assert Request(URL, callback="book").callback == "book"
    assert sent(request) == request


def test_what_is_left_empty() -> None:
    request = Request(URL, headers=None, cookies=None, meta=None)  # type: ignore[arg-type]
    assert (request.headers, request.cookies, request.meta) == ({}, {}, {})
    assert sent(request) == Request(URL)


def test_defaults_are_not_shared() -> None:
    Request(URL).meta["x"] = 1
    assert Request(URL).meta == {}


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
NAMES = st.from_regex(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", fullmatch=True)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXTS | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(
    st.builds(
        Request,
        st.sampled_from([URL, "https://user:pw@[::1]:81/ü?a b#c"]),
        method=NAMES,
        headers=st.dictionaries(NAMES, TEXTS, max_size=3),
        body=st.binary(max_size=20),
        cookies=st.dictionaries(NAMES, TEXTS.filter(lambda text: ";" not in text), max_size=3),
        meta=st.dictionaries(TEXTS, DATA, max_size=3),
        priority=st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300),
        depth=st.integers(0, 2**31),
        callback=st.none() | TEXTS,
        errback=st.none() | TEXTS,
        dont_filter=st.booleans(),
        timeout=st.none() | st.floats(0.001, 1e6),
        proxy=st.none() | st.just("http://user:pw@127.0.0.1:3128"),
        redirects=st.lists(TEXTS, max_size=3),
    )
)
def test_nothing_is_dropped_on_the_way(request: Request) -> None:
    assert sent(request) == request
    assert sent(request).fingerprint() == request.fingerprint()


def test_replace() -> None:
    request = Request(URL, json={"a": 1}, callback="book", meta={"x": 1}, priority=3)
    copy = request.replace(url="HTTP://OTHER", priority=4)
    assert copy == Request(
        "http://other/", method="POST", body=b'{"a":1}', headers={"Content-Type": "application/json"}, callback="book",
        meta={"x": 1}, priority=4,
    )  # fmt: skip
    assert request.priority == 3
    with pytest.raises(RequestError):
        request.replace(headers={"X": "a\r\nb"})
    with pytest.raises(TypeError):
        request.replace(nonsense=1)


def test_fingerprints() -> None:
    assert Request("http://ex.com/a").fingerprint() == hashlib.blake2b(b"http://ex.com/a", digest_size=16).digest()
    assert Request(URL).fingerprint() == Request(URL + "#f", headers={"a": "b"}, meta={"c": 1}).fingerprint()
    assert Request("http://ex.com/?a&b").fingerprint() == Request("http://EX.com:80/?b&a").fingerprint()
    assert (
        len({Request(URL, **options).fingerprint() for options in ({}, {"method": "HEAD"}, {"json": 1}, {"json": 2})})
        == 4
    )


# -- encodings


@pytest.mark.parametrize("name", CHARSETS)
def test_charsets(name: str) -> None:
    charset = CHARSETS[name]
    response = page(charset.body(), charset.content_type)
    assert response.css("h1::text").get() == charset.text
    assert charset.text in response.text
    assert not response.text.startswith("\ufeff")


@pytest.mark.parametrize(
    ("body", "content_type", "encoding", "text"),
    [
        ("é".encode("latin-1"), "text/html; charset=ISO-8859-1", "windows-1252", "é"),
        ("é".encode("latin-1"), 'text/html; Charset = "Latin1"; x=y', "windows-1252", "é"),
        ("é".encode("utf-16"), "text/html", "UTF-16LE", "é"),
        ("é".encode("utf-8-sig"), "text/html; charset=latin1", "UTF-8", "é"),  # the mark is stronger than the header
        ("é".encode("gb18030"), "text/html; charset=gb2312", "gbk", "é"),
        (b"<meta charset=koi8-r>\xc1", "text/html", "KOI8-R", None),
        (
            b"<meta charset=koi8-r>\xc3\xa9",
            "text/html; charset=utf-8",
            "UTF-8",
            None,
        ),  # the header is stronger than this
        (b"<meta charset=nonsense>\xc3\xa9", "text/html", "UTF-8", None),
        (b"", None, "windows-1252", ""),
        ("é".encode(), "text/html; charset=x-no-such", "UTF-8", "é"),
        ("é".encode(), "text/html; charset=unicode_escape", "UTF-8", "é"),
        ("é".encode(), "text/html; charset=zlib", "UTF-8", "é"),
        ("é".encode(), "text/html; charset=\udcff", "UTF-8", "é"),
        ("é".encode(), "text/html; charset=", "UTF-8", "é"),
        ("é".encode(), "charset charset=;;==", "UTF-8", "é"),
        (b"a\xffb", "text/html; charset=utf-8", "UTF-8", "a\ufffdb"),
    ],
)
def test_encodings(body: bytes, content_type: str | None, encoding: str, text: str | None) -> None:
    response = page(body, content_type)
    assert response.encoding.lower() == encoding.lower()
    assert text is None or response.text == text


@given(st.binary(max_size=300), st.text(max_size=30))
def test_any_body_has_a_text(body: bytes, charset: str) -> None:
    response = page(body, "text/html; charset=" + charset)
    assert isinstance(response.text, str)
    assert isinstance(response.links(), list)
    assert response.to_markdown() is not None


# -- what a page says


def test_a_response() -> None:
    response = Response("http://EX.com", status=204, headers=[("Set-Cookie", "a=1"), ("set-cookie", "b=2")])
    assert response.url == response.request.url == "http://ex.com/"
    assert response.urljoin("x") == "http://ex.com/x"
    assert repr(response) == "<Response 204 http://ex.com/>"
    assert response.headers["SET-COOKIE"] == "a=1"
    assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert response.ok
    assert not Response(URL, status=302).ok


def test_a_response_knows_its_request() -> None:
    request = Request(URL, meta={"a": 1}, redirects=["http://ex.com/old"])
    response = Response(URL, request=request)
    assert response.meta is request.meta
    assert response.redirects == ["http://ex.com/old"]


def test_json() -> None:
    assert page('{"a": [1]}').json() == {"a": [1]}
    assert page('"ü"'.encode("utf-16")).json() == "ü"
    assert page(b"\xef\xbb\xbf1").json() == 1
    for bad in (b"", b"{", b"\xff", b"<html>"):
        with pytest.raises(ValueError, match=r"."):
            page(bad).json()


def test_jmespath() -> None:
    response = page('{"a": [{"b": 1}, {"b": 2}], "c": "ü"}'.encode("utf-16"))
    assert response.jmespath("a[*].b").getall() == [1, 2]
    assert response.jmespath("c").get() == "ü"
    assert response.jmespath("nope").get("none") == "none"
    for bad in (b"", b"{", b"\xff", b"<html>", b"[" * 100_000):
        assert page(bad).jmespath("a").getall() == []
    with pytest.raises(SelectorError):
        response.jmespath("a[")


def test_namespaces() -> None:
    response = page("<html xmlns:m='u'><m:p>x</m:p>")
    assert response.xpath("//n:p/text()", {"n": "u"}).get() == "x"
    assert response.xpath("//n:p[.=$text]", namespaces={"n": "u"}, text="y").get() is None


def test_queries() -> None:
    response = page("<p class=x>a1</p><p>b2</p>")
    assert response.css("p.x::text").get() == "a1"
    assert response.xpath("//p[2]/text()").get() == "b2"
    assert response.xpath("//p[text()=$t]", t="a1").attrib == {"class": "x"}
    assert response.re(r"[ab]\d") == ["a1", "b2"]
    assert response.re(re.compile(r"([ab])(\d)(z)?")) == ["a", "1", "", "b", "2", ""]
    assert response.selector is response.selector
    with pytest.raises(SelectorError):
        response.css("p[")


def test_markdown_has_absolute_links() -> None:
    response = page("<h1>T</h1><p>a <b>b</b> <a href=../x#y>c</a> <a href=mailto:a@b.c>m</a> <img src=i.png></p>")
    links = "[c](http://ex.com/x#y) [m](mailto:a@b.c) ![](http://ex.com/a/i.png)"
    assert response.to_markdown().strip() == f"# T\n\na **b** {links}"
    assert response.css("a::attr(href)").get() == "../x#y"  # the page itself did not change


def test_markdown_of_a_page_with_a_long_base_stays_small() -> None:
    html = f"<base href='http://ex.com/{'a' * 60_000}/'>" + "<a href=b>c</a>" * 20_000
    assert len(page(html).to_markdown()) < 64 << 20


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("", "http://ex.com/a/d"),
        ("<base>", "http://ex.com/a/d"),
        ("<base href=''>", "http://ex.com/a/d"),
        ("<base href='sub/'>", "http://ex.com/a/sub/d"),
        ("<base href='//other/x/y'>", "http://other/x/d"),
        ("<base target=_blank><base href=/1/><base href=/2/>", "http://ex.com/1/d"),
        ("<base href='javascript:x'>", "http://ex.com/a/d"),
        ("<base href='http://[bad'>", "http://ex.com/a/d"),
        ("<body><base href=/late/>", "http://ex.com/late/d"),
    ],
)
def test_links_are_relative_to_the_base(base: str, expected: str) -> None:
    response = page(base + "<a href=d>")
    assert response.urljoin("d") == expected
    assert response.follow("d").url == expected
    assert response.links() == [request.url for request in response.follow_all()] == [expected]


def test_the_base_is_looked_for_once() -> None:
    response = page("<p>" * 100_000)
    started = time.process_time()
    for number in range(1000):
        response.urljoin(f"/{number}")
    assert time.process_time() - started < 1


LINKS = """<ul><li class=next><b><a href='/1'>1</a></b><a href=/other>o</a></li><li class=next>none</li></ul>
<a name=top>x</a><a href='/2#f'>2</a><a href='/2'>2</a><a href='mailto:a@b'>m</a><a href>e</a><link href=/l.css>"""


def test_follow() -> None:
    response, books = page(LINKS), Books()
    assert response.follow("x").url == "http://ex.com/a/x"
    assert response.follow("/x", books.book, priority=2, meta={"a": 1}) == Request(
        "http://ex.com/x", callback="book", priority=2, meta={"a": 1}
    )
    assert response.follow(response.css("a[href]")[0]).url == "http://ex.com/1"
    assert response.follow(response.css("a::attr(href)")[0]).url == "http://ex.com/1"
    assert response.follow(response.xpath("//a/@href")[1]).url == "http://ex.com/other"
    assert response.follow(response.css("li.next")[0]).url == "http://ex.com/1"
    assert response.follow(response.css("link")[0]).url == "http://ex.com/l.css"


@pytest.mark.parametrize("query", ["a[name]", "li:nth-child(2)"])
def test_follow_an_element_without_a_link(query: str) -> None:
    with pytest.raises(RequestError, match="has no href to follow"):
        page(LINKS).follow(page(LINKS).css(query)[0])


@pytest.mark.parametrize(
    "link", [None, 5, page(LINKS).css("a"), page("<!--c-->").xpath("//comment()")[0], ["/x"]], ids=steady
)
def test_follow_what_is_no_link(link: Any) -> None:
    with pytest.raises(RequestError, match="cannot follow"):
        page(LINKS).follow(link)


def test_follow_a_link_that_is_no_url() -> None:
    with pytest.raises(RequestError, match="only http and https"):
        page(LINKS).follow("mailto:a@b")


def urls(batch: LinkBatch) -> list[str]:
    return [request.url.removeprefix("http://ex.com") for request in batch]


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"css": "li.next a"}, r"follow_all\('li.next a', "),
        ({"xpath": "//a"}, r"follow_all\(response.xpath\('//a'\), "),
    ],
)
def test_follow_all_takes_its_query_first(argument: dict[str, Any], instead: str) -> None:
    with pytest.raises(RequestError, match=instead):
        Response("http://ex.com/", body=b"<a href=/1>1</a>").follow_all(**argument)


def test_follow_all() -> None:
    response, books = page(LINKS), Books()
    assert urls(response.follow_all()) == ["/1", "/other", "/2"]
    assert urls(response.follow_all("li.next a")) == ["/1", "/other"]
    assert urls(response.follow_all("li.next")) == ["/1"]
    assert urls(response.follow_all("a::attr(href)")) == ["/1", "/other", "/2"]
    assert urls(response.follow_all("a")) == ["/1", "/other", "/2"]
    assert urls(response.follow_all("a:not([href='::'])")) == ["/1", "/other", "/2"]
    assert urls(response.follow_all("nope")) == []
    assert urls(response.follow_all(response.css("li, a"))) == ["/1", "/other", "/2"]
    assert urls(response.follow_all(response.css("a::attr(href)"))) == ["/1", "/other", "/2"]
    assert urls(response.follow_all(["x", "/y", "javascript:z"])) == ["/a/x", "/y"]
    batch = response.follow_all("li a", books.book, errback=books.parse, priority=2, meta={"a": 1}, dont_filter=True)
    assert batch == LinkBatch(
        base=URL, hrefs=["/1", "/other"], callback="book", errback="parse", priority=2, meta={"a": 1}, dont_filter=True
    )
    assert [(each.url, each.callback, each.meta) for each in batch] == [
        ("http://ex.com/1", "book", {"a": 1}),
        ("http://ex.com/other", "book", {"a": 1}),
    ]
    assert len(response.follow_all("li a, li a")) == 2
    with pytest.raises(RequestError, match="by name"):
        response.follow_all("a", lambda response: None)
    with pytest.raises(SelectorError):
        response.follow_all("a[")
    assert next(iter(response.follow_all("a", timeout=3))).timeout == 3
    with pytest.raises(TypeError):
        response.follow_all("a", nonsense=1)


@pytest.mark.parametrize(
    "values",
    [
        {"priority": True}, {"priority": "1"}, {"priority": float("nan")}, {"timeout": True}, {"timeout": float("inf")},
        {"timeout": 0}, {"proxy": 5}, {"redirects": 5}, {"redirects": [1]}, {"headers": {"a": "\ud800"}},
        {"cookies": {"a": "\ud800"}}, {"meta": {1: 2}},
    ],
)  # fmt: skip
def test_what_could_not_come_back_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Request("http://ex.com/", **values)


def test_odd_but_good_values() -> None:
    assert Request("http://ex.com/", dont_filter=1).dont_filter is True
    assert Request("http://ex.com/", priority=10**30).priority == 1e30


def test_links() -> None:
    assert page(LINKS).links() == ["http://ex.com/1", "http://ex.com/other", "http://ex.com/2"]
    assert page(LINKS).links("li") == ["http://ex.com/1"]
    assert {"http://ex.com/leaf/0", "http://ex.com/leaf/1"} <= set(page(BROKEN_HTML).links())


# -- what a stranger's page may cost


@pytest.mark.parametrize(
    "html",
    [
        b"<div>" * 300_000 + b"<a href=/x>", b"<b>" * 300_000 + b"<a href=/x>", b"<a href=/x>" * 100_000,
        b"<table><tr><td>" * 30_000 + b"<a href=/x>", b"<a href=/x " + b"y " * 500_000 + b">",
        b"&" * 2_000_000 + b"<a href=/x>", b"<a><b><i><p>" * 30_000 + b"<a href=/x>",
    ],
    ids=["deep", "formatting", "links", "tables", "attributes", "ampersands", "misnested"],
)  # fmt: skip
def test_monstrous_pages(html: bytes) -> None:
    response = page(html)
    started = time.process_time()
    assert response.links() == ["http://ex.com/x"]
    assert response.css("title::text").get() is None
    assert len(response.xpath("//a").getall()) >= 1
    assert response.to_markdown() is not None
    assert time.process_time() - started < 10


def test_a_charset_that_goes_on_and_on() -> None:
    started = time.process_time()
    assert page("é", "charset " * 8000 + "charset" + " " * 60_000).text == "é"
    assert time.process_time() - started < 1


def test_the_callback_is_the_second_argument() -> None:
    assert Request(URL, Books().book).callback == "book"
    with pytest.raises(RequestError, match=re.escape("write Request(url, method='POST')")):
        Request(URL, "POST")


def test_cb_kwargs() -> None:
    request = sent(Request(URL, "book", cb_kwargs={"place": 3, "of": ["x"]}))
    assert request.cb_kwargs == {"place": 3, "of": ["x"]}
    assert Response(URL, request=request).cb_kwargs == {"place": 3, "of": ["x"]}
    assert [each.cb_kwargs for each in page("<a href=x>").follow_all(cb_kwargs={"n": 1})] == [{"n": 1}]
    assert b"cb_kwargs" not in msgspec.msgpack.encode(Request(URL))
    with pytest.raises(RequestError, match="cb_kwargs must be a dict"):
        Request(URL, cb_kwargs={1: 2})  # type: ignore[dict-item]


SECTIONS = (
    "<nav><a href=/a/1>1</a></nav><main><a href=/a/2>2</a><a href=/b/3>3</a><p><a href=/a/4?print>4</a></p></main>"
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allow": r"/a/\d"}, ["/a/1", "/a/2", "/a/4?print"]),
        ({"allow": [r"/a/1", re.compile("/B/", re.IGNORECASE)]}, ["/a/1", "/b/3"]),
        ({"deny": [r"print", "/b/"]}, ["/a/1", "/a/2"]),
        ({"allow": "/a/", "deny": "print"}, ["/a/1", "/a/2"]),
        ({"allow": "^http://ex.com/b"}, ["/b/3"]),
        ({"restrict_css": "main"}, ["/a/2", "/b/3", "/a/4?print"]),
        ({"restrict_css": "nav, p"}, ["/a/1", "/a/4?print"]),
        ({"restrict_css": "main", "allow": "a/2"}, ["/a/2"]),
    ],
)
def test_follow_some(options: dict[str, Any], expected: list[str]) -> None:
    assert [each.url for each in page(SECTIONS).follow_all(**options)] == ["http://ex.com" + path for path in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": "("}, "invalid regular expression"),
        ({"links": ["/x"], "restrict_css": "main"}, "needs links as a CSS query"),
        ({"links": "a::attr(href)", "restrict_css": "main"}, "without ::"),
    ],
)
def test_follow_some_badly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        page(SECTIONS).follow_all(**options)


def test_article() -> None:
    text = "<p>" + "A long paragraph of an article, with commas, and more. " * 10 + "</p>"
    html = "<html lang=en><head><meta name=author content='A. Writer'></head><body><nav><a href=/>Home</a></nav>"
    article = page(f"{html}<article><h1>Title</h1>{text * 3}</article></body>").article
    assert (article.title, article.byline, article.lang) == ("Title", "A. Writer", "en")
    assert "A long paragraph" in article.text
    assert "Home" not in article.text


def test_structured_data() -> None:
    data = page(
        '<script type="application/ld+json">{"@type": "Book", "name": "X"}</script><meta property="og:title" content=T>'
        '<div itemscope itemtype="http://schema.org/Book"><a itemprop=url href="/p">n</a></div>'
    ).structured_data
    assert data.json_ld == [{"@type": "Book", "name": "X"}]
    assert data.opengraph == {"og:title": "T"}
    assert data.microdata[0].properties == {"url": ["http://ex.com/p"]}


def test_structured_data_that_is_nested_too_deeply() -> None:
    html = "<div vocab=http://s/ typeof=T property=x>" * 500
    with pytest.raises(SelectorError, match="structured data"):
        page(html).structured_data  # noqa: B018


@pytest.mark.parametrize(
    "html",
    [
        "<div itemscope itemref='a0 b0'></div>"
        + "".join(
            f"<div id={name}{n} itemprop={name} itemscope itemref='a{n + 1} b{n + 1}'></div>"
            for n in range(30)
            for name in "ab"
        ),
        "<div itemscope>" + "<div itemprop=a>" * 400 + "x" * 200_000,
        "<p id=a>" + "x" * 200_000 + "</p>" + "<div itemscope itemref=a></div>" * 1000,
    ],
    ids=["references to references", "properties in properties", "many references"],
)
def test_structured_data_that_would_be_huge(html: str) -> None:
    with pytest.raises(TooComplexError):
        page(html).structured_data  # noqa: B018


def test_microdata_elsewhere_on_the_page() -> None:
    html = "<div itemscope itemref=a></div><p id=a>Price: <b itemprop=price>3</b></p>"
    assert page(html).structured_data.microdata[0].properties == {"price": ["3"]}
