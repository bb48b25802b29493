"""Typed values in the documents of a store."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from shoal.errors import DECODING_ERRORS, StoreError
from shoal.ports import Documents, Run

T = TypeVar("T")

_ATTEMPTS = 30
_encode = msgspec.msgpack.Encoder().encode


class StoredValue(Generic[T]):
    """A value of one type under one key. Several processes may change it at the same time."""

    def __init__(self, documents: Documents, key: str, kind: type[T]) -> None:
        self._documents = documents
        self._key = key
        self._decoder = msgspec.msgpack.Decoder(kind)

    async def read(self) -> T | None:
        """The value; None if there is none."""
        return (await self._read())[0]

    async def change(self, update: Callable[[T | None], T | None]) -> T | None:
        """Replace the value by the result of ``update``, and return it. None deletes it. If another process was
        faster, ``update`` is called again with the newer value. If it returns the same object, nothing is written."""
        return await self.change_with_run(lambda value: (update(value), None))

    async def change_with_run(self, update: Callable[[T | None], tuple[T | None, Run | None]]) -> T | None:
        """Like ``change``, and create the run that ``update`` returns in the same step, unless that run exists."""
        for attempt in range(_ATTEMPTS):
            value, replaces = await self._read()
            changed, run = update(value)
            if changed is value and run is None:
                return value
            content = None if changed is None else _encode(changed)
            version = os.urandom(16)
            if await self._documents.put_document(self._key, content, replaces=replaces, version=version, run=run):
                return changed
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
        raise StoreError(f"cannot change document {self._key!r}: other processes keep changing it; try again later")

    async def _read(self) -> tuple[T | None, bytes]:
        found = await self._documents.get_document(self._key)
        if found is None:
            return None, b""
        try:
            return self._decoder.decode(found.value), found.version
        except DECODING_ERRORS as exc:
            raise StoreError(f"cannot read document {self._key!r} ({exc}): another program has changed it") from exc
