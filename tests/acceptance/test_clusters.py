"""Runners and Backup Runners as processes: a dead Runner is replaced, nothing is lost, and never too many crawl."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from shoal.ports import Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import roles
from tests.acceptance.clusters import (
    COORDINATORS,
    FRONTIER_OF,
    SESSION,
    Cluster,
    check_items,
    coordinator_url,
    most_crawlers,
    times_asked,
    urls,
)
from tests.acceptance.faults import picture
from tests.acceptance.fleets import frontier_url
from tests.acceptance.serving import until
from tests.acceptance.target import Target, target
from tests.support.patience import allowance


@pytest.fixture(params=COORDINATORS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def cluster(kind: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, frontier_url(FRONTIER_OF[kind]), coordinator_url(kind)) as made:
        yield made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Cluster]:
    """For what does not depend on the coordinator."""
    frontier = frontier_url("redis")
    with Cluster(tmp_path, frontier, frontier) as made:
        yield made


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


# -- the proofs


def test_a_killed_runner_is_replaced_and_every_item_is_there_once(cluster: Cluster, site: Target) -> None:
    """3 + 2 nodes, 1,000 pages: a Backup works within the session and one second."""
    pages = urls(site, 1000, wait=0.1)
    cluster.start(*pages)
    cluster.five()
    cluster.until_complete()
    site.wait_for(100)
    backups, victim = cluster.with_role("Backup Runner"), random.choice(cluster.with_role("Runner"))
    cluster.nodes[victim].kill()
    killed = time.monotonic()
    visits = site.wait_until(lambda visits: any(visit.agent in backups for visit in visits))
    first = next(visit for visit in visits if visit.agent in backups)
    assert first.start - killed < SESSION + allowance(1.0)
    cluster.wait(120)
    check_items(cluster, pages)
    (event,) = [event for event in cluster.events() if event.what == "took over"]
    assert (event.member, event.detail) == (first.agent, victim)
    assert most_crawlers(site.visits()) <= 3
    assert sum(count for times, count in times_asked(site).items() if times > 1) <= 8  # what the victim had


def test_a_cascade_of_deaths(cluster: Cluster, site: Target) -> None:
    """The first Backup, then two Runners; then all of them again."""
    pages = urls(site, 400, wait=0.5)
    cluster.start(*pages)
    cluster.five()
    cluster.until_complete()
    backup, runners = min(cluster.with_role("Backup Runner")), cluster.with_role("Runner")
    cluster.nodes[backup].kill()
    for victim in runners[:2]:
        cluster.nodes[victim].kill()
        time.sleep(0.3)
    cluster.until(lambda shown: dict(Counter(roles(shown).values())) == {"Runner": 2})
    for name in (backup, *runners[:2]):
        cluster.node(name)
    cluster.until_complete()
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) <= 3


def test_a_runner_that_was_stopped_fences_itself(cluster: Cluster, site: Target) -> None:
    """SIGSTOP past its session, SIGCONT: it writes nothing, and comes back as a Backup."""
    pages = urls(site, 400, wait=0.5)
    cluster.start(*pages)
    cluster.five()
    cluster.until_complete()
    site.wait_for(40)
    victim = random.choice(cluster.with_role("Runner"))
    cluster.nodes[victim].signal(signal.SIGSTOP)
    cluster.until(lambda shown: victim not in roles(shown) and list(roles(shown).values()).count("Runner") == 3)
    successor = cluster.with_role("Runner")
    site.wait_until(lambda visits: {visit.agent for visit in visits[-80:]} >= set(successor))
    before = picture(cluster.frontier, cluster.run_id)
    cluster.nodes[victim].signal(signal.SIGCONT)
    continued = time.monotonic()
    cluster.until(lambda shown: roles(shown).get(victim) == "Backup Runner")
    assert [visit for visit in site.visits() if visit.agent == victim and visit.start > continued] == []
    assert before.stats.items < len(pages)  # it had the chance to do harm
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) <= 3
    log = cluster.nodes[victim].log.read_text()
    assert "missed its heartbeats" in log
    assert [event.what for event in cluster.events() if event.member == victim][-3:] == ["lost", "joined", "left"]


def test_two_try_for_one_slot_again_and_again(kind: str) -> None:
    async def compete() -> None:
        url = coordinator_url(kind)
        first, second = [await open_coordinator(url, "c", ttl=60.0) for _ in range(2)]
        await first.join("backup_1", Counts(1, 2))
        await second.join("backup_2", Counts(1, 2))
        latest = 0
        wins: Counter[int] = Counter()
        both = [first, second]
        for _ in range(400):
            random.shuffle(both)
            epochs = await asyncio.gather(*(each.take(0) for each in both))
            (won,) = [epoch for epoch in epochs if epoch is not None]
            assert won > latest
            latest = won
            winner = both[epochs.index(won)]
            wins[winner is first] += 1
            await winner.retire()
        assert min(wins.values()) > 40
        await asyncio.gather(first.close(), second.close())

    asyncio.run(compete())


def test_a_released_slot_is_taken_at_once(cluster: Cluster, site: Target) -> None:
    """Nobody waits for a heartbeat: a session lasts for 20 seconds here."""
    pages = urls(site, 400, wait=0.5)
    cluster.start(*pages)
    for name in ("crawler_1", "crawler_2"):
        cluster.node(name, runner=1, backup=1, session=20.0)
    cluster.until_complete(1, 1)
    site.wait_for(10)
    (runner,) = cluster.with_role("Runner")
    cluster.nodes[runner].signal(signal.SIGTERM)
    assert cluster.nodes[runner].wait(120) == 0
    left = time.monotonic()
    visits = site.wait_until(lambda visits: len({visit.agent for visit in visits}) == 2)
    assert visits[-1].start - left < allowance(2.0)
    site.hurry()
    cluster.wait()
    check_items(cluster, pages)
    assert most_crawlers(site.visits()) == 1
    assert not [event for event in cluster.events() if event.what in ("lost", "took over")]
    assert "takes over from" not in "".join(worker.log.read_text() for worker in cluster.workers)


# -- names


def test_names_of_all_kinds_have_their_own_places(redis: Cluster, site: Target) -> None:
    pages = urls(site, 400, wait=0.5)
    redis.start(*pages)
    names = ["crawler_a_1", "crawler_b_1", "crawler_01", "worker without a number", "crawler_1"]
    for name in names:
        redis.node(name, runner=5, backup=0)
    redis.until(lambda shown: roles(shown) == dict.fromkeys(names, "Runner"))
    site.wait_until(lambda visits: {visit.agent for visit in visits} == set(names))
    site.hurry()
    redis.wait()
    check_items(redis, pages)


def test_the_same_name_twice_is_refused_while_the_other_lives(cluster: Cluster, site: Target) -> None:
    pages = urls(site, 400, wait=0.5)
    cluster.start(*pages)
    first = cluster.node("crawler_1", runner=1, backup=1)
    cluster.until_complete(1, 0)
    twin = cluster.node("crawler_1", runner=1, backup=1)
    assert twin.wait(120) == 1
    assert "crawler_1" in twin.log.read_text()
    assert first.is_alive
    cluster.workers.remove(twin)
    first.kill()
    cluster.node("crawler_1", runner=1, backup=1)  # one that comes back waits until it is known to be dead
    cluster.until(lambda shown: shown.slots[0].holder == "crawler_1")
    site.hurry()
    cluster.wait()
    check_items(cluster, pages)


# -- more and fewer


def test_counts_are_changed_while_it_works(cluster: Cluster, site: Target) -> None:
    pages = urls(site, 320, wait=0.5)
    cluster.start(*pages)
    for number in range(1, 6):
        cluster.node(f"crawler_{number}", runner=2, backup=1)
    cluster.until_complete(2, 1, spares=2)
    arguments = ("cluster", "scale", cluster.run_id, "--coordinator", cluster.coordinator)
    told = cluster.shoal(*arguments, "--runner", "4").stdout
    assert "2 Runners" in told
    assert "4 Runners and 1 Backup Runner" in told
    cluster.until_complete(4, 1)
    time.sleep(1.0)
    cluster.shoal(*arguments, "--runner", "1", "--backup", "4")
    cluster.until_complete(1, 4)
    changed = time.monotonic()
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)
    assert len({visit.agent for visit in site.visits() if visit.start > changed}) == 1
    assert set(times_asked(site)) <= {1, 2}  # a page in flight may be released
    assert picture(cluster.frontier, cluster.run_id).stats.dead == 0


def runners(cluster: Cluster) -> list[tuple[str, str, str]]:
    """The role, slot and state of each process that reports."""
    lines = cluster.shoal("workers", cluster.run_id, "--json").stdout.splitlines()
    return sorted((each["role"], each["slot"], each["state"]) for each in map(json.loads, lines))


def test_the_status_of_a_cluster(cluster: Cluster, site: Target) -> None:
    cluster.start(*urls(site, 800, wait=0.8))
    for number in (1, 2, 3):
        cluster.node(f"crawler_{number}", runner=2, backup=2)
    cluster.until_complete(2, 1)
    time.sleep(SESSION / 3)
    words = ("cluster", "status", cluster.run_id, "--coordinator", cluster.coordinator)
    told = cluster.shoal(*words).stdout
    assert "2 Runners and 2 Backup Runners, 3 members; only 1 of 2 Backup Runners" in told
    for expected in (
        "crawler_1",
        "Runner",
        "Backup Runner",
        "standing by",
        "pages",
        "s ago",
        "joined",
        "elected slot 0",
    ):
        assert expected in told
    shown = json.loads(cluster.shoal(*words, "--json").stdout)
    assert Counter(shown["roles"].values()) == {"Runner": 2, "Backup Runner": 1}
    assert shown["counts"] == {"runner": 2, "backup": 2}
    assert all(member["age"] < SESSION for member in shown["members"])
    working = [("runner", f"{cluster.run_id}/{index}", "working") for index in range(2)]
    until(lambda: runners(cluster) == working, what="reports of both Runners")
    unknown = cluster.shoal("cluster", "status", "nothing", "--coordinator", cluster.coordinator, check=False)
    assert unknown.returncode == 2
    assert "nothing" in unknown.stderr


def test_leases_of_a_dead_runner_are_released_although_its_slot_is_gone(redis: Cluster, site: Target) -> None:
    pages = urls(site, 400, wait=0.5)
    redis.start(*pages)
    for number in (1, 2, 3):
        redis.node(f"crawler_{number}", runner=2, backup=1)
    redis.until_complete(2, 1)
    site.wait_for(10)
    redis.nodes[redis.with_role("Runner")[1]].kill()
    redis.shoal("cluster", "scale", redis.run_id, "--coordinator", redis.coordinator, "--runner", "1")
    site.hurry()
    redis.wait(120)  # leases last 300 s
    check_items(redis, pages)


def test_another_cluster_on_the_same_run_is_told_from_a_successor(redis: Cluster, site: Target) -> None:
    """Two coordinators know nothing of each other: one node ends with an error, and no page dies of it."""
    pages = urls(site, 400, wait=0.5)
    redis.start(*pages)
    first = redis.node("crawler_1", runner=1, backup=0)
    redis.until_complete(1, 0)
    site.wait_for(10)
    second = redis.node("crawler_2", runner=1, backup=0, coordinator=coordinator_url("zookeeper"))
    assert first.wait(120) == 1
    assert "check --coordinator" in first.log.read_text()
    site.hurry()
    assert second.wait(120) == 0
    check_items(redis, pages)


# -- what others get wrong


def test_all_of_three_urls_are_crawled(redis: Cluster, site: Target) -> None:
    pages = urls(site, 3)
    redis.start(*pages)
    redis.node("crawler_1", runner=1, backup=0)
    site.hurry()
    redis.wait()
    check_items(redis, pages)


def test_what_a_dead_runner_had_not_begun_is_not_lost(redis: Cluster, site: Target) -> None:
    """Leased ahead, never fetched: released with the slot, not when the leases end."""
    pages = [f"{site.url}/{number}?gate=1" for number in range(60)]
    redis.start(*pages)
    redis.node("crawler_1", runner=1, backup=1, settings={"lease.batch": 50, "concurrency": 10})
    site.wait_until(lambda visits: len(visits) >= 8)
    redis.node("crawler_2", runner=1, backup=1)
    redis.until_complete(1, 1)
    assert picture(redis.frontier, redis.run_id).stats.leased > 15
    redis.nodes["crawler_1"].kill()
    site.open_gate()
    site.hurry()
    redis.wait(120)  # leases last 300 s
    check_items(redis, pages)


def test_leases_of_a_runner_without_a_successor_are_released_at_once(redis: Cluster, site: Target) -> None:
    """Nobody takes its slot, and yet its leases do not wait until they run out."""
    pages = urls(site, 300, wait=0.1)
    redis.start(*pages)
    for name in ("crawler_1", "crawler_2"):
        redis.node(name, runner=2, backup=0)
    redis.until_complete(2, 0)
    site.wait_for(20)
    redis.nodes["crawler_1"].kill()
    site.hurry()
    redis.wait(120)
    check_items(redis, pages)


def test_a_restart_of_all_keeps_the_work_and_doubles_nobody(redis: Cluster, site: Target) -> None:
    pages = urls(site, 400, wait=0.5)
    redis.start(*pages)
    for _ in range(2):
        for number in (1, 2, 3):
            redis.node(f"crawler_{number}", runner=2, backup=1)
        redis.until_complete(2, 1)
        assert sorted(member.name for member in redis.view().members) == ["crawler_1", "crawler_2", "crawler_3"]
        if len(redis.workers) == 3:
            site.wait_for(30)
            for node in redis.nodes.values():
                node.kill()
    site.hurry()
    redis.wait()
    check_items(redis, pages)


def test_failover_works_again_after_a_dead_one_is_back(redis: Cluster, site: Target) -> None:
    pages = urls(site, 240, wait=0.5)
    redis.start(*pages)
    for number in (1, 2, 3):
        redis.node(f"crawler_{number}", runner=2, backup=1)
    redis.until_complete(2, 1)
    for _ in range(2):
        victim = redis.with_role("Runner")[0]
        redis.nodes[victim].kill()
        redis.until(lambda shown, gone=victim: gone not in roles(shown) and len(roles(shown)) == 2)  # type: ignore[misc]
        redis.until_complete(2, 0)
        redis.node(victim, runner=2, backup=1)
        redis.until_complete(2, 1)
    site.hurry()
    redis.wait(120)
    check_items(redis, pages)


def test_a_dead_backup_is_noticed_and_the_next_one_takes_over(cluster: Cluster, site: Target) -> None:
    pages = urls(site, 400, wait=0.5)
    cluster.start(*pages)
    for number in (1, 2, 3, 4):
        cluster.node(f"crawler_{number}", runner=1, backup=1)
    cluster.until(lambda shown: sorted(roles(shown).values()) == ["Backup Runner", "Runner", "Spare", "Spare"])
    (backup,), (runner,) = cluster.with_role("Backup Runner"), cluster.with_role("Runner")
    cluster.nodes[backup].kill()
    cluster.until(lambda shown: sorted(roles(shown).values()) == ["Backup Runner", "Runner", "Spare"])
    (heir,) = cluster.with_role("Backup Runner")
    cluster.nodes[runner].kill()
    cluster.until(lambda shown: roles(shown).get(heir) == "Runner")
    assert ("lost", backup) in [(event.what, event.member) for event in cluster.events()]
    site.hurry()
    cluster.wait(120)
    check_items(cluster, pages)


def test_nothing_of_the_crawl_is_in_zookeeper(tmp_path: Path, site: Target) -> None:
    """Small facts alone, and not more of them for more pages."""
    with Cluster(tmp_path, frontier_url("redis"), coordinator_url("zookeeper")) as cluster:
        pages = urls(site, 400)
        cluster.start(*pages)
        for number in (1, 2, 3):
            cluster.node(f"crawler_{number}", runner=2, backup=1, session=10.0)
        cluster.wait(120)
        check_items(cluster, pages)
        found = znodes(cluster.coordinator)
    assert max(len(data) for data, _ in found.values()) < 500
    assert len(found) < 60
    assert sum(changes for _, changes in found.values()) < 100  # two for each URL would be 800
    assert not any(site.url.encode() in data for data, _ in found.values())


def znodes(url: str) -> dict[str, tuple[bytes, int]]:
    """By path, the data and how often it was changed."""
    client = KazooClient(hosts=url.removeprefix("zookeeper://"))
    client.start()
    found = {}
    paths = ["/"]
    for path in paths:
        data, stat = client.get(path)
        found[path] = (data, stat.version)
        paths += [f"{path.rstrip('/')}/{child}" for child in client.get_children(path)]
    client.stop()
    client.close()
    return found


# -- one machine, one file


def test_a_file_is_taken_over_with_its_output(tmp_path: Path, site: Target) -> None:
    """With ZooKeeper alone: one Runner at a time works on SQLite."""
    with Cluster(tmp_path, f"sqlite:///{tmp_path}/cluster.db", coordinator_url("zookeeper")) as cluster:
        pages = urls(site, 400, wait=0.1)
        spider = cluster.folder / cluster.name
        spider.write_text(spider.read_text().replace('name = "pages"', f'name = "pages"\n    start_urls = {pages!r}'))
        for number in (1, 2, 3):
            cluster.node(f"crawler_{number}", "-o", "pages.jsonl", runner=1, backup=2)
        cluster.run_id = "pages"  # which the first of them makes
        cluster.until_complete(1, 2)
        site.wait_for(30)
        (victim,) = cluster.with_role("Runner")
        cluster.nodes[victim].kill()
        cluster.until(lambda shown: any(slot.holder not in ("", victim) for slot in shown.slots))
        site.hurry()
        cluster.wait(120)
        check_items(cluster, pages)
        lines = (tmp_path / "pages.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["url"] for line in lines) == sorted(pages)
        assert most_crawlers(site.visits()) == 1


def test_three_runners_share_a_file(tmp_path: Path, site: Target) -> None:
    """With nothing but ZooKeeper. The process that owns the file and a Runner are killed."""
    with Cluster(tmp_path, f"sqlite:///{tmp_path}/cluster.db", coordinator_url("zookeeper")) as cluster:
        pages = urls(site, 400, wait=0.1)
        spider = cluster.folder / cluster.name
        spider.write_text(spider.read_text().replace('name = "pages"', f'name = "pages"\n    start_urls = {pages!r}'))
        for number in (1, 2, 3, 4):
            cluster.node(f"crawler_{number}", "-o", "pages.jsonl", runner=3, backup=1)
        cluster.run_id = "pages"
        cluster.until_complete(3, 1)
        site.wait_for(30)
        assert most_crawlers(site.visits()) > 1
        os.kill(int((tmp_path / "cluster.db.lock").read_text().splitlines()[0]), signal.SIGKILL)
        site.wait_for(30)
        victim = cluster.with_role("Runner")[0]
        cluster.nodes[victim].kill()
        cluster.until(lambda shown: all(slot.holder not in ("", victim) for slot in shown.slots))
        site.hurry()
        cluster.wait(120)
        check_items(cluster, pages)
        lines = (tmp_path / "pages.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["url"] for line in lines) == sorted(pages)
