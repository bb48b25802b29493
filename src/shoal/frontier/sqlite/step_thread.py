"""A thread that runs steps for coroutines, one at a time.

`concurrent.futures.ThreadPoolExecutor` takes twice the CPU time: it makes a second future with a lock for each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_Job: TypeAlias = "tuple[Callable[[], object], asyncio.AbstractEventLoop, asyncio.Future[object]]"


class StepThread:
    """Runs steps in the order in which they are passed, until ``stop``. It does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | Callable[[], object]] = SimpleQueue()
        Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()

    async def run(self, step: Callable[[], T]) -> T:
        """Run a step and return its result. If the caller is cancelled, the step runs anyway."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((step, loop, future))  # type: ignore[arg-type]  # the result of the step is that of its future
        return await future

    def stop(self, last: Callable[[], object] = lambda: None) -> None:
        """End the thread after the steps that were passed before, and after ``last``."""
        self._jobs.put(last)


def _work(jobs: SimpleQueue[_Job | Callable[[], object]]) -> None:
    while isinstance(job := jobs.get(), tuple):
        step, loop, future = job
        result, error = None, None
        try:
            result = step()
        except BaseException as exc:  # the caller gets it
            error = exc
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_settle, future, result, error)
        del job, step, loop, future, result, error  # until the next step, keep nothing alive
    job()


def _settle(future: asyncio.Future[object], result: object, error: BaseException | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
