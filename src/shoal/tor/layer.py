"""The layer that sends every request of a run through Tor: pages, robots.txt and redirects."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import Protocol
from urllib.parse import urlsplit

from shoal.config import Config, TorSettings
from shoal.errors import FetchError
from shoal.fetch.guard import AddressGuard
from shoal.http import Request, Response
from shoal.middleware import Postponed
from shoal.ports import Fetch
from shoal.tor.circuits import Circuit, Circuits
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

    def renew(self, isolation: str) -> None: ...

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

    def isolation_of(self, url: str) -> str:
        """The key of the circuit for a URL."""
        return f"{self._run_id} {host_of(url)}"

    def renew(self, url: str) -> None:
        """Use another circuit for the next requests to the host of a URL."""
        self.tor.renew(self.isolation_of(url))

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        self._check(request)
        if not self.tor.ready:
            raise Postponed("Tor is not ready", contacted=False)
        isolation, epoch, sent = self.isolation_of(request.url), self.tor.epoch, time.monotonic()
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
            raise FetchError(
                "the request has a proxy of its own, but this run goes through Tor (tor.enabled); remove one of them",
                kind="proxy", retryable=False, contacted=False,
            )  # fmt: skip
        if self._guard is not None:
            host = urlsplit(request.url).hostname or ""
            reason = self._guard.refuses_host(host)
            if reason is not None:
                raise FetchError(
                    f"{host} is {reason}, which may not be contacted (serve.allow)",
                    kind="address", retryable=False, contacted=False,
                )  # fmt: skip


def _may_be_cut_off(error: FetchError) -> bool:
    """Whether a daemon fails like this that has no circuit: it keeps a page waiting, or says that it cannot connect."""
    return error.retryable and error.kind in ("proxy", "timeout") and error.socks_reply not in _EXIT_REPLIES


async def open_tor(config: Config, run_id: str, guard: AddressGuard | None, stack: AsyncExitStack) -> TorLayer:
    """Start the daemon of this process, or begin to use the one at ``tor.url``. TorError if it cannot start. It gets
    ready later. It ends with the stack."""
    settings = config.tor
    if settings.url is not None:
        from shoal.tor.existing import ExistingTor

        existing = ExistingTor(settings)
        stack.push_async_callback(existing.close)
        await existing.start()
        return TorLayer(existing, run_id, settings, guard)
    from shoal.tor.daemon import TorDaemon

    daemon = TorDaemon(settings)
    stack.push_async_callback(daemon.close)
    await daemon.start(_log_progress)
    return TorLayer(daemon, run_id, settings, guard)


def _log_progress(percent: int, summary: str) -> None:
    log.info("Tor: %d %%, %s", percent, summary[:1].lower() + summary[1:])
