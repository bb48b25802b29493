"""Keeps simulated processes running: one that ended or was killed is followed by another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from shoal.errors import ShoalError
from shoal.testing.simulation.world import World

_RESTART = 3.0


class Supervisor:
    """Starts processes again and again."""

    def __init__(self, world: World) -> None:
        self.is_calm = False
        """Whether nothing fails any more."""
        self.is_dark = False
        """Whether no process can start."""
        self._world = world
        self._number = 0

    async def keep(
        self,
        role: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        is_over: Callable[[bool], Awaitable[bool]],
        *,
        once: bool = False,
    ) -> None:
        """Run one process of a role after another. ``is_over``: whether it was the last one; its argument says whether
        it began when nothing failed any more. ``once``: one that ends without an error is the last one."""
        began_calmly = False
        while not await is_over(began_calmly):
            while self.is_dark:
                await asyncio.sleep(_RESTART)
            began_calmly = self.is_calm
            self._number += 1
            process = self._world.process(f"{role}{self._number}")
            task = process.start(work())
            while not task.done() and process.is_alive:
                await asyncio.sleep(0.25)
            if task.done():
                process.kill()
                error = task.exception()
                if error is None and once:
                    return
                if error is not None:
                    self._world.note(f"{process.name} failed: {error!r}")
                    if not isinstance(error, ShoalError):
                        raise error
            await asyncio.sleep(_RESTART)
