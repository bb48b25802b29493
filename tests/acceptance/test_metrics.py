"""`--metrics-port` of real processes: metrics agree with the counters, and a scrape always gets a response."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shoal.ports import Counts
from shoal.runs.cluster import open_coordinator
from tests.acceptance.clusters import SESSION, Cluster, check_items, urls
from tests.acceptance.faults import picture
from tests.acceptance.fleets import SHOAL, SPIDER, Fleet, frontier_url
from tests.acceptance.serving import serving
from tests.acceptance.target import Target, host_of, target
from tests.support import forking
from tests.support.databases import RedisServer, free_port
from tests.support.patience import allowance
from tests.support.scraping import Scrape, addresses, get, promtool, scrape, scrape_until

STATES = ("ready", "waiting", "in_flight", "done", "failed")


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


def log_of(fleet: Fleet, number: int = 0) -> Path:
    return fleet.folder / f"worker-{number}.log"


def own_figures(shown: Scrape) -> dict[str, float]:
    names = ("shoal_pages_total", "shoal_items_total", "shoal_page_bytes_total", "shoal_fetch_duration_seconds_count")
    return {name: shown(name) for name in names}


def test_a_worker_tells_what_the_ledger_says(site: Target, tmp_path: Path) -> None:
    with Fleet(tmp_path, frontier_url("redis")) as fleet:
        pages = [f"{site.url}/{number}" for number in range(20)]
        gone = [f"{site.url}/gone/{number}?status=404" for number in range(3)]
        held = [f"{site.url}/held/{number}?gate=1" for number in range(2)]
        run = {"run": fleet.start(*pages, *gone, *held), "spider": "pages"}
        worker = fleet.worker("--metrics-port", "0", "--keep-alive")
        (url,) = addresses(log_of(fleet))

        settled = {"done": 20, "failed": 3, "in_flight": 2}
        shown = scrape_until(
            url,
            lambda shown: (
                all(shown.all("shoal_requests", state=state) == [count] for state, count in settled.items())
                and shown("shoal_pages_in_flight", **run) == 2
            ),
        )
        assert shown("shoal_host_requests_in_flight", host=host_of(site.url), **run) == 2
        assert shown("shoal_errors_total", kind="http 404", **run) == 3
        assert time.time() - shown("shoal_worker_heartbeat_timestamp_seconds", **run) < 20
        assert shown("shoal_ledger_imbalance", **run) == 0

        site.open_gate()
        shown = scrape_until(url, lambda shown: shown.all("shoal_requests", state="done") == [22])
        ledger = fleet.stats()
        assert {state: shown("shoal_requests", state=state, **run) for state in STATES} == {
            state: ledger[state] for state in STATES
        }
        assert shown("shoal_requests_pushed_total", **run) == ledger["pushed"] == 25
        assert shown("shoal_items_total", **run) == shown("shoal_run_items_total", **run) == ledger["items"] == 22
        assert shown("shoal_pages_total", **run) == shown("shoal_fetch_duration_seconds_count", **run) == 22
        assert shown("shoal_frontier_up", **run) == len(shown.all("shoal_worker_info", **run)) == 1

        status, text, kind = get(f"{url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert promtool("check", "metrics", text=text) == ""
        assert get(f"{url}/health")[:2] == (200, '{"status": "ok"}')
        assert get(f"{url}/")[0] == 404

        worker.terminate()
        assert worker.wait(5) == 0
        with pytest.raises(OSError, match="refused"):
            get(f"{url}/metrics")


def test_a_scrape_answers_while_the_frontier_does_not(site: Target, tmp_path: Path) -> None:
    server = RedisServer()
    try:
        with Fleet(tmp_path, frontier_url("redis", server)) as fleet:
            fleet.start(*(f"{site.url}/{number}?wait=0.05" for number in range(150)))
            fleet.worker("--metrics-port", "0", "--keep-alive")
            (url,) = addresses(log_of(fleet))
            scrape_until(url, lambda shown: shown.all("shoal_pages_total") > [30])

            with server.frozen(), ThreadPoolExecutor(8) as several:
                began = time.monotonic()
                answers = list(several.map(lambda _: scrape(url), range(8)))
                assert time.monotonic() - began < allowance(2)
                for shown in answers:
                    assert shown("shoal_frontier_up") == 0
                    assert shown.all("shoal_requests") == shown.all("shoal_host_delay_seconds") == []
                    assert own_figures(shown)["shoal_pages_total"] >= 30
                began = time.monotonic()
                status, text, _ = get(f"{url}/health")
                assert time.monotonic() - began < allowance(2)
                assert (status, json.loads(text)["reason"]) == (503, "the frontier does not answer")

            shown = scrape_until(url, lambda shown: shown("shoal_frontier_up") == 1, timeout=5)
            assert get(f"{url}/health")[0] == 200
            shown = scrape_until(url, lambda shown: shown.all("shoal_requests", state="done") == [150])
            assert shown("shoal_leases_lost_total") == shown("shoal_ledger_imbalance") == 0
            found = picture(fleet.frontier, fleet.run_id)
            assert found.in_order
            assert len(found.items) == shown("shoal_items_total") == 150
    finally:
        server.close()


def test_a_takeover_shows_in_the_successors_metrics(site: Target, tmp_path: Path) -> None:
    frontier = frontier_url("redis")
    with Cluster(tmp_path, frontier, frontier) as cluster:
        expected = urls(site, 400, wait=0.2)  # for longer than all of this takes
        cluster.start(*expected)
        first = cluster.node("crawler_1", "--metrics-port", "0", runner=1, backup=1)
        (before,) = addresses(first.log)
        shown = scrape_until(before, lambda shown: shown("shoal_node_role", role="Runner") == 1)
        second = cluster.node("crawler_2", "--metrics-port", "0", runner=1, backup=1)
        (after,) = addresses(second.log)
        shown = scrape_until(after, lambda shown: shown("shoal_node_role", role="Backup Runner") == 1)
        assert shown("shoal_takeovers_total", cluster=cluster.run_id) == 0
        assert shown("shoal_frontier_up") == shown("shoal_worker_info", worker="crawler_2") == 1
        assert shown("shoal_requests_pushed_total") == 400
        assert shown.all("shoal_worker_heartbeat_timestamp_seconds") == []
        assert get(f"{after}/health")[0] == 200
        assert scrape(before)("shoal_cluster_events_total", what="elected") == 1

        scrape_until(before, lambda shown: shown("shoal_pages_total") > 10)
        first.kill()
        shown = scrape_until(after, lambda shown: shown("shoal_node_role", role="Runner") == 1)
        assert shown("shoal_takeovers_total") == shown("shoal_cluster_events_total", what="took over") == 1
        shown = scrape_until(after, lambda shown: shown("shoal_pages_total") > 10)
        assert len(shown.all("shoal_worker_heartbeat_timestamp_seconds")) == 1
        promtool("check", "metrics", text=shown.text)
        site.hurry()
        assert second.wait(60) == 0
        check_items(cluster, expected)


def test_what_a_node_counts_goes_on_when_it_retires_and_works_again(site: Target, tmp_path: Path) -> None:
    """Each time it has a slot it has a new worker; to Prometheus a counter that falls has begun anew."""
    frontier = frontier_url("redis")
    with Cluster(tmp_path, frontier, frontier) as cluster:
        cluster.start(*urls(site, 4000, wait=0.02))
        nodes = {}
        for name in ("crawler_1", "crawler_2"):
            node = cluster.node(name, "--metrics-port", "0", runner=2, backup=0)
            (nodes[name],) = addresses(node.log)
        for url in nodes.values():
            scrape_until(url, lambda shown: shown("shoal_node_role", role="Runner") == 1)
            scrape_until(url, lambda shown: shown("shoal_pages_total") > 10)
        scale(cluster, Counts(1, 1))
        retired = next_with(nodes, "retired")
        counted = [scrape(retired)("shoal_pages_total")]
        scale(cluster, Counts(2, 0))
        while (shown := scrape(retired))("shoal_node_role", role="Runner") != 1:
            counted.append(shown("shoal_pages_total"))
        shown = scrape_until(retired, lambda shown: shown("shoal_pages_total") > counted[-1] + 10)
        assert counted == sorted(counted)
        assert counted[0] > 10
        assert shown("shoal_cluster_events_total", what="elected") == 2


def scale(cluster: Cluster, counts: Counts) -> None:
    async def tell() -> None:
        opened = await open_coordinator(cluster.coordinator, cluster.run_id, ttl=SESSION)
        try:
            await opened.scale(counts)
        finally:
            await opened.close()

    asyncio.run(tell())


def next_with(nodes: dict[str, str], what: str) -> str:
    """The metrics of the first node to which that happens."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for url in nodes.values():
            if scrape(url)("shoal_cluster_events_total", what=what):
                return url
        time.sleep(0.05)
    raise AssertionError(f"no node has {what}")


def test_each_of_several_processes_has_a_port_of_its_own(site: Target, tmp_path: Path) -> None:
    with Fleet(tmp_path, frontier_url("redis")) as fleet:
        fleet.start(*(f"{site.url}/{number}" for number in range(30)))
        refused = fleet.worker("--processes", "2", "--metrics-port", "9100", "--keep-alive")
        assert refused.wait(20) == 2
        assert "--metrics-port 9100-9101" in log_of(fleet).read_text()

        first = free_port()
        parent = fleet.worker("--processes", "2", "--metrics-port", f"{first}-{first + 9}", "--keep-alive")
        found = addresses(log_of(fleet, 1), count=2)
        ports = {urlsplit(url).port for url in found}
        assert len(ports) == 2
        assert ports <= set(range(first, first + 10))
        scrape_until(found[0], lambda shown: shown.all("shoal_requests", state="done") == [30])
        assert sum(scrape(url)("shoal_pages_total") for url in found) == 30
        parent.terminate()
        assert parent.wait(10) == 0


def test_a_crawl_of_its_own_has_metrics_too(site: Target, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(
        SPIDER.replace("settings =", f"start_urls = ['{site.url}/?gate=1']\n    settings =")
    )
    log = tmp_path / "run.log"
    with log.open("w") as out:
        crawl = forking.Popen([*SHOAL, "run", "spider.py", "--metrics-port", "0"], cwd=tmp_path, stdout=out, stderr=out)
    try:
        (url,) = addresses(log)
        shown = scrape_until(url, lambda shown: shown.all("shoal_requests", state="in_flight") == [1])
        assert shown("shoal_pages_in_flight", spider="pages") == 1
        site.open_gate()
        assert crawl.wait(10) == 0
    finally:
        crawl.send_signal(signal.SIGKILL)
        crawl.wait()


def test_metrics_with_a_token(site: Target, tmp_path: Path) -> None:
    """The health of the process needs none."""
    (tmp_path / "spider.py").write_text(
        SPIDER.replace("settings =", f"start_urls = ['{site.url}/?gate=1']\n    settings =")
    )
    token, log = "the-token-of-a-scrape", tmp_path / "run.log"
    command = [*SHOAL, "run", "spider.py", "--metrics-port", "0"]
    short = forking.run(
        command, cwd=tmp_path, env={**os.environ, "SHOAL_WORKER__METRICS_TOKEN": "abc"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert short.returncode == 2
    assert "worker.metrics_token" in short.stderr
    assert "openssl rand -hex 32" in short.stderr
    with log.open("w") as out:
        environ = {**os.environ, "SHOAL_WORKER__METRICS_TOKEN": token}
        crawl = forking.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=environ)
    try:
        (url,) = addresses(log)
        for sent, status in (
            ("", 401), ("Bearer wrong", 401), (token, 401), (f"Basic {token}", 401), ("Bearer \xe9", 401),
            (f"Bearer {token}", 200), (f"bearer  {token}", 200),
        ):  # fmt: skip
            request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": sent} if sent else {})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    found, text = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    found, text = error.code, error.read()
            assert (found, b"shoal_" in text) == (status, status == 200), sent
        assert get(f"{url}/health")[0] == 200
        assert token not in log.read_text()
        site.open_gate()
        assert crawl.wait(10) == 0
    finally:
        crawl.send_signal(signal.SIGKILL)
        crawl.wait()


def test_the_api_tells_of_its_batches_and_of_the_runs_of_its_store(site: Target, tmp_path: Path) -> None:
    with Fleet(tmp_path, frontier_url("redis")) as fleet:
        run = {"run": fleet.start(f"{site.url}/a", f"{site.url}/b"), "spider": "pages"}
        with serving(tmp_path, {"SHOAL_FRONTIER": fleet.frontier}) as api:
            answer = api.batch([f"{site.url}/{number}" for number in range(5)] + [f"{site.url}/x?status=404"])
            assert answer["stats"]["success"] == 5
            held = api.batch([f"{site.url}/held?gate=1"], wait=False)["session_id"]
            site.wait_until(lambda seen: any("held" in visit.path for visit in seen))
            shown = Scrape(api.text("/metrics"))
            promtool("check", "metrics", text=shown.text)
            batch = {"run": "batch local", "spider": "(batch)"}
            assert shown("shoal_pages_total", **batch) == 5
            assert shown("shoal_errors_total", kind="http 404", **batch) == 1
            assert shown("shoal_sessions", kind="local") == 1
            assert shown("shoal_requests", state="in_flight", **batch) == 1
            assert shown("shoal_requests", state="ready", **run) == 2
            assert shown("shoal_frontier_up", **batch) == 1
            site.open_gate()
            api.wait(held)
            assert Scrape(api.text("/metrics"))("shoal_sessions", kind="local") == 0
