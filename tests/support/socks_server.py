"""A SOCKS5 proxy for the tests (RFC 1928, RFC 1929). It connects to the loopback only."""

from __future__ import annotations

import asyncio
from struct import unpack
from typing import NamedTuple
from urllib.parse import quote

from tests.support.servers import StreamServer, pump

_REFUSED, _NOT_ALLOWED = 5, 2


class Connect(NamedTuple):
    """One CONNECT: who asked, and for which host. A name means that the client did not resolve it."""

    user: str
    host: str
    port: int


class SocksServer(StreamServer):
    """``users`` has the passwords by user; empty: nobody needs one. Names that end with `.test` are this machine.
    Connections come from the address ``source``."""

    def __init__(self, users: dict[str, str] | None = None, source: str = "127.0.0.1") -> None:
        super().__init__()
        self.source = source
        self._users = users or {}
        self.connects: list[Connect] = []

    def address(self, user: str = "", scheme: str = "socks5", password: str | None = None) -> str:
        """The URL of this proxy."""
        password = self._users.get(user, "") if password is None else password
        login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user else ""
        return self.url.replace("http://", f"{scheme}://{login}")

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        wanted = 2 if self._users else 0
        writer.write(bytes([5, wanted if wanted in methods else 255]))
        if wanted not in methods:
            return
        user = ""
        if wanted == 2:
            await reader.readexactly(1)
            user = (await self._text(reader)).decode()
            accepted = self._users.get(user) == (await self._text(reader)).decode()
            writer.write(bytes([1, 0 if accepted else 1]))
            if not accepted:
                return
        await self._connect(user, reader, writer)

    async def _text(self, reader: asyncio.StreamReader) -> bytes:
        (length,) = await reader.readexactly(1)
        return await reader.readexactly(length)

    async def _connect(self, user: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = (await reader.readexactly(4))[3]
        name = await (self._text(reader) if kind == 3 else reader.readexactly(4))
        host = name.decode() if kind == 3 else ".".join(map(str, name))
        (port,) = unpack("!H", await reader.readexactly(2))
        self.connects.append(Connect(user, host, port))
        if not (host.endswith(".test") or host.startswith("127.")):
            writer.write(bytes([5, _NOT_ALLOWED, 0, 1, 0, 0, 0, 0, 0, 0]))
            return
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port, local_addr=(self.source, 0))
        except OSError:
            writer.write(bytes([5, _REFUSED, 0, 1, 0, 0, 0, 0, 0, 0]))
            return
        writer.write(bytes([5, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
        up = asyncio.create_task(pump(reader, upstream))
        try:
            await pump(upstream_reader, writer)
        finally:
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)
            upstream.transport.abort()
