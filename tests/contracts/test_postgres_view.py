"""The view `url_work_queue`: the requests of all runs, for SQL tools."""

from __future__ import annotations

import asyncpg
import pytest

from shoal.frontier.postgres import PostgresStore
from shoal.http import Request
from shoal.ports import Completion, Failure, FrontierOptions, Holder, Run
from tests.acceptance.fleets import frontier_url
from tests.support.databases import PostgresServer, shared

LONG = "http://a.example/" + "x" * 200
VERY_LONG = "http://a.example/" + "x" * 1000


async def test_the_view_shows_every_request_and_who_claimed_it() -> None:
    url = frontier_url("postgresql")
    schema = url.rpartition("schema=")[2]
    store = await PostgresStore.open(url)
    link = await asyncpg.connect(shared(PostgresServer).url)
    try:
        for run_id in ("one", "other"):
            await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=0.0))
        other = await store.frontier("other", FrontierOptions())
        await other.push([Request("http://b.example/")])
        frontier = await store.frontier("one", FrontierOptions(max_attempts=2), Holder("worker-1", 1))
        pages = [Request(f"http://a.example/{number}", priority=9 - number, meta={"a": 1}) for number in range(5)]
        await frontier.push([*pages, Request(LONG, priority=-1), Request(VERY_LONG, priority=-2)])
        done, dead, retried, claimed = (await frontier.lease(4, 60)).leases
        await frontier.complete([Completion(lease=done)])
        await frontier.fail([
            Failure(lease=dead, kind="http 404", reason="gone"),
            Failure(lease=retried, kind="http 500", reason="broken", retry_in=0.0),
        ])  # fmt: skip
        second = await store.frontier("one", FrontierOptions(max_attempts=2), Holder("worker-2", 1))
        (again,) = (await second.lease(1, 60)).leases
        assert again.request.url == retried.request.url
        query = f'SELECT url, status, worker_id, retry_count FROM "{schema}".url_work_queue WHERE run_id = $1'
        rows = {row[0]: tuple(row)[1:] for row in await link.fetch(query, "one")}
        assert rows == {
            done.request.url: ("completed", "worker-1", 0),
            dead.request.url: ("failed", "worker-1", 0),
            retried.request.url: ("claimed", "worker-2", 1),
            claimed.request.url: ("claimed", "worker-1", 0),
            "http://a.example/4": ("pending", None, 0),
            LONG: ("pending", None, 0),
            VERY_LONG: ("pending", None, 0),
        }
        ages = await link.fetch(
            f'SELECT status, extract(epoch FROM now() - claimed_at) FROM "{schema}".url_work_queue'
            " WHERE claimed_at IS NOT NULL ORDER BY status"
        )
        assert [status for status, _ in ages] == ["claimed", "claimed", "completed", "failed"]
        assert all(-1 < age < 60 for _, age in ages)
        assert [row[0] for row in await link.fetch(query, "other")] == ["http://b.example/"]
        with pytest.raises(asyncpg.PostgresError, match="cannot"):
            await link.execute(f'DELETE FROM "{schema}".url_work_queue')
    finally:
        await link.close()
        await store.close()
