"""The store is rewound while a fleet uses it. Nothing is lost or repeated."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from shoal.errors import StoreAwayError, StoreRewoundError
from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Completion, Frontier, FrontierOptions, Lease, Run
from tests.nemesis.rounds import play
from tests.nemesis.servers import KINDS, AofRedis, BackupPostgres
from tests.nemesis.site import Plan

pytestmark = pytest.mark.timeout(240)

PLAN = Plan(pages=600, starts=1400)


@pytest.mark.parametrize(("kind", "rewinds"), [("redis", 2), ("sentinel", 1), ("postgres", 2)])
def test_the_store_goes_back(kind: str, rewinds: int, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    server = KINDS[kind]()
    try:
        verdict = play(server, tmp_path, seed, rewinds=rewinds, plan=PLAN, to_creation=kind == "redis")
    finally:
        server.close()
    print(verdict)
    assert not verdict.problems, str(verdict)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_a_client_that_lost_nothing_keeps_the_delay_too(kind: str) -> None:
    """What it knows of the store is still true, but a host was asked in the lost time, by another client."""
    server = AofRedis() if kind == "redis" else BackupPostgres()
    stores = [await open_store(server.url) for _ in range(2)]
    try:
        await stores[0].create_run(Run(run_id="run", spider="nemesis", state="running", created_at=0.0))
        mine, other = [await store.frontier("run", FrontierOptions(delay=60.0)) for store in stores]
        await mine.push([Request("http://first.example/")])
        (lease,) = (await mine.lease(5, 300)).leases
        await mine.complete([Completion(lease=lease)])
        await mine.push([Request("http://second.example/1"), Request("http://second.example/2")])
        server.mark()
        (lease,) = (await other.lease(5, 300)).leases
        await other.complete([Completion(lease=lease)])
        assert not (await mine.lease(5, 300)).leases
        server.back_to_mark()
        assert not await leases_of(mine), "second.example was asked a moment ago; its delay is 60 s"
    finally:
        for store in stores:
            await store.close()
        server.close()


async def leases_of(frontier: Frontier) -> list[Lease]:
    """What it gets once the server is back. A client that noticed the rewind gets it after it has recovered."""
    while True:
        try:
            return (await frontier.lease(5, 300)).leases
        except StoreAwayError:
            await asyncio.sleep(0.05)
        except StoreRewoundError:
            await frontier.recover()
