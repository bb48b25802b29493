"""A worker or a Runner that is frozen while it writes an output: it joins again, and the output is complete."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from shoal.frontier import open_store
from shoal.ports import Frontier, RoleState
from shoal.sinks.drainer import position_of
from tests.acceptance.clusters import SPIDER, Cluster, urls
from tests.acceptance.fleets import KINDS, frontier_url
from tests.acceptance.forked_workers import ForkedFleet, ForkedWorker
from tests.acceptance.serving import until
from tests.acceptance.target import Target, target
from tests.acceptance.test_worker_sessions import held
from tests.support import forking
from tests.support.databases import PostgresServer, shared

SESSION = 1.5
PAGES = 3000
ATTEMPTS = {"retry.max_attempts": 100}  # a freeze costs the pages in flight an attempt
SETTINGS = {"lease.ttl": 1.5, "worker.session": SESSION}

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.timeout(300)]


class Output:
    """An output, and the URLs in it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._table = f"frozen_{secrets.token_hex(6)}" if kind == "database" else None
        self.spec = str(folder / "items.jsonl")
        if self._table is not None:
            self.spec = f"{shared(PostgresServer).url}?table={self._table}"

    def urls(self) -> list[str]:
        if self._table is not None:
            return asyncio.run(self._rows(self._table))
        return [json.loads(line)["url"] for line in Path(self.spec).read_text().splitlines()]

    async def _rows(self, table: str) -> list[str]:
        connection = await asyncpg.connect(shared(PostgresServer).url)
        try:
            return [row["url"] for row in await connection.fetch(f"SELECT url FROM {table}")]
        finally:
            await connection.close()


@pytest.fixture(params=["file", "database"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return Output(request.param, tmp_path)


@pytest.fixture
def freezes(thorough: bool) -> int:
    return 12 if thorough else 4


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as running:
        yield running


def role_of(fleet: ForkedFleet) -> RoleState | None:
    """The role of the only output."""

    async def look() -> RoleState | None:
        store = await open_store(fleet.frontier)
        try:
            frontier: Frontier = await store.frontier(fleet.run_id)
            return next((role for role in await frontier.roles() if role.role.startswith("sink:")), None)
        finally:
            await store.close()

    return asyncio.run(look())


def is_writing(fleet: ForkedFleet, after: int = 0) -> bool:
    """Whether a process holds the role and the output has more than ``after`` items."""
    role = role_of(fleet)
    return role is not None and role.held and position_of(role.cursor) > after


def position(fleet: ForkedFleet) -> int:
    role = role_of(fleet)
    return 0 if role is None else position_of(role.cursor)


def writer_of(workers: Sequence[ForkedWorker]) -> ForkedWorker:
    """The process that took the role last. Lines of the log begin with the time."""
    taken = [
        (line, number)
        for number, worker in enumerate(workers)
        for line in worker.log.read_text().splitlines()
        if "this process writes the items" in line
    ]
    return workers[max(taken)[1]]


def freeze(worker: ForkedWorker, is_lost: Callable[[], bool], successor: ForkedWorker) -> None:
    """Freeze a process until it counts as dead and another one has had its role. Wait until it has joined again.

    While a frozen process has a file open, the other one cannot write it: it stands by."""
    lines = ("this process writes the items", "stands by")
    before = {line: successor.log.read_text().count(line) for line in lines}
    joined = worker.log.read_text().count("joins again")
    worker.signal(signal.SIGSTOP)
    until(is_lost)
    until(lambda: any(successor.log.read_text().count(line) > count for line, count in before.items()))
    worker.signal(signal.SIGCONT)
    until(lambda: not worker.is_alive or worker.log.read_text().count("joins again") > joined)
    assert worker.is_alive, worker.log.read_text()[-3000:]


def is_fenced(fleet: ForkedFleet, worker: ForkedWorker) -> bool:
    return worker.pid not in held(fleet)


def has_slot(cluster: Cluster, name: str) -> bool:
    return name in cluster.with_role("Runner")


def test_a_worker_joins_again(kind: str, output: Output, tmp_path: Path, site: Target, freezes: int) -> None:
    pages = urls(site, PAGES, wait=0.3)
    with ForkedFleet(tmp_path, frontier_url(kind), SPIDER) as fleet:
        fleet.start(*pages, settings=ATTEMPTS)
        workers = [fleet.fork("-o", output.spec, settings=SETTINGS) for _ in range(2)]
        for _ in range(freezes):
            written = position(fleet)
            until(partial(is_writing, fleet, written))
            writer = writer_of(workers)
            (other,) = (each for each in workers if each is not writer)
            freeze(writer, partial(is_fenced, fleet, writer), other)
        site.hurry()
        fleet.wait(120)
    assert sorted(output.urls()) == sorted(pages)


def test_a_runner_joins_again(kind: str, output: Output, tmp_path: Path, site: Target, freezes: int) -> None:
    pages = urls(site, PAGES, wait=0.3)
    frontier = frontier_url(kind)
    with Cluster(tmp_path, frontier, frontier) as cluster:
        cluster.start(*pages, settings=ATTEMPTS)
        for name in ("crawler_1", "crawler_2"):
            cluster.node(name, "-o", output.spec, runner=1, backup=1, session=SESSION, settings={"lease.ttl": 1.5})
        for _ in range(freezes):
            cluster.until_complete(runner=1, backup=1)
            written = position(cluster)
            until(partial(is_writing, cluster, written))
            (runner,), (backup,) = cluster.with_role("Runner"), cluster.with_role("Backup Runner")
            is_lost = partial(has_slot, cluster, backup)
            freeze(cluster.nodes[runner], is_lost, cluster.nodes[backup])
        site.hurry()
        cluster.wait(120)
    assert sorted(output.urls()) == sorted(pages)


def test_a_runner_takes_its_slot_again(kind: str, output: Output, tmp_path: Path, site: Target, freezes: int) -> None:
    """There is no Backup Runner: the other Runner only writes its output."""
    pages = urls(site, PAGES, wait=0.3)
    frontier = frontier_url(kind)
    with Cluster(tmp_path, frontier, frontier) as cluster:
        cluster.start(*pages, settings=ATTEMPTS)
        for name in ("crawler_1", "crawler_2"):
            cluster.node(name, "-o", output.spec, runner=2, backup=0, session=SESSION, settings={"lease.ttl": 1.5})
        for _ in range(freezes // 2):
            cluster.until_complete(runner=2, backup=0)
            written = position(cluster)
            until(partial(is_writing, cluster, written))
            writer = writer_of(cluster.workers)
            (name,) = (name for name, node in cluster.nodes.items() if node is writer)
            (other,) = (node for node in cluster.workers if node is not writer)
            freeze(writer, lambda name=name: not has_slot(cluster, name), other)  # type: ignore[misc]
        cluster.until_complete(runner=2, backup=0)
        site.hurry()
        cluster.wait(120)
    assert sorted(output.urls()) == sorted(pages)


PROGRAM = """
import sys
from shoal import Spider, crawl

class Pages(Spider):
    name = "pages"
    start_urls = sys.argv[2:]

    def parse(self, response):
        yield {"url": response.url}

done = crawl(Pages, {"frontier": sys.argv[1], "download_delay": 0, "lease.ttl": 1.5, "worker.session": 1.5,
                     "throttle.enabled": False, "robots.obey": False, "retry.max_attempts": 100})
print(*(item["url"] for item in done.items), done.summary.state, sep="\\n")
"""


def test_a_program_that_collects_items(kind: str, tmp_path: Path, site: Target) -> None:
    """Another process of its run fences it. It gets its role again, and each item once."""
    pages = urls(site, 60, wait=0.5)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), frontier_url(kind), *pages]
    start = partial(forking.Popen, command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with start() as frozen, start() as other:
        site.wait_for(10)
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(3 * SESSION)  # the other process fences it meanwhile
        frozen.send_signal(signal.SIGCONT)
        site.hurry()
        answers = [program.communicate(timeout=120)[0].split() for program in (frozen, other)]
    for *collected, state in answers:
        assert state == "finished"
        assert sorted(collected) == sorted(pages)
