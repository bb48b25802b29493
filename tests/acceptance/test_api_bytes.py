"""The memory of a server is bounded by its limits, whatever callers send, repeat, or do not read."""

from __future__ import annotations

import asyncio
import re
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.acceptance.serving import PATIENCE, Api, beside, serving, until
from tests.servers import StreamServer, answer, read_head

MB = 1_000_000


class Sized(StreamServer):
    """``/100`` is a page with a text of 100 bytes. In ``/100?control`` these are control characters, six bytes each in
    JSON."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            size, _, kind = request.path.lstrip("/").partition("?")
            letter = "\x01" if kind.startswith("control") else "x"
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
