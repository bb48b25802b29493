"""Items as parts in object storage, in a folder for each run, and a manifest that names the parts that count.

A part is written whole, with one call, and never changes: ``PREFIX/RUN/part-FIRST-LAST-WRITER.jsonl`` has the items
FIRST to LAST of the run's log. WRITER has the epoch of its writer and random digits, so no name is used twice. The
manifest ``PREFIX/RUN/_manifest-jsonl.json`` is the commit: a part counts once the manifest names it. Programs that read
whole folders skip names with an underscore.

The manifest is also the fence. It has the epoch of the writer, and each writer replaces only the version that it knows.
So a writer that lost its role cannot commit. Its late writes and deletes touch objects of its own or older names only,
which the manifest does not name. Such leftovers are deleted after the next commit, and at the end of the run.

Some servers ignore the condition, or refuse it (``conditional=no``). So the version of the manifest is also compared
just before it is replaced. But such a server cannot refuse an old writer in the instant between.
"""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from shoal.clients.object_urls import ObjectPlace
from shoal.errors import DECODING_ERRORS, OutputTakenError, SinkError
from shoal.item import decode_item
from shoal.messages import pip_install
from shoal.ports import LoggedItem, OutputCount, Takeovers, common_position, with_takeover
from shoal.sinks.csvfile import encode_header, encode_rows, escape_formula
from shoal.sinks.files import LARGE
from shoal.sinks.keys import Reject, Rejects, TableOptions, read_state
from shoal.sinks.storage import in_thread, unwritten
from shoal.sinks.tables import rows_within
from shoal.system import chance

try:
    from shoal.clients.objects import CONFLICTS, ERRORS, ObjectClient, Version, explain
except ImportError as exc:
    raise SinkError(f"output to object storage needs obstore: {pip_install('objects')}") from exc

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
_MAX_TRIES = 10
"""How often a writer replaces the manifest again because another one did so in the same instant."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_UNFIT = re.compile(r"[^A-Za-z0-9-]")
_encode_lines = msgspec.json.Encoder().encode_lines


class PartOptions(msgspec.Struct, frozen=True):
    """When a part is complete: after so many bytes of items, or so many seconds after its first item."""

    size: int = PART_MB << 20
    seconds: float = PART_SECONDS


class _Saved(msgspec.Struct):
    """The state: the number of the last item, and all fields so far, for the order of columns."""

    run: str
    seq: int | None = None
    fields: list[str] = []
    parts: int = 0
    """How many parts an earlier version wrote. It numbered them, and stored no position."""
    rejected: int = 0
    takeovers: Takeovers = []


class _PartEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The items ``first`` to ``last`` of the log."""

    name: str
    """Empty if none of them could be written."""
    first: int
    last: int
    """0 for parts of an earlier version until the next write shows where they end."""
    items: int | None = None
    """None for parts of an earlier version."""
    rejected: int = 0
    size: int = 0
    """In bytes. 0 for parts of an earlier version."""


class _Manifest(msgspec.Struct, frozen=True):
    """The parts that count, in order."""

    run: str
    epoch: int = 0
    writer: str = ""
    """Differs each time that an output is opened."""
    seq: int = 0
    parts: list[_PartEntry] = []
    fields: list[str] = []

    @property
    def names(self) -> set[str]:
        return _names(self.parts)


class _Stored(NamedTuple):
    """The manifest as it is in the bucket."""

    manifest: _Manifest
    version: Version


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Saved).decode
_encode_manifest = msgspec.json.Encoder().encode
_decode_manifest = msgspec.json.Decoder(_Manifest).decode


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
        self._escape = escape_formula if kind == "csv" and not options.formulas else None
        self._folder = _folder_of(options.run)
        self._manifest_path = f"{self._folder}/_manifest-{kind}.json"
        self._pattern = re.compile(rf"part-(?:\d{{6,}}|\d{{12,}}-\d{{12,}}-([0-9a-f]+)-[0-9a-f]{{8}})\.{kind}")
        self._rejects = Rejects(place.name, options.on_reject)
        self._opened: ObjectClient | None = None
        self._epoch = 0
        self._takeovers: Takeovers = []
        self._writer = ""
        self._stored: _Stored | None = None
        """The manifest as this process wrote it last."""
        self._objects: dict[str, int] = {}
        """The names of all parts in the folder with their sizes, as far as this process knows."""
        self._parts: list[_PartEntry] = []
        """The parts that the next manifest names."""
        self._fields: list[str] = []
        self._legacy = 0
        """How many parts of an earlier version end at a position that only the drainer knows."""
        self._items: list[LoggedItem] = []
        self._size = 0
        self._seq: int | None = None
        """The last item that was written. None: the state does not say it, and nothing was written yet."""

    @property
    def _client(self) -> ObjectClient:
        assert self._opened is not None, "not open"
        return self._opened

    # -- open

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        saved = self._read_state(state)
        self._items, self._size = [], 0
        self._begin(epoch)
        self._takeovers = with_takeover(saved.takeovers, epoch, saved.seq or 0)
        async with self._errors():
            self._opened = ObjectClient(self._place)
            self._stored = await self._probe(await self._take_over(saved))
            self._objects = await self._list(self._client)
        return self._start_at(saved, self._stored.manifest)

    def _read_state(self, state: bytes) -> _Saved:
        saved = read_state(state, _decode, self._place.name) or _Saved(self._options.run)
        if saved.run != self._options.run:
            raise SinkError(f"{self._place.name}: the saved position belongs to run {saved.run}, not to this one")
        return saved

    def _begin(self, epoch: int) -> None:
        self._epoch, self._writer = epoch, f"{epoch:x}-{chance.token_hex(4)}"

    async def _take_over(self, saved: _Saved) -> _Stored:
        """Put this writer's epoch into the manifest, and leave out parts that the log does not have. From then on no
        older writer can commit."""
        for _ in range(_MAX_TRIES):
            stored = await self._read_manifest(self._client)
            if stored is None:
                manifest = _Manifest(
                    self._options.run, parts=[_PartEntry(name, 1, 0) for name in self._numbered(saved.parts)]
                )
            else:
                manifest = stored.manifest
            if manifest.epoch > self._epoch:
                raise self._taken(manifest.epoch)
            last = common_position(saved.takeovers, manifest.epoch, manifest.seq)
            parts = [part for part in manifest.parts if part.last <= last or last == manifest.seq]
            manifest = replace(manifest, epoch=self._epoch, writer=self._writer, seq=last, parts=parts)
            with suppress(*CONFLICTS):
                return await self._put_manifest(manifest, stored)
        raise self._changed("another process replaces it all the time")

    async def _probe(self, stored: _Stored) -> _Stored:
        """Warn if the server ignores the conditions of writes: it creates an object that exists."""
        if self._place.conditional:
            with suppress(*CONFLICTS):
                stored = await self._put_manifest(stored.manifest, None)
                log.warning(
                    "%s: the server ignores the conditions of writes, so it cannot refuse two writers in the same "
                    "instant. If you accept that, add conditional=no",
                    self._place.name,
                )
        return stored

    def _taken(self, epoch: int) -> SinkError:
        if self._epoch:
            return OutputTakenError(self._place.name, epoch)
        return SinkError(
            f"run {self._options.run} writes to {self._place.name} itself, and an export would replace its parts. "
            f"Choose another name, or add only what is missing: `shoal export {self._options.run} --missing -o ...`"
        )

    def _numbered(self, count: int) -> list[str]:
        """The names of the first parts of an earlier version."""
        return [f"part-{number:06}.{self._kind}" for number in range(1, count + 1)]

    def _start_at(self, saved: _Saved, manifest: _Manifest) -> int | None:
        """Choose the parts to keep. Return the last item in them if there should be more."""
        self._fields, self._legacy, self._seq = saved.fields, saved.parts, saved.seq
        if self._legacy:
            names = self._numbered(self._legacy)
            self._parts = [replace(part, last=0) for part in manifest.parts[: self._legacy]]
            if [part.name for part in self._parts] == names and self._objects.keys() >= set(names):
                return None
            self._legacy = 0
        elif self._seq is None:
            self._parts, self._fields = manifest.parts, manifest.fields
            return None
        self._parts = self._kept(manifest.parts, self._seq or 0)
        position = self._parts[-1].last if self._parts else 0
        if position == self._seq:
            return None
        self._fields, self._seq = manifest.fields, position
        return position

    def _kept(self, parts: Sequence[_PartEntry], seq: int) -> list[_PartEntry]:
        """The first parts without those that are missing or go beyond ``seq``, and without all after these."""
        kept: list[_PartEntry] = []
        for part in parts:
            if not part.first <= part.last <= seq or self._is_missing(part):
                while kept and kept[-1].last >= part.first:  # nobody knows which of these items a numbered part has
                    kept.pop()
                break
            kept.append(part)
        return kept

    def _is_missing(self, part: _PartEntry) -> bool:
        return not _is_there(part, self._objects)

    # -- objects

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    async def _list(self, client: ObjectClient) -> dict[str, int]:
        """The names of all parts in the folder, and their sizes."""
        objects = {path.rpartition("/")[2]: size async for path, size in client.list(self._folder)}
        return {name: size for name, size in objects.items() if self._pattern.fullmatch(name)}

    async def _read_manifest(self, client: ObjectClient) -> _Stored | None:
        content = await client.read(self._manifest_path)
        if content is None:
            return None
        try:
            return _Stored(_decode_manifest(content[0]), content[1])
        except DECODING_ERRORS as exc:
            raise SinkError(
                f"{self._manifest_path} in {self._place.name} is not a manifest of Shoal ({exc}). Restore it, or "
                "delete it: then all items that are in the run's log are written again"
            ) from None

    async def _put_manifest(self, manifest: _Manifest, replaces: _Stored | None) -> _Stored:
        """Replace this version of the manifest. One of ``CONFLICTS`` if there is another one."""
        version = None if replaces is None else replaces.version
        data = _encode_manifest(manifest)
        return _Stored(manifest, await self._client.put(self._manifest_path, data, "application/json", version))

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        for item in unwritten(items, self._seq or 0):
            if self._seq is None:
                self._end_before(item.seq)
            await self._add(item)

    async def _add(self, item: LoggedItem) -> None:
        self._items.append(item)
        self._size += len(item.payload)
        self._seq = item.seq
        if self._size >= self._limit:
            await self._write_part()

    def _end_before(self, first: int) -> None:
        """Keep the parts before this item: the first one that is written after a state without a position."""
        if self._legacy:
            self._parts = [replace(part, last=first - 1) for part in self._parts]
            self._legacy = 0
        else:
            self._parts = self._kept(self._parts, first - 1)

    async def flush(self) -> bytes:
        if self._items:
            await self._write_part()
        await self._commit()
        self._rejects.flush()
        if self._seq is None and not self._legacy:
            return b""
        return _encode(
            _Saved(
                self._options.run,
                self._seq,
                self._fields,
                self._legacy,
                sum(part.rejected for part in self._parts),
                self._takeovers,
            )
        )

    async def _write_part(self) -> None:
        fields = dict.fromkeys(self._fields)
        if self._size < LARGE:
            data, rejects = self._encode_part(fields)
        else:
            data, rejects = await in_thread(self._encode_part, fields)
        first, last, count = self._items[0].seq, self._items[-1].seq, len(self._items) - len(rejects)
        name = f"part-{first:012}-{last:012}-{self._writer}.{self._kind}" if data else ""
        if name:
            async with self._errors():
                await self._client.replace(self._path(name), data, CONTENT_TYPES[self._kind])
            self._objects[name] = len(data)
        entry = _PartEntry(name, first, last, count if data else 0, len(rejects), len(data))
        self._parts = [*self._parts, entry]
        self._items, self._size, self._fields = [], 0, list(fields)
        self._rejects.add(rejects)

    def _encode_part(self, fields: dict[str, None]) -> tuple[bytes, list[Reject]]:
        """The content of a part, and the items that do not fit. Adds new fields to ``fields``."""
        if self._kind == "jsonl":
            return _encode_lines([decode_item(item.payload)[1] for item in self._items]), []
        rows, rejects = rows_within(self._items, fields, self._options.max_columns, self._escape)
        if not rows or not fields:
            return b"", rejects
        if self._kind == "csv":
            names = list(fields)
            return encode_header(names) + encode_rows(rows, names, self._escape), rejects
        return _encode_parquet(rows), rejects

    # -- commit

    async def _commit(self) -> None:
        """Replace the manifest, unless it names these parts already. Then delete some leftovers."""
        assert self._stored is not None, "not open"
        if self._parts != self._stored.manifest.parts:
            seq = self._seq or 0
            new = _Manifest(self._options.run, self._epoch, self._writer, seq, self._parts, self._fields)
            async with self._errors():
                self._stored = await self._commit_as(new, self._stored)
        await self._remove_leftovers(_MAX_REMOVED)

    async def _commit_as(self, new: _Manifest, before: _Stored) -> _Stored:
        for _ in range(_MAX_TRIES):
            current = await self._client.version(self._manifest_path)
            if current is not None and current.e_tag == before.version.e_tag:
                with suppress(*CONFLICTS):
                    return await self._put_manifest(new, before)
            stored = await self._read_manifest(self._client)
            if stored is not None and stored.manifest == new:
                return stored  # the answer was lost, and the request was repeated
            before = await self._check(stored, before.manifest)
        raise self._changed("another process replaces it all the time")

    async def _check(self, stored: _Stored | None, expected: _Manifest) -> _Stored:
        """Raise a SinkError unless the manifest in the bucket is the expected one, whatever its version is. The own
        parts that no manifest names are deleted before: perhaps the successor has already removed its leftovers."""
        if stored is not None and stored.manifest == expected:
            return stored
        if stored is None:
            raise self._changed("its manifest is gone")
        await self._remove(_names(self._parts) - expected.names - stored.manifest.names)
        if stored.manifest.epoch > self._epoch:
            raise self._taken(stored.manifest.epoch)
        raise self._changed("its manifest was replaced")

    def _changed(self, what: str) -> SinkError:
        """The error for an output that was set back. It has a cause, so the drainer opens the output again."""
        error = SinkError(f"{self._place.name} was set back, or changed by another process: {what}")
        error.__cause__ = FileNotFoundError(self._manifest_path)
        return error

    # -- leftovers

    async def _remove_leftovers(self, most: int | None = None) -> None:
        """Delete parts that the manifest does not name, as far as no newer writer can have written them. A call deletes
        up to ``most`` of them, because the drainer does not renew its role meanwhile. Without a position none of them
        is deleted: perhaps the manifest is gone, and nothing replaces these parts."""
        assert self._stored is not None, "not open"
        if self._seq is None:
            return
        unnamed = sorted(self._objects.keys() - self._stored.manifest.names)
        async with self._errors():
            await self._remove([name for name in unnamed if self._epoch_of(name) <= self._epoch][:most])

    def _epoch_of(self, name: str) -> int:
        """The epoch of the writer of a part; 0 for numbered parts of an earlier version."""
        match = self._pattern.fullmatch(name)
        return int(match[1], 16) if match and match[1] else 0

    async def _remove(self, names: Iterable[str]) -> None:
        names = list(names)
        for start in range(0, len(names), _AT_ONCE):
            batch = names[start : start + _AT_ONCE]
            await asyncio.gather(*(self._client.delete(self._path(name)) for name in batch))
            for name in batch:
                self._objects.pop(name, None)

    # -- close

    async def close(self, *, finished: bool) -> None:
        try:
            if finished and self._opened is not None:
                await self._finish()
                self._rejects.finish()
        finally:
            self._opened = None

    async def _finish(self) -> None:
        """Check that the bucket has every part, and delete all leftovers."""
        await self._commit()
        assert self._stored is not None, "not open"
        async with self._errors():
            await self._check(await self._read_manifest(self._client), self._stored.manifest)
            self._objects = await self._list(self._client)
        if missing := [part.name for part in self._parts if self._is_missing(part)]:
            raise self._changed(f"{len(missing)} of its parts are gone or damaged, the first is {missing[0]}")
        await self._remove_leftovers()

    # -- count

    async def count(self, state: bytes) -> OutputCount:
        saved = self._read_state(state)
        client = ObjectClient(self._place)
        async with self._errors():
            stored = await self._read_manifest(client)
            objects = await self._list(client)
        if stored is None:
            return OutputCount(items=None if saved.parts else 0, position=None if saved.parts else 0)
        parts = [part for part in stored.manifest.parts if _is_there(part, objects)]
        counts = [part.items for part in parts if part.items is not None]
        return OutputCount(
            items=sum(counts) if len(counts) == len(parts) else None,
            position=None if any(part.last < part.first for part in parts) else stored.manifest.seq,
            rejected=sum(part.rejected for part in parts),
        )

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except ERRORS as exc:
            text, retryable = explain(exc, self._place)
            raise SinkError(f"can't write {self._place.name}: {text}") from (exc if retryable else None)


class MissingPartsSink(ObjectSink):
    """Adds the items that no part has, for an export of the whole log (``export="missing"``).

    It fences nobody: it keeps the epoch and the writer of the manifest. A drainer at work opens its output again, and
    finds the new parts or writes these items itself."""

    added = 0
    """How many items the output has now that it had not."""
    _lost: set[str]
    """The parts that the manifest names and the bucket does not have."""
    _ranges: list[_PartEntry]
    """The parts that are there, in order."""
    _ends: set[int]
    """Where parts ended, and so where the run's output may be opened again: new parts end there as well."""

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        self._items, self._size, self._parts, self._seq, self.added = [], 0, [], 0, 0
        async with self._errors():
            self._opened = ObjectClient(self._place)
            self._stored = await self._read_manifest(self._client)
            self._objects = await self._list(self._client)
        manifest = _Manifest(self._options.run) if self._stored is None else self._stored.manifest
        self._lost = {part.name for part in manifest.parts if self._is_missing(part)}
        self._ranges = self._there(manifest.parts)
        if (self._stored is None and self._objects) or any(part.last < part.first for part in self._ranges):
            raise SinkError(
                f"nothing says which items the parts in {self._place.name} have: an earlier version of Shoal wrote "
                "them, or the manifest was deleted. Choose another name to export all items"
            )
        self._fields, self._ends = manifest.fields, {part.last for part in manifest.parts}
        self._begin(manifest.epoch)
        return None

    def _there(self, parts: Sequence[_PartEntry]) -> list[_PartEntry]:
        """The parts without the lost ones, and without numbered ones that share the range of a lost one."""
        lost = [part for part in parts if part.name in self._lost]
        return [part for part in parts if part.name not in self._lost and not _overlaps(part, lost)]

    async def write(self, items: Sequence[LoggedItem]) -> None:
        for item in unwritten(items, self._seq or 0):
            index = bisect_right(self._ranges, item.seq, key=lambda part: part.first)
            if index and item.seq <= self._ranges[index - 1].last:
                continue
            if self._items and item.seq > self._items[-1].seq + 1:  # a part has no items of others in its range
                await self._write_part()
            await self._add(item)
            if self._items and item.seq in self._ends:
                await self._write_part()

    async def _commit(self) -> None:
        """Add the new parts to the manifest, whatever was added to it meanwhile."""
        async with self._errors():
            for _ in range(_MAX_TRIES):
                if not self._parts:
                    return
                stored = await self._read_manifest(self._client)
                manifest = _Manifest(self._options.run) if stored is None else stored.manifest
                there = self._there(manifest.parts)
                new = [part for part in self._parts if not _overlaps(part, there)]
                merged = self._merged(manifest.parts, [*there, *new])
                with suppress(*CONFLICTS):
                    seq = merged[-1].last
                    await self._put_manifest(replace(manifest, seq=seq, parts=merged, fields=self._fields), stored)
                    self.added += sum(part.items or 0 for part in new)
                    await self._remove(_names(self._parts) - _names(new))
                    self._parts = []
                    return
        raise self._changed("another process replaces it all the time")

    def _merged(self, before: Sequence[_PartEntry], parts: Sequence[_PartEntry]) -> list[_PartEntry]:
        """These parts, and the lost ones of which nothing was written again: their items stay missed."""
        lost = [part for part in before if part.name in self._lost and not _overlaps(part, parts)]
        return sorted([*parts, *lost], key=lambda part: part.first)

    async def _finish(self) -> None:
        await self._commit()


def _is_there(part: _PartEntry, objects: Mapping[str, int]) -> bool:
    """Whether the bucket has a part as it was written."""
    return not part.name or (part.name in objects and part.size in (0, objects[part.name]))


def _names(parts: Iterable[_PartEntry]) -> set[str]:
    """The names of the objects of these parts."""
    return {part.name for part in parts if part.name}


def _overlaps(part: _PartEntry, others: Iterable[_PartEntry]) -> bool:
    return any(part.first <= other.last and other.first <= part.last for other in others)


def _folder_of(run: str) -> str:
    """The name of a run's folder. Different runs have different ones, whatever their names are."""
    if _PLAIN_NAME.fullmatch(run):
        return run
    return f"{_UNFIT.sub('_', run)[:100]}_{blake2b(run.encode(), digest_size=8).hexdigest()}"


def _encode_parquet(rows: Sequence[dict[str, object]]) -> bytes:
    from shoal.sinks.parquet import conform, make_table, pa, pq, unify

    try:
        table = make_table(rows)
        stream = pa.BufferOutputStream()
        pq.write_table(conform(table, unify([table.schema])), stream, compression="zstd")
        return bytes(stream.getvalue())
    except pa.ArrowException as exc:
        raise SinkError(f"can't write a Parquet part: {exc}") from exc
