"""Runs on a fleet: started, watched and stopped by commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.errors import ConfigError, RunError, ShoalError, SinkError, SpiderError
from shoal.runs.orchestrator import Orchestrator
from shoal.runs.work_queue import SyncUrlWorkQueue
from tests.acceptance.fleets import KINDS, SHOAL, SPIDER, Fleet, InProcessFleet, frontier_url, site
from tests.support import forking
from tests.support.databases import RedisServer, shared

PAGES = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with site(PAGES) as made:
        yield made


@pytest.fixture(params=KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    with InProcessFleet(tmp_path, frontier_url(request.param)) as made:
        yield made


def test_the_same_file_alone_and_on_a_fleet(fleet: Fleet, url: str) -> None:
    """Standalone in memory, then on two workers: the same items."""
    (fleet.folder / "alone.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    fleet.name = "alone.py"
    forking.run([*SHOAL, "run", "alone.py", "-o", "alone.jsonl", "-q"], cwd=fleet.folder, check=True, timeout=60)
    started = json.loads(fleet.shoal("start", "alone.py").stdout)
    assert started["status"] == "queued"
    assert started["enqueued"] == 1
    assert started["worker_command"] == (
        f"shoal worker alone.py --frontier '{fleet.frontier}' --run-id {started['run_id']} --batch-size 50"
    )
    fleet.run_id = started["run_id"]
    fleet.worker("-o", "fleet.jsonl")
    fleet.worker()
    fleet.wait()
    fleet.shoal("export", fleet.run_id, "-o", "export.jsonl")
    items = [sorted((fleet.folder / f"{name}.jsonl").read_text().splitlines()) for name in ("alone", "fleet", "export")]
    assert len(items[0]) == PAGES + 1
    assert items[0] == items[1] == items[2]
    assert "balanced: nothing lost" in fleet.shoal("audit", fleet.run_id).stdout


def test_a_run_can_be_seen(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/", f"{url}/p/3", "http://127.0.0.1:9/refused", settings={"retry.max_attempts": 1})
    assert fleet.run_id in fleet.shoal("runs").stdout
    stats = fleet.stats()
    assert (stats["ready"], stats["in_flight"], stats["left"]) == (3, 0, 3)
    fleet.worker()
    fleet.wait()
    stats = fleet.stats()
    assert (stats["done"], stats["failed"], stats["left"]) == (PAGES + 1, 1, 0)
    assert "done 61" in fleet.shoal("stats", fleet.run_id, "--watch").stdout
    assert "finished" in fleet.shoal("runs", "--spider", "pages").stdout
    assert "refused" in fleet.shoal("why", "http://127.0.0.1:9/refused", "--run-id", fleet.run_id).stdout
    hosts = fleet.shoal("hosts").stdout
    assert url.removeprefix("http://") in hosts
    assert "no delay" in hosts
    assert "1 request is queued again" in fleet.shoal("retry-failed", fleet.run_id).stdout
    assert fleet.stats()["left"] == 1
    fleet.worker()  # a run that was finished goes on
    fleet.wait()
    assert fleet.stats()["failed"] == 1
    assert "is deleted" in fleet.shoal("rm", fleet.run_id).stdout
    assert fleet.run_id not in fleet.shoal("runs").stdout


def test_hosts_are_changed_by_hand(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/")
    host = url.removeprefix("http://")
    assert "3.50 s  set for this host" in fleet.shoal("hosts", "set", host, "--delay", "3.5").stdout
    assert "3.50 s  set for this host" in fleet.shoal("hosts", "set", "*", "--delay", "0.25").stdout
    assert "0.25 s  set for all hosts" in fleet.shoal("hosts", "set", host, "--reset").stdout
    assert "by the webmaster" in fleet.shoal("hosts", "block", host, "--reason", "by the webmaster").stdout
    assert "by the webmaster" in fleet.shoal("hosts").stdout
    assert "by the webmaster" not in fleet.shoal("hosts", "unblock", host).stdout
    done = fleet.shoal("hosts", "set", "http://x/", "--delay", "1", check=False)
    assert (done.returncode, "is not a host" in done.stderr) == (2, True)
    assert "nothing to change: pass --delay" in fleet.shoal("hosts", "set", host, check=False).stderr


def test_what_is_wrong_with_a_run_is_told(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/")
    run_id = fleet.run_id

    def says(*arguments: str) -> str:
        done = fleet.shoal(*arguments, check=False)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert f"there is no run nonsense; the newest ones are: {run_id}" in says("stats", "nonsense")
    assert f"the newest ones are: {run_id}" in says("worker", "spider.py", "--run-id", "nonsense")
    assert "cancel it first, or pass --force" in says("rm", run_id)
    (fleet.folder / "other.py").write_text(SPIDER.replace('"pages"', '"other"'))
    assert "belongs to the spider 'pages', not to 'other'" in says("worker", "other.py", "--run-id", run_id)
    (fleet.folder / "spider.py").write_text(SPIDER + "\n# a change\n")
    assert "has changed since run" in says("worker", "spider.py", "--run-id", run_id)
    fleet.worker("--allow-changed")
    fleet.wait()
    assert fleet.stats()["done"] == PAGES + 1
    fleet.start(f"{url}/", settings={"download_delay": 1})
    fleet.shoal("cancel", fleet.run_id)
    assert "was cancelled; `shoal resume" in says("worker", "spider.py", "--run-id", fleet.run_id)
    assert "cannot become paused" in says("pause", fleet.run_id)
    assert "URL file nowhere.txt does not exist" in says("start", "spider.py", "--urls-file", "nowhere.txt")
    assert "a file on one machine" in says("start", "spider.py", "-o", "items.jsonl")
    for command in (("worker", "--run-id", run_id), ("node",), ("start",)):
        assert "files of this machine can be replaced, not databases" in says(*command, "spider.py", "-O", "items.db")


def test_a_worker_of_a_finished_run_says_so(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/p/1", settings={"scope.max_depth": 0})
    fleet.worker()
    fleet.wait()
    assert "already finished" not in (fleet.folder / "worker-0.log").read_text()
    again = " ".join(fleet.shoal("worker", "spider.py", "--run-id", fleet.run_id).stderr.split())
    assert f"run {fleet.run_id} already finished at 20" in again
    assert "`shoal start` begins another run" in again
    staying = fleet.worker("--keep-alive")
    log, until = fleet.folder / "worker-1.log", time.monotonic() + 60
    while "already finished" not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    assert "waiting for more requests" in " ".join(log.read_text().split())
    assert staying.poll() is None
    staying.kill()


OWN_INIT = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False}

    def __init__(self, site, label):
        super().__init__()
        self.start_urls = [site]
        self.label = label

    def parse(self, response):
        self.log.info("a page")
        yield {"url": response.url, "label": self.label}
"""


def test_a_worker_has_all_arguments_and_replaces_a_file_only_if_asked_to(fleet: Fleet, url: str) -> None:
    (fleet.folder / "spider.py").write_text(OWN_INIT)
    for label, option in (("first", "-o"), ("second", "-O")):
        started = fleet.shoal("start", "spider.py", "-a", f"site={url}/p/1", "-a", f"label={label}")
        fleet.run_id = json.loads(started.stdout)["run_id"]
        if label == "second":
            refused = fleet.worker("-o", "items.jsonl")
            assert refused.wait(60) == 1
            assert "Use -O items.jsonl to replace it" in (fleet.folder / "worker-1.log").read_text()
            fleet.processes.clear()
        fleet.worker(option, "items.jsonl")
        fleet.wait()
        item = json.loads((fleet.folder / "items.jsonl").read_text())
        assert item == {"url": f"{url}/p/1", "label": label}
    done = fleet.shoal("worker", "spider.py", "--run-id", "nonsense", check=False)
    assert (done.returncode, "there is no run nonsense; the newest ones are" in done.stderr) == (2, True)
    done = fleet.shoal("start", "spider.py", "-a", f"site={url}/", "-a", "label=x", "-O", "items.jsonl", check=False)
    assert (done.returncode, "items.jsonl is a file on one machine" in done.stderr) == (2, True)


def test_a_fleet_needs_a_server(tmp_path: Path) -> None:
    with InProcessFleet(tmp_path, f"sqlite:///{tmp_path}/x.db") as fleet:
        done = fleet.shoal("start", "spider.py", check=False)
        assert done.returncode == 2
        assert "a fleet cannot share the frontier" in done.stderr


# -- the registry and the orchestrator


def project(folder: Path, url: str, frontier: str) -> Path:
    (folder / "pages.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    file = folder / "shoal.toml"
    file.write_text(
        f'frontier = "{frontier}"\n[spiders.India]\nfile = "pages.py"\nexecution_mode = "distributed"\n'
        f'[spiders.Russia]\nfile = "pages.py:Pages"\noutputs = ["{folder}/russia.jsonl"]\n'
    )
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_an_orchestrator_routes_by_mode(kind: str, url: str, tmp_path: Path) -> None:
    file = project(tmp_path, url, frontier_url(kind))
    orchestrator = Orchestrator(file)
    started = orchestrator.start("India", urls=[f"{url}/p/1", f"{url}/p/2", "junk"])
    assert (started["status"], started["enqueued"], started["spider"]) == ("queued", 2, "pages")
    expected = f"shoal worker India --config {file} --run-id {started['run_id']} --batch-size 50"
    assert started["worker_command"] == expected
    assert orchestrator.get_stats("India", started["run_id"]) == {
        "pending": 2, "claimed": 0, "completed": 0, "failed": 0, "remaining": 2,
    }  # fmt: skip
    command = started["worker_command"].split()[1:]
    forking.run([*SHOAL, *command, "-q"], cwd=tmp_path, check=True, timeout=60)
    assert orchestrator.get_stats("India", started["run_id"])["completed"] == PAGES  # nothing links to the first page
    with pytest.raises(RunError, match="India has no run nonsense"):
        orchestrator.get_stats("India", "nonsense")
    with pytest.raises(SpiderError, match="did you mean India"):
        orchestrator.start("Indai")


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_works_on_the_run_of_an_orchestrator(kind: str, url: str, tmp_path: Path) -> None:
    frontier = frontier_url(kind)
    orchestrator = Orchestrator(project(tmp_path, url, frontier))
    started = orchestrator.start_scraper("India", urls=[f"{url}/p/{number}" for number in range(3)])

    def shoal(*words: str) -> str:
        return forking.run([*SHOAL, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def why(page: str) -> str:
        return shoal("why", page, "--run-id", started["run_id"])

    with SyncUrlWorkQueue(frontier, started["run_id"], worker_id="script-1") as queue:
        claims = queue.claim_batch(2)
        assert orchestrator.get_stats("India", started["run_id"]) == {
            "pending": 1, "claimed": 2, "completed": 0, "failed": 0, "remaining": 3,
        }  # fmt: skip
        assert "  worker    script-1" in why(claims[0].url)
        assert "2 pages held by worker script-1" in shoal("stats", started["run_id"])
        queue.complete_url(claims[0], items=[{"price": 3}])
        assert queue.fail_url(claims[1], "gone", retry_in=None) == "failed"
        assert "done  (worker script-1)" in why(claims[0].url)
        assert "attempt 1 failed: gone  (worker script-1)" in why(claims[1].url)
        assert "held by" not in shoal("stats", started["run_id"])
    assert orchestrator.get_stats("India", started["run_id"]) == {
        "pending": 1, "claimed": 0, "completed": 1, "failed": 1, "remaining": 1,
    }  # fmt: skip
    with (
        pytest.raises(ConfigError, match="max_attempts 4, not 9"),
        SyncUrlWorkQueue(frontier, started["run_id"], max_attempts=9) as queue,
    ):
        queue.claim_batch(1)


def test_resume_is_the_default_and_contradicts_a_new_run(url: str, tmp_path: Path) -> None:
    project(tmp_path, url, frontier_url("redis"))
    for command in (["start", "India"], ["run", "Russia"]):
        refused = forking.run(
            [*SHOAL, *command, "--resume", "--new-run"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert refused.returncode == 2
        assert "--resume and --new-run contradict each other" in refused.stderr
    for command in (["start", "India"], ["start", "Russia", "-q"], ["run", "Russia", "-q"]):
        forking.run([*SHOAL, *command, "--resume"], cwd=tmp_path, capture_output=True, check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet_resumes_its_unfinished_run(kind: str, url: str, tmp_path: Path) -> None:
    project(tmp_path, url, frontier_url(kind))
    (tmp_path / "urls.txt").write_text(f"{url}/p/1\n")

    def start(*words: str) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(shoal_in(tmp_path, "start", "India", *words).stdout))

    first, other = start(), start("--urls-file", "urls.txt")
    second = start()
    assert second["run_id"] not in (first["run_id"], other["run_id"])
    resumed = start("--resume")
    assert (resumed["run_id"], resumed["enqueued"], resumed["status"]) == (second["run_id"], 0, "queued")
    assert resumed["worker_command"] == second["worker_command"]
    assert start("--resume", "--urls-file", "urls.txt")["run_id"] == other["run_id"]
    for run in (first, second):
        assert shoal_in(tmp_path, "worker", "India", "--run-id", run["run_id"], "-q").returncode == 0
    after = start("--resume")["run_id"]
    assert after not in (first["run_id"], second["run_id"])  # both are finished


def shoal_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forking.run([*SHOAL, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_urls_of_a_file_are_queued_for_workers(url: str, tmp_path: Path, kind: str) -> None:
    project(tmp_path, url, frontier_url(kind))
    (tmp_path / "urls.txt").write_text("".join(f"{url}/p/{number}\n" for number in (1, 2, 2)))
    queued = json.loads(shoal_in(tmp_path, "start", "India", "--urls-file", "urls.txt").stdout)
    assert (queued["status"], queued["enqueued"], queued["duplicates"]) == ("queued", 2, 1)
    assert queued["worker_command"] == f"shoal worker India --run-id {queued['run_id']} --batch-size 50"
    assert shoal_in(tmp_path, *queued["worker_command"].split()[1:], "-q").returncode == 0
    assert Orchestrator(tmp_path / "shoal.toml").get_stats("India", queued["run_id"])["remaining"] == 0


@pytest.mark.parametrize("store", ["sqlite", *KINDS])
def test_a_registered_spider_with_a_file_runs_every_day(url: str, tmp_path: Path, store: str) -> None:
    frontier = f"sqlite:///{tmp_path}/x.db" if store == "sqlite" else frontier_url(store)
    file = project(tmp_path, url, frontier)
    again = ("start", "Russia", "--new-run", "-q")
    assert shoal_in(tmp_path, *again).returncode == 0
    refused = shoal_in(tmp_path, *again)
    assert (refused.returncode, "Use -O russia.jsonl to replace it" in refused.stderr) == (2, True)
    assert "russia-{date}.jsonl is a new one each day" in refused.stderr
    assert len(shoal_in(tmp_path, "runs").stdout.splitlines()) == 2  # a heading and the first run
    assert shoal_in(tmp_path, *again, "-O", f"{tmp_path}/russia.jsonl").returncode == 0
    text = file.read_text()
    file.write_text(text.replace("russia.jsonl", "russia.jsonl?replace=yes"))
    assert shoal_in(tmp_path, *again).returncode == 0
    assert len((tmp_path / "russia.jsonl").read_text().splitlines()) == PAGES + 1
    file.write_text(text.replace("russia.jsonl", "russia-{date}-{run}.jsonl"))
    for _ in range(2):
        assert shoal_in(tmp_path, *again).returncode == 0
    dated = sorted(tmp_path.glob(f"russia-{time.strftime('%Y-%m-')}*.jsonl"))
    file.write_text(text.replace("russia.jsonl", "moscow-{date}.jsonl"))
    assert shoal_in(tmp_path, *again).returncode == 0
    assert "-{run}.jsonl is a new one in each run" in shoal_in(tmp_path, *again).stderr
    assert [len(path.read_text().splitlines()) for path in dated] == [PAGES + 1] * 2
    assert len(shoal_in(tmp_path, "runs").stdout.splitlines()) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_fails_leaves_no_run(url: str, tmp_path: Path, kind: str) -> None:
    file = project(tmp_path, url, frontier_url(kind))
    (tmp_path / "pages.py").write_text(SPIDER + "    def start(self):\n        raise ValueError('no list of pages')\n")
    refused = shoal_in(tmp_path, "start", "India")
    assert (refused.returncode, "no list of pages" in refused.stderr) == (2, True)
    with pytest.raises(ShoalError, match="no list of pages"):
        Orchestrator(file).start("India")
    assert len(shoal_in(tmp_path, "runs").stdout.splitlines()) <= 1


def test_commands_find_a_spider_by_its_registered_name(url: str, tmp_path: Path) -> None:
    project(tmp_path, url, frontier_url("redis"))
    listed = [line.split()[:3] for line in shoal_in(tmp_path, "list").stdout.splitlines()]
    assert listed == [
        ["India", "pages.py", "distributed"], ["Russia", "pages.py:Pages", "single"], ["pages", "pages.py:Pages"],
    ]  # fmt: skip
    by_worker = json.loads(shoal_in(tmp_path, "start", "India").stdout)["run_id"]
    words = ("worker", "--scraper", "India", "--run-id", by_worker, "--batch-size", "50")
    assert shoal_in(tmp_path, *words).returncode == 0
    for unnamed in ([], [""]):  # Compose passes an empty name, unless .env has one
        refused = shoal_in(tmp_path, "worker", *unnamed, "--run-id", by_worker)
        assert "name the spider once" in refused.stderr
    assert "--run-id is empty" in shoal_in(tmp_path, "worker", "India", "--run-id", "").stderr
    by_scaler = json.loads(shoal_in(tmp_path, "start", "India", "--new-run").stdout)["run_id"]
    scaled = shoal_in(tmp_path, "autoscale", by_scaler, "--every", "0.2")
    assert (scaled.returncode, f"run {by_scaler} is finished" in scaled.stderr) == (0, True)


def test_a_single_spider_runs_here(url: str, tmp_path: Path) -> None:
    file = project(tmp_path, url, "memory:")
    orchestrator = Orchestrator(file)
    assert [orchestrator.registry.get_execution_mode(name) for name in ("India", "Russia")] == ["distributed", "single"]
    done = orchestrator.start_scraper("Russia")
    assert (done["status"], done["stats"]["completed"], done["error"]) == ("finished", PAGES + 1, "")
    assert len((tmp_path / "russia.jsonl").read_text().splitlines()) == PAGES + 1
    with pytest.raises(ConfigError, match="a fleet cannot share") as refused:
        orchestrator.start("India")
    assert refused.value.__context__ is None  # a user reads one error, not two
    elsewhere = Orchestrator(file, frontier=frontier_url("redis"))
    with pytest.raises(SinkError, match="a file on one machine"):
        elsewhere.start("Russia", mode="distributed")
    assert elsewhere.start("India")["status"] == "queued"
    assert elsewhere.start("India", mode="single", new_run=True)["status"] == "finished"


async def test_in_a_loop_the_async_forms(url: str, tmp_path: Path) -> None:
    orchestrator = Orchestrator(project(tmp_path, url, frontier_url("redis")))
    with pytest.raises(RuntimeError, match="astart"):
        orchestrator.start("India")
    started = await orchestrator.astart("India")
    assert (await orchestrator.aget_stats("India", started["run_id"]))["pending"] == 1


def test_names_of_the_registry_on_the_command_line(url: str, tmp_path: Path) -> None:
    project(tmp_path, url, frontier_url("redis"))
    start = forking.run([*SHOAL, "start", "India"], cwd=tmp_path, capture_output=True, text=True, check=True)
    command = json.loads(start.stdout)["worker_command"].split()[1:]
    forking.run([*SHOAL, *command, "-q"], cwd=tmp_path, check=True, timeout=60)
    single = forking.run(
        [*SHOAL, "start", "Russia", "--new-run"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert "finished" in single.stderr
    assert len((tmp_path / "russia.jsonl").read_text().splitlines()) == PAGES + 1
    wrong = forking.run([*SHOAL, "start", "Indai"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "did you mean India" in wrong.stderr) == (2, True)


# -- modes


@pytest.mark.parametrize("how", ["file", "environment", "flag"])
def test_where_a_run_is_kept_never_touches_the_spider(how: str, url: str, tmp_path: Path) -> None:
    frontier = frontier_url("redis")
    (tmp_path / "pages.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    command, environment = [*SHOAL, "start", "pages.py"], {}
    if how == "file":
        (tmp_path / "shoal.toml").write_text(f'mode = "distributed"\nfrontier = "{frontier}"\n')
    elif how == "environment":
        environment = {"SHOAL_FRONTIER": frontier, "SHOAL_MODE": "distributed"}
    else:
        command += ["--frontier", frontier]
    done = forking.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["enqueued"] == 1


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    server = shared(RedisServer)
    with InProcessFleet(tmp_path, server.url.replace(str(server.port), "9")) as fleet:
        done = fleet.shoal("runs", check=False)
        assert done.returncode == 2
        assert "127.0.0.1:9" in done.stderr


# -- what all workers of a run agree on


def test_the_scope_is_the_runs(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/", settings={"scope.max_depth": 1})
    fleet.worker(settings={"scope.max_depth": 5})
    fleet.wait()
    assert fleet.stats()["done"] == 11  # the first page and the ten that it links to
    assert "scope.max_depth is ignored: the run fixes this setting" in (fleet.folder / "worker-0.log").read_text()


def test_a_page_limit_is_the_runs(fleet: Fleet, url: str) -> None:
    fleet.start(f"{url}/", settings={"scope.max_pages": 20})
    fleet.worker(settings={"concurrency": 4})
    fleet.wait()
    assert fleet.stats()["done"] == 20
    assert "finished" in fleet.shoal("runs").stdout


def test_a_run_of_a_single_process_is_not_a_workers(fleet: Fleet, url: str) -> None:
    (fleet.folder / "alone.py").write_text(SPIDER + f'    start_urls = ["{url}/"]\n')
    fleet.shoal("run", "alone.py", "-q")
    run_id = json.loads(fleet.shoal("stats", "--json").stdout)["run_id"]
    done = fleet.shoal("worker", "alone.py", "--run-id", run_id, check=False)
    assert (done.returncode, "was created by `shoal run`" in done.stderr) == (2, True)
    started = json.loads(fleet.shoal("start", "alone.py").stdout)  # and the other way round
    fleet.shoal("run", "alone.py", "-q")
    assert json.loads(fleet.shoal("stats", started["run_id"], "--json").stdout)["done"] == 0


def test_a_file_that_is_not_there_makes_no_run(fleet: Fleet) -> None:
    assert fleet.shoal("start", "spider.py", "--urls-file", "nowhere.txt", check=False).returncode == 2
    assert len(fleet.shoal("runs").stdout.splitlines()) == 1


def test_a_slow_start_keeps_its_role(fleet: Fleet, url: str) -> None:
    slow = "\n    async def start(self):\n        import asyncio\n        await asyncio.sleep(3)\n"
    (fleet.folder / "slow.py").write_text(SPIDER + slow + f'        yield "{url}/"\n')
    fleet.name = "slow.py"
    start = forking.Popen(
        [*SHOAL, "start", "slow.py", "--frontier", fleet.frontier, "--set", "lease.ttl=1", "--run-id", "slow"],
        cwd=fleet.folder, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    fleet.run_id = "slow"
    while fleet.shoal("stats", "slow", check=False).returncode:
        time.sleep(0.1)
    for _ in range(2):
        fleet.worker(settings={"lease.ttl": 1})
    fleet.wait()
    assert start.wait(10) == 0
    assert fleet.stats()["done"] == PAGES + 1


def test_an_interrupted_start_goes_on_at_once(fleet: Fleet) -> None:
    lines = [f"http://h{number}.example/" for number in range(20_000)]
    (fleet.folder / "many.txt").write_text("\n".join(lines))
    command = [*SHOAL, "start", "spider.py", "--urls-file", "many.txt", "--frontier", fleet.frontier, "--run-id", "x"]
    first = forking.Popen(command, cwd=fleet.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while fleet.shoal("stats", "x", check=False).returncode:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    done = forking.run(command, cwd=fleet.folder, capture_output=True, text=True, check=True, timeout=110)
    assert json.loads(done.stdout)["run_id"] == "x"
    fleet.run_id = "x"
    assert fleet.stats()["ready"] == 20_000
