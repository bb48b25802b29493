"""The limits of the gateway: bytes, connections, time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shoal.fetch.browser.gateway import Gateway, Listener
from tests.fetch.gateway.client import Client, Conversing, Scripted, listening, until
from tests.support.servers import MisbehavingServer, read_body, read_head


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a server that never accepts a connection: its queue is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


# -- connections


async def test_too_many_connections(site: MisbehavingServer) -> None:
    async with listening(max_connections=3) as listener:
        clients = [await Client.to(listener) for _ in range(3)]
        assert [(await each.get(f"{site.url}/leaf/1")).status for each in clients] == [200] * 3
        one_more = await Client.to(listener)
        assert await one_more.ended()
        assert listener.refused == {"connections": 1}
        clients[0].close()
        await until(lambda: len(listener._conversations) == 2)
        again = await Client.to(listener)
        assert (await again.get(f"{site.url}/leaf/1")).status == 200
        for each in (*clients, one_more, again):
            each.close()


async def test_connections_that_are_kept_have_a_limit(listener: Listener) -> None:
    sites = [Scripted(*[b"HTTP/1.1 204 No Content\r\n\r\n"] * 2) for _ in range(40)]
    client = await Client.to(listener)
    for site in sites:
        await site.__aenter__()
        assert (await client.get(f"{site.url}/")).status == 204
    assert len(listener._kept) == 32
    for site in sites:
        await site.__aexit__()
    await until(lambda: not listener._kept)
    client.close()


async def test_failures_are_remembered_within_a_limit(listener: Listener) -> None:
    client = await Client.to(listener)
    for port in range(1, 301):
        assert (await client.get(f"http://127.0.0.1:{port}/")).status == 502
    assert len(listener._failures) == 256
    assert listener.failure("127.0.0.1", 1) is None
    failure = listener.failure("127.0.0.1", 300)
    assert failure is not None
    assert (failure.kind, failure.retryable) == ("connect", True)
    assert str(failure) == "no connection to 127.0.0.1: Connection refused"
    client.close()


# -- time


async def test_slow_headers(site: MisbehavingServer) -> None:
    async with listening(header_timeout=0.2) as listener:
        client = await Client.to(listener)
        client.writer.write(b"GET http://")
        assert await client.ended()
        assert listener.refused == {"timeout": 1}


async def test_headers_byte_by_byte() -> None:
    async with listening(header_timeout=0.4) as listener:
        client = await Client.to(listener)

        async def drip() -> None:
            while True:
                client.writer.write(b"x")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(drip())
        assert await client.ended()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert listener.refused == {"timeout": 1}


async def test_a_site_that_does_not_answer(site: MisbehavingServer) -> None:
    async with listening(idle_timeout=0.2) as listener:
        client = await Client.to(listener)
        reply = await client.get(f"{site.url}/hang")
        assert (reply.status, reply.headers["proxy-status"]) == (504, "shoal; error=timeout")
        assert (await client.get(f"{site.url}/leaf/1")).status == 200
        client.close()


async def test_a_site_that_stops_within_the_body(site: MisbehavingServer) -> None:
    async with listening(idle_timeout=0.2) as listener:
        client = await Client.to(listener)
        client.writer.write(f"GET {site.url}/hang-body HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.reply()


async def test_idle_connections_end(site: MisbehavingServer) -> None:
    async with listening(idle_timeout=0.2) as listener:
        silent, kept, tunnel = [await Client.to(listener) for _ in range(3)]
        await kept.get(f"{site.url}/leaf/1")
        await tunnel.connect(site.url)
        assert [await each.ended() for each in (silent, kept, tunnel)] == [True] * 3
        assert not listener._conversations
        assert listener.refused == {}


async def test_slow_bytes_are_not_idle(site: MisbehavingServer) -> None:
    """A site that sends a byte every 100 ms, and a timeout of 500 ms."""
    async with listening(idle_timeout=0.5) as listener:
        for tunnel in (False, True):
            client = await Client.to(listener)
            if tunnel:
                await client.connect(site.url)
            url = "" if tunnel else site.url
            client.writer.write(f"GET {url}/slow-drip HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readexactly(12) == b"x" * 12
            client.close()


async def test_a_site_that_does_not_accept(deaf: str) -> None:
    async with listening(connect_timeout=0.2) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"{deaf}/")).status == 504
        assert (await client.connect(deaf)).status == 504
        failure = listener.failure("127.0.0.1", int(deaf.rpartition(":")[2]))
        assert failure is not None
        assert (failure.kind, failure.retryable) == ("timeout", True)
        client.close()


async def test_a_browser_that_leaves_while_the_gateway_connects(deaf: str, listener: Listener) -> None:
    for method in ("GET", "CONNECT"):
        client = await Client.to(listener)
        target = f"{deaf}/" if method == "GET" else deaf.removeprefix("http://")
        client.writer.write(f"{method} {target} HTTP/1.1\r\n\r\n".encode())
        await until(lambda: len(listener._conversations) == 1)
        client.close()
        await until(lambda: not listener._conversations)


async def test_close_while_the_gateway_connects(deaf: str) -> None:
    gateway = Gateway(None)
    listener = await gateway.open(None)
    client = await Client.to(listener)
    client.writer.write(f"CONNECT {deaf.removeprefix('http://')} HTTP/1.1\r\n\r\n".encode())
    await until(lambda: len(listener._conversations) == 1)
    async with asyncio.timeout(1):
        await gateway.close()
        assert await client.ended()


async def test_a_request_that_is_cancelled_in_its_body(listener: Listener) -> None:
    left = asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        finally:
            left.set()

    async with Conversing(converse) as site:
        client = await Client.to(listener)
        client.writer.write(f"GET {site.url}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await client.reader.readexactly(1_000_000)
        client.close()
        await asyncio.wait_for(left.wait(), 10)


async def test_a_browser_that_leaves_in_its_own_body(listener: Listener) -> None:
    ended = asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_body(reader, await read_head(reader))
        finally:
            ended.set()

    async with Conversing(converse) as site:
        client = await Client.to(listener)
        client.writer.write(f"POST {site.url}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf".encode())
        await until(lambda: site.connections == 1)
        client.writer.close()
        await asyncio.wait_for(ended.wait(), 10)
        assert listener.refused == {}
