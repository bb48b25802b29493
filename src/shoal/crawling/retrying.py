"""Steps of the frontier that are tried again: a full disk may have room in a moment, a server may come back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from shoal.errors import (
    FencedError,
    FrontierError,
    QueueFullError,
    RunError,
    StoreAwayError,
    StoreBusyError,
    StoreError,
    StoreRewoundError,
)

T = TypeVar("T")

log = logging.getLogger("shoal.frontier")

_TRIES = 5
_LONGEST_PAUSE = 2.0
_FOR_GOOD = (QueueFullError, FencedError, StoreError, StoreBusyError, StoreRewoundError, RunError)
"""Another try does not help."""


class Persistence:
    """Runs a step until it is done. While the store's server is away that may take for ever, until ``give_up``.

    A step that was lost on the way may have happened: every step of a frontier can be repeated.
    """

    def __init__(self, *, shared: bool) -> None:
        """``shared``: the store is a server's, so that a step may hang."""
        self._shared = shared
        self._end: asyncio.Future[None] | None = None
        self._given_up = False
        self.away = False
        """The server could not be reached the last time."""

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        failures = 0
        while True:
            try:
                result = await (self._interruptible(step()) if self._shared else step())
            except _FOR_GOOD:
                raise
            except FrontierError as error:
                failures += 1
                self._note(error, failures)
                if self._given_up or (failures >= _TRIES and not self.away):
                    raise
                pause = min(_LONGEST_PAUSE, 0.1 * 2.0**failures) if self.away else 0.1 * 4.0**failures
                await self._interruptible(asyncio.sleep(pause * random.uniform(0.5, 1.0)))
                continue
            if self.away:
                self.away = False
                log.warning("the frontier's server is back")
            return result

    def _note(self, error: FrontierError, failures: int) -> None:
        if isinstance(error, StoreAwayError):
            if not self.away:
                log.warning("the frontier's server is away, waiting for it: %s", error)
            self.away = True
        else:
            self.away = False
            log.warning("the frontier could not store it, trying again (%d): %s", failures, error)

    async def _interruptible(self, step: Awaitable[T]) -> T:
        if self._given_up:
            if isinstance(step, Coroutine):
                step.close()
            raise StoreAwayError("the frontier's server is away, and there is no time left to wait for it")
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(step)
        task.add_done_callback(_heard)
        either: set[asyncio.Future[Any]] = {task, self._end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        task.cancel()  # and not waited for: it may want to tidy up with the same server
        raise StoreAwayError("the frontier's server did not answer in time")

    def give_up(self) -> None:
        """Wait for no server any more: what hangs fails now, and so does every later step."""
        self._given_up = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


def _heard(task: asyncio.Future[T]) -> None:
    """If nobody waits for it any more, nobody is to be told."""
    if not task.cancelled():
        task.exception()
