"""Which servers declare the schedules of their shoal.toml, so that a schedule that none declares is noticed.

Each server writes the names that its file declares into a document of its own, and changes that document while it
lives. Another server whose document stays the same for `SILENT` seconds is gone, by the observer's own clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable

import msgspec
from msgspec import Struct

from shoal import clock
from shoal.errors import DECODING_ERRORS
from shoal.ports import Document, Documents
from shoal.stores.documents import StoredValue

BEAT_EVERY = 10.0
"""Seconds between two changes of a server's document."""
SILENT = 60.0
"""Seconds without a change after which a server is gone. A schedule that nobody declares is orphaned after as long: its
server may be restarting."""
_PAGE = 500


class Declaration(Struct, frozen=True, kw_only=True):
    """What one server declares."""

    source: str
    """The machine and the file."""
    names: tuple[str, ...]
    at: float


_decode = msgspec.msgpack.Decoder(Declaration).decode


class Declarations:
    """The declarations of one server, and what it knows of those of others."""

    def __init__(self, documents: Documents, project: str, now: Callable[[], float] = clock.now) -> None:
        """``now``: a clock that never goes back."""
        self.names: frozenset[str] = frozenset()
        self.source = ""
        self._documents = documents
        self._prefix = f"schedule-server/{project}/"
        self._key = self._prefix + os.urandom(8).hex()
        self._now = now
        self._beat_at = -BEAT_EVERY
        self._changed: dict[str, tuple[bytes, float]] = {}
        """The version of each document of another server, and when it was new."""
        self._undeclared: dict[str, float] = {}
        """Since when nobody declares a schedule."""

    def declare(self, names: Collection[str], source: str) -> None:
        """Declare these schedules from the next ``beat`` on."""
        self.names, self.source, self._beat_at = frozenset(names), source, -BEAT_EVERY

    async def beat(self) -> None:
        """Tell the others that this server lives, if that is due."""
        if self.names and self._now() - self._beat_at >= BEAT_EVERY:
            declaration = Declaration(source=self.source, names=tuple(sorted(self.names)), at=time.time())
            await self._stored(self._key).change(lambda _: declaration)
            self._beat_at = self._now()

    async def leave(self) -> None:
        """Withdraw the declarations: this server stops."""
        await self._stored(self._key).change(lambda _: None)

    async def orphans(self, foreign: Iterable[tuple[str, str]]) -> set[str]:
        """Which of these schedules, names and sources, no server has declared for `SILENT` seconds. A schedule of this
        server's own file is orphaned at once: its lines were removed."""
        declared, now = await self._declared_by_others(), self._now()
        sources = {name: source for name, source in foreign if name not in declared}
        self._undeclared = {name: self._undeclared.get(name, now) for name in sources}
        return {
            name
            for name, source in sources.items()
            if now - self._undeclared[name] >= SILENT or (source and source == self.source)
        }

    async def _declared_by_others(self) -> set[str]:
        found = [each for each in await self._read_all() if each.key != self._key]
        now, known = self._now(), self._changed
        self._changed = {
            each.key: known[each.key] if known.get(each.key, (b"",))[0] == each.version else (each.version, now)
            for each in found
        }
        names: set[str] = set()
        for document in found:
            if now - self._changed[document.key][1] < SILENT:
                names.update(_names(document))
            else:
                await self._stored(document.key).change(lambda _: None)  # if it lives after all, it writes it again
        return names

    async def _read_all(self) -> list[Document]:
        found: list[Document] = []
        while page := await self._documents.list_documents(
            self._prefix, after=found[-1].key if found else "", limit=_PAGE
        ):
            found += page
            if len(page) < _PAGE:
                break
        return found

    def _stored(self, key: str) -> StoredValue[Declaration]:
        return StoredValue(self._documents, key, Declaration)


def _names(document: Document) -> tuple[str, ...]:
    try:
        return _decode(document.value).names
    except DECODING_ERRORS:  # of another version
        return ()
