"""Runs in a PostgreSQL database, shared by all workers of a fleet.

Each call is one transaction. It is durable when the call returns, unless the server is configured otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, cast

import asyncpg
import msgspec

from shoal.clients import postgres_schema
from shoal.clients.postgres import PostgresAddress, PostgresClient, storable_text
from shoal.frontier.postgres.columns import COMPONENT as COMPONENT
from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.rules import moved, no_run, read_run, readable_runs, run_exists
from shoal.ports import Document, FrontierOptions, Holder, Room, Run, RunState
from shoal.ports.documents import check_document

_LAST = "\U0010ffff".encode()  # sorts after every printable character
_NO_RUN = (None,) * 7
_DELETE_BATCH = 2_000
_encode = msgspec.msgpack.Encoder().encode


class PostgresStore:
    """Runs, their frontiers and documents in one schema of a database. The runs share politeness to hosts."""

    shared: ClassVar[bool] = True

    def __init__(self, database: PostgresClient, offset: Callable[[], float]) -> None:
        self._database = database
        self._offset = offset

    @classmethod
    async def open(cls, url: str, *, offset: Callable[[], float] = lambda: 0.0) -> PostgresStore:
        """Create or upgrade the schema if needed. StoreError if the database cannot be used, StoreAwayError if it
        cannot be reached.

        ``offset``: seconds to add to the server's clock, for tests.
        """
        address = PostgresAddress.parse(url)
        database = PostgresClient(address)
        await database.open(partial(postgres_schema.install, address=address, component=COMPONENT))
        return cls(database, offset)

    async def room(self) -> Room | None:
        """A server does not tell how large its disk is: it is full if it has just refused a call."""
        return Room(0, 0) if self._database.was_full else None

    async def create_run(self, run: Run) -> Run:
        if not await self._database.value("create_run", *_run_values(run)):
            raise run_exists(run.run_id)
        return run

    async def transition(self, run_id: str, state: RunState, *, among: Sequence[RunState] | None = None) -> Run:
        while True:
            number, run = await self._find_existing(run_id)
            changed = moved(run, state, among)
            if await self._database.value("set_state", number, run.state, state, changed.ended_at):
                return changed

    async def get_run(self, run_id: str) -> Run | None:
        numbered = await self._find(run_id)
        return numbered and numbered[1]

    async def run_state(self, run_id: str) -> RunState | None:
        return cast("RunState | None", await self._database.value("run_state", storable_text(run_id)))

    async def run_states(self, spider: str, project: str | None = None) -> dict[str, RunState]:
        rows = await self._database.call("run_states", storable_text(spider), _wanted(project))
        return {row["run_id"]: row["state"] for row in rows}

    async def _find(self, run_id: str) -> tuple[int, Run] | None:
        """The number of the run in the tables, and the run."""
        rows = await self._database.call("find_run", storable_text(run_id))
        return (rows[0][0], _run_of(rows[0])) if rows else None

    async def _find_existing(self, run_id: str) -> tuple[int, Run]:
        """The same. RunError if there is no such run."""
        if (numbered := await self._find(run_id)) is None:
            raise no_run(run_id)
        return numbered

    async def list_runs(
        self,
        spider: str | None = None,
        project: str | None = None,
        *,
        states: Sequence[RunState] | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        rows = await self._database.call("runs", _wanted(spider), _wanted(project), states, limit)
        return readable_runs(rows, _run_of)

    async def delete_run(self, run_id: str) -> None:
        """Delete a run in short steps. If it is interrupted, the run is hidden; delete it again to remove the rest."""
        number = await self._database.value("begin_delete", storable_text(run_id), patient=True)
        if number is None:
            raise no_run(run_id)
        fingerprint: bytes | None = b""
        while fingerprint is not None:
            fingerprint = await self._database.value(
                "delete_requests", number, self._offset(), fingerprint, _DELETE_BATCH
            )
        item: int | None = 0
        while item is not None:
            item = await self._database.value("delete_items", number, item, _DELETE_BATCH)
        while await self._database.value("delete_lanes", number, _DELETE_BATCH):
            pass
        await self._database.call("end_delete", number)

    async def get_document(self, key: str) -> Document | None:
        documents = await self._documents(key.encode(), b"", key.encode() + b"\0", 1)
        return documents[0] if documents else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        return await self._documents(prefix.encode(), after.encode(), prefix.encode() + _LAST, limit)

    async def _documents(self, first: bytes, after: bytes, before: bytes, limit: int) -> list[Document]:
        rows = await self._database.call("documents", first, after, before, limit)
        return [Document(row["key"].decode(), row["value"], row["version"]) for row in rows]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        check_document(key, value, version)
        created = _NO_RUN if run is None else _run_values(run)
        return bool(await self._database.value("put_document", key.encode(), value, replaces, version, *created))

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> PostgresFrontier:
        number, _ = await self._find_existing(run_id)
        frontier = PostgresFrontier(self._database, number, options, self._offset, holder)
        await frontier.join()
        return frontier

    async def close(self) -> None:
        """Close the connections. Leases that were not released expire."""
        await self._database.close()


def _run_values(run: Run) -> tuple[object, ...]:
    """A run as arguments of the functions that create it."""
    return (
        storable_text(run.run_id),
        storable_text(run.spider),
        run.state,
        run.created_at,
        _encode(run.settings),
        storable_text(run.project),
        run.ended_at,
    )


def _wanted(name: str | None) -> str | None:
    return None if name is None else storable_text(name)


def _run_of(row: asyncpg.Record) -> Run:
    return read_run(*row[1:])
