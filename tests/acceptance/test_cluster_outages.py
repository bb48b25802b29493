"""Clusters whose coordinator or frontier is unreachable, for all nodes or for one, or whose clocks are wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis

from shoal.ports import Counts
from shoal.runs.cluster.election import roles
from tests.acceptance.clusters import (
    COORDINATORS,
    SESSION,
    Cluster,
    check_items,
    coordinator_url,
    most_crawlers,
    urls,
)
from tests.acceptance.faults import wire, wrong_clock
from tests.acceptance.fleets import frontier_url
from tests.acceptance.target import Target, target
from tests.support.databases import DatabaseServer, PostgresServer, RedisServer, ZookeeperServer
from tests.support.patience import allowance

SERVERS: dict[str, type[DatabaseServer]] = {
    "zookeeper": ZookeeperServer, "redis": RedisServer, "postgresql": PostgresServer,
}  # fmt: skip


@pytest.fixture(params=COORDINATORS)
def server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """A coordinator's server that may be killed."""
    made = SERVERS[request.param]()
    yield made
    made.close()


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def cluster(server: DatabaseServer, tmp_path: Path) -> Iterator[Cluster]:
    """Two Runners and a Backup; the frontier is on a server that nothing happens to."""
    kind = next(kind for kind, each in SERVERS.items() if isinstance(server, each))
    with Cluster(tmp_path, frontier_url("redis"), coordinator_url(kind, server)) as made:
        yield made


def begin(cluster: Cluster, site: Target, count: int) -> list[str]:
    pages = urls(site, count, wait=0.5)
    cluster.start(*pages)
    for number in (1, 2, 3):
        cluster.node(f"crawler_{number}", runner=2, backup=1)
    cluster.until_complete(2, 1)
    site.wait_for(20)
    return pages


def test_a_coordinator_that_is_back_soon(cluster: Cluster, server: DatabaseServer, site: Target) -> None:
    pages = begin(cluster, site, 200)
    server.kill()
    server.start()
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) <= 2


def test_without_a_coordinator_nobody_crawls(cluster: Cluster, server: DatabaseServer, site: Target) -> None:
    """Nobody can know who may: so nobody does, once the sessions are over, until it is back."""
    pages = begin(cluster, site, 240)
    server.kill()
    killed = time.monotonic()
    time.sleep(SESSION)
    before = len(site.visits())
    time.sleep(1.5)
    assert len(site.visits()) == before
    assert max(visit.start for visit in site.visits()) < killed + SESSION
    server.start()
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) <= 2


def test_counts_outlive_all_sessions(cluster: Cluster, server: DatabaseServer, site: Target) -> None:
    """Who joins again after all were lost at once brings what it last saw, not what it was started with."""
    pages = begin(cluster, site, 240)
    cluster.shoal("cluster", "scale", cluster.run_id, "--coordinator", cluster.coordinator, "--runner", "1")
    cluster.until_complete(1, 1, spares=1)
    with server.frozen():
        time.sleep(2.5 * SESSION)
    site.wait_for(10)
    cluster.until(lambda shown: shown.counts == Counts(1, 1) and len(shown.members) == 3)
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)


def test_a_coordinator_that_refuses_for_a_moment(tmp_path: Path, site: Target) -> None:
    with closing(RedisServer()) as server:
        cluster = Cluster(tmp_path, frontier_url("redis"), coordinator_url("redis", server))
        with cluster, closing(Redis.from_url(server.url)) as operator:
            pages = begin(cluster, site, 200)
            operator.config_set("maxmemory", "1")
            time.sleep(1.0)
            operator.config_set("maxmemory", "0")
            site.hurry()
            cluster.wait(120)
            check_items(cluster, pages)


def test_one_that_is_cut_off_from_the_coordinator(cluster: Cluster, server: DatabaseServer, site: Target) -> None:
    """It stops before another begins, though it could still reach the frontier, and is a Backup when it is back."""
    pages = urls(site, 240, wait=0.5)
    cluster.start(*pages)
    with wire(server.port) as to_coordinator:
        way = cluster.coordinator.replace(str(server.port), str(to_coordinator.port))
        cluster.node("crawler_1", runner=2, backup=1, coordinator=way)
        cluster.until_complete(1, 0)
        for name in ("crawler_2", "crawler_3"):
            cluster.node(name, runner=2, backup=1)
        cluster.until_complete(2, 1)
        site.wait_for(20)
        to_coordinator.fall_silent()
        cut = time.monotonic()
        cluster.until(lambda shown: roles(shown) == {"crawler_2": "Runner", "crawler_3": "Runner"})
        site.wait_for(20)
        late = [visit for visit in site.visits() if visit.agent == "crawler_1" and visit.start > cut + SESSION]
        assert late == []
        to_coordinator.mend()
        cluster.until(lambda shown: roles(shown).get("crawler_1") == "Backup Runner")
        site.hurry()
        cluster.wait(120)
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) <= 2


def test_one_that_is_cut_off_from_the_frontier(tmp_path: Path, site: Target) -> None:
    """It gives its slot to one who can reach it."""
    with closing(RedisServer()) as server, wire(server.port) as to_frontier:
        frontier = frontier_url("redis", server) + "&timeout=1"
        with Cluster(tmp_path, frontier, coordinator_url("zookeeper")) as cluster:
            pages = urls(site, 240, wait=0.5)
            cluster.start(*pages)
            way = frontier.replace(str(server.port), str(to_frontier.port))
            cluster.node("crawler_1", runner=1, backup=1, frontier=way)
            cluster.until_complete(1, 0)
            cluster.node("crawler_2", runner=1, backup=1)
            cluster.until_complete(1, 1)
            site.wait_for(20)
            to_frontier.fall_silent()
            cluster.until(lambda shown: roles(shown).get("crawler_2") == "Runner")
            site.wait_until(lambda visits: visits[-1].agent == "crawler_2")
            assert not next(member for member in cluster.view().members if member.name == "crawler_1").fit
            to_frontier.mend()
            cluster.until(lambda shown: all(member.fit for member in shown.members))
            site.hurry()
            cluster.wait(120)
            check_items(cluster, pages)
            assert ("retired", "crawler_1") in [(event.what, event.member) for event in cluster.events()]
            assert most_crawlers(site.visits()) <= 1


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_one_server_for_both_that_is_killed_and_restarted(kind: str, tmp_path: Path, site: Target) -> None:
    with closing(SERVERS[kind]()) as server:
        frontier = frontier_url(kind, server)  # type: ignore[arg-type]
        with Cluster(tmp_path, frontier, frontier) as cluster:
            pages = begin(cluster, site, 200)
            server.kill()
            time.sleep(1.5 * SESSION)
            server.start()
            site.hurry()
            cluster.wait(120)
            check_items(cluster, pages)
            assert most_crawlers(site.visits()) <= 2


@pytest.mark.parametrize("kind", COORDINATORS)
def test_clocks_that_are_wrong_by_an_hour(kind: str, tmp_path: Path, site: Target) -> None:
    """Nobody is taken for dead, and who is dead is replaced in time. The session is long enough for a busy machine, on
    which a short one may end without any fault of the clocks."""
    session = 8.0
    with Cluster(tmp_path, frontier_url("redis"), coordinator_url(kind)) as cluster:
        pages = urls(site, 900, wait=0.5)  # more than the test waits for: `hurry` ends it
        cluster.start(*pages)
        ahead = cluster.node_of_its_own("crawler_1", 2, 1, session, wrong_clock(3600))
        cluster.node_of_its_own("crawler_2", 2, 1, session, wrong_clock(-3600))
        cluster.until_complete(2, 0)
        cluster.node("crawler_3", runner=2, backup=1, session=session)
        cluster.until_complete(2, 1)
        time.sleep(1.2 * session)
        assert not [event for event in cluster.events() if event.what in ("lost", "retired", "took over")]
        ahead.kill()
        took = cluster.until(lambda shown: roles(shown).get("crawler_3") == "Runner")
        assert took < session + allowance(2.0)
        site.hurry()
        cluster.wait(120)
        check_items(cluster, pages)
