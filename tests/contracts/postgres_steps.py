"""Helpers for the tests of the PostgreSQL frontier."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from shoal.clients import postgres_schema
from shoal.clients.postgres import PostgresAddress
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.postgres.store import COMPONENT
from shoal.http import Request
from shoal.ports import Frontier, FrontierOptions, Lease, Run

WIDE = FrontierOptions(concurrency_per_host=10_000)


def schema_for(request: pytest.FixtureRequest) -> str:
    """The name of a schema that only this test uses."""
    return "t_" + re.sub(r"\W", "_", request.node.name.lower())[-50:].strip("_")


@asynccontextmanager
async def opened(url: str, run_id: str = "run", options: FrontierOptions = WIDE) -> AsyncIterator[PostgresFrontier]:
    """A frontier with its own connections. The first call creates the run."""
    store = await PostgresStore.open(url)
    try:
        if await store.get_run(run_id) is None:
            await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=0.0))
        yield await store.frontier(run_id, options)
    finally:
        await store.close()


async def ask(url: str, statement: str, *arguments: Any) -> Any:
    """Run a statement on the server directly, without the store."""
    link = await asyncpg.connect(url.partition("?")[0])
    try:
        return await link.fetchval(statement, *arguments)
    finally:
        await link.close()


def pages(*numbers: int, host: str = "a.example") -> list[Request]:
    return [Request(f"http://{host}/{number}") for number in numbers]


async def lease_one(frontier: Frontier) -> Lease:
    (lease,) = (await frontier.lease(1, 600)).leases
    return lease


def schema_of(url: str) -> str:
    return PostgresAddress.parse(url).schema


_DISAGREEMENTS = """
SELECT 'lane', count(*) FROM {0}.lane l CROSS JOIN LATERAL (
    SELECT count(*) AS n, (array_agg(id ORDER BY rank, id))[1] AS best FROM {0}.ready WHERE lane = l.id) r
    WHERE l.ready <> r.n OR l.best_id IS DISTINCT FROM r.best OR (l.place = 0) <> (r.n = 0)
        OR (l.place >= 2) <> (l.due IS NOT NULL)
UNION ALL SELECT 'in flight', count(*) FROM {0}.host h
    WHERE h.in_flight <> (SELECT count(*) FROM {0}.held WHERE host = h.id AND state = 2)
UNION ALL SELECT 'full, with room', count(*) FROM {1}.politeness WHERE place = 3 AND room > 0
UNION ALL SELECT 'waits too long', count(*) FROM {1}.politeness WHERE place = 2 AND room > 0 AND due > due_at + 0.001
"""


async def check_tables(url: str) -> None:
    """Check that the tables of the store at this URL are consistent."""
    link = await asyncpg.connect(url.partition("?")[0])
    functions = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    for what, count in await link.fetch(_DISAGREEMENTS.format(schema_of(url), functions)):
        assert count == 0, what
    await link.close()
