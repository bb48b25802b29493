"""Runs, and small documents that a store keeps beside them: schedules, histories, the log of user actions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from shoal.errors import DECODING_ERRORS, StoreError
from shoal.system import chance

RunState: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]

_Moment: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970, as far as a calendar goes."""


class Run(Struct, frozen=True, kw_only=True):
    """One execution of a spider."""

    run_id: str
    spider: str
    state: RunState
    created_at: _Moment
    settings: Mapping[str, object] = {}
    project: str = "shoal"
    """``project_name`` of the configuration. Projects on one store share only the politeness to hosts."""
    ended_at: _Moment | None = None
    """When it was finished or cancelled."""


MAX_DOCUMENT = 1 << 20
"""Bytes in the value of a document."""
MAX_DOCUMENT_KEY = 500
_PAGE = 200
"""Documents that are read at once."""


class Document(Struct, frozen=True):
    """A value under a key."""

    key: str
    value: bytes
    version: bytes
    """Changes with each write. Versions are random, so none repeats in a store that was rewound."""


class Documents(Protocol):
    """Documents of a store. The documents below ``run/RUN_ID/`` are deleted with that run."""

    async def get_document(self, key: str) -> Document | None: ...

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        """Documents whose key begins with ``prefix`` and is greater than ``after``, in the order of their keys."""
        ...

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        """Write a document if its version still is ``replaces``; empty: if there is none. False: it has another one.

        A repeat with the same ``version`` (8 to 32 random bytes) changes nothing and returns True, so a lost answer
        costs nothing. With None as value, the document is deleted. With ``run``, the run is created in the same step,
        unless there is one of that name."""
        ...


async def all_documents(documents: Documents, prefix: str) -> list[Document]:
    """All documents whose key begins with ``prefix``, in the order of their keys."""
    found: list[Document] = []
    while page := await documents.list_documents(prefix, after=found[-1].key if found else "", limit=_PAGE):
        found += page
        if len(page) < _PAGE:
            break
    return found


def check_document(key: str, value: bytes | None, version: bytes) -> None:
    """StoreError if a document is too large to be stored."""
    if not 0 < len(key) <= MAX_DOCUMENT_KEY or not key.isprintable():
        raise StoreError(f"the key of a document has 1 to {MAX_DOCUMENT_KEY} printable characters: {key!r:.100}")
    if value is not None and len(value) > MAX_DOCUMENT:
        raise StoreError(f"document {key!r} has {len(value)} bytes; the limit is {MAX_DOCUMENT}")
    if not 8 <= len(version) <= 32:
        raise StoreError(f"the version of a document has 8 to 32 bytes, not {len(version)}")


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
            version = chance.token_bytes(16)
            if await self._documents.put_document(self._key, content, replaces=replaces, version=version, run=run):
                return changed
            await asyncio.sleep(chance.uniform(0, 0.01 * (attempt + 1)))
        raise StoreError(f"cannot change document {self._key!r}: other processes keep changing it; try again later")

    async def _read(self) -> tuple[T | None, bytes]:
        document = await self._documents.get_document(self._key)
        if document is None:
            return None, b""
        try:
            return self._decoder.decode(document.value), document.version
        except DECODING_ERRORS as exc:
            raise StoreError(f"cannot read document {self._key!r} ({exc}): another program has changed it") from exc
