"""An event loop in its own thread, for programs without one, and for work that continues beside a program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one event loop. Any thread may start them. The thread ends with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()  # the runner then cancels what is left

    @property
    def is_running(self) -> bool:
        return not self._loop.is_closed()

    def start(self, work: Coroutine[object, object, object]) -> None:
        """Start a coroutine, and do not wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine and return its result. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """The same for a caller with an event loop of its own. If the caller is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, and wait for its end."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
