"""Typed values in documents."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from shoal.errors import StoreError
from shoal.frontier.memory import MemoryStore
from shoal.ports import Document, Run
from shoal.ports.documents import StoredValue

pytestmark = pytest.mark.asyncio


class SlowStore(MemoryStore):
    """Other tasks run between a read and a write, as with a server."""

    async def get_document(self, key: str) -> Document | None:
        found = await super().get_document(key)
        await asyncio.sleep(0)
        return found


async def test_changes_at_the_same_time_are_all_kept() -> None:
    value = StoredValue(SlowStore(), "numbers", list[int])

    async def add(number: int) -> None:
        await value.change(lambda numbers: [*(numbers or []), number])

    await asyncio.gather(*map(add, range(10)))
    assert sorted(await value.read() or []) == list(range(10))


async def test_none_deletes_and_the_same_object_writes_nothing() -> None:
    store = MemoryStore()
    value = StoredValue(store, "a", int)
    assert await value.change(lambda number: (number or 0) + 1) == 1
    before = await store.get_document("a")
    assert await value.change(lambda number: number) == 1
    assert await store.get_document("a") == before
    assert await value.change(lambda _: None) is None
    assert await value.read() is None


async def test_a_run_is_created_with_the_value() -> None:
    store = MemoryStore()
    run = Run(run_id="r", spider="s", state="queued", created_at=time.time())
    assert await StoredValue(store, "a", int).change_with_run(lambda _: (1, run)) == 1
    assert await store.get_run("r") == run


async def test_an_unreadable_value_is_an_error_that_names_it() -> None:
    store = MemoryStore()
    await store.put_document("a", b"\xc1", replaces=b"", version=os.urandom(8))
    with pytest.raises(StoreError, match="cannot read document 'a'"):
        await StoredValue(store, "a", int).read()
