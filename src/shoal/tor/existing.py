"""A Tor daemon that another program runs. Only its SOCKS port is known."""

from __future__ import annotations

import asyncio
import logging
import socket
from urllib.parse import urlsplit

from shoal.config import TorSettings
from shoal.errors import TorError
from shoal.tor.circuits import Circuit, Circuits

log = logging.getLogger("shoal.tor")

_PROBE_EVERY = 2.0
_RESOLVE = 0xF0  # a command that only Tor has
_LITERAL = "192.0.2.1"  # which the daemon answers with by itself, even before it is connected


class ExistingTor:
    """The daemon at ``tor.url``. It is probed, and pages wait while it does not answer."""

    def __init__(self, settings: TorSettings) -> None:
        assert settings.url is not None
        self.epoch = 0
        self.ready = False
        self.circuits = Circuits(settings.pages_per_circuit)
        self._url = settings.url
        self._timeout = settings.probe_timeout
        self._deadline = settings.bootstrap_timeout
        place = urlsplit(settings.url)
        self._host, self._port = place.hostname or "", place.port or 9050
        self._probing: asyncio.Task[None] | None = None

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

    async def explains_failure(self, epoch: int) -> bool:
        """Whether a page failed because the daemon was away."""
        if epoch != self.epoch or not self.ready:
            return True
        problem = await self._probe()
        if problem and self.ready:
            self._lost(problem)
        return bool(problem)

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _probe_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline
        while True:
            problem = await self._probe()
            if not problem and not self.ready:
                self.ready = True
                self.epoch += 1
                log.info("Tor: the daemon at %s answers", self._url)
            elif problem and self.ready:
                self._lost(problem)
            if self.epoch == 0 and loop.time() >= deadline:
                raise TorError(f"the Tor daemon at {self._url} (tor.url) does not answer: {problem}. Is it running?")
            await asyncio.sleep(_PROBE_EVERY if self.ready else _PROBE_EVERY / 4)

    def _lost(self, problem: str) -> None:
        self.ready = False
        log.warning("the Tor daemon at %s does not answer: %s; pages wait", self._url, problem)

    async def _probe(self) -> str:
        """Why the daemon cannot be used now; empty if it can. TorError if it is another kind of proxy."""
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(b"\x05\x01\x00")
                    if await reader.readexactly(2) != b"\x05\x00":
                        return "it refused the connection"
                    writer.write(bytes([5, _RESOLVE, 0, 3, len(_LITERAL)]) + _LITERAL.encode() + b"\0\0")
                    reply = await reader.readexactly(10)
                finally:
                    writer.close()
        except TimeoutError:
            return f"no answer within {self._timeout:g} s"
        except asyncio.IncompleteReadError:
            return "it closed the connection"
        except OSError as exc:
            return exc.strerror or str(exc)
        if reply[1] != 0 or reply[4:8] != socket.inet_aton(_LITERAL):
            raise TorError(f"the proxy at {self._url} (tor.url) is not Tor: it would reveal this machine's address")
        return ""
