"""The layer that sends every request of a run through Tor: pages, robots.txt and redirects."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack, suppress
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

from shoal.config import Config, TorSettings
from shoal.errors import FetchError, TorError
from shoal.fetch.guard import AddressGuard, not_sent
from shoal.fetch.layers import Postponed
from shoal.fetch.tor.circuits import PROBE_EVERY, Circuit, Circuits, Hold
from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.system import clock
from shoal.urls.normalize import host_of

log = logging.getLogger("shoal.tor")

_EXIT_REPLIES = (4, 5)
"""Reply codes of RFC 1928 that Tor gets from an exit: the host was not found, or refused the connection."""


class Tor(Protocol):
    """A daemon, started by this process or by another program."""

    circuits: Circuits

    @property
    def ready(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    def url_of(self, circuit: Circuit) -> str: ...

    def arrived(self, epoch: int) -> None:
        """Something came through the network of the daemon of this epoch."""
        ...

    async def explains_failure(self, epoch: int, sent: float | None = None) -> bool:
        """Whether a page failed because of the daemon of this epoch. ``sent``: when the page was sent, if a daemon
        that is not connected to its network fails like this."""
        ...

    async def keep(self) -> None: ...


class TorLayer:
    """The innermost layer. It gives each request the proxy of the daemon, with a circuit for its run and host.

    While the daemon is not ready, a request is Postponed: it waits in the frontier and uses up no attempt. So is a
    request that failed because of the daemon. With a guard, private addresses and local names are refused, because Tor
    resolves names by itself.
    """

    def __init__(self, tor: Tor, run_id: str, settings: TorSettings, guard: AddressGuard | None = None) -> None:
        self.tor = tor
        self._run_id = run_id
        self._renew_statuses = frozenset(settings.renew_statuses)
        self._guard = guard

    @property
    def ready(self) -> bool:
        """Whether requests can be sent now."""
        return self.tor.ready

    @property
    def reason(self) -> str:
        return "" if self.ready else "Tor is not ready"

    async def keep(self) -> None:
        """Run until the daemon is closed. TorError if it can never be used."""
        await self.tor.keep()

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        self._check(request)
        if not self.tor.ready:
            raise Postponed("Tor is not ready", contacted=False)
        isolation, epoch, sent = f"{self._run_id} {host_of(request.url)}", self.tor.epoch, clock.monotonic()
        circuit = self.tor.circuits.take(isolation)
        try:
            response = await fetch(request.replace(proxy=self.tor.url_of(circuit)))
        except FetchError as error:
            if error.socks_reply in _EXIT_REPLIES:
                self.tor.arrived(epoch)
            if await self.tor.explains_failure(epoch, sent if _may_be_cut_off(error) else None):
                raise Postponed(f"Tor failed: {error}", contacted=error.contacted) from error
            raise
        self.tor.arrived(epoch)
        response.request = request  # a spider that repeats it must not get the address of the daemon
        if response.status in self._renew_statuses and self.tor.circuits.blocked(isolation, circuit):
            log.info("%s answered %d: using another circuit", host_of(request.url), response.status)
        return response

    def _check(self, request: Request) -> None:
        """FetchError for a request that may not be sent through Tor."""
        if request.proxy is not None:
            message = (
                "the request has a proxy of its own, but this run goes through Tor (tor.enabled); remove one of them"
            )
            raise not_sent(message, "proxy")
        if self._guard is not None:
            self._guard.check_host(urlsplit(request.url).hostname or "")


def _may_be_cut_off(error: FetchError) -> bool:
    """Whether a daemon fails like this that has no circuit: it keeps a page waiting, or says that it cannot connect."""
    return error.retryable and error.kind in ("proxy", "timeout") and error.socks_reply not in _EXIT_REPLIES


async def open_tor(config: Config, run_id: str, guard: AddressGuard | None, stack: AsyncExitStack) -> TorLayer:
    """Start the daemon of this process, or begin to use the one at ``tor.url``. TorError if it cannot start. It gets
    ready later. It ends with the stack."""
    settings = config.tor
    if settings.url is not None:
        existing = ExistingTor(settings)
        stack.push_async_callback(existing.close)
        await existing.start()
        return TorLayer(existing, run_id, settings, guard)
    from shoal.fetch.tor.daemon import TorDaemon

    daemon = TorDaemon(settings)
    stack.push_async_callback(daemon.close)
    await daemon.start()
    return TorLayer(daemon, run_id, settings, guard)


# A Tor daemon that another program runs. Only its SOCKS port is known.

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

    def arrived(self, epoch: int) -> None:
        """Something came through the network of the daemon."""
        if epoch == self.epoch:
            self._hear(clock.monotonic())

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
                async with asyncio.timeout(PROBE_EVERY if self._answers else PROBE_EVERY / 4):
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
        now = clock.monotonic()
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
