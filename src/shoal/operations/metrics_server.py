"""`/metrics` and `/health` of one crawling process.

A scrape must not disturb the crawl. It reads the counters of the process directly. It sends one query at a time to the
frontier, and waits for it one second at most. A thread answers, so that there is an answer even while a callback blocks
the event loop of the crawl.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import re
import socket
from collections.abc import Coroutine
from ipaddress import ip_address
from typing import NamedTuple, Protocol, TypeVar

from aiohttp import web
from msgspec import Struct

from shoal.crawling.stats import Vitals
from shoal.errors import ConfigError, ShoalError
from shoal.operations.metrics import CONTENT_TYPE, Family, of_frontier, of_hosts, of_ledger, of_vitals, render
from shoal.ports import HostState, RunView, Stats
from shoal.runs.loop_thread import LoopThread
from shoal.system import clock

T = TypeVar("T")
log = logging.getLogger("shoal.metrics")

_FRONTIER_TIMEOUT = 1.0  # seconds
_MAX_HOSTS = 20  # the busiest; each is a label, and Prometheus needs few
_LOOP_TIMEOUT = 0.5  # seconds that the event loop of the crawl has to begin an answer
_HANG_TIMEOUT = 60.0  # seconds without a heartbeat after which a loop counts as hanging
_SHUTDOWN_TIMEOUT = 0.1  # seconds that a running scrape gets when the process ends


class Observed(Protocol):
    """A crawl, a worker, or a node."""

    def vitals(self) -> Vitals: ...


# -- where to listen


class Address(Struct, frozen=True):
    """Where to serve the metrics: on the first free port of the range. 0 is any free port."""

    host: str
    ports: range

    def check_room(self, processes: int) -> None:
        """ConfigError if the range has fewer ports than processes."""
        first = self.ports[0]
        if first and len(self.ports) < processes:
            raise ConfigError(
                f"{processes} processes need {processes} ports: use --metrics-port {first}-{first + processes - 1}"
            )


def parse_address(text: str) -> Address:
    """Parse ``9100``, ``0.0.0.0:9100``, ``[::1]:9100``, or ``9100-9109`` for several processes on one machine."""
    match = re.fullmatch(r"(?:(.+):)?([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    ports = range(int(match[2]), int(match[3] or match[2]) + 1) if match else range(0)
    if match is None or not ports or ports[-1] > 65535:
        raise ConfigError(f"invalid --metrics-port {text!r}: use 9100, 0.0.0.0:9100 or 9100-9109")
    return Address((match[1] or "127.0.0.1").strip("[]"), ports)


def listen(address: Address) -> socket.socket:
    """Listen on the first free port. ConfigError if there is none."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    refused: OSError | None = None
    for port in address.ports:
        try:
            return socket.create_server((address.host, port), family=family)
        except OSError as exc:
            refused = exc
            if exc.errno != errno.EADDRINUSE:
                break
    reason = "already in use" if refused is not None and refused.errno == errno.EADDRINUSE else str(refused)
    ports = "-".join(str(port) for port in dict.fromkeys((address.ports[0], address.ports[-1])))
    raise ConfigError(f"--metrics-port: can't listen on {address.host}:{ports}: {reason}")


# -- answers


class FrontierState(NamedTuple):
    """The answer of the frontier."""

    stats: Stats
    hosts: list[HostState]


class Exporter:
    """Answers requests for one process. ``metrics`` and ``health`` run on another event loop than the crawl."""

    def __init__(self, observed: Observed, crawl_loop: asyncio.AbstractEventLoop, token: str | None = None) -> None:
        """``token``: what a scrape must send; None or empty: nothing."""
        self._token = token
        self._observed = observed
        self._crawl_loop = crawl_loop
        self._query: asyncio.Task[FrontierState | None] | None = None

    async def metrics(self, request: web.Request) -> web.Response:
        if self._token and not _has_token(request, self._token):
            text = "missing or wrong token: send worker.metrics_token as `Authorization: Bearer TOKEN`\n"
            return web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        families = await self._ask(self.families())
        page = render(of_vitals(self._observed.vitals()) if families is None else families)
        return web.Response(body=page.encode("utf-8", "replace"), headers={"Content-Type": CONTENT_TYPE})

    async def health(self, request: web.Request) -> web.Response:
        up = await self._ask(self._is_up())
        # The frontier cannot be asked while the loop is blocked. For a while, that alone is no reason for a restart.
        reason = health_problem(self._observed.vitals(), up=up is not False, now=clock.monotonic())
        if reason is None:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "unhealthy", "reason": reason}, status=503)

    async def _ask(self, work: Coroutine[object, object, T]) -> T | None:
        """The result of a coroutine that runs on the event loop of the crawl. None if that is blocked."""
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self._crawl_loop)
        except RuntimeError:  # the crawl has ended
            work.close()
            return None
        try:
            async with asyncio.timeout(_FRONTIER_TIMEOUT + _LOOP_TIMEOUT):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            return None

    async def _is_up(self) -> bool:
        return await self._frontier_state(self._observed.vitals().frontier) is not None

    async def families(self) -> list[Family]:
        """All metrics. Those of the frontier are missing while it does not answer."""
        state = await self._frontier_state(self._observed.vitals().frontier)
        vitals = self._observed.vitals()
        labels = {"run": vitals.run_id, "spider": vitals.spider}
        families = [*of_vitals(vitals), *of_frontier(labels, up=state is not None)]
        if state is not None:
            families += [*of_ledger(state.stats, labels), *of_hosts(state.hosts, labels)]
        return families

    async def _frontier_state(self, frontier: RunView | None) -> FrontierState | None:
        """None if there is no answer in time. The query then continues, because cancelling it could cost the crawl a
        connection, and the next scrape waits for the same answer."""
        if frontier is None:
            return None
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(_query(frontier))
        query = self._query
        await asyncio.wait({query}, timeout=_FRONTIER_TIMEOUT)
        return query.result() if query.done() else None

    def close(self) -> None:
        if self._query is not None:
            self._query.cancel()


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    matches = hmac.compare_digest(sent.strip().encode("utf-8", "surrogateescape"), token.encode())
    return scheme.lower() == "bearer" and matches


async def _query(frontier: RunView) -> FrontierState | None:
    try:
        return FrontierState(await frontier.stats(), await frontier.host_states(_MAX_HOSTS))
    except ShoalError as exc:  # its server is away, or the run was removed
        log.debug("the frontier did not answer a scrape: %s", exc)
        return None


def health_problem(vitals: Vitals, *, up: bool, now: float) -> str | None:
    """Why a process is unhealthy; None if it is healthy."""
    if vitals.waits:
        return None
    if vitals.frontier is None:
        return "it has not started"
    if vitals.loop_age is not None and vitals.loop_age > _HANG_TIMEOUT:
        return f"its loop hangs: blocked for {vitals.loop_age:.0f} s by {vitals.blocked_by}"
    if not up:
        return "the frontier does not answer"
    if vitals.looped_at is not None and now - vitals.looped_at > _HANG_TIMEOUT:
        return f"its loop hangs: no heartbeat for {now - vitals.looped_at:.0f} s"
    return None


async def serve(observed: Observed, listener: socket.socket, token: str | None = None) -> None:
    """Answer requests until cancelled. A thread does so. ``token``: what a scrape must send."""
    if not token and not ip_address(listener.getsockname()[0]).is_loopback:
        log.warning("other machines can read the metrics without a token; set worker.metrics_token")
    exporter = Exporter(observed, asyncio.get_running_loop(), token)
    thread = LoopThread("metrics")
    try:
        await thread.call(_serve(exporter, listener))
    finally:
        exporter.close()
        thread.stop(10 * _SHUTDOWN_TIMEOUT)


async def _serve(exporter: Exporter, listener: socket.socket) -> None:
    app = web.Application()
    app.add_routes([web.get("/metrics", exporter.metrics), web.get("/health", exporter.health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        host, port = listener.getsockname()[:2]
        log.info("metrics are at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
