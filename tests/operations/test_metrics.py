"""Metrics for Prometheus: names, values and format, and the alerting rules and dashboard in deploy/."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import time
import timeit
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Config, Crawl, Request, Spider
from shoal.cli.main import COMMANDS
from shoal.crawling import engine
from shoal.crawling.stats import Counters, Latency, Standing, Vitals
from shoal.errors import ConfigError
from shoal.fetch.layers.identity_facts import IdentityCounts
from shoal.frontier.memory import MemoryStore
from shoal.operations.metrics import (
    Family,
    Sample,
    of_frontier,
    of_hosts,
    of_ledger,
    of_problems,
    of_sessions,
    of_vitals,
    render,
)
from shoal.operations.metrics_server import Address, health_problem, listen, parse_address
from shoal.ports import Frontier, FrontierOptions, HostState, Run, Stats
from tests.support.scraping import ROOT, Scrape, promtool

LABELS = {"run": "monday", "spider": "books"}
STATS = Stats(pushed=21, ready=1, waiting=2, leased=3, done=10, dead=5, duplicates=7, items=30, seeding=True)
HOST = HostState(
    host="a.example", delay=0.5, why="", concurrency=8, in_flight=2, ready=40, blocked_for=12.5, block_reason=""
)


def counters() -> Counters:
    made = Counters()
    made.fetched, made.from_cache, made.bytes, made.items, made.leases_lost = 12, 2, 3456, 30, 1
    made.errors.update({"http 503": 4, "timeout": 1})
    for seconds in (0.005, 0.01, 0.011, 0.3, 31.0):
        made.latency.measured(seconds)
    return made


def vitals(**changes: Any) -> Vitals:
    standing = Standing(cluster="c", role="Backup Runner", events=Counter({"took over": 2, "lost": 1}))
    values = {
        "worker": "crawler_1", "run_id": "monday", "spider": "books", "counters": counters(), "in_flight": 3,
        "looped_at": time.monotonic() - 5, "standing": standing, "loop_age": 0.25,
        "identities": IdentityCounts(known=5, removed=2, resting=4, requests=60, blocks=7, failures=1), **changes,
    }  # fmt: skip
    return Vitals(**values)


def everything() -> Scrape:
    families = [
        *of_vitals(vitals()),
        *of_frontier(LABELS, up=True),
        *of_ledger(STATS, LABELS),
        *of_hosts([HOST], LABELS),
        *of_sessions({"local": 2, "distributed": 1}, 3),
        *of_problems([("stalled", "critical"), ("worker_lost", "warning"), ("worker_lost", "warning")]),
    ]
    return Scrape(render(families))


# -- the figures


def test_a_process_tells_what_it_did() -> None:
    shown = everything()
    assert shown("shoal_worker_info", worker="crawler_1", **LABELS) == 1
    assert shown("shoal_pages_total", **LABELS) == 12
    assert shown("shoal_pages_from_cache_total", **LABELS) == 2
    assert shown("shoal_page_bytes_total", **LABELS) == 3456
    assert shown("shoal_items_total", **LABELS) == 30
    assert shown("shoal_leases_lost_total", **LABELS) == 1
    assert shown("shoal_worker_loop_age_seconds", **LABELS) == 0.25
    assert shown("shoal_problems", kind="worker_lost", severity="warning") == 2
    assert shown("shoal_pages_in_flight", **LABELS) == 3
    assert shown("shoal_errors_total", kind="http 503", **LABELS) == 4
    assert shown("shoal_errors_total", kind="timeout", **LABELS) == 1
    assert time.time() - shown("shoal_worker_heartbeat_timestamp_seconds", **LABELS) == pytest.approx(5, abs=1)


def test_a_process_tells_what_its_identities_did() -> None:
    shown = everything()
    assert shown("shoal_identities", state="active", **LABELS) == 3
    assert shown("shoal_identities", state="removed", **LABELS) == 2
    assert shown("shoal_identity_rests", **LABELS) == 4
    assert shown("shoal_identity_requests_total", **LABELS) == 60
    assert shown("shoal_identity_blocks_total", **LABELS) == 7
    assert shown("shoal_identity_failures_total", **LABELS) == 1
    without = Scrape(render(of_vitals(vitals(identities=None))))
    assert "shoal_identities" not in without.text


def test_the_histogram_counts_upwards() -> None:
    shown = everything()
    buckets = {
        bound: shown("shoal_fetch_duration_seconds_bucket", le=bound) for bound in ("0.01", "0.025", "0.5", "30.0")
    }
    assert buckets == {"0.01": 2, "0.025": 3, "0.5": 4, "30.0": 4}
    assert shown("shoal_fetch_duration_seconds_bucket", le="+Inf") == shown("shoal_fetch_duration_seconds_count") == 5
    assert shown("shoal_fetch_duration_seconds_sum") == pytest.approx(31.326)


def test_what_two_workers_of_a_node_did_is_added_up() -> None:
    both = counters()
    both.add(counters())
    assert (both.fetched, both.errors["http 503"], sum(both.latency.counts)) == (24, 8, 10)
    assert both.latency.counts[0] == 4
    assert both.latency.seconds == pytest.approx(2 * 31.326)


def test_measuring_costs_far_less_than_a_page() -> None:
    latency = Latency()
    best = min(timeit.repeat(lambda: latency.measured(0.2), number=1000, repeat=20)) / 1000
    assert best < 1e-6


def test_a_run_tells_its_ledger() -> None:
    shown = everything()
    states = ("ready", "waiting", "in_flight", "done", "failed")
    assert [shown("shoal_requests", state=state, **LABELS) for state in states] == [1, 2, 3, 10, 5]
    assert shown("shoal_requests_pushed_total", **LABELS) == 21
    assert shown("shoal_duplicates_total", **LABELS) == 7
    assert shown("shoal_run_items_total", **LABELS) == 30
    assert shown("shoal_run_seeding", **LABELS) == 1
    assert shown("shoal_ledger_imbalance", **LABELS) == 0
    assert Scrape(render(of_ledger(Stats(pushed=5, done=3), LABELS)))("shoal_ledger_imbalance") == 2
    assert Scrape(render(of_ledger(Stats(pushed=5, done=6), LABELS)))("shoal_ledger_imbalance") == -1


def test_hosts_tell_their_politeness() -> None:
    shown = everything()
    names = ("delay_seconds", "blocked_seconds", "requests_ready", "requests_in_flight")
    assert [shown(f"shoal_host_{name}", host="a.example", **LABELS) for name in names] == [0.5, 12.5, 40, 2]


def test_a_node_reports_its_role_and_events() -> None:
    shown = everything()
    assert shown("shoal_node_role", role="Backup Runner", cluster="c") == 1
    assert shown("shoal_node_role", role="Runner", cluster="c") == 0
    assert shown("shoal_cluster_events_total", what="took over") == shown("shoal_takeovers_total", cluster="c") == 2
    assert shown("shoal_cluster_events_total", what="fenced") == 0
    alone = Scrape(render(of_vitals(vitals(standing=None, looped_at=None))))
    assert not [name for name in alone.names if "node" in name or "cluster" in name or "heartbeat" in name]


# -- the format


def test_families_of_one_name_are_put_together() -> None:
    """Each of several runs brings its own, and the format wants a name once."""
    runs = [{"run": name, "spider": "books"} for name in ("monday", "tuesday")]
    text = render([family for labels in runs for family in of_ledger(STATS, labels)])
    assert len(re.findall("# TYPE shoal_requests gauge", text)) == 1
    assert Scrape(text).all("shoal_requests_pushed_total") == [21, 21]
    promtool("check", "metrics", text=text)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_labels_come_through_whatever_is_in_them(labels: dict[str, str]) -> None:
    shown = Scrape(render([Family("x_total", "counter", "x", [Sample(labels, 1)])]))
    assert shown.samples == {("x_total", frozenset(labels.items())): 1}


def test_numbers_and_help_are_written_as_the_format_wants_them() -> None:
    values = (1, 2.5, 1e300, math.inf, -math.inf, math.nan)
    family = Family(
        "x", "gauge", 'a \\ and\na "line"', [Sample({"n": str(n)}, value) for n, value in enumerate(values)]
    )
    text = render([family])
    assert r'# HELP x a \\ and\na "line"' in text
    assert [line.split(" ")[-1] for line in text.splitlines()[2:]] == ["1", "2.5", "1e+300", "+Inf", "-Inf", "NaN"]
    promtool("check", "metrics", text=text)
    assert render([]) == ""


# -- health


async def test_a_process_is_well_while_its_loop_goes_round_and_the_frontier_answers() -> None:
    store = MemoryStore()
    await store.create_run(Run(run_id="monday", spider="books", state="running", created_at=0.0))
    frontier: Frontier = await store.frontier("monday", FrontierOptions())
    now = time.monotonic()
    assert health_problem(vitals(frontier=frontier), up=True, now=now) is None
    assert health_problem(vitals(frontier=frontier, looped_at=None), up=True, now=now) is None
    assert "no heartbeat for 95 s" in str(health_problem(vitals(frontier=frontier), up=True, now=now + 90))
    assert "frontier" in str(health_problem(vitals(frontier=frontier), up=False, now=now))
    hangs = vitals(frontier=frontier, loop_age=61.0, blocked_by="parse of http://a/")
    assert health_problem(hangs, up=True, now=now) == "its loop hangs: blocked for 61 s by parse of http://a/"
    assert "not started" in str(health_problem(vitals(), up=False, now=now))


class Patient(Spider):
    """Nothing to do for a while."""

    name = "patient"

    async def start(self) -> AsyncIterator[Request]:
        await asyncio.sleep(0.6)
        for request in list[Request]():
            yield request


async def test_the_loop_of_an_idle_crawl_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MAX_SLEEP", 0.05)
    crawl = Crawl(Patient, Config())
    assert crawl.vitals().looped_at is None
    task = asyncio.ensure_future(crawl._run_to_end())
    seen = set()
    while not task.done():
        await asyncio.sleep(0.01)
        seen.add(crawl.vitals().looped_at)
    assert (await task).summary is not None
    assert len(seen) >= 5


# -- where to listen


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("9100", "127.0.0.1", range(9100, 9101)),
        ("0", "127.0.0.1", range(1)),
        ("0.0.0.0:9100", "0.0.0.0", range(9100, 9101)),
        ("[::1]:9100", "::1", range(9100, 9101)),
        ("crawler.example:9100-9103", "crawler.example", range(9100, 9104)),
    ],
)
def test_an_address_is_read(text: str, host: str, ports: range) -> None:
    assert parse_address(text) == Address(host, ports)


@pytest.mark.parametrize("text", ["", "x", "70000", "-1", "9103-9100", "9100-", "a:b", "127.0.0.1", "9100:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        parse_address(text)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def test_of_several_ports_the_first_free_one_is_taken(taken: int) -> None:
    with listen(Address("127.0.0.1", range(taken, taken + 20))) as found:
        assert taken < found.getsockname()[1] < taken + 20
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}: already in use"):
        listen(Address("127.0.0.1", range(taken, taken + 1)))
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:9100"):
        listen(Address("192.0.2.1", range(9100, 9101)))


def test_each_process_needs_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--metrics-port 9100-9103"):
        parse_address("9100").check_room(4)
    parse_address("9100-9103").check_room(4)
    parse_address("0").check_room(4)


# -- what is deployed

DEPLOYED = ROOT / "deploy"
ALERTS = (DEPLOYED / "prometheus" / "alerts.yml").read_text()
BOARD: dict[str, Any] = json.loads((DEPLOYED / "grafana" / "shoal.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def used_in(text: str) -> set[str]:
    return {re.sub("_(bucket|count|sum)$", "", name) for name in re.findall(r"\bshoal_\w+", text)}


def test_rules_and_dashboard_use_what_there_is() -> None:
    variables = [json.dumps(variable) for variable in BOARD["templating"]["list"]]
    exported = everything().names
    for text in (ALERTS, *EXPRESSIONS, *variables):
        assert used_in(text) <= exported
    assert exported - used_in("\n".join(EXPRESSIONS)) == {"shoal_run_items_total", "shoal_run_seeding"}


def test_every_metric_is_documented() -> None:
    rows = re.findall(r"^\| `(shoal_\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert dict(rows) == dict(re.findall(r"^# TYPE (\w+) (\w+)", everything().text, re.MULTILINE))


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    assert "9 rules found" in promtool("check", "rules", "deploy/prometheus/alerts.yml")
    promtool("check", "config", "deploy/prometheus/prometheus.yml")


def test_the_rules_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "deploy/prometheus/alerts_test.yml")
    tested = (DEPLOYED / "prometheus" / "alerts_test.yml").read_text()
    for name in re.findall(r"- alert: (\w+)", ALERTS):
        assert name in tested


def test_each_alert_says_what_to_do() -> None:
    commands = {name for group in COMMANDS.values() for name in group}
    rules = ALERTS.split("- alert: ")[1:]
    for rule in rules:
        assert "severity: " in rule
        assert "summary: " in rule
        _, _, description = rule.partition("description: ")
        named = set(re.findall(r"`shoal (\w[\w-]*)", description))
        assert named, rule
        assert named <= commands


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    assert BOARD["schemaVersion"] >= 36
    assert BOARD["title"] == "Shoal"
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "spider", "run"]
    identifiers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    cells = Counter(
        (x, y)
        for at in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    )
    assert set(cells.values()) == {1}  # no panel lies on another
    assert max(x for x, _ in cells) < 24
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    of_the_api = {"shoal_sessions", "shoal_celery_workers", "shoal_problems"}  # which belong to no run
    for expression in EXPRESSIONS:
        assert used_in(expression) <= of_the_api or 'run=~"$run", spider=~"$spider"' in expression


def test_prometheus_understands_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [expression.replace("$__rate_interval", "5m") for expression in EXPRESSIONS]
    rules = [{"record": f"asked_{number}", "expr": expression} for number, expression in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # which is YAML too
    promtool("check", "rules", str(file))
