"""The coordinator of a cluster in a PostgreSQL database, beside the frontier or in another place.

Each call is one function in the database (``functions/cluster.sql``): one round trip, one transaction, and the
server's clock. One connection serves calls and notifications, so that many members fit on a server.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from hashlib import sha256

import asyncpg
import msgspec

from shoal.clients import postgres_schema
from shoal.clients.postgres import Connection, PostgresAddress, PostgresClient, storable_text
from shoal.errors import CoordinatorError, SessionLostError
from shoal.ports import ClusterEvent, ClusterView, Counts, Member, Slot
from shoal.runs.cluster import call_timeout, coordinator_errors, membership_lost, name_taken, unknown_cluster
from shoal.system import chance

COMPONENT = postgres_schema.Component("cluster", "shoal.runs.cluster")
_CLOSE_TIMEOUT = 1.0
"""Seconds that ``close`` waits for calls in progress."""


class PostgresCoordinator:
    """See `shoal.ports.Coordinator`."""

    def __init__(self, address: PostgresAddress, cluster: str, ttl: float) -> None:
        self.ttl = ttl
        self._cluster = storable_text(cluster)
        self._name = ""
        self._client = chance.randbits(63)
        self._session = 0
        """How often it tried to join. The server ignores a late call from an earlier session."""
        self._epoch = 0
        """The epoch of the last slot that this member knows it held."""
        self._channel = "shoal_" + sha256(f"{address.schema}.{self._cluster}".encode()).hexdigest()[:40]
        self._changed = asyncio.Event()
        self._database = PostgresClient(address, connections=1, on_connect=self._listen)

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> PostgresCoordinator:
        """Connect. CoordinatorError if the database cannot be used, CoordinatorAwayError if it cannot be reached."""
        with coordinator_errors():
            address = PostgresAddress.parse(url)
            address = msgspec.structs.replace(address, timeout=min(address.timeout, call_timeout(ttl)))
            coordinator = cls(address, cluster, ttl)
            await coordinator._database.open(partial(postgres_schema.install, address=address, component=COMPONENT))
        return coordinator

    async def _call(self, function: str, *arguments: object) -> list[asyncpg.Record]:
        with coordinator_errors():
            return await self._database.call(f"cluster_{function}", self._cluster, *arguments)

    async def _call_as_member(self, function: str, *arguments: object) -> list[asyncpg.Record]:
        return await self._call(function, self._name, self._client, self._session, *arguments)

    # -- members

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        self._name = storable_text(name)
        self._session += 1
        rows = await self._call_as_member(
            "join", self.ttl, counts.runner, counts.backup, again, storable_text(where), self._channel
        )
        if not rows[0][0]:
            raise name_taken(self._cluster, name)

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        rows = await self._call_as_member("beat", self.ttl, storable_text(doing), fit)
        if not rows:
            raise self._lost()
        view = _view(rows[0])
        self._epoch = next((slot.epoch for slot in view.slots if slot.holder == self._name), self._epoch)
        return view

    async def leave(self) -> None:
        await self._call_as_member("leave")

    def _lost(self) -> SessionLostError:
        return membership_lost(self._cluster, self._name, self.ttl)

    # -- slots

    async def take(self, index: int) -> int | None:
        rows = await self._call_as_member("take", index)
        if not rows:
            raise self._lost()
        epoch: int | None = rows[0][0]
        self._epoch = epoch or self._epoch
        return epoch

    async def retire(self) -> None:
        await self._call_as_member("retire", self._epoch)

    async def scale(self, counts: Counts) -> None:
        rows = await self._call("scale", counts.runner, counts.backup)
        if not rows[0][0]:
            raise self._unknown()

    # -- inspection

    async def observe(self) -> ClusterView:
        rows = await self._call("observe")
        if not rows:
            raise self._unknown()
        return _view(rows[0])

    def _unknown(self) -> CoordinatorError:
        return unknown_cluster(self._database.address.place, self._cluster)

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        rows = await self._call("events", limit)
        return [ClusterEvent(**dict(row)) for row in reversed(rows)]

    # -- waiting

    async def _listen(self, link: Connection) -> None:
        await link.add_listener(self._channel, self._on_notification)

    def _on_notification(self, *_: object) -> None:
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Wait for a change since the last ``wait``. Without a connection it only waits: the next call connects, and
        sees what changed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        """Disconnect. A member that has not left is lost when its session ends."""
        self._changed.set()
        await self._database.close(_CLOSE_TIMEOUT)


def _view(row: asyncpg.Record) -> ClusterView:
    runner, backup, *columns = row
    names, ages, fit, doing, places, indexes, holders, epochs = (column or () for column in columns)
    return ClusterView(
        counts=Counts(runner, backup),
        members=tuple(
            Member(name=name, age=age, fit=well, doing=busy, where=place)
            for name, age, well, busy, place in zip(names, ages, fit, doing, places, strict=True)
        ),
        slots=tuple(map(Slot, indexes, holders, epochs)),
    )
