"""An output that any worker of a fleet may write: one of them does, and another goes on when that one dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ShoalError, SinkError, StoreAwayError
from shoal.ports import ItemSource, Sink
from shoal.sinks.drainer import Drainer, RoleTakenError, may_pass, position_of
from shoal.sinks.storage import SinkBusyError

log = logging.getLogger("shoal.sinks")

_POLL = 1.0  # seconds between looks whether the role is free
_END_POLL = 0.2
_LONGEST_PAUSE = 30.0


class StandbyDrainer:
    """Drains when the sink's role is free, and waits when it is not: ``run`` as a task, then ``finish``."""

    def __init__(self, frontier: ItemSource, make_sink: Callable[[], Sink], role: str, *, ttl: float) -> None:
        """``make_sink`` makes a new sink each time that the role is won."""
        self._frontier = frontier
        self._make_sink = make_sink
        self._role = role
        self._ttl = ttl
        self._current: Drainer | None = None
        self._setbacks = 0
        self._starting: asyncio.Task[bool] | None = None

    def nudge(self) -> None:
        """There are new items."""
        if self._current is not None:
            self._current.nudge()

    async def run(self) -> None:
        """Until cancelled. SinkError: the storage refuses, so that no other try can help.

        One that is down for a while is waited for: the items are safe in the log, and leasing slows down by itself.
        """
        while True:
            try:
                if await self._try_start():
                    assert self._current is not None
                    await self._current.run()
                pause = _POLL
            except (SinkError, OSError) as exc:
                pause = await self._step_back(exc)
            await asyncio.sleep(pause)

    async def start_over(self) -> None:
        """The store went back in time: release the role. ``run`` takes it again, at the cursor that the store has."""
        if self._starting is not None:
            with suppress(ShoalError, OSError):
                await self._try_start()
        await self._leave()

    async def _step_back(self, error: SinkError | OSError) -> float:
        """Let the role go, and say when to look again. Raises what will not pass."""
        if not isinstance(error, (RoleTakenError, SinkBusyError)) and not may_pass(error):
            raise error
        await self._leave()
        self._setbacks += 1
        log.warning("%s; standing by", error)
        return min(_LONGEST_PAUSE, _POLL * 2.0 ** min(self._setbacks, 10))

    async def finish(self, *, finished: bool) -> None:
        """Give the role back after all that is in the log was written. When the run is ``finished``, also wait until
        somebody has written it."""
        if self._starting is not None:
            await self._try_start()
        while True:
            pause = _END_POLL
            try:
                if self._current is not None:
                    drainer, self._current = self._current, None
                    return await drainer.finish(finished)
                if not finished or await self._all_written():
                    return None
                if await self._try_start():
                    continue
            except (SinkError, OSError) as exc:
                if not finished:
                    raise
                pause = await self._step_back(exc)
            await asyncio.sleep(pause)

    async def _try_start(self) -> bool:
        """A start that has begun is not cut off when ``run`` is cancelled: ``finish`` goes on with it."""
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
        if not await drainer.try_start():
            return False
        self._current = drainer
        return True

    async def _leave(self) -> None:
        if self._current is not None:
            drainer, self._current = self._current, None
            await drainer.abandon()

    async def _all_written(self) -> bool:
        try:
            roles = {role.role: role for role in await self._frontier.roles()}
            written = (await self._frontier.stats()).items
        except StoreAwayError:  # it may be back in a moment
            return False
        mine = roles.get(f"sink:{self._role}")
        return (position_of(mine.cursor) if mine is not None else 0) >= written
