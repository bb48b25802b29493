"""`/metrics` and `/health` of one process that crawls.

A scrape must not disturb the crawl: what the process counts is read where it stands, and the frontier is asked one
question at a time, for which a scrape waits a second at most.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import time
from typing import NamedTuple, Protocol

from aiohttp import web
from msgspec import Struct

from shoal.crawling.stats import Vitals
from shoal.errors import ConfigError, ShoalError
from shoal.metrics.exposition import CONTENT_TYPE, Family, render
from shoal.metrics.families import of_frontier, of_hosts, of_ledger, of_vitals
from shoal.ports import HostState, RunView, Stats

log = logging.getLogger("shoal.metrics")

_PATIENCE = 1.0  # seconds that the frontier has for its answer
_HOSTS = 20  # the busiest; each is a label, of which Prometheus wants few
_STUCK = 60.0  # seconds after which a loop that has not gone round is taken to hang
_LAST_WORD = 0.1  # seconds that a scrape has when the process ends


class Observed(Protocol):
    """A crawl, a worker or a node."""

    def vitals(self) -> Vitals: ...


# -- where to listen


class Address(Struct, frozen=True):
    """Where the metrics are to be found: the first of the ports that is free. 0 is any."""

    host: str
    ports: range

    def check_room(self, processes: int) -> None:
        """ConfigError unless each of several processes can have a port of its own."""
        first = self.ports[0]
        if first and len(self.ports) < processes:
            raise ConfigError(
                f"each of {processes} processes needs a port of its own: --metrics-port {first}-{first + processes - 1}"
            )


def parse_address(text: str) -> Address:
    """``9100``, ``0.0.0.0:9100``, ``[::1]:9100``; ``9100-9109`` for several processes of one machine."""
    found = re.fullmatch(r"(?:(.+):)?([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    ports = range(int(found[2]), int(found[3] or found[2]) + 1) if found else range(0)
    if found is None or not ports or ports[-1] > 65535:
        raise ConfigError(f"--metrics-port {text!r}: write it as 9100, 0.0.0.0:9100 or 9100-9109")
    return Address((found[1] or "127.0.0.1").strip("[]"), ports)


def listen(address: Address) -> socket.socket:
    """Take a port. ConfigError if there is none to be had: somebody who asks for metrics wants to see them."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    refused: OSError | None = None
    for port in address.ports:
        try:
            return socket.create_server((address.host, port), family=family)
        except OSError as exc:
            refused = exc
            if exc.errno != errno.EADDRINUSE:
                break
    reason = "it is taken" if refused is not None and refused.errno == errno.EADDRINUSE else str(refused)
    ports = "-".join(str(port) for port in dict.fromkeys((address.ports[0], address.ports[-1])))
    raise ConfigError(f"--metrics-port: can't listen on {address.host}:{ports}: {reason}")


# -- what is answered


class Ledger(NamedTuple):
    """What the frontier says."""

    stats: Stats
    hosts: list[HostState]


class Exporter:
    """Answers for one process."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._asking: asyncio.Task[Ledger | None] | None = None

    async def metrics(self, request: web.Request) -> web.Response:
        page = render(await self.families())
        return web.Response(body=page.encode("utf-8", "replace"), headers={"Content-Type": CONTENT_TYPE})

    async def health(self, request: web.Request) -> web.Response:
        vitals = self._observed.vitals()
        reason = ailment(vitals, up=await self._look(vitals.frontier) is not None, now=time.monotonic())
        if reason is None:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "unhealthy", "reason": reason}, status=503)

    async def families(self) -> list[Family]:
        """The frontier's share is missing while it does not answer."""
        ledger = await self._look(self._observed.vitals().frontier)
        vitals = self._observed.vitals()
        labels = {"run": vitals.run_id, "spider": vitals.spider}
        families = [*of_vitals(vitals), *of_frontier(labels, up=ledger is not None)]
        if ledger is not None:
            families += [*of_ledger(ledger.stats, labels), *of_hosts(ledger.hosts, labels)]
        return families

    async def _look(self, frontier: RunView | None) -> Ledger | None:
        """None if there is no answer in time. The question goes on then, as cutting it off could cost the crawl a
        connection, and who asks next waits for the same answer."""
        if frontier is None:
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(_ask(frontier))
        asking = self._asking
        await asyncio.wait({asking}, timeout=_PATIENCE)
        return asking.result() if asking.done() else None

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


async def _ask(frontier: RunView) -> Ledger | None:
    try:
        return Ledger(await frontier.stats(), await frontier.host_states(_HOSTS))
    except ShoalError as exc:  # its server is away, or the run was removed
        log.debug("the frontier could not be asked: %s", exc)
        return None


def ailment(vitals: Vitals, *, up: bool, now: float) -> str | None:
    """What is wrong with a process; None if it is well."""
    if vitals.frontier is None:
        return "it has not begun"
    if not up:
        return "the frontier does not answer"
    if vitals.looped_at is not None and now - vitals.looped_at > _STUCK:
        return f"its loop has not gone round for {now - vitals.looped_at:.0f} s"
    return None


async def serve(observed: Observed, listener: socket.socket) -> None:
    """Answer until it is cancelled."""
    exporter = Exporter(observed)
    app = web.Application()
    app.add_routes([web.get("/metrics", exporter.metrics), web.get("/health", exporter.health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_LAST_WORD)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        host, port = listener.getsockname()[:2]
        log.info("metrics are at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
        await asyncio.Event().wait()
    finally:
        exporter.close()
        await runner.cleanup()
