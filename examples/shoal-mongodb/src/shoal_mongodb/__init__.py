"""A MongoDB output for Shoal: ``mongodb://user:password@host:port/database?collection=name``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import bson
import msgspec
from pymongo import AsyncMongoClient, ReplaceOne, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    DuplicateKeyError,
    InvalidURI,
    OperationFailure,
    PyMongoError,
)

from shoal.errors import OutputTakenError, SinkError
from shoal.item import decode_item
from shoal.ports import LoggedItem, OutputCount, SinkOptions, Takeovers, common_position, with_takeover

Document: TypeAlias = dict[str, Any]

log = logging.getLogger("shoal.sinks")

_MAX_DOCUMENT = 16 * 1024 * 1024 - 1024  # bytes; MongoDB allows 16 MB
_BATCH = 500
_TIMEOUT = "10000"  # milliseconds until a server that cannot be reached is an error
_PLACE = "_shoal"
"""The field with the run of a document, its number in the run, and the number of its writer."""
_OUTPUTS = "_shoal_outputs"
"""The collection with the position of each run in each collection."""
_DUPLICATE = 11000
_MAX_TRIES = 10


class _Saved(msgspec.Struct):
    """The state: the number of the last item, and how many could not be written."""

    seq: int
    rejected: int = 0
    takeovers: Takeovers = []


class MongoSink:
    """Writes each item as one document, exactly once.

    The state is the number of the last item that was flushed. Later documents of the run were written after that flush,
    and come again: the first write deletes them. A document's id is made of its run and its item's key, so a repeated
    write replaces it.

    A standalone MongoDB has no transactions, so each document has a fence of its own: the number of its writer, which
    grows whenever the output is opened. Replacements and deletes match documents of earlier writers only. A document
    for the output has the epoch, the writer and the position. It is compared before and after each write and at the
    end, and replaced under the condition that it did not change.
    """

    shared = True
    """Workers on any machine can write it."""

    def __init__(self, url: str, options: SinkOptions) -> None:
        self._url, self._database, self._collection_name = _parse(url)
        self._name = self.sink_id(url)
        self._run_id = options.run_id
        self._on_reject = options.on_reject
        self._rejected: dict[int, str] = {}
        """By number, why an item could not be written since the last flush."""
        self._client: AsyncMongoClient[Document] | None = None
        self._position: Document = {}
        """The document of the output as this process wrote it last."""
        self._saved: _Saved | None = None
        """Where it was opened or flushed. None: without a state, and nothing was flushed since."""
        self._kept: int | None = None
        """Later documents of earlier writers are leftovers. None: not known before the first write."""
        self._written: int | None = None
        self._takeovers: Takeovers = []

    @staticmethod
    def sink_id(url: str) -> str:
        """A name for the output, without user, password and options."""
        _, database, collection = _parse(url)
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{quote(database)}?collection={quote(collection)}"

    # -- open

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        saved, is_of_earlier_version = self._read_state(state)
        self._rejected.clear()
        async with self._errors("open"):
            self._client = AsyncMongoClient(self._url, tz_aware=True)
            await self._collection.create_index([(f"{_PLACE}.run", 1), (f"{_PLACE}.seq", 1)])
            known = await self._take_over(epoch, saved, saved.seq if saved and is_of_earlier_version else 0)
        self._saved = saved
        if saved is not None and known.seq < saved.seq:
            self._saved = known
        self._kept = self._saved.seq if self._saved else None
        self._takeovers = with_takeover(saved.takeovers if saved else [], epoch, self._kept or 0)
        self._written = None
        return None if self._saved is saved else known.seq

    def _read_state(self, state: bytes) -> tuple[_Saved | None, bool]:
        """The state, and whether an earlier version wrote it: it was a number only, and had no position document."""
        try:
            saved = msgspec.json.decode(state, type=_Saved | int) if state else None
        except msgspec.MsgspecError:
            raise SinkError(f"{self._name}: cannot read the saved position {state[:40]!r}") from None
        return (_Saved(saved), True) if isinstance(saved, int) else (saved, False)

    async def _take_over(self, epoch: int, saved: _Saved | None, seq: int) -> _Saved:
        """Put the epoch into the position document, and return up to where the collection has the items of the log.
        ``seq`` is the position without a document."""
        for _ in range(_MAX_TRIES):
            before = await self._outputs.find_one({"_id": self._output_id})
            if before is None:
                position: Document = {
                    "_id": self._output_id,
                    "epoch": epoch,
                    "writer": epoch,
                    "seq": seq,
                    "rejected": 0,
                }
                with suppress(DuplicateKeyError):
                    await self._outputs.insert_one(position)
                    break
                continue
            if before["epoch"] > epoch:
                raise self._taken(epoch, before["epoch"])
            seq = common_position(saved.takeovers if saved else [], before["epoch"], before["seq"])
            position = {**before, "epoch": epoch, "writer": max(epoch, before["writer"] + 1), "seq": seq}
            if (await self._outputs.replace_one(before, position)).matched_count:
                break
        else:
            raise self._changed()
        self._position = position
        return _Saved(position["seq"], position["rejected"])

    def _taken(self, epoch: int, newer: int) -> SinkError:
        if epoch:
            return OutputTakenError(self._name, newer)
        return SinkError(f"run {self._run_id} writes to {self._name} itself; export to another collection")

    def _changed(self) -> SinkError:
        """The error for an output that was set back. It has a cause, so the drainer opens the output again."""
        error = SinkError(f"{self._name} was set back, or changed by another process")
        error.__cause__ = LookupError(self._output_id)
        return error

    async def _check(self) -> None:
        """SinkError unless the position document is as this process wrote it."""
        found = await self._outputs.find_one({"_id": self._output_id})
        if found is not None and found["epoch"] > self._position["epoch"]:
            raise self._taken(self._position["epoch"], found["epoch"])
        if found != self._position:
            raise self._changed()

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not items:
            return
        async with self._errors("write to"):
            await self._check()
            if self._written is None:
                self._kept = items[0].seq - 1 if self._kept is None else self._kept
                await self._remove_leftovers()
            documents = [document for document in map(self._document, items) if document]
            for begin in range(0, len(documents), _BATCH):
                await self._replace(documents[begin : begin + _BATCH])
            await self._check()
        self._written = max(self._written or 0, items[-1].seq)

    async def _replace(self, documents: Sequence[Document]) -> None:
        is_older = {f"{_PLACE}.writer": {"$not": {"$gt": self._position["writer"]}}}
        writes = [ReplaceOne({"_id": document["_id"], **is_older}, document, upsert=True) for document in documents]
        try:
            await self._collection.bulk_write(writes)
        except BulkWriteError as exc:
            if any(error["code"] != _DUPLICATE for error in exc.details["writeErrors"]):
                raise
            await self._check()  # a newer writer has this document
            raise self._changed() from exc

    async def _remove_leftovers(self) -> None:
        later = {f"{_PLACE}.run": self._run_id, f"{_PLACE}.seq": {"$gt": self._kept}}
        is_older = {f"{_PLACE}.writer": {"$not": {"$gte": self._position["writer"]}}}
        await self._collection.delete_many({**later, **is_older})

    async def flush(self) -> bytes:
        """Every write was acknowledged by a majority of the servers, with their journals."""
        if self._written is not None:
            before = self._saved.rejected if self._saved else 0
            seq = max(self._written, self._saved.seq if self._saved else 0)
            await self._move(_Saved(seq, before + len(self._rejected), self._takeovers))
        elif self._saved is not None and self._saved.seq != self._position["seq"]:
            await self._move(self._saved)
        rejected, self._rejected = self._rejected, {}
        for seq, reason in rejected.items():
            log.error("item %d not written to %s: %s", seq, self._name, reason)
        if rejected and self._on_reject is not None:
            self._on_reject(len(rejected))
        return b"" if self._saved is None else msgspec.json.encode(self._saved)

    async def _move(self, saved: _Saved) -> None:
        """Move the position, unless the position document changed."""
        position = {**self._position, "seq": saved.seq, "rejected": saved.rejected}
        async with self._errors("write to"):
            if not (await self._outputs.replace_one(self._position, position)).matched_count:
                await self._check()
                raise self._changed()
        self._position, self._saved = position, saved

    # -- close

    async def close(self, *, finished: bool) -> None:
        client = self._client
        if client is None:
            return
        try:
            if finished:
                async with self._errors("complete"):
                    await self._check()
                    if self._kept is not None:
                        await self._remove_leftovers()
        finally:
            self._client = None
            await client.close()

    async def count(self, state: bytes) -> OutputCount:
        """Documents up to the position. It uses a connection of its own."""
        async with self._errors("count in"), AsyncMongoClient[Document](self._url) as client:
            database = client[self._database]
            position = await database[_OUTPUTS].find_one({"_id": self._output_id})
            mine = {f"{_PLACE}.run": self._run_id}
            count = await database[self._collection_name].count_documents(mine)
        if position is None:
            return OutputCount(items=count)
        return OutputCount(items=count, position=position["seq"], rejected=position["rejected"])

    @property
    def _output_id(self) -> str:
        """The id of the position document. The 0 is the number of the run's log: a run has one."""
        return f"{quote(self._run_id, safe='')}/{quote(self._collection_name, safe='')}/0"

    @property
    def _outputs(self) -> AsyncCollection[Document]:
        return self._safe(_OUTPUTS)

    @property
    def _collection(self) -> AsyncCollection[Document]:
        return self._safe(self._collection_name)

    def _safe(self, name: str) -> AsyncCollection[Document]:
        if self._client is None:
            raise SinkError(f"{self._name} is not open")
        safe = WriteConcern(w="majority", j=True)
        return self._client[self._database].get_collection(name, write_concern=safe)

    def _document(self, item: LoggedItem) -> Document | None:
        """The document of an item. None if MongoDB cannot store it."""
        _, fields = decode_item(item.payload)
        place = {"run": self._run_id, "seq": item.seq, "writer": self._position["writer"]}
        document = {**fields, "_id": f"{self._run_id}:{item.key}", _PLACE: place}
        try:
            size = len(bson.encode(document))
        except (bson.errors.BSONError, OverflowError, ValueError, TypeError, RecursionError) as exc:
            self._rejected[item.seq] = str(exc)[:200]
            return None
        if size > _MAX_DOCUMENT:
            self._rejected[item.seq] = f"it has {size} bytes, and MongoDB allows 16 MB"
            return None
        return document

    @asynccontextmanager
    async def _errors(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except PyMongoError as exc:
            text = str(exc).partition(", Timeout:")[0]
            raise SinkError(f"cannot {what} {self._name}: {text}") from _cause(exc)


def _cause(exc: PyMongoError) -> PyMongoError | None:
    """An error with a cause is tried again. A wrong option or a wrong password stays wrong."""
    is_wrong = isinstance(exc, ConfigurationError) or (isinstance(exc, OperationFailure) and exc.code in (13, 18))
    return None if is_wrong else exc


def _parse(url: str) -> tuple[str, str, str]:
    """The URL for PyMongo, the database and the collection. Errors do not show the URL: it may have a password."""
    form = "mongodb://user:password@host:port/database?collection=name"
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        raise SinkError(f"invalid mongodb:// output; write {form}") from None
    database, collection = parts.path.strip("/"), dict(options).get("collection", "item")
    is_name = collection not in ("", _OUTPUTS) and "$" not in collection and "\0" not in collection
    if not parts.netloc or not database or not is_name:
        raise SinkError(f"invalid mongodb:// output; write {form}")
    own = [(name, value) for name, value in options if name != "collection"]
    if not any(name.lower() == "serverselectiontimeoutms" for name, _ in own):
        own.append(("serverSelectionTimeoutMS", _TIMEOUT))
    try:
        clean = parts._replace(query=urlencode(own)).geturl()
        if parts.scheme == "mongodb":  # the other scheme would ask the DNS
            from pymongo.uri_parser import parse_uri

            parse_uri(clean)
    except (InvalidURI, ConfigurationError, ValueError) as exc:
        raise SinkError(f"invalid mongodb:// output: {exc}") from None
    return clean, database, collection
