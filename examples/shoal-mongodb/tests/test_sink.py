"""The MongoDB sink keeps the contract of sinks, and names what is wrong."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio
from mongo_server import MongoServer
from pymongo import AsyncMongoClient
from shoal_mongodb import MongoSink

from shoal.errors import OutputTakenError, SinkError
from shoal.item import encode_item
from shoal.ports import LoggedItem, Sink, SinkOptions
from shoal.sinks import is_shared, open_sink, sink_id
from shoal.sinks.drainer import is_retryable
from shoal.testing import SinkContract, SinkHarness

_COLLECTIONS = ("books", "_shoal_outputs")


class MongoHarness(SinkHarness):
    replaces = False
    rejected_item = {"n": 2**63, "text": "beyond 64 bits"}

    def __init__(self, server: MongoServer) -> None:
        self.server = server
        self.database = f"shoal_test_{secrets.token_hex(4)}"
        self.url = f"{server.url}/{self.database}?collection=books"

    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        return MongoSink(self.url, SinkOptions(run_id, on_reject))

    async def read(self) -> list[dict[str, Any]]:
        async with AsyncMongoClient(self.server.url, tz_aware=True) as client:
            found = client[self.database]["books"].find().sort([("_shoal.run", 1), ("_shoal.seq", 1)])
            return [document async for document in found]

    async def save(self) -> dict[str, list[dict[str, Any]]]:
        async with AsyncMongoClient(self.server.url, tz_aware=True) as client:
            database = client[self.database]
            return {name: [document async for document in database[name].find()] for name in _COLLECTIONS}

    async def restore(self, saved: dict[str, list[dict[str, Any]]]) -> None:
        async with AsyncMongoClient(self.server.url) as client:
            for name, documents in saved.items():
                await client[self.database][name].delete_many({})
                if documents:
                    await client[self.database][name].insert_many(documents)

    async def close(self) -> None:
        async with AsyncMongoClient(self.server.url) as client:
            await client.drop_database(self.database)


@pytest_asyncio.fixture
async def harness(server: MongoServer) -> AsyncIterator[MongoHarness]:
    yield MongoHarness(server)


class TestMongoSink(SinkContract):
    """The contract suite of Shoal."""


def item(seq: int, **fields: object) -> LoggedItem:
    return LoggedItem(seq, seq.to_bytes(16, "big"), 0, encode_item(fields))


async def test_the_fields_of_a_document(harness: MongoHarness) -> None:
    sink = await harness.open(run_id="books_1")
    when = datetime(2026, 5, 1, tzinfo=UTC)
    await sink.write([item(1, title="é", when=when, tags=["a", {"b": None}], price=1.5, data=b"\0")])
    await sink.flush()
    await sink.close(finished=True)
    (document,) = await harness.read()
    key = f"{(1).to_bytes(16, 'big').hex()}-0"
    assert document == {
        "_id": f"books_1:{key}", "_shoal": {"run": "books_1", "seq": 1, "writer": 0}, "title": "é", "when": when,
        "tags": ["a", {"b": None}], "price": 1.5, "data": b"\0",
    }  # fmt: skip


async def test_an_answer_that_is_lost(harness: MongoHarness) -> None:
    """The server stored the documents, but the sink does not know it."""
    sink = await harness.open()
    await sink.write([item(1, n=1, text="item 1")])
    state = await sink.flush()
    harness.server.lose_answers = 1
    with pytest.raises(SinkError) as raised:
        await sink.write([item(2, n=2, text="item 2")])
    assert is_retryable(raised.value)
    await sink.close(finished=False)
    assert await harness.numbers() == [1, 2]
    sink = await harness.open(state)
    await sink.write([item(2, n=2, text="item 2"), item(3, n=3, text="item 3")])
    await sink.flush()
    await sink.close(finished=True)
    assert await harness.numbers() == [1, 2, 3]


def numbered(*numbers: int) -> list[LoggedItem]:
    return [item(number, n=number, text=f"item {number}") for number in numbers]


async def test_a_write_that_arrives_late(harness: MongoHarness) -> None:
    """It was sent before the output got its new writer. It replaces nothing, and what it adds is removed at the end."""
    sink = await harness.open(epoch=1)
    await sink.write(numbered(1, 2))
    state = await sink.flush()
    await sink.close(finished=False)
    late = await harness.open(state, epoch=2)
    await late.write(numbered(3))
    successor = await harness.open(state, epoch=3)
    await successor.write(numbered(3, 4))
    await successor.flush()
    assert isinstance(late, MongoSink)
    with pytest.raises(OutputTakenError):
        await late._replace([{"_id": f"run:{numbered(3)[0].key}", "_shoal": {"run": "run", "seq": 3, "writer": 2}}])
    stray = {"_id": "run:stray", "n": 5, "text": "item 5", "_shoal": {"run": "run", "seq": 5, "writer": 2}}
    await late._replace([stray])
    await late._remove_leftovers()
    await late.close(finished=False)
    assert await harness.numbers() == [1, 2, 3, 4, 5]
    await successor.close(finished=True)
    assert await harness.numbers() == [1, 2, 3, 4]


async def test_a_delete_that_was_repeated(harness: MongoHarness) -> None:
    """Its first copy was held in the network until the sink had been opened again, under the same epoch."""
    sink = await harness.open(epoch=1)
    await sink.write(numbered(1))
    state = await sink.flush()
    await sink.write(numbered(2))
    late = await harness.open(state, epoch=1)
    sink = await harness.open(state, epoch=1)
    await sink.write(numbered(2, 3))
    await sink.flush()
    assert isinstance(late, MongoSink)
    await late._remove_leftovers()
    await late.close(finished=False)
    await sink.close(finished=True)
    assert await harness.numbers() == [1, 2, 3]


async def test_documents_of_an_earlier_version(harness: MongoHarness) -> None:
    """They have no writer, the state was a number, and there was no position document."""
    documents = [
        {"_id": f"run:{each.key}", "n": each.seq, "text": f"item {each.seq}", "_shoal": {"run": "run", "seq": each.seq}}
        for each in numbered(1, 2, 3)
    ]
    await harness.restore({"books": documents})
    sink = await harness.open(b"2", epoch=1)
    await sink.write([item(3, n=13, text="item 13")])
    state = await sink.flush()
    await sink.close(finished=True)
    assert await harness.numbers() == [1, 2, 13]
    assert (await sink.count(state)).position == 3


async def test_an_export_leaves_the_output_of_a_run_alone(harness: MongoHarness) -> None:
    sink = await harness.open(epoch=1)
    await sink.write(numbered(1))
    await sink.flush()
    export = harness.make()
    with pytest.raises(SinkError, match=r"run run writes to .* itself"):
        await export.open(b"")
    await export.close(finished=False)
    await sink.close(finished=True)


async def test_a_server_that_is_away(unused_tcp_port: int) -> None:
    url = f"mongodb://me:secret@127.0.0.1:{unused_tcp_port}/db?serverSelectionTimeoutMS=100"
    sink = MongoSink(url, SinkOptions())
    with pytest.raises(SinkError, match=r"cannot open mongodb://127\.0\.0\.1") as raised:
        await sink.open(b"")
    assert is_retryable(raised.value)
    assert "secret" not in str(raised.value)
    await sink.close(finished=False)


def test_shoal_finds_it() -> None:
    """By its entry point, when the package is installed."""
    url = "mongodb://me:secret@db.example:27018/shop?collection=books&tls=true"
    assert isinstance(open_sink(url, run_id="r"), MongoSink)
    assert sink_id(url) == "mongodb://db.example:27018/shop?collection=books"
    assert is_shared(url)


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://host", "mongodb:///db", "mongodb://host/db?collection=", "mongodb://host:99999/db",
        "mongodb://host/db?collection=a$b", "mongodb://host/db?collection=_shoal_outputs", "mongodb://u:p@ss@host/db", "mongodb://[host/db",
    ],
)  # fmt: skip
def test_invalid_urls(url: str) -> None:
    with pytest.raises(SinkError, match="invalid mongodb:// output") as raised:
        MongoSink(url, SinkOptions())
    assert "p@ss" not in str(raised.value)
