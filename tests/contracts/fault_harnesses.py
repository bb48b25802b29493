"""Redis and PostgreSQL servers that the tests may harm."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import ClassVar

from redis.asyncio import Redis

from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Store
from shoal.testing.server_faults import ServerFaultHarness
from tests.contracts.postgres_steps import ask, check_tables
from tests.support.databases import DatabaseServer

_numbers = count(1)


class _Faults(ServerFaultHarness):
    """A new store on a server that several tests use, one after the other."""

    parameter: ClassVar[str]
    """The URL parameter that separates stores."""

    def __init__(self, server: DatabaseServer) -> None:
        super().__init__()
        self._server = server
        self._name = f"faults_{next(_numbers)}"

    async def open_store(self, timeout: float | None = None) -> Store:
        more = "" if timeout is None else f"&timeout={timeout}"
        return await open_store(f"{self._server.url}?{self.parameter}={self._name}{more}")

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._server.start()

    def frozen(self) -> AbstractContextManager[None]:
        return self._server.frozen()


class RedisFaults(_Faults):
    """Separates stores by prefixes."""

    parameter = "prefix"

    async def mark_as_newer(self) -> None:
        await self._set(f"{{{self._name}}}:store", b"format", b"99")

    async def damage(self, request: Request) -> None:
        await self._set(f"{{{self._name}}}:run:1:req", request.fingerprint(), b"\xc1 is not a record", keep=61)

    async def _set(self, key: str, field: bytes, value: bytes, keep: int = 0) -> None:
        client: Redis = Redis(port=self._server.port, protocol=2)
        old: bytes = await client.hget(key, field) or b""  # type: ignore[misc, arg-type, assignment]
        await client.hset(key, field, old[:keep] + value)  # type: ignore[misc, arg-type]
        await client.aclose()
        await client.connection_pool.disconnect()


class PostgresFaults(_Faults):
    """Separates stores by schemas."""

    parameter = "schema"

    async def mark_as_newer(self) -> None:
        await ask(
            self._server.url,
            f"INSERT INTO {self._name}.migration (component, number, name) VALUES ('frontier', 9999, 'later')",
        )

    async def damage(self, request: Request) -> None:
        sql = f"UPDATE {self._name}.request SET payload = '\\xc1' WHERE fingerprint = $1"
        await ask(self._server.url, sql, request.fingerprint())

    async def check_store(self) -> None:
        await check_tables(f"{self._server.url}?schema={self._name}")
