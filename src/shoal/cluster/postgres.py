"""The coordinator of a cluster in a PostgreSQL database, beside the frontier or anywhere else.

Each call is one function in the database (``shoal/frontier/postgres/functions/11_cluster.sql``): one round trip, one
transaction, by the clock of the server. One connection serves calls and news, so that many members fit on a server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import asyncpg
import msgspec

from shoal.cluster import call_timeout
from shoal.errors import (
    CoordinatorAwayError,
    CoordinatorError,
    FrontierError,
    NameTakenError,
    SessionLostError,
    StoreAwayError,
)
from shoal.frontier.postgres import schema
from shoal.frontier.postgres.address import Address
from shoal.frontier.postgres.columns import storable
from shoal.frontier.postgres.connection import Connection, Database
from shoal.ports import ClusterEvent, ClusterView, Counts, Member, Slot

_GRACE = 1.0
"""Seconds that closing waits for calls that hang."""


class PostgresCoordinator:
    """See `shoal.ports.Coordinator`."""

    def __init__(self, address: Address, cluster: str, ttl: float) -> None:
        self.ttl = ttl
        self._cluster = storable(cluster)
        self._name = ""
        self._client = secrets.randbits(63)
        self._session = 0
        """How often it has tried to join: what comes late from an earlier session is not taken for this one's."""
        self._epoch = 0
        """Of the slot that it last knew to be its own."""
        self._channel = "shoal_" + sha256(f"{address.schema}.{self._cluster}".encode()).hexdigest()[:40]
        self._news = asyncio.Event()
        self._database = Database(address, connections=1, greet=self._listen)

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> PostgresCoordinator:
        """CoordinatorError if the database can't be used, CoordinatorAwayError if it can't be reached."""
        with _errors():
            address = Address.of(url)
            address = msgspec.structs.replace(address, timeout=min(address.timeout, call_timeout(ttl)))
            made = cls(address, cluster, ttl)
            await made._database.open(partial(schema.prepare, address=address))
        return made

    async def _call(self, function: str, *arguments: Any) -> list[asyncpg.Record]:
        with _errors():
            return await self._database.call(f"cluster_{function}", self._cluster, *arguments)

    async def _call_as_member(self, function: str, *arguments: Any) -> list[asyncpg.Record]:
        return await self._call(function, self._name, self._client, self._session, *arguments)

    # -- members

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        self._name = storable(name)
        self._session += 1
        rows = await self._call_as_member(
            "join", self.ttl, counts.runner, counts.backup, again, storable(where), self._channel
        )
        if not rows[0][0]:
            raise NameTakenError(f"a member named {name} lives in the cluster {self._cluster}; choose another name")

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        rows = await self._call_as_member("beat", self.ttl, storable(doing), fit)
        if not rows:
            raise self._lost()
        view = _view(rows[0])
        self._epoch = next((slot.epoch for slot in view.slots if slot.holder == self._name), self._epoch)
        return view

    async def leave(self) -> None:
        await self._call_as_member("leave")

    def _lost(self) -> SessionLostError:
        return SessionLostError(f"{self._name or 'this'} is no member of the cluster {self._cluster} any more")

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

    # -- looking at it

    async def look(self) -> ClusterView:
        rows = await self._call("look")
        if not rows:
            raise self._unknown()
        return _view(rows[0])

    def _unknown(self) -> CoordinatorError:
        return CoordinatorError(f"{self._database.address.place} knows no cluster {self._cluster}")

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        rows = await self._call("events", limit)
        return [ClusterEvent(**dict(row)) for row in reversed(rows)]

    # -- waiting

    async def _listen(self, link: Connection) -> None:
        await link.add_listener(self._channel, self._hear)

    def _hear(self, *_: object) -> None:
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """What happened since the last time counts. Without a connection it only takes its time: the next call makes
        one, and sees what happened meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    async def close(self) -> None:
        """A member that has not left is lost when its time is over."""
        self._news.set()
        await self._database.close(_GRACE)


@contextmanager
def _errors() -> Iterator[None]:
    """Those of a database as those of a coordinator."""
    try:
        yield
    except StoreAwayError as exc:
        raise CoordinatorAwayError(str(exc)) from exc
    except FrontierError as exc:
        raise CoordinatorError(str(exc)) from exc


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
