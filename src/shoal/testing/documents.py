"""Contract tests: documents of a store."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from shoal.errors import ShoalError
from shoal.ports import Document, Run, Store
from shoal.ports.documents import MAX_DOCUMENT
from shoal.testing.steps import ContractTests, Harness


async def open_store(harness: Harness) -> Store:
    await harness.open()
    return harness.store


async def read(store: Store, key: str) -> Document:
    """A document that the store must have."""
    document = await store.get_document(key)
    assert document is not None
    return document


class DocumentsContract(ContractTests):
    """A document changes only for a caller that knows its version, and with its run in one step."""

    async def test_a_document_is_written_read_replaced_and_deleted(self, harness: Harness) -> None:
        store = await open_store(harness)
        first, second = os.urandom(16), os.urandom(16)
        assert await store.get_document("a") is None
        assert await store.put_document("a", b"one", replaces=b"", version=first)
        document = await read(store, "a")
        assert (document.key, document.value, document.version) == ("a", b"one", first)
        assert not await store.put_document("a", b"two", replaces=b"", version=second)
        assert not await store.put_document("a", b"two", replaces=b"another version", version=second)
        assert not await store.put_document("a", None, replaces=b"another version", version=second)
        assert await store.put_document("a", b"", replaces=first, version=second)
        document = await read(store, "a")
        assert (document.value, document.version) == (b"", second)
        assert await store.put_document("a", None, replaces=second, version=os.urandom(16))
        assert await store.get_document("a") is None
        assert await store.put_document("a", None, replaces=second, version=os.urandom(16))

    async def test_a_repeated_write_changes_nothing(self, harness: Harness) -> None:
        store, version = await open_store(harness), os.urandom(16)
        assert await store.put_document("a", b"one", replaces=b"", version=version)
        assert await store.put_document("a", b"another", replaces=b"", version=version)
        document = await read(store, "a")
        assert document.value == b"one"

    async def test_of_many_writers_one_wins(self, harness: Harness) -> None:
        store = await open_store(harness)
        for replaces in (b"", bytes(8)):
            if replaces:
                assert await store.put_document("b", b"", replaces=b"", version=replaces)
            key = "b" if replaces else "a"
            won = await asyncio.gather(
                *(store.put_document(key, b"%d" % i, replaces=replaces, version=os.urandom(16)) for i in range(10))
            )
            assert sum(won) == 1
            document = await read(store, key)
            assert document.value == b"%d" % won.index(True)

    async def test_documents_are_listed_in_the_order_of_their_keys(self, harness: Harness) -> None:
        store = await open_store(harness)
        for key in ("b/2", "a", "b/10", "b/é", "c/1", "b", "b/1"):
            assert await store.put_document(key, key.encode(), replaces=b"", version=os.urandom(8))
        listed = await store.list_documents("b/")
        assert [document.key for document in listed] == ["b/1", "b/10", "b/2", "b/é"]
        assert [document.value.decode() for document in listed] == [document.key for document in listed]
        assert [document.key for document in await store.list_documents("b/", after="b/10", limit=1)] == ["b/2"]
        assert [document.key for document in await store.list_documents("")] == [
            "a",
            "b",
            "b/1",
            "b/10",
            "b/2",
            "b/é",
            "c/1",
        ]
        assert await store.list_documents("d") == []

    async def test_a_document_creates_its_run_in_the_same_step(self, harness: Harness) -> None:
        store = await open_store(harness)
        run = Run(run_id="made", spider="s", state="queued", created_at=time.time(), settings={"a": 1})
        assert not await store.put_document("a", b"", replaces=b"another", version=os.urandom(8), run=run)
        assert await store.get_run("made") is None
        version = os.urandom(8)
        assert await store.put_document("a", b"1", replaces=b"", version=version, run=run)
        assert await store.get_run("made") == run
        other = Run(run_id="made", spider="other", state="queued", created_at=time.time())
        assert await store.put_document("a", b"2", replaces=version, version=os.urandom(8), run=other)
        assert await store.get_run("made") == run
        assert [stored.run_id for stored in await store.list_runs("s")] == ["made"]
        await store.delete_run("made")

    async def test_the_documents_of_a_run_are_deleted_with_it(self, harness: Harness) -> None:
        store = await open_store(harness)
        for name in ("x", "x1"):
            await store.create_run(Run(run_id=name, spider="s", state="finished", created_at=time.time()))
            assert await store.put_document(f"run/{name}/history", b"", replaces=b"", version=os.urandom(8))
        await store.delete_run("x")
        assert [document.key for document in await store.list_documents("run/")] == ["run/x1/history"]
        await store.delete_run("x1")
        assert await store.list_documents("") == []

    async def test_a_document_has_limits(self, harness: Harness) -> None:
        store = await open_store(harness)
        for key, value, version in (
            ("", b"", bytes(8)),
            ("a" * 501, b"", bytes(8)),
            ("a\0", b"", bytes(8)),
            ("a\ud800", b"", bytes(8)),
            ("a", bytes(MAX_DOCUMENT + 1), bytes(8)),
            ("a", b"", bytes(7)),
        ):
            with pytest.raises(ShoalError):
                await store.put_document(key, value, replaces=b"", version=version)
        assert await store.put_document("a", bytes(MAX_DOCUMENT), replaces=b"", version=bytes(8))
        document = await read(store, "a")
        assert len(document.value) == MAX_DOCUMENT
