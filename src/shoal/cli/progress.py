"""What a running crawl shows: one live panel under the log on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from shoal.cli.terminal import raw_stderr
from shoal.crawling.stats import Snapshot
from shoal.errors import FrontierError
from shoal.printable import LogFormatter, printable

_PANEL_EVERY = 0.25
_LINE_EVERY = 5.0
_WINDOW = 10.0


def console() -> Console:
    """Standard error: standard output belongs to the items."""
    return Console(file=raw_stderr(), highlight=False, markup=False)


def set_up_logging(where: Console, level: str) -> None:
    """Shoal's log lines, above the panel on a terminal."""
    handler: logging.Handler
    if where.is_terminal:
        handler = RichHandler(console=where, show_path=False, markup=False, log_time_format="%H:%M:%S")
        handler.setFormatter(LogFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(raw_stderr())
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("shoal")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


class Watched(Protocol):
    """A crawl, or a worker's part in one."""

    async def snapshot(self) -> Snapshot | None: ...


async def _look(crawl: Watched) -> Snapshot | None:
    try:
        return await crawl.snapshot()
    except FrontierError:  # its server is away: there is nothing new to show
        return None


def show(where: Console) -> Callable[[Watched], Awaitable[None]]:
    """The coroutine function that shows a crawl until it is cancelled."""
    return _Panel(where).run if where.is_terminal else _Lines(where).run


class Speed:
    """Pages a second over the last seconds."""

    def __init__(self, now: float | None = None) -> None:
        self._points: deque[tuple[float, int]] = deque([(time.monotonic() if now is None else now, 0)])

    def measure(self, fetched: int, now: float) -> float:
        self._points.append((now, fetched))
        while len(self._points) > 2 and self._points[0][0] < now - _WINDOW:
            self._points.popleft()
        (then, before), span = self._points[0], now - self._points[0][0]
        return (fetched - before) / span if span > 0 and then < now else 0.0


def time_left(remaining: int, speed: float) -> str:
    """How long what is known now will take; more may be found on the way."""
    if speed <= 0:
        return "?"
    return duration(remaining / speed)


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Lines:
    """For files and pipes."""

    def __init__(self, where: Console) -> None:
        self._where = where
        self._speed = Speed()

    async def run(self, crawl: Watched) -> None:
        while True:
            await asyncio.sleep(_LINE_EVERY)
            snapshot = await _look(crawl)
            if snapshot is not None:
                self._where.print(self.line(snapshot), soft_wrap=True)

    def line(self, snapshot: Snapshot) -> str:
        stats, counters = snapshot.stats, snapshot.counters
        speed = self._speed.measure(counters.fetched, time.monotonic())
        return (
            f"progress pages={counters.fetched} pages/s={speed:.1f} items={stats.items} ready={stats.ready} "
            f"waiting={stats.waiting} in_flight={snapshot.in_flight} errors={sum(counters.errors.values())} "
            f"left={time_left(stats.remaining, speed)}"
        )


class _Panel:
    """For a terminal."""

    def __init__(self, where: Console) -> None:
        self._where = where
        self._speed = Speed()

    async def run(self, crawl: Watched) -> None:
        with Live(console=self._where, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(_PANEL_EVERY)
                snapshot = await _look(crawl)
                if snapshot is not None:
                    live.update(self.render(snapshot), refresh=True)

    def render(self, snapshot: Snapshot) -> Group:
        stats, counters = snapshot.stats, snapshot.counters
        speed = self._speed.measure(counters.fetched, time.monotonic())
        head = Text.assemble(
            ("  ● ", "green"),
            (f"{speed:.1f} pages/s", "bold"),
            f"   {counters.fetched} pages   {stats.items} items   {stats.ready} ready   {stats.waiting} waiting   "
            f"{snapshot.in_flight} in flight   ",
            (f"{sum(counters.errors.values())} errors", "red" if counters.errors else ""),
            f"   left: {time_left(stats.remaining, speed)}" + (" + still seeding" if stats.seeding else ""),
        )
        hosts = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
        for title in ("host", "ready", "in flight", "delay", "why"):
            hosts.add_column(title, overflow="ellipsis", no_wrap=True)
        for host in snapshot.hosts:
            why = f"{host.block_reason}: blocked for {host.blocked_for:.0f} s" if host.blocked_for else host.why
            hosts.add_row(
                Text(printable(host.host)), str(host.ready), f"{host.in_flight}/{host.concurrency}",
                f"{host.delay:.3g} s" if host.delay else "none", Text(printable(why)),
            )  # fmt: skip
        kinds = "   ".join(f"{kind}: {n}" for kind, n in counters.errors.most_common(6))
        return Group(head, hosts, Text("  " + printable(kinds), style="dim")) if counters.errors else Group(head, hosts)
