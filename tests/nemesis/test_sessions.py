"""The store is rewound while a fleet is logged in: cookies are as old as the store, and the rule repairs that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.fleets import Fleet
from tests.acceptance.test_sessions import ENV, SPIDER, titles_in, titles_of, until
from tests.nemesis.servers import AofRedis, BackupPostgres
from tests.support.login_site import LoginSite

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_cookies_are_as_old_as_the_store(kind: str, tmp_path: Path) -> None:
    server = AofRedis() if kind == "redis" else BackupPostgres()
    try:
        with LoginSite(150, lasts=25, latency=0.02) as site, Fleet(tmp_path, server.url, SPIDER) as fleet:
            fleet.start(f"{site.url}/account/0", arguments=("-a", f"site={site.url}"))
            for _ in range(3):
                fleet.worker("-o", "out.jsonl", env=ENV, settings={"lease.ttl": 5})
            until(lambda: site.served.total() > 30)
            server.mark()
            logins = len(site.logins)
            until(lambda: len(site.logins) > logins + 1)  # the cookies of the mark are useless now
            server.back_to_mark()
            fleet.wait(120)
            assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
    finally:
        server.close()
