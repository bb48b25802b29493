"""The way from a run's item log to a sink, exactly once.

A drainer holds the role of its sink in the run. Behind its cursor (how far it is in the log, and the state of the sink
there) it reads the log and writes; then the sink makes it durable, and only then the cursor moves. Whatever happens in
between, the sink is opened again at the state in the cursor, and everything behind it is written anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from shoal.errors import FrontierError, SinkError, StoreAwayError, StoreRewoundError
from shoal.ports import Claim, ItemLog, ItemSource, LoggedItem, Sink

T = TypeVar("T")

log = logging.getLogger("shoal.sinks")

FLUSH_EVERY = 0.5
FLUSH_AT_MOST = 20_000  # items: the engine pauses when a drainer is far behind, so a rare flush must not look like that
_RETRY_DELAYS = (0.25, 0.75, 2.0, 5.0)
_CLAIM_POLL = 0.25
_AWAY_PAUSE = 0.5
_encode_cursor = msgspec.msgpack.Encoder().encode
_decode_cursor = msgspec.msgpack.Decoder(tuple[int, bytes]).decode
_NONCE_BYTES = 16


class RoleTakenError(SinkError):
    """Another process of the run writes to this output now."""


def position_of(cursor: bytes) -> int:
    """How far in the log a drainer with this cursor is; 0 if it can't be told."""
    try:
        return _decode_cursor(cursor)[0] if cursor else 0
    except msgspec.MsgspecError:
        return 0


class Drainer:
    """Drains one run's item log into one sink: ``start``, then ``run`` as a task, then ``finish`` or ``abandon``.

    ``run`` may be cancelled at any time; ``finish`` also takes over from a ``run`` that still goes on. A storage that
    fails gets another try after each of ``retry_delays`` (seconds); then it is a SinkError.
    """

    def __init__(
        self,
        frontier: ItemSource,
        sink: Sink,
        role: str,
        *,
        ttl: float = 60.0,
        batch: int = 500,
        poll: float = 1.0,
        retry_delays: tuple[float, ...] = _RETRY_DELAYS,
    ) -> None:
        """``role`` is what `shoal.sinks.sink_id` returns. ``poll``: seconds between looks at the log without a nudge.

        A sink may have its own ``flush_every``, in seconds.
        """
        self._frontier = frontier
        self._sink = sink
        self._role = f"sink:{role}"
        self._ttl = ttl
        self._batch = batch
        self._poll = poll
        self._delays = retry_delays
        self._flush_every = min(getattr(sink, "flush_every", FLUSH_EVERY), ttl / 3)
        self._claim: Claim | None = None
        self._position = 0
        self._state = b""
        self._written = 0
        self._last: LoggedItem | None = None
        """The last item that was read: by it the store tells whether its log is still the same."""
        self._unconfirmed: tuple[int, bytes] | None = None
        """Where the cursor was moved to by a call whose answer did not come."""
        self._failures = 0
        """Of the sink, since the cursor last moved."""
        self._broken = False
        self._flush_at = self._renew_at = 0.0
        self._lock = asyncio.Lock()
        self._woken = asyncio.Event()
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def position(self) -> int:
        """The last item, by its sequence number, that is safe in the sink: the log may be trimmed through it."""
        return self._position

    def nudge(self) -> None:
        """There are new items."""
        self._woken.set()

    # -- start

    async def start(self, *, wait: float | None = None) -> None:
        """Take the role and open the sink where the last holder left it.

        While another holds the role it waits, by default long enough for the role of a dead one to expire; then it
        is a SinkError.
        """
        await self._open(await self._take_role(self._ttl + 1 if wait is None else wait))

    async def try_start(self) -> bool:
        """The same without waiting: False while another holds the role."""
        self._renew_at = time.monotonic() + self._ttl / 3
        claiming = partial(self._frontier.claim, self._role, self._ttl, nonce=os.urandom(_NONCE_BYTES))
        claim = await self._persist(claiming)
        if claim is None:
            return False
        await self._open(claim)
        return True

    async def start_over(self) -> None:
        """The store went back in time: continue from the cursor that it has now. ``run`` is not running, and may be
        called again then."""
        async with self._lock:
            self._failure, self._broken, self._failures, self._stopping = None, False, 0, False
            self._unconfirmed = None
            if self._claim is not None:
                await self._close_unfinished()
                await self._persist(partial(self._frontier.relinquish, self._claim))  # else it waits for itself
                self._claim = None
            await self.start()

    async def _open(self, claim: Claim) -> None:
        self._claim = claim
        try:
            self._position, self._state = _decode_cursor(claim.cursor) if claim.cursor else (0, b"")
            self._written, self._last = self._position, None
            await self._sink.open(self._state)
        except BaseException as exc:
            await self._give_role_back()
            if isinstance(exc, msgspec.MsgspecError):
                raise SinkError(f"the saved cursor of {self._name} can't be read: {exc}") from exc
            raise

    async def _take_role(self, wait: float) -> Claim:
        until = time.monotonic() + wait
        told = False
        while True:
            self._renew_at = time.monotonic() + self._ttl / 3
            claiming = partial(self._frontier.claim, self._role, self._ttl, nonce=os.urandom(_NONCE_BYTES))
            claim = await self._persist(claiming)
            if claim is not None:
                return claim
            left = until - time.monotonic()
            if left <= 0:
                raise SinkError(f"another process of this run writes to {self._name}; it can't be written twice")
            if not told and left > _CLAIM_POLL:
                told = True
                log.warning("waiting up to %g s for %s: another process writes to it, or has died", left, self._name)
            await asyncio.sleep(min(left, _CLAIM_POLL))

    @property
    def _name(self) -> str:
        return self._role.removeprefix("sink:")

    # -- run

    async def run(self) -> None:
        """Drain until ``finish`` or ``abandon``. SinkError: the role was lost, or the storage failed for good."""
        try:
            while not self._stopping:
                async with self._lock:
                    if self._stopping:
                        return
                    self._woken.clear()
                    full = await self._turn() == self._batch
                if not full:
                    await self._sleep()
        except Exception as exc:
            self._failure = exc
            raise

    async def _turn(self) -> int:
        """Write one batch, and flush if it is time for that. How many items there were."""
        count = await self._persist(self._drain)
        if self._unsaved and (time.monotonic() >= self._flush_at or self._written - self._position >= FLUSH_AT_MOST):
            await self._persist(self._save)
        await asyncio.sleep(0)  # in memory nothing else may have waited
        return count

    async def _sleep(self) -> None:
        """Until there may be items, or the next flush is due."""
        now = time.monotonic()
        due = min(self._renew_at, self._flush_at) if self._unsaved else self._renew_at
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(self._poll, due - now))):
                await self._woken.wait()

    @property
    def _unsaved(self) -> bool:
        return self._written > self._position

    async def _drain(self) -> int:
        now = time.monotonic()
        if now >= self._renew_at:  # never write under a role that may have expired
            await self._renew()
        items = await self._frontier.read_items(self._written, self._batch, last=self._last)
        if items:
            await self._sink.write(items)
            if not self._unsaved:
                self._flush_at = now + self._flush_every
            self._written, self._last = items[-1].seq, items[-1]
        return len(items)

    async def _save(self) -> None:
        """Nothing is written between the flush and the move of the cursor."""
        await self._confirm()
        if self._unsaved:
            await self._move(self._written, await self._sink.flush())
            self._failures = 0

    async def _renew(self) -> None:
        """Keep the role."""
        if not await self._confirm():
            await self._move(self._position, self._state)

    async def _confirm(self) -> bool:
        """Repeat a move of the cursor whose answer was lost: the store may have it or not. False if there is none."""
        if self._unconfirmed is None:
            return False
        await self._move(*self._unconfirmed)
        return True

    async def _move(self, position: int, state: bytes) -> None:
        assert self._claim is not None, "not started"
        renew_at = time.monotonic() + self._ttl / 3
        cursor = _encode_cursor((position, state))
        self._unconfirmed = (position, state)
        kept = await self._frontier.advance(self._claim, cursor, self._ttl, last=self._covered(position))
        self._unconfirmed = None
        if not kept:
            raise RoleTakenError(f"another process of this run writes to {self._name} now")
        self._claim = self._claim.moved_to(cursor)
        self._position, self._state, self._renew_at = position, state, renew_at

    def _covered(self, position: int) -> LoggedItem | None:
        """The item at this position, if it was read since the sink was opened. A store that went back in time may have
        another one there: then the cursor must not move over it."""
        return self._last if self._last is not None and self._last.seq == position else None

    async def _reopen(self) -> None:
        """Go back to the saved cursor."""
        await self._renew()
        await self._close_unfinished()
        await self._sink.open(self._state)
        self._written, self._last, self._broken = self._position, None, False
        self.nudge()

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """A step, tried again when the storage fails: a full disk may have room in a moment."""
        frontier_failures = 0
        while True:
            failure: Exception
            try:
                if self._broken:
                    await self._reopen()
                return await step()
            except StoreAwayError as exc:  # however long that takes: the engine says when to give up
                log.debug("output waits for the frontier's server: %s", exc)
                await asyncio.sleep(_AWAY_PAUSE)
                continue
            except StoreRewoundError:
                raise
            except FrontierError as exc:
                frontier_failures += 1
                failure, count = exc, frontier_failures
            except (SinkError, OSError) as exc:
                if not may_pass(exc):
                    raise
                self._broken = True
                self._failures += 1
                failure, count = exc, self._failures
            except asyncio.CancelledError:  # perhaps in a write, which may have cost the sink its connection
                self._broken = True
                raise
            if count > len(self._delays):
                raise SinkError(f"gave up after {count} tries: {failure}") from failure
            delay = self._delays[count - 1]
            log.warning("output failed, trying again in %g s: %s", delay, failure)
            await asyncio.sleep(delay)

    # -- end

    async def finish(self, finished: bool) -> None:
        """Drain all that is in the log, flush, move the cursor, close the sink, give the role back.

        ``finished``: the run is over, so the sink may put itself in order. The role stays open for a run that goes on
        later. After ``run`` has failed, or when this fails, it ends like ``abandon``, and raises the error.
        """
        self._stop()
        async with self._lock:
            if self._claim is None:
                return
            try:
                if self._failure is not None:
                    raise self._failure
                await self._catch_up()
                await self._while_held(self._sink.close(finished=finished))
            except BaseException:
                await self._close_unfinished()
                raise
            finally:
                await self._give_role_back()

    async def abandon(self) -> None:
        """Close the sink as it is and give the role back: what is behind the cursor is left to the next holder.

        It waits for a ``run`` that still goes on; one that is stuck in its sink has to be cancelled first.
        """
        self._stop()
        async with self._lock:
            if self._claim is not None:
                await self._close_unfinished()
                await self._give_role_back()

    def _stop(self) -> None:
        self._stopping = True
        self._woken.set()

    async def _catch_up(self) -> None:
        while True:
            if await self._turn():
                continue
            if not self._unsaved:
                return
            await self._persist(self._save)  # and if that had to go back, once more

    async def _while_held(self, work: Coroutine[Any, Any, None]) -> None:
        """Keep the role during something long."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._ttl / 3))[0]:
                try:
                    await self._renew()
                except FrontierError as exc:
                    log.warning("the role of %s could not be renewed: %s", self._name, exc)
        finally:
            await asyncio.wait({task})
        task.result()

    async def _close_unfinished(self) -> None:
        try:
            await self._sink.close(finished=False)
        except (SinkError, OSError) as exc:
            log.warning("output not closed in good order: %s", exc)

    async def _give_role_back(self) -> None:
        if self._claim is not None:
            claim, self._claim = self._claim, None
            try:
                await self._frontier.relinquish(claim)
            except FrontierError as exc:
                log.warning("%s can be written again when its role expires: %s", self._name, exc)


def may_pass(error: SinkError | OSError) -> bool:
    """Whether another try can help. Not when it is the sink that refuses, nor when the reader of a pipe has gone."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause is not None and not isinstance(cause, BrokenPipeError)


async def export(
    frontier: ItemLog, sink: Sink, *, batch: int = 1000, on_progress: Callable[[int], None] | None = None
) -> int:
    """Write a run's whole item log into a fresh sink, without a role or a cursor. How many items it had."""
    await sink.open(b"")
    count = position = 0
    try:
        while items := await frontier.read_items(position, batch):
            await sink.write(items)
            position = items[-1].seq
            count += len(items)
            if on_progress is not None:
                on_progress(count)
        await sink.flush()
    except BaseException:
        with suppress(SinkError, OSError):
            await sink.close(finished=False)
        raise
    await sink.close(finished=True)
    return count
