"""The clock of a PostgreSQL server steps by an hour, forward and back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from shoal.frontier.postgres import PostgresStore
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, HostUpdate, Run
from shoal.system import clock
from tests.contracts.postgres_steps import pages

HOUR = 3600.0
POLITE = FrontierOptions(delay=10, max_attempts=3)


class Clock:
    def __init__(self) -> None:
        self.offset = 0.0


@pytest.fixture
def server_clock() -> Clock:
    return Clock()


@pytest.fixture
async def frontier(url: str, server_clock: Clock) -> AsyncIterator[Frontier]:
    store = await PostgresStore.open(url, offset=lambda: server_clock.offset)
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    yield await store.frontier("run", POLITE)
    await store.close()


@pytest.mark.parametrize("step", [-HOUR, HOUR], ids=["back", "forward"])
async def test_no_host_waits_longer_than_its_delay(frontier: Frontier, server_clock: Clock, step: float) -> None:
    await frontier.push(pages(1, 2) + pages(1, 2, host="b.example"))
    leases = (await frontier.lease(2, 600)).leases
    await frontier.complete([Completion(lease=lease) for lease in leases[:1]])
    server_clock.offset += step
    if step < 0:  # the other one is not lost, and ends now
        assert None not in await frontier.complete([Completion(lease=lease) for lease in leases[1:]])
        leased = await frontier.lease(5, 600)
        assert leased.leases == []
        assert leased.wait is not None
        assert 0 < leased.wait <= 10
    server_clock.offset += 10
    assert len((await frontier.lease(5, 600)).leases) >= 1
    stats = await frontier.stats()
    assert stats.balanced
    assert stats.dead == 0


async def test_a_step_back_makes_nothing_longer(frontier: Frontier, server_clock: Clock) -> None:
    await frontier.push(pages(1) + pages(1, host="b.example") + pages(1, host="c.example"))
    await frontier.update_host("b.example", HostUpdate(block_for=30))
    failing, lost = (await frontier.lease(2, 20)).leases
    assert await frontier.fail([Failure(lease=failing, kind="k", reason="r", retry_in=15)]) == ["waiting"]
    claim = await frontier.claim("drain", 20)
    assert claim is not None
    await frontier.remember("robots", b"1", 20)
    server_clock.offset -= HOUR
    (blocked,) = [state for state in await frontier.host_states() if state.host == "b.example"]
    assert 20 < blocked.blocked_for <= 30
    assert await frontier.claim("drain", 20) is None
    assert await frontier.recall("robots") == b"1"
    assert (await frontier.renew([lost], 20)) != [None]
    server_clock.offset += 31
    assert await frontier.recall("robots") is None
    assert await frontier.claim("drain", 20) is not None
    leased = {lease.host: lease.attempt for lease in (await frontier.lease(9, 20)).leases}
    assert leased["b.example"] == 1
    assert leased[failing.host] == 2
    assert await frontier.renew([lost], 20) == [None]
    server_clock.offset += 12
    assert (await frontier.lease(9, 20)).wait is not None
    stats = await frontier.stats()
    assert stats == await frontier.audit()


async def test_many_steps(frontier: Frontier, server_clock: Clock) -> None:
    await frontier.push(pages(*range(12)))
    for turn in range(12):
        (lease,) = (await frontier.lease(1, 600)).leases
        assert lease.attempt == 1
        assert None not in await frontier.complete([Completion(lease=lease)])
        server_clock.offset += -HOUR if turn % 3 else HOUR
        await frontier.host_states()  # somebody sees the new time
        server_clock.offset += 11
    assert await frontier.lease(1, 600) is not None
    assert (await frontier.stats()).done == 12


async def test_what_people_see_is_the_real_time(frontier: Frontier, server_clock: Clock) -> None:
    await frontier.push(pages(1))
    server_clock.offset = -HOUR
    (lease,) = (await frontier.lease(1, 600)).leases
    await frontier.complete([Completion(lease=lease, note="a note")])
    found = await frontier.find(pages(1)[0])
    assert found is not None
    assert [abs(event.at - (time.time() - HOUR)) < 60 for event in found.events] == [True, True]


def test_the_clock_of_deadlines_counts_suspension() -> None:
    before = clock.now()
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - before < 10
    assert clock.now() >= before
