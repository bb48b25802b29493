"""Items in a list or a queue, for the program that started the crawl."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import SinkError
from shoal.item import Record, decode_item
from shoal.ports import LoggedItem, OutputCount
from shoal.sinks.recent import Recent


def _record(payload: bytes) -> Record:
    return decode_item(payload)[1]


class CollectSink:
    """Appends each item to a list, or puts it into a queue. ``restore`` makes an item of an encoded one.

    A bounded queue makes the drainer wait for its reader. The program gets each item once, even if its page is crawled
    again. Opened at an older state, it removes later items from the list, unless the program has changed the list.
    """

    def __init__(self, target: list[Any] | asyncio.Queue[Any], restore: Callable[[bytes], Any] = _record) -> None:
        self._target = target
        self._restore = restore
        self._seq = 0
        self._seqs = array("q")
        """The sequence number of each item in the list."""
        self._recent = Recent()
        self._is_abandoned = False

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        try:
            self._seq = int(state or b"0")
        except ValueError as exc:
            raise SinkError(f"can't read the saved position of collected items: {state!r}") from exc
        if isinstance(self._target, list) and len(self._target) == len(self._seqs):
            self._remove_later(self._target)
        return None

    def _remove_later(self, target: list[Any]) -> None:
        count = 0
        while self._seqs and self._seqs[-1] > self._seq:
            self._seqs.pop()
            target.pop()
            count += 1
        self._recent.forget_last(count)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        for item in items:
            if self._is_abandoned:
                return
            if item in self._recent:
                continue
            data = self._restore(item.payload)
            if isinstance(self._target, list):
                self._target.append(data)
                self._seqs.append(item.seq)
            else:
                await self._target.put(data)
            self._recent.add(item)
        if items:
            self._seq = max(self._seq, items[-1].seq)

    def leave(self) -> None:
        """Drop all items from now on, without waiting: the program stopped reading the queue."""
        self._is_abandoned = True
        while isinstance(self._target, asyncio.Queue) and not self._target.empty():
            self._target.get_nowait()

    async def flush(self) -> bytes:
        return b"%d" % self._seq

    async def close(self, *, finished: bool) -> None:
        """Nothing to do: the owner of the queue marks its end."""

    async def count(self, state: bytes) -> OutputCount:
        """The program may have removed items."""
        return OutputCount(items=None)
