"""Retries calls of the frontier and of other stores: a full disk may get room, a server may come back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeAlias, TypeVar

from shoal.errors import (
    FencedError,
    FileStoreError,
    FrontierError,
    QueueFullError,
    RunError,
    SinkError,
    StoreAwayError,
    StoreBusyError,
    StoreError,
    StoreRewoundError,
)
from shoal.sinks.drainer import is_retryable
from shoal.sinks.patience import Patience

T = TypeVar("T")
StorageError: TypeAlias = FileStoreError | SinkError
"""A failure of the store of files, or of the archive."""

log = logging.getLogger("shoal.frontier")

_TRIES = 5
_LONGEST_PAUSE = 2.0
_PERMANENT = (QueueFullError, FencedError, StoreError, StoreBusyError, StoreRewoundError, RunError)
"""A retry does not help."""


class Persistence:
    """Repeats a call of the frontier until it succeeds. While the server is away it waits, until ``give_up``.

    A call whose answer was lost may have been applied. That is safe: every call of a frontier can be repeated.
    """

    def __init__(self, *, shared: bool, on_return: Callable[[], None] = lambda: None) -> None:
        """``shared``: the store is on a server, so a call may hang. ``on_return``: called when the server is back."""
        self._shared = shared
        self._name = "the frontier's server" if shared else "the frontier"
        self._on_return = on_return
        self._end: asyncio.Future[None] | None = None
        self._given_up = False
        self._waiting = 0
        """Calls that found the server away, and wait. Others may succeed: one that is read-only answers queries."""

    @property
    def away(self) -> bool:
        """Whether a call found the server away, and waits for it."""
        return self._waiting > 0

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        failures, waits = 0, False
        try:
            while True:
                try:
                    result = await (self._interruptible(step()) if self._shared else step())
                    break
                except _PERMANENT:
                    raise
                except FrontierError as error:
                    failures += 1
                    was_waiting, waits = waits, isinstance(error, StoreAwayError)
                    self._note(error, failures, waits - was_waiting)
                    if self._given_up or (failures >= _TRIES and not waits):
                        raise
                    pause = min(_LONGEST_PAUSE, 0.1 * 2.0**failures) if waits else 0.1 * 4.0**failures
                    await self._interruptible(asyncio.sleep(pause * random.uniform(0.5, 1.0)))
        except BaseException:
            self._waiting -= waits
            raise
        self._waiting -= waits
        if waits and not self._waiting:
            log.warning("%s is back", self._name)
            self._on_return()
        return result

    def _note(self, error: FrontierError, failures: int, change: int) -> None:
        """Log a failure. ``change``: how many more calls wait for the server."""
        if change > 0 and not self._waiting:
            log.warning("%s is away, waiting for it: %s", self._name, error)
        elif not isinstance(error, StoreAwayError):
            log.warning("the frontier failed, retrying (%d): %s", failures, error)
        self._waiting += change

    async def _interruptible(self, step: Awaitable[T]) -> T:
        if self._given_up:
            if isinstance(step, Coroutine):
                step.close()
            raise StoreAwayError("the frontier's server is away, and there is no time left to wait for it")
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(step)
        task.add_done_callback(_retrieve_error)
        either: set[asyncio.Future[T] | asyncio.Future[None]] = {task, self._end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        task.cancel()  # not awaited: its cleanup may call the same server
        raise StoreAwayError("the frontier's server did not answer in time")

    def give_up_if_away(self) -> None:
        """Give up if the last call found the server away."""
        if self.away:
            self.give_up()

    def give_up(self) -> None:
        """Stop waiting for the server: calls that hang fail now, and so does every later call."""
        self._given_up = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


class StorageWatch:
    """Waits for a store in which pages must be before they are done: that of files, or the archive. While it is down,
    the engine leases nothing."""

    def __init__(
        self, patience: Patience, on_return: Callable[[], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is called with the error if a retry cannot help, or the patience is at its end."""
        self._patience = patience
        self._on_return = on_return
        self._on_failure = on_failure
        self._waiting: asyncio.Task[None] | None = None

    @property
    def is_down(self) -> bool:
        return self._waiting is not None

    def failed(self, error: StorageError, retry: Callable[[], Awaitable[object]]) -> None:
        """Report a failure. ``retry`` repeats the call that failed."""
        if not _is_temporary(error):
            self._on_failure(error)
        elif self._waiting is None:
            self._waiting = asyncio.create_task(self._wait(error, retry))

    async def _wait(self, error: StorageError, retry: Callable[[], Awaitable[object]]) -> None:
        try:
            while await self._patience.pause(error):
                try:
                    await retry()
                except (FileStoreError, SinkError) as exc:
                    error = exc
                    if not _is_temporary(error):
                        break
                except FrontierError:  # the engine meets it too, and knows what to do
                    return
                else:
                    self._patience.worked()
                    log.warning("the store works again")
                    return
            self._on_failure(error)
        finally:
            self._waiting = None
            self._on_return()

    def stop(self) -> None:
        """Stop waiting."""
        if self._waiting is not None:
            self._waiting.cancel()


def _is_temporary(error: StorageError) -> bool:
    return error.retryable if isinstance(error, FileStoreError) else is_retryable(error)


def _retrieve_error(task: asyncio.Future[T]) -> None:
    """Keep asyncio from logging the error of a call that is no longer awaited."""
    if not task.cancelled():
        task.exception()
