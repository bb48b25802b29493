"""Server-sent events: an open page updates itself.

A view is rendered once for all its readers, and sent only if it changed. A view without readers, or one that is final,
costs nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from html import escape
from typing import NamedTuple

from shoal.errors import ShoalError

# -- numbers, times and durations as people read them


NOTHING = "\N{EN DASH}"
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def number(value: float | None) -> str:
    """1234567 as 1,234,567; small fractions with one digit."""
    if value is None:
        return NOTHING
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """The two largest units: 3 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds > 0 else "0 s"
    left = round(seconds)
    words: list[str] = []
    for name, size in _UNITS:
        if left >= size or (words and len(words) < 2):
            words.append(f"{left // size} {name}")
            left %= size
        if len(words) == 2:
            break
    return " ".join(word for word in words if not word.startswith("0 ")) or "0 s"


def moment(at: float | None) -> str:
    """A time in ISO 8601, for the attribute ``datetime``: the browser shows it in the time zone of the reader."""
    if at is None or not 0 < at < 1e11:
        return ""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")


def size(count: float | None) -> str:
    """Bytes as kB, MB or GB."""
    if count is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def percent(part: float, whole: float) -> str:
    """A share in percent; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else NOTHING


log = logging.getLogger("shoal.server")

_INTERVAL = 2.0  # seconds between two renderings
_KEEP_ALIVE = 15.0  # seconds: proxies close silent connections
_SLOW = 5.0  # seconds after which a page that cannot be rendered says how old it is
_LIFETIME = 3600.0  # seconds: the browser reconnects, and its session is checked again

_AWAY = "the store does not answer."
END = "event: end\ndata:\n\n"
"""The message that tells a browser not to reconnect."""


class Rendered(NamedTuple):
    """The content of a view."""

    html: str
    is_final: bool = False
    """Whether it will never change again."""


Render = Callable[[], Awaitable[Rendered]]
Errors = tuple[type[Exception], ...]

STORE_AWAY: Errors = (ShoalError, OSError)
"""Expected errors of an update. They are logged without a traceback."""


class _View:
    """One view, and the event that wakes its readers."""

    def __init__(self, content: Rendered) -> None:
        self.content = self._fresh = content
        self._fresh_at = asyncio.get_running_loop().time()
        self.changed = asyncio.Event()
        self.streams = 0
        self.task: asyncio.Task[None] | None = None

    def show(self, content: Rendered) -> None:
        self._fresh, self._fresh_at = content, asyncio.get_running_loop().time()
        self._send(content)

    def show_outdated(self, reason: str) -> None:
        """Show the last content, and how old it is."""
        age = duration(asyncio.get_running_loop().time() - self._fresh_at)
        notice = f"<strong>As of {age} ago:</strong> {escape(reason)} What follows may be outdated."
        self._send(Rendered(f'<p class="alert bad" role="status">{notice}</p>\n{self._fresh.html}'))

    def _send(self, content: Rendered) -> None:
        if content != self.content:
            self.content = content
            self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class LiveViews:
    """All views that have readers. The key of a view contains everything that its content depends on."""

    def __init__(self, interval: float = _INTERVAL) -> None:
        self._interval = interval
        self._views: dict[object, _View] = {}
        self._stopped = False

    async def stream(self, key: object, render: Render, *, expected: Errors = STORE_AWAY) -> AsyncGenerator[str]:
        """Yield the messages of an event stream: the view now, and after each change. ``expected``: errors of an update
        that are logged without a traceback."""
        view = await self._join(key, render, expected)
        try:
            async for message in self._follow(view):
                yield message
        finally:
            self._leave(key, view)

    async def _join(self, key: object, render: Render, expected: Errors) -> _View:
        view = self._views.get(key)
        if view is None:
            content = await render()
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _View(content)
                view.task = asyncio.create_task(self._refresh(view, render, expected))
        view.streams += 1
        return view

    def _leave(self, key: object, view: _View) -> None:
        view.streams -= 1
        if not view.streams:
            self._views.pop(key, None)
            if view.task is not None:
                view.task.cancel()

    async def _refresh(self, view: _View, render: Render, expected: Errors) -> None:
        while not view.content.is_final:
            await asyncio.sleep(self._interval)
            rendering = asyncio.ensure_future(render())
            try:
                while not (await asyncio.wait({rendering}, timeout=_SLOW))[0]:
                    view.show_outdated(_AWAY)
                view.show(rendering.result())
            except expected as exc:  # the store is away, or the run was deleted
                log.debug("the dashboard could not be refreshed: %s", exc)
                view.show_outdated(_AWAY if isinstance(exc, STORE_AWAY) else f"{exc}")
            except Exception:  # a defect must not end the updates: the page shows its last state
                log.exception("the dashboard could not be refreshed")
                view.show_outdated("this page cannot be refreshed; the log of the server says why.")
            finally:
                rendering.cancel()

    async def _follow(self, view: _View) -> AsyncIterator[str]:
        until = asyncio.get_running_loop().time() + _LIFETIME
        sent: Rendered | None = None
        while not self._stopped and asyncio.get_running_loop().time() < until:
            changed = view.changed
            if view.content is not sent:
                sent = view.content
                yield message_of(sent.html)
            if sent.is_final:
                yield END
                return
            try:
                async with asyncio.timeout(_KEEP_ALIVE):
                    await changed.wait()
            except TimeoutError:
                yield ":\n\n"

    def stop(self) -> None:
        """End all streams: the server shuts down."""
        self._stopped = True
        for view in self._views.values():
            view.wake()


def message_of(html: str) -> str:
    """A message of an event stream."""
    lines = "".join(f"data: {line}\n" for line in html.splitlines() if line.strip())
    return f"event: view\n{lines}\n"
