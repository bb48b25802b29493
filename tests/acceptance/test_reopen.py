"""Failed requests of a finished run are retried, from every interface: the site is asked again, and the output gets the
items once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import KINDS, SHOAL, Fleet, frontier_url
from tests.acceptance.serving import Api, serving, until
from tests.acceptance.target import Target, target
from tests.support import forking

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {
        "download_delay": 0, "robots.obey": False, "throttle.enabled": False, "retry.max_attempts": 1,
        "outcome.max_failed": 1,
    }

    def __init__(self, url="", **more):
        super().__init__(url=url, **more)
        self.start_urls = [url] if url else []

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")
"""
REGISTRY = """
[spiders.Pages]
file = "pages.py"
outputs = ["here.jsonl?replace=yes"]
"""
BAD = 3


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


def start_url(site: Target) -> str:
    """A page with two good links and three that fail until the site is mended."""
    links = [f"/good{number}" for number in range(2)] + [f"/bad{number}?status=500" for number in range(BAD)]
    return f"{site.url}/?" + "&".join(f"link={link.replace('?', '%3F').replace('=', '%3D')}" for link in links)


def bad_visits(site: Target) -> int:
    return sum(visit.path.startswith("/bad") for visit in site.visits())


def urls_in(file: Path) -> list[str]:
    """The items of a file, each exactly once."""
    found = [json.loads(line)["url"] for line in file.read_text().splitlines()]
    assert len(set(found)) == len(found)
    return found


def store_url(kind: str) -> str:
    return "sqlite:///crawl.db" if kind == "sqlite" else frontier_url(kind)


def commands(text: str) -> list[list[str]]:
    """The commands that a message suggests, as words after ``shoal``."""
    return [shlex.split(command)[1:] for command in re.findall(r"`(shoal [^`]+)`", text)]


class Folder:
    """Commands in a folder."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.frontier = store_url(kind)
        (path / "pages.py").write_text(SPIDER)

    def shoal(self, *words: str, code: int = 0, frontier: bool = True) -> subprocess.CompletedProcess[str]:
        at = ["--frontier", self.frontier] if frontier else []
        done = forking.run(
            [*SHOAL, *words, *at], cwd=self.path, capture_output=True, text=True, timeout=60, env=dict(os.environ)
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def runs(self) -> list[tuple[str, str]]:
        """The name and state of each run, newest first."""
        return [(line.split()[0], line.split()[2]) for line in self.shoal("runs").stdout.splitlines()[1:]]


STORES = ("sqlite", *KINDS)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("policy", ["never", "after_finish"])
def test_the_next_crawl_continues_a_reopened_run(kind: str, policy: str, tmp_path: Path, site: Target) -> None:
    """Also if a newer run is finished, and with outputs that were closed."""
    folder = Folder(tmp_path, kind)
    (tmp_path / "shoal.toml").write_text(f'new_run = "{policy}"\n')
    command = ["run", "pages.py", "-a", f"url={start_url(site)}", "-o", "out.jsonl", "-o", "out.csv", "--new-run"]
    folder.shoal(*command)
    ((run_id, state),) = folder.runs()
    assert (state, len(urls_in(tmp_path / "out.jsonl"))) == ("finished", 3)
    folder.shoal("run", "pages.py", "-a", f"url={site.url}/other", "-o", "other.jsonl", "--new-run")
    site.mend()
    before = bad_visits(site)

    said = folder.shoal("retry-failed", run_id).stdout
    assert f"3 requests are queued again. Run {run_id} is running again; no process works on it" in said
    assert dict(folder.runs())[run_id] == "running"
    (words,) = commands(said)
    assert "--new-run" not in words
    folder.shoal(*words, frontier=False)
    assert bad_visits(site) == before + BAD
    assert len(urls_in(tmp_path / "out.jsonl")) == 6
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 7
    assert folder.runs()[1] == (run_id, "finished")
    assert len(folder.runs()) == 2
    assert "balanced: nothing lost" in folder.shoal("audit", run_id).stdout
    assert "retry" in folder.shoal("actions").stdout


@pytest.mark.parametrize("kind", STORES)
def test_a_cancelled_run_is_refused(kind: str, tmp_path: Path, site: Target) -> None:
    folder = Folder(tmp_path, kind)
    folder.shoal("run", "pages.py", "-a", f"url={start_url(site)}", "-o", "out.jsonl")
    ((run_id, _),) = folder.runs()
    folder.shoal("resume", run_id)
    folder.shoal("cancel", run_id)
    said = folder.shoal("retry-failed", run_id, code=2).stderr
    assert f"run {run_id} was cancelled" in said
    assert commands(said) == [["resume", run_id]]
    assert f" {BAD} " in folder.shoal("runs").stdout  # still failed


@pytest.mark.parametrize("kind", STORES)
def test_a_run_at_its_limit(kind: str, tmp_path: Path, site: Target) -> None:
    """It says so wherever it is shown. A retry says that the limit must be raised."""
    folder = Folder(tmp_path, kind)
    url = f"{site.url}/?link=/bad%3Fstatus%3D500&link=/a&link=/b&link=/c"
    command = ["run", "pages.py", "-a", f"url={url}", "-o", "out.jsonl", "--set", "concurrency=1"]
    folder.shoal(*command, "--max-pages", "2")
    ((run_id, state),) = folder.runs()
    limit = "stopped at the limit scope.max_pages=2 with 2 requests left"
    assert state == "finished"
    assert limit in folder.shoal("runs").stdout
    assert limit in folder.shoal("stats").stdout
    assert json.loads(folder.shoal("stats", "--json").stdout)["limit"]["left"] == 2
    assert limit in folder.shoal("audit").stdout
    assert limit in folder.shoal("compare", run_id, run_id).stdout
    site.mend()
    said = folder.shoal("retry-failed").stdout
    assert f"1 request is queued again. Run {run_id} is running again. It had {limit}" in said
    assert "until scope.max_pages is above 2" in said
    assert limit not in folder.shoal("runs").stdout  # it is no longer finished
    folder.shoal(*command, "--max-pages", "3")
    assert "scope.max_pages=3 with 2 requests left" in folder.shoal("runs").stdout
    folder.shoal(*command)
    assert "stopped at" not in folder.shoal("runs").stdout
    assert len(urls_in(tmp_path / "out.jsonl")) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_workers_of_a_fleet_take_a_reopened_run(kind: str, tmp_path: Path, site: Target) -> None:
    """A worker that stayed takes it at once. Otherwise the message has the command of a worker."""
    with Fleet(tmp_path, frontier_url(kind), SPIDER) as fleet:
        fleet.start(start_url(site))
        fleet.worker("-o", "out.jsonl")
        fleet.wait()
        said = fleet.shoal("retry-failed", fleet.run_id, "--url", "*/bad0*").stdout
        assert "1 request is queued again" in said
        (words,) = commands(said)
        assert words[:2] == ["worker", "spider.py"]
        site.mend()
        done = forking.run([*SHOAL, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert len(urls_in(tmp_path / "out.jsonl")) == 4

        fleet.worker("-o", "out.jsonl", "--keep-alive")
        until(lambda: fleet.stats()["workers"], what="a worker that stays")
        said = fleet.shoal("retry-failed", fleet.run_id).stdout
        assert f"2 requests are queued again. Run {fleet.run_id} is running again: 1 process works on it" in said
        until(lambda: len((tmp_path / "out.jsonl").read_text().splitlines()) == 6, what="the items")
        until(lambda: "finished" in fleet.shoal("runs").stdout, what="the end of the run")
        urls_in(tmp_path / "out.jsonl")
        assert bad_visits(site) == 2 * BAD


def test_a_fleet_at_its_limit_is_refused(tmp_path: Path, site: Target) -> None:
    """Its limit is fixed, so no worker would fetch what is retried."""
    with Fleet(tmp_path, frontier_url("redis"), SPIDER) as fleet:
        url = f"{site.url}/?link=/bad%3Fstatus%3D500&link=/a&link=/b&link=/c"
        fleet.start(url, settings={"scope.max_pages": 2, "concurrency": 1})
        fleet.worker()
        fleet.wait()
        assert "stopped at the limit scope.max_pages=2" in fleet.shoal("runs").stdout
        refused = fleet.shoal("retry-failed", fleet.run_id, check=False)
        assert refused.returncode == 2
        assert "start a new run with a higher scope.max_pages" in refused.stderr
        assert fleet.stats()["failed"] == 1


def must(answer: tuple[int, Any], status: int = 200) -> Any:
    assert answer[0] == status, answer
    return answer[1]


def ended(api: Api, run_id: str) -> Any:
    return until(lambda: (found := must(api.get(f"/api/runs/{run_id}")))["state"] == "finished" and found)


@pytest.mark.parametrize("kind", ["memory", *STORES])
def test_a_server_continues_its_run(kind: str, tmp_path: Path, site: Target) -> None:
    (tmp_path / "pages.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text(REGISTRY)
    frontier = "memory:" if kind == "memory" else store_url(kind)
    with serving(tmp_path, {"SHOAL_FRONTIER": frontier}) as api:
        body = {"spider": "Pages", "mode": "single", "urls": [start_url(site)]}
        run_id = must(api.ask("POST", "/api/runs", body), 201)["run_id"]
        ended(api, run_id)
        one = {"url": f"{site.url}/bad0?status=500"}
        answer = must(api.ask("POST", f"/api/runs/{run_id}/url/retry", one))
        assert (answer["retried"], answer["reopened"], answer["state"], answer["workers"]) == (1, True, "running", 1)
        assert f"Run {run_id} is running again: 1 process works on it" in answer["message"]
        until(lambda: bad_visits(site) == BAD + 1, what="the visit")
        ended(api, run_id)
        site.mend()
        answer = must(api.ask("POST", f"/api/runs/{run_id}/retry-failed", {}))
        assert (answer["retried"], answer["reopened"]) == (3, True)
        assert ended(api, run_id)["stats"]["items"] == 6
        assert bad_visits(site) == 2 * BAD + 1
        assert len(urls_in(tmp_path / "here.jsonl")) == 6
        answer = must(api.ask("POST", f"/api/runs/{run_id}/retry-failed", {}))
        assert (answer["retried"], answer["reopened"], answer["state"]) == (0, False, "finished")


def test_a_restarted_server_says_how_to_continue(tmp_path: Path, site: Target) -> None:
    """It no longer knows the request that started the run, so that must be repeated."""
    (tmp_path / "pages.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text(REGISTRY)
    with serving(tmp_path, {"SHOAL_FRONTIER": "sqlite:///crawl.db"}) as api:
        body = {"spider": "Pages", "mode": "single", "urls": [start_url(site)]}
        run_id = must(api.ask("POST", "/api/runs", body), 201)["run_id"]
        ended(api, run_id)
        api.process.terminate()
        api.start()
        site.mend()
        answer = must(api.ask("POST", f"/api/runs/{run_id}/retry-failed", {}))
        assert (answer["reopened"], answer["workers"]) == (True, 0)
        assert "no process works on it: repeat the request that started it (`POST /api/runs`)" in answer["message"]
        assert must(api.ask("POST", "/api/runs", body), 201)["run_id"] == run_id
        assert ended(api, run_id)["stats"]["items"] == 6
        assert len(urls_in(tmp_path / "here.jsonl")) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_servers_take_a_reopened_run_of_a_schedule(kind: str, tmp_path: Path, site: Target) -> None:
    """By themselves, also after a restart. While it is running again, its schedule does not start the next run."""
    (tmp_path / "pages.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text(
        REGISTRY + f'[schedules.yearly]\nspider = "Pages"\nevery = "52w"\narguments = {{ url = "{start_url(site)}" }}\n'
    )
    with serving(tmp_path, {"SHOAL_FRONTIER": frontier_url(kind)}) as api:
        run_id = must(api.ask("POST", "/api/schedules/yearly/run"), 201)["run_id"]
        ended(api, run_id)
        api.process.terminate()
        api.start()
        site.mend()
        answer = must(api.ask("POST", f"/api/runs/{run_id}/retry-failed", {}))
        assert (answer["retried"], answer["reopened"]) == (BAD, True)
        assert "a server (`shoal serve`) that has its spider takes it within seconds" in answer["message"]
        until(lambda: bad_visits(site) == 2 * BAD, what="the visits")
        assert ended(api, run_id)["stats"]["items"] == 6
        assert len(urls_in(tmp_path / "here.jsonl")) == 6


def test_several_processes_continue_a_reopened_run(tmp_path: Path, site: Target) -> None:
    folder = Folder(tmp_path, "sqlite")
    folder.shoal("run", "pages.py", "-a", f"url={start_url(site)}", "-o", "out.jsonl", "--processes", "2")
    site.mend()
    (words,) = commands(folder.shoal("retry-failed").stdout)
    assert words[-4:-2] == ["--processes", "2"]
    folder.shoal(*words, frontier=False)
    assert len(urls_in(tmp_path / "out.jsonl")) == 6
    assert bad_visits(site) == 2 * BAD


def test_a_server_refuses_a_cancelled_run(tmp_path: Path, site: Target) -> None:
    (tmp_path / "pages.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text('[spiders.Pages]\nfile = "pages.py"\n')
    with serving(tmp_path, {"SHOAL_FRONTIER": frontier_url("redis")}) as api:
        body = {"spider": "Pages", "mode": "distributed", "urls": [start_url(site)]}
        run_id = must(api.ask("POST", "/api/runs", body), 201)["run_id"]
        must(api.ask("POST", f"/api/runs/{run_id}/cancel"))
        refused = must(api.ask("POST", f"/api/runs/{run_id}/retry-failed", {}), 409)["error"]
        assert f"run {run_id} was cancelled" in refused["message"]
