"""What a run leaves behind for those who watch it: samples, reports of processes, the last items."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from shoal.frontier import join_store
from shoal.ports import Store
from shoal.runs.reports import ProcessReport, field_coverage, read_processes, read_recent_items
from shoal.runs.samples import read_history
from tests.acceptance.fleets import SHOAL, SPIDER, Fleet, InProcessFleet, frontier_url, site
from tests.acceptance.serving import until
from tests.support import forking

PAGES = 60
T = TypeVar("T")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with site(PAGES) as made:
        yield made


def ask(frontier: str, question: Callable[[Store], Awaitable[T]]) -> T:
    async def work() -> T:
        store = await join_store(frontier, readonly=True)
        try:
            return await question(store)
        finally:
            await store.close()

    return asyncio.run(work())


def reports_of(fleet: Fleet) -> list[ProcessReport]:
    return ask(fleet.frontier, lambda store: read_processes(store, fleet.run_id))


def test_a_crawl_in_a_file(tmp_path: Path, url: str) -> None:
    (tmp_path / "alone.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    frontier = f"sqlite:///{tmp_path}/crawl.db"
    command = [*SHOAL, "run", "alone.py", "-q", "--frontier", frontier]
    process = forking.Popen(command, cwd=tmp_path)
    assert process.wait(60) == 0

    async def question(store: Store) -> None:
        (run,) = await store.list_runs()
        (report,) = await read_processes(store, run.run_id)
        assert (report.role, report.pid, report.machine) == ("crawl", process.pid, socket.gethostname())
        assert (report.pages, report.items, report.failed, report.ended) == (PAGES + 1, PAGES + 1, 0, True)
        assert report.at >= report.started_at >= run.created_at
        samples = await read_history(store, run.run_id)
        assert (samples[-1].done, samples[-1].items, samples[-1].pushed) == (PAGES + 1, PAGES + 1, PAGES + 1)
        assert {each.field: each.share for each in field_coverage([report])} == {"url": 1.0, "title": 1.0}
        items = await read_recent_items(store, run.run_id)
        assert len(items) == 20
        assert all(set(msgspec.json.decode(item)) == {"url", "title"} for item in items)

    ask(frontier, question)
    forking.run([*SHOAL, "rm", _only_run(frontier), "--frontier", frontier], cwd=tmp_path, check=True)
    assert ask(frontier, lambda store: store.list_documents("run/")) == []


def test_commands(tmp_path: Path, url: str) -> None:
    """Two runs of a spider: their history, their processes, and what changed from one to the other."""
    spider = 'REFUSED = "http://127.0.0.1:9/refused"\n' + SPIDER + f'    start_urls = ["{url}/"]\n'
    spider += '    settings = {**settings, "retry.max_attempts": 1}\n'
    with InProcessFleet(tmp_path, f"sqlite:///{tmp_path}/crawl.db", spider, name="alone.py") as fleet:
        command = [*SHOAL, "run", "alone.py", "-q", "--frontier", fleet.frontier, "--new-run"]
        forking.run([*command, "--max-pages", "20"], cwd=tmp_path, check=True, timeout=60)
        (tmp_path / "alone.py").write_text(spider.replace('"title":', '"heading":').replace('/"]', '/", REFUSED]'))
        forking.run(command, cwd=tmp_path, check=True, timeout=60)
        newest, oldest = [line.split()[0] for line in fleet.shoal("runs").stdout.splitlines()[1:]]

        lines = fleet.shoal("history", newest).stdout.splitlines()
        assert lines[-1].split()[2:6] == [str(PAGES + 1), "0", "1", str(PAGES + 1)]
        last = [msgspec.json.decode(line) for line in fleet.shoal("history", "--json").stdout.splitlines()][-1]
        assert (last["run_id"], last["done"], last["failed"]) == (newest, PAGES + 1, 1)

        assert f"no process works on run {newest}; 1 have ended" in fleet.shoal("workers").stdout
        (line,) = fleet.shoal("workers", "--all").stdout.splitlines()[1:]
        assert line.split()[1:3] == ["ended", "crawl"]

        compared = fleet.shoal("compare", oldest, newest).stdout
        rows = {" ".join(words[:-3]): words[-3:] for line in compared.splitlines()[2:] if (words := line.split())}
        assert "stopped at the limit scope.max_pages=" in compared
        assert rows["pages"] == ["20", str(PAGES + 1), "+205.0%"]
        assert "failed: connect" in compared
        assert "field heading" in compared
        found = [
            msgspec.json.decode(line) for line in fleet.shoal("compare", oldest, newest, "--json").stdout.splitlines()
        ]
        shares = {each["name"]: (each["a"], each["b"]) for each in found if each["unit"] == "share"}
        assert shares == {"field heading": (None, 1.0), "field title": (1.0, None), "field url": (1.0, 1.0)}

        assert "0 requests" in fleet.shoal("retry-failed", "--host", "other.example").stdout
        assert "0 requests" in fleet.shoal("retry-failed", "--url", "*/other").stdout
        assert (
            "1 request is queued again"
            in fleet.shoal("retry-failed", "--host", "127.0.0.1:9", "--url", "*refused").stdout
        )
        assert "is not a host" in fleet.shoal("retry-failed", "--host", "a/b", check=False).stderr


def _only_run(frontier: str) -> str:
    (run,) = ask(frontier, lambda store: store.list_runs())
    return run.run_id


def test_workers_on_redis(tmp_path: Path) -> None:
    """Two workers report while they work. The report of a worker that is killed does not say that it ended."""
    with site(2000, latency=0.2) as slow, Fleet(tmp_path, frontier_url("redis")) as fleet:
        fleet.start(f"{slow}/", settings={"concurrency": 1})
        workers = [fleet.worker(), fleet.worker()]
        until(lambda: len(reports_of(fleet)) == 2, what="two reports")
        until(lambda: sum(each.items_counted.get("item", 0) for each in reports_of(fleet)) > 0, what="an item")
        until(lambda: len(ask(fleet.frontier, lambda store: read_history(store, fleet.run_id))) >= 2, what="samples")
        found = {each.pid: each for each in reports_of(fleet)}
        assert found.keys() == {worker.pid for worker in workers}
        assert {(each.role, each.epoch, each.slot == each.name) for each in found.values()} == {("worker", 1, True)}
        workers[0].send_signal(signal.SIGKILL)
        workers[1].send_signal(signal.SIGTERM)
        workers[1].wait(30)
        ended = {each.pid: each.ended for each in reports_of(fleet)}
        assert ended == {workers[0].pid: False, workers[1].pid: True}


def test_processes_of_one_machine(tmp_path: Path, url: str) -> None:
    (tmp_path / "alone.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    frontier = f"sqlite:///{tmp_path}/crawl.db"
    command = [*SHOAL, "run", "alone.py", "-q", "--frontier", frontier, "--processes", "2"]
    forking.run(command, cwd=tmp_path, check=True, timeout=60)
    run_id = _only_run(frontier)
    reports = ask(frontier, lambda store: read_processes(store, run_id))
    assert sorted(each.role for each in reports) == ["crawl", "worker", "worker"]
    assert sum(each.pages for each in reports) == PAGES + 1
    assert all(each.ended for each in reports)
