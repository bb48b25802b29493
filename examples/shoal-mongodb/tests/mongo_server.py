"""A small server that speaks the wire protocol of MongoDB, for tests without a MongoDB.

It keeps documents in memory. It knows OP_MSG and the OP_QUERY of old greetings, and the commands hello, ping, insert,
update (whole documents), delete, find, aggregate (to count), createIndexes, dropDatabase and endSessions. Filters may
have equality, ``$gt``, ``$gte`` and ``$not``. A second document with the same id is an error. Any other command is
refused, so a test notices it. `python mongo_server.py` runs it as a process.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

import bson

Document = dict[str, Any]
_OP_REPLY, _OP_QUERY, _OP_MSG = 1, 2004, 2013
_HELLO = {
    "helloOk": True, "isWritablePrimary": True, "ismaster": True, "maxBsonObjectSize": 16777216,
    "maxMessageSizeBytes": 48000000, "maxWriteBatchSize": 100000, "minWireVersion": 0, "maxWireVersion": 21,
    "readOnly": False, "ok": 1.0,
}  # fmt: skip


class CommandError(Exception):
    """The server refuses a command."""


class MongoServer:
    """The server on 127.0.0.1, as an async context manager.

    ``lose_answers``: how many of the next inserts and updates are applied without an answer; their connections break.
    ``commands`` has the name of each command."""

    def __init__(self, port: int = 0) -> None:
        self.url = ""
        self.collections: dict[str, dict[Any, Document]] = {}
        """By ``database.collection``, the documents by id, in order of insertion."""
        self.commands: list[str] = []
        self.lose_answers = 0
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", self._port)
        self.url = f"mongodb://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    def documents(self, name: str) -> list[Document]:
        return list(self.collections.get(name, {}).values())

    # -- the protocol

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    length, request, _, code = struct.unpack("<4i", await reader.readexactly(16))
                    answer = self._answer(code, await reader.readexactly(length - 16))
                    if answer is None:
                        return
                    kind, body = answer
                    writer.write(struct.pack("<4i", 16 + len(body), 1, request, kind) + body)
                    await writer.drain()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    def _answer(self, code: int, body: bytes) -> tuple[int, bytes] | None:
        if code == _OP_QUERY:
            start = body.index(b"\0", 4) + 9  # flags, name of the collection, skip and limit
            self.commands.append(next(iter(bson.decode(body[start:]))))
            return _OP_REPLY, struct.pack("<iqii", 8, 0, 0, 1) + bson.encode(_HELLO)
        assert code == _OP_MSG, f"unknown operation {code}"
        command = _read_message(body)
        name = next(iter(command))
        self.commands.append(name)
        try:
            found = {**self._run(name, command), "ok": 1.0}
        except CommandError as error:
            found = {"ok": 0.0, "errmsg": str(error), "code": 59, "codeName": "CommandNotFound"}
        if name in ("insert", "update") and self.lose_answers:
            self.lose_answers -= 1
            return None
        return _OP_MSG, struct.pack("<iB", 0, 0) + bson.encode(found)

    # -- commands

    def _run(self, name: str, command: Document) -> Document:
        documents = self.collections.setdefault(f"{command['$db']}.{command[name]}", {})
        match name:
            case "hello" | "ismaster" | "isMaster":
                return _HELLO
            case "ping" | "createIndexes" | "endSessions" | "killCursors":
                return {}
            case "insert":
                return _insert(documents, command["documents"])
            case "update":
                return _update(documents, command["updates"], ordered=command.get("ordered", True))
            case "delete":
                return {"n": sum(_delete(documents, each) for each in command["deletes"])}
            case "find":
                found = list(_matching(documents, command.get("filter", {})))
                for field, order in reversed(command.get("sort", {}).items()):
                    found.sort(key=lambda each, field=field: _value(each, field), reverse=order < 0)
                return _cursor(command, name, found[: command.get("limit") or None])
            case "aggregate":
                match command["pipeline"]:
                    case [{"$match": wanted}, {"$group": {"_id": 1, "n": {"$sum": 1}}}]:
                        count = len(list(_matching(documents, wanted)))
                        return _cursor(command, name, [{"_id": 1, "n": count}] if count else [])
            case "dropDatabase":
                for each in [key for key in self.collections if key.startswith(f"{command['$db']}.")]:
                    del self.collections[each]
                return {}
        raise CommandError(f"no such command: '{name}'")


def _read_message(body: bytes) -> Document:
    """The command of an OP_MSG, with the documents that follow it in sections of their own."""
    command: Document = {}
    position = 4
    while position < len(body):
        kind = body[position]
        (size,) = struct.unpack_from("<i", body, position + 1)
        section = body[position + 1 : position + 1 + size]
        if kind == 0:
            command = {**bson.decode(section), **command}
        else:
            end = section.index(b"\0", 4)
            command[section[4:end].decode()] = bson.decode_all(section[end + 1 :])
        position += 1 + size
    return dict(sorted(command.items(), key=lambda pair: pair[0] in ("documents", "updates", "deletes")))


def _cursor(command: Document, name: str, found: list[Document]) -> Document:
    return {"cursor": {"firstBatch": found, "id": 0, "ns": f"{command['$db']}.{command[name]}"}}


def _insert(documents: dict[Any, Document], inserted: list[Document]) -> Document:
    for number, each in enumerate(inserted):
        if each["_id"] in documents:
            return {"n": number, "writeErrors": [_duplicate(number, each["_id"])]}
        documents[each["_id"]] = each
    return {"n": len(inserted)}


def _duplicate(number: int, key: Any) -> Document:
    return {"index": number, "code": 11000, "errmsg": f"E11000 duplicate key error, dup key: {{ _id: {key!r} }}"}


def _update(documents: dict[Any, Document], updates: list[Document], *, ordered: bool) -> Document:
    changed, upserted, errors = 0, [], []
    for number, each in enumerate(updates):
        if any(field.startswith("$") for field in each["u"]):
            raise CommandError("this server replaces whole documents only")
        found = next(_matching(documents, each["q"]), None)
        if found is not None:
            documents[found["_id"]] = {"_id": found["_id"], **each["u"]}
            changed += 1
        elif each.get("upsert") and each["u"]["_id"] in documents:
            errors.append(_duplicate(number, each["u"]["_id"]))
            if ordered:
                break
        elif each.get("upsert"):
            documents[each["u"]["_id"]] = each["u"]
            upserted.append({"index": number, "_id": each["u"]["_id"]})
    lists = {"upserted": upserted, "writeErrors": errors}
    return {"n": changed + len(upserted), "nModified": changed, **{name: each for name, each in lists.items() if each}}


def _delete(documents: dict[Any, Document], delete: Document) -> int:
    found = [each["_id"] for each in _matching(documents, delete["q"])][: delete["limit"] or None]
    for each in found:
        del documents[each]
    return len(found)


def _matching(documents: dict[Any, Document], wanted: Document) -> Iterable[Any]:
    return (each for each in list(documents.values()) if all(_fits(_value(each, k), v) for k, v in wanted.items()))


def _value(document: Document, field: str) -> Any:
    value: Any = document
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _fits(value: Any, wanted: Any) -> bool:
    match wanted:
        case {"$gt": limit}:
            return value is not None and bool(value > limit)
        case {"$gte": limit}:
            return value is not None and bool(value >= limit)
        case {"$not": other}:
            return not _fits(value, other)
        case _:
            return bool(value == wanted)


async def _main() -> None:
    async with MongoServer() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
