"""Outputs that grow at their end: JSON lines, and standard output. `shoal.sinks.csvfile` has CSV.

The first write truncates a file to the offset that its last flush returned. That removes a partial line, and items
whose flush was never recorded. The state identifies the content by the run and by a checksum of the last block before
the offset: a different file is an error, and stays unchanged. A new run replaces the file with its first item, or when
it ends: a run that fails before leaves the file as it was. One process at a time can write to it.

Each flush and the end check the file itself: see `shoal.sinks.storage.GrowingFile`.
"""

from __future__ import annotations

import asyncio
import os
import select
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import msgspec

from shoal.errors import SinkError
from shoal.item import Record, decode_item
from shoal.ports import LoggedItem, OutputCount
from shoal.sinks.keys import Rejects, TableOptions, read_state
from shoal.sinks.storage import GrowingFile, checksum, in_thread, owner_of, storage_errors, unwritten

LARGE = 1 << 20  # bytes; a longer write runs in a thread
_MAX_RECENT = 100_000
_SEND_TIMEOUT = 100  # milliseconds that a thread waits for the reader of standard output
_encode_lines = msgspec.json.Encoder().encode_lines


class Saved(msgspec.Struct):
    """The state of a file at a flush. ``rows``, ``fields`` and ``rejected`` are for CSV."""

    run: str = ""
    offset: int = 0
    check: bytes = b""
    rows: int = 0
    fields: list[str] = []
    rejected: int = 0


_encode_saved = msgspec.msgpack.Encoder().encode
_decode_saved = msgspec.msgpack.Decoder(Saved).decode


class GrowingFileSink(ABC):
    """The steps that outputs with a `GrowingFile` have in common."""

    def __init__(self, path: str, options: TableOptions = TableOptions()) -> None:
        self._file = GrowingFile(path, options.run_id, replaces=options.replaces)
        self._rejects = Rejects(self._file.path, options.on_reject)
        self._seq = 0
        """The last item that was written since the file was opened."""

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        await in_thread(self._open, self._load(state), epoch)
        return None

    def _load(self, state: bytes) -> Saved | None:
        """Decode a state; None if the run has not written to the file yet. SinkError for the state of another run."""
        saved = read_state(state, _decode_saved, self._file.path)
        if saved is not None and saved.run != self._file.run_id:
            raise self._file.changed(f"belongs to run {saved.run} by its saved position")
        return saved

    def _open(self, saved: Saved | None, epoch: int) -> None:
        self._file.open(0 if saved is None else saved.offset, fresh=saved is None, epoch=epoch)
        try:
            offset, tail = self._locate(saved or Saved())
            if saved is not None and offset and checksum(tail) != saved.check:
                raise self._file.changed(f"has different content before offset {offset}")
        except BaseException:
            self._file.close()
            raise
        self._file.keep(offset)
        self._seq = 0

    @abstractmethod
    def _locate(self, saved: Saved) -> tuple[int, bytes]:
        """Return where the saved content ends in the file, and the last block before, as it was at that time."""

    async def flush(self) -> bytes:
        state = await in_thread(self._flush)
        self._rejects.flush()
        return state

    def _flush(self) -> bytes:
        self._file.sync()
        self._file.check()
        return _encode_saved(self._saved(checksum(self._file.tail(self._file.size))))

    @abstractmethod
    def _saved(self, check: bytes) -> Saved:
        """The state of the file, with this checksum of its last block."""

    async def close(self, *, finished: bool) -> None:
        if finished:
            self._rejects.finish()
        await in_thread(partial(self._file.end, finished=finished))

    async def count(self, state: bytes) -> OutputCount:
        return await in_thread(self._count, self._load(state))

    def _count(self, saved: Saved | None) -> OutputCount:
        """The items of the run are 0 if the run never wrote the file, or another run has replaced it."""
        if saved is None:
            return OutputCount(items=0)
        items, path = 0, self._file.path
        with storage_errors(path), suppress(FileNotFoundError), open(path, "rb") as content:
            if owner_of(content.fileno()) in (None, self._file.run_id):
                items = self._count_items(content)
        return OutputCount(items=items, rejected=saved.rejected)

    @abstractmethod
    def _count_items(self, file: BinaryIO) -> int: ...


# -- JSON lines


class JsonLinesSink(GrowingFileSink):
    """One JSON object per line, in UTF-8. Bytes become base64; NaN and infinities become null."""

    def _locate(self, saved: Saved) -> tuple[int, bytes]:
        return saved.offset, self._file.tail(saved.offset)

    def _saved(self, check: bytes) -> Saved:
        return Saved(self._file.run_id, self._file.size, check)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = unwritten(items, self._seq)
        if not items:
            return
        lines = _encode_lines([decode_item(item.payload)[1] for item in items])
        if len(lines) < LARGE:
            self._append(lines, items[-1].seq)
        else:
            await in_thread(self._append, lines, items[-1].seq)

    def _append(self, lines: bytes, seq: int) -> None:
        self._file.append(lines)
        self._seq = seq

    def _count_items(self, file: BinaryIO) -> int:
        lines = 0
        while block := file.read(LARGE):
            lines += block.count(b"\n")
        return lines


# -- outputs that can't undo a write


class Recent:
    """Recognizes items that come again: after an error, or from pages that are crawled again after a rewind.

    It remembers the last 100,000 items by page and index. A rewound store reuses numbers in the log for other items.
    """

    def __init__(self, limit: int = _MAX_RECENT) -> None:
        self._limit = limit
        self._order: deque[bytes] = deque()
        self._keys: set[bytes] = set()

    def __contains__(self, item: LoggedItem) -> bool:
        return _key(item) in self._keys

    def add(self, item: LoggedItem) -> None:
        key = _key(item)
        self._keys.add(key)
        self._order.append(key)
        if len(self._order) > self._limit:
            self._keys.discard(self._order.popleft())

    def forget_last(self, count: int) -> None:
        """Forget the last items, because they were removed from the output."""
        for _ in range(min(count, len(self._order))):
            self._keys.discard(self._order.pop())


def _key(item: LoggedItem) -> bytes:
    return item.fingerprint + b"-%d" % item.index


class StreamSink:
    """JSON lines to standard output, where nothing can be undone.

    A process sends each of the last 100,000 items once, even after a rewind of the store. After a crash, items after
    the last saved cursor are sent again.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._recent = Recent()
        self._unsent = bytearray()

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        """Nothing to do: what was sent can't be undone."""
        return None

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = [item for item in items if item not in self._recent]
        if items:
            self._unsent += _encode_lines([decode_item(item.payload)[1] for item in items])
            for item in items:
                self._recent.add(item)
        while self._unsent:  # in short steps: a reader that pauses must not block the crawl or its end
            await in_thread(self._send)

    def _send(self) -> None:
        """Send until the reader pauses. The next call sends the rest first."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        with storage_errors("standard output"):
            while self._unsent and poll.poll(_SEND_TIMEOUT):
                with suppress(BlockingIOError):
                    del self._unsent[: os.write(self._descriptor, self._unsent[: select.PIPE_BUF])]

    async def flush(self) -> bytes:
        await self.write(())
        return b""

    async def close(self, *, finished: bool) -> None:
        """Nothing to do: standard output stays open."""

    async def count(self, state: bytes) -> OutputCount:
        """Nobody knows what the reader has."""
        return OutputCount(items=None)


def _record(payload: bytes) -> Record:
    return decode_item(payload)[1]


class CollectSink:
    """Appends each item to a list or puts it into a queue, for the program that started the crawl.

    ``restore`` makes an item of an encoded one. A bounded queue makes the drainer wait for its reader. The program gets
    each item once, even if its page is crawled again. Opened at an older state, it removes later items from the list,
    unless the program has changed the list.
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
