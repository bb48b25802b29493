"""Threads. Use them as ``threads.call(...)``, so that a simulation can replace them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work that blocks in a thread, and return its result. The work goes on if the caller is cancelled."""
    return await asyncio.to_thread(work, *args, **kwargs)


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Run work in a thread of its own. The process does not wait for its end."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class Pool:
    """So many threads of their own for work that may block for minutes, so that other work need not wait for it."""

    def __init__(self, size: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def call(self, work: Callable[..., T], *args: object) -> T:
        """Run work in one of the threads, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)


_Job: TypeAlias = "tuple[Callable[[], object], asyncio.AbstractEventLoop, asyncio.Future[object]]"


class StepThread:
    """Runs steps in the order in which they are passed, until ``stop``. It does not keep the process alive.

    A `Pool` of one thread takes twice the CPU time: it makes a second future with a lock for each step."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | Callable[[], object]] = SimpleQueue()
        start(partial(_work, self._jobs), name)

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
