"""Failed requests of a run: retried by kind, host and URL, and shown by kind."""

from __future__ import annotations

import time

import pytest

from shoal.errors import ConfigError
from shoal.frontier.memory.frontier import MemoryFrontier
from shoal.http import Request
from shoal.ports import Failure
from shoal.runs import dead_requests
from shoal.runs.dead_requests import DeadFilter, dead_examples, retry_matching
from tests.unit.fakes import memory_frontier

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


async def ready(frontier: MemoryFrontier) -> list[str]:
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
