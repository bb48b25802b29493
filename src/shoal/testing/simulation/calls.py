"""A call of a client to a simulated server, and its answer. Both cross the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from shoal.errors import StoreAwayError

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World

T = TypeVar("T")


class NetworkCall(Generic[T]):
    """One call of the process that runs now. It may arrive twice, late, or never, and so may its answer."""

    def __init__(self, world: World, timeout: float) -> None:
        """``timeout``: seconds after which the client gives up."""
        self.caller = world.current
        self._world = world
        self._timeout = timeout
        self._not_after = world.loop.time() + timeout
        self._answer: asyncio.Future[T] = world.loop.create_future()

    async def send(self, receive: Callable[[], None]) -> T:
        """Call ``receive`` when it arrives, and wait for the answer. StoreAwayError if none comes."""
        timer = self._world.loop.call_later(self._timeout, self._give_up)
        self._world.network.send(receive, self._world.machine.context, repeats=True)
        try:
            return await self._answer
        finally:
            timer.cancel()

    @property
    def is_late(self) -> bool:
        """Whether the client has given up."""
        return self._world.loop.time() > self._not_after

    # -- for the server

    def finish(self, result: T) -> None:
        """Send the result."""
        self._reply(lambda: self._answer.set_result(result))

    def fail(self, error: Exception) -> None:
        """Send an error."""
        self._reply(lambda: self._answer.set_exception(error))

    def _reply(self, settle: Callable[[], None]) -> None:
        self._world.network.send(lambda: self._settle(settle), self.caller.context)

    def _give_up(self) -> None:
        error = StoreAwayError(f"the simulated server did not answer in {self._timeout:g} s")
        self._settle(lambda: self._answer.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self._answer.done():
            settle()
