"""The memory of a server is bounded by its limits, whatever callers send, repeat, or do not read."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.acceptance.serving import PATIENCE, Api, beside, serving, until
from tests.support.servers import StreamServer, answer, head, read_head

MB = 1_000_000


class Sized(StreamServer):
    """``/100`` is a page with a text of 100 bytes. In ``/100/control`` these are control characters, six bytes each in
    JSON."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            size, _, kind = request.path.lstrip("/").partition("/")
            letter = "\x01" if kind == "control" else "x"
            page = answer(letter * int(size), content_type="text/plain") if size.isdecimal() else answer(status=404)
            writer.write(page)
            await writer.drain()


@pytest.fixture(scope="module")
def site() -> Iterator[Sized]:
    with beside(Sized()) as server:
        yield server


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path) as server:
        yield server


def memory_of(api: Api, field: str = "VmRSS") -> int:
    status = Path(f"/proc/{api.process.process.pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_a_url_that_is_sent_often_is_answered_with_its_content_once(api: Api, site: Sized) -> None:
    url = f"{site.url}/300000"
    before = memory_of(api, "VmHWM")
    results = api.batch(["no url", *[url] * 1500, f"{site.url}/nowhere", f"{site.url}/nowhere"])["results"]
    assert memory_of(api, "VmHWM") - before < 100 * MB
    first = results[1]
    assert (len(first["content"]), "same_as" in first) == (300_000, False)
    assert {(each["url"], each["status"], each["content"], each["same_as"]) for each in results[2:1501]} == {
        (url, "success", None, 1)
    }
    assert {frozenset(each) for each in results[2:1501]} == {frozenset({*first, "same_as"})}
    assert results[-1]["same_as"] == 1501
    assert results[-1]["error"] == {"kind": "http 404", "message": "see results[1501]"}


# -- bodies


def send_half(api: Api, head: str, body: bytes) -> socket.socket:
    """Begin a request whose body never ends."""
    connection = socket.create_connection(("127.0.0.1", api.port))
    connection.settimeout(PATIENCE)
    with suppress(OSError):  # the server may have refused it
        connection.sendall(f"{head}\r\nHost: localhost\r\n".encode() + body)
    return connection


def declared(size: int) -> bytes:
    return b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (size + 1) + b"x" * size


def chunked(size: int) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (size + 1) + b"x" * size


def status_of(connection: socket.socket) -> int:
    """The status of the answer; 0 if the server closed the connection without one."""
    with suppress(ConnectionError):
        return int(connection.recv(100).partition(b" ")[2][:3] or 0)
    return 0


@pytest.mark.parametrize("body", [declared, chunked])
def test_public_routes_take_small_bodies(tmp_path: Path, body: Callable[[int], bytes]) -> None:
    with serving(tmp_path, {"SHOAL_SERVE__TOKEN": "a-token-of-the-operator"}) as api, ExitStack() as connections:
        before = memory_of(api, "VmHWM")
        with ThreadPoolExecutor(40) as threads:
            begun = threads.map(lambda _: send_half(api, "POST /ui/login HTTP/1.1", body(4 * MB)), range(40))
            opened = [connections.enter_context(connection) for connection in begun]
        assert memory_of(api, "VmHWM") - before < 60 * MB
        assert {status_of(connection) for connection in opened} <= {413, 0}
        large = {"Content-Type": "application/x-www-form-urlencoded"}
        status, refused = api.ask("POST", "/ui/login", b"token=" + b"x" * 20_000, large)
        assert (status, refused["error"]["kind"]) == (413, "too large")
        assert "20000 bytes" in refused["error"]["message"]


def test_bodies_of_one_caller_share_a_budget(api: Api) -> None:
    with ExitStack() as connections:
        before = memory_of(api)
        with ThreadPoolExecutor(40) as threads:
            begun = threads.map(lambda _: send_half(api, "POST /api/crawl/batch HTTP/1.1", declared(5 * MB)), range(40))
            opened = [connections.enter_context(connection) for connection in begun]
        assert memory_of(api) - before < 90 * MB
        allowed = (32 << 20) // (5 * MB)
        until(lambda: len(select.select(opened, [], [], 0)[0]) == 40 - allowed, what="the others are refused")
        refused = select.select(opened, [], [], 0)[0]
        assert {status_of(connection) for connection in refused} <= {429, 0}
        status, answer = api.ask("POST", "/api/crawl/batch", declared(5 * MB).partition(b"\r\n\r\n")[2])
        assert (status, answer["error"]["kind"]) == (429, "too many requests")
    until(lambda: api.ask("POST", "/api/crawl/batch", b"{" + b" " * 5 * MB)[0] == 422, what="room for a body")


def test_a_body_is_limited_by_its_route(api: Api) -> None:
    status, answer = api.ask("POST", "/api/schedules", b" " * 200_000)
    assert (status, answer["error"]["kind"]) == (413, "too large")
    assert "131072 bytes" in answer["error"]["message"]


def test_a_slow_body_has_a_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, {"SHOAL_SERVE__REQUEST_TIMEOUT": "1"}) as api:
        for body in (declared(10), chunked(10)):
            with send_half(api, "POST /ui/login HTTP/1.1", body) as connection:
                assert status_of(connection) == 0


# -- answers


def ask_only(api: Api, path: str) -> socket.socket:
    """Send a request, and read nothing."""
    connection = socket.create_connection(("127.0.0.1", api.port))
    connection.settimeout(PATIENCE)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def large_session(api: Api, site: Sized, size: int = 3 * MB) -> str:
    """A session with 12 results of this size: 36 MB of results have 216 MB in JSON."""
    urls = [f"{site.url}/{size}/control?{number}" for number in range(12)]
    session: str = api.batch(urls, options={"robots": False}, wait=False)["session_id"]
    until(lambda: api.get(f"/api/crawl/{session}?after=1000000")[1]["progress"]["done"] == 12, what="all are done")
    return session


@pytest.mark.parametrize("size", [120_000, 1_900_000, 3 * MB])
def test_answers_that_nobody_reads_take_no_memory(api: Api, site: Sized, size: int) -> None:
    session = large_session(api, site, size)
    before = memory_of(api)
    with ExitStack() as connections:
        for _ in range(30):
            connections.enter_context(ask_only(api, f"/api/crawl/{session}"))
            connections.enter_context(ask_only(api, f"/api/crawl/{session}/stream"))
        highest = 0
        for _ in range(10):
            assert api.get("/health")[0] == 200
            highest = max(highest, memory_of(api))
            time.sleep(0.1)
        assert highest - before < 200 * MB


def test_what_counts_is_what_is_sent(api: Api, site: Sized) -> None:
    session = large_session(api, site)
    body = urllib.request.urlopen(f"{api.url}/api/crawl/{session}", timeout=PATIENCE).read()
    page = json.loads(body)
    assert len(body) < 64 << 20
    assert [len(result["content"]) for result in page["results"]] == [3 * MB] * 3
    assert (page["next"], page["results"][0]["content"][:2]) == (3, "\x01\x01")
    whole = api.batch([f"{site.url}/3000000/control?{number}" for number in range(5)], options={"robots": False})
    assert [result.get("truncated", False) for result in whole["results"]] == [False] * 3 + [True] * 2
    assert (whole["results"][4]["status"], whole["stats"]["success"]) == ("success", 5)


def test_a_batch_has_the_order_of_its_urls_however_large_it_is(api: Api, site: Sized) -> None:
    """Its contents are read again from the item log, which has another order."""
    sizes = [random.Random(7).randrange(200_000) for _ in range(60)]
    urls = [f"{site.url}/{size}?{number}" for number, size in enumerate(sizes)]
    answer = api.batch(urls, options={"robots": False})
    assert [result["url"] for result in answer["results"]] == urls
    assert [len(result["content"]) for result in answer["results"]] == sizes
    assert not any("truncated" in result for result in answer["results"])


def test_a_client_that_stops_reading_loses_its_connection(tmp_path: Path, site: Sized) -> None:
    with serving(tmp_path, {"SHOAL_SERVE__REQUEST_TIMEOUT": "1"}) as api:
        session = large_session(api, site)
        with ask_only(api, f"/api/crawl/{session}") as stopped, ask_only(api, f"/api/crawl/{session}") as slow:
            begin = time.monotonic()
            while time.monotonic() < begin + 4:  # it reads a little, again and again
                assert slow.recv(200_000)
                time.sleep(0.2)
            received = 0
            with suppress(ConnectionError):
                while piece := stopped.recv(1 << 20):
                    received += len(piece)
            assert received < 30 * MB  # what the system held, of 54 MB
            slow.settimeout(0.2)
            assert slow.recv(1000)


class Waiting(StreamServer):
    """Never answers."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()


def test_streams_are_limited(api: Api) -> None:
    with beside(Waiting()) as site, ExitStack() as connections:
        session = api.batch([f"{site.url}/"], options={"robots": False}, wait=False)["session_id"]
        path = f"/api/crawl/{session}/stream"
        streams = [connections.enter_context(ask_only(api, path)) for _ in range(100)]
        assert {status_of(stream) for stream in streams} == {200}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(api.url + path, timeout=PATIENCE)
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "5")
        assert json.load(refused.value)["error"]["kind"] == "too many requests"
        view = urllib.request.Request(api.url, headers={"Accept": "text/event-stream"})
        with pytest.raises(urllib.error.HTTPError, match="429"):
            urllib.request.urlopen(view, timeout=PATIENCE)
        streams[0].close()

        def is_accepted() -> bool:
            with ask_only(api, path) as stream:
                return status_of(stream) == 200

        until(is_accepted, what="room for a stream")


def test_connections_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, {"SHOAL_SERVE__MAX_CONNECTIONS": "10"}) as api, ExitStack() as connections:
        kept = [connections.enter_context(socket.create_connection(("127.0.0.1", api.port))) for _ in range(5)]
        status, answer = api.get("/health")
        assert (status, answer["error"]["kind"]) == (429, "too many connections")
        other = ("127.0.0.3", 0)
        kept += [
            connections.enter_context(socket.create_connection(("127.0.0.1", api.port), source_address=other))
            for _ in range(5)
        ]
        with socket.create_connection(("127.0.0.1", api.port), source_address=("127.0.0.4", 0)) as connection:
            assert status_of(connection) == 503
        kept[0].close()
        until(lambda: api.get("/health")[0] == 200, what="room for a connection")


def test_results_of_a_memory_store_are_on_disk(api: Api, site: Sized) -> None:
    before = memory_of(api)
    urls = [f"{site.url}/300000?{number}" for number in range(2000)]
    session_id = api.batch(urls, wait=False)["session_id"]
    assert api.wait(session_id, 200)["progress"]["done"] == 2000
    assert memory_of(api, "VmHWM") - before < 250 * MB  # of 600
    for after in (0, 1000, 1990):
        page = api.get(f"/api/crawl/{session_id}?after={after}&limit=5")[1]
        assert [len(result["content"]) for result in page["results"]] == [300_000] * 5


class Slow(StreamServer):
    """``/plain``, ``/chunked`` and ``/gzip`` are texts of 16 MB, ``/html`` is a page of 4 MB. The end of each comes a
    second late."""

    text = b"x" * (16 * MB)
    html = b"<p>one <b>word</b>" * (4 * MB // 18)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            kind = (await read_head(reader)).path.strip("/").partition("?")[0]
            if kind not in ("plain", "chunked", "gzip", "html"):
                writer.write(answer(status=404))
                continue
            body = self.html if kind == "html" else self.text
            body = gzip.compress(body, 1) if kind == "gzip" else body
            size = ("Transfer-Encoding", "chunked") if kind == "chunked" else ("Content-Length", str(len(body)))
            coding = [("Content-Encoding", "gzip")] if kind == "gzip" else []
            writer.write(head(("Content-Type", "text/html" if kind == "html" else "text/plain"), size, *coding))
            last = body[-5:]
            writer.write(b"%x\r\n%s\r\n" % (len(body) - 5, body[:-5]) if kind == "chunked" else body[:-5])
            await writer.drain()
            await asyncio.sleep(1)
            writer.write(b"5\r\n%s\r\n0\r\n\r\n" % last if kind == "chunked" else last)
            await writer.drain()


@pytest.mark.parametrize("kind", ["plain", "chunked", "gzip", "html"])
def test_large_pages_wait_for_memory(tmp_path: Path, kind: str) -> None:
    """Without the limit, 30 pages of 16 MB are in memory at the same time."""
    more = {"SHOAL_CONCURRENCY": "30", "SHOAL_CONCURRENCY_PER_HOST": "30"}
    with beside(Slow()) as site, serving(tmp_path, more) as api:
        before = memory_of(api)
        urls = [f"{site.url}/{kind}?{number}" for number in range(30)]
        options = {"max_bytes": 17 * MB, "robots": False, "timeout": 60, "format": "text"}
        session_id = api.batch(urls, wait=False, options=options)["session_id"]
        while api.get(f"/api/crawl/{session_id}?limit=1&after=30")[1]["state"] == "running":
            assert api.get("/health")[0] == 200
            time.sleep(0.1)
        progress = api.get(f"/api/crawl/{session_id}?limit=1&after=30")[1]["progress"]
        grown = memory_of(api, "VmHWM") - before
        assert progress["done"] == 30, progress
        assert grown < 300 * MB


def test_the_memory_of_large_pages_is_returned(tmp_path: Path, site: Sized) -> None:
    """Pages begin when others end, in their tasks. Together they are larger than the budget."""
    with serving(tmp_path, {"SHOAL_CONCURRENCY": "2", "SHOAL_SERVE__MAX_BODY_MEMORY": "8000000"}) as api:
        small_first = [f"{site.url}/{1000 if number % 2 else 3 * MB}?{number}" for number in range(60)]
        session_id = api.batch(small_first, wait=False, options={"robots": False})["session_id"]
        done = until(lambda: api.get(f"/api/crawl/{session_id}?limit=1&after=60")[1]["state"] == "finished", 60)
        assert done
