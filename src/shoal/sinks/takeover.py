"""An output that any worker of a fleet can write: one worker drains it, and another takes over when that one dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import FencedError, ShoalError, SinkError, StoreAwayError
from shoal.ports import ItemSource, Sink
from shoal.sinks.drainer import Drainer, RoleTakenError, is_retryable, position_of
from shoal.sinks.storage import SinkBusyError

log = logging.getLogger("shoal.sinks")

ROLE_TTL = 60.0  # seconds until the role of a dead process is free; less if leases are shorter
_POLL = 1.0  # seconds between attempts to take the role
_FINISH_POLL = 0.2
_MAX_PAUSE = 30.0


class StandbyDrainer:
    """Drains while it holds the sink's role, and waits for the role otherwise: ``run`` as a task, then ``finish``.

    ``start`` before ``run`` is optional: it raises at once if the output can't be written."""

    def __init__(self, frontier: ItemSource, make_sink: Callable[[], Sink], role: str, *, ttl: float) -> None:
        """``make_sink`` is called each time before the role is requested."""
        self._frontier = frontier
        self._make_sink = make_sink
        self._role = role
        self._ttl = ttl
        self._current: Drainer | None = None
        self._failures = 0
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
            await self._stand_by(exc)
        except FencedError:  # `run` meets it too, and then the process joins again
            pass

    async def abandon(self) -> None:
        """Release the role, and leave the output as it is."""
        await self._leave()

    async def run(self) -> None:
        """Drain until cancelled. SinkError if the output can't be written and a retry can't help.

        If the output is down, it retries. The items are safe in the log, and leasing slows down.
        """
        while True:
            try:
                if self._current is not None or await self._try_start():
                    assert self._current is not None
                    await self._current.run()
                pause = _POLL
            except (SinkError, OSError) as exc:
                pause = await self._stand_by(exc)
            await asyncio.sleep(pause)

    async def start_over(self) -> None:
        """Release the role after a rewind of the store. ``run`` takes it again, at the cursor that the store has."""
        if self._starting is not None:
            with suppress(ShoalError, OSError):
                await self._try_start()
        await self._leave()

    async def _stand_by(self, error: SinkError | OSError) -> float:
        """Release the role and return the seconds to wait. Raise the error if a retry can't help."""
        if isinstance(error, (RoleTakenError, SinkBusyError)):
            await self._leave()
            if str(error) != self._reported:
                log.warning("%s; this process stands by", error)
            self._reported = str(error)
            return _POLL
        if not is_retryable(error):
            raise error
        await self._leave()
        self._failures += 1
        pause = min(_MAX_PAUSE, _POLL * 2.0 ** min(self._failures, 10))
        log.warning("%s; retrying in %g s", error, pause)
        return pause

    async def finish(self, *, finished: bool) -> None:
        """Write the rest of the log, and release the role. If another process has the role, that one writes the rest;
        if the run is ``finished``, wait for it."""
        while True:
            pause = _FINISH_POLL
            try:
                if self._starting is not None:
                    await self._try_start()
                if self._current is not None:
                    drainer, self._current = self._current, None
                    return await drainer.finish(finished)
                if not finished or await self._all_written():
                    return None
                if await self._try_start():
                    continue
            except (RoleTakenError, SinkBusyError) as exc:
                await self._stand_by(exc)
            except (SinkError, OSError) as exc:
                if not finished:
                    raise
                pause = await self._stand_by(exc)
            await asyncio.sleep(pause)

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
        drainer = Drainer(self._frontier, self._make_sink(), self._role, ttl=self._ttl)
        has_started = await drainer.try_start()
        self._reported = ""
        if not has_started:
            return False
        self._current = drainer
        log.info("this process writes the items to %s", self._role)
        return True

    async def _leave(self) -> None:
        if self._current is not None:
            drainer, self._current = self._current, None
            await drainer.abandon()

    async def _all_written(self) -> bool:
        try:
            roles = {role.role: role for role in await self._frontier.roles()}
            written = (await self._frontier.stats()).items
        except StoreAwayError:  # it may answer again soon
            return False
        mine = roles.get(f"sink:{self._role}")
        return (position_of(mine.cursor) if mine is not None else 0) >= written
