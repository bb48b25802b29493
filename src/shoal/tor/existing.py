"""A Tor daemon that another program runs. Only its SOCKS port is known."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urlsplit

from shoal.config import TorSettings
from shoal.errors import TorError
from shoal.tor.circuits import Circuit, Circuits
from shoal.tor.hold import Hold

log = logging.getLogger("shoal.tor")

_PROBE_EVERY = 2.0
_RESOLVE = 0xF0  # a command that only Tor has
_LITERAL = "192.0.2.1"  # which the daemon answers with by itself, even before it is connected
_RECENT = 10.0
"""Seconds for which an answer of any host shows that the daemon is connected."""
_MAX_LIFELINES_CUT = 3
"""Lifelines in a row that may end early. More say that the daemon closes idle connections, not that it dies."""

_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ExistingTor:
    """The daemon at ``tor.url``. It is probed, and pages wait while it does not answer.

    A daemon that is replaced between two probes answers both. So one idle connection to it, the lifeline, is open all
    the time: its end says that there is another daemon.

    A daemon answers before it is connected to its network, and nothing but pages shows whether it is. If a page fails
    as it would without the network, and no page at all came through lately, all pages wait for a moment. After
    ``tor.bootstrap_timeout`` of that, failures count.
    """

    def __init__(self, settings: TorSettings) -> None:
        assert settings.url is not None
        self.epoch = 0
        self.circuits = Circuits(settings.pages_per_circuit)
        self._url = settings.url
        self._timeout = settings.probe_timeout
        self._deadline = settings.bootstrap_timeout
        place = urlsplit(settings.url)
        self._host, self._port = place.hostname or "", place.port or 9050
        self._probing: asyncio.Task[None] | None = None
        self._probe_now = asyncio.Event()
        self._answers = False
        self._lifeline: _Connection | None = None
        self._lifelines_cut = 0
        """Lifelines in a row that ended before they were replaced."""
        self._hold = Hold()
        self._arrived = float("-inf")
        """When something last came through the network of this daemon."""
        self._silent_since: float | None = None
        """When the first page failed since then."""

    @property
    def ready(self) -> bool:
        """Whether pages can be sent now."""
        return self._answers and not self._hold.active

    async def start(self) -> None:
        """Begin to probe the daemon."""
        self._probing = asyncio.create_task(self._probe_for_ever())

    async def keep(self) -> None:
        """Run until it is closed. TorError if the daemon never answers, or is not Tor."""
        assert self._probing is not None
        await asyncio.shield(self._probing)

    def url_of(self, circuit: Circuit) -> str:
        """The proxy URL of a circuit."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"socks5://{circuit.user}:{circuit.password}@{host}:{self._port}"

    def renew(self, isolation: str) -> None:
        """Use another circuit for the next pages of an isolation key."""
        self.circuits.renew(isolation)

    def arrived(self, epoch: int) -> None:
        """Something came through the network of the daemon."""
        if epoch == self.epoch:
            self._hear(time.monotonic())

    async def explains_failure(self, epoch: int, sent: float | None = None) -> bool:
        """Whether a page failed because the daemon was away, or is another one now, or is not connected."""
        if epoch == self.epoch and self._answers:
            try:
                problem = await self._probe()
            except TorError:  # it is not Tor any more, which ends the crawl. The page stays in the frontier
                return True
            if problem:
                self._lost(problem)
            self._check_lifeline()
        if epoch != self.epoch or not self._answers:
            return True
        return sent is not None and self._is_silent(sent)

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        self._drop_lifeline()

    async def _probe_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline
        while True:
            self._probe_now.clear()
            problem = await self._probe(renew_lifeline=True)
            if problem:
                self._lost(problem)
            elif not self._answers:
                self._answers = True
                self._begin_epoch()
                log.info("Tor: the daemon at %s answers", self._url)
            if self.epoch == 0 and loop.time() >= deadline:
                raise TorError(f"the Tor daemon at {self._url} (tor.url) does not answer: {problem}. Is it running?")
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_EVERY if self._answers else _PROBE_EVERY / 4):
                    await self._probe_now.wait()

    def _lost(self, problem: str) -> None:
        if self._answers:
            self._answers = False
            log.warning("the Tor daemon at %s does not answer: %s; pages wait", self._url, problem)

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._hear(float("-inf"))

    def _hear(self, at: float) -> None:
        self._arrived = at
        self._silent_since = None
        self._hold.reset()

    def _is_silent(self, sent: float) -> bool:
        """Whether nothing came through lately. Then pages wait, unless that lasts for too long."""
        now = time.monotonic()
        if now - self._arrived <= max(_RECENT, (now - sent) / 2):  # half: the network may go while a page waits
            return False
        if self._silent_since is None:
            self._silent_since = now
        if now >= self._silent_since + self._deadline:
            return False
        if seconds := self._hold.begin():
            log.warning("nothing comes through the Tor daemon at %s: pages wait %g s", self._url, seconds)
        return True

    # -- connections to the daemon

    async def _probe(self, *, renew_lifeline: bool = False) -> str:
        """Why the daemon cannot be used now; empty if it can. TorError if it is another kind of proxy."""
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await self._connect()
                try:
                    writer.write(bytes([5, _RESOLVE, 0, 3, len(_LITERAL)]) + _LITERAL.encode() + b"\0\0")
                    reply = await reader.readexactly(10)
                finally:
                    writer.close()
                if reply[1] != 0 or reply[4:8] != socket.inet_aton(_LITERAL):
                    raise TorError(
                        f"the proxy at {self._url} (tor.url) is not Tor: it would reveal this machine's address"
                    )
                if renew_lifeline:
                    self._hand_over(await self._connect())
        except TimeoutError:
            return f"no answer within {self._timeout:g} s"
        except asyncio.IncompleteReadError:
            return "it closed the connection"
        except OSError as exc:
            return exc.strerror or str(exc)
        return ""

    async def _connect(self) -> _Connection:
        """A connection on which the daemon has answered, and expects a request."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"\x05\x01\x00")
            if await reader.readexactly(2) != b"\x05\x00":
                raise ConnectionError("it refused the connection")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def _hand_over(self, successor: _Connection) -> None:
        """Replace the lifeline. A daemon closes it after some time if nothing is asked on it."""
        self._check_lifeline()
        if self._lifeline is not None:
            self._lifelines_cut = 0
        self._drop_lifeline()
        self._lifeline = successor

    def _check_lifeline(self) -> None:
        """If the lifeline has ended, begin another epoch."""
        if self._lifeline is None:
            return
        reader, _ = self._lifeline
        if not (reader.at_eof() or reader.exception()):
            return
        self._drop_lifeline()
        self._lifelines_cut += 1
        if self._lifelines_cut <= _MAX_LIFELINES_CUT and self._answers:
            self._begin_epoch()
            self._probe_now.set()
            log.info("Tor: another daemon answers at %s", self._url)

    def _drop_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline[1].close()
            self._lifeline = None
