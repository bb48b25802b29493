"""Items as numbered parts in object storage: ``PREFIX/RUN/part-000001.jsonl``, and so on.

A part is written whole, with one call, and never changes afterwards. The state is the number of parts. After a crash
the next part gets the same number as one whose state was lost, and replaces it. So each item is in exactly one part.

A process that lost its role, and does not know it yet, must not damage the parts of its successor. So a part is written
on the condition that nobody wrote it since this process opened the output. If somebody did, the sink raises a
SinkError; the drainer then checks its role, and opens the sink again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Literal, TypeAlias

import msgspec

from shoal.errors import SinkError
from shoal.item import decode_item
from shoal.ports import LoggedItem
from shoal.sinks.csvfile import encode_header, encode_rows, escape_name
from shoal.sinks.files import LARGE
from shoal.sinks.keys import TableOptions
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.storage import in_thread, unwritten
from shoal.sinks.tables import rows_within
from shoal.stores.objects import ObjectPlace

try:
    from shoal.stores.object_client import CONFLICTS, ERRORS, ObjectClient, explain
except ImportError as exc:
    raise SinkError("output to object storage needs obstore: pip install 'shoal[objects]'") from exc

log = logging.getLogger("shoal.sinks")

Format: TypeAlias = Literal["jsonl", "csv", "parquet"]

CONTENT_TYPES: dict[Format, str] = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
PART_MB = 32
PART_SECONDS = 60.0
_AT_ONCE = 16
_MAX_REMOVED = 10 * _AT_ONCE
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_UNFIT = re.compile(r"[^A-Za-z0-9-]")
_encode_lines = msgspec.json.Encoder().encode_lines


class PartOptions(msgspec.Struct, frozen=True):
    """When a part is complete: after so many bytes of items, or so many seconds after its first item."""

    size: int = PART_MB << 20
    seconds: float = PART_SECONDS
    formulas: bool = True
    """Whether CSV cells may be formulas."""


class _Saved(msgspec.Struct):
    """The state: the number of parts, and all fields so far, for the order of columns."""

    run: str
    parts: int
    fields: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Saved).decode


class ObjectSink:
    """See the module. Each run has a folder of its own, so runs never replace each other's parts."""

    def __init__(
        self, place: ObjectPlace, kind: Format, options: TableOptions, parts: PartOptions = PartOptions()
    ) -> None:
        self.flush_every = parts.seconds
        """Seconds between flushes, because each writes a part."""
        self._place = place
        self._kind = kind
        self._options = options
        self._limit = parts.size
        self._formulas = parts.formulas
        self._folder = _folder_of(options.run)
        self._pattern = re.compile(rf"part-(\d{{6,}})\.{kind}")
        self._rejects = Rejects(place.name, options.on_reject)
        self._client: ObjectClient | None = None
        self._parts = 0
        self._fields: list[str] = []
        self._stale: dict[int, str] = {}
        """Parts after the state, with their tags: their state was lost, or the store was rewound."""
        self._items: list[LoggedItem] = []
        self._size = 0
        self._seq = 0

    # -- open

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        try:
            saved = _decode(state) if state else _Saved(self._options.run, 0)
        except msgspec.MsgspecError as exc:
            raise SinkError(f"can't read the saved position in {self._place.name}: {exc}") from exc
        if saved.run != self._options.run:
            raise SinkError(f"{self._place.name}: the saved position belongs to run {saved.run}, not to this one")
        async with self._errors():
            self._client = ObjectClient(self._place)
            found = {number: tag async for number, tag in self._found(self._client)}
        if saved.parts and saved.parts not in found:
            log.warning("%s: part %d of this run is no longer there", self._place.name, saved.parts)
        self._stale = {number: tag for number, tag in found.items() if number > saved.parts}
        self._parts, self._fields = saved.parts, saved.fields
        self._items, self._size, self._seq = [], 0, 0

    async def _found(self, client: ObjectClient) -> AsyncIterator[tuple[int, str]]:
        async for path, tag in client.list(self._folder):
            if match := self._pattern.fullmatch(path.rpartition("/")[2]):
                yield int(match[1]), tag

    def _path(self, number: int) -> str:
        return f"{self._folder}/part-{number:06}.{self._kind}"

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        for item in unwritten(items, self._seq):
            self._items.append(item)
            self._size += len(item.payload)
            self._seq = item.seq
            if self._size >= self._limit:
                await self._write_part()

    async def flush(self) -> bytes:
        if self._items:
            await self._write_part()
        self._rejects.flush()
        return _encode(_Saved(self._options.run, self._parts, self._fields))

    async def _write_part(self) -> None:
        fields = dict.fromkeys(self._fields)
        if self._size < LARGE:
            data, rejects = self._encode_part(fields)
        else:
            data, rejects = await in_thread(self._encode_part, fields)
        if data:
            await self._put(self._parts + 1, data)
            self._parts += 1
        self._items, self._size, self._fields = [], 0, list(fields)
        self._rejects.add(rejects)
        await self._remove_stale()

    def _encode_part(self, fields: dict[str, None]) -> tuple[bytes, list[Reject]]:
        """The content of a part, and the items that do not fit. Adds new fields to ``fields``."""
        if self._kind == "jsonl":
            return _encode_lines([decode_item(item.payload)[1] for item in self._items]), []
        escape = None if self._formulas or self._kind != "csv" else escape_name
        rows, rejects = rows_within(self._items, fields, self._options.max_columns, escape)
        if not rows or not fields:
            return b"", rejects
        if self._kind == "csv":
            names = list(fields)
            return encode_header(names) + encode_rows(rows, names, formulas=self._formulas), rejects
        return _encode_parquet(rows), rejects

    async def _put(self, number: int, data: bytes) -> None:
        assert self._client is not None, "not open"
        path, tag = self._path(number), self._stale.get(number)
        async with self._errors():
            version = None if tag is None else await self._client.version(path)
            if version is not None and version.e_tag != tag:
                raise SinkError(self._conflict(number)) from FileExistsError(path)
            await self._client.put(path, data, CONTENT_TYPES[self._kind], version)
        self._stale.pop(number, None)

    def _conflict(self, number: int) -> str:
        return f"can't write {self._place.name}: another process wrote part {number}"

    async def _remove_stale(self, most: int | None = _MAX_REMOVED) -> None:
        """Delete parts whose items are written again, or belong to pages that the store does not know. A call deletes
        only some of them, because the drainer does not renew its role meanwhile."""
        numbers = sorted(self._stale)[:most]
        async with self._errors():
            for start in range(0, len(numbers), _AT_ONCE):
                await asyncio.gather(*map(self._remove, numbers[start : start + _AT_ONCE]))

    async def _remove(self, number: int) -> None:
        assert self._client is not None, "not open"
        path = self._path(number)
        version = await self._client.version(path)
        if version is not None and version.e_tag != self._stale[number]:
            raise SinkError(self._conflict(number)) from FileExistsError(path)
        if version is not None:
            await self._client.delete(path)
        del self._stale[number]

    # -- close

    async def close(self, *, finished: bool) -> None:
        if finished and self._client is not None:
            await self._remove_stale(most=None)
            self._rejects.finish()
        self._client = None

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except CONFLICTS as exc:
            raise SinkError(self._conflict(self._parts + 1)) from exc
        except ERRORS as exc:
            text, retryable = explain(exc, self._place)
            raise SinkError(f"can't write {self._place.name}: {text}") from (exc if retryable else None)


def _folder_of(run: str) -> str:
    """The name of a run's folder. Different runs have different ones, whatever their names are."""
    if _PLAIN_NAME.fullmatch(run):
        return run
    return f"{_UNFIT.sub('_', run)[:100]}_{blake2b(run.encode(), digest_size=8).hexdigest()}"


def _encode_parquet(rows: Sequence[dict[str, object]]) -> bytes:
    from shoal.sinks.arrow import conform, make_table, pa, pq, unify

    try:
        table = make_table(rows)
        stream = pa.BufferOutputStream()
        pq.write_table(conform(table, unify([table.schema])), stream, compression="zstd")
        return bytes(stream.getvalue())
    except pa.ArrowException as exc:
        raise SinkError(f"can't write a Parquet part: {exc}") from exc
