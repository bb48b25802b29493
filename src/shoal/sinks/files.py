"""Outputs that grow at their end: JSON lines, and standard output. `shoal.sinks.csvfile` has CSV.

A file is opened at the offset that its last flush returned and cut back to it, so a torn line, or items whose flush
was never recorded, are gone. The state identifies the bytes before the offset by the run and by a checksum of the last
block: another file in its place is an error, and stays as it is. A new run replaces the file. One process at a time can
write to it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from shoal.errors import SinkError
from shoal.item import decode_item
from shoal.ports import LoggedItem
from shoal.sinks.recent import Recent
from shoal.sinks.storage import GrowingFile, checksum, in_thread, storage_errors, unwritten

LARGE = 1 << 20  # a longer write goes to a thread
_PATIENCE = 100  # milliseconds that a thread waits for the reader of standard output
_encode_lines = msgspec.json.Encoder().encode_lines


class Saved(msgspec.Struct):
    """The state of a file at a flush: the bytes before ``offset``, and for CSV what they are."""

    run: str = ""
    offset: int = 0
    check: bytes = b""
    rows: int = 0
    fields: list[str] = []


encode_saved = msgspec.msgpack.Encoder().encode
_decode_saved = msgspec.msgpack.Decoder(Saved).decode


def load_saved(file: GrowingFile, state: bytes) -> Saved | None:
    """None: the run has not written to the file yet. SinkError for a state of another run."""
    try:
        saved = _decode_saved(state) if state else None
    except msgspec.MsgspecError as exc:
        raise SinkError(f"the saved position in {file.path} can't be read: {exc}") from exc
    if saved is not None and saved.run != file.run_id:
        raise file.changed(f"was written by run {saved.run}, as its saved position says")
    return saved


# -- JSON lines


class JsonLinesSink:
    """One JSON object a line, UTF-8. Bytes become base64; NaN and infinities become null."""

    def __init__(self, path: str, *, run_id: str = "") -> None:
        self._file = GrowingFile(path, run_id)
        self._seq = 0

    async def open(self, state: bytes) -> None:
        await in_thread(self._open, load_saved(self._file, state))

    def _open(self, saved: Saved | None) -> None:
        offset = saved.offset if saved is not None else 0
        self._file.open(offset, fresh=saved is None)
        if saved is not None and checksum(self._file.tail(offset)) != saved.check:
            self._file.close()
            raise self._file.changed(f"has other bytes before offset {offset} than before")
        self._file.cut(offset)
        self._seq = 0

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

    async def flush(self) -> bytes:
        return await in_thread(self._flush)

    def _flush(self) -> bytes:
        file = self._file
        file.sync()
        return encode_saved(Saved(file.run_id, file.size, checksum(file.tail(file.size))))

    async def close(self, *, finished: bool) -> None:
        self._file.close()


class StreamSink:
    """JSON lines to standard output: what is out is out, nothing can be cut back.

    Items go out once for each process, also when the store was rewound (of the last 100,000). After a crash, those
    behind the last saved cursor go out again.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._recent = Recent()
        self._unsent = bytearray()

    async def open(self, state: bytes) -> None:
        """What was sent stays sent, also when it is opened again after an error."""

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = [item for item in items if item not in self._recent]
        if items:
            self._unsent += _encode_lines([decode_item(item.payload)[1] for item in items])
            for item in items:
                self._recent.add(item)
        while self._unsent:  # a reader that pauses must not stop the crawl, nor its end
            await in_thread(self._send)

    def _send(self) -> None:
        """Send what its reader takes without a pause. The rest is the first to be sent next time."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        with storage_errors("standard output"):
            while self._unsent and poll.poll(_PATIENCE):
                with suppress(BlockingIOError):
                    del self._unsent[: os.write(self._descriptor, self._unsent[: select.PIPE_BUF])]

    async def flush(self) -> bytes:
        await self.write(())
        return b""

    async def close(self, *, finished: bool) -> None:
        """Standard output is not ours to close."""
