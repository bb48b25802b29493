"""The routes of the HTTP API behind the screens, on the same fleet and cluster."""

from __future__ import annotations

from urllib.parse import quote

from tests.acceptance.serving import until
from tests.dashboard.site import ROBOTS
from tests.dashboard.stage import Stage


def test_workers(stage: Stage) -> None:
    def lost_pids() -> set[int]:
        status, answer = stage.api.get("/api/workers")
        assert status == 200
        return {each["pid"] for each in answer["processes"] if each["state"] == "lost"}

    until(lambda: stage.killed_worker in lost_pids(), what="the lost worker")
    _, answer = stage.api.get("/api/workers?limit=1000")
    fleet = {each["pid"]: each for each in answer["processes"] if each["run_id"] == stage.fleet.run_id}
    assert fleet.keys() == {worker.pid for worker in stage.fleet.workers}
    working = [each for each in fleet.values() if each["state"] == "working"]
    assert len(working) == 2
    assert all(each["role"] == "worker" and each["memory"] > 1e6 and each["pages"] > 0 for each in working)
    runners = [each for each in answer["processes"] if each["role"] == "runner" and each["state"] == "working"]
    assert {each["slot"] for each in runners} == {f"{stage.cluster.run_id}/0"}
    assert len(stage.api.get("/api/workers?limit=1")[1]["processes"]) == 1


def test_host(stage: Stage) -> None:
    status, answer = stage.api.get(f"/api/hosts/{stage.site.host}")
    assert status == 200
    assert (answer["state"]["host"], answer["state"]["concurrency"]) == (stage.site.host, 8)
    (robots,) = answer["robots"]
    assert (robots["origin"], robots["text"], robots["is_cut"]) == (stage.site.url, ROBOTS, False)
    assert (answer["identities"], answer["needs"]) == ([], {})
    assert stage.api.get("/api/hosts/unknown.example")[1]["robots"] == []
    assert stage.api.get("/api/hosts/not%20a%20host")[0] == 422


def test_url(stage: Stage) -> None:
    path = f"/api/runs/{stage.fleet.run_id}/url"
    status, answer = stage.api.get(f"{path}?url={quote(stage.site.url + '/page/3', safe='')}")
    assert (status, answer["robots"]) == (200, "allowed")
    assert answer["parents"][-1] == f"{stage.site.url}/"
    status, answer = stage.api.get(f"{path}?url={quote(stage.site.url + '/secret/1', safe='')}")
    assert (status, answer["state"], answer["robots"]) == (200, "failed", "disallowed")


def test_retry_url(stage: Stage) -> None:
    """One that has not failed, or is forbidden, is left alone; one that the run does not have is 404."""
    path = f"/api/runs/{stage.fleet.run_id}/url/retry"
    for url in ("/", "/secret/1"):
        status, answer = stage.api.ask("POST", path, {"url": stage.site.url + url})
        assert (status, answer["retried"]) == (200, 0)
    assert stage.api.ask("POST", path, {"url": f"{stage.site.url}/nowhere"})[0] == 404
    assert stage.api.ask("POST", path, {"url": "nonsense:"})[0] == 422
    assert stage.api.ask("POST", path, {})[0] == 422


def test_show_a_host(stage: Stage) -> None:
    """`shoal hosts show` prints the same."""
    done = stage.fleet.shoal("hosts", "show", stage.site.host)
    assert stage.site.host in done.stdout
    assert f"{stage.site.url}/robots.txt" in done.stdout
    assert "Disallow: /secret" in done.stdout
