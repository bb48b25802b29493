"""Random hostile bytes from both sides of the gateway, cut at random places, with sides that leave at any time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from tests.fetch.gateway.client import Client, Conversing, listening, until
from tests.support.servers import MisbehavingServer

_PIECES = (
    b"GET ", b"POST ", b"CONNECT ", b"http://", b"127.0.0.1", b":80", b"/", b" HTTP/1.1\r\n",
    b"HTTP/1.1 200 OK\r\n", b"\r\n",    b"\r\n\r\n", b"\n\n", b"Host: x\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 99999\r\n", b"hello",
    b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffff\r\n", b"Connection: close\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"\x00\xff", b"x" * 5000, b"\x16\x03\x01", b"HTTP/1.0 304 Not Modified\r\n\r\n", b":", b" ", b"\t",
)  # fmt: skip


def stream(random: Random) -> list[bytes]:
    data = b"".join(random.choices(_PIECES, k=random.randint(1, 12)))
    cuts = sorted(random.choices(range(len(data) + 1), k=random.randint(0, 3)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def send(random: Random, writer: asyncio.StreamWriter) -> None:
    for part in stream(random):
        writer.write(part)
        await asyncio.sleep(0)
    match random.randrange(4):
        case 0:
            writer.transport.abort()
        case 1:
            writer.close()
        case 2:
            writer.write_eof()


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_from_both_sides(seed: int, site: MisbehavingServer) -> None:
    random = Random(seed)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(random.choice([1, 10, 65536]))
        await send(random, writer)
        await asyncio.sleep(0.01)

    async def visit(url: str) -> None:
        client = await Client.to(listener)
        where = url.removeprefix("http://")
        valid = [
            f"GET {url}/ HTTP/1.1\r\nHost: {where}\r\n\r\n",
            f"CONNECT {where} HTTP/1.1\r\n\r\n",
            f"POST {url}/ HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
            f"POST {url}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ]
        with suppress(OSError):
            if random.random() < 0.8:
                client.writer.write(random.choice(valid).encode())
            await send(random, client.writer)
            await asyncio.wait_for(client.reader.read(random.choice([1, 100_000])), 1)
        client.close()

    async with Conversing(converse) as hostile, listening(idle_timeout=0.4, header_timeout=0.4) as listener:
        for _ in range(10):
            await asyncio.gather(*(visit(random.choice([hostile.url, site.url])) for _ in range(20)))
        await until(lambda: not listener._conversations)
        client = await Client.to(listener)
        assert (await client.get(f"{site.url}/leaf/1")).status == 200
        client.close()
