"""Workers of a fleet are killed at random moments, between any two steps, or by their own pages. Nothing is lost."""

from __future__ import annotations

import asyncio
import csv
import json
import random
import re
import secrets
import signal
import socket
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import asyncpg
import pymysql
import pytest

from shoal.config import load_config
from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Frontier, History, Stats
from shoal.runs.start import start_run
from shoal.sinks import open_sink
from shoal.sinks.drainer import export
from shoal.spider import load_spider
from tests.acceptance.crashing_worker import Crash
from tests.acceptance.fleets import KINDS, SHOAL, SPIDER, Fleet, frontier_url, site, visits
from tests.acceptance.forked_workers import ForkedFleet, ForkedWorker
from tests.support import forking
from tests.support.databases import MariaServer, PostgresServer, free_port, shared
from tests.support.patience import allowance

T = TypeVar("T")

PAGES = 900
HERE = Path(__file__).parent

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.timeout(240)]


# -- looking at what became of it


def ask(fleet: Fleet, question: Callable[[Frontier], Awaitable[T]]) -> T:
    """What the frontier itself says of the run."""

    async def work() -> T:
        store = await open_store(fleet.frontier)
        try:
            return await question(await store.frontier(fleet.run_id))
        finally:
            await store.close()

    return asyncio.run(work())


def ledger(fleet: Fleet) -> Stats:
    return ask(fleet, lambda frontier: frontier.stats())


def until(fleet: Fleet, reached: Callable[[Stats], bool], *, timeout: float = 60.0) -> Stats:
    """Look at the ledger as often as the server answers, until it is so."""

    async def watch(frontier: Frontier) -> Stats:
        async with asyncio.timeout(timeout):
            while not reached(stats := await frontier.stats()):
                await asyncio.sleep(0.002)
        return stats

    return ask(fleet, watch)


def wait_until(so: Callable[[], bool], *, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def histories(fleet: Fleet, urls: list[str]) -> list[History]:
    async def find(frontier: Frontier) -> list[History]:
        return [found for url in urls if (found := await frontier.find(Request(url))) is not None]

    return ask(fleet, find)


def all_pages(url: str, pages: int) -> Counter[str]:
    return Counter([f"{url}/", *(f"{url}/p/{number}" for number in range(pages))])


def items_in(spec: str) -> Counter[str]:
    """The URLs of the items in an output, and how often each is there."""
    if spec.startswith("postgresql:"):
        return asyncio.run(_in_postgres(spec))
    if spec.startswith("mysql:"):
        return _in_mysql(spec)
    path = Path(spec)
    if path.suffix == ".jsonl":
        return Counter(json.loads(line)["url"] for line in path.read_text().splitlines())
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return Counter(row["url"] for row in csv.DictReader(file))
    with closing(sqlite3.connect(path)) as db:
        return Counter(url for (url,) in db.execute("SELECT url FROM item"))


async def _in_postgres(spec: str) -> Counter[str]:
    address, _, table = spec.partition("?table=")
    db = await asyncpg.connect(address)
    try:
        return Counter(row["url"] for row in await db.fetch(f'SELECT url FROM "{table}"'))
    finally:
        await db.close()


def _in_mysql(spec: str) -> Counter[str]:
    address, table = urlsplit(spec), spec.partition("?table=")[2]
    db = pymysql.connect(
        host=address.hostname, port=address.port or 0, user=address.username, password=address.password or "",
        database=address.path[1:],
    )  # fmt: skip
    with closing(db), db.cursor() as cursor:
        cursor.execute(f"SELECT url FROM `{table}`")
        return Counter(url for (url,) in cursor.fetchall())


def new_table(server: PostgresServer | MariaServer) -> str:
    return f"{server.url}?table=items_{secrets.token_hex(4)}"


def assert_exactly(outputs: list[str], expected: Counter[str]) -> None:
    for spec in outputs:
        found = items_in(spec)
        missing, extra = expected - found, found - expected
        assert not missing, f"{spec}: {missing.total()} items are missing, such as {sorted(missing)[:3]}"
        assert not extra, f"{spec}: {extra.total()} items too many, such as {sorted(extra)[:3]}"


def assert_balanced(fleet: Fleet) -> None:
    """The ledger, counted anew, and the run's state."""
    told = fleet.shoal("audit", fleet.run_id).stdout
    assert "balanced: nothing lost" in told, told
    assert "finished" in told.splitlines()[0], told


def state_of(fleet: Fleet) -> str | None:
    async def work() -> str | None:
        store = await open_store(fleet.frontier)
        try:
            run = await store.get_run(fleet.run_id)
            return None if run is None else run.state
        finally:
            await store.close()

    return asyncio.run(work())


def begin(fleet: Fleet, urls: Sequence[str], settings: dict[str, Any]) -> None:
    """Like `shoal start`, without the time that a command of its own takes."""

    async def work() -> None:
        spider = load_spider(str(fleet.folder / fleet.name))()
        config = load_config(spider=spider.settings, code={**settings, "frontier": fleet.frontier}).config
        store = await open_store(fleet.frontier)
        try:
            started = await start_run(store, spider, config, urls=urls, new_run=True)
        finally:
            await store.close()
        fleet.run_id = started.run.run_id

    asyncio.run(work())


def exported(fleet: Fleet, file: Path) -> str:
    """Like `shoal export`."""
    ask(fleet, lambda frontier: export(frontier, open_sink(str(file))))
    return str(file)


def log_of(fleet: Fleet, number: int) -> str:
    return (fleet.folder / f"worker-{number}.log").read_text()


# -- 1: killed at any moment


def test_a_page_limit_is_reached_though_a_worker_dies(tmp_path: Path, kind: str) -> None:
    """It had the last pages that there may be: they are had by another, and the run is finished."""
    fleet = Fleet(tmp_path, frontier_url(kind))
    with site(50, latency=1.0) as url, closing(fleet):
        fleet.start(f"{url}/", settings={"scope.max_pages": 8, "lease.ttl": 2})
        first = fleet.worker(settings={"lease.ttl": 2})
        end = time.monotonic() + 30
        while (stats := ask(fleet, lambda frontier: frontier.stats())).done + stats.leased < 8:
            assert time.monotonic() < end, stats
        first.kill()
        fleet.worker(settings={"lease.ttl": 2})
        fleet.wait()
        assert ask(fleet, lambda frontier: frontier.stats()).done == 8
        assert "finished" in fleet.shoal("runs").stdout


def test_a_worker_killed_each_second_costs_nothing(kind: str, tmp_path: Path) -> None:
    outputs = [new_table(shared(PostgresServer)), new_table(shared(MariaServer)), str(tmp_path / "items.db")]
    options = [word for output in outputs for word in ("-o", output)]
    settings = {"lease.ttl": 2.5, "retry.max_attempts": 1000, "concurrency_per_host": 200}
    moments = random.Random(time.time_ns())
    with site(PAGES, latency=0.26) as url, ForkedFleet(tmp_path, frontier_url(kind)) as fleet:
        fleet.start(f"{url}/", settings=settings)
        living = [fleet.fork(*options, settings=settings) for _ in range(3)]
        killed: list[ForkedWorker] = []
        while all(worker.is_alive for worker in living) and len(killed) < 90:
            time.sleep(1.0)
            victim = moments.choice(living)
            victim.kill()
            if victim.wait(0) == -signal.SIGKILL:  # else it had just left by itself
                killed.append(victim)
                living[living.index(victim)] = fleet.fork(*options, settings=settings)
        fleet.wait(90)

        codes = [worker.wait(0) for worker in fleet.workers if worker not in killed]
        assert codes == [0, 0, 0]
        assert len(killed) >= 6, "the crawl was over too soon to prove anything"
        expected = all_pages(url, PAGES)
        assert_exactly(outputs, expected)
        exports = [str(tmp_path / f"export{ending}") for ending in (".jsonl", ".csv")]
        fleet.shoal("export", fleet.run_id, "-o", exports[0], "-o", exports[1])
        assert_exactly(exports, expected)
        assert_balanced(fleet)
        assert ledger(fleet).done == ledger(fleet).items == PAGES + 1


# -- 2: killed between any two steps

CRASH_PAGES = 120
FILE, TABLE = "items.jsonl", "?table="
STEPS = {
    "leased": 3,
    "fetched": 30,
    "parsed": 30,
    "completing": 3,
    "completed": 3,
    f"written {FILE}": 3,
    f"flushed {FILE}": 2,
    f"saved {FILE}": 2,
    f"written {TABLE}": 3,
    f"flushed {TABLE}": 2,
    f"saved {TABLE}": 2,
}
"""Where a worker dies, and at which passing: something was done before, and something is left."""


class Crashed:
    """A run whose first worker died at a step, and whose second one ended it."""

    def __init__(self, folder: Path, frontier: str, table: str) -> None:
        folder.mkdir()
        self.fleet = ForkedFleet(folder, frontier)
        self.outputs = [str(folder / FILE), table]
        self.codes: list[int | None] = []
        self.url = ""
        self._report = folder / "died.txt"

    def start(self, url: str) -> None:
        self.url = url
        begin(self.fleet, [f"{url}/"], {"retry.max_attempts": 50, "concurrency_per_host": 1000})

    def fork(self, ttl: float, step: str | None = None) -> ForkedWorker:
        options = [word for output in self.outputs for word in ("-o", output)]
        crash = None if step is None else Crash(step, STEPS[step], str(self._report))
        return self.fleet.fork(*options, settings={"lease.ttl": ttl, "concurrency": 4, "lease.batch": 8}, crash=crash)

    @property
    def died_on(self) -> list[str]:
        return self._report.read_text().splitlines()


def crash_everywhere(kind: str, folder: Path) -> dict[str, Crashed]:
    """A run for each step, all at the same time."""
    frontier, server = frontier_url(kind), shared(MariaServer if kind == "redis" else PostgresServer)
    runs = {step: Crashed(folder / str(i), frontier, new_table(server)) for i, step in enumerate(STEPS)}
    with site(CRASH_PAGES, latency=0.05) as url, ExitStack() as stack:
        for run in runs.values():
            run.start(url)
            stack.enter_context(run.fleet)
        dying = [run.fork(3.0, step) for step, run in runs.items()]
        first = [worker.wait(60) for worker in dying]
        healthy = [run.fork(30.0) for run in runs.values()]
        for code, worker, run in zip(first, healthy, runs.values(), strict=True):
            run.codes = [code, worker.wait(60)]
    return runs


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Crashed]]:
    return cache(lambda kind: crash_everywhere(kind, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize("step", STEPS)
def test_killed_between_two_steps(
    kind: str, step: str, crashes: Callable[[str], dict[str, Crashed]], tmp_path: Path
) -> None:
    run = crashes(kind)[step]
    logs = [worker.log.read_text() for worker in run.fleet.workers]
    assert run.codes == [-signal.SIGKILL, 0], logs

    expected = all_pages(run.url, CRASH_PAGES)
    assert_exactly(run.outputs, expected)
    assert_exactly([exported(run.fleet, tmp_path / "again.jsonl")], expected)
    counted, kept = ask(run.fleet, lambda frontier: frontier.audit()), ledger(run.fleet)
    assert counted.balanced
    assert counted == kept
    assert counted.done == counted.pushed == CRASH_PAGES + 1
    assert state_of(run.fleet) == "finished"

    attempts = {found.url: found.attempts for found in histories(run.fleet, run.died_on)}
    if step in ("leased", "fetched", "parsed"):
        assert attempts
        assert set(attempts.values()) == {2}, attempts  # a crash counts
    elif step == "completed":
        assert attempts
        assert set(attempts.values()) == {1}, attempts  # it was done
    elif step == "completing":
        assert len(attempts) == len(run.died_on) > 0
        assert len(set(attempts.values())) == 1, "the batch happened in part"


# -- 3: killed by its own page

POISON = """
import os, signal
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8}

    def parse(self, response):
        if response.url.endswith("/p/57"):
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""


def test_a_page_that_kills_its_worker_is_dead_after_its_attempts(kind: str, tmp_path: Path) -> None:
    """Those that were in flight beside it lost attempts too, but not their last one."""
    settings = {"retry.max_retries": 3, "concurrency_per_host": 200, "lease.ttl": 2.5}
    with site(300, latency=0.02) as url, Fleet(tmp_path, frontier_url(kind), POISON) as fleet:
        fleet.start(f"{url}/", settings=settings)
        supervisor = fleet.worker("--processes", "2", "-o", "items.jsonl", settings=settings)
        fleet.wait(90)
        told = log_of(fleet, 0)
        assert supervisor.returncode == 0, told
        assert told.count("was killed by signal 9") in (3, 4), told  # a machine that stalls may cost it an attempt too

        poison = f"{url}/p/57"
        assert_exactly([str(tmp_path / "items.jsonl")], all_pages(url, 300) - Counter([poison]))
        assert_balanced(fleet)
        why = fleet.shoal("why", poison, "--run-id", fleet.run_id).stdout
        assert re.search(r"state +failed", why), why
        assert re.search(r"reason +its worker was lost in attempt 4", why), why
        assert re.search(r"attempts +4", why), why
        assert why.count("lease lost: its worker was lost") == 4, why
        assert fleet.shoal("audit", fleet.run_id).stdout.count("      worker lost ") == 1


def test_attempts_are_the_runs_and_not_each_workers(kind: str, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/"
    with ForkedFleet(tmp_path, frontier_url(kind)) as fleet:
        begin(fleet, [nowhere], {"retry.max_attempts": 5})
        fleet.fork(settings={"retry.base_delay": 0.01})
        fleet.wait()
        (found,) = histories(fleet, [nowhere])
        assert (found.state, found.attempts) == ("dead", 5)


# -- not dead, only asleep

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\nConnection: close\r\n\r\n<h1>Page</h1>"


def test_a_worker_that_wakes_up_late_disturbs_nobody(kind: str, tmp_path: Path) -> None:
    output = str(tmp_path / "items.jsonl")
    with Listener() as server, ForkedFleet(tmp_path, frontier_url(kind)) as fleet:
        pages = [f"{server.url}/p/{number}" for number in range(8)]
        begin(fleet, pages, {"concurrency_per_host": 100, "retry.max_attempts": 50})
        sleeper = fleet.fork("-o", output, settings={"lease.ttl": 2})
        asked_first = server.requests(8)
        sleeper.signal(signal.SIGSTOP)
        successor = fleet.fork("-o", output, settings={"lease.ttl": 60})
        asked_again = server.requests(8)
        for connection in asked_first:
            connection.sendall(ANSWER)
        sleeper.signal(signal.SIGCONT)
        wait_until(lambda: sleeper.log.read_text().count("lease lost") >= 8)
        with pytest.raises(TimeoutError):  # nobody asks a third time: the successor's leases hold
            server.requests(1, timeout=1.0)
        for connection in asked_again:
            connection.sendall(ANSWER)
        fleet.wait()
        assert "lease lost" not in successor.log.read_text()
        assert_exactly([output, exported(fleet, tmp_path / "again.jsonl")], Counter(pages))
        assert_balanced(fleet)
        assert [page.attempts for page in histories(fleet, pages)] == [2] * 8


class Listener:
    """A server that answers when the test does."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def requests(self, count: int, *, timeout: float = 60.0) -> list[socket.socket]:
        """The next connections on which something is asked."""
        self._socket.settimeout(timeout)
        found = [self._socket.accept()[0] for _ in range(count)]
        self._connections += found
        assert all(connection.recv(1000).startswith(b"GET /p/") for connection in found)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each in (self._socket, *self._connections):
            each.close()


# -- 4: two runs at the same time

NAMED = SPIDER.replace('name = "pages"', 'name = "NAME"').replace('{"url"', '{"by": self.name, "url"')


@contextmanager
def two_runs(kind: str, folder: Path, url: str, settings: dict[str, Any]) -> Iterator[list[ForkedFleet]]:
    """Two spiders on one frontier, both of the whole site."""
    frontier = frontier_url(kind)
    with ExitStack() as stack:
        fleets = []
        for name in ("cod", "eel"):
            fleet = ForkedFleet(folder, frontier, NAMED.replace("NAME", name), name=f"{name}.py")
            fleets.append(stack.enter_context(fleet))
            begin(fleet, [f"{url}/"], settings)
        yield fleets


def assert_each_has_its_own(fleets: list[ForkedFleet], expected: Counter[str]) -> None:
    for fleet in fleets:
        output = fleet.folder / f"{fleet.name}.jsonl"
        assert_exactly([exported(fleet, output)], expected)
        assert {json.loads(line)["by"] for line in output.read_text().splitlines()} == {fleet.name.removesuffix(".py")}
        assert ask(fleet, lambda frontier: frontier.audit()).balanced
        assert state_of(fleet) == "finished"


def test_two_runs_share_the_concurrency_of_a_host(kind: str, tmp_path: Path) -> None:
    settings = {"concurrency_per_host": 3, "lease.ttl": 30}
    with site(120, latency=0.03) as url, two_runs(kind, tmp_path, url, settings) as fleets:
        for fleet in (*fleets, *fleets):
            fleet.fork(settings=settings)
        for fleet in fleets:
            fleet.wait()
        seen = visits(url)
        assert set(Counter(path for _, path, _, _ in seen).values()) == {2}
        assert most_at_once(seen) == 3  # and not fewer: there is always more to do
        assert_each_has_its_own(fleets, all_pages(url, 120))


def test_two_runs_share_the_delay_of_a_host(kind: str, tmp_path: Path) -> None:
    settings = {"download_delay": 0.1, "lease.ttl": 30}
    with site(12, latency=0.02) as url, two_runs(kind, tmp_path, url, settings) as fleets:
        for fleet in fleets:
            fleet.fork(settings=settings)
        for fleet in fleets:
            fleet.wait()
        seen = visits(url)
        assert set(Counter(path for _, path, _, _ in seen).values()) == {2}
        gaps = [later[2] - earlier[3] for earlier, later in zip(seen, seen[1:], strict=False)]
        assert min(gaps) >= 0.1, f"two requests were {min(gaps):.3f} s apart"
        assert_each_has_its_own(fleets, all_pages(url, 12))


def most_at_once(seen: list[tuple[str, str, float, float]]) -> int:
    """Of what the site saw: a request ends before another begins at the same moment."""
    changes = sorted([(visit[2], 1) for visit in seen] + [(visit[3], -1) for visit in seen])
    return max(accumulate(change for _, change in changes))


# -- 5: seeding

SEEDS = 20_000
SELF_SEEDING = """
import asyncio
from shoal import Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8}

    async def start(self):
        for number in range(300):
            yield Request(f"{self.site}/p/{number}")
            if number % 10 == 9:
                await asyncio.sleep(0.1)

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
"""


def start_and_kill(fleet: Fleet, command: list[str], least: int, most: int) -> int:
    """Kill the command when the run has at least so many requests; how many it has then."""
    for _ in range(5):
        with forking.Popen([*command, "--frontier", fleet.frontier], cwd=fleet.folder, text=True) as starter:
            try:
                fleet.run_id = newest_run(fleet, starter)
                until(fleet, lambda stats: stats.pushed >= least)
            finally:
                starter.kill()
        if (pushed := ledger(fleet).pushed) < most:
            return pushed
        fleet.frontier = frontier_url("redis" if fleet.frontier.startswith("redis") else "postgresql")  # too late
    pytest.fail("it could not be killed in the middle")


def newest_run(fleet: Fleet, starter: subprocess.Popen[str]) -> str:
    async def look() -> str:
        store = await open_store(fleet.frontier)
        try:
            while not (runs := await store.list_runs()):
                assert starter.poll() is None, "it ended without a run"
                await asyncio.sleep(0.005)
            return runs[0].run_id
        finally:
            await store.close()

    return asyncio.run(look())


def test_seeding_that_was_killed_goes_on(kind: str, tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:9/{number}" for number in range(SEEDS)]
    lines = list(urls)
    junk = {5: "not a url", 12_000: "http://", 19_990: "ftp://127.0.0.1/x"}
    for number, text in junk.items():
        lines.insert(number - 1, text)
    (tmp_path / "many.txt").write_text("\n".join(lines))
    with Fleet(tmp_path, frontier_url(kind)) as fleet:
        command = ["start", fleet.name, "--urls-file", "many.txt", "--set=lease.ttl=2"]
        before = start_and_kill(fleet, [*SHOAL, *command], 500, SEEDS)
        assert ledger(fleet).seeding

        done = fleet.shoal(*command)
        answer = json.loads(done.stdout)
        assert answer["run_id"] == fleet.run_id
        assert before + answer["enqueued"] == SEEDS
        assert answer["duplicates"] == 0
        for number in junk:
            assert f"many.txt, line {number}: " in done.stderr
        assert answer["unreadable"] == len(junk)
        after = ledger(fleet)
        assert (after.pushed, after.ready, after.seeding) == (SEEDS, SEEDS, False)
        known = ask(fleet, lambda frontier: frontier.push([Request(url) for url in urls]))
        assert (known.added, known.duplicates) == (0, SEEDS)


def test_a_worker_takes_over_the_seeding_of_a_spider(kind: str, tmp_path: Path) -> None:
    output = str(tmp_path / "items.jsonl")
    with site(300) as url, ForkedFleet(tmp_path, frontier_url(kind), SELF_SEEDING) as fleet:
        settings = {"lease.ttl": 2, "concurrency_per_host": 100}
        options = [f"--set={key}={value}" for key, value in settings.items()]
        start_and_kill(fleet, [*SHOAL, "start", fleet.name, "-a", f"site={url}", *options], 20, 300)
        assert ledger(fleet).seeding
        fleet.fork("-o", output, settings=settings)
        fleet.wait()
        assert_exactly([output], all_pages(url, 300) - Counter([f"{url}/"]))
        assert_balanced(fleet)
        assert ledger(fleet).pushed == 300


# -- 6: asked to stop


def test_a_task_that_is_cancelled_ends(kind: str, tmp_path: Path) -> None:
    """Whatever it is waiting for: a worker ends by cancelling its helpers, all of which talk to the server."""

    async def work(frontier: Frontier) -> None:
        async def talk() -> None:
            while True:
                await frontier.stats()

        for moment in range(200):
            task = asyncio.create_task(talk())
            for _ in range(moment % 20):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=5.0)
            task.cancel()
            assert done, "it lives on"

    fleet = Fleet(tmp_path, frontier_url(kind))
    begin(fleet, ["http://127.0.0.1:9/"], {})
    ask(fleet, work)


def test_sigterm_gives_everything_back_at_once(kind: str, tmp_path: Path) -> None:
    settings = {"concurrency_per_host": 100, "lease.ttl": 300}
    with Listener() as server, Fleet(tmp_path, frontier_url(kind)) as fleet:
        urls = [f"{server.url}/p/{number}" for number in range(30)]
        fleet.start(*urls, settings=settings)
        worker = fleet.worker("-o", "items.jsonl", settings=settings)
        server.requests(8)  # as many as the spider has in flight
        assert ledger(fleet).leased > 8  # some were leased ahead
        worker.terminate()
        asked = time.monotonic()
        assert worker.wait(30) == 0, log_of(fleet, 0)
        assert time.monotonic() - asked < allowance(3.0)

        stats = ledger(fleet)
        assert (stats.ready, stats.leased, stats.waiting, stats.done) == (30, 0, 0, 0)
        found = histories(fleet, urls)
        assert [(history.state, history.attempts) for history in found] == [("ready", 0)] * 30
        why = fleet.shoal("why", urls[0], "--run-id", fleet.run_id).stdout
        assert re.search(r"attempts +0\b", why), why
        assert state_of(fleet) == "running"
