"""Progress of a running crawl: a live panel below the log on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import builtins
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO, TypeAlias, cast

from shoal.cli.help import raw_stderr
from shoal.crawling.stats import CrawlSnapshot
from shoal.errors import FrontierError
from shoal.messages import LogFormatter, printable
from shoal.system import clock

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    AnyConsole: TypeAlias = "Console | PlainConsole"

# Output for files and pipes as Rich would print it, without importing Rich: that takes 25 ms.

_LEFT, _RIGHT = 4, 2
"""Spaces around the cells of a table."""
_DEFAULT_WIDTH = 80


class PlainConsole:
    """Prints on a stream that is no terminal. It has no styles, so it ignores them.

    The output is that of Rich's `Console` to the byte. Lines that only Rich can lay out are left to it.
    """

    is_terminal = False

    def __init__(self, file: TextIO, width: int | None = None) -> None:
        """``width``: the columns that lines may have; without it, as Rich finds it."""
        self._file = file
        self._width = width or _width()

    def print(self, text: str, *, style: str = "", soft_wrap: bool = False) -> None:
        """Print lines. They are cut into several where they are too long, unless with ``soft_wrap``."""
        if _is_simple(text.replace("\n", "")) and (
            soft_wrap or all(len(line) <= self._width for line in text.split("\n"))
        ):
            self._write(text + "\n")
        else:
            from rich.text import Text

            self._rich().print(Text(text), style=style, soft_wrap=soft_wrap)

    def print_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of names and values."""
        lines = _layout(rows, self._width)
        if lines is None:
            print_rows(self._rich(), rows)
        else:
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def _rich(self) -> Console:
        from rich.console import Console

        return Console(file=self._file, width=self._width, highlight=False, markup=False)


def print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table of names and values with Rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, _RIGHT, 0, _LEFT))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def is_plain(file: TextIO) -> bool:
    """Whether Rich would use no styles on this stream, whatever it is told by environment variables."""
    if sys.platform == "win32" or any(name in os.environ for name in ("FORCE_COLOR", "TTY_COMPATIBLE")):
        return False
    try:
        return not file.isatty()
    except ValueError:  # it is closed
        return True


def _layout(rows: Sequence[tuple[str, str]], width: int) -> list[str] | None:
    """The lines of a table, or None if only Rich can lay them out."""
    if not rows or not all(_is_simple(cell) and cell.strip() == cell for row in rows for cell in row):
        return None
    first, second = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = width - first - 2 * (_LEFT + _RIGHT)
    if second > room:  # Rich makes the wider column narrower, and cuts words that are too long for it
        second = room
        if room <= first or any(len(value) > room and " " in value for _, value in rows):
            return None
    lines = []
    for name, value in rows:
        shown = value if len(value) <= second else f"{value[: second - 1]}\u2026"
        lines.append(f"{'':{_LEFT}}{name:<{first + _RIGHT + _LEFT}}{shown:<{second + _RIGHT}}\n")
    return lines


def _is_simple(text: str) -> bool:
    """Whether each character has one column."""
    return text.isascii() and text.isprintable()


def _width() -> int:
    """The columns of the output, as Rich finds them."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit():
        return int(columns) or _DEFAULT_WIDTH
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        try:
            return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_WIDTH  # type: ignore[union-attr]
        except (AttributeError, ValueError, OSError):
            pass
    return _DEFAULT_WIDTH


_PANEL_INTERVAL = 0.25
_LINE_INTERVAL = 5.0
_SPEED_WINDOW = 10.0


def console() -> AnyConsole:
    """A console on standard error. Standard output is for items."""
    if is_plain(raw_stderr()):
        return PlainConsole(raw_stderr())
    from rich.console import Console

    return Console(file=raw_stderr(), highlight=False, markup=False)


def set_up_logging(console: AnyConsole, level: str) -> None:
    """Send Shoal's log lines to standard error; on a terminal they appear above the panel."""
    handler: logging.Handler
    if console.is_terminal:
        from rich.logging import RichHandler

        rich = cast("Console", console)
        handler = RichHandler(console=rich, show_path=False, markup=False, log_time_format="%H:%M:%S")
        handler.setFormatter(LogFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(raw_stderr())
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("shoal")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


class Watched(Protocol):
    """A crawl, a worker or a node."""

    async def snapshot(self) -> CrawlSnapshot | None: ...


async def _snapshot(crawl: Watched) -> CrawlSnapshot | None:
    try:
        return await crawl.snapshot()
    except FrontierError:  # the server is unreachable: keep showing the last numbers
        return None


def show(console: AnyConsole) -> Callable[[Watched], Coroutine[object, None, None]]:
    """A coroutine function that shows a crawl until it is cancelled."""
    return _Panel(cast("Console", console)).run if console.is_terminal else _Lines(console).run


class SpeedMeter:
    """Pages per second over the last few seconds."""

    def __init__(self, now: float | None = None) -> None:
        self._points: deque[tuple[float, int]] = deque([(clock.monotonic() if now is None else now, 0)])

    def measure(self, fetched: int, now: float) -> float:
        self._points.append((now, fetched))
        while len(self._points) > 2 and self._points[0][0] < now - _SPEED_WINDOW:
            self._points.popleft()
        (then, before), span = self._points[0], now - self._points[0][0]
        return (fetched - before) / span if span > 0 and then < now else 0.0


def time_left(remaining: int, speed: float) -> str:
    """How long the known requests take at this speed. Pages may link to more."""
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


def size(count: float) -> str:
    """``820 B``, ``3.1 kB``, ``12.5 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


class _Lines:
    """Progress for files and pipes."""

    def __init__(self, console: AnyConsole) -> None:
        self._console = console
        self._speed = SpeedMeter()

    async def run(self, crawl: Watched) -> None:
        while True:
            await asyncio.sleep(_LINE_INTERVAL)
            snapshot = await _snapshot(crawl)
            if snapshot is not None:
                self._console.print(self.line(snapshot), soft_wrap=True)

    def line(self, snapshot: CrawlSnapshot) -> str:
        stats, counters = snapshot.stats, snapshot.counters
        speed = self._speed.measure(counters.fetched, clock.monotonic())
        return (
            f"progress pages={counters.fetched} pages/s={speed:.1f} items={stats.items} ready={stats.ready} "
            f"waiting={stats.waiting} in_flight={snapshot.in_flight} errors={sum(counters.errors.values())} "
            f"eta={time_left(stats.remaining, speed)}"
        )


@contextmanager
def _steps_aside(live: Live) -> Iterator[None]:
    """Remove the panel while a debugger, or other code of the user, reads from the terminal."""
    earlier_hook, earlier_input = sys.breakpointhook, builtins.input

    def on_breakpoint(*args: object, **options: object) -> object:
        live.stop()
        if earlier_hook is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
            return earlier_hook(*args, **options)
        import pdb

        pdb.Pdb().set_trace(sys._getframe(1))  # the frame of the user, not this one
        return None

    def ask(prompt: object = "", /) -> str:
        live.stop()
        return earlier_input(prompt)

    sys.breakpointhook, builtins.input = on_breakpoint, ask
    try:
        yield
    finally:
        sys.breakpointhook, builtins.input = earlier_hook, earlier_input


class _Panel:
    """Progress for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._speed = SpeedMeter()

    async def run(self, crawl: Watched) -> None:
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False, transient=True) as live, _steps_aside(live):
            while True:
                await asyncio.sleep(_PANEL_INTERVAL)
                snapshot = await _snapshot(crawl)
                if snapshot is not None and sys.gettrace() is None:  # a debugger has the terminal
                    live.start()
                    live.update(self.render(snapshot), refresh=True)

    def render(self, snapshot: CrawlSnapshot) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        stats, counters = snapshot.stats, snapshot.counters
        speed = self._speed.measure(counters.fetched, clock.monotonic())
        head = Text.assemble(
            ("  ● ", "green"),
            (f"{speed:.1f} pages/s", "bold"),
            f"   {counters.fetched} pages   {stats.items} items   {stats.ready} ready   {stats.waiting} waiting   "
            f"{snapshot.in_flight} in flight   ",
            (f"{sum(counters.errors.values())} errors", "red" if counters.errors else ""),
            f"   ETA {time_left(stats.remaining, speed)}" + (" + seeding" if stats.seeding else ""),
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
        lines = [Text("  " + printable(kinds), style="dim")] if counters.errors else []
        if snapshot.waiting:
            lines.append(Text("  waiting: " + printable(snapshot.waiting), style="yellow"))
        return Group(head, hosts, *lines)
