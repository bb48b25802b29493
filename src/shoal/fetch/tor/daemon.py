"""A Tor daemon of this process: started, watched, and restarted when it dies or hangs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from shoal.config import TorSettings
from shoal.errors import TorError
from shoal.fetch.tor.circuits import PROBE_EVERY, Circuit, Circuits, Hold
from shoal.fetch.tor.process import Folder, TorProcess, describe_exit, find_program, start_process, version_of
from shoal.system import clock, threads

# The control connection to a Tor daemon: asks for its state. Every call has a deadline.

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
        control = cls(reader, writer, timeout)
        try:
            await control.ask(f"AUTHENTICATE {cookie.hex()}")
        except BaseException:
            writer.close()
            raise
        return control

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
        match = _PHASE.search((await self.ask("GETINFO status/bootstrap-phase"))[0])
        if match is None:
            raise ControlError("it did not report its startup progress")
        return Bootstrap(int(match[1]), match[2], match[3] or "")

    async def is_connected(self) -> bool:
        """Whether the daemon has a connection to a relay. Its own report of circuits stays
        positive long after the network is gone."""
        return any(line.endswith(" CONNECTED") for line in await self.ask("GETINFO orconn-status"))

    async def socks_port(self) -> int:
        answer = (await self.ask("GETINFO net/listeners/socks"))[0]
        match = re.search(r'"127\.0\.0\.1:(\d+)"', answer)
        if match is None:
            raise ControlError(f"it has no SOCKS port: {answer!r:.200}")
        return int(match[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


log = logging.getLogger("shoal.tor")

_POLL_STARTING = 0.1
_RESTART_AFTER = (0.5, 30.0)
"""Seconds before a restart: the first pause, and the longest."""
_STEADY = 60.0
"""A daemon that ran for this many seconds resets the pause before a restart."""


class TorDaemon:
    """The daemon of one worker process. ``start`` it once, ``close`` it at the end.

    ``ready`` changes at any time. While it is False, nothing may be sent. ``address`` and ``epoch`` belong to the
    daemon that runs now: its successor has others.
    """

    def __init__(self, settings: TorSettings) -> None:
        self.epoch = 0
        self.circuits = Circuits(settings.pages_per_circuit)
        self._settings = settings
        self._program = ""
        self._address: tuple[str, int] | None = None
        self._control: Control | None = None
        self._pid: int | None = None
        self._folder: Folder | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._hold = Hold()

    # -- for others

    @property
    def ready(self) -> bool:
        """Whether pages can be sent now."""
        return self._address is not None and not self._hold.active

    @property
    def pid(self) -> int | None:
        """The process of the daemon. None while there is none."""
        return self._pid

    async def start(self) -> None:
        """Check the program and its configuration, and start the daemon. It gets ready later. TorError if it cannot
        start."""
        self._program = find_program(self._settings)
        await version_of(self._program)
        self._folder = Folder()
        process = await start_process(self._program, self._settings, self._folder)
        self._supervising = asyncio.create_task(self._supervise(process))

    async def keep(self) -> None:
        """Run until the daemon is closed. TorError if it can never get ready."""
        assert self._supervising is not None
        await asyncio.shield(self._supervising)

    def url_of(self, circuit: Circuit) -> str:
        """The proxy URL of a circuit. TorError while there is no daemon."""
        if self._address is None:
            raise TorError("Tor is not ready")
        host, port = self._address
        return f"socks5://{circuit.user}:{circuit.password}@{host}:{port}"

    def arrived(self, epoch: int) -> None:
        """Nothing to remember: the daemon itself says whether it is connected."""

    async def explains_failure(self, epoch: int, sent: float | None = None) -> bool:
        """Whether a page failed because of the daemon that ``epoch`` names: it is gone, hangs, or is cut off
        from its network. In the last case, pages wait for a moment."""
        control = self._control
        if epoch != self.epoch or self._address is None or control is None:
            return True
        try:
            if await control.is_connected():
                self._hold.reset()
                return False
        except ControlError:
            return True
        if seconds := self._hold.begin():
            log.warning("Tor has lost the connection to its network: pages wait %g s", seconds)
        return True

    async def close(self) -> None:
        """Stop the daemon and delete its folder."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._folder is not None:
            await threads.call(self._folder.delete)
            self._folder = None

    # -- the daemon

    async def _supervise(self, process: TorProcess) -> None:
        """Keep a daemon running. TorError if the first one ends by itself, or never gets ready."""
        assert self._folder is not None
        deadline = clock.monotonic() + self._settings.bootstrap_timeout
        pause = _RESTART_AFTER[0]
        while True:
            began = clock.monotonic()
            try:
                reason = await self._work(process, self._folder.path, deadline)
            finally:
                self._address = self._control = self._pid = None
                await process.kill()
            is_first = self.epoch == 0
            if is_first and (clock.monotonic() >= deadline or (process.returncode or 0) > 0):
                raise TorError(_explain(reason, process.complaints))
            if clock.monotonic() - began > _STEADY:
                pause = _RESTART_AFTER[0]
            log.warning("the Tor daemon %s; starting another one in %g s, pages wait", reason, pause)
            await asyncio.sleep(pause)
            pause = min(_RESTART_AFTER[1], 2 * pause)
            process = await self._start_again()
            if not is_first:
                deadline = clock.monotonic() + self._settings.bootstrap_timeout

    async def _start_again(self) -> TorProcess:
        """Start another daemon, with retries: the first one could start, so a failure (a full disk) may pass."""
        assert self._folder is not None
        pause = _RESTART_AFTER[0]
        while True:
            try:
                return await start_process(self._program, self._settings, self._folder)
            except TorError as exc:
                log.warning("%s; trying again in %g s, pages wait", exc, pause)
            await asyncio.sleep(pause)
            pause = min(_RESTART_AFTER[1], 2 * pause)

    async def _work(self, process: TorProcess, folder: Path, deadline: float) -> str:
        """Follow a daemon to its end. Return the reason, as the rest of a sentence."""
        self._pid = process.pid
        ending = asyncio.create_task(process.wait())
        following = asyncio.create_task(self._follow(folder, deadline))
        try:
            await asyncio.wait({ending, following}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await process.end_of_output()
                return describe_exit(ending.result())
            return following.result()
        finally:
            ending.cancel()
            following.cancel()
            await asyncio.gather(ending, following, return_exceptions=True)

    async def _follow(self, folder: Path, deadline: float) -> str:
        """Wait until the daemon is ready, then probe it. Return why it must be replaced."""
        try:
            while not (_has_text(folder / "control") and _has_text(folder / "cookie")):
                if clock.monotonic() >= deadline:
                    return "did not open its control port"
                await asyncio.sleep(_POLL_STARTING)
            async with await Control.open(folder, self._settings.probe_timeout) as control:
                late = await self._bootstrap(control, deadline)
                if late:
                    return late
                self._control = control
                self._address = "127.0.0.1", await control.socks_port()
                self.epoch += 1
                self._hold.reset()
                while True:
                    await asyncio.sleep(PROBE_EVERY)
                    await control.bootstrap()
        except ControlError as exc:
            return f"hangs: {exc}"

    async def _bootstrap(self, control: Control, deadline: float) -> str:
        """Wait until the daemon can build circuits, and report its progress. Return why it cannot in time."""
        shown = -1
        while True:
            state = await control.bootstrap()
            if state.percent > shown:
                shown = state.percent
                log.info("Tor: %d %%, %s", state.percent, state.summary[:1].lower() + state.summary[1:])
            if state.percent >= 100:
                return ""
            if clock.monotonic() >= deadline:
                warning = f": {state.warning}" if state.warning else ""
                return f"is at {state.percent} % ({state.summary}{warning})"
            await asyncio.sleep(_POLL_STARTING)


def _has_text(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except OSError:
        return False


def _explain(reason: str, complaints: str) -> str:
    quote = f" It said: {complaints}" if complaints else ""
    hint = (
        "Check that this machine can reach the Tor network, or set bridges in tor.torrc; tor.bootstrap_timeout sets "
        "how long to wait"
    )
    if os.strerror(errno.ENOSPC) in complaints:
        hint = "Make room there, or set TMPDIR"
    return f"Tor did not get ready: the daemon {reason}.{quote} {hint}"
