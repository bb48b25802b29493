"""An output that any worker of a fleet can write: one worker drains it, and another takes over when that one dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import FencedError, ShoalError, SinkError, StoreAwayError
from shoal.ports import ItemSource, Sink
from shoal.sinks.drainer import (
    PATIENCE,
    PREFIX,
    Cursor,
    Drainer,
    RoleTakenError,
    is_retryable,
    output_name,
    read_cursor,
)
from shoal.sinks.patience import Patience
from shoal.sinks.storage import SinkBusyError

log = logging.getLogger("shoal.sinks")

ROLE_TTL = 60.0  # seconds until the role of a dead process is free; less if leases are shorter
_POLL = 1.0  # seconds between attempts to take the role
_FINISH_POLL = 0.2
_HAND_OVER = 8.0
"""Seconds after which a process releases the role of an output that fails, so that another one may try."""


class StandbyDrainer:
    """Drains while it holds the sink's role, and waits for the role otherwise: ``run`` as a task, then ``finish``.

    ``start`` before ``run`` is optional: it raises at once if the output can't be written."""

    def __init__(
        self, frontier: ItemSource, make_sink: Callable[[], Sink], role: str, *, ttl: float, patience: float = PATIENCE
    ) -> None:
        """``make_sink`` is called each time before the role is requested. ``patience``: seconds that an output that is
        down is waited for."""
        self._frontier = frontier
        self._make_sink = make_sink
        self._name = role
        self.role = PREFIX + role
        """The role that it takes in the run."""
        self._ttl = ttl
        self._current: Drainer | None = None
        self._patience = Patience(patience, first_pause=2 * _POLL)
        self._hand_over = min(_HAND_OVER, patience)
        self._latest: Drainer | None = None
        """The last one that tried to start."""
        self._position = 0
        """How far the output was when it failed last."""
        self._reported = ""
        """Why it stands by, as the log says."""
        self._starting: asyncio.Task[bool] | None = None

    def nudge(self) -> None:
        """Notify it of new items."""
        if self._current is not None:
            self._current.nudge()

    async def start(self) -> None:
        """Take the role if it is free. SinkError if the output can't be opened."""
        try:
            await self._try_start()
        except (RoleTakenError, SinkBusyError) as exc:
            await self._give_way(exc)
        except FencedError:  # `run` meets it too, and then the process joins again
            pass

    async def run(self) -> None:
        """Drain until cancelled. SinkError if a retry of the output can't help, or if it has been down for too long.

        The items are safe in the log."""
        while True:
            try:
                if self._current is not None or await self._try_start():
                    assert self._current is not None
                    await self._current.run()
                await asyncio.sleep(_POLL)
            except (RoleTakenError, SinkBusyError) as exc:
                await self._give_way(exc)
                await asyncio.sleep(_POLL)
            except (SinkError, OSError) as exc:
                await self._wait(exc)

    async def start_over(self) -> None:
        """Release the role after a rewind of the store. ``run`` takes it again, at the cursor that the store has."""
        await self.abandon()

    async def _give_way(self, error: RoleTakenError | SinkBusyError) -> None:
        """Release the role, because another process writes the output."""
        await self.abandon()
        if str(error) != self._reported:
            log.warning("%s; this process stands by", error)
        self._reported = str(error)

    async def _wait(self, error: SinkError | OSError) -> None:
        """Release the role, so that another process may try, and pause. Raise an error if a retry can't help, or the
        output has been down for too long."""
        if not is_retryable(error):
            raise error
        await self.abandon()
        if self._latest is not None and self._latest.position != self._position:  # it worked, here or elsewhere
            self._position = self._latest.position
            self._patience.worked()
        reason = error.__cause__ if isinstance(error.__cause__, SinkError) else error  # a drainer that gave up has one
        since = None if self._latest is None else self._latest.failing_since
        if not await self._patience.pause(reason, since=since):
            raise SinkError(f"gave up after {self._patience.spent}: {reason}") from error

    def hurry(self) -> None:
        """Do not wait long for an output that fails: the process stops."""
        self._patience.hurry()
        if self._current is not None:
            self._current.hurry()

    async def finish(self, *, finished: bool) -> None:
        """Write the rest of the log, and release the role. If another process has the role, that one writes the rest;
        if the run is ``finished``, wait for it."""
        while True:
            try:
                if self._starting is not None:
                    await self._try_start()
                if self._current is not None:
                    return await self._current.finish(finished)
                if not finished or await self._all_written():
                    return None
                if not await self._try_start():
                    await asyncio.sleep(_FINISH_POLL)
            except (RoleTakenError, SinkBusyError) as exc:
                await self._give_way(exc)
                if finished:
                    await asyncio.sleep(_POLL)
            except (SinkError, OSError) as exc:
                if not finished:
                    raise
                await self._wait(exc)

    async def _try_start(self) -> bool:
        """Start, and return whether the role was free. If ``run`` is cancelled, ``finish`` awaits the same start."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            started = await asyncio.shield(self._starting)
        except (ShoalError, OSError):
            self._starting = None
            raise
        self._starting = None
        return started

    async def _start(self) -> bool:
        patience = Patience(min(self._hand_over, self._patience.left))
        drainer = self._latest = Drainer(
            self._frontier, self._make_sink(), self._name, ttl=self._ttl, patience=patience
        )
        has_started = await drainer.try_start()
        self._reported = ""
        if not has_started:
            return False
        self._current = drainer
        log.info("this process writes the items to %s", output_name(self.role))
        return True

    async def abandon(self) -> None:
        """Release the role, also one that is just being taken, and leave the output as it is."""
        if self._starting is not None:
            with suppress(ShoalError, OSError):
                await self._try_start()
        if self._current is not None:
            drainer, self._current = self._current, None
            await drainer.abandon()

    async def _all_written(self) -> bool:
        try:
            roles = {role.role: role for role in await self._frontier.roles()}
            last_item = (await self._frontier.stats()).items
        except StoreAwayError:  # it may answer again soon
            return False
        mine = roles.get(self.role)
        cursor = Cursor() if mine is None else read_cursor(mine.cursor)
        return cursor.position >= last_item and cursor.is_closed is not False
