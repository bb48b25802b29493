"""A MongoDB output for Shoal: ``mongodb://user:password@host:port/database?collection=name``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import bson
from pymongo import AsyncMongoClient, ReplaceOne, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import ConfigurationError, InvalidURI, OperationFailure, PyMongoError

from shoal.errors import SinkError
from shoal.item import decode_item
from shoal.ports import LoggedItem, SinkOptions

log = logging.getLogger("shoal.sinks")

_MAX_DOCUMENT = 16 * 1024 * 1024 - 1024  # bytes; MongoDB allows 16 MB
_BATCH = 500
_TIMEOUT = "10000"  # milliseconds until a server that cannot be reached is an error
_PLACE = "_shoal"
"""The field with the run of a document, and its number in the run."""


class MongoSink:
    """Writes each item as one document, exactly once.

    The state is the number of the last item that was flushed. ``open`` deletes the later documents of the run: they
    were written after that flush, and come again. A document's id is made of its run and its item's key, so a repeated
    write replaces it.
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
        self._client: AsyncMongoClient[dict[str, Any]] | None = None
        self._seq = 0

    @staticmethod
    def sink_id(url: str) -> str:
        """A name for the output, without user, password and options."""
        _, database, collection = _parse(url)
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{quote(database)}?collection={quote(collection)}"

    async def open(self, state: bytes) -> None:
        try:
            self._seq = int(state or b"0")
        except ValueError:
            raise SinkError(f"{self._name}: cannot read the saved position {state[:40]!r}") from None
        self._rejected.clear()
        try:
            self._client = AsyncMongoClient(self._url, tz_aware=True)
            mine = {f"{_PLACE}.run": self._run_id}
            await self._collection.create_index([(f"{_PLACE}.run", 1), (f"{_PLACE}.seq", 1)])
            await self._collection.delete_many({**mine, f"{_PLACE}.seq": {"$gt": self._seq}})
        except PyMongoError as exc:
            raise self._failed("open", exc) from _cause(exc)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        writes = [ReplaceOne({"_id": each["_id"]}, each, upsert=True) for each in map(self._document, items) if each]
        try:
            for begin in range(0, len(writes), _BATCH):
                await self._collection.bulk_write(writes[begin : begin + _BATCH])
        except PyMongoError as exc:
            raise self._failed("write to", exc) from _cause(exc)
        if items:
            self._seq = max(self._seq, items[-1].seq)

    async def flush(self) -> bytes:
        """Every write was acknowledged by a majority of the servers, with their journals."""
        rejected, self._rejected = self._rejected, {}
        for seq, reason in rejected.items():
            log.error("item %d not written to %s: %s", seq, self._name, reason)
        if rejected and self._on_reject is not None:
            self._on_reject(len(rejected))
        return b"%d" % self._seq

    async def close(self, *, finished: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def _collection(self) -> AsyncCollection[dict[str, Any]]:
        if self._client is None:
            raise SinkError(f"{self._name} is not open")
        safe = WriteConcern(w="majority", j=True)
        return self._client[self._database].get_collection(self._collection_name, write_concern=safe)

    def _document(self, item: LoggedItem) -> dict[str, Any] | None:
        """The document of an item. None if MongoDB cannot store it."""
        _, fields = decode_item(item.payload)
        place = {"run": self._run_id, "seq": item.seq}
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

    def _failed(self, what: str, exc: PyMongoError) -> SinkError:
        return SinkError(f"cannot {what} {self._name}: {str(exc).partition(', Timeout:')[0]}")


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
    if not parts.netloc or not database or not collection or "$" in collection or "\0" in collection:
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
