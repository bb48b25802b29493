"""A task is accepted only if its session could have sent it."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.session import Session
from shoal.api.celery.messages import MAX_LEASE_LENGTH, check_belongs, pack, read_task, unpack
from shoal.api.celery.page_worker import intersect_networks
from shoal.config import Config
from shoal.errors import RequestError
from shoal.frontier.memory.store import MemoryStore
from shoal.http import Request, Response
from shoal.http.exchange import redirected_request
from shoal.ports import Lease
from shoal.urls.normalize import host_of

URL = "http://example.com/"
ID = "0123456789abcdef" * 2


async def session_of(**options: Any) -> Session:
    made = {"headers": {"X-A": "1"}, "cookies": {"c": "2"}, "depth": 1, **options}
    return await Session.create(
        MemoryStore(), Config(), ["no url", URL, f"{URL}b"], BatchOptions(**made), caller="", distributed=True
    )


def lease_of(request: Request) -> Lease:
    return Lease(request, os.urandom(16), 2**62, 1, host_of(request.url), 0.0)


async def test_what_a_session_sends_is_taken() -> None:
    session = await session_of()
    spider = session.spider("")
    start = spider.start_request(URL, 1)
    redirected = redirected_request(start, "https://elsewhere.example/x", 302)
    page = Response(URL, headers={"Content-Type": "text/html"}, body=b"<a href=/found>x</a>", request=start)
    (found,) = [each for each in spider.parse(page) if isinstance(each, Request)]
    found = found.replace(depth=1)
    moved = redirected_request(found, "http://elsewhere.example/y", 301)
    for request in (start, redirected, found, moved):
        sent = lease_of(request)
        taken = read_task(ID, pack(sent), "redis://127.0.0.1:6379/0")
        assert taken.request == sent.request
        check_belongs(taken, session)


async def test_a_url_that_is_not_in_normal_form_belongs_to_its_session() -> None:
    url = "http://example.com/%7ea?s=%27"
    session = await Session.create(MemoryStore(), Config(), [url], BatchOptions(), caller="", distributed=True)
    lease = lease_of(session.spider("").start_request(url, 0))
    assert lease.request.url == url
    check_belongs(lease, session)


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "http://example.org/"}, {"url": f"{URL}b"}, {"proxy": "http://p.example"}, {"method": "POST"},
        {"body": b"x"}, {"headers": {"X-A": "2"}}, {"headers": {"X-B": "1"}}, {"cookies": {"d": "2"}}, {"depth": 2},
        {"callback": "failed"}, {"errback": None}, {"errback": "parse"}, {"timeout": 1e6}, {"meta": {"place": 0}},
        {"meta": {"place": 9}}, {"meta": {"place": "1"}}, {"meta": {}}, {"meta": {"place": 1, "site": "x"}},
        {"meta": {"site": "example.org"}}, {"redirects": ["http://example.org/"]}, {"redirects": [URL] * 101},
    ],
)  # fmt: skip
async def test_what_it_does_not_send_is_refused(changes: dict[str, Any]) -> None:
    session = await session_of()
    good = session.spider("").start_request(URL, 1)
    with pytest.raises(RequestError, match="of a task"):
        check_belongs(lease_of(good.replace(**changes)), session)


async def test_a_session_that_follows_no_links_has_none_to_fetch() -> None:
    session = await session_of(depth=0)
    found = session.spider("").start_request(URL, 1).replace(meta={"site": "example.com"})
    with pytest.raises(RequestError, match="not a URL or a link of the session"):
        check_belongs(lease_of(found), session)


def test_arguments_of_a_task() -> None:
    good = pack(lease_of(Request(URL)))
    assert read_task(ID, good, "redis://x").request.url == URL
    for words in (
        (ID.upper(), good, "x"), ("../x", good, "x"), (7, good, "x"), (ID, good, "x" * 2001), (ID, 7, "x"),
        (ID, "x" * (MAX_LEASE_LENGTH + 1), "x"), (ID, "not base64", "x"), (ID, b64encode(b"\xc1").decode(), "x"),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            read_task(*words)


@pytest.mark.parametrize(
    "changes",
    [{"token": -1}, {"attempt": 0}, {"fingerprint": b"short"}, {"host": "other.example"}, {"learned_delay": -1.0}],
)
def test_a_lease_is_in_order(changes: dict[str, Any]) -> None:
    lease = lease_of(Request(URL))
    assert unpack(pack(lease)).fingerprint == lease.fingerprint
    with pytest.raises(RequestError, match="invalid lease"):
        unpack(pack(replace(lease, **changes)))


def test_a_lease_has_nothing_more() -> None:
    fields = [Request(URL), os.urandom(16), 1, 1, "example.com", 0.0, "more"]
    with pytest.raises(RequestError, match="invalid lease"):
        unpack(b64encode(msgspec.msgpack.encode(fields)).decode())


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        unpack(b64encode(data).decode())


@pytest.mark.parametrize(
    ("asked", "own", "both"),
    [
        (["10.0.0.0/8"], [], []),
        (["0.0.0.0/0"], ["10.0.0.0/8"], ["10.0.0.0/8"]),
        (["10.1.0.0/16", "::1"], ["10.0.0.0/8", "::/0"], ["10.1.0.0/16", "::1/128"]),
        (["192.168.0.0/16"], ["10.0.0.0/8"], []),
    ],
)
def test_networks_are_those_that_both_allow(asked: list[str], own: list[str], both: list[str]) -> None:
    assert list(intersect_networks(asked, own)) == both


def test_text_of_strangers_is_printable_in_the_logs_of_celery() -> None:
    code = (
        "import logging, sys\n"
        "from shoal.api.celery.app import app\n"
        "app.log.setup(loglevel='INFO')\n"
        "log = logging.getLogger('shoal.tasks')\n"
        "log.error('url=%s', 'http://a/\\x1b[31m\\n[2026] forged')\n"
        "try:\n    raise ValueError('\\x1b]0;title\\x07')\nexcept ValueError:\n    log.exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert "forged" in said
    assert not any(line.startswith("[2026] forged") for line in said.splitlines())
    assert "\x1b]0;" not in said
    assert "\x1b[31m\n" not in said


def test_a_server_needs_no_celery() -> None:
    code = "import sys; sys.modules['celery'] = sys.modules['kombu'] = None; import shoal.api.server.state"
    subprocess.run([sys.executable, "-c", code], check=True)
