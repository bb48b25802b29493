"""Batches over HTTP: a real server, real sites, and different kinds of callers."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.serving import PATIENCE, Api, beside, is_genuine, serving, stands_still, until
from tests.acceptance.target import Target, most_at_once, target
from tests.support import forking
from tests.support.databases import free_port
from tests.support.servers import CHARSETS, MisbehavingServer, StreamServer, read_body, read_head
from tests.support.servers import answer as page_of

FORBIDDEN = "127.0.0.2"
"""An address of this machine that is not listed as allowed."""
SHOP = """<html><head><title> The shop </title><style>p {color: red}</style></head><body>
<h1>Two books</h1><p class="price">10 €</p><p class="price">12 €</p>
<a href="/one" title="One">first</a> <a href="/two?x=1#top">second</a> <a href="mailto:a@b.c">mail</a>
<script>var hidden = 1;</script></body></html>"""
ANN, BOB, OPERATOR = "the-token-of-ann", "the-token-of-bob", "the-servers-own-token"


class Shop(StreamServer):
    """A page with everything in it, and what else a web site may hold."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            self._log(request)
            pages = {
                "/": page_of(SHOP),
                "/picture": page_of(b"\x89PNG\r\n\x1a\n\x00\xff", content_type="image/png"),
                "/json": page_of('{"a": [1, 2]}', content_type="application/json"),
                "/tiny": page_of("<title>No</title><p>One</p><p>Two <b>three</b></p>"),
                "/untyped": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n<h1>yes</h1>"[:-1],
            }
            writer.write(pages.get(request.path, page_of(status=404)))
            await writer.drain()


class Receiver(StreamServer):
    """Takes webhooks, and answers with these statuses, the last one again and again."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self.messages: list[tuple[str, bytes]] = []
        self._statuses = statuses

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            body = await read_body(reader, request)
            status = self._statuses[min(len(self.messages), len(self._statuses) - 1)]
            self.messages.append((request.header("x-shoal-signature"), body))
            writer.write(page_of(status=status))
            await writer.drain()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    environ = {"SHOAL_SERVE__ALLOW": "127.0.0.1/32", "SHOAL_LOG_LEVEL": "DEBUG"}
    with serving(tmp_path_factory.mktemp("api"), environ) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """With two callers, and limits that are soon reached."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "shoal.toml").write_text(
        f'concurrency_per_host = 64\nlog_level = "DEBUG"\n'
        f"[serve]\nmax_in_flight = 8\nmax_urls = 1000\nmax_sessions = 6\nmax_answer_bytes = 20000\n"
        f'max_request_bytes = 100000\ntoken = "{OPERATOR}"\n[serve.tokens]\nann = "{ANN}"\nbob = "{BOB}"\n'
    )
    with serving(folder) as made:
        yield made


@pytest.fixture(scope="module")
def odd() -> Iterator[MisbehavingServer]:
    with beside(MisbehavingServer()) as made:
        yield made


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with beside(Shop()) as made:
        yield made


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@contextmanager
def called(api: Api, token: str) -> Iterator[Api]:
    """The server, as the owner of this token sees it."""
    caller = object.__new__(Api)
    caller.__dict__ |= {**api.__dict__, "headers": {"Authorization": f"Bearer {token}"}}
    yield caller


def only(api: Api, url: str, **options: Any) -> dict[str, Any]:
    """The result of a batch of one."""
    (result,) = api.batch([url], options=options)["results"]
    found: dict[str, Any] = result
    return found


def kind(result: dict[str, Any]) -> str:
    assert result["status"] == "failed", result
    found: str = result["error"]["kind"]
    return found


def slow(url: str, count: int, wait: float = 0.05) -> list[str]:
    return [f"{url}/{number}?wait={wait}" for number in range(count)]


def is_problem(answer: Any) -> bool:
    """Whether it is an error as all errors are."""
    error = answer["error"]
    return answer.keys() == {"error"} and error.keys() == {"kind", "message", "details"} and bool(error["message"])


# -- options


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("html", SHOP),
        ("text", "Two books\n\n10 €\n\n12 €\n\nfirst second mail"),
        ("links", ["{url}/one", "{url}/two?x=1"]),
    ],
)
def test_formats(api: Api, shop: Shop, form: str, content: Any) -> None:
    result = only(api, shop.url + "/", format=form)
    expected = [each.format(url=shop.url) for each in content] if isinstance(content, list) else content
    assert result["content"] == expected
    assert result["title"] == "The shop"
    assert (result["status"], result["http_status"], result["content_type"]) == ("success", 200, "text/html")
    assert result["error"] is None
    assert abs(time.time() - result["fetched_at"]) < 20


def test_markdown(api: Api, shop: Shop) -> None:
    content = only(api, shop.url + "/", format="markdown")["content"]
    assert "# Two books" in content
    assert f"[first]({shop.url}/one" in content
    assert "hidden" not in content


def test_the_text_of_a_tiny_page(api: Api, shop: Shop) -> None:
    assert only(api, shop.url + "/tiny", format="text")["content"] == "One\n\nTwo three"


def test_fields(api: Api, shop: Shop) -> None:
    fields = {
        "heading": "h1",
        "price": {"css": "p.price"},
        "prices": {"css": "p.price::text", "all": True},
        "titles": {"xpath": "//a/@title", "all": True},
        "count": {"xpath": "count(//p)"},
        "nothing": ".none",
        "none": {"xpath": "//table", "all": True},
    }
    assert only(api, shop.url + "/", format="fields", fields=fields)["content"] == {
        "heading": "Two books", "price": "10 €", "prices": ["10 €", "12 €"], "titles": ["One"], "count": "2.0",
        "nothing": None, "none": [],
    }  # fmt: skip


def test_headers_and_cookies_arrive(api: Api, odd: MisbehavingServer) -> None:
    result = only(api, odd.url + "/echo", headers={"X-Mine": "yes", "User-Agent": "me"}, cookies={"a": "1", "b": "2"})
    heard = dict(json.loads(result["content"])["headers"])
    assert heard["X-Mine"] == "yes"
    assert heard["User-Agent"] == "me"
    assert heard["Cookie"] == "a=1; b=2"
    assert heard["Host"] == odd.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("/hang", {"timeout": 0.3}, "timeout"),
        ("/slow-drip", {"timeout": 0.3}, "timeout"),
        ("/huge", {"max_bytes": 1000}, "too large"),
        ("/huge-declared", {}, "too large"),
        ("/gzip-bomb", {"max_bytes": 100_000}, "too large"),
        ("/reset", {}, "reset"),
        ("/redirect-loop", {}, "redirects"),
        ("/status/404", {}, "http 404"),
    ],
)
def test_pages_that_fail(api: Api, odd: MisbehavingServer, path: str, options: dict[str, Any], expected: str) -> None:
    result = only(api, odd.url + path, retries=0, robots=False, **options)
    assert kind(result) == expected
    assert result["content"] is None
    assert result["worker_id"]


def test_robots(api: Api) -> None:
    with target("User-agent: *\nDisallow: /private") as site:
        url = f"{site.url}/private?a"
        assert kind(only(api, url)) == "robots"
        assert [visit.path for visit in site.visits()] == ["/robots.txt"]
        assert only(api, url, robots=False)["status"] == "success"
        assert [visit.path for visit in site.visits()][1:] == ["/private?a"]


@pytest.mark.parametrize("retries", [0, 2])
def test_retries(api: Api, site: Target, retries: int) -> None:
    result = only(api, f"{site.url}/a?status=503", retries=retries)
    assert (kind(result), result["http_status"]) == ("http 503", 503)
    assert sum(visit.path.startswith("/a") for visit in site.visits()) == retries + 1


def test_links_are_followed_within_the_site(api: Api) -> None:
    """Also where one of them leads away by a redirect."""
    with target(None, None) as site, beside(MisbehavingServer()) as out:
        other = site.urls[1]
        away = urllib.parse.quote(f"{other}/away?link=/beyond", safe="")
        paths = [
            "/c?link=/d", f"/b?link={urllib.parse.quote('/c?link=/d', safe='')}&link=/a", f"{other}/x",
            f"{out.url}/redirect-out?to={away}",
        ]  # fmt: skip
        start = f"{site.url}/a?" + "&".join("link=" + urllib.parse.quote(path, safe="") for path in paths)
        answer = api.batch([start], options={"depth": 2, "format": "links"})
        found = {result["url"].removeprefix(site.url): result["depth"] for result in answer["results"]}
        assert found == {
            start.removeprefix(site.url): 0, "/c?link=/d": 1, "/b?link=%2Fc%3Flink%3D%2Fd&link=/a": 1, "/a": 2, "/d": 2,
        }  # fmt: skip
        assert site.visits(other) == []
        left = api.batch([f"{out.url}/redirect-out?to={away}"], options={"depth": 1})["results"]
        assert [result["final_url"] for result in left] == [f"{other}/away?link=/beyond", f"{other}/beyond"]


def test_a_link_that_is_redirected_to_another_site_leads_no_further(api: Api, site: Target) -> None:
    away = f"{site.url}/away?link=/beyond"
    with beside(MisbehavingServer()) as start:
        page = f"<a href='/redirect-out?to={urllib.parse.quote(away, safe='')}'>out</a>"
        with beside(OnePage(page, start)) as first:
            results = api.batch([first.url + "/"], options={"depth": 3})["results"]
    assert [result["final_url"] for result in results] == [first.url + "/", away]
    assert not [visit for visit in site.visits() if "beyond" in visit.path and "away" not in visit.path]


class OnePage(StreamServer):
    """A page, and whatever else another server has."""

    def __init__(self, page: str, other: MisbehavingServer) -> None:
        super().__init__()
        self._page = page
        self._other = other

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            name = request.path.split("/")[1]
            writer.write(page_of(self._page) if not name else self._other._answer(name, request))
            await writer.drain()


def test_max_pages(api: Api, site: Target) -> None:
    links = "&".join(f"link=/{number}" for number in range(20))
    answer = api.batch([f"{site.url}/a?{links}"], options={"depth": 1, "max_pages": 5})
    assert (answer["state"], answer["stats"]["success"]) == ("finished", 5)
    assert len(site.visits()) == 6  # robots.txt is no page
    answer = api.batch(slow(site.url, 4, 0), options={"depth": 1, "max_pages": 3})
    assert [result["status"] for result in answer["results"]] == ["success"] * 3 + ["failed"]
    assert kind(answer["results"][3]) == "limit"


def test_a_redirect_to_another_host_takes_no_secrets_along(api: Api, site: Target) -> None:
    """Nor do the links that are found there."""
    with beside(MisbehavingServer()) as start, beside(OnePage("<a href='/echo'>next</a>", start)) as other:
        given = f"{start.url}/redirect-out?to={other.url}/"
        options = {
            "depth": 1, "cookies": {"sid": "mine"},
            "headers": {"Authorization": "Bearer mine", "X-Api-Key": "mine", "Accept-Language": "fi"},
        }  # fmt: skip
        first, second = api.batch([given], options=options)["results"]
    assert (first["final_url"], second["final_url"]) == (f"{other.url}/", f"{other.url}/echo")
    heard = dict(json.loads(second["content"])["headers"])
    assert heard["Accept-Language"] == "fi"
    assert not heard.keys() & {"Authorization", "X-Api-Key", "Cookie"}


def test_a_password_is_not_taken_in_a_url(api: Api, site: Target) -> None:
    url = site.url.replace("//", "//me:the-password-in-a-url@")
    (result,) = api.batch([f"{url}/a"])["results"]
    assert kind(result) == "url"
    assert "the-password-in-a-url" not in result["error"]["message"] + api.process.said()
    assert site.visits() == []


def test_redirects_and_other_spellings(api: Api, odd: MisbehavingServer) -> None:
    """Whatever is given has a result in its place, also if another one leads there."""
    upper = odd.url.upper().replace("HTTP", "hTTp")
    urls = [
        f"{odd.url}/redirect/2", f"{odd.url}/redirect/0", f"{odd.url}/leaf/71", f"{upper}/leaf/./71#x",
        f"{odd.url}/leaf/71", "no url", "ftp://127.0.0.1/", f"{odd.url}/leaf/2",
    ]  # fmt: skip
    answer = api.batch(urls)
    assert [result["url"] for result in answer["results"]] == urls
    arrived, alike = f"{odd.url}/redirect/0", f"{odd.url}/leaf/71"
    assert [result["final_url"] for result in answer["results"]] == [
        arrived, arrived, alike, None, None, None, None, f"{odd.url}/leaf/2",
    ]  # fmt: skip
    assert [result.get("same_as") for result in answer["results"]] == [None, None, None, 2, 2, None, None, None]
    assert [kind(result) for result in answer["results"][5:7]] == ["url", "url"]
    assert answer["stats"] == {
        "total": 8, "success": 6, "failed": 2, "pending": 0, "cancelled": 0, "workers_used": 1,
    }  # fmt: skip
    assert sum(visit.path == "/leaf/71" for visit in odd.requests) == 1
    page = api.results(answer["session_id"])
    assert Counter(result["status"] for result in page) == {"success": 4, "failed": 2}
    assert [result["url"] for result in page[:2]] == ["no url", "ftp://127.0.0.1/"]


@pytest.mark.parametrize("form", ["html", "text", "markdown", "links"])
def test_what_is_no_page(api: Api, shop: Shop, odd: MisbehavingServer, form: str) -> None:
    urls = [f"{shop.url}/picture", f"{shop.url}/json", f"{odd.url}/empty", f"{odd.url}/status/204"]
    results = api.batch(urls, options={"format": form})["results"]
    assert {result["status"] for result in results} == {"success"}
    nothing: Any = [] if form == "links" else ""
    json_text: Any = [] if form == "links" else '{"a": [1, 2]}'
    assert [result["content"] for result in results] == [None, json_text, nothing, nothing]
    assert [result["title"] for result in results] == [None] * 4
    assert [result["content_type"] for result in results] == ["image/png", "application/json", "text/html", None]


@pytest.mark.parametrize("name", CHARSETS)
def test_charsets(api: Api, odd: MisbehavingServer, name: str) -> None:
    for form in ("html", "text"):
        assert CHARSETS[name].text in only(api, f"{odd.url}/charset/{name}", format=form)["content"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"screenshot": True}, "no such field"),
        ({"headers": {"Host": "x"}}, "cannot be set"),
        ({"headers": {"content-LENGTH": "1"}}, "cannot be set"),
        ({"headers": {"Transfer-Encoding": "chunked"}}, "cannot be set"),
        ({"headers": {"Transfer_Encoding": "chunked"}}, "cannot be set"),
        ({"headers": {"Connection": "X-Mine, close"}}, "cannot be set"),
        ({"headers": {"Proxy-Connection": "keep-alive"}}, "cannot be set"),
        ({"headers": {"Keep-Alive": "timeout=5"}}, "cannot be set"),
        ({"headers": {"Upgrade": "h2c"}}, "cannot be set"),
        ({"headers": {"HTTP2-Settings": "x"}}, "cannot be set"),
        ({"headers": {"TE": "trailers"}}, "cannot be set"),
        ({"headers": {"Trailer": "X-Mine"}}, "cannot be set"),
        ({"headers": {"Expect": "100-continue"}}, "cannot be set"),
        ({"headers": {"Proxy-Authorization": "Basic eA=="}}, "cannot be set"),
        ({"headers": {"Transfer-Encoding ": "chunked"}}, "invalid name"),
        ({"headers": {"Transfer-Encoding\t": "chunked"}}, "invalid name"),
        ({"headers": {"X: y\r\nTransfer-Encoding": "chunked"}}, "invalid name"),
        ({"headers": {"X-Mine": "y\r\n\r\nGET / HTTP/1.1"}}, "invalid name or value"),
        ({"headers": {"X": "secret\r\nHost: x"}}, "invalid name or value"),
        ({"headers": {"X: a": "secret"}}, "invalid name or value"),
        ({"cookies": {"a": "secret; b=1"}}, "invalid name or value"),
        ({"cookies": {"a\r\n": "secret"}}, "invalid name or value"),
        ({"format": "fields"}, "needs the option fields"),
        ({"format": "fields", "fields": {"a": {"css": "a[", "all": True}}}, "a["),
        ({"format": "fields", "fields": {"a": {"xpath": "//["}}}, "//["),
        ({"format": "fields", "fields": {"a": {}}}, "either css or xpath"),
        ({"format": "fields", "fields": {"a": {"xpath": "count(//*[" * 30 + "1" + "])" * 30}}}, "at most 200"),
        ({"format": "fields", "fields": {"a": {"xpath": "count(//*[" * 8 + "1" + "])" * 8}}}, "an XPath of a batch"),
        ({"format": "fields", "fields": {"a": "div:has(div:has(div:has(b)))"}}, "a CSS query of a batch"),
        ({"headers": {"X": "x" * 10_000}, "cookies": {"a": "b" * 10_000}}, "16384 bytes"),
        ({"format": "fields", "fields": {" ": "h1"}}, "name"),
        ({"format": "pdf"}, "options.format: Input should be 'html', 'text', 'markdown', 'links' or 'fields'"),
        ({"code": "print()"}, "body.options.code: there is no such field"),
        ({"callback": "os.system"}, "no such field"),
        ({"fromat": "text"}, "body.options.fromat: there is no such field; did you mean format?"),
        ({"render": {"wait_fr": "p"}}, "there is no such field; did you mean wait_for?"),
        ({"timeout": -1}, "timeout"),
        ({"retries": 11}, "retries"),
    ],
)
def test_options_that_are_refused(api: Api, options: dict[str, Any], message: str) -> None:
    status, answer = api.ask("POST", "/api/crawl/batch", {"urls": ["http://127.0.0.1/"], "options": options})
    assert status == 422
    assert is_problem(answer)
    assert message in answer["error"]["message"]
    assert "secret" not in json.dumps(answer)


# -- sessions


def test_a_time_out_leaves_the_rest_pending(api: Api, site: Target) -> None:
    urls = [f"{site.url}/a", f"{site.url}/b?gate=1"]
    began = time.monotonic()
    answer = api.batch(urls, timeout=2)
    assert 2 <= time.monotonic() - began < 30
    assert [result["status"] for result in answer["results"]] == ["success", "pending"]
    assert answer["results"][1] | {"content": None, "error": None, "url": urls[1]} == answer["results"][1]
    assert answer["state"] == "running"
    assert answer["stats"]["pending"] == 1
    site.open_gate()
    api.wait(answer["session_id"])
    found = {result["url"]: result["status"] for result in api.results(answer["session_id"])}
    assert found == dict.fromkeys(urls, "success")


def test_a_session_is_read_in_pages(api: Api, site: Target) -> None:
    urls = slow(site.url, 120, 0)
    status, started = api.ask("POST", "/api/crawl/batch", {"urls": urls, "wait": False})
    session = started["session_id"]
    assert (status, started) == (
        202,
        {
            "session_id": session, "state": "running", "distributed": False, "status_url": f"/api/crawl/{session}",
            "stream_url": f"/api/crawl/{session}/stream",
        },
    )  # fmt: skip
    api.wait(session)
    found: list[str] = []
    after = 0
    while (page := api.get(f"/api/crawl/{session}?after={after}&limit=50")[1])["results"]:
        assert len(page["results"]) == min(50, 120 - len(found))
        found += [result["url"] for result in page["results"]]
        after = page["next"]
    assert Counter(found) == Counter(urls)
    assert page["progress"] == {
        "total": 120, "ready": 0, "waiting": 0, "in_flight": 0, "done": 120, "failed": 0, "results": 120,
    }  # fmt: skip


def test_a_session_is_cancelled_at_once(api: Api, site: Target) -> None:
    session = api.batch(slow(site.url, 500), wait=False)["session_id"]
    site.wait_for(20)
    assert api.ask("DELETE", f"/api/crawl/{session}") == (200, {"session_id": session, "state": "cancelled"})
    until(lambda: stands_still(site), what="the site left alone")
    seen = len(site.visits())
    assert seen < 400
    assert api.get(f"/api/crawl/{session}")[1]["state"] == "cancelled"
    assert 0 < len(api.results(session)) <= seen
    assert api.ask("DELETE", f"/api/crawl/{session}")[0] == 200
    assert events(api, session)[-1] == ("done", {"session_id": session, "state": "cancelled"})
    until(lambda: api.get("/health")[1]["sessions"] == 0, 10, "an empty server")


def events(api: Api, session: str, last: int | None = None) -> list[tuple[str, Any]]:
    return [(name, data) for _, name, _, data in stream(api, session, last)]


def stream(api: Api, session: str, last: int | None = None) -> Iterator[tuple[float, str, int, Any]]:
    """Each event with the moment at which it came, its name, its number and its data."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    request = urllib.request.Request(f"{api.url}/api/crawl/{session}/stream", headers={**api.headers, **headers})
    with urllib.request.urlopen(request, timeout=60) as found:
        assert found.headers["Content-Type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        for line in found:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = value
            elif event:
                yield time.monotonic(), event["event"], int(event.get("id", 0)), json.loads(event["data"])
                event = {}


def test_results_are_streamed_as_they_come(api: Api, site: Target) -> None:
    urls = [f"{site.url}/{number}" for number in range(5)] + [f"{site.url}/gate?gate=1"]
    session = api.batch(urls, wait=False)["session_id"]
    found = stream(api, session)
    first = [next(found) for _ in range(5)]
    assert {data["url"] for _, _, _, data in first} == set(urls[:5])
    time.sleep(0.5)
    site.open_gate()
    at, name, number, data = next(found)
    assert (name, data["url"]) == ("result", urls[5])
    assert at - first[-1][0] > 0.4
    assert [name for _, name, _, _ in found] == ["done"]
    numbers = [number for _, _, number, _ in first] + [number]
    assert numbers == sorted(set(numbers))
    again = list(stream(api, session, numbers[2]))
    assert [number for _, _, number, _ in again[:-1]] == numbers[3:]
    assert again[-1][1:] == ("done", numbers[-1], {"session_id": session, "state": "finished"})


def test_a_browser_does_not_connect_again_and_again(api: Api, site: Target) -> None:
    """Whose EventSource takes the end of a stream for a broken connection, until it is told otherwise."""
    for urls in ([f"{site.url}/a"], ["no url"]):
        session = api.batch(urls)["session_id"]
        *_, (_, name, number, _) = stream(api, session)
        assert (name, number) == ("done", 1)
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE)
        connection.request("GET", f"/api/crawl/{session}/stream", headers={"Last-Event-ID": str(number)})
        assert connection.getresponse().status == 204
        connection.close()


def test_a_stream_that_nobody_reads_takes_no_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as api, beside(MisbehavingServer()) as site:
        urls = [f"{site.url}/links/20000?{number}" for number in range(200)]
        session = api.batch(urls, options={"robots": False}, wait=False)["session_id"]
        done = api.wait(session)
        assert done["progress"]["done"] == 200
        before = memory_of(api)
        streams = []
        for _ in range(10):
            connection = socket.create_connection(("127.0.0.1", api.port))
            connection.sendall(f"GET /api/crawl/{session}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            streams.append(connection)
        time.sleep(2)
        assert memory_of(api) - before < 60_000_000
        for connection in streams:
            connection.close()


def memory_of(api: Api) -> int:
    status = Path(f"/proc/{api.process.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_a_webhook_is_signed_and_sent_again(api: Api, site: Target) -> None:
    with beside(Receiver(500, 200)) as receiver:
        webhook = {"url": f"{receiver.url}/done?x=1", "secret": "a long secret"}
        answer = api.batch([f"{site.url}/a", "no url"], webhook=webhook)
        session = answer["session_id"]
        until(lambda: len(receiver.messages) == 2, 10, "a second attempt")
        time.sleep(0.2)
        assert len(receiver.messages) == 2
    for signature, body in receiver.messages:
        assert is_genuine("a long secret", signature, body)
        assert not is_genuine("another secret", signature, body)
        assert not is_genuine("a long secret", signature, body + b" ")
    message = json.loads(receiver.messages[0][1])
    assert message["event"] == "batch.done"
    assert (message["session_id"], message["state"]) == (session, "finished")
    assert message["stats"] == answer["stats"]
    assert (message["stats"]["total"], message["stats"]["success"], message["stats"]["failed"]) == (2, 1, 1)


def test_a_webhook_tells_of_a_cancelled_session(api: Api, site: Target) -> None:
    with beside(Receiver(200)) as receiver:
        webhook = {"url": receiver.url, "secret": "a long secret"}
        session = api.batch([f"{site.url}/a?gate=1"], wait=False, webhook=webhook)["session_id"]
        site.wait_until(lambda visits: any("gate" in visit.path for visit in visits))
        api.ask("DELETE", f"/api/crawl/{session}")
        until(lambda: receiver.messages, 10, "a message")
        assert json.loads(receiver.messages[0][1])["state"] == "cancelled"


def test_a_webhook_needs_a_secret(api: Api) -> None:
    body = {"urls": ["http://127.0.0.1/"], "webhook": {"url": "http://127.0.0.1/"}}
    status, answer = api.ask("POST", "/api/crawl/batch", body)
    assert (status, is_problem(answer)) == (422, True)
    assert "webhook.secret" in answer["error"]["message"]


def test_a_webhook_is_sent_by_the_next_process(tmp_path: Path, site: Target) -> None:
    """If the one that saw the end of the session was stopped before it could be delivered."""
    with beside(Receiver(500, 500, 200)) as receiver, serving(tmp_path, None, "--frontier", "sqlite:///api.db") as api:
        session = api.batch([f"{site.url}/a"], webhook={"url": receiver.url, "secret": "a long secret"})["session_id"]
        until(lambda: len(receiver.messages) == 2, 10, "a second attempt")
        api.process.terminate()
        api.start()
        until(lambda: len(receiver.messages) == 3, 10, "a third attempt")
        api.process.terminate()
        api.start()
        time.sleep(0.5)
        assert len(receiver.messages) == 3
        assert json.loads(receiver.messages[2][1])["session_id"] == session


# -- addresses


class Trap:
    """A port of an address that must not be contacted."""

    def __init__(self) -> None:
        self._listener = socket.create_server((FORBIDDEN, 0))
        self.url = f"http://{FORBIDDEN}:{self._listener.getsockname()[1]}"

    def was_contacted(self) -> bool:
        self._listener.settimeout(0.3)
        try:
            self._listener.accept()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


@pytest.mark.parametrize("robots", [True, False])
def test_addresses_that_are_not_listed_are_refused(api: Api, odd: MisbehavingServer, trap: Trap, robots: bool) -> None:
    mapped = trap.url.replace(FORBIDDEN, f"[::ffff:{FORBIDDEN}]")
    number = trap.url.replace(FORBIDDEN, "2130706434")
    urls = [
        trap.url,
        f"{odd.url}/redirect-out?to={trap.url}",
        mapped,
        number,
        "http://169.254.169.254/latest/meta-data/",
    ]
    results = api.batch(urls, options={"robots": robots})["results"]
    assert [kind(result) for result in results] == ["address"] * 5
    assert not trap.was_contacted()


def test_a_webhook_is_not_sent_to_an_address_that_is_not_listed(api: Api, site: Target, trap: Trap) -> None:
    session = api.batch([f"{site.url}/a"], webhook={"url": trap.url, "secret": "a long secret"})["session_id"]
    until(lambda: f"the webhook of session {session} was not delivered" in api.process.said(), 10, "the refusal")
    assert not trap.was_contacted()


# -- fair shares


@pytest.mark.parametrize("same_host", [True, False])
def test_a_large_batch_does_not_keep_a_small_one_waiting(guarded: Api, same_host: bool) -> None:
    with target(None, None) as site, called(guarded, ANN) as ann, called(guarded, BOB) as bob:
        large = ann.batch(slow(site.url, 1000), wait=False)["session_id"]
        site.wait_for(10)
        before = ann.get(f"/api/crawl/{large}")[1]["progress"]["done"]
        small = bob.batch(slow(site.urls[0 if same_host else 1] + "/small", 3), timeout=60)
        assert small["stats"]["success"] == 3
        assert ann.get(f"/api/crawl/{large}")[1]["progress"]["done"] - before < 200
        ann.ask("DELETE", f"/api/crawl/{large}")


def test_nor_does_it_on_a_store_that_others_share(tmp_path: Path, site: Target) -> None:
    with serving(tmp_path, {"SHOAL_FRONTIER": frontier_url("redis")}) as api:
        large = api.batch(slow(site.url, 1000), wait=False)["session_id"]
        site.wait_for(10)
        before = api.get(f"/api/crawl/{large}")[1]["progress"]["done"]
        assert api.batch(slow(f"{site.url}/small", 3), timeout=60)["stats"]["success"] == 3
        assert api.get(f"/api/crawl/{large}")[1]["progress"]["done"] - before < 200
        api.ask("DELETE", f"/api/crawl/{large}")


@pytest.mark.parametrize("same_host", [True, False])
def test_callers_have_equal_shares(guarded: Api, same_host: bool) -> None:
    """Whatever number of sessions each of them has."""
    with target(None, None) as site, called(guarded, ANN) as ann, called(guarded, BOB) as bob:
        sessions = {
            ann.batch(slow(f"{site.url}/ann{number}", 400), wait=False)["session_id"]: ann for number in range(3)
        }
        sessions[bob.batch(slow(f"{site.urls[0 if same_host else 1]}/bob", 400), wait=False)["session_id"]] = bob
        site.wait_until(lambda visits: any("/bob" in visit.path for visit in visits))
        before = time.monotonic()
        site.wait_for(120)
        visits = [visit for visit in site.visits() if visit.start > before and "robots" not in visit.path]
        for session, caller in sessions.items():
            caller.ask("DELETE", f"/api/crawl/{session}")
    of_bob = sum("/bob" in visit.path for visit in visits)
    assert 0.35 < of_bob / len(visits) < 0.65
    assert most_at_once(visits) <= 9


def test_a_hundred_sessions_at_once(api: Api) -> None:
    with target(None, None, None) as site, ThreadPoolExecutor(100) as pool:
        batches = [[f"{site.urls[number % 3]}/{number}-{page}?wait=0.02" for page in range(5)] for number in range(100)]
        answers = list(pool.map(lambda urls: api.batch(urls, timeout=60), batches))
        seen = Counter(visit.path for visit in site.visits() if "robots" not in visit.path)
    for urls, answer in zip(batches, answers, strict=True):
        assert [result["url"] for result in answer["results"]] == urls
        assert answer["stats"]["success"] == 5
    assert set(seen.values()) == {1}
    assert len(seen) == 500


# -- who may come in


def test_it_does_not_listen_elsewhere_without_a_token(tmp_path: Path) -> None:
    command = [*SHOAL, "serve", "--host", "0.0.0.0", "--port", str(free_port())]
    done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "SHOAL_SERVE__TOKEN" in done.stderr


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*SHOAL, "serve", "--port", str(taken.getsockname()[1])]
        done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "the port is already in use. Choose another with --port" in done.stderr


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": ANN}, {"Authorization": f"Basic {ANN}"},
        {"X-API-Key": "wrong"}, {"X-API-Key": ""}, {"Authorization": "Bearer "}, {"Authorization": "Bearer \xe9\xff"},
        {"Authorization": f"Bearer {ANN}{BOB}"},
    ],
)  # fmt: skip
def test_strangers_are_refused(guarded: Api, headers: dict[str, str]) -> None:
    for method, path in (
        ("POST", "/api/crawl/batch"),
        ("GET", "/api/runs"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ):
        status, answer = guarded.ask(method, path, b"not even JSON" if method == "POST" else None, headers)
        assert (status, is_problem(answer)) == (401, True)
    assert guarded.ask("GET", "/health", headers=headers)[0] == 200
    assert guarded.ask("GET", "/ready", headers=headers)[0] == 200


def test_a_token_may_come_in_two_ways(guarded: Api) -> None:
    for headers in ({"Authorization": f"Bearer {ANN}"}, {"authorization": f"bearer  {ANN}"}, {"X-API-Key": ANN}):
        assert guarded.ask("GET", "/api/crawl/none", headers=headers)[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api/runs", 200), ("GET", "/api/hosts", 200), ("GET", "/api/clusters/none", 422),
     ("DELETE", "/api/runs/none", 404)],
)  # fmt: skip
def test_what_is_everybodys_is_for_the_servers_own_token(guarded: Api, method: str, path: str, status: int) -> None:
    with called(guarded, ANN) as ann:
        refused, answer = ann.ask(method, path)
    assert (refused, is_problem(answer)) == (403, True)
    with called(guarded, OPERATOR) as operator:
        assert operator.ask(method, path)[0] == status


def test_the_figures_tell_of_runs_and_so_are_not_for_all(guarded: Api) -> None:
    with called(guarded, ANN) as ann:
        assert ann.ask("GET", "/metrics")[0] == 403
    with called(guarded, OPERATOR) as operator:
        assert "shoal_" in operator.text("/metrics")


def test_a_session_is_its_callers(guarded: Api, site: Target) -> None:
    with called(guarded, ANN) as ann, called(guarded, BOB) as bob:
        session = ann.batch([f"{site.url}/a"])["session_id"]
        assert ann.get(f"/api/crawl/{session}")[0] == 200
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/stream")):
            status, answer = bob.ask(method, f"/api/crawl/{session}{path}")
            assert (status, is_problem(answer)) == (404, True)
    with called(guarded, OPERATOR) as operator:  # nor is it a run
        assert operator.get(f"/api/runs/{session}/items")[0] == 404
        assert session not in json.dumps(operator.get("/api/runs")[1])


def test_a_session_belongs_to_a_token_and_not_to_an_address(tmp_path: Path, site: Target) -> None:
    environ = {"SHOAL_SERVE__HOST": "0.0.0.0", "SHOAL_SERVE__TOKEN": ANN}
    with serving(tmp_path, environ) as api, called(api, ANN) as caller:
        session = caller.batch([f"{site.url}/a"])["session_id"]
        connection = http.client.HTTPConnection(
            "127.0.0.3", api.port, timeout=PATIENCE, source_address=("127.0.0.2", 0)
        )
        connection.request("GET", f"/api/crawl/{session}", headers=caller.headers)
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403), ({"Host": "evil.example:8000"}, 403), ({"Host": "localhost.evil"}, 403),
        ({"Host": "[::2]:8000"}, 403), ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Host": "LOCALHOST:1"}, 200),
        ({"Host": "127.0.0.1"}, 200), ({"Host": "[::1]:8000"}, 200), ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(api: Api, headers: dict[str, str], status: int) -> None:
    """A browser on this machine would bring their requests, whatever name they gave to its address."""
    found, answer = api.ask("GET", "/api/runs", headers=headers)
    assert found == status
    assert status == 200 or is_problem(answer)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("has_token", [True, False])
def test_pages_of_other_origins_change_nothing(api: Api, guarded: Api, method: str, has_token: bool) -> None:
    """Whether the server has tokens or not, and also where the request has the right one."""
    server = guarded if has_token else api
    token = {"Authorization": f"Bearer {OPERATOR}"} if has_token else {}
    own = f"127.0.0.1:{server.port}"
    refused: list[dict[str, str]] = [
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": ""},
        {"Origin": f"file://{own}"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": f"http://{own}"},
    ]  # fmt: skip
    taken: list[dict[str, str]] = [
        {}, {"Origin": f"http://{own}"}, {"Origin": f"HTTPS://{own}"}, {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"},
    ]  # fmt: skip
    for headers in (*refused, *taken):
        status, answer = server.ask(method, "/api/hosts/none.example/nowhere", {}, {**token, **headers})
        assert (status == 403) == (headers in refused), (headers, answer)
        assert is_problem(answer)
    assert server.ask("GET", "/health", headers={"Origin": "https://evil.example"})[0] == 200


def test_a_body_is_not_too_large(guarded: Api) -> None:
    """Whether its length is declared or not."""
    body = json.dumps({"urls": ["http://127.0.0.1/" + "x" * 8000] * 20}).encode()
    headers = {"Authorization": f"Bearer {ANN}", "Content-Type": "application/json"}
    for chunked in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=PATIENCE)
        parts = (body[begin : begin + 10_000] for begin in range(0, len(body), 10_000))
        more = {} if chunked else {"Content-Length": str(len(body))}
        connection.request("POST", "/api/crawl/batch", parts, {**headers, **more}, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert is_problem(json.load(answer))
        connection.close()


def test_a_request_does_not_take_for_ever_to_arrive(tmp_path: Path, site: Target) -> None:
    """Also the second one on a connection. One that arrived may be worked on for longer."""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    half = b"POST /api/crawl/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    beginnings = (b"", whole[:20], whole + whole[:20], half, whole + half)
    with serving(tmp_path, {"SHOAL_SERVE__REQUEST_TIMEOUT": "1"}) as api, ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), 8)) for _ in beginnings]
        for connection, beginning in zip(connections, beginnings, strict=True):
            connection.sendall(beginning)
        assert api.batch(slow(site.url, 1, wait=2.5))["stats"]["success"] == 1
        for connection in connections:
            while connection.recv(65536):
                pass


def test_there_are_not_too_many_urls(guarded: Api) -> None:
    with called(guarded, ANN) as ann:
        status, answer = ann.ask("POST", "/api/crawl/batch", {"urls": ["http://127.0.0.1/"] * 1001})
    assert (status, is_problem(answer)) == (422, True)
    assert "serve.max_urls" in answer["error"]["message"]


def test_there_are_not_too_many_sessions(guarded: Api, site: Target) -> None:
    until(lambda: guarded.get("/health")[1]["sessions"] == 0, 10, "an empty server")
    with called(guarded, ANN) as ann, ThreadPoolExecutor(12) as pool:

        def begin(number: int) -> tuple[int, str | None, Any]:
            body = json.dumps({"urls": [f"{site.url}/{number}?gate=1"], "wait": False}).encode()
            headers = {**ann.headers, "Content-Type": "application/json"}
            connection = http.client.HTTPConnection("127.0.0.1", ann.port, timeout=PATIENCE)
            connection.request("POST", "/api/crawl/batch", body, headers)
            found = connection.getresponse()
            return found.status, found.headers["Retry-After"], json.load(found)

        answers = list(pool.map(begin, range(12)))
        assert Counter(status for status, _, _ in answers) == {202: 6, 429: 6}
        assert all(int(after or 0) > 0 and is_problem(answer) for status, after, answer in answers if status == 429)
        site.open_gate()
        for status, _, answer in answers:
            if status == 202:
                ann.wait(answer["session_id"])
        until(lambda: guarded.get("/health")[1]["sessions"] == 0, 10, "room again")
        assert begin(13)[0] == 202


def test_nobody_has_more_sessions_by_another_address(tmp_path: Path, site: Target) -> None:
    """Whoever comes from this machine is not believed where it says to come from."""
    body = {"urls": [f"{site.url}/a?gate=1"], "wait": False}
    with serving(tmp_path, {"SHOAL_SERVE__MAX_SESSIONS_PER_CALLER": "1"}) as api:
        assert api.ask("POST", "/api/crawl/batch", body)[0] == 202
        status, answer = api.ask("POST", "/api/crawl/batch", body, {"X-Forwarded-For": "10.1.1.1"})
        assert (status, is_problem(answer)) == (429, True)
        assert "of yours" in answer["error"]["message"]


def test_an_answer_is_not_too_large(guarded: Api, odd: MisbehavingServer) -> None:
    """What is left out can be had a page at a time."""
    urls = [f"{odd.url}/links/100?{number}" for number in range(12)]
    with called(guarded, ANN) as ann:
        answer = ann.batch(urls)
        left_out = [result for result in answer["results"] if result.get("truncated")]
        assert 0 < len(left_out) < 12
        assert len(json.dumps(answer)) < 30_000
        assert {result["status"] for result in answer["results"]} == {"success"}
        assert {result["content"] for result in left_out} == {None}
        page = ann.get(f"/api/crawl/{answer['session_id']}?limit=1000")[1]
        assert 0 < len(page["results"]) < 12
        whole = ann.results(answer["session_id"])
        assert Counter(result["url"] for result in whole) == Counter(urls)
        assert not any(result.get("truncated") for result in whole)
        (large,) = ann.batch([f"{odd.url}/links/1000"])["results"]
        assert large["truncated"]
        (large,) = ann.results(ann.batch([f"{odd.url}/links/1000"])["session_id"])
        assert large["truncated"]


def test_no_secret_is_in_a_log_or_an_answer(guarded: Api, odd: MisbehavingServer) -> None:
    secrets = ["the-webhook-secret", "the-cookie-value", "the-authorization-value"]
    options = {
        "headers": {"Authorization": "Bearer the-authorization-value"}, "cookies": {"sid": "the-cookie-value"},
        "retries": 1, "robots": False,
    }  # fmt: skip
    with called(guarded, ANN) as ann:
        answer = ann.batch(
            [f"{odd.url}/leaf/1", f"{odd.url}/status/500", f"{odd.url}/reset"], options=options,
            webhook={"url": f"{odd.url}/status/404", "secret": "the-webhook-secret"},
        )  # fmt: skip
        answers = [answer, ann.get(f"/api/crawl/{answer['session_id']}"), events(ann, answer["session_id"])]
        answers.append(ann.get("/api/runs")[1])
    until(lambda: "was not delivered" in guarded.process.said() or len(odd.requests) > 4, 10, "the webhook")
    said = guarded.process.said() + json.dumps(answers)
    assert "gave up" in said
    assert [secret for secret in [*secrets, ANN, BOB] if secret in said] == []


def test_a_session_does_not_keep_too_much(tmp_path: Path, odd: MisbehavingServer) -> None:
    environ = {"SHOAL_SERVE__MAX_SESSION_BYTES": "50000", "SHOAL_SERVE__MAX_KEPT_BYTES": "150000"}
    urls = [f"{odd.url}/links/100?{number}" for number in range(40)]
    with serving(tmp_path, environ) as api:
        answer = api.batch(urls, options={"robots": False})
        assert 1 < answer["stats"]["success"] < 30
        failed = [result for result in answer["results"] if result["status"] == "failed"]
        assert {kind(result) for result in failed} == {"limit"}
        assert "serve.max_session_bytes" in failed[0]["error"]["message"]
        for _ in range(10):
            status, answer = api.ask("POST", "/api/crawl/batch", {"urls": urls, "options": {"robots": False}})
            if status != 200:
                break
        assert (status, is_problem(answer)) == (429, True)
        assert "150000 bytes" in answer["error"]["message"]


# -- several servers on one store


def test_a_session_is_not_over_while_another_server_has_its_pages(tmp_path: Path, site: Target) -> None:
    """Also if that one dies with them. Its end is told once."""
    environ = {"SHOAL_FRONTIER": frontier_url("redis"), "SHOAL_LEASE__TTL": "6"}
    (tmp_path / "second").mkdir()
    with beside(Receiver(200)) as receiver, serving(tmp_path, environ) as first:
        urls = [f"{site.url}/{number}?gate=1" for number in range(3)]
        options = {"depth": 1, "max_pages": 3}
        webhook = {"url": receiver.url, "secret": "a long secret"}
        kept, lost = (first.batch(urls, options=options, wait=False, webhook=webhook)["session_id"] for _ in range(2))
        site.wait_until(lambda visits: sum("gate" in visit.path for visit in visits) == 6)
        first.ask("DELETE", f"/api/crawl/{lost}")
        with serving(tmp_path / "second", environ) as second:
            time.sleep(2)
            assert second.get(f"/api/crawl/{kept}")[1]["state"] == "running"
            first.process.kill()
            site.open_gate()
            second.wait(kept, 20)
            assert Counter(result["status"] for result in second.results(kept)) == {"success": 3}
            until(lambda: len(receiver.messages) == 2, 10, "two messages")
            time.sleep(0.5)
            assert len(receiver.messages) == 2


def test_a_session_whose_server_dies_goes_on_at_another(tmp_path: Path, site: Target) -> None:
    """Each is seen to by one server; what the dead one had in flight is fetched again, and nothing else."""
    environ = {"SHOAL_FRONTIER": frontier_url("redis"), "SHOAL_LEASE__TTL": "6", "SHOAL_DOWNLOAD_DELAY": "0"}
    (tmp_path / "second").mkdir()
    with serving(tmp_path, environ) as first, serving(tmp_path / "second", environ) as second:
        urls = slow(site.url, 400)
        session = first.batch(urls, wait=False)["session_id"]
        until(lambda: first.get(f"/api/crawl/{session}")[1]["progress"]["done"] > 100, 30, "some of it")
        assert (first.get("/health")[1]["sessions"], second.get("/health")[1]["sessions"]) == (1, 0)
        first.process.kill()
        until(lambda: second.get("/health")[1]["sessions"] == 1, 15, "the takeover")
        second.wait(session, 40)
        results = second.results(session)
        assert Counter(result["url"] for result in results) == Counter(urls)
        assert {result["status"] for result in results} == {"success"}
        assert len({result["worker_id"] for result in results}) == 2
        again = [path for path, count in Counter(visit.path for visit in site.visits()).items() if count > 1]
        assert len(again) <= 20


# -- restarts


def test_a_session_survives_the_death_of_its_server(tmp_path: Path, site: Target) -> None:
    with serving(tmp_path, {"SHOAL_SERVE__KEEP_RESULTS": "10"}, "--frontier", "sqlite:///api.db") as api:
        urls = slow(site.url, 200)
        session = api.batch(urls, wait=False)["session_id"]
        site.wait_for(50)
        api.process.kill()
        api.start()
        api.wait(session, 30)
        results = api.results(session)
        assert Counter(result["url"] for result in results) == Counter(urls)
        assert {result["status"] for result in results} == {"success"}
        again = [path for path, count in Counter(visit.path for visit in site.visits()).items() if count > 1]
        assert len(again) <= 20  # what was in flight
        until(lambda: api.get(f"/api/crawl/{session}")[0] == 404, 10, "its end")


def test_sessions_for_which_there_is_no_place_yet_go_on_later(tmp_path: Path, site: Target) -> None:
    options = ("--frontier", "sqlite:///api.db")
    environ = {"SHOAL_LEASE__TTL": "4"}
    with serving(tmp_path, environ, *options) as api:
        sessions = [api.batch([f"{site.url}/{name}?gate=1"], wait=False)["session_id"] for name in "abc"]
        site.wait_until(lambda visits: sum("gate" in visit.path for visit in visits) == 3)
        api.process.kill()
    site.open_gate()
    with serving(tmp_path, {**environ, "SHOAL_SERVE__MAX_SESSIONS": "1"}, *options) as api:
        for session in sessions:
            api.wait(session, 20)
            assert [result["status"] for result in api.results(session)] == ["success"]


@pytest.mark.parametrize("waits", [True, False])
def test_it_ends_when_it_is_asked_to(tmp_path: Path, site: Target, waits: bool) -> None:
    """Who waits for an answer gets what is there, and a stream ends."""
    urls = [f"{site.url}/{number}?gate=1" for number in range(20)]
    with serving(tmp_path) as api, ThreadPoolExecutor(2) as pool:
        session = api.batch(urls, wait=False)["session_id"]
        if waits:
            callers = [pool.submit(api.batch, urls), pool.submit(events, api, session)]
            until(lambda: api.get("/health")[1]["sessions"] == 2, 10, "a second session")
        site.wait_until(lambda visits: any("gate" in visit.path for visit in visits))
        began = time.monotonic()
        api.process.process.send_signal(signal.SIGTERM)
        api.process.process.wait(PATIENCE)
        assert time.monotonic() - began < 20  # pages in flight would take for ever
        assert "Traceback" not in api.process.said()
        if waits:
            answer, streamed = (caller.result(PATIENCE) for caller in callers)
            assert (answer["state"], answer["stats"]["pending"]) == ("running", 20)
            assert streamed == []


# -- errors, and the description


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404), ("GET", "/api/crawl/none", 404), ("GET", "/api/crawl/none/", 404),
        ("GET", "/api/crawl/none/stream", 404), ("DELETE", "/api/crawl/none", 404), ("GET", "/api/crawl/%00", 422),
        ("GET", "/api/crawl/%ff%fe", 404), ("GET", "/api/crawl/" + "x" * 200, 422),
        ("GET", "/api/crawl/none?after=-1", 422), ("GET", "/api/crawl/none?limit=0", 422),
        ("GET", "/api/crawl/none?after=1e400", 422), ("PUT", "/api/crawl/batch", 405), ("POST", "/health", 405),
        ("PATCH", "/api/crawl/none", 405), ("GET", "/docs/assets/none.js", 404),
        ("GET", "/docs/assets/%2e%2e/%2e%2e/pyproject.toml", 404),
    ],
)  # fmt: skip
def test_errors_have_one_format(api: Api, method: str, path: str, status: int) -> None:
    found, answer = api.ask(method, path)
    assert (found, is_problem(answer)) == (status, True)


_NUMBER = b"1" + b"0" * 5000


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe\x00", b"{}", b'{"urls": []}', b'{"urls": "http://a/"}',
        b'{"urls": [1]}', b'{"urls": [null]}', b'{"urls": {"a": 1}}', b'{"urls": ["\\ud800"]}', b"[" * 100_000,
        b'{"urls": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"urls": ["http://a/"], "timeout": NaN}',
        b'{"urls": ["http://a/"], "timeout": Infinity}', b'{"urls": ["http://a/"], "timeout": ' + _NUMBER + b"}",
        b'{"urls": ["http://a/"], "timeout": 1e999}', b'{"urls": ["http://a/"], "wait": "maybe"}',
        b'{"urls": ["http://a/"], "options": {"max_bytes": ' + _NUMBER + b"}}", b'{"urls": ["http://a/"], "more": 1}',
        b'{"urls": ["http://a/"], "\\ud800": 1}', b'{"urls": ["http://a/"], "options": {"\\ud800": 1}}',
        b'{"urls": ["http://a/"], "options": {"headers": {"\\ud800": "x"}}}',
        b'{"urls": ["http://a/"], "options": {"headers": {"X": "\\u0000"}}}',
        b'{"urls": ["http://a/"], "options": {"cookies": {"a": "\\ud800"}}}',
        b'{"urls": ["http://a/"], "options": {"format": "fields", "fields": {"\\ud800": "h1"}}}',
        b'{"urls": ["http://a/"], "options": {"format": "fields", "fields": {"a": "\\ud800"}}}',
        b'{"urls": ["http://a/"], "options": {"format": "fields", "fields": {"a": {"xpath": "\\u0000"}}}}',
        b'{"urls": ["http://a/"], "options": {"format": "fields", "fields": {"a": 1}}}',
        b'{"urls": ["http://a/"], "webhook": {"url": "file:///etc/passwd", "secret": "a long secret"}}',
        b'{"urls": ["http://a/"], "webhook": {"url": "http://a/", "secret": "\\ud800\\ud800\\ud800\\ud800\\ud800"}}',
        b'{"urls": ["' + b"x" * 9000 + b'"]}',
    ],
)  # fmt: skip
def test_bodies_that_are_refused(api: Api, body: bytes) -> None:
    status, answer = api.ask("POST", "/api/crawl/batch", body)
    assert (status, is_problem(answer)) == (422, True)


def test_a_body_that_is_not_declared_as_json_names_the_header(api: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    connection.request("POST", "/api/crawl/batch", b'{"urls": ["http://a/"]}', headers)
    answer = connection.getresponse()
    assert answer.status == 422
    assert "with the header Content-Type: application/json" in json.load(answer)["error"]["message"]
    connection.close()


def test_values_that_must_be_objects(api: Api) -> None:
    status, answer = api.ask("POST", "/api/crawl/batch", {"urls": ["http://a/"], "webhook": "http://b/"})
    assert (status, answer["error"]["message"]) == (422, "body.webhook: must be a JSON object")


def test_odd_urls_fail_alone(api: Api) -> None:
    urls = [
        "",
        " ",
        "http://",
        "http://[",
        "http://127.0.0.1:99999/",
        "http://a\0b/",
        "file:///etc/passwd",
        "//x",
        "x" * 8000,
    ]
    answer = api.batch(urls)
    assert [result["url"] for result in answer["results"]] == urls
    assert {kind(result) for result in answer["results"]} == {"url"}
    assert (answer["state"], answer["stats"]["failed"]) == ("finished", len(urls))


def test_the_docs_need_no_network(api: Api) -> None:
    with urllib.request.urlopen(api.url + "/docs") as found:
        page = found.read().decode()
    assets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(assets) >= 3
    for asset in assets:
        assert asset.startswith("/")
        with urllib.request.urlopen(api.url + asset) as found:
            assert len(found.read()) > 100
    assert "//" not in re.sub(r"<!--.*?-->|^\s*//.*$", "", page, flags=re.MULTILINE)
    with urllib.request.urlopen(api.url + "/docs/assets/swagger-ui.css") as found:
        assert not re.findall(rb"url\(\s*['\"]?https?://", found.read())


def test_the_description_is_complete(api: Api) -> None:
    description = api.get("/openapi.json")[1]
    operations = {
        f"{method} {path}": operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) > 20
    for name, operation in operations.items():
        assert operation["summary"], name
        assert operation["description"], name
        for status, found in operation["responses"].items():
            if status >= "400":
                (content,) = found["content"].values()
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}, name
            elif status != "204":
                assert "schema" in found["content"].get("application/json", {"schema": 1}), name
    batch = operations["post /api/crawl/batch"]
    assert batch.keys() >= {"security"}
    schemas = description["components"]["schemas"]
    for model in ("BatchRequest", "BatchAnswer", "SessionStarted", "SessionPage", "SessionState", "Problem"):
        assert schemas[model]["examples"], model
    assert {"200", "202", "401", "413", "422", "429", "503"} <= batch["responses"].keys()
