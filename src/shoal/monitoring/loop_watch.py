"""Notices that the event loop of a crawling process is blocked: a callback that computes or waits without ``await``.

While the loop is blocked, the process fetches nothing, renews no lease and writes no report. A thread sees that. It
logs the stack once, and writes the report of the process, on a connection of its own. It keeps nothing alive that
others should take over: leases are renewed by the event loop alone, so they end.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import ClassVar

from shoal.crawling.callbacks import Callbacks
from shoal.errors import ShoalError
from shoal.frontier import share_store
from shoal.http import Request
from shoal.ports import Store

log = logging.getLogger("shoal.monitoring")

_EVERY = 1.0
"""Seconds between two signs of life of the loop."""
_REPORTED_AFTER = 5.0
"""Seconds after which a blocked loop is reported, and between two reports."""
_LOGGED_AFTER = 10.0
_FROZEN = 2.0
"""Seconds by which this thread wakes up too late if the whole process was frozen. Then no callback is to blame."""
_TIMEOUT = 10.0
_MAX_URL = 500
_DEBUGGERS = ("bdb", "pdb", "pydevd")


class LoopWatch:
    """Watches the event loop on which it is started, until ``stop``."""

    _watches: ClassVar[list[LoopWatch]] = []

    def __init__(self, address: str, report: Callable[[Store, float, str], Awaitable[None]]) -> None:
        """``address``: of the store, for a thread. Empty: the store is in this process, and its reports wait.
        ``report``: write a report to a store: for how long the loop has been blocked, and by what."""
        self._address = address
        self._report = report
        self._ran_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread_id = 0
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._thread_id = threading.get_ident()
        self._watches.append(self)
        self._note_beat(asyncio.get_running_loop())
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._watches.remove(self)
        if self._beat is not None:
            self._beat.cancel()

    def _note_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ran_at = time.monotonic()
        self._beat = loop.call_later(_EVERY, self._note_beat, loop)

    @property
    def age(self) -> float:
        """Seconds since the loop last ran. Up to a second is normal."""
        return time.monotonic() - self._ran_at

    @property
    def blocked_by(self) -> str:
        """What the loop does, if it did not run for some seconds; empty if it runs."""
        return "" if self.age < _REPORTED_AFTER else what_runs(sys._current_frames().get(self._thread_id))

    # -- for the thread

    def _watch(self) -> None:
        logged_at = reported_at = 0.0
        slept_at = time.monotonic()
        while not self._stopping.wait(_EVERY):
            was_frozen = time.monotonic() - slept_at > _EVERY + _FROZEN
            age, by = self.age, "" if was_frozen else self.blocked_by
            if not by:
                if logged_at > 0:
                    log.warning("the event loop runs again, after %.0f s", time.monotonic() - logged_at)
                logged_at = reported_at = 0.0
            if by and age >= _LOGGED_AFTER and not logged_at and self._logs():
                logged_at = self._ran_at
                self._log(age, by)
            if by and self._address and age - reported_at >= _REPORTED_AFTER:
                reported_at = age
                with suppress(ShoalError, OSError):  # the store is away; also a timeout
                    asyncio.run(self._report_alone(age, by))
            slept_at = time.monotonic()

    def _logs(self) -> bool:
        """Whether this is the one of several watches on the loop that logs."""
        return next((each for each in self._watches if each._thread_id == self._thread_id), None) is self

    def _log(self, age: float, by: str) -> None:
        stack = traceback.extract_stack(sys._current_frames().get(self._thread_id))
        if any(frame.filename.rpartition("/")[2].partition(".")[0] in _DEBUGGERS for frame in stack):
            return
        log.warning(
            "the event loop has been blocked for %.0f s by %s: this process fetches nothing meanwhile. Use await, or "
            "asyncio.to_thread for work that blocks. Stack:\n%s", age, by, "".join(traceback.format_list(stack)),
        )  # fmt: skip

    async def _report_alone(self, age: float, by: str) -> None:
        async with asyncio.timeout(_TIMEOUT):
            store = await share_store(self._address)
            try:
                await self._report(store, age, by)
            finally:
                await store.close()


def what_runs(frame: FrameType | None) -> str:
    """What a thread does, for people: the callback and its page, or else the function."""
    innermost = frame
    while frame is not None:
        if frame.f_code is Callbacks.call.__code__ and isinstance(request := frame.f_locals.get("request"), Request):
            return f"{frame.f_locals.get('name') or 'parse'} of {request.url[:_MAX_URL]}"
        frame = frame.f_back
    if innermost is None:
        return "unknown code"
    code = innermost.f_code
    return f"{code.co_qualname} ({code.co_filename}, line {innermost.f_lineno})"
