"""Small documents that a store keeps beside its runs: schedules, the history of a run, the log of user actions."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from shoal.errors import StoreError
from shoal.ports.runs import Run

MAX_DOCUMENT = 1 << 20
"""Bytes in the value of a document."""
MAX_DOCUMENT_KEY = 500


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


def check_document(key: str, value: bytes | None, version: bytes) -> None:
    """StoreError if a document is too large to be stored."""
    if not 0 < len(key) <= MAX_DOCUMENT_KEY or not key.isprintable():
        raise StoreError(f"the key of a document has 1 to {MAX_DOCUMENT_KEY} printable characters: {key!r:.100}")
    if value is not None and len(value) > MAX_DOCUMENT:
        raise StoreError(f"document {key!r} has {len(value)} bytes; the limit is {MAX_DOCUMENT}")
    if not 8 <= len(version) <= 32:
        raise StoreError(f"the version of a document has 8 to 32 bytes, not {len(version)}")
