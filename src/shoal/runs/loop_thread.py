"""An event loop in its own thread, for programs without one, and for work in the background of a program."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from shoal.errors import RunError
from shoal.system import threads

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one event loop. Every thread may start them. The thread ends with the process."""

    def __init__(self, name: str, owner: str = "the thread") -> None:
        """``owner`` is the word for what a user has closed when the thread has ended."""
        self._owner = owner
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threads.start(self._run, name)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()  # the runner then cancels what is left

    @property
    def is_running(self) -> bool:
        """False in a process that was forked since: it has no such thread."""
        return self._pid == os.getpid() and not self._loop.is_closed()

    def _submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        if not self.is_running:
            work.close()
            reason = "is closed" if self._pid == os.getpid() else "was opened before this process was forked"
            raise RunError(f"{self._owner} {reason}; open a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start(self, work: Coroutine[object, object, object]) -> None:
        """Start a coroutine, and do not wait for it."""
        self._submit(work)

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine and return its result. An interrupt cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """The same for a caller with an event loop of its own. If the caller is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(self._submit(work))

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, and wait for its end."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)


# Python's garbage collector, in processes that do nothing but crawl.


def collect_rarely() -> None:
    """Never collect the objects that exist now, and collect new ones rarely: pages leave few cycles behind."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
