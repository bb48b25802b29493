"""Workers: a silent one is dead, and its leases and roles are free for others. An idle one asks what it waits for."""

from __future__ import annotations

import pytest

from shoal.errors import FencedError
from shoal.ports import (
    EventKind,
    Frontier,
    FrontierOptions,
    Heartbeat,
    Holder,
    LeaseHolder,
    SilentWorker,
    Waits,
    WorkerState,
)
from shoal.testing.roles import claim_role
from shoal.testing.steps import (
    HOST,
    TTL,
    ContractTests,
    Harness,
    check_refused,
    complete,
    fail,
    history,
    lease_names,
    lease_one,
    page,
    push,
)

SESSION = 20.0


def heartbeat(worker: str, epoch: int = 1, session: float = SESSION) -> Heartbeat:
    return Heartbeat(worker=worker, epoch=epoch, session=session, machine="machine", pid=7)


async def stay_alive(harness: Harness, frontier: Frontier, seconds: int) -> None:
    """Let time pass while the worker ``b`` sends heartbeats."""
    for _ in range(0, seconds, 4):
        await harness.advance(4)
        await frontier.beat(heartbeat("b"))


class WorkersContract(ContractTests):
    """Every worker may fence silent workers. The store decides which ones are silent."""

    async def test_a_silent_worker_is_fenced(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        dead = await harness.open_run("run", holder=Holder("a", 1))
        assert await frontier.beat(heartbeat("a")) is None
        lost = (await dead.lease(2, 10 * TTL)).leases
        await stay_alive(harness, frontier, 16)
        assert await frontier.fence_silent() == []
        await stay_alive(harness, frontier, 8)
        assert await frontier.fence_silent() == [SilentWorker("run", "a", 2)]
        assert await frontier.fence_silent() == []
        for lease in lost:
            await check_refused(dead, lease)
        with pytest.raises(FencedError):
            await frontier.beat(heartbeat("a"))
        with pytest.raises(FencedError):
            await dead.lease(1, TTL)
        assert await lease_names(frontier) == ["0", "1", "2", "3"]
        assert (await frontier.audit()).balanced

    async def test_the_attempt_of_a_dead_worker_counts(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        dead = await harness.open_run("run", holder=Holder("a", 1))
        await frontier.beat(heartbeat("a"))
        await frontier.push([page("deadly")])
        await lease_one(dead)
        await stay_alive(harness, frontier, 24)
        assert await frontier.fence_silent() == [SilentWorker("run", "a", 1)]
        assert (await history(frontier, page("deadly"))).state == "dead"

    async def test_a_fenced_worker_joins_again_under_the_next_epoch(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "x")
        worker = await harness.open_run("run", holder=Holder("a", 1))
        await frontier.beat(heartbeat("a"))
        await stay_alive(harness, frontier, 24)
        assert await frontier.fence_silent() == [SilentWorker("run", "a", 0)]
        worker.hold(Holder("a", 2))
        await worker.beat(heartbeat("a", 2))
        assert (await lease_one(worker)).attempt == 1
        assert await frontier.fence_silent() == []
        assert [state.worker for state in await frontier.workers()] == ["a", "b"]

    async def test_heartbeats_keep_a_worker_alive(self, harness: Harness, frontier: Frontier) -> None:
        for _ in range(6):
            await frontier.beat(heartbeat("a"))
            await stay_alive(harness, frontier, 16)
            assert await frontier.fence_silent() == []

    async def test_a_heartbeat_says_when_to_send_the_next_one(self, harness: Harness, frontier: Frontier) -> None:
        """While another worker is late."""
        await frontier.beat(heartbeat("a"))
        await harness.advance(5)
        assert await frontier.beat(heartbeat("b")) is None  # "a" is not late
        await stay_alive(harness, frontier, 8)
        due = await frontier.beat(heartbeat("b"))
        assert due is not None
        assert 0 < due <= SESSION / 4
        await stay_alive(harness, frontier, 4)
        due = await frontier.beat(heartbeat("b"))
        assert due is not None
        assert 3 - harness.drift - 0.1 <= due <= 3  # then it is dead
        await stay_alive(harness, frontier, 4)
        assert await frontier.beat(heartbeat("b")) == 0

    async def test_time_without_any_heartbeat_does_not_count(self, harness: Harness, frontier: Frontier) -> None:
        """The store may have been away, and no worker could reach it."""
        for worker in ("a", "b"):
            await frontier.beat(heartbeat(worker))
        await harness.advance(1000)
        assert await frontier.fence_silent() == []
        await frontier.beat(heartbeat("b"))
        assert await frontier.fence_silent() == []
        await stay_alive(harness, frontier, 16)
        assert await frontier.fence_silent() == []
        await stay_alive(harness, frontier, 8)
        assert await frontier.fence_silent() == [SilentWorker("run", "a", 0)]

    async def test_a_worker_that_left_is_not_fenced(self, harness: Harness, frontier: Frontier) -> None:
        await frontier.beat(heartbeat("a", 3))
        await frontier.leave("a", 2)  # late, of an earlier epoch
        assert [state.worker for state in await frontier.workers()] == ["a"]
        await frontier.leave("a", 3)
        assert await frontier.workers() == []
        await stay_alive(harness, frontier, 24)
        assert await frontier.fence_silent() == []
        await frontier.beat(heartbeat("a", 3))

    async def test_workers_and_what_they_hold(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(4))
        holder = await harness.open_run("run", holder=Holder("a", 1))
        await holder.beat(heartbeat("a"))
        leases = (await holder.lease(3, TTL)).leases
        await harness.advance(9)
        await frontier.beat(heartbeat("b"))
        script = await harness.open_run("run", holder=Holder("c", 1))
        await lease_one(script)
        first, second, third = await frontier.workers()
        assert (first.worker, first.machine, first.pid, first.session, first.leases) == ("a", "machine", 7, SESSION, 3)
        assert 9 <= first.silent_for <= 9.1 + harness.drift
        assert (second.worker, second.leases) == ("b", 0)
        assert second.silent_for <= 0.1 + harness.drift
        assert third == WorkerState(worker="c", leases=1)  # it sends no heartbeats
        await holder.release(leases)
        assert [state.leases for state in await frontier.workers()] == [0, 0, 1]

    async def test_a_dead_worker_frees_its_roles(self, harness: Harness, frontier: Frontier) -> None:
        dead = await harness.open_run("run", holder=Holder("a", 1))
        await dead.beat(heartbeat("a"))
        claim = await claim_role(dead, "seed")
        await stay_alive(harness, frontier, 24)
        await frontier.fence_silent()
        assert not await dead.advance(claim, b"1", TTL)
        assert await frontier.claim("seed", TTL) is not None

    # -- workers of other runs

    async def test_a_worker_of_another_run_ends_a_silent_session(self, harness: Harness, frontier: Frontier) -> None:
        """Nobody else works on that run, and its leases block a host for this one."""
        await push(frontier, "mine")
        dead = await harness.open_run("other", FrontierOptions(delay=1), Holder("a", 1))
        await dead.push([page("theirs")])
        await dead.beat(heartbeat("a"))
        lost = await lease_one(dead, ttl=10 * TTL)
        polite = await harness.open_run("run", FrontierOptions(delay=1), Holder("b", 1))
        assert await lease_names(polite) == []
        await stay_alive(harness, frontier, 24)
        assert await frontier.fence_silent() == [SilentWorker("other", "a", 1)]
        assert await frontier.fence_silent() == []
        assert await dead.workers() == []
        await check_refused(dead, lost)
        await harness.advance(1)
        assert await lease_names(polite) == ["mine"]
        with pytest.raises(FencedError):
            await dead.beat(heartbeat("a"))

    async def test_workers_of_equal_names_in_two_runs_are_two(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("other")
        await other.beat(heartbeat("b"))
        await stay_alive(harness, frontier, 24)
        assert await frontier.fence_silent() == [SilentWorker("other", "b", 0)]
        assert [state.worker for state in await frontier.workers()] == ["b"]
        await frontier.beat(heartbeat("b"))
        await other.beat(heartbeat("b", 2))

    async def test_several_workers_of_several_runs_die(self, harness: Harness, frontier: Frontier) -> None:
        others = [await harness.open_run(f"other{number}") for number in range(2)]
        for each in others:
            for name in ("x", "y"):
                await each.beat(heartbeat(name))
        await stay_alive(harness, frontier, 24)
        fenced = await frontier.fence_silent()
        assert sorted((worker.run_id, worker.worker) for worker in fenced) == [
            ("other0", "x"),
            ("other0", "y"),
            ("other1", "x"),
            ("other1", "y"),
        ]

    async def test_the_workers_of_a_deleted_run_are_forgotten(self, harness: Harness, frontier: Frontier) -> None:
        other = await harness.open_run("other")
        await other.beat(heartbeat("a"))
        await harness.store.delete_run("other")
        harness.frontiers.pop("other")
        await stay_alive(harness, frontier, 24)
        assert await frontier.beat(heartbeat("b")) is None
        assert await frontier.fence_silent() == []

    async def test_time_without_a_heartbeat_of_any_run_does_not_count(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        other = await harness.open_run("other")
        for worker in ("a", "b"):
            await (other if worker == "a" else frontier).beat(heartbeat(worker))
        await harness.advance(1000)
        await frontier.beat(heartbeat("b"))
        assert await frontier.fence_silent() == []
        await other.beat(heartbeat("a"))
        await stay_alive(harness, frontier, 16)
        assert await frontier.fence_silent() == []

    async def test_seldom_heartbeats_prove_nothing_about_a_short_session(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        """The store may have been away between two heartbeats of a long session. While another worker is late, they
        come more often."""
        other = await harness.open_run("other")
        long = heartbeat("long", session=10 * SESSION)
        await other.beat(heartbeat("a"))
        for _ in range(4):
            await frontier.beat(long)
            await harness.advance(40)
        due = await frontier.beat(long)
        assert due is not None
        assert 0 < due <= SESSION / 4
        assert await frontier.fence_silent() == []
        for _ in range(4):
            await harness.advance(4)
            await frontier.beat(long)
            assert await frontier.fence_silent() == []
        await harness.advance(5)
        assert await frontier.beat(long) == 0
        assert await frontier.fence_silent() == [SilentWorker("other", "a", 0)]

    async def test_a_fence_forgets_the_worker(self, frontier: Frontier) -> None:
        await frontier.beat(heartbeat("a", 4))
        await frontier.fence("a", 4)
        await frontier.beat(heartbeat("a", 4))
        await frontier.fence("a", 9)
        assert await frontier.workers() == []
        with pytest.raises(FencedError):
            await frontier.beat(heartbeat("a", 8))

    async def test_a_history_names_the_worker_of_each_claim(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "x")
        a, b, c = [await harness.open_run("run", holder=Holder(name, 1)) for name in ("a", "b", "c/0")]
        assert await workers_of(frontier, "x") == ("", [("ready", "")])
        lease = await lease_one(a, ttl=TTL)
        assert await workers_of(frontier, "x") == ("a", [("leased", "a")])
        assert await fail(a, lease, retry_in=1.0) == "waiting"
        failed = ("failed", "a")
        assert await workers_of(frontier, "x") == ("", [failed, ("waiting", "")])
        await harness.advance(1)
        await lease_one(b, ttl=5)
        assert await workers_of(frontier, "x") == ("b", [failed, ("leased", "b")])
        await harness.advance(5)
        lease = await lease_one(c)
        lost = ("lost", "b")
        assert await workers_of(frontier, "x") == ("c/0", [failed, lost, ("leased", "c/0")])
        await complete(c, lease, status=200, note="redirected")
        assert await workers_of(frontier, "x") == ("c/0", [failed, lost, ("note", "c/0"), ("done", "c/0")])

    async def test_a_dead_request_names_its_last_worker_until_it_is_retried(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, "x")
        a, b = [await harness.open_run("run", holder=Holder(name, 1)) for name in ("a", "b")]
        await fail(a, await lease_one(a))
        failed = ("failed", "a")
        assert await workers_of(frontier, "x") == ("a", [failed, ("dead", "a")])
        assert [request.worker async for request in frontier.dead()] == ["a"]
        assert await frontier.retry_dead() == 1
        assert await workers_of(frontier, "x") == ("", [failed, ("retried", ""), ("ready", "")])
        assert await b.release([await lease_one(b)]) == [True]
        assert (await workers_of(frontier, "x"))[0] == ""


async def workers_of(frontier: Frontier, name: str) -> tuple[str, list[tuple[EventKind, str]]]:
    """The worker of a request, and each of its events with its worker."""
    page_history = await history(frontier, page(name))
    return page_history.worker, [(event.kind, event.worker) for event in page_history.events]


class WaitingContract(ContractTests):
    """`Inspection.waits` says who uses hosts, of any run, and which request is tried again next."""

    async def test_nothing_to_wait_for(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        assert await frontier.waits([HOST, "unknown.example"]) == Waits(holders=[])
        assert await frontier.waits([]) == Waits(holders=[])

    async def test_the_next_retry(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        first, second = (await frontier.lease(2, TTL)).leases
        await fail(frontier, first, retry_in=30, kind="timeout", reason="no answer; none at all")
        await fail(frontier, second, retry_in=20, kind="status", reason="HTTP 503")
        await harness.advance(5)
        waits = await frontier.waits([HOST])
        assert (waits.holders, waits.retry_reason) == ([], "HTTP 503")
        assert waits.retry_in is not None
        assert 15 - harness.drift - 0.1 <= waits.retry_in <= 15
        await harness.advance(15)
        await complete(frontier, await lease_one(frontier))
        assert (await frontier.waits([])).retry_reason == "no answer; none at all"
        await harness.advance(10)
        assert len(await lease_names(frontier)) == 1
        assert (await frontier.waits([])).retry_in is None

    async def test_who_uses_a_host(self, harness: Harness, frontier: Frontier) -> None:
        wide = FrontierOptions(concurrency_per_host=10)
        await push(frontier, 1, 2, 3, page("elsewhere", host="b.example"))
        others = [await harness.open_run("other", wide, Holder(name, 1)) for name in ("a", "c")]
        await others[0].push([page(number) for number in range(3)])
        await others[0].beat(heartbeat("a"))
        await others[0].lease(2, 10 * TTL)
        await others[1].lease(1, 10 * TTL)
        mine = await harness.open_run("run", wide, Holder("b", 1))
        await mine.lease(9, 10 * TTL)
        assert await holders(frontier, HOST) == [("other", "a", 2, 0), ("other", "c", 1, 0), ("run", "b", 3, 0)]
        assert await holders(frontier, "b.example") == [("run", "b", 1, 0)]
        await stay_alive(harness, frontier, 12)
        first, *rest = sorted((await others[1].waits([HOST])).holders, key=lambda holder: holder.worker)
        assert 12 <= first.silent_for <= 12 + harness.drift + 0.1
        assert [holder.silent_for for holder in rest] == [0, 0]


async def holders(frontier: Frontier, host: str) -> list[tuple[str, str, int, float]]:
    lease_holders: list[LeaseHolder] = (await frontier.waits([host])).holders
    assert {holder.host for holder in lease_holders} == {host}
    return sorted((holder.run_id, holder.worker, holder.leases, holder.silent_for) for holder in lease_holders)
