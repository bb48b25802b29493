"""Every way of starting a run keeps its delay at the site, on every store, while somebody looks at the run.

The spider asks for `DELAY`. Those who look read only ``shoal.toml``, so they know nothing but the shorter default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.serving import FAST, Api, until
from tests.acceptance.target import Target, closest, target
from tests.support import forking

DELAY = 0.8
PAGES = 4
SPIDER = f"""
from shoal import Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {{"download_delay": {DELAY}, "robots.obey": False, "throttle.enabled": False}}

    def start(self):
        yield Request(self.url)

    def parse(self, response):
        yield {{"url": response.url}}
        yield response.follow_all("a")
"""
REGISTRY = """
concurrency_per_host = 8

[spiders.single]
file = "pages.py"

[spiders.fleet]
file = "pages.py"
execution_mode = "distributed"
"""
PROGRAM = """
import sys
from pages import Pages
from shoal import crawl
crawl(Pages, {"frontier": sys.argv[1]}, arguments={"url": sys.argv[2]})
"""
LOOKS = (("stats",), ("hosts",), ("audit",), ("runs",), ("workers",))
"""Commands that only look at a run."""

pytestmark = pytest.mark.timeout(120)


class Place:
    """A folder with the spider, a store, and the site."""

    def __init__(self, folder: Path, runtime: str, store: str, site: Target) -> None:
        self.folder = folder
        self.site = site
        self.first = f"{site.url}/a?" + "&".join(f"link=/p{number}" for number in range(1, PAGES))
        self.frontier = (
            "memory:" if store == "memory"
            else f"sqlite:///{folder}/run.db" if store == "sqlite"
            else frontier_url(store)
        )  # fmt: skip
        # A crawl in memory announces itself here: those of other tests must not be found.
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": runtime, "TMPDIR": runtime}
        (folder / "pages.py").write_text(SPIDER)
        (folder / "shoal.toml").write_text(REGISTRY)

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        with (self.folder / "log.txt").open("a") as log:
            return forking.Popen(command, cwd=self.folder, env=self.environ, stdout=log, stderr=log, text=True)

    def shoal(self, *words: str) -> subprocess.CompletedProcess[str]:
        return forking.run(
            [*SHOAL, *words], cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=60
        )

    def look_until_it_ends(self, process: subprocess.Popen[str]) -> None:
        """Look at the run again and again with all commands."""
        where = () if self.frontier == "memory:" else ("--frontier", self.frontier)
        while process.poll() is None:
            for words in LOOKS:
                self.shoal(*words, *where)
        assert process.returncode == 0, (self.folder / "log.txt").read_text()

    def check_delay(self) -> None:
        """Ask the site."""
        visits = self.site.visits()
        assert len(visits) == PAGES
        assert closest(visits) >= DELAY - 0.005  # clocks of two processes


@pytest.fixture
def place(store: str, tmp_path: Path) -> Iterator[Place]:
    runtime = tempfile.mkdtemp(prefix="shoal-t-")  # the path of a socket must be short
    try:
        with target() as site:
            yield Place(tmp_path, runtime, store, site)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def run(place: Place) -> list[str]:
    return [*SHOAL, "run", "pages.py", "-a", f"url={place.first}", "--frontier", place.frontier]


def processes(place: Place) -> list[str]:
    return [*run(place), "--processes", "2"]


def registered(place: Place) -> list[str]:
    return [*SHOAL, "run", "single", "-a", f"url={place.first}", "--frontier", place.frontier]


def crawl(place: Place) -> list[str]:
    words = ("--delay", str(DELAY), "--set", "robots.obey=false", "--set", "throttle.enabled=false")
    return [*SHOAL, "crawl", place.first, *words, "--frontier", place.frontier]


def program(place: Place) -> list[str]:
    (place.folder / "program.py").write_text(PROGRAM)
    return [sys.executable, "program.py", place.frontier, place.first]


def start(place: Place) -> tuple[str, ...]:
    """Start a run for a fleet. Returns the words that name it."""
    words = ("--run-id", "fleet", "--frontier", place.frontier)
    started = place.shoal("start", "pages.py", "-a", f"url={place.first}", *words)
    assert started.returncode == 0, started.stderr
    return words


def worker(place: Place) -> list[str]:
    return [*SHOAL, "worker", "pages.py", *start(place)]


def node(place: Place) -> list[str]:
    return [*SHOAL, "node", "pages.py", "--name", "n_1", "--runner", "1", "--backup", "0", *start(place)]


STORES = ("memory", "sqlite", "redis", "postgresql")
SERVERS = ("redis", "postgresql")
WAYS = [
    *((way, store) for way in (run, processes, registered, crawl, program) for store in STORES),
    *((way, store) for way in (worker, node) for store in SERVERS),
]


@pytest.mark.parametrize(("way", "store"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_a_command_keeps_the_delay_of_its_run(place: Place, way: Any) -> None:
    place.look_until_it_ends(place.start(way(place)))
    place.check_delay()


class Server(Api):
    """A server whose own delay is 0. Somebody looks at its dashboard."""

    def __init__(self, place: Place) -> None:
        allowed = {key: FAST[key] for key in ("SHOAL_SERVE__ALLOW", "SHOAL_RETRY__BASE_DELAY")}
        super().__init__(place.folder, {**place.environ, **allowed}, ("--frontier", place.frontier))

    def look(self, run_id: str) -> Any:
        """The run, after its pages and reports were opened."""
        for path in ("/", "/ui/runs", f"/ui/runs/{run_id}", "/ui/hosts", "/metrics"):
            self.text(path)
        self.get(f"/api/runs/{run_id}/hosts")
        return self.get(f"/api/runs/{run_id}")[1]

    def schedule(self, spider: str, place: Place) -> str:
        """Run a spider now, as a schedule does, and return the run's name."""
        body = {"name": "nightly", "spider": spider, "every": "1h", "arguments": {"url": place.first}}
        assert self.ask("POST", "/api/schedules", body)[0] == 201
        status, started = self.ask("POST", "/api/schedules/nightly/run")
        assert status == 201, started
        return str(started["run_id"])


@pytest.fixture
def server(place: Place) -> Iterator[Server]:
    server = Server(place)
    try:
        yield server
    finally:
        server.process.kill()


@pytest.mark.parametrize("store", STORES)
def test_a_scheduled_run_in_a_server_keeps_its_delay(place: Place, server: Server) -> None:
    run_id = server.schedule("single", place)
    until(lambda: server.look(run_id)["state"] == "finished", what="the run finished", pause=0.05)
    place.check_delay()


@pytest.mark.parametrize("store", SERVERS)
def test_a_scheduled_run_of_a_fleet_keeps_its_delay(place: Place, server: Server) -> None:
    run_id = server.schedule("fleet", place)
    until(lambda: server.look(run_id)["state"] in ("queued", "running"), what="the run")
    worker = place.start([*SHOAL, "worker", "pages.py", "--run-id", run_id, "--frontier", place.frontier])
    while worker.poll() is None:
        server.look(run_id)
        time.sleep(0.05)
    place.check_delay()


@pytest.mark.parametrize("store", STORES)
def test_a_batch_keeps_the_delay_of_its_server(place: Place, store: str) -> None:
    """Another process of the fleet, whose own delay is 0, looks at the batch."""
    (place.folder / "shoal.toml").write_text(f"download_delay = {DELAY}\n{REGISTRY}")
    server = Server(place)
    try:
        started = server.batch([f"{place.site.url}/{number}" for number in range(PAGES)], wait=False)
        session = started["session_id"]

        def is_over() -> bool:
            if store in SERVERS:
                for words in LOOKS:
                    place.shoal(*words, "--frontier", place.frontier)
            server.text("/ui/batches")
            return server.get(f"/api/crawl/{session}?limit=1")[1]["state"] == "finished"

        (place.folder / "shoal.toml").write_text(REGISTRY)
        until(is_over, what="the batch", pause=0.05)
    finally:
        server.process.kill()
    visits = [visit for visit in place.site.visits() if visit.path != "/robots.txt"]
    assert len(visits) == PAGES
    assert closest(visits) >= DELAY - 0.005
