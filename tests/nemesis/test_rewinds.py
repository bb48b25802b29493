"""The store goes back in time while a fleet works on it: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.nemesis.rounds import play
from tests.nemesis.servers import KINDS
from tests.nemesis.site import Plan

pytestmark = pytest.mark.timeout(240)

PLAN = Plan(pages=600, starts=1400)


@pytest.mark.parametrize(("kind", "rewinds"), [("redis", 2), ("sentinel", 1), ("postgres", 2)])
def test_the_store_goes_back(kind: str, rewinds: int, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    server = KINDS[kind]()
    try:
        verdict = play(server, tmp_path, seed, rewinds=rewinds, plan=PLAN)
    finally:
        server.close()
    print(verdict)
    assert not verdict.problems, str(verdict)
