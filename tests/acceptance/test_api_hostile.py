"""The server refuses hostile bodies with little time and memory, and serves other callers meanwhile."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.acceptance.hostile import BODIES, foreign_urls, post, watched
from tests.acceptance.serving import Api, serving

MOST_MEMORY = 200  # MB that a body of 8 MB may cost: 5,800 without limits
LONGEST = 1.5  # seconds that others may wait: about 0.05 on a quiet machine, 27 without limits


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("hostile")) as made:
        yield made


def test_hostile_bodies_cost_little_and_stop_nobody(api: Api) -> None:
    with watched(api) as watch:
        for path in ("/api/crawl/batch", "/api/runs"):
            for name, body in BODIES.items():
                status, answer = post(api, path, body)
                assert status == 422, (path, name, answer[:300])
                assert len(answer) < 16_000, (path, name)
                error = json.loads(answer)["error"]
                assert error["message"]
                assert len(error["details"]) <= 21, (path, name)
    assert watch.asked > 10
    assert watch.growth < MOST_MEMORY
    assert watch.worst < LONGEST


@pytest.mark.parametrize("path", ["/api/crawl/batch", "/ui/login"])
def test_bodies_in_tiny_chunks_stop_nobody(api: Api, path: str) -> None:
    """A chunk of one byte takes as long as one of a thousand: without turns, the others waited for a minute."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with watched(api) as watch, ExitStack() as held:
        for _ in range(40):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            connection.setblocking(False)
            with suppress(OSError):
                connection.send(head + b"1\r\n \r\n" * 100_000)
        time.sleep(3)
    assert watch.asked > 10
    assert watch.worst < LONGEST


def test_a_body_in_tiny_chunks_is_read(api: Api) -> None:
    body = json.dumps({"urls": ["http://127.0.0.1:1/" + "a" * 500], "wait": False}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /api/crawl/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", api.port), timeout=60) as connection:
        for _ in range(2):  # on the same connection, sent together
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        received = b""
        while received.count(b"session_id") < 2:
            part = connection.recv(65536)
            assert part, received
            received += part
    assert received.count(b"HTTP/1.1 202 Accepted") == 2


def test_a_body_that_is_damaged_after_its_answer_closes_its_connection(api: Api) -> None:
    """Only that: others still have their turns."""
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.port), timeout=60) as connection:
        connection.sendall(head + b"1\r\n \r\n" * 100)
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        with suppress(ConnectionError):
            connection.sendall(b"1\r\n \r\n" * 100 + b"no chunk\r\n")
            while connection.recv(65536):
                pass
    test_a_body_in_tiny_chunks_is_read(api)


def test_errors_are_counted_and_the_first_ones_listed(api: Api) -> None:
    wrong = {f"field {number}": {"no": 1} for number in range(50)}
    body = {"urls": ["http://a.example/"], "options": {"format": "fields", "fields": wrong}}
    status, answer = api.ask("POST", "/api/crawl/batch", body)
    assert status == 422
    assert len(answer["error"]["details"]) == 21
    assert answer["error"]["details"][-1]["message"] == "and 30 more errors"


def test_internationalized_names_are_converted_beside_the_loop(api: Api) -> None:
    urls = foreign_urls(500)
    with watched(api) as watch:
        for path, more in (("/api/crawl/batch", {"wait": False}), ("/api/crawl/batch", {"wait": False})):
            status, answer = api.ask("POST", path, {"urls": urls, **more})
            assert status == 202, answer
            for _ in range(3):
                assert api.get(f"/api/crawl/{answer['session_id']}")[0] == 200
            assert api.ask("DELETE", f"/api/crawl/{answer['session_id']}")[0] == 200
    assert watch.asked > 10
    assert watch.worst < LONGEST


@pytest.mark.parametrize("path", ["/api/crawl/batch", "/api/runs"])
def test_there_are_not_too_many_internationalized_names(api: Api, path: str) -> None:
    more = {} if path.endswith("batch") else {"spider": "Any"}
    with watched(api) as watch:
        status, answer = api.ask("POST", path, {"urls": foreign_urls(10_000, labels=20), **more})
    assert status == 422
    assert "host names outside ASCII; at most 500" in answer["error"]["message"]
    assert watch.worst < LONGEST


def test_urls_that_grow_when_they_are_normalized_are_refused(api: Api) -> None:
    long = "http://127.0.0.1:1/" + "€" * 2000
    answer = api.batch([long, long + "x"], options={"robots": False, "retries": 0})
    assert [result["error"]["kind"] for result in answer["results"]] == ["url", "url"]
