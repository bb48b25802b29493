"""Failed requests of a run: retried by kind, host and URL, and shown by kind."""

from __future__ import annotations

import time

import pytest

from shoal.crawling.stats import LimitReached
from shoal.errors import ConfigError, RunError
from shoal.frontier.memory import MemoryStore
from shoal.frontier.memory.store import MemoryFrontier
from shoal.http import Request
from shoal.operations import dead_requests
from shoal.operations.dead_requests import DeadFilter, dead_examples, retry_failed, retry_matching, retry_request
from shoal.ports import Failure, Frontier, FrontierOptions, Run, RunState
from shoal.runs.run_end import store_limit
from tests.support.fakes import memory_frontier

SHOP, WIKI = "http://shop.example/", "http://wiki.example:8080/"


async def failed(*requests: tuple[str, str]) -> MemoryFrontier:
    """A frontier with failed requests: URL and kind of each."""
    frontier = await memory_frontier()
    await frontier.push([Request(url) for url, _ in requests])
    kinds = dict(requests)
    leases = (await frontier.lease(len(requests), 60)).leases
    assert len(leases) == len(requests)
    await frontier.fail([Failure(lease=each, kind=kinds[each.request.url], reason="r") for each in leases])
    return frontier


async def ready(frontier: Frontier) -> list[str]:
    return [each.request.url for each in (await frontier.lease(1000, 60)).leases]


@pytest.mark.parametrize(
    ("kinds", "host", "url", "expected"),
    [
        ([], None, None, [SHOP + "a?x=1", SHOP + "b/c", WIKI + "a"]),
        (["dns"], None, None, [WIKI + "a"]),
        ([], "shop.example", None, [SHOP + "a?x=1", SHOP + "b/c"]),
        ([], "SHOP.example", None, [SHOP + "a?x=1", SHOP + "b/c"]),
        ([], "wiki.example:8080", None, [WIKI + "a"]),
        ([], "wiki.example", None, []),
        ([], None, "*/b/*", [SHOP + "b/c"]),
        ([], None, SHOP + "a?x=*", [SHOP + "a?x=1"]),
        ([], None, "*/a", [WIKI + "a"]),
        ([], None, "a", []),
        ([], None, "*[ab]*", []),
        (["timeout"], "shop.example", "*/b/*", [SHOP + "b/c"]),
        (["dns"], "shop.example", "*", []),
        (["robots"], "shop.example", None, [SHOP + "r"]),
    ],
)
async def test_a_filter(kinds: list[str], host: str | None, url: str | None, expected: list[str]) -> None:
    frontier = await failed(
        (SHOP + "a?x=1", "timeout"), (SHOP + "b/c", "timeout"), (SHOP + "r", "robots"), (WIKI + "a", "dns")
    )
    assert await retry_matching(frontier, DeadFilter.of(kinds, host, url)) == len(expected)
    assert sorted(await ready(frontier)) == expected


async def test_many_are_retried_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_requests, "MAX_RETRIED", 10)
    frontier = await failed(*((f"{SHOP}{number}", "dns") for number in range(95)))
    assert await retry_matching(frontier, DeadFilter(url="*")) == 95
    assert await frontier.dead_kinds() == {}


def test_a_bad_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        DeadFilter.of([], "http://shop.example/", None)


def test_a_pattern_cannot_be_slow() -> None:
    pattern = DeadFilter(url="*a" * 500 + "b").pattern()
    start = time.process_time()
    assert pattern.match("a" * 5000) is None
    assert time.process_time() - start < 5


async def test_examples_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = await failed(
        *((f"{SHOP}{number}", "dns") for number in range(5)), *((f"{WIKI}{number}", "timeout") for number in range(2))
    )
    found = await dead_examples(frontier)
    assert [(each.kind, each.count, [one.url for one in each.examples]) for each in found] == [
        ("dns", 5, [f"{SHOP}{number}" for number in range(3)]),
        ("timeout", 2, [f"{WIKI}{number}" for number in range(2)]),
    ]
    monkeypatch.setattr(dead_requests, "_MAX_READ", 5)
    assert [len(each.examples) for each in await dead_examples(frontier)] == [3, 0]
    assert await dead_examples(await memory_frontier()) == []


# -- reopening


async def ended_run(*, settings: dict[str, object] | None = None, left: int = 0) -> tuple[MemoryStore, Run, Frontier]:
    """A finished run with two failed requests. ``left``: requests in its queue."""
    store = MemoryStore()
    run = Run(run_id="run", spider="s", state="running", created_at=time.time(), settings=settings or {})
    await store.create_run(run)
    frontier = await store.frontier("run", FrontierOptions())
    await frontier.push([Request(SHOP + "a"), Request(SHOP + "b")])
    leases = (await frontier.lease(2, 60)).leases
    await frontier.fail([Failure(lease=each, kind="timeout", reason="r") for each in leases])
    await frontier.push([Request(f"{SHOP}left{number}") for number in range(left)])
    return store, await store.transition("run", "finished"), frontier


async def test_a_retry_that_died_before_it_reopened_the_run_is_repeated() -> None:
    store, run, frontier = await ended_run()
    assert await retry_matching(frontier, DeadFilter()) == 2  # and then the process was killed
    result = await retry_failed(store, run, frontier, DeadFilter())
    assert (result.count, result.reopened, result.run.state) == (0, True, "running")
    assert "2 were queued again before. Run run is running again; no process works on it" in str(result)
    again = await retry_failed(store, result.run, frontier, DeadFilter())
    assert (again.count, again.reopened) == (0, False)
    assert str(again) == "0 requests are queued again: no failed request of run run matches"


async def test_a_retry_without_a_match_does_not_reopen() -> None:
    store, run, frontier = await ended_run()
    result = await retry_failed(store, run, frontier, DeadFilter(kinds=("dns",)))
    assert (result.count, result.reopened, result.run) == (0, False, run)


async def test_one_request_reopens() -> None:
    store, run, frontier = await ended_run()
    result = await retry_request(store, run, frontier, Request(SHOP + "b"))
    assert (result.count, result.reopened, await ready(frontier)) == (1, True, [SHOP + "b"])
    assert str(result).startswith("1 request is queued again. Run run is running again")


async def test_a_run_at_its_limit_is_reopened_only_by_a_request() -> None:
    store, run, frontier = await ended_run(left=3)
    await store_limit(store, "run", LimitReached(setting="scope.max_pages", value=9, left=3, at=time.time()))
    assert not (await retry_failed(store, run, frontier, DeadFilter(kinds=("dns",)))).reopened
    result = await retry_failed(store, run, frontier, DeadFilter())
    assert result.reopened
    assert "nothing more is fetched until scope.max_pages is above 9; repeat the command or program" in str(result)


@pytest.mark.parametrize("kind", ["seeds", "registered"])
async def test_the_limit_of_a_fleet_or_a_schedule_is_fixed(kind: str) -> None:
    store, run, frontier = await ended_run(settings={kind: "spider"}, left=3)
    await store_limit(store, "run", LimitReached(setting="scope.max_pages", value=9, left=3, at=time.time()))
    with pytest.raises(RunError, match="start a new run with a higher"):
        await retry_failed(store, run, frontier, DeadFilter())
    assert await frontier.dead_kinds() == {"timeout": 2}


@pytest.mark.parametrize("state", ["paused", "cancelled"])
async def test_a_run_that_somebody_stopped(state: RunState) -> None:
    store, _, frontier = await ended_run()
    await store.transition("run", "running")
    run = await store.transition("run", state)
    if state == "cancelled":
        with pytest.raises(RunError, match="`shoal resume run` continues it, then retry them"):
            await retry_failed(store, run, frontier, DeadFilter())
        return
    result = await retry_failed(store, run, frontier, DeadFilter())
    assert str(result) == "2 requests are queued again. Run run is paused: `shoal resume run` continues it"
