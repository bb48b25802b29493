"""Something is deleted from the store of a run: workers say so, `shoal audit` says what, and `--repair` restores it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
import redis

from tests.acceptance.fleets import Fleet, InProcessFleet, frontier_url, site
from tests.acceptance.serving import until

PAGES = 30


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with site(PAGES) as found:
        yield found


def delete(frontier: str) -> None:
    """Delete where the store looks for hosts that are due."""
    server, _, name = frontier.partition("?")
    if server.startswith("redis"):
        assert redis.from_url(server).delete(f"{{{name.removeprefix('prefix=')}}}:run:1:open") == 1
        return

    async def delete_rows() -> str:
        link = await asyncpg.connect(server)
        try:
            return await link.execute(f"DELETE FROM {name.removeprefix('schema=')}.lane")
        finally:
            await link.close()

    assert asyncio.run(delete_rows()) == "DELETE 1"


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_requests_that_no_worker_can_get_are_reported_and_restored(kind: str, tmp_path: Path, url: str) -> None:
    with InProcessFleet(tmp_path, frontier_url(kind)) as fleet:
        fleet.start(*(f"{url}/p/{number}" for number in range(1, 6)))
        delete(fleet.frontier)
        worker = fleet.worker()
        _check_report(fleet, "`shoal audit " if kind == "redis" else "")
        assert worker.poll() is None
        repaired = fleet.shoal("audit", fleet.run_id, "--repair").stdout
        assert "balanced" in repaired
        assert "faults" not in repaired
        fleet.wait()
        assert fleet.stats()["left"] == 0
        assert "balanced: nothing lost" in fleet.shoal("audit", fleet.run_id).stdout


def _check_report(fleet: Fleet, logged: str) -> None:
    """``logged``: what the worker says. It takes a quarter of a minute."""
    log = fleet.folder / "worker-0.log"
    until(lambda: logged in log.read_text(), what="the warning of the worker", timeout=40, pause=0.5)
    audit = fleet.shoal("audit", fleet.run_id, check=False)
    assert audit.returncode == 1
    said = "the queue of a host is not scheduled" if logged else "5 ready requests are in no queue"
    assert said in audit.stdout
    assert f"`shoal audit {fleet.run_id} --repair --frontier" in audit.stdout
    assert "NOT BALANCED" in audit.stdout
