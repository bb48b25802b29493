"""A fleet under faults: frozen workers, frozen servers, wrong clocks, cut connections.

The times of fetches are measured at the target, by its own clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import redis

from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, Run
from tests.acceptance.faults import picture, seconds_until_exit, wire, wrong_clock
from tests.acceptance.fleets import KINDS, Fleet, InProcessFleet, frontier_url
from tests.acceptance.target import Target, closest, host_of, most_at_once, target
from tests.support.databases import PostgresServer, RedisServer, free_port

SPIDER = """
import os
import time
from pathlib import Path

from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False}

    def parse(self, response):
        asleep = os.environ.get("ASLEEP")
        if asleep:
            Path(asleep).write_text(response.url)
            while not Path("awake").exists():
                time.sleep(0.02)
            if asleep == "fails":
                raise ValueError("too late")
        yield {"url": response.url, "clock": time.time()}
        yield response.follow_all("a")
"""


@pytest.fixture(params=KINDS)
def frontier(request: pytest.FixtureRequest) -> str:
    """An empty one on the server that all tests share: nothing is done to that."""
    return frontier_url(request.param)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer | PostgresServer]:
    """One that may be frozen and killed, as long as it is well again afterwards."""
    made = RedisServer() if request.param == "redis" else PostgresServer()
    yield made
    made.close()


class QuickFleet(InProcessFleet):
    """One that tells how far it got when it takes too long."""

    def wait(self, timeout: float = 60.0) -> None:
        try:
            super().wait(timeout)
        except subprocess.TimeoutExpired:
            logs = "\n".join(log_of(self, number)[-2000:] for number in range(len(self.processes)))
            pytest.fail(f"not ended after {timeout:g} s: {picture(self.frontier, self.run_id).stats}\n{logs}")


def frontier_on(server: RedisServer | PostgresServer, timeout: float = 1.0) -> str:
    """An empty frontier; a call to its server fails after so many seconds without an answer."""
    kind = "redis" if isinstance(server, RedisServer) else "postgresql"
    return f"{frontier_url(kind, server)}&timeout={timeout:g}"


def start_worker(fleet: Fleet, *arguments: str, env: dict[str, str] | None = None, **settings: Any) -> Any:
    """One more worker; the target knows it by its number."""
    words = {key.replace("__", "."): value for key, value in settings.items()}
    agent = {"user_agent": f"worker-{len(fleet.processes)}"}
    return fleet.worker(*arguments, settings=agent | words, env=env)


def log_of(fleet: Fleet, number: int) -> str:
    return (fleet.folder / f"worker-{number}.log").read_text()


def wait_until(holds: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {timeout:g} s"
        time.sleep(0.02)


def wait_for_workers(fleet: Fleet) -> None:
    """Until all of them are at work."""
    for number, process in enumerate(fleet.processes):
        while "works on run" not in (log := log_of(fleet, number)):
            assert process.poll() is None, log
            time.sleep(0.02)


def read_items(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_whole(fleet: Fleet, urls: Sequence[str]) -> list[dict[str, Any]]:
    """The run is finished and balanced, and has an item of each of these pages once: in the log, and when exported."""
    found = picture(fleet.frontier, fleet.run_id)
    assert found.in_order, f"{found.stats} but {found.audit} {found.hosts}"
    assert found.run.state == "finished"
    assert found.stats.done == found.stats.pushed == len(urls), f"{found.stats} {found.dead}"
    fleet.shoal("export", fleet.run_id, "-o", "all.jsonl")
    items = read_items(fleet.folder / "all.jsonl")
    assert Counter(item["url"] for item in items) == Counter(urls)
    assert len({item.key for item in found.items}) == len(found.items) == len(urls)
    return items


# -- workers that wake up late


def test_a_worker_that_slept_past_its_lease_changes_nothing(frontier: str, tmp_path: Path) -> None:
    """Two of them, each in the middle of a page: one wakes up while its heir works on that page, and completes it; the
    other when the run is finished, and fails it."""
    with target() as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        paths = [f"/{number}?again=1" for number in range(12)]
        fleet.start(*(site.url + path for path in paths), settings={"concurrency_per_host": 100})
        marks = [tmp_path / "completes", tmp_path / "fails"]
        for mark in marks:
            start_worker(fleet, env={"ASLEEP": mark.name}, lease__ttl=2, lease__batch=3, concurrency=2)
        early, late = fleet.processes
        for mark, zombie in zip(marks, fleet.processes, strict=True):
            wait_until(lambda mark=mark: mark.exists() and mark.read_text(), "a page in its hands")  # type: ignore[misc]
            os.kill(zombie.pid, signal.SIGSTOP)
        heir = start_worker(fleet, lease__ttl=2)
        seen = site.wait_until(lambda seen: {visit.path for visit in seen if visit.agent == "worker-2"} == set(paths))
        held = len({visit.path for visit in seen if visit.agent != "worker-2"})  # answered when the gate opens
        wait_until(lambda: picture(frontier, fleet.run_id).stats.leased == held, "all but those done")
        (tmp_path / "awake").touch()

        before, woken = picture(frontier, fleet.run_id), time.monotonic()
        assert before.stats.leased >= 2
        os.kill(early.pid, signal.SIGCONT)
        refused = f"lease lost; the page is not counted url={marks[0].read_text()}"
        wait_until(lambda: refused in log_of(fleet, 0), "refused")
        time.sleep(0.5)  # in which it would renew and give back whatever else it had
        assert picture(frontier, fleet.run_id) == before
        assert [visit for visit in site.visits() if visit.start >= woken] == []

        site.open_gate()
        assert (heir.wait(20), early.wait(20)) == (0, 0), log_of(fleet, 0)
        assert_whole(fleet, [site.url + path for path in paths])
        before, woken = picture(frontier, fleet.run_id), time.monotonic()
        os.kill(late.pid, signal.SIGCONT)
        fleet.wait(15)
        assert f"lease lost; the page is not counted url={marks[1].read_text()}" in log_of(fleet, 1)
        assert picture(frontier, fleet.run_id) == before
        assert [visit for visit in site.visits() if visit.start >= woken] == []
        for number in range(3):
            assert "finished: every page found is accounted for" in log_of(fleet, number)


async def test_a_stale_token_changes_nothing(frontier: str) -> None:
    """Two processes' stores: what the first had leased is the second's now, then done, then dead."""
    options = FrontierOptions(max_attempts=5)
    slow, quick = await open_store(frontier), await open_store(frontier)
    try:
        await quick.create_run(Run(run_id="r", spider="s", state="running", created_at=0.0))
        mine, theirs = await slow.frontier("r", options), await quick.frontier("r", options)
        urls = [f"http://example.com/{number}" for number in range(3)]
        await mine.push([Request(url) for url in urls])
        stale = (await mine.lease(3, 0.2)).leases
        assert len(stale) == 3

        async def refused() -> None:
            before = await _everything(theirs, urls)
            late = [Request("http://example.com/late")]
            completions = [Completion(lease=lease, items=[b"late"], children=late, status=200) for lease in stale]
            assert await mine.complete(completions) == [None] * 3
            for again in (None, 0.0):
                failures = [Failure(lease=lease, kind="late", reason="late", retry_in=again) for lease in stale]
                assert await mine.fail(failures) == [None] * 3
            assert await mine.renew(stale, 60) == [None] * 3
            for contacted in (False, True):
                assert await mine.release(stale, contacted=contacted) == [False] * 3
            assert await _everything(theirs, urls) == before

        leases: list[Lease] = []
        while len(leases) < 3:
            leases += (await theirs.lease(3, 60)).leases
            await asyncio.sleep(0.02)
        await refused()
        done, dead, ready = leases
        assert await theirs.complete([Completion(lease=done, items=[b"item"])]) != [None]
        assert await theirs.fail([Failure(lease=dead, kind="gone", reason="gone")]) == ["dead"]
        assert await theirs.release([ready]) == [True]
        await refused()
        assert [item.payload for item in await theirs.read_items(0, 10)] == [b"item"]
    finally:
        await slow.close()
        await quick.close()


async def _everything(frontier: Frontier, urls: Sequence[str]) -> object:
    return [
        await frontier.stats(), await frontier.audit(), await frontier.read_items(0, 100), await frontier.host_states(),
        await frontier.dead_kinds(), [await frontier.find(Request(url)) for url in (*urls, "http://example.com/late")],
    ]  # fmt: skip


# -- politeness


DELAY, CRAWL_DELAY = 0.1, 0.25
NOISE = 0.3  # seconds that a busy machine may take from a decision to a request; for moments, not for politeness
ROBOTS = (None, None, f"User-agent: *\nCrawl-delay: {CRAWL_DELAY}")


class PoliteFleet:
    """Eight workers and three hosts: one with the run's delay, one that bears two at once, and one whose robots.txt
    asks for a longer delay. Nothing is fetched before all workers are there."""

    def __init__(self, fleet: Fleet, site: Target) -> None:
        self._fleet = fleet
        self._site = site
        delayed, paired, asking = site.urls
        self.urls = [f"{delayed}/{number}?wait=0.02" for number in range(60)]
        self.urls += [f"{paired}/{number}?wait=0.4" for number in range(44)]
        self.urls += [f"{asking}/{number}" for number in range(28)]

    def start(self, environments: Sequence[dict[str, str]], ttl: float) -> None:
        fleet, hosts = self._fleet, [host_of(url) for url in self._site.urls]
        fleet.start(*self.urls, settings={"download_delay": DELAY})
        fleet.shoal("hosts", "set", hosts[1], "--delay", "0", "--concurrency", "2")
        for host in hosts:
            fleet.shoal("hosts", "block", host)
        for env in environments:
            start_worker(fleet, env=env, robots__obey="true", lease__ttl=ttl, concurrency=4)
        wait_for_workers(fleet)
        for host in hosts:
            fleet.shoal("hosts", "unblock", host)

    def assert_polite(self) -> None:
        delayed, paired, asking = (self._site.visits(url) for url in self._site.urls)
        assert closest(delayed) >= DELAY
        assert closest(asking) >= CRAWL_DELAY
        assert asking[0].path == "/robots.txt"
        assert most_at_once(paired) == 2
        assert len({visit.agent for visit in (*delayed, *paired, *asking)}) >= 4


def test_politeness_is_the_fleets_whatever_its_clocks_say(frontier: str, tmp_path: Path) -> None:
    clocks = [wrong_clock(3600), wrong_clock(-3600), {}, wrong_clock(3600), wrong_clock(-3600), {}]
    clocks += [wrong_clock(3600), wrong_clock(-3600)]
    with target(*ROBOTS) as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        polite = PoliteFleet(fleet, site)
        polite.start(clocks, ttl=5.0)
        fleet.wait(80)
        polite.assert_polite()
        wrong = Counter(round((item["clock"] - time.time()) / 3600) for item in assert_whole(fleet, polite.urls))
        assert wrong[1] > 0, "no worker was ahead"
        assert wrong[-1] > 0, "no worker was behind"


def test_politeness_and_every_page_survive_a_killed_server(
    server: RedisServer | PostgresServer, tmp_path: Path
) -> None:
    """It is away for longer than leases last."""
    ttl = 2.0
    with target(*ROBOTS) as site, QuickFleet(tmp_path, frontier_on(server), SPIDER) as fleet:
        polite = PoliteFleet(fleet, site)
        polite.start([{}] * 8, ttl)
        site.wait_until(lambda seen: all(sum(visit.host == host_of(url) for visit in seen) > 4 for url in site.urls))
        server.kill()
        killed = time.monotonic()
        time.sleep(ttl + 0.5)
        back = time.monotonic()
        server.start()
        fleet.wait(80)
        polite.assert_polite()
        assert_whole(fleet, polite.urls)
        for url in site.urls:
            seen = site.visits(url)
            assert [visit for visit in seen if killed + ttl + NOISE <= visit.start < back] == [], f"killed at {killed}"
            assert any(visit.start < killed for visit in seen)
            assert any(visit.start > back for visit in seen)


# -- a server that does not answer


def test_a_frozen_server_is_waited_for_but_not_with_leases_that_have_ended(
    server: RedisServer | PostgresServer, tmp_path: Path
) -> None:
    """Each worker is in the middle of some pages and has leased more. One of them is asked to leave."""
    ttl = 2.0
    with target() as site, QuickFleet(tmp_path, frontier_on(server), SPIDER) as fleet:
        urls = [f"{site.url}/quick/{number}" for number in range(20)]
        urls += [f"{site.url}/slow/{number}?gate=1" for number in range(40)]
        fleet.start(*urls, settings={"concurrency_per_host": 1000})
        for timeout in ("&timeout=1", "&timeout=1", ""):
            fleet.frontier = fleet.frontier.partition("&")[0] + timeout
            output = f"out-{len(fleet.processes)}.jsonl"
            start_worker(fleet, "-o", output, lease__ttl=ttl, concurrency=4)
        site.wait_until(lambda seen: sum(visit.end is None for visit in seen) == 12)
        wait_until(lambda: picture(fleet.frontier, fleet.run_id).stats.leased > 12, "more is leased")
        time.sleep(ttl / 2)  # in which all of them are renewed
        with server.frozen():
            frozen = time.monotonic()
            time.sleep(0.3)
            leaving = fleet.processes[2]
            leaving.terminate()
            assert seconds_until_exit(leaving, 20) < 10
            assert leaving.returncode == 0, log_of(fleet, 2)
            time.sleep(max(0.0, frozen + ttl + 1 - time.monotonic()))
            site.open_gate()  # what was in flight would end now, and what was leased ahead begin
            time.sleep(frozen + 5.5 - time.monotonic())
            seen, thawed = site.visits(), time.monotonic()
            assert [process.poll() for process in fleet.processes[:2]] == [None, None]
        fleet.wait(40)
        late = frozen + ttl + NOISE
        assert [visit for visit in seen if visit.start >= late] == [], f"frozen at {frozen}"
        assert [visit for visit in seen if (visit.end or thawed) >= late] == [], f"frozen at {frozen}"
        for number in range(2):
            assert "the frontier's server is away" in log_of(fleet, number)
            assert "the frontier's server is back" in log_of(fleet, number)
            assert Counter(item["url"] for item in read_items(tmp_path / f"out-{number}.jsonl")) == Counter(urls)
        assert_whole(fleet, urls)


def test_a_server_that_is_read_only_for_a_while_is_waited_for(
    server: RedisServer | PostgresServer, tmp_path: Path
) -> None:
    """As in a failover, for longer than leases last and longer than a call is repeated. The connections stay open."""
    ttl = 2.0
    with target() as site, QuickFleet(tmp_path, frontier_on(server), SPIDER) as fleet:
        urls = [f"{site.url}/{number}?wait=0.05" for number in range(120)]
        fleet.start(*urls, settings={"concurrency_per_host": 6})
        for number in range(3):
            start_worker(fleet, "-o", f"out-{number}.jsonl", lease__ttl=ttl, concurrency=4)
        site.wait_for(20)
        with read_only(server):
            began = time.monotonic()
            for number in range(3):
                wait_until(lambda number=number: "server is away" in log_of(fleet, number), "the worker notices it")
            time.sleep(max(0.0, began + 2 * ttl - time.monotonic()))
            assert [process.poll() for process in fleet.processes] == [None] * 3
        fleet.wait(60)
        assert [process.returncode for process in fleet.processes] == [0] * 3
        for number in range(3):
            assert "the frontier's server is back" in log_of(fleet, number)
            assert log_of(fleet, number).count("server is away") <= 2  # although queries are answered all the time
            assert Counter(item["url"] for item in read_items(tmp_path / f"out-{number}.jsonl")) == Counter(urls)
        assert_whole(fleet, urls)


@contextmanager
def read_only(server: RedisServer | PostgresServer) -> Iterator[None]:
    """While the block runs, the server refuses every change."""
    if isinstance(server, RedisServer):
        with redis.Redis(port=server.port) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            yield
            client.execute_command("REPLICAOF", "NO", "ONE")
        return
    set_default(server, "default_transaction_read_only = on")
    yield
    set_default(server, "default_transaction_read_only = off")


def set_default(server: PostgresServer, setting: str) -> None:
    """Change a setting for all sessions, also for those that are open."""

    async def change() -> None:
        link = await asyncpg.connect(server.url)
        await link.execute(f"ALTER SYSTEM SET {setting}")
        await link.execute("SELECT pg_reload_conf()")
        await link.close()

    asyncio.run(change())


def test_a_host_that_asks_for_a_day_is_tried_again_by_one_request(frontier: str, tmp_path: Path) -> None:
    """Again and again, for as long as it answers so."""
    with target() as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        urls = [f"{site.url}/{number}?status=503&after=86400" for number in range(6)]
        fleet.start(*urls, settings={"concurrency_per_host": 6, "retry.max_attempts": 20})
        for _ in range(2):
            start_worker(fleet, concurrency=6, throttle__enabled=True, throttle__max_retry_after=1)
        seen = site.wait_until(lambda seen: len(seen) >= 10)[6:]  # at first all of them are in flight
        assert most_at_once(seen) == 1
        assert closest(seen) > 0.9
        site.mend()
        fleet.wait(40)
        assert_whole(fleet, urls)


def test_a_silent_connection_is_given_up_for_a_new_one(frontier: str, tmp_path: Path) -> None:
    """The server is there all the time, and so are the connections; but nothing comes through them any more."""
    port = urlsplit(frontier).port
    assert port is not None
    with target() as site, wire(port) as way, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        urls = [f"{site.url}/{number}?wait=0.1" for number in range(60)]
        fleet.start(*urls, settings={"concurrency_per_host": 8})
        fleet.frontier = frontier.replace(f":{port}/", f":{way.port}/") + "&timeout=1"
        start_worker(fleet, lease__ttl=3, concurrency=4)
        site.wait_for(10)
        way.fall_silent()
        wait_until(lambda: "the frontier's server is away" in log_of(fleet, 0), "noticed")
        assert len(site.visits()) < len(urls)
        before = way.connections
        way.mend()
        fleet.wait(30)
        assert way.connections > before
        fleet.frontier = frontier
        assert_whole(fleet, urls)


# -- the end of a run


def test_nobody_leaves_before_the_last_page_and_everybody_after_it(frontier: str, tmp_path: Path) -> None:
    """The last page is slow, slower than a lease lasts, and finds one more link while all others have nothing to do."""
    with target() as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        urls = [f"{site.url}/{number}" for number in range(6)]
        urls.append(f"{site.url}/last?gate=1&link=/found?wait=0.3")
        fleet.start(*urls)
        for _ in range(4):
            start_worker(fleet, lease__ttl=3)
        wait_for_workers(fleet)
        site.wait_until(lambda seen: len(seen) == len(urls))
        time.sleep(4)
        assert [process.poll() for process in fleet.processes] == [None] * 4
        site.open_gate()
        left: dict[int, float] = {}
        while len(left) < 4:
            now = time.monotonic()
            left |= {p.pid: now for p in fleet.processes if p.pid not in left and p.poll() is not None}
            time.sleep(0.01)
        fleet.wait(1)
        seen = site.visits()
        assert [visit.path for visit in seen[len(urls) :]] == ["/found?wait=0.3"]
        ended = seen[-1].end
        assert ended is not None
        assert min(left.values()) > ended
        assert max(left.values()) < ended + 10
        assert_whole(fleet, [*urls, f"{site.url}/found?wait=0.3"])


def test_a_worker_that_is_to_stay_takes_what_comes_later(server: RedisServer | PostgresServer, tmp_path: Path) -> None:
    """Until it is asked to leave; then it does, whether or not the server answers."""
    frontier = frontier_on(server, timeout=10)
    with target() as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        urls = [f"{site.url}/well", f"{site.url}/ill?status=404", f"{site.url}/new"]
        fleet.start(*urls[:2])
        worker = start_worker(fleet, "--keep-alive", "-o", "out.jsonl")
        wait_until(lambda: _state(fleet) == "finished", "the first end")
        site.mend()
        fleet.shoal("retry-failed", fleet.run_id)
        site.wait_until(lambda seen: len(seen) == 3)
        asyncio.run(_push(frontier, fleet.run_id, urls[2]))
        site.wait_until(lambda seen: seen[-1].path == "/new")
        wait_until(lambda: _state(fleet) == "finished" and fleet.stats()["done"] == 3, "the last end")
        assert worker.poll() is None
        with server.frozen():
            time.sleep(1.5)
            worker.terminate()
            assert seconds_until_exit(worker, 20) < 10
            assert worker.returncode == 0, log_of(fleet, 0)
        assert_whole(fleet, urls)


def _state(fleet: Fleet) -> str:
    return picture(fleet.frontier, fleet.run_id).run.state


async def _push(frontier: str, run_id: str, url: str) -> None:
    store = await open_store(frontier)
    try:
        run = await store.get_run(run_id)
        assert run is not None
        await (await store.frontier(run_id)).push([Request(url)])
    finally:
        await store.close()


# -- what a person does to a run


def test_a_run_is_paused_resumed_cancelled_and_removed(frontier: str, tmp_path: Path) -> None:
    with target() as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        urls = [f"{site.url}/quick/{number}" for number in range(20)]
        urls += [f"{site.url}/slow/{number}?gate=1&wait=0.05" for number in range(500)]
        fleet.start(*urls, settings={"concurrency_per_host": 200})
        for _ in range(2):
            start_worker(fleet, concurrency=4)
        site.wait_until(lambda seen: sum(visit.end is None for visit in seen) == 8)
        wait_until(lambda: picture(frontier, fleet.run_id).stats.leased > 8, "more is leased")

        fleet.shoal("pause", fleet.run_id)
        refused = fleet.shoal("rm", fleet.run_id, check=False)
        assert (refused.returncode, "cancel it first" in refused.stderr) == (2, True)
        wait_until(lambda: picture(frontier, fleet.run_id).stats.leased == 8, "what was leased ahead is released", 6)
        seen = site.visits()
        site.open_gate()
        wait_until(lambda: picture(frontier, fleet.run_id).stats.leased == 0, "what was in flight is ended")
        time.sleep(1)
        assert len(site.visits()) == len(seen)
        assert [process.poll() for process in fleet.processes] == [None, None]

        fleet.shoal("resume", fleet.run_id)
        site.wait_for(10)
        assert fleet.shoal("rm", fleet.run_id, check=False).returncode == 2
        fleet.shoal("cancel", fleet.run_id)
        fleet.wait(8)
        for number in range(2):
            assert f"run {fleet.run_id} was cancelled" in log_of(fleet, number)
            assert "in memory" not in log_of(fleet, number)
        found = picture(frontier, fleet.run_id)
        assert found.in_order
        assert (found.stats.leased, found.stats.dead, found.run.state) == (0, 0, "cancelled")
        again = start_worker(fleet)
        assert again.wait(10) == 2
        assert f"shoal resume {fleet.run_id}" in log_of(fleet, 2)
        fleet.shoal("rm", fleet.run_id)
        assert fleet.shoal("audit", fleet.run_id, check=False).returncode == 2


def test_a_host_is_blocked_and_slowed_down_while_it_is_crawled(frontier: str, tmp_path: Path) -> None:
    """What was leased before a command may still be fetched; that is never more than the host's concurrency."""
    most, other_delay = 3, 0.3
    with target(None, None) as site, QuickFleet(tmp_path, frontier, SPIDER) as fleet:
        url, other = site.urls
        host = host_of(url)
        urls = [f"{base}/{number}?wait=0.05" for number in range(2000) for base in site.urls]
        fleet.start(*urls, settings={"concurrency_per_host": most})
        for _ in range(2):
            start_worker(fleet)
        wait_for_workers(fleet)
        site.wait_for(10, url)

        fleet.shoal("hosts", "block", host, "--reason", "a complaint")
        blocked = len(site.visits(url))
        site.wait_for(30, other)
        assert len(site.visits(url)) <= blocked + most
        assert "a complaint" in fleet.shoal("hosts").stdout

        fleet.shoal("hosts", "unblock", host)
        site.wait_for(10, url)
        fleet.shoal("hosts", "set", host, "--delay", str(other_delay))
        slowed = len(site.visits(url))
        site.wait_for(most + 4, url)
        assert closest(site.visits(url)[slowed + most :]) >= other_delay

        fleet.shoal("hosts", "set", host, "--delay", "0", "--concurrency", "12")
        site.wait_until(lambda seen: most_at_once([visit for visit in seen if visit.host == host]) > most)
        assert most_at_once(site.visits(url)) <= 12
        assert most_at_once(site.visits(other)) == most
        for process in fleet.processes:
            process.terminate()
        fleet.wait(8)
        assert picture(frontier, fleet.run_id).in_order
