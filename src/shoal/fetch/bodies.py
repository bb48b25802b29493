"""Room for large bodies: limits how many bytes of them a process has at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar

FREE_BYTES = 512 * 1024
"""Of each body, that need no room in a `BodyBudget`."""


class BodyBudget:
    """Bytes of large bodies that a process has at the same time. Pages with more than `FREE_BYTES` wait for room, first
    come, first served. A body that is larger than the whole budget waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> asyncio.Future[None]:
        """Room for a body. It is done when there is some. Cancel it to leave the queue."""
        room = asyncio.get_running_loop().create_future()
        self._waiting.append((size, room))
        self._share_out()
        return room

    def give_back(self, size: int) -> None:
        self._used -= size
        self._share_out()

    def _share_out(self) -> None:
        while self._waiting:
            size, room = self._waiting[0]
            if not room.cancelled():
                if self._used and self._used + size > self._total:
                    return
                self._used += size
                room.set_result(None)
            self._waiting.popleft()


class BodyRoom:
    """The room of one page in a budget: reserved once, as soon as its body is large, until the page's task has ended.

    ``task``: handles the page, from the request to the last item."""

    def __init__(self, budget: BodyBudget, task: asyncio.Task[object]) -> None:
        self._budget = budget
        self._room: asyncio.Future[None] | None = None
        self._size = 0
        task.add_done_callback(self._end)

    def reserve(self, size: int) -> asyncio.Future[None]:
        """Reserve room for ``size`` bytes. Later calls return the same, whatever their size is."""
        if self._room is None:
            self._size = size
            self._room = self._budget.take(size)
        return self._room

    def _end(self, task: asyncio.Task[object]) -> None:
        if self._room is not None and not self._room.cancel():  # it had room
            self._budget.give_back(self._size)


body_room: ContextVar[BodyRoom | None] = ContextVar("body_room", default=None)
"""The room of the page that this task handles. None: bodies have no budget."""
