"""The parts of a batch: options, content, fair shares and admission."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope, Send

from shoal.api.batch.admission import TooManySessionsError
from shoal.api.batch.local_work import FairQueue, Participant, RoundRobin, divide_slots
from shoal.api.batch.options import BatchOptions, FieldQuery
from shoal.api.batch.queries import MAX_LENGTH, check_css, check_xpath
from shoal.api.batch.quota import PER_ENTRY, Quota
from shoal.api.batch.results import SessionResults
from shoal.api.batch.service import BatchService
from shoal.api.batch.session import Progress, Session, SessionTooLargeError, Webhook
from shoal.api.batch.spider import BatchSpider, content_of, content_type, further_content, start_requests, title_of
from shoal.api.batch.urls import UrlList
from shoal.api.resources.batches import BatchRequest
from shoal.api.resources.clusters import ScaleCluster
from shoal.api.resources.hosts import SetHost
from shoal.api.resources.runs import RetryFailed, StartRun
from shoal.api.server.auth import AuthMiddleware, CallerTokens, check_binding
from shoal.api.server.bodies import BodyError, read_body
from shoal.config import Config, ScopeSettings, ServerSettings
from shoal.errors import (
    ConfigError,
    FetchError,
    RunError,
    SelectorError,
    SpiderError,
    StoreRewoundError,
    TooComplexError,
)
from shoal.frontier.memory.store import MemoryStore
from shoal.http import Request, Response
from shoal.http.exchange import redirected_request
from shoal.item import encode_item
from shoal.operations.notifications.channels import sign
from shoal.ports import Completion, FrontierOptions, Leased, LoggedItem, Run
from shoal.urls.normalize import Scope as UrlScope

URL = "http://example.com/"
LARGE = 1 << 20
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
HTML = {"Content-Type": "text/html; charset=utf-8"}


def page(body: str | bytes, headers: dict[str, str] | None = None, request: Request | None = None) -> Response:
    data = body.encode() if isinstance(body, str) else body
    url = URL if request is None else request.url
    return Response(url, headers=HTML if headers is None else headers, body=data, request=request or Request(url))


# -- options


@given(
    st.builds(
        dict,
        headers=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
        cookies=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
        timeout=st.floats(),
        max_bytes=st.integers(),
        retries=st.integers(-1, 11),
        depth=st.integers(-1, 11),
    )
)
def test_options_are_refused_or_can_be_kept_and_sent(words: dict[str, Any]) -> None:
    try:
        options = BatchOptions.model_validate(words)
    except ValidationError:
        return
    assert BatchOptions.model_validate(json.loads(json.dumps(options.model_dump(mode="json")))) == options
    request = BatchSpider(options, "").start_request(URL, 0)
    assert (request.headers, request.cookies, request.timeout) == (options.headers, options.cookies, options.timeout)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("headers", "X", "secret\r\nHost: x"), ("headers", "X Y", "secret"), ("headers", "X", "secret\0"),
        ("headers", "", "secret"), ("headers", "Host", "secret"), ("cookies", "a", "secret; b=c"),
        ("cookies", "a b", "secret"), ("cookies", "a", "secret\n"), ("cookies", "", "secret"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_value_is_not_told(where: str, name: str, value: str) -> None:
    with pytest.raises(ValidationError) as refused:
        BatchOptions.model_validate({where: {name: value}})
    assert "secret" not in " ".join(error["msg"] for error in refused.value.errors())


def test_text_is_a_css_query() -> None:
    options = BatchOptions.model_validate({"format": "fields", "fields": {"a": "h1", "b": {"xpath": "//h1"}}})
    assert options.fields == {"a": FieldQuery(css="h1"), "b": FieldQuery(xpath="//h1")}


@pytest.mark.parametrize("name", ["", " ", "x" * 101, "a\0", "a\n", "\ud800"])
def test_names_of_fields(name: str) -> None:
    with pytest.raises(ValidationError, match="a field's name"):
        BatchOptions.model_validate({"format": "fields", "fields": {name: "h1"}})


@pytest.mark.parametrize(
    "query",
    [
        "//h1/text()", "count(//p)", "//div[@class='x']/a/@href", "//li[contains(@class, 'next')]/a/@href",
        "//a[contains(text(),'Next')]", "//b[text()='Price']/../span", "//p[position() < 5 and @x]", "//p[last()-1]",
        ".//p", "normalize-space(//p)", "//media:title", "//a|//b", "//p[not(@class)]",
        "/html/body/div[2]/div/main/ul/li[3]/a/span/b/i",
    ],
)  # fmt: skip
def test_xpath_that_is_taken(query: str) -> None:
    assert FieldQuery(xpath=query).xpath == query


@pytest.mark.parametrize(
    "query",
    [
        "count(//*[" * 6 + "1" + "])" * 6, "//p[count(preceding::p)>=0]", "//p/preceding::p", "//p/ancestor::*",
        "//p/following-sibling::p", "//p[.//a]", "//p[b]", "//p[//p]", "//p[string(//p)]", "//*[.='x']",
        "//*[contains(., 'x')]", "//*[normalize-space()='x']", "//*[re:test(@x, '(a+)+$')]", "//*/*/*/*/*/*",
        "//*/../*/../*", "//p" + "[@a]" * 5, "//*[has-class('a')]", "id('x')", "//" + "x" * 200, "//p[@a[@b]]",
    ],
)  # fmt: skip
def test_xpath_that_may_take_long_is_refused(query: str) -> None:
    with pytest.raises(ValidationError, match=r"an XPath of a batch|at most 200"):
        FieldQuery(xpath=query)


@pytest.mark.parametrize(
    "query",
    [
        "h1", "p.price::text", "a[href^='http']::attr(href)", "div > p + p ~ p", "tr:nth-child(2n+1) td", "p:not(.a)",
        "div:has(> a)", "h1, h2", "p ::text", "::text", "ul li:last-child a", "#main .x", "a:is(.a, .b)", "*",
        "div p:has(b)::text, p:has(a)",
    ],
)  # fmt: skip
def test_css_that_is_taken(query: str) -> None:
    assert FieldQuery(css=query).css == query


@pytest.mark.parametrize(
    "query",
    [
        "div:has(div:has(b))", "p:nth-child(2 of .a)", "p:is(:is(a))", "p:not(:has(a))", "p:has(a b c)",
        "a " * 9 + "a", "p:nth-child(2n):nth-child(3n)", "p" + ":has(a)" * 6, "p" * 201,
        "div:has(b) > p", "div:has(b) p", "h1, div:has(b) + p", "div:has(b) ::text",
    ],
)  # fmt: skip
def test_css_that_may_take_long_is_refused(query: str) -> None:
    with pytest.raises(ValidationError, match=r"a CSS query of a batch|at most 200"):
        FieldQuery(css=query)


@given(st.text(st.sampled_from("""ab/[]@"'() -=:,|.*1<>#~"""), max_size=200))
def test_any_text_is_soon_taken_or_refused(query: str) -> None:
    began = time.process_time()
    for name in ("css", "xpath"):
        with suppress(ValidationError):
            FieldQuery(**{name: query})
    assert time.process_time() - began < 0.5


_PIECES = [
    " ", "  ", "\t", "a", "*", "!", "/", "//", "..", ".", "@a", "[", "]", "(", ")", ",", "'", '"', "''", "1", "-", "--",
    "|", ":", "::", "\\", "\\a", "#", "#a", ".a", "[a", "[a=b]", ":is(", ":has(", ":not(.a", ":nth-child(", "2n", "+",
    "> ", "text()", "[text()", "[@a", "[@a and ", "[not(", "[contains(", "normalize-space(", "and", " or ", "=",
    "<", "é", "\0",
]  # fmt: skip


@pytest.mark.parametrize(
    "query", [" " * 60 + "!", " " * 199 + "!", "a" * 199 + "!", "a[" + " " * 197 + "!", "\\a" * 100]
)
def test_a_query_that_was_slow_to_check(query: str) -> None:
    began = time.process_time()
    for check in (check_css, check_xpath):
        with suppress(ValueError):
            check(query)
    assert time.process_time() - began < 0.5


def test_no_query_is_slow_to_check() -> None:
    """A search: pieces of both languages, repeated as much as fits, most of them in groups that were slow together."""
    rng = random.Random(20260216)
    slowest: list[tuple[float, str]] = []
    for _ in range(4000):
        start, unit = (
            "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 4)))
            if not slowest or rng.random() < 0.5
            else rng.choice(slowest)[1][: rng.randint(1, 12)]
            for _ in range(2)
        )
        query = (start + (unit or " ") * MAX_LENGTH)[: MAX_LENGTH - 1] + "!"
        began = time.process_time()
        for check in (check_css, check_xpath):
            with suppress(ValueError):
                check(query)
        slowest = sorted([*slowest, (time.process_time() - began, query)], reverse=True)[:20]
    assert slowest[-1][0] < 0.05  # one may have met a pause; twenty have not


_MANY = 2400
_HOSTILE = {
    "flat": f"<section>{('<p class=a id=c>' + 'x' * 32) * _MANY}</section>" * 40,
    "deep": "<div>" * 120 + f"<section>{('<b>' + 'x' * 40 + '</b>') * _MANY}</section>" * 20,
    "stairs": "<div>" * 120 + ("<p>x" * _MANY + "</div>") * 40,
    "texts": "<div>" * 120 + "x<!---->" * 200_000,
    "combs": ("<div>" * 120 + "x" * 12_000 + "</div>" * 120) * 400,
    "twigs": f"<section>{'<div><b></b></div>' * _MANY}</section>" * 10,
    "names": f"<section>{''.join(f'<t{n}></t{n}>' for n in range(_MANY))}</section>" * 20,
}


@lru_cache(maxsize=1)
def hostile_page(name: str) -> Response:
    """The page, parsed. The tests of one page follow each other."""
    response = page(_HOSTILE[name])
    assert response.document is not None
    return response


@pytest.mark.parametrize(
    "query",
    [
        {"xpath": "//*/*/*/*/*"}, {"xpath": "//*/../*/*/*"}, {"xpath": "//*[@a='1' or @b='2' or @c='3' or @d='4']"},
        {"xpath": "//*[contains(text(), 'z') or normalize-space(text())='z']"},
        {"xpath": "//*[position()=last()-1]"}, {"css": ".q * .r * * * *"},
        {"css": "u ~ p ~ p ~ b"}, {"css": "*:has(u):has(i):not(.z)"}, {"css": "* *::text"},
        {"xpath": "//div//p[text()='a']"}, {"xpath": "//*//*[text()='a']//*"}, {"xpath": "//div//i[text()]/div"},
        {"xpath": "//*//*/*/*/@x"}, {"xpath": "//div | //p | //*"}, {"css": "div *:has(z, y, x):has(w):has(v)"},
        {"css": "*:nth-child(2n)"}, {"css": "*:nth-last-of-type(2n)"}, {"css": "*:only-of-type"},
    ],
    ids=lambda query: next(iter(query.values())),
)  # fmt: skip
@pytest.mark.parametrize("name", _HOSTILE)
def test_a_field_takes_less_than_a_second_on_any_page(name: str, query: dict[str, str]) -> None:
    """Five megabytes, made to be slow. The page is parsed before."""
    response = hostile_page(name)
    began = time.process_time()
    with suppress(SelectorError):  # that it takes too long: then it was stopped
        content_of(response, BatchOptions(format="fields", fields={"a": FieldQuery(**query)}))
    assert time.process_time() - began < 3


@pytest.mark.parametrize("html", ["<p>" * 100_001, "<div>" * 200, "<div>" * 5000, "<p>" * 2501])
def test_fields_are_not_looked_for_on_monstrous_pages(html: str) -> None:
    with pytest.raises(SelectorError, match="too much for fields"):
        content_of(page(html), BatchOptions(format="fields", fields={"a": FieldQuery(css="b")}))


def test_a_path_that_looks_everywhere_twice_is_for_pages_on_which_it_is_quick() -> None:
    def field(html: str, xpath: str) -> Any:
        return content_of(page(html), BatchOptions(format="fields", fields={"a": FieldQuery(xpath=xpath)}))

    ordinary = ("<div>" * 12 + "<p>x" * 20 + "</div>" * 12) * 200 + "<div><p>a"
    assert field(ordinary, "//div//p[text()='a']") == {"a": "a"}
    with pytest.raises(SelectorError, match="too costly for this page"):
        field(_HOSTILE["stairs"], "//div//p[text()='a']")
    assert field(_HOSTILE["stairs"] + "<p>a", "//p[text()='a']") == {"a": "a"}


def test_the_fields_of_a_page_have_a_length_together() -> None:
    html = "<div>" * 100 + "x" * 500_000
    fields = {"one": FieldQuery(css="div"), "two": FieldQuery(css="div")}
    assert len(content_of(page(html), BatchOptions(format="fields", fields=fields))["two"]) == 500_000
    with pytest.raises(SelectorError, match=r"have more than 20.* characters"):
        content_of(page(html), BatchOptions(format="fields", fields={"a": FieldQuery(css="div", all=True)}))


def test_the_fields_of_a_page_have_a_time_together() -> None:
    """Each of these finds the text of the page hundreds of times."""
    html = "<div>" * 120 + "x" * 5_000_000
    fields = {str(number): FieldQuery(css="div", all=True) for number in range(50)}
    began = time.perf_counter()
    with pytest.raises(SelectorError, match=r"more than 0.5 s|more than 2\d+ characters"):
        content_of(page(html), BatchOptions(format="fields", fields=fields))
    assert time.perf_counter() - began < 2.5


# -- content


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("words", "words"),
        ("<title>T</title>", ""),
        ("<title>T</title><h1>One</h1><p>two <b>three</b></p>", "One\n\ntwo three"),
        ("<p>a</p><script>b</script><style>c</style><p>d</p>", "a\n\nd"),
        ("<ul><li>a<li>b</ul>", "* a\n* b"),
    ],
)
def test_text_is_what_a_reader_sees(html: str, text: str) -> None:
    assert content_of(page(html), BatchOptions(format="text")) == text


def test_text_of_a_long_page_is_its_main_content() -> None:
    words = "<p>A paragraph with a good many words, and commas, so that it looks like content.</p>" * 12
    html = f"<nav><a href=/>Home</a></nav><main><article><h1>Head</h1>{words}</article></main><footer>Foot</footer>"
    text = content_of(page(html), BatchOptions(format="text"))
    assert text.startswith("Head\n\nA paragraph")
    assert "Home" not in text
    assert "Foot" not in text


@given(st.binary(max_size=300), st.sampled_from(["", "text/html", "text/plain; charset=x", "application/json"]))
def test_any_bytes_have_a_content_that_can_be_kept(body: bytes, kind: str) -> None:
    response = page(body, {"Content-Type": kind})
    options = [BatchOptions(format=form) for form in ("html", "text", "markdown", "links")]  # type: ignore[arg-type]
    options.append(BatchOptions(format="fields", fields={"a": FieldQuery(xpath="//text()", all=True)}))
    for each in options:
        assert encode_item({"content": content_of(response, each), "title": title_of(response)})


@pytest.mark.parametrize("kind", ["image/png", "application/pdf", "application/octet-stream", "video/mp4", DOCX])
def test_what_is_no_text_has_no_content(kind: str) -> None:
    response = page(b"\x00\xff", {"Content-Type": f"{kind}; x=1"})
    assert content_type(response) == kind
    assert content_of(response, BatchOptions()) is None
    assert title_of(response) is None


@pytest.mark.parametrize(
    "kind",
    [
        "text/csv", "application/json", "application/ld+json", "application/x-ndjson", "application/xml",
        "application/atom+xml", "application/xhtml+xml", "application/javascript", "application/x-yaml",
    ],
)  # fmt: skip
def test_what_is_text_has_content(kind: str) -> None:
    assert content_of(page("a", {"Content-Type": kind}), BatchOptions()) == "a"


# -- the spider


async def test_start_requests_have_their_place() -> None:
    urls = ["no url", URL, "http://EXAMPLE.com/#top", "http://example.com/b", "ftp://example.com/"]
    requests = start_requests(BatchSpider(BatchOptions(), ""), await UrlList.parse(urls))
    assert [(request.url, request.meta) for request in requests] == [
        (URL, {"place": 1}),
        ("http://example.com/b", {"place": 3}),
    ]


async def test_a_url_is_fetched_as_it_was_sent_and_other_spellings_are_duplicates() -> None:
    urls = await UrlList.parse(["http://example.com/%7ea?s=%27", "http://example.com/~a?s='"])
    requests = start_requests(BatchSpider(BatchOptions(), ""), urls)
    assert [request.url for request in requests] == ["http://example.com/%7ea?s=%27"]
    spider = BatchSpider(BatchOptions(depth=1), "", urls.positions)
    assert followed(spider, page('<a href="/%7Ea?s=\'">x</a><a href=/%7Eb>x</a>')) == ["http://example.com/%7Eb"]


def followed(spider: BatchSpider, response: Response) -> list[str]:
    return [each.url for each in spider.parse(response) if isinstance(each, Request)]


def test_links_are_followed_on_the_host_of_a_given_url_or_where_it_leads() -> None:
    spider = BatchSpider(BatchOptions(depth=2), "", urls={f"{URL}given"})
    links = f"<a href={URL}a>a</a><a href={URL}given>b</a><a href=http://other.com/c>c</a>"
    assert followed(spider, page(links)) == [f"{URL}a"]
    away = Request("http://other.com/", redirects=[URL], meta={"place": 0})
    assert followed(spider, page(links, request=away)) == ["http://other.com/c"]
    (found,) = (each for each in spider.parse(page(links)) if isinstance(each, Request))
    left = found.replace(url="http://other.com/", redirects=[found.url])
    assert followed(spider, page(links, request=left)) == []
    found.depth = 2
    assert followed(spider, page(links, request=found)) == []


def test_no_more_links_are_taken_than_may_be_fetched() -> None:
    spider = BatchSpider(BatchOptions(depth=1, max_pages=5), "")
    links = "".join(f"<a href=/{number}>x</a>" for number in range(1000))
    assert [len(followed(spider, page(links))) for _ in range(6)] == [4, 3, 2, 1, 0, 0]


def test_secrets_are_not_sent_unencrypted_if_they_were_encrypted() -> None:
    secrets = {"headers": {"Authorization": "x", "X-Mine": "y", "Accept": "z"}, "cookies": {"a": "b"}}
    secure, plain = "https://example.com/", "http://example.com/"
    for target, was in ((plain, secure), ("https://example.org/", secure), ("http://example.com:81/", plain)):
        followed = redirected_request(Request(was, **secrets), target, 302)
        assert (followed.headers, followed.cookies) == ({"Accept": "z"}, {})
    for target, was in ((secure, plain), (f"{secure}b", secure)):
        followed = redirected_request(Request(was, **secrets), target, 302)
        assert (followed.headers, followed.cookies) == (secrets["headers"], secrets["cookies"])
    request = Request(secure, **secrets)
    found = [
        each
        for each in BatchSpider(BatchOptions(depth=1), "").parse(page(f"<a href={plain}a>a</a>", request=request))
        if isinstance(each, Request)
    ]
    assert [(each.headers, each.cookies) for each in found] == [({"Accept": "z"}, {})]


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (FetchError("no", kind="http 404", retryable=False, status=404), "http 404", 404),
        (FetchError("no", kind="dns", retryable=True), "dns", None),
        (TooComplexError("no"), "too complex", None),
        (SpiderError("the page can't be read"), "content", None),
    ],
)
def test_a_page_that_is_given_up_has_a_result(error: Exception, kind: str, status: int | None) -> None:
    (result,) = BatchSpider(BatchOptions(), "me").failed(Request(URL, meta={"place": 3}), error)
    assert result["error"] == {"kind": kind, "message": str(error)}
    assert (result["status"], result["http_status"], result["place"], result["worker_id"]) == (
        "failed",
        status,
        3,
        "me",
    )


# -- sessions


async def session_of(store: MemoryStore, *urls: str, **options: Any) -> Session:
    return await Session.create(
        store, Config(download_delay=0), urls, BatchOptions(**options), caller="me", distributed=False
    )


async def work(session: Session, count: int, size: int = 10) -> None:
    """Do so many pages, by hand."""
    for lease in (await session.frontier.lease(count, 60)).leases:
        response = page("x" * size, request=lease.request)
        items = [encode_item(each) for each in BatchSpider(session.options, "me").parse(response)]
        await session.frontier.complete([Completion(lease=lease, items=items)])


async def read_all(session: Session) -> list[dict[str, Any]]:
    portions = (await SessionResults(session).read_all()).portions
    return [entry.decode(True) async for portion in portions for entry in portion]


async def test_results_are_read_in_pages_with_what_is_no_url() -> None:
    session = await session_of(MemoryStore(), "bad 1", f"{URL}1", f"{URL}2", "bad 2", f"{URL}3")
    assert [result["url"] for _, result in await SessionResults(session).read(0, 10, LARGE)] == ["bad 1", "bad 2"]
    await work(session, 2)
    assert [(number, result["url"]) for number, result in await SessionResults(session).read(0, 3, LARGE)] == [
        (1, "bad 1"), (2, "bad 2"), (3, f"{URL}1"),
    ]  # fmt: skip
    assert [(number, result["url"]) for number, result in await SessionResults(session).read(1, 9, LARGE)] == [
        (2, "bad 2"), (3, f"{URL}1"), (4, f"{URL}2"),
    ]  # fmt: skip
    assert await SessionResults(session).read(4, 9, LARGE) == []
    assert await session.progress() == Progress(total=5, ready=1, waiting=0, in_flight=0, done=2, failed=2, results=4)
    assert [result["status"] for result in await read_all(session)] == [
        "failed",
        "success",
        "success",
        "failed",
        "pending",
    ]


class RewoundLog:
    """An item log that can lose its last items, as a store does that is restored from a backup."""

    def __init__(self, items: list[LoggedItem]) -> None:
        self.items = items

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        if last is not None and last not in self.items:
            raise StoreRewoundError("the store went back in time")
        return [item for item in self.items if item.seq > after][:limit]


async def test_a_stream_of_results_has_each_once_when_the_store_goes_back() -> None:
    session = await session_of(MemoryStore(), "bad", *(f"{URL}{number}" for number in (1, 2, 3, 4)))
    await work(session, 4)
    first, second, third, fourth = await session.frontier.read_items(0, 9)
    log = RewoundLog([first, second, third])
    results = SessionResults(session)
    results._frontier = log  # type: ignore[assignment]
    read: list[tuple[int, str]] = []
    async for portion in results.follow():
        read += [(entry.number, str(entry.decode(True)["url"])) for entry in portion]
        if len(read) == 4 and not portion:  # it lost two pages, which are done in another order
            log.items = [first, structs.replace(fourth, seq=2), structs.replace(third, seq=3, token=7)]
            log.items.append(structs.replace(second, seq=4, token=8))
            await session.finish()
    assert read == [(1, "bad"), (2, f"{URL}1"), (3, f"{URL}2"), (4, f"{URL}3"), (3, f"{URL}4")]


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 6000), st.integers(1, 7))
def test_pages_of_results_have_a_size(sizes: list[int], max_bytes: int, limit: int) -> None:
    """Each result comes once, whole if it can be, and at least one at a time."""

    async def read() -> None:
        session = await session_of(MemoryStore(), *(f"{URL}{number}" for number in range(len(sizes))))
        for size in sizes:
            await work(session, 1, size)
        after, seen = 0, []
        while found := await SessionResults(session).read(after, limit, max_bytes):
            assert len(found) <= limit
            whole = [result["content"] for _, result in found if not result.get("truncated")]
            assert sum(map(len, whole)) <= max_bytes
            assert len(whole) == len(found) or len(found) == 1
            after = found[-1][0]
            seen += [result["url"] for _, result in found]
        assert seen == [f"{URL}{number}" for number in range(len(sizes))]

    asyncio.run(read())


async def test_a_finished_session_says_why_a_url_has_no_result() -> None:
    session = await session_of(MemoryStore(), f"{URL}1", f"{URL}2", depth=1, max_pages=1)
    await work(session, 1)
    await session.finish()
    _, second = await read_all(session)
    assert second["error"] == {"kind": "limit", "message": "the batch reached its limit of 1 pages (max_pages)"}


async def test_limit_is_said_only_where_it_was_reached() -> None:
    session = await session_of(MemoryStore(), f"{URL}1", f"{URL}2", depth=1, max_pages=2)
    await work(session, 1)
    await session.finish()
    _, second = await read_all(session)
    assert second["error"]["kind"] == "worker lost"


async def test_what_never_came_to_a_result_is_read_at_the_end() -> None:
    """Here a worker is lost with a page, twice."""
    session = await session_of(MemoryStore(), f"{URL}lost", "no url", f"{URL}2", f"{URL}lost#again", retries=0)
    await session.frontier.lease(1, 0.01)
    await asyncio.sleep(0.02)
    await work(session, 2)
    assert [result["url"] for _, result in await SessionResults(session).read(0, 9, LARGE)] == ["no url", f"{URL}2"]
    await session.finish()
    (_, second, third) = await SessionResults(session).read(0, 9, LARGE)
    assert (third[1]["url"], third[1]["error"]["kind"]) == (f"{URL}lost", "worker lost")
    assert third[0] > second[0]
    assert await SessionResults(session).read(second[0], 9, LARGE) == [third]
    assert await SessionResults(session).read(third[0], 9, LARGE) == []
    rest = [entry async for portion in SessionResults(session).follow(second[0]) for entry in portion]
    assert [(entry.number, entry.decode(True)) for entry in rest] == [third]
    assert [entry async for portion in SessionResults(session).follow(third[0]) for entry in portion] == []


async def test_a_session_with_a_page_limit_waits_for_what_is_leased() -> None:
    session = await session_of(MemoryStore(), *(f"{URL}{number}" for number in range(3)), depth=1, max_pages=2)
    (lease,) = (await session.frontier.lease(1, 60)).leases
    await work(session, 1)
    assert not session.is_complete(await session.stats())
    (other,) = (await session.frontier.lease(1, 60)).leases
    await session.frontier.complete([Completion(lease=lease)])
    assert not session.is_complete(await session.stats())
    await session.frontier.release([other])
    assert session.is_complete(await session.stats())


class Waiting:
    """Works on sessions by waiting for their end."""

    def __init__(self) -> None:
        self._stops: dict[str, asyncio.Event] = {}

    async def run(self, session: Session) -> None:
        await self._stops.setdefault(session.id, asyncio.Event()).wait()

    def stop(self, session_id: str) -> None:
        self._stops.setdefault(session_id, asyncio.Event()).set()


async def open_service(
    store: MemoryStore,
    notify: Callable[[Session], Awaitable[bool]],
    keep: float = 100,
    project: str = Config().project_name,
    **serve: int,
) -> BatchService:
    config = Config(serve=ServerSettings(max_sessions=2, keep_results=keep, **serve), project_name=project)
    service = BatchService(store, Waiting(), config, distributed=False, notify=notify)
    await service.open()
    return service


async def test_a_service_limits_sessions_and_deletes_old_ones() -> None:
    notified: list[str] = []
    has_time = asyncio.Event()

    async def notify(session: Session) -> bool:
        notified.append(session.id)
        return await has_time.wait()  # blocks no session

    service = await open_service(MemoryStore(), notify, keep=0.1)
    taken = await asyncio.gather(
        *(service.create([URL], BatchOptions(), caller="me", webhook=Webhook(URL, "x")) for _ in range(5)),
        return_exceptions=True,
    )
    sessions = [each for each in taken if isinstance(each, Session)]
    assert len(sessions) == 2
    assert all(isinstance(each, TooManySessionsError) for each in taken if not isinstance(each, Session))
    await service.cancel(sessions[0])
    async with asyncio.timeout(5):
        while service.running == 2 or not notified:
            await asyncio.sleep(0.01)
        assert notified == [sessions[0].id]
        await service.create([URL], BatchOptions(), caller="me")
        while await service.find(sessions[0].id) is not None:
            await asyncio.sleep(0.01)
    assert await service.find(sessions[1].id) is not None
    sessions[1].stop_waiting()
    async with asyncio.timeout(1):
        await sessions[1].wait(60)
    has_time.set()
    await service.close()


async def ignore(session: Session) -> bool:
    return True


async def test_a_caller_has_not_all_sessions() -> None:
    service = await open_service(MemoryStore(), ignore, max_sessions_per_caller=1)
    await service.create([URL], BatchOptions(), caller="", address="10.0.0.1")
    with pytest.raises(TooManySessionsError, match="of yours"):
        await service.create([URL], BatchOptions(), caller="", address="10.0.0.1")
    await service.create([URL], BatchOptions(), caller="", address="10.0.0.2")
    await service.close()


async def left_behind(store: MemoryStore, run_id: str, **changes: Any) -> Run:
    """A session of a process that is gone, whose URLs were not pushed yet."""
    model = await session_of(MemoryStore(), URL)
    settings = {**msgspec.to_builtins(model.settings), **changes}
    run = Run(run_id=run_id, spider=BatchSpider.name, state="running", created_at=0, settings=settings)
    return await store.create_run(run)


async def test_a_service_has_only_the_sessions_of_its_project() -> None:
    store = MemoryStore()
    await left_behind(store, "left")  # in the default project
    first = await open_service(store, ignore, project="one")
    session = await first.create([URL], BatchOptions(), caller="me")
    second = await open_service(store, ignore, project="two", keep=0.05)
    assert ([each.id for each in first.sessions], second.sessions) == ([session.id], [])
    assert (await second.find(session.id), await second.find("left")) == (None, None)
    await first.cancel(session)
    own = await second.create([URL], BatchOptions(), caller="me")
    await second.cancel(own)
    async with asyncio.timeout(5):
        while await second.find(own.id) is not None:  # it deletes its old sessions, and no others
            await asyncio.sleep(0.01)
    assert await first.find(session.id) is not None
    await first.close()
    await second.close()
    third = await open_service(store, ignore)
    assert [each.id for each in third.sessions] == ["left"]
    await third.close()


async def test_a_session_whose_seeder_was_killed_is_seeded_by_another() -> None:
    store = MemoryStore()
    await left_behind(store, "left")
    frontier = await store.frontier("left", FrontierOptions())
    assert await frontier.claim("seed", 1.0) is not None  # by the one that was killed
    service = await open_service(store, ignore)
    assert (await frontier.stats()).pushed == 0
    async with asyncio.timeout(10):
        while (await frontier.stats()).seeding:
            await asyncio.sleep(0.05)
    assert (await frontier.stats()).pushed == 1
    await service.close()


@pytest.mark.parametrize(
    "changes",
    [{"options": {"option of tomorrow": 1}}, {"urls": 7}, {"options": {"format": "fields", "fields": {"a": "//["}}}],
)
async def test_a_session_that_cant_be_read_is_left_alone(changes: dict[str, Any]) -> None:
    store = MemoryStore()
    await left_behind(store, "odd", **changes)
    await left_behind(store, "good")
    service = await open_service(store, ignore)
    assert [session.id for session in service.sessions] == ["good"]
    with pytest.raises(RunError, match="has invalid"):
        await service.find("odd")
    await service.close()


async def test_the_networks_of_the_server_are_kept_with_a_session() -> None:
    store = MemoryStore()
    config = Config(serve=ServerSettings(allow=("10.0.0.0/8",)))
    made = await Session.create(store, config, [URL], BatchOptions(), caller="", distributed=True)
    found = await Session.find(store, made.id)
    assert found is not None
    assert found.settings.networks == ("10.0.0.0/8",)


# -- bodies


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (StartRun, {"spider": "a", "urls": None}), (StartRun, {"spider": "a", "urls": ["x"], "arguments": {"b": None}}),
        (RetryFailed, {"kinds": None}), (RetryFailed, {"kinds": ["x"]}), (SetHost, {"delay": None}),
        (ScaleCluster, {"runner": 1, "backup": None}), (BatchRequest, {"urls": ["x"], "webhook": None}),
    ],
)  # fmt: skip
def test_bodies_that_are_taken(model: type[BaseModel], body: dict[str, Any]) -> None:
    read = read_body(json.dumps(body).encode(), model, 10)
    assert read == body
    model.model_validate(read)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (StartRun, {"spider": "a", "urls": []}),
        (StartRun, {"spider": "a", "arguments": {str(n): 1 for n in range(101)}}),
        (RetryFailed, {"kinds": []}), (RetryFailed, {"kinds": ["x"] * 101}), (BatchRequest, {"urls": []}),
        (BatchRequest, {"urls": ["x"], "options": {str(n): 1 for n in range(41)}}),
    ],
)  # fmt: skip
def test_bodies_that_are_not(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(read_body(json.dumps(body).encode(), model, 10))
    assert refused.value.error_count() == 1


def test_a_batch_needs_only_its_urls() -> None:
    batch = BatchRequest(urls=["http://a.example/"])
    assert (batch.distributed, batch.timeout, batch.options.format) == (False, 300.0, "html")


def test_an_unknown_key_of_a_body_suggests_the_nearest() -> None:
    with pytest.raises(BodyError, match=r"unknown field `url`; did you mean urls\?"):
        read_body(b'{"url": "http://a.example/"}', BatchRequest, 10)
    with pytest.raises(BodyError, match=r"unknown field `format`; it belongs in options$"):
        read_body(b'{"urls": [], "format": "markdown"}', BatchRequest, 10)
    with pytest.raises(BodyError, match=r"unknown field `zzz`$"):
        read_body(b'{"zzz": 1}', BatchRequest, 10)


# -- what a session holds


def with_quota(limit: int, **options: Any) -> tuple[BatchSpider, Quota]:
    quota = Quota(limit)
    return BatchSpider(BatchOptions(**options), "", quota=quota), quota


def statuses(spider: BatchSpider, *pages: Response) -> list[str]:
    return [each["status"] for each_page in pages for each in spider.parse(each_page) if isinstance(each, dict)]


def test_titles_count() -> None:
    spider, quota = with_quota(100_000, format="links")
    large = page(f"<title>{'t' * 40_000}</title>")
    assert statuses(spider, large, large, large) == ["success", "success", "failed"]
    assert 80_000 < quota.used < 90_000


def test_what_does_not_fit_is_not_kept() -> None:
    spider, quota = with_quota(50_000)
    (result,) = spider.parse(page("€" * 30_000))
    assert (result["status"], result["error"]["kind"], result["content"]) == ("failed", "limit", None)
    assert "serve.max_session_bytes" in result["error"]["message"]
    assert quota.used < 1000


def test_failures_count_and_are_short() -> None:
    spider, quota = with_quota(10_000_000)
    long = Request("http://example.com/" + "a" * 2000, redirects=["http://example.com/" + "b" * 2000])
    for _ in range(100):
        (result,) = spider.failed(long, FetchError("x" * 5000, kind="scope", retryable=False))
    assert len(result["error"]["message"]) < 600
    assert quota.used > 100 * (2000 + 2000 + 5000)


def test_links_count_once() -> None:
    spider, quota = with_quota(10_000_000, depth=1)
    linked = page("".join(f"<a href=/{number}>" for number in range(100)))
    assert len(list(spider.parse(linked))) == 101
    once = quota.used
    assert once > 100 * PER_ENTRY
    assert len(list(spider.parse(linked))) == 101
    assert quota.used - once < 5000
    spider, quota = with_quota(5000, depth=1)
    assert len(list(spider.parse(linked))) < 30


@pytest.mark.parametrize(("location", "kind"), [("/" + "x" * 9000, "redirects"), ("/" + "x" * 4000, "limit")])
async def test_redirects_count(location: str, kind: str) -> None:
    quota = Quota(20_000)

    async def redirect(request: Request) -> Response:
        return Response(request.url, status=302, headers={"Location": location}, request=request)

    async def follow_many() -> None:
        for _ in range(9):
            await quota(Request(URL), redirect)

    with pytest.raises(FetchError) as raised:
        await follow_many()
    assert raised.value.kind == kind


async def test_urls_and_headers_count_from_the_beginning() -> None:
    store = MemoryStore()
    options = BatchOptions(headers={"X-Long": "x" * 10_000})
    config = Config(serve=ServerSettings(max_session_bytes=200_000))
    made = await Session.create(store, config, [f"{URL}{n}" for n in range(10)], options, caller="", distributed=False)
    assert made.quota.used > 100_000
    with pytest.raises(SessionTooLargeError, match="limit of a session is 200000 bytes"):
        await Session.create(store, config, [f"{URL}{n}" for n in range(30)], options, caller="", distributed=False)


async def test_processes_share_what_a_session_may_hold() -> None:
    store = MemoryStore()
    made = await Session.create(store, Config(), [URL], BatchOptions(), caller="", distributed=False)
    base = made.quota.used
    first, second = (Quota(100_000, base, made.frontier) for _ in range(2))
    assert first.use(60_000)
    await first.sync(now=True)
    await second.sync(now=True)
    assert second.used == base + 60_000
    assert not second.use(60_000)
    assert second.use(30_000)
    await second.sync(now=True)
    again = Quota(100_000, base, made.frontier)  # a process that was started later
    await again.sync(now=True)
    assert again.used == base + 90_000
    assert not (await made.frontier.stats()).seeding
    assert [role.cursor for role in await made.frontier.roles() if role.role == "seed"] == [b"1000"]


# -- fairness


@given(
    st.dictionaries(st.text("0123456789", min_size=1, max_size=2), st.sampled_from("abcd"), max_size=30),
    st.integers(1, 200),
)
def test_divide_slots(callers: dict[str, str], total: int) -> None:
    slots = divide_slots(callers, total)
    assert slots.keys() == callers.keys()
    sessions, of_caller = Counter(callers.values()), Counter[str]()
    for session, caller in callers.items():
        assert slots[session] >= 1
        of_caller[caller] += slots[session]
    for caller, count in of_caller.items():
        assert total // len(sessions) <= count <= max(-(-total // len(sessions)), sessions[caller])
        own = [slots[session] for session in callers if callers[session] == caller]
        assert max(own) - min(own) <= 1
    if all(count <= total // len(sessions) for count in sessions.values()) and callers:
        assert sum(slots.values()) == total


class Rival:
    """A session that asks for its pages when it is told to, as an engine does."""

    def __init__(self, round_robin: RoundRobin, session: Session, name: str, served: list[str]) -> None:
        participant = Participant(name, session.id, self._come)
        scope = UrlScope(ScopeSettings(), ())
        self.scheduler = FairQueue(session, scope, round_robin, participant, ttl=60, max_pages=None)
        self.name, self._served = name, served
        self._tasks: set[asyncio.Task[Leased]] = set()

    def _come(self) -> None:
        task = asyncio.ensure_future(self.ask())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ask(self) -> Leased:
        leased = await self.scheduler.next_requests(8)
        for lease in leased.leases:
            self._served.append(self.name)
            asyncio.get_running_loop().call_soon(lambda lease=lease: self._done(lease))
        return leased

    def _done(self, lease: Any) -> None:
        async def complete() -> Leased:
            await self.scheduler.frontier.complete([Completion(lease=lease)])
            return await self.ask()

        task = asyncio.ensure_future(complete())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def test_sessions_take_turns_at_a_host() -> None:
    """Whoever came first does not take each place again that it has released."""
    store, round_robin, served = MemoryStore(), RoundRobin(), list[str]()
    config = Config(download_delay=0, concurrency_per_host=2)
    rivals = []
    for name, count in (("large", 300), ("small", 3), ("other", 3)):
        urls = [f"{URL}{name}/{number}" for number in range(count)]
        session = await Session.create(store, config, urls, BatchOptions(), caller=name, distributed=False)
        rivals.append(Rival(round_robin, session, name, served))
    for rival in rivals:
        await rival.ask()
    async with asyncio.timeout(10):
        while len(served) < 306:
            await asyncio.sleep(0.01)
    assert Counter(served) == {"large": 300, "small": 3, "other": 3}
    assert {"small", "other"} & set(served[20:]) == set()


async def test_who_does_not_come_keeps_nobody_waiting() -> None:
    round_robin = RoundRobin()

    async def nothing() -> tuple[Leased, bool]:
        return Leased([], None), True

    for number in range(3):
        await round_robin.lease(Participant("gone", str(number), lambda: None), nothing)
    async with asyncio.timeout(1):
        await round_robin.lease(Participant("here", "x", lambda: None), nothing)
        await round_robin.lease(Participant("here", "x", lambda: None), nothing)


# -- webhooks


@given(st.text(min_size=8, max_size=30), st.integers(0, 2**40), st.binary(max_size=100))
def test_a_signature_can_be_checked_by_the_recipe(secret: str, at: int, body: bytes) -> None:
    moment, _, code = sign(secret, at, body).removeprefix("t=").partition(",v1=")
    assert moment == str(at)
    assert code == hmac.new(secret.encode(), moment.encode() + b"." + body, hashlib.sha256).hexdigest()


# -- who may come in


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com", "127.0.0.2"])
def test_an_open_address_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="SHOAL_SERVE__TOKEN"):
        check_binding(ServerSettings(host=host))
    with pytest.raises(ConfigError, match="SHOAL_SERVE__TOKEN"):
        check_binding(ServerSettings(host=host, token=""))
    check_binding(ServerSettings(host=host, token="x" * 16))
    check_binding(ServerSettings(host=host, tokens={"ann": "x" * 16}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_loopback_needs_none(host: str) -> None:
    check_binding(ServerSettings(host=host))


async def knock(
    config: ServerSettings, path: str = "/api", *, body: list[bytes] = [], **headers: str
) -> tuple[int, str]:
    """The status of the answer, and who the application took it for."""
    heard: list[str] = []
    answered: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(scope["state"]["caller"])
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200})

    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    messages = iter([*parts, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        answered.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": raw, "client": ("10.0.0.1", 1), "method": "POST"}
    try:
        await AuthMiddleware(app, config, CallerTokens(config))(scope, receive, send)
    except Exception as exc:
        return getattr(exc, "status_code", 0), ""
    return answered[0]["status"], heard[0] if heard else ""


async def test_the_gate_knows_callers_by_their_tokens() -> None:
    config = ServerSettings(tokens={"ann": "one", "bob": "zwéi"}, token="three")
    assert await knock(config, authorization="Bearer one") == (200, "ann")
    assert await knock(config, authorization="bearer  one ") == (200, "ann")
    assert await knock(config, x_api_key="zwéi".encode().decode("latin-1")) == (200, "bob")
    assert await knock(config, authorization="Basic x", x_api_key="one") == (200, "ann")
    assert await knock(config, authorization="Bearer three") == (200, "")
    for headers in ({}, {"authorization": "one"}, {"authorization": "Bearer on"}, {"x_api_key": "onee"}):
        assert await knock(config, **headers) == (401, "")
    assert await knock(config, "/health") == (200, "")
    assert await knock(config, "/health/x") == (401, "")
    assert await knock(ServerSettings()) == (200, "")


async def test_the_gate_counts_what_comes() -> None:
    config = ServerSettings(max_request_bytes=10)
    assert await knock(config, body=[b"12345", b"67890"]) == (200, "")
    assert (await knock(config, body=[b"12345", b"678901", b"2"]))[0] == 413
    assert (await knock(config, content_length="11"))[0] == 413
    assert (await knock(config, content_length="10"))[0] == 200
    assert (await knock(config, content_length="x"))[0] == 200


def test_a_page_in_several_forms() -> None:
    """Fields beside another format are under ``also`` too."""
    html = "<title>T</title><h1>Books</h1><a href='/a'>a</a>"
    options = BatchOptions.model_validate({"also": ["markdown", "links"], "fields": {"heading": "h1", "none": "h6"}})
    found = further_content(page(html), options)
    assert "# Books" in str(found["markdown"])
    assert found["links"] == [page(html).urljoin("/a")]
    assert found["fields"] == {"heading": "Books", "none": None}
    assert further_content(page(html), BatchOptions(format="markdown")) == {}
    for wrong in ({"also": ["nonsense"]}, {"also": ["html"] * 5}, {"format": "fields"}):
        with pytest.raises(ValidationError):
            BatchOptions.model_validate(wrong)


def test_a_wrong_format_names_all_of_them() -> None:
    with pytest.raises(ValidationError, match="'html', 'text', 'markdown', 'links' or 'fields'"):
        BatchOptions.model_validate({"format": "mardown"})
