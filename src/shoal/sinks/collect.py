"""Items for the program that started the crawl."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from shoal.item import decode_item
from shoal.ports import LoggedItem
from shoal.sinks.storage import unwritten

Data: TypeAlias = dict[str, Any]


class CollectSink:
    """Appends the data of each item to a list, or puts it into a queue.

    A bounded queue makes the drainer wait for its reader. Once handed over, an item counts as written.
    """

    def __init__(self, target: list[Data] | asyncio.Queue[Data | None]) -> None:
        self._target = target
        self._seq = 0
        self._left = False

    async def open(self, state: bytes) -> None:
        """What was handed over stays so, also when it is opened again after an error."""

    async def write(self, items: Sequence[LoggedItem]) -> None:
        for item in unwritten(items, self._seq):
            if self._left:
                return
            data = decode_item(item.payload)[1]
            if isinstance(self._target, list):
                self._target.append(data)
            else:
                await self._target.put(data)
            self._seq = item.seq

    def leave(self) -> None:
        """No one reads the queue any more: what is in it and what still comes is dropped, and nothing waits."""
        self._left = True
        while isinstance(self._target, asyncio.Queue) and not self._target.empty():
            self._target.get_nowait()

    async def flush(self) -> bytes:
        return b""

    async def close(self, *, finished: bool) -> None:
        """The end of the queue is told by whoever made it."""
