"""Schedules as a user sees them: a real server, real workers, commands and the API."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import KINDS, SHOAL, InProcessFleet, frontier_url
from tests.acceptance.serving import FAST, Api, Process, serving, until
from tests.acceptance.target import Target, target
from tests.support import forking

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False, "concurrency": 4, "retry.max_attempts": 2}

    def __init__(self, url="", **more):
        super().__init__(url=url, **more)

    def start(self):
        if not self.url:
            raise ValueError("it has no url")
        return [self.url]

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")
"""
REGISTRY = """
[spiders.Here]
file = "pages.py"

[spiders.Fleet]
file = "pages.py"
execution_mode = "distributed"
arguments = {{ url = "{url}/fleet?link=/x" }}
"""


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, site: Target) -> Path:
    (tmp_path / "pages.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text(REGISTRY.format(url=site.url))
    return tmp_path


def must(answer: tuple[int, Any], status: int = 200) -> Any:
    assert answer[0] == status, answer
    return answer[1]


def add(api: Api, schedule: dict[str, Any]) -> Any:
    return must(api.ask("POST", "/api/schedules", schedule), 201)


def runs_of(api: Api, state: str | None = None) -> list[str]:
    """The runs, oldest first."""
    runs = must(api.get("/api/runs?limit=200"))["runs"]
    return [run["run_id"] for run in reversed(runs) if state in (None, run["state"])]


def test_a_schedule_over_http_fires_pauses_resumes_runs_now_and_is_removed(folder: Path, site: Target) -> None:
    with serving(folder, None, "--frontier", f"sqlite:///{folder}/api.db") as api:
        body = {
            "name": "often",
            "spider": "Here",
            "every": "2s",
            "arguments": {"url": f"{site.url}/a?link=/b"},
            "keep": 3,
        }
        added = add(api, body)
        assert (added["paused"], added["fired"], added["origin"]) == (False, 0, "store")
        until(lambda: len(runs_of(api, "finished")) >= 2, what="two runs")
        assert all(name.startswith("often_2") for name in runs_of(api))
        assert must(api.ask("POST", "/api/schedules/often/pause"))["next"] is None
        until(lambda: not runs_of(api, "running") and not runs_of(api, "queued"), what="the runs over")
        before = must(api.get("/api/schedules/often"))
        paths = [visit.path for visit in site.visits()]
        assert paths.count("/a?link=/b") == paths.count("/b") == before["fired"]
        started = must(api.ask("POST", "/api/schedules/often/run"), 201)
        assert started["waits"] is False
        until(lambda: started["run_id"] in runs_of(api, "finished"), what="the run of now")
        now = must(api.get("/api/schedules/often"))
        assert (now["fired"], now["run_id"], now["run_state"]) == (before["fired"] + 1, started["run_id"], "finished")
        assert must(api.ask("POST", "/api/schedules/often/resume"))["next"] % 2 == 0
        until(lambda: must(api.get("/api/schedules/often"))["fired"] >= now["fired"] + 4, what="four more runs")
        assert must(api.ask("DELETE", "/api/schedules/often")) == {"name": "often", "removed": True}
        until(lambda: not runs_of(api, "running") and not runs_of(api, "queued"), what="the runs over")
        assert 3 <= len(runs_of(api)) <= 5  # older ones were deleted
        assert must(api.get("/api/schedules"))["schedules"] == []
        assert api.get("/api/schedules/often")[0] == 404


BAD = [
    (422, {"name": "a", "spider": "Hare", "every": "1h"}, "did you mean Here"),
    (422, {"name": "a", "spider": "Here"}, "it is never due"),
    (422, {"name": "a", "spider": "Here", "cron": "x"}, '"cron" must be'),
    (422, {"name": "a", "spider": "Here", "cron": "* * * * *", "time_zone": "Nowhere"}, '"time_zone" must be'),
    (422, {"name": "a", "spider": "Here", "every": "1h", "overlap": "x"}, "body.overlap"),
    (422, {"name": "a", "spider": "Here", "every": "1h", "settings": {"http.proxy": "http://a:1"}}, "cannot change"),
    (422, {"name": "a", "spider": "Here", "every": "1h", "settings": {"scope.deny": ["(?!x)"]}}, "searched by RE2"),
    (422, {"name": "a", "spider": "Here", "every": "1h", "arguments": {"settings": "x"}}, '"arguments" cannot'),
    (422, {"name": "a/b", "spider": "Here", "every": "1h"}, "its name must have"),
    (422, {"name": "a", "spider": "Here", "every": "1h", "code": "x"}, "unknown field `code`"),
]


def test_bad_schedules_are_refused_over_http(folder: Path) -> None:
    with serving(folder, None) as api:
        for status, body, message in BAD:
            found = must(api.ask("POST", "/api/schedules", body), status)
            assert message in found["error"]["message"], body
        assert must(api.get("/api/schedules"))["schedules"] == []
        add(api, {"name": "a", "spider": "Here", "every": "1h"})
        must(api.ask("POST", "/api/schedules", {"name": "a", "spider": "Here", "every": "1h"}), 409)
        for method, path in (("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run"), ("DELETE", "")):
            assert must(api.ask(method, f"/api/schedules/none{path}"), 404)["error"]["kind"] == "no such schedule"


def test_a_server_does_not_start_with_a_bad_schedule_in_its_file(folder: Path) -> None:
    with (folder / "shoal.toml").open("a") as file:
        file.write('[schedules.nightly]\nspider = "Here"\ncron = "30 25 * * *"\n')
    done = forking.run([*SHOAL, "serve", "--port", "0"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "schedule 'nightly': \"cron\" must be a cron expression" in done.stderr
    assert "Traceback" not in done.stderr


def test_schedules_of_the_file_and_commands_on_a_shared_store(folder: Path, site: Target) -> None:
    with (folder / "shoal.toml").open("a") as file:
        file.write(
            '[schedules.nightly]\nspider = "Here"\ncron = "30 2 * * *"\ntime_zone = "Europe/Berlin"\n'
            f'arguments = {{ url = "{site.url}/n" }}\n'
        )
    frontier = frontier_url("redis")
    commands = InProcessFleet(folder, frontier, SPIDER, name="pages.py")

    def shoal(*words: str, code: int = 0) -> str:
        done = commands.shoal("schedule", *words, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    with serving(folder, None, "--frontier", frontier):
        assert "nightly" in shoal("list")
        assert "edit the file" in shoal("change", "nightly", "--every", "1h", code=2)
        assert "[schedules.nightly]" in shoal("rm", "nightly", code=2)
        assert "is added" in shoal("add", "rare", "Here", "--every", "52w", "-a", f"url={site.url}/r", "--keep", "1")
        assert "exists" in shoal("add", "rare", "Here", "--every", "52w", code=2)
        assert "did you mean Here" in shoal("add", "x", "Hre", "--every", "1h", code=2)
        shown = json.loads(shoal("show", "rare", "--json"))
        assert (shown["spider"], shown["every"], shown["keep"], shown["arguments"]) == (
            "Here", "52w", 1, {"url": f"{site.url}/r"}
        )  # fmt: skip
        assert "is changed" in shoal("change", "rare", "--cron", "0 0 1 1 *", "--overlap", "wait", "--reset", "keep")
        shown = json.loads(shoal("show", "rare", "--json"))
        assert (shown["cron"], shown["every"], shown["overlap"], shown["keep"], shown["arguments"]) == (
            "0 0 1 1 *", "", "wait", None, {"url": f"{site.url}/r"}
        )  # fmt: skip
        assert "nothing to change" in shoal("change", "rare", code=2)
        assert "did you mean keep" in shoal("change", "rare", "--reset", "kep", code=2)
        assert "02:30:00 CE" in shoal("show", "nightly")
        assert "is queued" in shoal("run", "rare")  # a server works on it
        until(lambda: "/r" in [visit.path for visit in site.visits()], what="the page of the run")
        assert "is paused" in shoal("pause", "nightly")
        assert "continues" in shoal("resume", "nightly")
        assert "is deleted" in shoal("rm", "rare")
        assert "there is no schedule 'rare'" in shoal("pause", "rare", code=2)
        assert [json.loads(line)["name"] for line in shoal("list", "--json").splitlines()] == ["nightly"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_servers_with_different_files(kind: str, tmp_path: Path, site: Target) -> None:
    """Nothing is deleted, each server starts the runs of its own file, and none cancels those of the other."""
    frontier = frontier_url(kind)
    folders = {}
    for name in ("first", "second"):
        folder = folders[name] = tmp_path / name
        folder.mkdir()
        (folder / "pages.py").write_text(SPIDER)
        (folder / "shoal.toml").write_text(
            f'[spiders.{name}]\nfile = "pages.py"\n[schedules.{name}]\nspider = "{name}"\nevery = "2s"\n'
            f'arguments = {{ url = "{site.url}/{name}" }}\n'
        )

    def schedules(api: Api) -> dict[str, Any]:
        return {each["name"]: each for each in must(api.get("/api/schedules"))["schedules"]}

    options = ["--frontier", frontier]
    with serving(folders["first"], None, *options) as first, serving(folders["second"], None, *options) as second:
        until(lambda: all(each["fired"] >= 3 for each in schedules(first).values()), what="runs of both")
        found = schedules(second)
        assert set(found) == {"first", "second"}
        assert [(each["error"], each["orphaned_at"]) for each in found.values()] == [("", None), ("", None)]
        assert [found[name]["source"].endswith(f"/{name}/shoal.toml") for name in found] == [True, True]
        assert runs_of(first, "cancelled") == []
        assert {visit.path for visit in site.visits()} == {"/first", "/second"}

        second.process.terminate()  # a restart without its schedule
        (folders["second"] / "shoal.toml").write_text('[spiders.second]\nfile = "pages.py"\n')
        second.start()
        orphan = schedules(first)["second"]
        assert orphan["orphaned_at"] is not None
        assert orphan["next"] is None
        actions = must(first.get("/api/actions"))["actions"]
        assert [(each["what"], each["target"]) for each in actions] == [("orphan schedule", "second")]
        shown = InProcessFleet(folders["first"], frontier, SPIDER, name="pages.py").shoal("schedule", "list").stdout
        assert "orphaned" in shown
        assert "`shoal schedule rm second` removes it" in shown
        before = schedules(first)
        until(lambda: schedules(first)["first"]["fired"] >= before["first"]["fired"] + 2, what="runs of the first")
        assert schedules(first)["second"]["fired"] == before["second"]["fired"]
        assert must(first.ask("DELETE", "/api/schedules/first"), 409)["error"]["kind"] == "wrong state"
        assert must(first.ask("DELETE", "/api/schedules/second"))["removed"] is True
        assert set(schedules(second)) == {"first"}


@pytest.mark.parametrize("kind", KINDS)
def test_another_server_resumes_the_run_of_a_server_that_was_killed(kind: str, folder: Path, site: Target) -> None:
    short = {"SHOAL_LEASE__TTL": "6", "SHOAL_WORKER__SESSION": "3"}
    options = ["--frontier", frontier_url(kind)]
    url = f"{site.url}/?link=/done&link=/hang%3Fgate%3D1"
    with serving(folder, short, *options) as first:
        add(first, {"name": "a", "spider": "Here", "every": "52w", "arguments": {"url": url}})
        run_id = must(first.ask("POST", "/api/schedules/a/run"), 201)["run_id"]
        site.wait_until(lambda seen: "/hang?gate=1" in [visit.path for visit in seen])
        with serving(folder, short, *options) as second:
            first.process.kill()
            site.wait_until(lambda seen: [visit.path for visit in seen].count("/hang?gate=1") >= 2)
            site.open_gate()
            until(lambda: run_id in runs_of(second, "finished"), what="the run finished")
            ledger = must(second.get(f"/api/runs/{run_id}/ledger"))
            assert (ledger["balanced"], ledger["done"]) == (True, 3)
            paths = [visit.path for visit in site.visits()]
            assert paths.count("/done") == 1
            assert runs_of(second) == [run_id]


def test_a_server_that_was_frozen_past_its_lease_leaves_its_run_to_another(folder: Path, site: Target) -> None:
    """It is fenced: when it goes on, it changes nothing, and the time has one run whose pages are done once."""
    short = {"SHOAL_LEASE__TTL": "6", "SHOAL_WORKER__SESSION": "3"}
    options = ["--frontier", frontier_url("redis")]
    url = f"{site.url}/?link=/done&link=/hang%3Fgate%3D1"
    with serving(folder, short, *options) as first:
        add(first, {"name": "a", "spider": "Here", "every": "52w", "arguments": {"url": url}})
        run_id = must(first.ask("POST", "/api/schedules/a/run"), 201)["run_id"]
        site.wait_until(lambda seen: "/hang?gate=1" in [visit.path for visit in seen])
        first.process.process.send_signal(signal.SIGSTOP)
        with serving(folder, short, *options) as second:
            site.wait_until(lambda seen: [visit.path for visit in seen].count("/hang?gate=1") >= 2)
            first.process.process.send_signal(signal.SIGCONT)
            site.open_gate()
            until(lambda: run_id in runs_of(second, "finished"), what="the run finished")
            until(lambda: must(first.get(f"/api/runs/{run_id}"))["state"] == "finished", what="the first server again")
            ledger = must(second.get(f"/api/runs/{run_id}/ledger"))
            assert (ledger["balanced"], ledger["done"]) == (True, 3)
            assert [visit.path for visit in site.visits()].count("/done") == 1
            assert must(second.get(f"/api/runs/{run_id}/items"))["next"] == 3
            assert (runs_of(second), must(second.get("/api/schedules/a"))["fired"]) == ([run_id], 1)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_single_run_of_a_server_that_was_frozen_past_its_lease(folder: Path, site: Target, is_resumed: bool) -> None:
    """It goes on, or another server that was asked for the same run does. Each page is done once."""
    short = {"SHOAL_LEASE__TTL": "6", "SHOAL_WORKER__SESSION": "3"}
    options = ["--frontier", frontier_url("redis")]
    body = {"spider": "Here", "arguments": {"url": f"{site.url}/?link=/done&link=/hang%3Fgate%3D1"}}
    with serving(folder, short, *options) as first:
        run_id = must(first.ask("POST", "/api/runs", body), 201)["run_id"]
        site.wait_until(lambda seen: "/hang?gate=1" in [visit.path for visit in seen])
        first.process.process.send_signal(signal.SIGSTOP)
        with serving(folder, short, *options) as second:
            if is_resumed:
                assert must(second.ask("POST", "/api/runs", body), 201)["run_id"] == run_id
                site.wait_until(lambda seen: [visit.path for visit in seen].count("/hang?gate=1") >= 2)
            else:
                until(lambda: must(second.get(f"/api/runs/{run_id}"))["state"] == "running", what="the run")
                time.sleep(7)  # longer than a lease
            first.process.process.send_signal(signal.SIGCONT)
            site.open_gate()
            until(lambda: run_id in runs_of(second, "finished"), what="the run finished")
            until(lambda: must(first.get(f"/api/runs/{run_id}"))["state"] == "finished", what="the first server again")
            ledger = must(second.get(f"/api/runs/{run_id}/ledger"))
            assert (ledger["balanced"], ledger["done"]) == (True, 3)
            assert [visit.path for visit in site.visits()].count("/done") == 1
            assert must(second.get(f"/api/runs/{run_id}/items"))["next"] == 3
            assert runs_of(second) == [run_id]


def test_a_restart_resumes_the_run_of_a_file(folder: Path, site: Target) -> None:
    url = f"{site.url}/?link=/hang%3Fgate%3D1"
    with serving(folder, None, "--frontier", f"sqlite:///{folder}/api.db") as api:
        add(api, {"name": "a", "spider": "Here", "every": "52w", "arguments": {"url": url}})
        run_id = must(api.ask("POST", "/api/schedules/a/run"), 201)["run_id"]
        site.wait_until(lambda seen: "/hang?gate=1" in [visit.path for visit in seen])
        assert must(api.ask("POST", "/api/schedules/a/run"), 409)["error"]["kind"] == "wrong state"
        api.process.kill()
        api.start()
        site.open_gate()
        until(lambda: run_id in runs_of(api, "finished"), what="the run finished")
        assert must(api.get("/api/schedules/a"))["run_state"] == "finished"


def test_a_run_that_cannot_work_is_cancelled_and_its_schedule_says_why(folder: Path) -> None:
    with serving(folder, None) as api:
        add(api, {"name": "a", "spider": "Here", "every": "52w"})
        run_id = must(api.ask("POST", "/api/schedules/a/run"), 201)["run_id"]
        found = until(lambda: (page := must(api.get("/api/schedules/a")))["error"] and page, what="an error")
        assert run_id in found["error"]
        assert found["run_state"] == "cancelled"
        (folder / "pages.py").write_text("import nothing_of_this_name")
        assert "nothing_of_this_name" in must(api.ask("POST", "/api/schedules/a/run"), 422)["error"]["message"]


@pytest.mark.parametrize("spider", ["Here", "Fleet"])
def test_a_poisonous_pattern_blocks_neither_a_server_nor_a_worker(folder: Path, site: Target, spider: str) -> None:
    """With `re`, this expression needs 2 to the power of 60 steps for the URL of the page."""
    url = frontier_url("redis")
    with serving(folder, None, "--frontier", url) as api:
        arguments = {"url": f"{site.url}/{'a' * 60}?link=/b!"}
        deny = {"scope.deny": ["/(?:a|a)*[?]$", "^http://[^/]*/b"]}
        add(api, {"name": "a", "spider": spider, "every": "52w", "arguments": arguments, "settings": deny})
        assert must(api.get("/api/schedules/a"))["settings"] == deny
        run_id = must(api.ask("POST", "/api/schedules/a/run"), 201)["run_id"]
        if spider == "Fleet":
            InProcessFleet(folder, url, SPIDER, name="pages.py").shoal("worker", "Fleet", "--run-id", run_id)
        until(lambda: run_id in runs_of(api, "finished"), what="the run finished")
        assert [visit.path[:4] for visit in site.visits()] == ["/aaa"]  # the link is denied


def test_a_keep_alive_worker_takes_the_runs_of_a_schedule(folder: Path, site: Target) -> None:
    url = frontier_url("redis")
    with serving(folder, None, "--frontier", url) as api:
        add(api, {"name": "fleet", "spider": "Fleet", "every": "2s", "overlap": "wait"})
        until(lambda: runs_of(api, "queued"), what="a queued run")
        worker = Process([*SHOAL, "worker", "Fleet", "--keep-alive", "--frontier", url], folder, "worker", FAST)
        try:
            until(lambda: len(runs_of(api, "finished")) >= 3, what="three runs finished")
            assert must(api.ask("POST", "/api/schedules/fleet/pause"))["paused"] is True
            until(lambda: not runs_of(api, "queued") and not runs_of(api, "running"), what="all runs over")
            paths = [visit.path for visit in site.visits()]
            assert paths.count("/x") == paths.count("/fleet?link=/x") == len(runs_of(api))
            assert worker.process.poll() is None, worker.said()
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(60) == 0, worker.said()
        finally:
            worker.kill()


def test_a_worker_without_a_run_must_stay(folder: Path) -> None:
    done = forking.run(
        [*SHOAL, "worker", "Fleet", "--frontier", "redis://127.0.0.1:1"], cwd=folder, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no run given: pass --run-id ID, or --keep-alive" in done.stderr
