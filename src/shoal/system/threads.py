"""Threads. Use them as ``threads.call(...)``, so that a simulation can replace them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

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
