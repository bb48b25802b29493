"""Runs in a PostgreSQL database: many workers on many machines, nothing lost with any of them.

Each call is one transaction that is on the disk when it returns, as far as the server is set to do so. What is in the
database is made by `shoal.frontier.postgres.schema`; how it is asked, is in `shoal.frontier.postgres.connection`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import asyncpg
import msgspec

from shoal.errors import RunError
from shoal.frontier.postgres import schema
from shoal.frontier.postgres.address import Address
from shoal.frontier.postgres.columns import storable
from shoal.frontier.postgres.connection import Database
from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.rules import check_transition
from shoal.ports import FrontierOptions, Holder, Run, RunState

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_DELETED_AT_ONCE = 2_000


class PostgresStore:
    """Runs and their frontiers in one schema of a database, with the politeness that they share."""

    shared: ClassVar[bool] = True

    def __init__(self, database: Database, offset: Callable[[], float]) -> None:
        self._database = database
        self._offset = offset

    @classmethod
    async def open(cls, url: str, *, offset: Callable[[], float] = lambda: 0.0) -> PostgresStore:
        """StoreError if it can't be used, StoreAwayError if it can't be reached. The schema is made if there is none.

        ``offset`` is added to the server's clock, for tests.
        """
        address = Address.of(url)
        database = Database(address)
        await database.open(partial(schema.prepare, address=address))
        return cls(database, offset)

    async def create_run(self, run: Run) -> Run:
        made = await self._database.value(
            "create_run", storable(run.run_id), storable(run.spider), run.state, run.created_at, _encode(run.settings)
        )
        if not made:
            raise RunError(f"there is a run {run.run_id} already")
        return run

    async def transition(self, run_id: str, state: RunState) -> Run:
        while True:
            found = await self._find(run_id)
            check_transition(run_id, found and found[1], state)
            assert found is not None
            number, run = found
            if await self._database.value("set_state", number, run.state, state):
                return msgspec.structs.replace(run, state=state)

    async def get_run(self, run_id: str) -> Run | None:
        found = await self._find(run_id)
        return found and found[1]

    async def run_state(self, run_id: str) -> RunState | None:
        return cast("RunState | None", await self._database.value("run_state", storable(run_id)))

    async def run_states(self, spider: str) -> dict[str, RunState]:
        rows = await self._database.call("run_states", storable(spider))
        return {row["run_id"]: row["state"] for row in rows}

    async def _find(self, run_id: str) -> tuple[int, Run] | None:
        rows = await self._database.call("get_run", storable(run_id))
        return (rows[0][0], _run_of(rows[0])) if rows else None

    async def list_runs(self, spider: str | None = None) -> list[Run]:
        rows = await self._database.call("list_runs", None if spider is None else storable(spider))
        return [_run_of(row) for row in rows]

    async def delete_run(self, run_id: str) -> None:
        """In short steps. If it is interrupted the run is not seen any more; delete it again to have the rest gone."""
        number = await self._database.value("begin_delete", storable(run_id), patient=True)
        if number is None:
            raise RunError(f"there is no run {run_id}")
        fingerprint: bytes | None = b""
        while fingerprint is not None:
            fingerprint = await self._database.value(
                "delete_requests", number, self._offset(), fingerprint, _DELETED_AT_ONCE
            )
        item: int | None = 0
        while item is not None:
            item = await self._database.value("delete_items", number, item, _DELETED_AT_ONCE)
        while await self._database.value("delete_lanes", number, _DELETED_AT_ONCE):
            pass
        await self._database.call("end_delete", number)

    async def frontier(self, run_id: str, options: FrontierOptions, holder: Holder | None = None) -> PostgresFrontier:
        found = await self._find(run_id)
        if found is None:
            raise RunError(f"there is no run {run_id}")
        return PostgresFrontier(self._database, found[0], options, self._offset, holder)

    async def close(self) -> None:
        """Leases that are still out stay so until they run out."""
        await self._database.close()


def _run_of(row: asyncpg.Record) -> Run:
    _, run_id, spider, state, created_at, settings = row
    return Run(run_id=run_id, spider=spider, state=state, created_at=created_at, settings=_decode(settings))
