"""The same script on several nodes: they crawl one run together, and one of them writes its items."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import Config, Crawl, Node, Response, Spider
from shoal.errors import RunError
from shoal.frontier import open_store
from shoal.ports import Run
from shoal.runs.run_choice import WantedRun, choose_run
from shoal.runs.start import find_run, start_run
from shoal.sinks.drainer import split_role
from tests.acceptance.fleets import KINDS, frontier_url, site, visits
from tests.acceptance.test_database_sinks import Place
from tests.support import forking
from tests.support.databases import DatabaseServer, MariaServer, PostgresServer, shared
from tests.support.servers import SiteServer

PAGES = 300
SCRIPT = """
import logging, sys
from shoal import Config, Spider, crawl

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False, "concurrency": 4, "concurrency_per_host": 30}

    def parse(self, response):
        self.log.info("parsed %s", response.url)
        yield {"url": response.url}
        yield response.follow_all("a")

logging.basicConfig(level=logging.INFO)
frontier, output, start = sys.argv[1:]
config = Config.distributed(frontier=frontier, project_name="shop", download_delay=0, lease={"ttl": 4.0})
done = crawl(Pages, config, outputs=[output], arguments={"start_urls": [start]})
print(done.run.run_id, done.summary.state, flush=True)
"""


class Script:
    """One process that runs the script."""

    def __init__(self, folder: Path, number: int, *arguments: str) -> None:
        self.log = folder / f"{number}.log"
        with self.log.open("w") as log:
            self.process = forking.Popen(
                [sys.executable, folder / "script.py", *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )

    @property
    def writes(self) -> bool:
        return "this process writes the items" in self.log.read_text()

    @property
    def crawls(self) -> bool:
        return "parsed " in self.log.read_text()

    def ended(self) -> list[str]:
        out, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, self.log.read_text()[-3000:]
        return out.split()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("kind", "server"), [("redis", PostgresServer), ("postgresql", MariaServer)])
def test_scripts_that_start_together_crawl_one_run(kind: str, server: type[DatabaseServer], tmp_path: Path) -> None:
    place = asyncio.run(Place(shared(server)).create())
    frontier = frontier_url(kind)
    (tmp_path / "script.py").write_text(SCRIPT)
    with site(PAGES, latency=0.3) as url:
        scripts = [Script(tmp_path, number, frontier, place.spec("page"), url) for number in range(3)]
        try:
            until(lambda: all(script.crawls for script in scripts) and any(script.writes for script in scripts))
            (writer,) = (script for script in scripts if script.writes)
            writer.process.send_signal(signal.SIGKILL)
            ends = [script.ended() for script in scripts if script is not writer]
        finally:
            for script in scripts:
                script.process.kill()
                script.process.wait()
        fetched = Counter(path for _, path, _, _ in visits(url))
    assert ends[0] == ends[1]  # the same run
    assert ends[0][1] == "finished"
    assert any(script.writes for script in scripts if script is not writer), "nobody took over"
    rows = asyncio.run(place.query("SELECT url FROM page"))
    found = Counter(row["url"].removeprefix(url.rstrip("/")) for row in rows)
    assert set(found) == set(fetched)
    assert len(found) == PAGES + 1  # and the start page
    assert set(found.values()) == {1}
    assert sum(fetched.values()) <= PAGES + 1 + 10  # those that the killed one had begun, or not reported yet
    (run,) = asyncio.run(listed(frontier))
    assert (run.run_id, run.state, run.project) == (ends[0][0], "finished", "shop")


async def listed(frontier: str) -> list[Run]:
    store = await open_store(frontier)
    try:
        return await store.list_runs()
    finally:
        await store.close()


# -- which run


WANTED = WantedRun(spider="books", project="shop", start={"start_urls": ["http://a.example/"]}, new="never")


@pytest.mark.parametrize("kind", KINDS)
async def test_processes_agree_on_one_run(kind: str) -> None:
    url = frontier_url(kind)
    stores = await asyncio.gather(*(open_store(url) for _ in range(8)))
    try:
        for _ in range(5):
            chosen = await asyncio.gather(*(choose_run(store, WANTED) for store in stores))
            (run_id,) = {run.run_id for run in chosen}
            assert [run.run_id for run in await stores[0].list_runs(project="shop")] == [run_id]
            await stores[0].delete_run(run_id)
    finally:
        await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_whose_process_died_before_it_began_is_used(kind: str) -> None:
    store = await open_store(frontier_url(kind))
    try:
        await store.create_run(
            Run(run_id="left", spider="books", state="queued", created_at=0.0, settings=WANTED.start, project="shop")
        )
        assert (await choose_run(store, WANTED)).run_id == "left"
        assert len(await store.list_runs()) == 1
        elsewhere = WantedRun(spider="books", project="other", start=WANTED.start, new="never")
        assert (await choose_run(store, elsewhere)).run_id != "left"
    finally:
        await store.close()


async def test_the_policy_decides_about_finished_runs(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/x.db")
    try:
        first = await choose_run(store, WANTED)
        for policy in ("never", "after_finish"):
            assert (await choose_run(store, wanted(policy))).run_id == first.run_id
        await store.transition(first.run_id, "finished")
        assert (await choose_run(store, WANTED)).run_id == first.run_id
        second = await choose_run(store, wanted("after_finish"))
        assert second.run_id != first.run_id
        assert (await choose_run(store, wanted("after_finish"))).run_id == second.run_id
        third = await choose_run(store, wanted("always"))
        assert third.run_id not in (first.run_id, second.run_id)
    finally:
        await store.close()


# -- projects


class Leaf(Spider):
    name = "leaf"
    settings = {"download_delay": 0, "robots.obey": False}

    def parse(self, response: Response) -> object:
        return {"url": response.url}


@pytest.mark.parametrize("kind", ["sqlite", *KINDS])
async def test_projects_share_only_hosts(kind: str, tmp_path: Path) -> None:
    """The same spider in two projects on one store: each has its own run, items and roles."""
    url = f"sqlite:///{tmp_path}/x.db" if kind == "sqlite" else frontier_url(kind)
    runs: dict[str, str] = {}
    async with SiteServer(pages=30) as site:
        for project in ("a", "b", "a"):
            out = tmp_path / f"{project}.jsonl"
            config = {"frontier": url, "project_name": project}
            done = await Crawl(Leaf(start_urls=[site.url]), config, outputs=[str(out)])
            assert done.run is not None
            assert done.run.run_id == runs.setdefault(project, done.run.run_id)
            assert len(out.read_text().splitlines()) == 1
        assert runs["a"] != runs["b"]
        assert len(site.log) == 2  # the third crawl was already finished
    store = await open_store(url)
    try:
        for project, run_id in runs.items():
            assert [run.run_id for run in await store.list_runs("leaf", project)] == [run_id]
            frontier = await store.frontier(run_id)
            outputs = {split_role(role.role)[0] for role in await frontier.roles()}
            assert outputs == {"seed", f"{tmp_path}/{project}.jsonl"}
        with pytest.raises(RunError, match="belongs to the project 'a', not to 'b'"):
            await find_run(store, runs["a"], Leaf(), "b", allow_changed=True)
        run = (await start_run(store, Leaf(start_urls=["http://a.example/"]), Config(project_name="c"))).run
        assert [each.run_id for each in await store.list_runs(project="c")] == [run.run_id]
    finally:
        await store.close()


def test_nodes_of_two_projects_have_two_runs() -> None:
    projects = ("a", "b", "shoal")
    names = {Node(Leaf, {"project_name": name, "frontier": "redis://127.0.0.1:1"}).run_id for name in projects}
    assert names == {"a.leaf", "b.leaf", "leaf"}


def wanted(policy: str) -> WantedRun:
    return WantedRun(spider="books", project="shop", start=WANTED.start, new=Config(new_run=policy).new_run)  # type: ignore[arg-type]
