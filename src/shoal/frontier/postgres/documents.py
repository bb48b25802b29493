"""Documents in a PostgreSQL database. See `shoal.ports.Documents`."""

from __future__ import annotations

import msgspec

from shoal.ports import Document, Run
from shoal.ports.documents import check_document
from shoal.stores.postgres.client import PostgresClient, storable_text

_LAST = "\U0010ffff".encode()  # sorts after every printable character
_NO_RUN = (None,) * 7
_encode = msgspec.msgpack.Encoder().encode


class PostgresDocuments:
    """The documents of a schema."""

    def __init__(self, database: PostgresClient) -> None:
        self._database = database

    async def get_document(self, key: str) -> Document | None:
        found = await self._read(key.encode(), b"", key.encode() + b"\0", 1)
        return found[0] if found else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        return await self._read(prefix.encode(), after.encode(), prefix.encode() + _LAST, limit)

    async def _read(self, first: bytes, after: bytes, before: bytes, limit: int) -> list[Document]:
        rows = await self._database.call("documents", first, after, before, limit)
        return [Document(row["key"].decode(), row["value"], row["version"]) for row in rows]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        check_document(key, value, version)
        created = _NO_RUN if run is None else run_values(run)
        return bool(await self._database.value("put_document", key.encode(), value, replaces, version, *created))


def run_values(run: Run) -> tuple[object, ...]:
    """A run as arguments of the functions that create it."""
    return (
        storable_text(run.run_id), storable_text(run.spider), run.state, run.created_at, _encode(run.settings),
        storable_text(run.project), run.ended_at,
    )  # fmt: skip
