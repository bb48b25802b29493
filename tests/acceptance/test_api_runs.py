"""Runs, hosts and clusters over HTTP: a real server, real workers and nodes, on real stores."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from shoal.api import resources
from shoal.api.server.answers import answer
from shoal.urls.normalize import normalize_url
from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.serving import PATIENCE, Api, serving, stands_still, until
from tests.acceptance.target import Target, host_of, target
from tests.support import forking
from tests.support.databases import RedisServer

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False, "concurrency": 4, "retry.max_attempts": 1}

    def __init__(self, field="url", **more):
        super().__init__(field=field, **more)

    def parse(self, response):
        yield {self.field: response.url}
        yield response.follow_all("a")
"""
REGISTRY = """
[spiders.Fleet]
file = "pages.py"
execution_mode = "distributed"

[spiders.Here]
file = "pages.py:Pages"
outputs = ["here.jsonl?replace=yes"]

[spiders.Broken]
file = "nowhere.py"

[spiders.Nowhere]
file = "pages.py"
outputs = ["here.unknown"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path)


def project(folder: Path) -> Path:
    (folder / "pages.py").write_text(SPIDER)
    (folder / "shoal.toml").write_text(REGISTRY)
    return folder


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


def must(answer: tuple[int, Any], status: int = 200) -> Any:
    assert answer[0] == status, answer
    return answer[1]


def start(api: Api, spider: str, **more: Any) -> Any:
    return must(api.ask("POST", "/api/runs", {"spider": spider, **more}), 201)


def run_of(api: Api, run_id: str) -> Any:
    return must(api.get(f"/api/runs/{run_id}"))


def until_state(api: Api, run_id: str, state: str) -> Any:
    return until(lambda: (found := run_of(api, run_id))["state"] == state and found, what=f"run {run_id} {state}")


def items_of(api: Api, run_id: str, limit: int = 7) -> list[Any]:
    """All items, page by page."""
    found: list[Any] = []
    after = 0
    while (page := must(api.get(f"/api/runs/{run_id}/items?after={after}&limit={limit}")))["items"]:
        assert len(page["items"]) <= limit
        found += page["items"]
        after = page["next"]
    assert [item["seq"] for item in found] == sorted({item["seq"] for item in found})
    assert len({item["key"] for item in found}) == len(found)
    return found


@contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Shoal's own, as it was told to be started."""
    with (folder / f"{words[0]}-{time.monotonic_ns()}.log").open("wb") as log:
        process = forking.Popen(
            [*SHOAL, *words], cwd=folder, stdout=log, stderr=log, env={**os.environ, "SHOAL_DOWNLOAD_DELAY": "0"}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def working(folder: Path, started: Any) -> Any:
    """A worker, by the command that came back."""
    program, *words = shlex.split(started["worker_command"])
    assert program == "shoal"
    return command(folder, *words)


# -- a fleet


def test_a_fleet_keeps_to_the_addresses_of_the_server_that_began(folder: Path, site: Target) -> None:
    """Whoever may start runs can't look at private addresses through its workers."""
    with serving(folder, {"SHOAL_SERVE__ALLOW": "10.9.8.0/24"}, "--frontier", frontier_url("redis")) as api:
        begun = start(api, "Fleet", urls=[f"{site.url}/"])
        with working(folder, begun) as worker:
            assert worker.wait(PATIENCE) == 0
        assert must(api.get(f"/api/runs/{begun['run_id']}/ledger"))["failed_kinds"] == {"address": 1}
        assert not site.visits()


def test_a_fleet_is_started_paused_resumed_and_read_over_http(folder: Path, site: Target) -> None:
    links = "".join(f"&link=/{number}%3Fwait%3D0.1" for number in range(40))
    first, bad = normalize_url(f"{site.url}/?x{links}"), f"{site.url}/bad?status=500"
    with serving(folder, None, "--frontier", frontier_url("redis")) as api:
        begun = start(api, "Fleet", urls=[first, bad, "no url"], arguments={"field": "address"})
        run_id = begun["run_id"]
        assert (begun["status"], begun["spider"], begun["mode"]) == ("queued", "pages", "distributed")
        assert (begun["enqueued"], begun["unreadable"]) == (2, 1)
        with working(folder, begun) as worker:
            site.wait_for(12)
            assert must(api.ask("POST", f"/api/runs/{run_id}/pause"))["state"] == "paused"
            until(lambda: run_of(api, run_id)["stats"]["in_flight"] == 0, what="what is in flight over")
            assert stands_still(site)
            assert run_of(api, run_id)["stats"]["ready"] > 0
            assert must(api.ask("POST", f"/api/runs/{run_id}/resume"))["state"] == "running"
            assert worker.wait(PATIENCE) == 0
        page = run_of(api, run_id)
        assert (page["state"], page["spider"], page["stats"]["done"], page["stats"]["failed"]) == (
            "finished", "pages", 41, 1
        )  # fmt: skip
        pages = [first, *(f"{site.url}/{number}?wait=0.1" for number in range(40))]
        assert sorted(item["item"]["address"] for item in items_of(api, run_id)) == sorted(pages)
        ledger = must(api.get(f"/api/runs/{run_id}/ledger"))
        assert ledger["balanced"] is True
        assert (ledger["pushed"], ledger["done"], ledger["failed_kinds"]) == (42, 41, {"http 500": 1})
        history = must(api.get(f"/api/runs/{run_id}/url?url={quote(pages[7])}"))
        assert (history["state"], history["status"], history["parent"], history["items"]) == ("done", 200, first, 1)
        assert history["events"]
        assert must(api.get(f"/api/runs/{run_id}/url?url={site.url}/never"), 404)["error"]["kind"] == "no such url"

        dead = must(api.get(f"/api/runs/{run_id}/failed?limit=5"))
        assert dead["kinds"] == {"http 500": 1}
        assert [(each["url"], each["status"]) for each in dead["failed"]] == [(bad, 500)]
        failures = must(api.get(f"/api/runs/{run_id}/failures"))["kinds"]
        assert [(each["kind"], each["count"], each["examples"][0]["url"]) for each in failures] == [
            ("http 500", 1, bad)
        ]
        assert must(api.get(f"/api/runs/{run_id}/failures?examples=0"))["kinds"][0]["examples"] == []
        _check_reports(api, run_id, len(pages))

        site.mend()
        retry = f"/api/runs/{run_id}/retry-failed"
        assert must(api.ask("POST", retry, {"kinds": ["timeout"]}))["retried"] == 0
        assert must(api.ask("POST", retry, {"host": "other.example"}))["retried"] == 0
        assert must(api.ask("POST", retry, {"host": host_of(bad), "url": "*/good*"}))["retried"] == 0
        assert must(api.ask("POST", retry, {"host": "a/b"}), 422)["error"]["kind"] == "bad request"
        assert must(api.ask("POST", retry, {"kinds": ["http 500"], "url": "*/bad?*"}))["retried"] == 1
        assert must(api.ask("POST", retry))["retried"] == 0
        assert must(api.ask("POST", f"/api/runs/{run_id}/resume"))["state"] == "running"
        assert must(api.ask("DELETE", f"/api/runs/{run_id}"), 409)["error"]["kind"] == "wrong state"
        with working(folder, begun) as worker:
            assert worker.wait(PATIENCE) == 0
        assert len(items_of(api, run_id)) == 42
        assert must(api.get("/api/runs?spider=pages&limit=1"))["runs"][0]["run_id"] == run_id
        assert must(api.get("/api/runs?spider=other"))["runs"] == []
        assert must(api.ask("POST", f"/api/runs/{run_id}/cancel"), 409)["error"]["kind"] == "wrong state"
        assert must(api.ask("DELETE", f"/api/runs/{run_id}")) == {"run_id": run_id, "removed": True}
        assert must(api.get(f"/api/runs/{run_id}"), 404)["error"]["kind"] == "no such run"


def _check_reports(api: Api, run_id: str, pages: int) -> None:
    """What a finished run left behind: its history, its process, its last items; and a comparison with itself."""
    samples = must(api.get(f"/api/runs/{run_id}/history"))["samples"]
    assert (samples[-1]["done"], samples[-1]["failed"], samples[-1]["left"]) == (pages, 1, 0)
    assert samples[0]["pages_per_second"] is None
    assert len(must(api.get(f"/api/runs/{run_id}/history?points=2"))["samples"]) <= 3
    assert must(api.get(f"/api/runs/{run_id}/history?since={samples[-1]['at'] + 1}"))["samples"] == []
    workers = must(api.get(f"/api/runs/{run_id}/workers"))
    assert [(each["role"], each["state"], each["pages"], each["failed"]) for each in workers["workers"]] == [
        ("worker", "ended", pages, 1)
    ]
    recent = must(api.get(f"/api/runs/{run_id}/items/recent?limit=5"))
    assert len(recent["items"]) == 5
    assert recent["fields"] == [{"type": "item", "field": "address", "filled": pages, "items": pages, "share": 1.0}]
    compared = must(api.get(f"/api/runs/compare?a={run_id}&b={run_id}"))
    assert (compared["a"]["ending"], compared["a"]["outcome"]) == ("finished, degraded", "degraded")
    assert compared["b"]["failed_kinds"] == {"http 500": 1}
    figures = {each["name"]: (each["a"], each["change"]) for each in compared["differences"]}
    assert (figures["pages"], figures["failed: http 500"], figures["field address"]) == ((pages, 0), (1, 0), (1, 0))
    assert must(api.get(f"/api/runs/compare?a={run_id}&b=none"), 404)["error"]["kind"] == "no such run"
    for path in ("history", "workers", "failures", "items/recent"):
        assert must(api.get(f"/api/runs/none/{path}"), 404)["error"]["kind"] == "no such run"


def test_hosts_are_changed_and_blocked_live(folder: Path, site: Target) -> None:
    host = host_of(site.url)
    with serving(folder, None, "--frontier", frontier_url("redis")) as api:
        assert must(api.ask("PUT", f"/api/hosts/{host}", {"delay": 1}), 409)["error"]["kind"] == "no run"
        begun = start(api, "Fleet", urls=[f"{site.url}/{number}?wait=0.05" for number in range(500)])
        with working(folder, begun):
            site.wait_for(10)
            blocked = must(api.ask("POST", f"/api/hosts/{host}/block", {"seconds": 600, "reason": "a test"}))["hosts"]
            assert [each["host"] for each in blocked] == [host]
            assert (blocked[0]["block_reason"], 590 < blocked[0]["blocked_for"] <= 600) == ("a test", True)
            until(lambda: stands_still(site), what="the site left alone")
            changed = must(api.ask("PUT", f"/api/hosts/{host}", {"delay": 0.2}))["hosts"][0]
            assert (changed["delay"], changed["why"]) == (0.2, "set for this host")
            assert changed["blocked_for"] > 0
            unblocked = must(api.ask("POST", f"/api/hosts/{host}/unblock"))["hosts"][0]
            assert unblocked["blocked_for"] == 0
            began = time.monotonic()
            site.wait_for(4)
            assert time.monotonic() - began > 0.55  # three pauses of 0.2 s
            must(api.ask("PUT", f"/api/hosts/{host}", {"reset": True}))
            site.wait_for(20)
        shown = must(api.get("/api/hosts?limit=5"))["hosts"]
        assert [(each["host"], each["delay"]) for each in shown] == [(host, 0.0)]


def test_a_cluster_is_seen_and_scaled(folder: Path, site: Target) -> None:
    frontier = frontier_url("redis")
    with serving(folder, None, "--frontier", frontier, "--set", "cluster.session=6") as api:
        urls = [f"{site.url}/{number}?wait=0.2" for number in range(2000)]
        run_id = start(api, "Fleet", urls=urls)["run_id"]
        assert must(api.get(f"/api/clusters/{run_id}"), 404)["error"]["kind"] == "no such cluster"
        options = [
            "--run-id",
            run_id,
            "--frontier",
            frontier,
            "--session-timeout",
            "6",
            "--runner",
            "1",
            "--backup",
            "1",
        ]
        with (
            command(folder, "node", "Fleet", "--name", "crawler_1", *options),
            command(folder, "node", "Fleet", "--name", "crawler_2", *options),
        ):

            def seen(holds: Callable[[Any], bool]) -> Any:
                def look() -> Any:
                    status, page = api.get(f"/api/clusters/{run_id}")
                    return page if status == 200 and holds(page) else None

                return until(look, 20, "the cluster")

            page = seen(lambda page: sorted(page["roles"].values()) == ["Backup Runner", "Runner"] and page["slots"])
            assert page["counts"] == {"runner": 1, "backup": 1}
            assert sorted(member["name"] for member in page["members"]) == ["crawler_1", "crawler_2"]
            assert all(member["age"] < 6 and member["where"] for member in page["members"])
            (runner,) = (name for name, role in page["roles"].items() if role == "Runner")
            assert page["slots"][0]["holder"] == runner
            assert {"joined", "elected"} <= {event["what"] for event in page["events"]}
            scaled = must(api.ask("POST", f"/api/clusters/{run_id}/scale", {"runner": 2, "backup": 0}))
            assert (scaled["before"], scaled["after"]) == ({"runner": 1, "backup": 1}, {"runner": 2, "backup": 0})
            seen(lambda page: list(page["roles"].values()) == ["Runner", "Runner"])


# -- in the server


def test_a_run_in_the_server_is_paused_cancelled_and_resumed(folder: Path, site: Target) -> None:
    with serving(folder, None, "--set", "serve.max_sessions=1", "--set", "serve.max_answer_bytes=200") as api:
        urls = [f"{site.url}/{number}?wait=0.1" for number in range(60)]
        begun = start(api, "Here", urls=urls)
        run_id = begun["run_id"]
        assert (begun["status"], begun["mode"], begun["worker_command"]) == ("running", "single", None)
        assert api.ask("POST", "/api/runs", {"spider": "Here", "new_run": True})[0] == 429
        site.wait_for(6)
        must(api.ask("POST", f"/api/runs/{run_id}/pause"))
        until(lambda: run_of(api, run_id)["stats"]["in_flight"] == 0, what="what is in flight over")
        assert stands_still(site)
        must(api.ask("POST", f"/api/runs/{run_id}/resume"))
        site.wait_for(6)
        must(api.ask("POST", f"/api/runs/{run_id}/cancel"))
        must(api.ask("POST", f"/api/runs/{run_id}/resume"))  # at once: while the first is still on its way out
        site.wait_for(6)
        must(api.ask("POST", f"/api/runs/{run_id}/cancel"))
        until(lambda: stands_still(site), what="the site left alone")
        assert must(api.ask("POST", f"/api/runs/{run_id}/pause"), 409)["error"]["kind"] == "wrong state"
        assert 0 < run_of(api, run_id)["stats"]["done"] < 60
        must(api.ask("POST", f"/api/runs/{run_id}/resume"))  # it is this server's, so it works on it again
        site.hurry()
        until_state(api, run_id, "finished")
        assert sorted(item["item"]["url"] for item in items_of(api, run_id)) == sorted(urls)
        assert 1 <= len(must(api.get(f"/api/runs/{run_id}/items"))["items"]) < 7  # no answer is too large
        assert must(api.get(f"/api/runs/{run_id}/ledger"))["balanced"] is True
        assert len((folder / "here.jsonl").read_text().splitlines()) == 60  # once each, whatever happened


def test_runs_in_a_file_survive_the_server(folder: Path, site: Target) -> None:
    urls = [f"{site.url}/{number}?wait=0.1" for number in range(60)]
    with serving(folder, None, "--frontier", "sqlite:///runs.db") as api:
        run_id = start(api, "Here", urls=urls)["run_id"]
        site.wait_for(10)
        api.process.terminate()
        assert "Application shutdown complete" in api.process.said()
        api.start()
        left = run_of(api, run_id)
        assert left["stats"]["in_flight"] == 0
        assert left["stats"]["left"] > 0
        site.hurry()
        assert start(api, "Here", urls=urls)["run_id"] == run_id  # the same words go on
        until_state(api, run_id, "finished")
        assert sorted(item["item"]["url"] for item in items_of(api, run_id)) == sorted(urls)
        assert start(api, "Here", urls=urls)["run_id"] != run_id


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_the_next_run_can_start_when_the_last_one_is_over(folder: Path, site: Target, store: str) -> None:
    """A run that is shown as finished or cancelled has released its output and its place."""
    options = [] if store == "memory" else ["--frontier", frontier_url(store)]
    with serving(folder, None, "--set", "serve.max_sessions=1", *options) as api:
        for number in range(5):
            run_id = start(api, "Here", urls=[f"{site.url}/{number}"])["run_id"]
            until(lambda: run_of(api, run_id)["state"] == "finished", pause=0, what="finished")  # noqa: B023
            cancelled = start(api, "Here", urls=[f"{site.url}/{number}?gate=1"])["run_id"]
            must(api.ask("POST", f"/api/runs/{cancelled}/cancel"))
        answers: list[int] = []
        same = [{"spider": "Here", "urls": [f"{site.url}/last?gate=1"]}] * 4
        with ThreadPoolExecutor(4) as pool:
            answers += pool.map(lambda body: api.ask("POST", "/api/runs", body)[0], same)
        assert sorted(answers) == [201, 429, 429, 429]


def test_private_addresses_are_not_crawled_for_callers(folder: Path, site: Target) -> None:
    with serving(folder, {"SHOAL_SERVE__ALLOW": ""}) as api:
        run_id = start(api, "Here", urls=[f"{site.url}/secret"])["run_id"]
        until_state(api, run_id, "finished")
        assert must(api.get(f"/api/runs/{run_id}/failed"))["kinds"] == {"address": 1}
        assert site.visits() == []


# -- what can't be done


@pytest.fixture(scope="module", params=["memory", "redis", "postgresql"])
def any_api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, str]]:
    """A server on each kind of store, with a finished run."""
    folder = project(tmp_path_factory.mktemp("api"))
    options = [] if request.param == "memory" else ["--frontier", frontier_url(request.param)]
    with serving(folder, None, *options) as api:
        run_id = start(api, "Here", urls=["http://127.0.0.1:1/"])["run_id"]
        until_state(api, run_id, "finished")
        yield api, run_id


def test_batches_are_no_runs(any_api: tuple[Api, str], site: Target) -> None:
    """They are their callers' own."""
    api, run_id = any_api
    session = api.batch([f"{site.url}/a"])["session_id"]
    assert [run["run_id"] for run in must(api.get("/api/runs"))["runs"]] == [run_id]
    for path in ("", "/items", "/ledger", "/failed", f"/url?url={site.url}/a"):
        assert must(api.get(f"/api/runs/{session}{path}"), 404)["error"]["kind"] == "no such run"
    assert api.ask("DELETE", f"/api/runs/{session}?force=true")[0] == 404
    assert api.ask("POST", f"/api/runs/{session}/cancel")[0] == 404


def test_servers_of_two_projects_on_one_store_do_not_see_each_other(folder: Path, site: Target) -> None:
    options = ["--frontier", frontier_url("redis")]
    with (
        serving(folder, {"SHOAL_PROJECT_NAME": "one"}, *options) as one,
        serving(folder, {"SHOAL_PROJECT_NAME": "two"}, *options) as two,
    ):
        run_id = start(one, "Fleet", urls=[f"{site.url}/a"])["run_id"]
        session = one.batch([f"{site.url}/b"])["session_id"]
        assert [run["run_id"] for run in must(one.get("/api/runs"))["runs"]] == [run_id]
        assert must(two.get("/api/runs"))["runs"] == []
        for path in ("", "/items", "/ledger", "/failed", f"/url?url={site.url}/a"):
            assert must(two.get(f"/api/runs/{run_id}{path}"), 404)["error"]["kind"] == "no such run"
        assert two.ask("POST", f"/api/runs/{run_id}/cancel")[0] == 404
        assert two.ask("DELETE", f"/api/runs/{run_id}?force=true")[0] == 404
        assert run_of(one, run_id)["state"] == "queued"
        assert must(one.get(f"/api/crawl/{session}"))["session_id"] == session
        assert two.get(f"/api/crawl/{session}")[0] == 404
        assert f'run="{run_id}"' in one.text("/metrics")
        assert f'run="{run_id}"' not in two.text("/metrics")


def test_what_others_do_to_a_run_of_the_server_is_seen(any_api: tuple[Api, str], site: Target) -> None:
    api, _ = any_api
    if not api.arguments:
        return  # nobody else can reach a store in memory
    run_id = start(api, "Here", urls=[f"{site.url}/{number}?gate=1" for number in range(3)])["run_id"]
    until(lambda: run_of(api, run_id)["stats"]["in_flight"] == 3, what="all of it in flight")
    forking.run([*SHOAL, "cancel", run_id, *api.arguments], check=True, capture_output=True)
    until(lambda: run_of(api, run_id)["stats"]["in_flight"] == 0, what="all leases are released")
    assert run_of(api, run_id)["state"] == "cancelled"
    must(api.ask("DELETE", f"/api/runs/{run_id}"))


BAD_STARTS = [
    (404, b'{"spider": "pages.py:Pages"}'),
    (404, b'{"spider": "../pages.py"}'),
    (404, b'{"spider": "a\\u0000b"}'),
    (422, b'{"spider": "\\ud800"}'),
    (422, b'{"spider": "%s"}' % (b"x" * 5000)),
    (422, b'{"spider": "Here", "code": "import os"}'),
    (422, b'{"spider": "Here", "file": "x.py"}'),
    (422, b'{"spider": "Here", "urls": []}'),
    (422, b'{"spider": "Here", "urls": ["%s"]}' % (b"x" * 9000)),
    (422, b'{"spider": "Here", "urls": [%s"x"]}' % (b'"x",' * 10_000)),
    (422, b'{"spider": "Here", "urls": ["\\udfff"]}'),
    (422, b'{"spider": "Here", "arguments": {"a": [1]}}'),
    (422, b'{"spider": "Here", "arguments": {"a": NaN}}'),
    (422, b'{"spider": "Here", "arguments": {"a": 1e999}}'),
    (422, b'{"spider": "Here", "arguments": {"a": 99999999999999999999}}'),
    (422, b'{"spider": "Here", "arguments": {"\\ud800": 1}}'),
    (422, b'{"spider": "Here", "arguments": {"settings": "x"}}'),
    (422, b'{"spider": "Here", "arguments": {"__class__": "x"}}'),
    (422, b'{"spider": "Here", "mode": "both"}'),
    (422, b'{"spider": "Broken"}'),
    (422, b'{"spider": "Nowhere"}'),
    (422, b'{"spider": "Here", "arguments": {"a": %s}}' % (b"9" * 5000)),
    (422, b"[" * 100_000),
    (422, b"nonsense"),
]


def check_problem(answer: tuple[int, Any], status: int, what: object) -> None:
    assert answer[0] == status, (what, answer)
    assert set(answer[1]) == {"error"}, what
    assert set(answer[1]["error"]) == {"kind", "message", "details"}, what
    assert answer[1]["error"]["message"], what


def test_bad_starts_are_refused_in_one_format(any_api: tuple[Api, str]) -> None:
    api, run_id = any_api
    for status, body in BAD_STARTS:
        check_problem(api.ask("POST", "/api/runs", body), status, body[:100])
    assert [run["run_id"] for run in must(api.get("/api/runs"))["runs"]] == [run_id]  # nothing was begun


def test_bad_names_and_numbers_are_refused_in_one_format(any_api: tuple[Api, str]) -> None:
    api, run_id = any_api
    for name, status in (("none", 404), ("%00", 422), ("a%0Ab", 422), ("%ED%A0%80", 404), ("x" * 5000, 422)):
        for method, path in (
            ("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/cancel"), ("POST", "/retry-failed"),
            ("DELETE", ""), ("GET", "/items"), ("GET", "/ledger"), ("GET", "/failed"), ("GET", "/url?url=http://a/"),
        ):  # fmt: skip
            check_problem(api.ask(method, f"/api/runs/{name}{path}"), status, (method, name[:20], path))
    for method, path, body, status in (
        ("GET", f"/api/runs/{run_id}/items?after=99999999999999999999", None, 422),
        ("GET", f"/api/runs/{run_id}/items?after=-1", None, 422),
        ("GET", f"/api/runs/{run_id}/items?limit=1e9", None, 422),
        ("GET", f"/api/runs/{run_id}/failed?limit=NaN", None, 422),
        ("GET", f"/api/runs/{run_id}/url", None, 422),
        ("GET", f"/api/runs/{run_id}/url?url=%00", None, 422),
        ("GET", f"/api/runs/{run_id}/url?url=ftp://a/", None, 422),
        ("GET", f"/api/runs/{run_id}/url?url=http://a/%2500%ED%A0%80", None, 404),
        ("GET", "/api/runs?limit=0", None, 422),
        ("GET", "/api/runs?spider=%00", None, 422),
        ("POST", f"/api/runs/{run_id}/retry-failed", b'{"kinds": ["a\\u0000"]}', 422),
        ("POST", f"/api/runs/{run_id}/retry-failed", b'{"kinds": ["\\ud800"]}', 422),
        ("PUT", "/api/hosts/example.com", b'{"delay": NaN}', 422),
        ("PUT", "/api/hosts/example.com", b'{"delay": 1e300}', 422),
        ("PUT", "/api/hosts/example.com", b'{"delay": -1}', 422),
        ("PUT", "/api/hosts/example.com", b'{"concurrency": 99999999999999999999}', 422),
        ("PUT", "/api/hosts/example.com", b"{}", 422),
        ("PUT", "/api/hosts/%00", b'{"delay": 1}', 422),
        ("PUT", "/api/hosts/a%20b", b'{"delay": 1}', 422),
        ("PUT", "/api/hosts/%ED%A0%80", b'{"delay": 1}', 422),
        ("PUT", f"/api/hosts/{'x' * 299}", b'{"delay": 1}', 422),
        ("POST", "/api/hosts/example.com/block", b'{"seconds": Infinity}', 422),
        ("POST", "/api/hosts/example.com/block", b'{"reason": "\\u0000"}', 422),
        ("POST", "/api/hosts/*/block", None, 422),
        ("GET", "/api/hosts?limit=99999999999999999999", None, 422),
        ("GET", "/api/clusters/%00", None, 422),
        ("POST", "/api/clusters/x/scale", b'{"runner": 0}', 422),
        ("POST", "/api/clusters/x/scale", b'{"runner": 99999999999999999999}', 422),
        ("POST", "/api/clusters/x/scale", b"{}", 422),
    ):  # fmt: skip
        check_problem(api.ask(method, path, body), status, (method, path[:60], body))


def test_the_largest_values_that_are_taken_are_kept(any_api: tuple[Api, str]) -> None:
    api, run_id = any_api
    assert must(api.get(f"/api/runs/{run_id}/items?after={10**13}&limit=1000"))["items"] == []
    must(api.ask("PUT", "/api/hosts/b%C3%BCcher.example:8080", {"delay": 1e9, "concurrency": 10_000}))
    must(api.ask("PUT", "/api/hosts/*", {"delay": None, "concurrency": None}))
    must(api.ask("POST", "/api/hosts/example.com/block", {"seconds": 1e9, "reason": "ü" * 200}))
    must(api.ask("POST", "/api/hosts/example.com/unblock"))


def test_a_fleet_and_a_cluster_need_a_server_of_their_own(any_api: tuple[Api, str]) -> None:
    api, _ = any_api
    if api.arguments:
        check_problem(api.get("/api/clusters/none"), 404, "cluster")
        check_problem(api.ask("POST", "/api/clusters/none/scale", {"runner": 1}), 404, "cluster")
    else:
        check_problem(api.ask("POST", "/api/runs", {"spider": "Fleet"}), 422, "fleet")
        assert "cannot share" in api.ask("POST", "/api/runs", {"spider": "Fleet"})[1]["error"]["message"]
        check_problem(api.get("/api/clusters/none"), 422, "cluster")


def test_a_store_that_is_away_is_told_but_its_password_is_not(folder: Path) -> None:
    redis = RedisServer(requirepass="secret")
    url = redis.url.replace("redis://", "redis://:secret@")
    try:
        with serving(folder, None, "--frontier", f"{url}?timeout=1", "--set", "cluster.session=2") as api:
            begun = start(api, "Fleet", urls=["http://127.0.0.1:1/"])
            run_id = begun["run_id"]
            assert "redis://:***@127.0.0.1" in begun["worker_command"]
            redis.kill()
            answers = []
            for path in ("/api/runs", f"/api/runs/{run_id}", f"/api/runs/{run_id}/items", "/api/hosts"):
                answers.append(api.get(path))
                check_problem(answers[-1], 503, path)
            answers += [api.get("/api/clusters/x"), api.get("/ready")]
            assert must(answers[-2], 503)["error"]["kind"] == "coordinator away"
            assert must(answers[-1], 503)["error"]["message"] == "the frontier does not respond"
            place = url.rpartition("@")[2].partition("/")[0]
            assert place not in str(answers)
            assert "127.0.0.1" not in str(answers)
            assert place in api.process.said()  # the log has it
            redis.start()
            until(lambda: api.get(f"/api/runs/{run_id}")[0] == 200, what="the run back")
    finally:
        redis.close()


# -- the description


def test_the_description_is_complete_and_its_examples_are_right(any_api: tuple[Api, str]) -> None:
    models: dict[str, Any] = {}
    for module in pkgutil.iter_modules(resources.__path__, f"{resources.__name__}."):
        models |= vars(importlib.import_module(module.name))
    api, _ = any_api
    described = must(api.get("/openapi.json"))
    ours = {path: steps for path, steps in described["paths"].items() if path.split("/")[2:3] != ["crawl"]}
    ours = {path: steps for path, steps in ours.items() if path.startswith("/api/")}
    assert len(ours) > 20
    for path, steps in ours.items():
        for method, step in steps.items():
            assert step["description"], (method, path)
            good = step["responses"].get("201") or step["responses"]["200"]
            name = good["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            assert described["components"]["schemas"][name]["examples"], name
            for example in answer(models[name]).model_config["json_schema_extra"]["examples"]:  # OpenAPI omits null
                assert json.loads(msgspec.json.encode(msgspec.convert(example, models[name]))) == example
            if "requestBody" in step:
                text = str(step["requestBody"])
                asked = next(name for name in described["components"]["schemas"] if f"schemas/{name}'" in text)
                for example in described["components"]["schemas"][asked]["examples"]:
                    models[asked].model_validate(example)
            for problem in ("401", "422", "503"):
                assert problem in step["responses"], (method, path)
