"""Responses get lost: the server did the call, but the caller does not know. Nothing is lost or repeated.

A lost response must not cost an attempt. So the run allows one attempt: a page that loses it is missing in the outputs.
"""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from tests.nemesis.fleet import Fleet
from tests.nemesis.proxy import How, Loses, lossy
from tests.nemesis.rounds import look, wait_for_run
from tests.nemesis.site import Plan, site
from tests.nemesis.wire_formats import Call
from tests.support.databases import PostgresServer, RedisServer, shared

pytestmark = pytest.mark.timeout(240)

PLAN = Plan(pages=300, starts=600, slow_hosts=2, slow_pages=4, crawl_delay=0.4)
NEEDED = {
    "redis": {"create", "push", "lease", "settle", "role claim", "role advance", "role relinquish", "items read",
              "fact", "host", "stats", "transition"},
    "postgres": {"create_run", "push", "lease", "finish", "claim", "advance", "relinquish", "read_items", "remember",
                 "recall", "update_host", "stats", "set_state", "find_run"},
}  # fmt: skip


THRICE = {"lease", "settle", "finish", "push", "role claim", "claim", "role advance", "advance"}


def losses(seed: int) -> Loses:
    """The first answer of each kind and a random later one; three in a row where a repeat could take too much."""
    dice = random.Random(seed)
    later: dict[Call, int] = {}

    def loses(call: Call, number: int) -> How | None:
        chosen = later.setdefault(call, dice.randint(4, 9))
        if number == chosen:
            return "silence"
        return "cut" if number <= (3 if call in THRICE else 1) else None

    return loses


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_no_answer_is_needed(kind: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    server = shared(RedisServer if kind == "redis" else PostgresServer)
    with lossy(kind, server.port, losses(seed)) as proxy, site(tmp_path, PLAN) as target:
        place = "prefix" if kind == "redis" else "schema"
        frontier = f"{server.url.replace(str(server.port), str(proxy.port))}?{place}=n{secrets.token_hex(4)}&timeout=1"
        with Fleet(
            tmp_path, frontier, target, workers=2, restarts=12, **{"retry.max_attempts": 1, "lease.ttl": 20}
        ) as fleet:
            fleet.start()
            wait_for_run(frontier, fleet.run_id)
            fleet.work()
            ended = fleet.wait(120)
            print(f"seed {seed}\ncalls {dict(proxy.calls)}\nlost {dict(proxy.lost)}", *fleet.false_starts, sep="\n")
            proxy.loses = lambda call, number: None
            problems = look(target, fleet, once=True)
    if not ended:
        problems.append("the run did not end")
    assert not problems, f"seed {seed}:\n" + "\n".join(problems)
    assert proxy.lost.keys() >= NEEDED[kind]
