"""`ZookeeperCrawler`: its role is decided when it is created, and `run` continues with it."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal import Config, Node, Spider, ZookeeperCrawler
from shoal.errors import ConfigError, CoordinatorAwayError, NameTakenError, RunError
from shoal.ports import ClusterEvent, ClusterView, Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import roles
from tests.acceptance.clusters import COORDINATORS, FRONTIER_OF, coordinator_url, most_crawlers, urls
from tests.acceptance.crawlers import CrawlerPrograms
from tests.acceptance.faults import picture
from tests.acceptance.fleets import frontier_url
from tests.acceptance.target import Target, target
from tests.support.databases import ZookeeperServer
from tests.support.patience import allowance

SESSION = 3.0  # on a busy machine, a program may be delayed by a second or two
FIVE = {"Runner": 3, "Backup Runner": 2}


class Pages(Spider):
    name = "pages"

    def parse(self, response):  # type: ignore[no-untyped-def]
        yield {"url": response.url}


@pytest.fixture
def hosts() -> str:
    return coordinator_url("zookeeper").removeprefix("zookeeper://")


@pytest.fixture
def programs(tmp_path: Path, hosts: str) -> Iterator[CrawlerPrograms]:
    with CrawlerPrograms(tmp_path, hosts, runner=3, backup=2, session=SESSION) as made:
        yield made


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


def observe(hosts: str, cluster: str = "shoal") -> tuple[ClusterView, list[ClusterEvent]]:
    async def ask() -> tuple[ClusterView, list[ClusterEvent]]:
        opened = await open_coordinator(f"zookeeper://{hosts}", cluster, ttl=SESSION)
        try:
            return await opened.observe(), await opened.events(1000)
        finally:
            await opened.close()

    return asyncio.run(ask())


def until(holds: Callable[[], bool], timeout: float = 60.0) -> None:
    limit = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def elected(hosts: str, cluster: str = "shoal") -> dict[str, str]:
    return dict(roles(observe(hosts, cluster)[0]))


def has_roles(hosts: str, **counts: int) -> bool:
    wanted = {"Runner": counts.get("runner", 0), "Backup Runner": counts.get("backup", 0)}
    return Counter(elected(hosts).values()) == {role: count for role, count in wanted.items() if count}


def at_once(make: Callable[[], Node], count: int) -> list[Node]:
    made: list[Node] = []
    threads = [threading.Thread(target=lambda: made.append(make())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


# -- the election


def test_five_created_at_once_have_five_names_and_their_roles(hosts: str, caplog: pytest.LogCaptureFixture) -> None:
    made = at_once(
        lambda: ZookeeperCrawler(runner=3, backup=2, name="crawler_<index>", zk_hosts=hosts, session=SESSION), 5
    )
    try:
        assert sorted(each.name for each in made) == [f"crawler_{number}" for number in range(1, 6)]
        assert Counter(each.role for each in made) == FIVE
        assert {each.name: each.role for each in made} == elected(hosts)
        with ZookeeperCrawler(runner=3, backup=2, zk_hosts=hosts, session=SESSION) as sixth:
            assert (sixth.name, sixth.role) == ("crawler_6", "Spare")
        assert "crawler_6 is a Spare: shoal has its 3 Runners and 2 Backup Runners" in caplog.text
    finally:
        for each in made:
            each.close()
    assert [each.role for each in made] == [None] * 5
    assert sorted(each.name for each in made)[0] == "crawler_1"
    assert observe(hosts)[0].members == ()


@pytest.mark.parametrize("kind", COORDINATORS)
def test_any_node_can_join_before_it_runs(kind: str) -> None:
    config = Config(frontier=frontier_url(FRONTIER_OF[kind]))
    url = coordinator_url(kind)

    def make() -> Node:
        node = Node(Pages, config, runner=3, backup=2, name="n<index>", coordinator=url, session=SESSION)
        assert node.role is None
        node.join()
        return node

    made = at_once(make, 5)
    try:
        assert sorted(node.name for node in made) == ["n1", "n2", "n3", "n4", "n5"]
        assert Counter(node.role for node in made) == FIVE
        time.sleep(2 * SESSION)  # the sessions last
        assert Counter(node.role for node in made) == FIVE
        gone = next(node for node in made if node.role == "Runner")
        gone.close()
        until(lambda: Counter(node.role for node in made) == {"Runner": 3, "Backup Runner": 1, None: 1})
    finally:
        for node in made:
            node.close()


def test_a_name_of_ones_own_is_unique(hosts: str) -> None:
    with ZookeeperCrawler(runner=1, backup=1, name="left", zk_hosts=hosts, session=2.0) as first:
        assert (first.name, first.role) == ("left", "Runner")
        threads = threading.active_count()
        with pytest.raises(NameTakenError, match="left"):
            ZookeeperCrawler(runner=1, backup=1, name="left", zk_hosts=hosts, session=2.0)
        until(lambda: threading.active_count() <= threads)
        assert elected(hosts) == {"left": "Runner"}


def test_a_coordinator_that_cannot_be_reached(hosts: str) -> None:
    threads = threading.active_count()
    with pytest.raises(CoordinatorAwayError, match=r"127\.0\.0\.1:1"):
        ZookeeperCrawler(runner=1, backup=1, zk_hosts="127.0.0.1:1")
    until(lambda: threading.active_count() <= threads)


# -- the time before run()


def test_the_session_lasts_while_the_program_is_busy(programs: CrawlerPrograms, hosts: str) -> None:
    """The main thread of each program is blocked for three sessions."""
    for _ in range(5):
        programs.start()
    before = dict(program.state() for program in programs)
    assert Counter(before.values()) == FIVE
    slots = observe(hosts)[0].slots
    time.sleep(3 * SESSION)
    view, events = observe(hosts)
    assert view.slots == slots
    assert all(member.age < SESSION for member in view.members)
    assert {member.doing for member in view.members} == {"waits for run()"}
    assert {event.what for event in events} == {"joined", "elected"}
    assert dict(program.state() for program in programs) == before


def test_the_slot_of_a_killed_program_goes_to_another(programs: CrawlerPrograms, hosts: str) -> None:
    """None of them runs."""
    for _ in range(5):
        programs.start()
    victim = next(program for program in programs if program.role == "Runner")
    name = victim.name
    left = [program for program in programs if program is not victim]
    victim.kill()
    killed = time.monotonic()
    until(lambda: Counter(program.role for program in left) == {"Runner": 3, "Backup Runner": 1})
    assert time.monotonic() - killed < SESSION + allowance(2.0)
    assert name not in elected(hosts)
    (event,) = [event for event in observe(hosts)[1] if event.what == "took over"]
    assert event.detail == name
    again = programs.start()
    assert again.state() == (name, "Backup Runner")  # the first free number


def test_a_program_that_was_stopped_knows_that_it_has_lost_its_role(programs: CrawlerPrograms, hosts: str) -> None:
    for _ in range(4):
        programs.start(backup=1)
    victim = next(program for program in programs if program.role == "Runner")
    name = victim.name
    victim.signal(signal.SIGSTOP)
    until(lambda: name not in elected(hosts) and has_roles(hosts, runner=3))
    assert programs.start(backup=1).state() == (name, "Backup Runner")  # the first free number
    victim.signal(signal.SIGCONT)
    assert victim.role != "Runner"  # at once, and for good
    until(lambda: victim.state() == ("crawler_5", "Spare"))
    assert "missed its heartbeats" in victim.log.read_text()


def test_a_session_that_ended_before_run_does_no_harm(
    programs: CrawlerPrograms, hosts: str, site: Target, tmp_path: Path
) -> None:
    """A Runner is stopped before it runs. When it continues and runs, another one is the Runner."""
    options = {"runner": 1, "backup": 1, "config": {"frontier": f"sqlite:///{tmp_path}/x.db"}}
    assert [programs.start(**options).role for _ in range(2)] == ["Runner", "Backup Runner"]
    first, second = programs
    pages = urls(site, 100, wait=0.1)
    second.run(pages)
    first.signal(signal.SIGSTOP)
    first.run(pages)
    site.wait_for(5)
    first.signal(signal.SIGCONT)
    until(lambda: any(member.fit and member.name == "crawler_1" for member in observe(hosts)[0].members))
    assert elected(hosts) == {"crawler_1": "Backup Runner", "crawler_2": "Runner"}
    site.hurry()
    assert (first.result(), second.result()) == ("finished", "finished")
    assert {visit.agent for visit in site.visits()} == {"crawler_2"}


def test_counts_can_change_before_run(hosts: str) -> None:
    async def scale(runner: int, backup: int) -> None:
        coordinator = await open_coordinator(f"zookeeper://{hosts}", "shoal", ttl=SESSION)
        await coordinator.scale(Counts(runner, backup))
        await coordinator.close()

    made = at_once(lambda: ZookeeperCrawler(runner=3, backup=0, zk_hosts=hosts, session=SESSION), 3)
    try:
        assert [each.role for each in made] == ["Runner"] * 3
        asyncio.run(scale(1, 1))
        until(lambda: Counter(each.role for each in made) == {"Runner": 1, "Backup Runner": 1, "Spare": 1})
        asyncio.run(scale(2, 1))
        until(lambda: Counter(each.role for each in made) == {"Runner": 2, "Backup Runner": 1})
    finally:
        for each in made:
            each.close()


def test_without_the_server_there_is_no_role(tmp_path: Path) -> None:
    """Another member may have the slot: that of a server that is cut off from this one."""
    server = ZookeeperServer()
    try:
        hosts = server.url.removeprefix("zookeeper://")
        with ZookeeperCrawler(runner=1, backup=0, zk_hosts=hosts, session=SESSION) as crawler:
            assert crawler.role == "Runner"
            server.kill()
            stopped = time.monotonic()
            until(lambda: crawler.role is None)
            assert time.monotonic() - stopped < SESSION + allowance(1.0)
            server.start()
            until(lambda: crawler.role == "Runner")
    finally:
        server.close()


# -- leaving


def test_an_object_that_is_deleted_leaves(hosts: str) -> None:
    kept = ZookeeperCrawler(runner=1, backup=1, zk_hosts=hosts, session=20.0)
    crawler = ZookeeperCrawler(runner=1, backup=1, zk_hosts=hosts, session=20.0)
    assert (kept.role, crawler.role) == ("Runner", "Backup Runner")
    del kept
    gc.collect()
    until(lambda: crawler.role == "Runner", 10.0)
    crawler.close()
    with pytest.raises(RunError, match="closed"):
        crawler.run(Pages)


@pytest.mark.parametrize("end", ["", "raise ValueError('a bug')", "sys.exit(1)"])
def test_a_program_that_ends_leaves(hosts: str, end: str) -> None:
    """It does not close its crawler."""
    program = f"""
import sys
from shoal import ZookeeperCrawler
crawler = ZookeeperCrawler(runner=1, backup=1, zk_hosts="{hosts}", session=20.0)
print(crawler.name, crawler.role, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "crawler_1 Runner\n"
    assert done.returncode == (1 if end else 0)
    assert ("a bug" in done.stderr) == ("a bug" in end)
    view, events = observe(hosts)
    assert view.members == ()
    assert [event.what for event in events] == ["joined", "elected", "left"]


# -- running


def test_run_continues_with_the_role(hosts: str, site: Target) -> None:
    crawler = ZookeeperCrawler(
        config=Config(frontier=frontier_url("redis"), download_delay=0), runner=1, backup=0, zk_hosts=hosts
    )
    with pytest.raises(ConfigError, match="no spider"):
        crawler.run()
    assert crawler.role == "Runner"
    Pages.start_urls = urls(site, 3)
    crawler.register(Pages)
    before = observe(hosts)[0].slots
    summary = crawler.run()
    assert (summary.run_id, summary.state, summary.stats.done) == ("pages", "finished", 3)
    view, events = observe(hosts)
    assert [(slot.index, slot.epoch) for slot in view.slots] == [(slot.index, slot.epoch) for slot in before]
    assert [event.what for event in events][-3:] == ["joined", "elected", "left"]
    assert crawler.event_counts == {"elected": 1}
    assert crawler.role is None


def test_a_program_with_an_event_loop_awaits_it(hosts: str, site: Target) -> None:
    Pages.start_urls = urls(site, 3)

    async def work() -> None:
        config = Config(frontier=frontier_url("redis"), download_delay=0)
        crawler = ZookeeperCrawler(Pages, config, runner=1, backup=0, zk_hosts=hosts)
        assert (crawler.cluster, crawler.role) == ("pages", "Runner")
        assert (await crawler).stats.done == 3

    asyncio.run(work())


def test_with_nothing_but_zookeeper(programs: CrawlerPrograms, hosts: str, site: Target, tmp_path: Path) -> None:
    """Five programs on one machine. A Runner that runs is killed, and a Backup Runner replaces it."""
    pages = urls(site, 400, wait=0.1)
    for _ in range(5):
        programs.start()
    before = dict(program.state() for program in programs)
    assert Counter(before.values()) == FIVE
    for program in programs:
        program.run(pages)
    runners = {name for name, role in before.items() if role == "Runner"}
    site.wait_until(lambda visits: {visit.agent for visit in visits} == runners)
    slot = observe(hosts)[0].slots[0]
    victim = programs[list(before).index(slot.holder)]
    victim.kill()
    until(lambda: has_roles(hosts, runner=3, backup=1))
    site.wait_until(lambda visits: len({visit.agent for visit in visits}) == 4)
    site.hurry()
    assert {program.result() for program in programs if program is not victim} == {"finished"}
    shown = picture(f"sqlite:///{tmp_path}/shoal.db", "pages")
    assert shown.in_order
    assert (shown.stats.done, shown.stats.remaining, shown.stats.items) == (400, 0, 400)
    assert most_crawlers(site.visits()) <= 3


def test_members_on_another_machine_need_a_frontier(hosts: str) -> None:
    async def join() -> None:
        other = await open_coordinator(f"zookeeper://{hosts}", "shoal", ttl=20.0)
        await other.join("crawler_1", Counts(1, 1), "elsewhere-17-a0b1")
        crawler = ZookeeperCrawler(runner=1, backup=1, zk_hosts=hosts)
        with pytest.raises(ConfigError, match=r"crawler_1 runs on another machine \(elsewhere-17-a0b1\)"):
            crawler.register(Pages)
        assert [member.name for member in (await other.observe()).members] == ["crawler_1"]
        await other.close()

    asyncio.run(join())


# -- some run, others not yet


def test_those_that_run_come_first(programs: CrawlerPrograms, hosts: str, site: Target, tmp_path: Path) -> None:
    """A slot that becomes free goes to a Backup Runner that runs, not to one before it that only exists."""
    options = {"runner": 1, "backup": 2, "config": {"frontier": f"sqlite:///{tmp_path}/x.db"}}
    for number, role in ((1, "Runner"), (2, "Backup Runner"), (3, "Backup Runner")):
        assert programs.start(**options).state() == (f"crawler_{number}", role)
    runner, idle, backup = programs
    pages = urls(site, 100, wait=0.1)
    for program in (runner, backup):
        program.run(pages)
    site.wait_for(5)
    until(lambda: any(member.fit and member.name == "crawler_3" for member in observe(hosts)[0].members))
    runner.kill()
    until(lambda: elected(hosts).get("crawler_3") == "Runner")
    assert idle.role == "Backup Runner"
    site.hurry()
    assert backup.result() == "finished"


def test_an_idle_successor_keeps_no_leases(programs: CrawlerPrograms, hosts: str, site: Target, tmp_path: Path) -> None:
    """The slot of a killed Runner goes to a program that does not run. The other Runner gets the pages at once."""
    options = {"runner": 2, "backup": 1, "config": {"frontier": f"sqlite:///{tmp_path}/x.db"}}
    for role in ("Runner", "Runner", "Backup Runner"):
        assert programs.start(**options).role == role
    *runners, idle = programs
    pages = [f"{site.url}/{number}?gate=1" for number in range(30)]
    for program in runners:
        program.run(pages)
    site.wait_until(lambda visits: len({visit.agent for visit in visits}) == 2)
    runners[0].kill()
    until(lambda: idle.role == "Runner")
    site.open_gate()
    site.hurry()
    assert runners[1].result() == "finished"  # leases last 300 s
    assert idle.role == "Runner"
