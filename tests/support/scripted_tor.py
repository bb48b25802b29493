"""A Tor daemon that is a script: a SOCKS5 server that fails at the step a test asks for. All names are this machine."""

from __future__ import annotations

import asyncio
from collections import Counter
from struct import unpack

from tests.support.servers import StreamServer, pump

STEPS = ("greeting", "login", "connect", "head", "body")
"""Where a page can be when the daemon dies: before an answer to each message of SOCKS, before the head of the page
arrives, and after half of it."""
_RESOLVE = 0xF0
_HALF = 60  # bytes of a page that arrive


class ScriptedTor(StreamServer):
    """Accepts every user and password, and answers RESOLVE as Tor does."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: dict[str, int] = {}
        """By host: the reply to CONNECT instead of a connection. ``*``: for all other hosts."""
        self.hangs = False
        """CONNECT gets no reply at all, as before Tor has a circuit."""
        self.pauses_at: str | None = None
        """One of STEPS. Pages go no further."""
        self.hangs_up = False
        """Connections that ask for nothing are closed at once."""
        self.is_tor = True
        """If not, RESOLVE is refused as by any other proxy."""
        self.paused = 0
        """Pages that are at this step."""
        self.connects: Counter[str] = Counter()

    @property
    def address(self) -> str:
        return self.url.replace("http://", "socks5://")

    def replace(self) -> None:
        """The daemon is killed, and its successor answers before anybody can notice."""
        connections = list(self._connections)
        self._connections.clear()
        for task in connections:
            task.cancel()
        self.paused = 0

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        has_user = 2 in methods
        if has_user:
            await self._step("greeting")
        writer.write(b"\x05\x02" if has_user else b"\x05\x00")
        if has_user:
            await reader.readexactly(1)
            for _ in ("user", "password"):
                await reader.readexactly((await reader.readexactly(1))[0])
            await self._step("login")
            writer.write(b"\x01\x00")
        elif self.hangs_up:
            await asyncio.sleep(0.05)
            if not reader._buffer:  # type: ignore[attr-defined]
                return
        _, command, _, kind = await reader.readexactly(4)
        name = await reader.readexactly((await reader.readexactly(1))[0] if kind == 3 else 4)
        host = name.decode() if kind == 3 else ".".join(map(str, name))
        (port,) = unpack("!H", await reader.readexactly(2))
        if command == _RESOLVE and not self.is_tor:
            writer.write(b"\x05\x07\0\x01\0\0\0\0\0\0")
            return
        if command == _RESOLVE:
            writer.write(b"\x05\0\0\x01" + bytes(map(int, host.split("."))) + b"\0\0")
            return
        self.connects[host] += 1
        await self._connect(host, port, reader, writer)

    async def _connect(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await self._step("connect")
        reply = self.replies.get(host, self.replies.get("*", 0))
        writer.write(bytes([5, reply, 0, 1, 0, 0, 0, 0, 0, 0]))
        if reply:
            return
        site_reader, site = await asyncio.open_connection("127.0.0.1", port)
        up = asyncio.create_task(pump(reader, site))
        try:
            first = await site_reader.read(_HALF)
            await self._step("head")
            writer.write(first)
            await self._step("body")
            await pump(site_reader, writer)
        finally:
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)
            site.transport.abort()

    async def _step(self, step: str) -> None:
        if step == self.pauses_at:
            self.paused += 1
            await asyncio.Event().wait()
