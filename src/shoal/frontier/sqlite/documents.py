"""Documents in a SQLite file. See `shoal.ports.Documents`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.frontier.sqlite.file import SQLiteFile
from shoal.ports import Document, Run
from shoal.ports.documents import check_document

_LAST = "\U0010ffff"  # sorts after every printable character


class SQLiteDocuments:
    """The documents of a file. ``add_run``: creates a run, unless there is one of that name."""

    def __init__(self, file: SQLiteFile, add_run: Callable[[Run], object]) -> None:
        self._file = file
        self._add_run = add_run

    async def get_document(self, key: str) -> Document | None:
        found = await self._read("key = ?", (key,), 1)
        return found[0] if found else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        return await self._read("key >= ? AND key < ? AND key > ?", (prefix, prefix + _LAST, after), limit)

    async def _read(self, condition: str, values: tuple[str, ...], limit: int) -> list[Document]:
        query = f"SELECT key, value, version FROM document WHERE {condition} ORDER BY key LIMIT ?"

        def read() -> list[Document]:
            return [Document(*row) for row in self._file.db.execute(query, (*values, limit))]

        return await self._file.read(read)

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        check_document(key, value, version)
        db = self._file.db

        def put() -> bool:
            row = db.execute("SELECT version FROM document WHERE key = ?", (key,)).fetchone()
            stored = row[0] if row else b""
            if stored == version or (value is None and not stored):
                return True
            if stored != replaces:
                return False
            if value is None:
                db.execute("DELETE FROM document WHERE key = ?", (key,))
                db.execute("DELETE FROM inventory WHERE run = 0 AND kind = 'document' AND name = ?", (key,))
            elif stored:
                db.execute("UPDATE document SET version = ?, value = ? WHERE key = ?", (version, value, key))
            else:
                db.execute("INSERT INTO document VALUES (?, ?, ?)", (key, version, value))
            if run is not None:
                self._add_run(run)
            return True

        return await self._file.write(put)

    def discard(self, run_id: str) -> None:
        """Delete the documents of a run, within a transaction."""
        own = f"run/{run_id}/", f"run/{run_id}/{_LAST}"
        self._file.db.execute("DELETE FROM document WHERE key >= ? AND key < ?", own)
        listed = "run = 0 AND kind = 'document' AND name >= ? AND name < ?"
        self._file.db.execute(f"DELETE FROM inventory WHERE {listed}", own)
