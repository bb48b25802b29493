"""Documents on a Redis server. See `shoal.ports.Documents`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from shoal.ports import Document, Run
from shoal.ports.documents import check_document
from shoal.stores.redis.client import Answer, Word

_LAST = "\U0010ffff".encode()  # sorts after every printable character


class RedisDocuments:
    """The documents of a store. ``run_step``: runs a script. ``run_words``: a run as arguments of ``create_run``."""

    def __init__(
        self, run_step: Callable[..., Awaitable[Answer]], run_words: Callable[[Run], tuple[Word, ...]]
    ) -> None:
        self._run_step = run_step
        self._run_words = run_words

    async def get_document(self, key: str) -> Document | None:
        record = await self._run_step("value", "HGET", "document", key.encode())
        return _document(key.encode(), record) if record else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        first = b"(" + after.encode() if after >= prefix else b"[" + prefix.encode()
        rows = await self._run_step("documents", first, b"(" + prefix.encode() + _LAST, limit)
        return [_document(*row) for row in zip(rows[::2], rows[1::2], strict=True)]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        created = () if run is None else self._run_words(run)
        return bool(await self._run_step("document", *document_words(key, value, replaces, version), *created))

    async def discard(self, run_id: str) -> None:
        """Delete the documents of a run."""
        while found := await self.list_documents(f"run/{run_id}/"):
            for each in found:
                await self.put_document(each.key, None, replaces=each.version, version=bytes(8))


def document_words(key: str, value: bytes | None, replaces: bytes, version: bytes) -> tuple[bytes, ...]:
    """A document as arguments of ``put_document``. StoreError if it is too large."""
    check_document(key, value, version)
    return key.encode(), replaces, version, b"0" if value is None else b"1", value or b""


def _document(key: bytes, record: bytes) -> Document:
    end = 1 + record[0]
    return Document(key.decode(), record[end:], record[1:end])
