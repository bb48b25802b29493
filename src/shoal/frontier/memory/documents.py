"""Documents in this process. See `shoal.ports.Documents`."""

from __future__ import annotations

from shoal.ports import Document, Run
from shoal.ports.documents import check_document


class MemoryDocuments:
    """The documents of a store in memory."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self._documents: dict[str, Document] = {}

    async def get_document(self, key: str) -> Document | None:
        return self._documents.get(key)

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        keys = sorted(key for key in self._documents if key.startswith(prefix) and key > after)
        return [self._documents[key] for key in keys[:limit]]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        check_document(key, value, version)
        found = self._documents.get(key)
        stored = found.version if found else b""
        if stored == version or (value is None and not stored):
            return True
        if stored != replaces:
            return False
        if value is None:
            del self._documents[key]
        else:
            self._documents[key] = Document(key, value, version)
        if run is not None:
            self._runs.setdefault(run.run_id, run)
        return True

    def discard(self, run_id: str) -> None:
        """Delete the documents of a run."""
        for key in [key for key in self._documents if key.startswith(f"run/{run_id}/")]:
            del self._documents[key]
