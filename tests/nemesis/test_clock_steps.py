"""The clock of the server steps by an hour, forward and back, during a crawl."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

import pytest

from tests.nemesis.clocks import KINDS
from tests.nemesis.fleet import Fleet
from tests.nemesis.rounds import look, wait_for_progress, wait_for_run
from tests.nemesis.site import Plan, site

PLAN = Plan(pages=400, starts=1000, slow_hosts=4, slow_pages=10, crawl_delay=0.6)
HOUR = 3600

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_an_hour_both_ways(kind: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    dice = random.Random(seed)
    steps = {dice.uniform(0.1, 0.3): HOUR, dice.uniform(0.4, 0.6): 0, dice.uniform(0.7, 0.9): -HOUR}
    server = KINDS[kind]()
    place = "prefix" if kind == "redis" else "schema"
    try:
        frontier = f"{server.url}?{place}=nemesis"
        with site(tmp_path, PLAN) as target, Fleet(tmp_path, frontier, target, workers=2) as fleet:
            fleet.start()
            wait_for_run(frontier, fleet.run_id)
            fleet.work()
            ahead: list[tuple[float, float]] = []
            for moment, offset in steps.items():
                assert wait_for_progress(target, fleet, moment)
                server.step(offset)
                if offset == HOUR:  # every delay and every lease has ended at once
                    ahead.append((time.monotonic() - 0.1, time.monotonic() + PLAN.crawl_delay + 2))
            ended = fleet.wait(120)
            problems = look(target, fleet, unjudged=ahead)
    finally:
        server.close()
    if not ended:
        problems.append("the run did not end")
    assert not problems, f"seed {seed}:\n" + "\n".join(problems)
