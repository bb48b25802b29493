"""Why a worker has nothing to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal.crawling.pacing import WaitFacts, WaitWatch, explain_wait
from shoal.frontier.memory import MemoryStore
from shoal.ports import FrontierOptions, Holder, HostState, HostUpdate, Leased, LeaseHolder, Run, Stats, Waits
from shoal.testing.steps import HOST, FakeClock, fail, lease_one, push


def host(name: str = "shop.example", **changes: Any) -> HostState:
    values: dict[str, Any] = {
        "host": name, "delay": 0.0, "why": "no delay", "concurrency": 1, "in_flight": 0, "ready": 3,
        "blocked_for": 0.0, "block_reason": "", **changes,
    }  # fmt: skip
    return HostState(**values)


def holder(name: str = "shop.example", **changes: Any) -> LeaseHolder:
    return LeaseHolder(**{"host": name, "run_id": "A", "worker": "w-1", "leases": 1, **changes})


def facts(*hosts: HostState, wait: float | None = None, waits: Waits | None = None, **stats: Any) -> WaitFacts:
    counts = Stats(**{"pushed": 20, "ready": sum(each.ready for each in hosts), **stats})
    return WaitFacts(run_id="B", stats=counts, hosts=hosts, waits=waits or Waits(holders=[]), wait=wait)


BLOCKED = host(blocked_for=312.4, block_reason="answered 503 with Retry-After")
FULL = host(in_flight=1)
OTHER = host("b.example", in_flight=1, ready=1)
SLOW = host(delay=30.0, why="robots.txt Crawl-delay")


@pytest.mark.parametrize(
    ("known", "texts"),
    [
        (facts(BLOCKED), ["shop.example is blocked for 312 s: answered 503 with Retry-After"]),
        (
            facts(BLOCKED, host("b.example", blocked_for=9.0, block_reason="429")),
            ["2 hosts are blocked, b.example for 9 s: 429"],
        ),
        (facts(FULL, waits=Waits(holders=[holder()])), ["shop.example is busy with run A"]),
        (
            facts(FULL, OTHER, waits=Waits(holders=[holder(silent_for=9.2), holder("b.example")])),
            ["2 hosts are busy with run A, whose worker w-1 is silent for 9 s"],
        ),
        (
            facts(FULL, waits=Waits(holders=[holder(run_id="B", silent_for=9.2)])),
            ["shop.example is busy with other workers of this run; its worker w-1 is silent for 9 s"],
        ),
        (
            facts(FULL, OTHER, waits=Waits(holders=[holder(run_id="B"), holder("b.example")])),
            ["shop.example is busy with other workers of this run", "b.example is busy with run A"],
        ),
        (facts(FULL), ["shop.example is busy with requests of other workers"]),
        (facts(SLOW, wait=24.0), ["shop.example keeps its delay of 30 s (robots.txt Crawl-delay), next in 24 s"]),
        (facts(SLOW, host("b.example", delay=5.0), wait=4.0), ["2 hosts keep their delay, next in 4 s"]),
        (facts(SLOW, wait=0.5), []),
        (facts(host(), wait=60.0), []),
        (
            facts(waiting=14, waits=Waits(holders=[], retry_in=12.0, retry_reason="timeout")),
            ["the next request of 14 is due in 12 s (retry after: timeout)"],
        ),
        (facts(waiting=1, waits=Waits(holders=[], retry_in=12.0)), ["the last request is due in 12 s"]),
        (facts(leased=5), ["all 5 requests are in flight at other workers"]),
        (facts(leased=1), ["the last request is in flight at other workers"]),
        (facts(incoming=900), ["900 links of large pages are on their way into the queue"]),
        (facts(seeding=True), ["another process pushes the start requests"]),
        (facts(done=20), []),
        (
            facts(BLOCKED, waiting=14, waits=Waits(holders=[], retry_in=12.0)),
            [
                "the next request of 14 is due in 12 s",
                "shop.example is blocked for 312 s: answered 503 with Retry-After",
            ],
        ),
    ],
)
def test_the_reasons_of_a_wait(known: WaitFacts, texts: list[str]) -> None:
    assert [reason.text for reason in explain_wait(known)] == texts


def test_only_what_does_not_end_soon_by_itself_is_alarming() -> None:
    def is_alarming(known: WaitFacts) -> bool:
        (reason,) = explain_wait(known)
        return reason.is_alarming

    assert is_alarming(facts(BLOCKED))
    assert is_alarming(facts(FULL, waits=Waits(holders=[holder(silent_for=9)])))
    assert not is_alarming(facts(host(blocked_for=5.0)))
    assert not is_alarming(facts(FULL, waits=Waits(holders=[holder()])))
    assert not is_alarming(facts(SLOW, wait=24.0))


async def test_the_watch_logs_a_reason_after_a_while_when_it_changes_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "shoal.engine")
    clock = FakeClock(1000.0)
    store = MemoryStore(clock=clock)
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0))
    frontier = await store.frontier("r", FrontierOptions(concurrency_per_host=1), Holder("w", 1))
    await push(frontier, 1, 2)
    await fail(frontier, await lease_one(frontier), retry_in=1000, reason="HTTP 500")
    await fail(frontier, await lease_one(frontier), retry_in=1000, reason="HTTP 500")
    watch = WaitWatch(frontier, "r", clock)

    async def wait(seconds: float) -> list[str]:
        """What the watch logs while so many seconds pass."""
        caplog.clear()
        for _ in range(int(seconds)):
            assert 0 <= await watch.wait(Leased([], None)) <= 30
            clock.advance(1)
        return caplog.messages

    (first,) = await wait(29)
    assert first == "waiting: the next request of 2 is due in 1000 s (retry after: HTTP 500)"
    assert watch.reason.startswith("the next request of 2")
    assert len(await wait(30)) == 1
    await push(frontier, 3, 4, 5)
    await frontier.update_host(HOST, HostUpdate(block_for=600, block_reason="asked to"))
    (changed,) = await wait(6)
    assert changed.startswith(f"waiting: {HOST} is blocked for 59")
    assert ": asked to; the next request of 2 is due in" in changed
    watch.work()
    assert watch.reason == ""
    assert await wait(60) == []  # it has said that a moment ago
    clock.advance(300)
    assert len(await wait(6)) == 1


async def test_a_worker_that_waits_without_a_reason_looks_for_faults_of_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock(1000.0)
    store = MemoryStore(clock=clock)
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0))
    frontier = await store.frontier("r", FrontierOptions())
    await push(frontier, 1, 2)
    watch, audits = WaitWatch(frontier, "r", clock), 0
    find_faults = frontier.audit

    async def audit() -> Stats:
        nonlocal audits
        audits += 1
        return await find_faults()

    frontier.audit = audit

    async def wait(seconds: int) -> None:
        for _ in range(seconds):
            await watch.wait(Leased([], None))
            clock.advance(1)

    await wait(60)
    assert (audits, watch.reason, caplog.messages) == (1, "", [])  # other workers may have been faster
    (lane,) = store.frontiers["r"]._requests.lanes.by_name.values()
    lane.entry = None
    await push(frontier, 3)
    lane.entry = None
    await wait(60)
    assert audits == 2
    assert watch.reason == (
        "the queue of a host is not scheduled: workers cannot get its requests, or not in time; see `shoal audit r`"
    )
    assert (caplog.records[0].levelname, caplog.messages[0]) == ("WARNING", f"waiting: {watch.reason}")
