"""The control connection to a Tor daemon: asks for its state. Every call has a deadline."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

_MAX_LINE = 64 * 1024
_PHASE = re.compile(r'PROGRESS=(\d+).*?SUMMARY="([^"]*)"(?:.*?WARNING="([^"]*)")?')


class ControlError(Exception):
    """The daemon closed the connection, did not answer in time, or refused."""


class Bootstrap(NamedTuple):
    """The startup progress of a daemon. At 100 % it can build circuits."""

    percent: int
    summary: str
    warning: str = ""
    """Why the last step failed."""


class Control:
    """A connection to the control port of a daemon that this process started. One call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, folder: Path, timeout: float) -> Self:
        """Connect to the daemon that has written its port and its cookie to the folder."""
        try:
            port = int((folder / "control").read_text().rpartition(":")[2])
            cookie = (folder / "cookie").read_bytes()
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_LINE)
        except (OSError, ValueError) as exc:
            raise ControlError(f"cannot connect to its control port: {exc}") from exc
        made = cls(reader, writer, timeout)
        try:
            await made.ask(f"AUTHENTICATE {cookie.hex()}")
        except BaseException:
            writer.close()
            raise
        return made

    async def ask(self, command: str) -> list[str]:
        """The lines of the answer, without their status codes. ControlError if there is none in time, or it is an
        error."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout):
                    self._writer.write(command.encode() + b"\r\n")
                    return await self._answer()
            except TimeoutError as exc:
                raise ControlError(f"it did not answer within {self._timeout:g} s") from exc
            except (OSError, ValueError, RuntimeError) as exc:  # RuntimeError: uvloop's word for a closed connection
                raise ControlError(f"the control connection failed: {exc}") from exc

    async def _answer(self) -> list[str]:
        lines = []
        while True:
            line = await self._line()
            if not line.startswith("250"):
                raise ControlError(f"it answered {line!r:.200}")
            lines.append(line[4:])
            if line[3:4] == "+":  # a value of several lines
                while (more := await self._line()) != ".":
                    lines.append(more)
            elif line[3:4] == " ":
                return lines

    async def _line(self) -> str:
        line = await self._reader.readline()
        if not line:
            raise ControlError("it closed the control connection")
        return line.decode("utf-8", "replace").rstrip("\r\n")

    async def bootstrap(self) -> Bootstrap:
        """The startup progress of the daemon."""
        found = _PHASE.search((await self.ask("GETINFO status/bootstrap-phase"))[0])
        if found is None:
            raise ControlError("it did not report its startup progress")
        return Bootstrap(int(found[1]), found[2], found[3] or "")

    async def is_connected(self) -> bool:
        """Whether the daemon has a connection to a relay. Its own report of circuits stays
        positive long after the network is gone."""
        return any(line.endswith(" CONNECTED") for line in await self.ask("GETINFO orconn-status"))

    async def socks_port(self) -> int:
        answer = (await self.ask("GETINFO net/listeners/socks"))[0]
        found = re.search(r'"127\.0\.0\.1:(\d+)"', answer)
        if found is None:
            raise ControlError(f"it has no SOCKS port: {answer!r:.200}")
        return int(found[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
