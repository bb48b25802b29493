"""A site that blocks addresses which ask too much, and lying proxies, for the tests of identities."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from time import monotonic
from typing import NamedTuple

from tests.support.servers import StreamServer, answer, read_head

PATIENCE = 10
"""Requests after which the site blocks an address."""


class Visited(NamedTuple):
    """One request: when it came in and was answered, from which address, for what, with which headers."""

    at: float
    answered: float
    address: str
    path: str
    status: int
    headers: dict[str, str]


class BlockingSite(StreamServer):
    """`/` links to `/p/0` and so on. After ten requests it answers an address with `status` for `ban` seconds.

    `forbidden` are paths that nobody may see: they are 403 for everybody. `captcha`: blocks with 200 and a captcha.
    Each address gets a cookie of its own.
    """

    def __init__(
        self,
        pages: int,
        *,
        ban: float = 0.6,
        status: int = 429,
        forbidden: frozenset[str] = frozenset(),
        captcha: bool = False,
        patience: int = PATIENCE,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(tls=tls)
        self.paths = {"/", *(f"/p/{number}" for number in range(pages))}
        self.log: list[Visited] = []
        self._pages = pages
        self._ban = ban
        self._status = status
        self._forbidden = forbidden
        self._captcha = captcha
        self._patience = patience
        self._asked: Counter[str] = Counter()
        self._banned: dict[str, float] = {}

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            started, address = monotonic(), writer.get_extra_info("peername")[0]
            status, body = self._answer(request.path, address)
            headers = {name.lower(): value for name, value in request.headers}
            self.log.append(Visited(started, monotonic(), address, request.path, status, headers))
            writer.write(answer(body, ("Set-Cookie", f"seen={address}; Path=/"), status=status))
            await writer.drain()
            if request.wants_close:
                return

    def _answer(self, path: str, address: str) -> tuple[int, str]:
        if path == "/robots.txt":
            return 404, ""
        if path in self._forbidden:
            return 403, "for members"
        now = monotonic()
        if self._banned.get(address, 0.0) > now:
            return self._refusal()
        self._asked[address] += 1
        if self._asked[address] > self._patience:
            self._asked[address] = 0
            self._banned[address] = now + self._ban
            return self._refusal()
        links = "".join(f'<a href="/p/{number}">{number}</a>' for number in range(self._pages)) if path == "/" else ""
        return 200, f"<h1>{path}</h1>{links}"

    def _refusal(self) -> tuple[int, str]:
        return (200, "<h1>Are you a robot?</h1>") if self._captcha else (self._status, "blocked")

    def fetched(self) -> Counter[str]:
        """How often each page was sent."""
        return Counter(visit.path for visit in self.log if visit.status == 200)

    def blocks(self) -> list[Visited]:
        return [visit for visit in self.log if visit.status == self._status]

    def during_rest(self, rest: float) -> list[Visited]:
        """Requests that came in after their address was blocked, within ``rest`` seconds."""
        return [
            visit
            for block in self.blocks()
            for visit in self.log
            if visit.address == block.address and block.answered < visit.at < block.answered + rest
        ]


class LyingProxy(StreamServer):
    """Accepts every request and breaks its promise: `closes` the connection, or sends `garbage`."""

    def __init__(self, lie: str) -> None:
        super().__init__()
        self._lie = lie

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_head(reader)
        self._log(request)
        if request.method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if self._lie == "garbage":
            writer.write(b"\x00\x01 what is HTTP? \r\n\r\n" * 20)
        await writer.drain()
