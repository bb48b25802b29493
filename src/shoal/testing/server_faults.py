"""The contract of a store on a server under faults, as tests.

The faults are a killed or frozen server, a cancelled call, concurrent clients, a store of a newer version, and a
damaged record. Every frontier that many processes share must pass. The tests kill the server, so do not use a shared
one.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

import pytest
import pytest_asyncio

from shoal.errors import StoreAwayError, StoreError
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, HostUpdate, Lease, Pushed, Run, Store
from shoal.testing.steps import TTL, check_balance, complete, history, lease_one, names, page, push, reissue

TIMEOUT = 1.0
"""The time limit of a client's calls, in seconds."""
UNREADABLE = "unreadable"
"""The kind of death of a request whose stored record cannot be read."""
WIDE = FrontierOptions(concurrency_per_host=10_000)


class ServerFaultHarness(ABC):
    """A server that the tests may harm, and the clients of one empty store on it."""

    def __init__(self) -> None:
        self._stores: list[Store] = []

    @abstractmethod
    async def open_store(self, timeout: float | None = None) -> Store:
        """Connect one more client to the store, with its own connections. It gives up a call after ``timeout`` seconds
        (None: the default of the backend)."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the server. It gets no time to write anything."""

    @abstractmethod
    def restart(self) -> None:
        """Start the killed server again, with its data and under the same address. Returns when it answers."""

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """While the block runs, the server keeps its connections but does not answer. Then it continues."""

    @abstractmethod
    async def mark_as_newer(self) -> None:
        """Change the stored format number to that of a newer version."""

    @abstractmethod
    async def damage(self, request: Request) -> None:
        """Overwrite the stored record of a request of the run with bytes that are not a request."""

    async def check_store(self) -> None:  # noqa: B027 - most backends need nothing
        """Check that the internal tables of the backend are consistent. Does nothing by default."""

    async def connect(self, timeout: float | None = None) -> Store:
        """Connect a client that is closed at the end of the test."""
        store = await self.open_store(timeout)
        self._stores.append(store)
        return store

    async def open_run(self, timeout: float | None = None, options: FrontierOptions = WIDE) -> Frontier:
        """The frontier of the run, through a new client. The first call creates the run."""
        store = await self.connect(timeout)
        if await store.get_run("run") is None:
            await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
        return await store.frontier("run", options)

    async def close(self) -> None:
        """Close all clients, at the end of a test."""
        for store in self._stores:
            await store.close()


async def wait_until_back(frontier: Frontier) -> None:
    """Wait until the client has reconnected to its server."""
    async with asyncio.timeout(30):
        while True:
            try:
                await frontier.stats()
                return
            except StoreAwayError:
                await asyncio.sleep(0.02)


class ServerFaultContract:
    """Subclass it, and give it a ``faults`` fixture that returns a `ServerFaultHarness`."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture(autouse=True)
    async def closing(self, faults: ServerFaultHarness) -> AsyncIterator[None]:
        yield
        await faults.close()

    # -- a server that is away

    async def test_a_killed_server_has_everything_when_it_is_back(self, faults: ServerFaultHarness) -> None:
        """A change that was acknowledged survives. A call that failed with StoreAwayError can be repeated."""
        frontier = await faults.open_run(options=FrontierOptions(max_attempts=2))
        await push(frontier, *range(5))
        first, second, third = (await frontier.lease(3, TTL)).leases
        await complete(frontier, first, items=[b"x", b"y"], children=[page("child")], note="a note")
        assert await frontier.fail([Failure(lease=second, kind="timeout", reason="slow", retry_in=1000)])
        await frontier.update_host("a.example", HostUpdate(crawl_delay=0.001))
        pages = [page(number) for number in range(5)]
        before = await frontier.stats(), [await history(frontier, request) for request in pages]
        faults.kill()
        for _ in range(2):
            with pytest.raises(StoreAwayError):
                await frontier.stats()
        with pytest.raises(StoreAwayError):
            await frontier.push([page("late")])
        faults.restart()
        await wait_until_back(frontier)
        assert (await frontier.stats(), [await history(frontier, request) for request in pages]) == before
        assert [item.payload for item in await frontier.read_items(0, 9)] == [b"x", b"y"]
        assert await frontier.complete([Completion(lease=third), Completion(lease=first)]) == [Pushed(0, 0)] * 2
        assert await frontier.push([page("late"), page(1)]) == Pushed(1, 1)
        await check_balance(frontier)

    async def test_a_server_that_is_killed_during_work_loses_no_request(self, faults: ServerFaultHarness) -> None:
        """Whether a call that was in flight happened or not, the counters balance and no token is used again."""
        frontier = await faults.open_run(timeout=5.0)
        await push(frontier, *range(300))
        acknowledged: list[Lease] = []
        leased: list[Lease] = []
        has_worked = asyncio.Event()

        async def work() -> None:
            while True:
                leases = (await frontier.lease(3, TTL)).leases
                leased.extend(leases)
                await frontier.complete([Completion(lease=lease, items=[b"x"]) for lease in leases])
                acknowledged.extend(leases)
                has_worked.set()

        workers = [asyncio.create_task(work()) for _ in range(3)]
        await has_worked.wait()
        faults.kill()
        for ended in await asyncio.gather(*workers, return_exceptions=True):
            assert isinstance(ended, StoreAwayError)
        faults.restart()
        await wait_until_back(frontier)
        stats = await frontier.stats()
        await check_balance(frontier)
        assert stats.pushed == 300
        assert stats.done == stats.items >= len(acknowledged)
        again = await frontier.complete([Completion(lease=lease, children=[page("no")]) for lease in acknowledged])
        assert again == [Pushed(0, 0)] * len(acknowledged)
        rest = (await frontier.lease(1000, TTL)).leases
        assert len(rest) == stats.ready
        assert not {lease.token for lease in leased} & {lease.token for lease in rest}

    async def test_calls_to_a_frozen_server_fail_in_time(self, faults: ServerFaultHarness) -> None:
        """A client waits no longer than its timeout, and works again when the server does."""
        frontier = await faults.open_run(TIMEOUT)
        await asyncio.gather(*(frontier.push([page(number)]) for number in range(8)))
        with faults.frozen():
            started = time.monotonic()
            answers = await asyncio.gather(
                frontier.lease(1, TTL), *(frontier.stats() for _ in range(6)), return_exceptions=True
            )
            assert all(isinstance(answer, StoreAwayError) for answer in answers)
            assert time.monotonic() - started < 4 * TIMEOUT
            with pytest.raises(StoreAwayError):
                await faults.connect(TIMEOUT)
            assert time.monotonic() - started < 9 * TIMEOUT
        await wait_until_back(frontier)
        await check_balance(frontier)

    async def test_a_lease_that_its_client_gave_up_takes_nothing(self, faults: ServerFaultHarness) -> None:
        """After a freeze, the server finds old calls in its sockets. It must not lease requests for them."""
        frontier = await faults.open_run(TIMEOUT)
        await push(frontier, *range(10))
        await lease_one(frontier)
        with faults.frozen():
            with pytest.raises(StoreAwayError):
                await frontier.lease(5, TTL)
            await asyncio.sleep(1.2 * TIMEOUT)
        await asyncio.sleep(0.3)  # the server handles the calls in its sockets
        await wait_until_back(frontier)
        stats = await frontier.stats()
        assert (stats.leased, stats.ready) == (1, 9)
        assert len((await frontier.lease(2, TTL)).leases) == 2

    # -- a caller that is cancelled

    async def test_a_cancelled_lease_loses_no_request(self, faults: ServerFaultHarness) -> None:
        """Requests that are leased to a cancelled caller are released at once, and no attempt counts."""
        frontier = await faults.open_run()
        await push(frontier, *range(20))
        await frontier.lease(0, TTL)
        cancelled = 0
        for turn in range(20):
            task = asyncio.create_task(frontier.lease(2, TTL))
            for _ in range(1 + turn % 5):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await frontier.release((await task).leases)
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled
        stats = await frontier.stats()
        assert (stats.ready, stats.leased) == (20, 0)
        leases = (await frontier.lease(20, TTL)).leases
        assert [(lease.attempt, lease.request) for lease in leases] == [(1, page(number)) for number in range(20)]

    # -- clients that call at the same time

    async def test_concurrent_leases_never_share_a_request(self, faults: ServerFaultHarness) -> None:
        clients = [await faults.open_run(), await faults.open_run()]
        await clients[0].push([page(number, host=f"{number % 9}.example") for number in range(600)])
        done: list[str] = []

        async def work(frontier: Frontier) -> None:
            while leases := (await frontier.lease(7, TTL)).leases:
                done.extend(names(leases))
                await complete(frontier, *leases)

        await asyncio.gather(*(work(client) for client in clients * 3))
        assert sorted(done, key=int) == [str(number) for number in range(600)]
        assert all(state.in_flight == 0 for state in await clients[0].host_states())
        await check_balance(clients[0])
        await faults.check_store()

    async def test_concurrent_completions_add_a_child_once(self, faults: ServerFaultHarness) -> None:
        """Two clients complete the same leases: one of each pair succeeds, and the other changes nothing."""
        clients = [await faults.open_run(), await faults.open_run()]
        await push(clients[0], *range(40))
        leases = (await clients[0].lease(40, TTL)).leases
        answers = await asyncio.gather(
            *(
                client.complete([Completion(lease=lease, items=[b"x"], children=[page("child"), page(f"c{number}")])])
                for client in clients
                for number, lease in enumerate(leases)
            )
        )
        added = [pushed.added for (pushed,) in answers if pushed is not None and pushed != Pushed(0, 0)]
        assert len(added) == 40
        assert sum(added) == 41
        assert (await clients[0].stats()).items == 40
        await check_balance(clients[0])
        await faults.check_store()

    async def test_concurrent_reissues_have_one_winner(self, faults: ServerFaultHarness) -> None:
        clients = [await faults.open_run(), await faults.open_run()]
        await push(clients[0], *range(40))
        leases = (await clients[0].lease(40, TTL)).leases
        for _ in range(10):
            reissues = [reissue(client, [lease]) for lease in leases for client in clients]
            renewals = [client.renew(leases[::-1], TTL) for client in clients]
            answers = await asyncio.gather(*reissues, *renewals)
            won = [lease for (lease,) in answers[: len(reissues)] if lease]
            assert [lease.fingerprint for lease in won] == [lease.fingerprint for lease in leases]
            assert not {lease.token for lease in won} & {lease.token for lease in leases}
            leases = won
        await complete(clients[1], *leases)
        await check_balance(clients[0])
        await faults.check_store()

    # -- stored data

    async def test_a_newer_format_is_refused(self, faults: ServerFaultHarness) -> None:
        """An old client must not work on a store whose format it does not know. The error says what to do."""
        frontier = await faults.open_run()
        await push(frontier, 1)
        await faults.mark_as_newer()
        with pytest.raises(StoreError, match="newer Shoal"):
            await faults.connect()

    async def test_an_unreadable_record_costs_only_itself(self, faults: ServerFaultHarness) -> None:
        """A damaged request is dead, with its reason. It neither stops a lease nor takes the place of another one."""
        frontier = await faults.open_run()
        await push(frontier, 1, 2, 3, 4)
        for number in (1, 4):
            await faults.damage(page(number))
        assert names(await frontier.lease(1, TTL)) == ["2"]
        assert names(await frontier.lease(9, TTL)) == ["3"]
        assert await frontier.dead_kinds() == {UNREADABLE: 2}
        dead = [request async for request in frontier.dead()]
        assert len(dead) == 2
        assert all(request.reason for request in dead)
        assert (await history(frontier, page(1))).state == "dead"
        stats = await frontier.stats()
        assert (stats.ready, stats.leased, stats.dead) == (0, 2, 2)
        await check_balance(frontier)
