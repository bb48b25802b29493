"""The adapter between the contract and a backend, and the steps and checks of the tests."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from shoal.http import Request
from shoal.ports import (
    Completion,
    Failure,
    Frontier,
    FrontierOptions,
    History,
    Holder,
    Lease,
    Leased,
    LoggedItem,
    Pushed,
    Run,
    Store,
)


class FakeClock:
    """A clock that stands still until a test advances it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Harness(ABC):
    """One backend under test. It opens stores, advances their clocks, and simulates crashes."""

    durable: ClassVar[bool] = False
    """Whether a store survives its process. Then implement ``revive_store``."""

    keeps_leases: ClassVar[bool] = True
    """Whether leases and roles survive the process that took them, until they expire. False for a store that only one
    process uses: when it is opened again, that process is dead, and the store ends them at once."""

    drift: ClassVar[float] = 0.0
    """How many seconds the clock of the store may advance by itself during a test: 0 for a fake clock. Below 1."""

    store: Store
    """The store that ``open`` opened."""

    def __init__(self) -> None:
        self.frontiers: dict[str, Frontier] = {}
        """The frontiers that are open, by run."""
        self._options: dict[str, FrontierOptions] = {}
        self._is_open = False

    @abstractmethod
    async def open_store(self) -> Store:
        """Open an empty store."""

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Advance the clock of the store. The suite never waits for real time."""

    async def revive_store(self) -> Store:
        """Open the same store as a new process does, after the old one was killed in the middle of its work."""
        raise NotImplementedError

    async def open(self, options: FrontierOptions | None = None) -> Frontier:
        """Open a new store, create a run in it, and return its frontier."""
        await self._close_store()
        self.store = await self.open_store()
        self._is_open = True
        return await self.open_run("run", options)

    async def open_run(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        """The frontier of a run on the open store, for one more worker. A new run is created."""
        options = options or self._options.get(run_id) or FrontierOptions()
        if await self.store.get_run(run_id) is None:
            run = Run(run_id=run_id, spider="spider", state="running", created_at=len(self._options))
            await self.store.create_run(run)
        frontier = await self.store.frontier(run_id, options, holder)
        self._options[run_id] = options
        self.frontiers[run_id] = frontier
        return frontier

    async def reopen(self) -> Frontier:
        """Kill the process, and return the frontier of the first run in a new one. `open_run` opens other runs."""
        self.frontiers.clear()
        self.store = await self.revive_store()
        return await self.open_run("run")

    async def close(self) -> None:
        """Clean up after the test."""
        await self._close_store()

    async def _close_store(self) -> None:
        self.frontiers.clear()
        self._options.clear()
        if self._is_open:
            self._is_open = False
            await self.store.close()


# Steps and checks.


TTL = 600.0
"""The duration in seconds of leases that must not expire during a test."""

HOST = "a.example"


class ContractTests:
    """The fixtures that all parts of the contract share."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def frontier(self, harness: Harness) -> Frontier:
        """A new run with the default options."""
        return await harness.open()

    @pytest_asyncio.fixture(autouse=True)
    async def balance(self, harness: Harness) -> AsyncIterator[None]:
        """Law 1 holds at the end of each test."""
        yield
        for frontier in harness.frontiers.values():
            await check_balance(frontier)
        await harness.close()


def page(name: object, host: str = HOST, **options: Any) -> Request:
    """A request for the page with this name."""
    return Request(f"http://{host}/{name}", **options)


def names(leased: Leased | list[Lease]) -> list[str]:
    """The names of the leased pages, in order."""
    leases = leased.leases if isinstance(leased, Leased) else leased
    return [lease.request.url.rpartition("/")[2] for lease in leases]


async def push(frontier: Frontier, *pages: object, **options: Any) -> None:
    """Push pages of `HOST`. All of them must be new."""
    pushed = await frontier.push([name if isinstance(name, Request) else page(name, **options) for name in pages])
    assert pushed.added == len(pages)


async def lease_one(frontier: Frontier, ttl: float = TTL, *, counts_attempt: bool = True) -> Lease:
    """Lease the best request. There must be one."""
    leased = await frontier.lease(1, ttl, counts_attempt=counts_attempt)
    assert len(leased.leases) == 1
    return leased.leases[0]


async def lease_names(frontier: Frontier, limit: int = 100, ttl: float = TTL) -> list[str]:
    return names(await frontier.lease(limit, ttl))


async def reissue(frontier: Frontier, leases: Sequence[Lease], ttl: float = TTL) -> list[Lease | None]:
    """Reissue with a new nonce."""
    return await frontier.reissue(leases, ttl, nonce=os.urandom(16))


async def reissue_one(frontier: Frontier, lease: Lease, ttl: float = TTL) -> Lease:
    """Reissue a lease, which must be current."""
    (reissued,) = await reissue(frontier, [lease], ttl)
    assert reissued is not None
    return reissued


async def complete(frontier: Frontier, *leases: Lease, **options: Any) -> None:
    """Complete leases, which must be current."""
    pushed = await frontier.complete([Completion(lease=lease, **options) for lease in leases])
    assert None not in pushed


async def fail(frontier: Frontier, lease: Lease, retry_in: float | None = None, **options: Any) -> str | None:
    """Fail a lease, and return the new state of its request."""
    options = {"kind": "timeout", "reason": "no answer in 30 s"} | options
    (state,) = await frontier.fail([Failure(lease=lease, retry_in=retry_in, **options)])
    return state


async def finish_seeding(frontier: Frontier) -> None:
    claim = await frontier.claim("seed", TTL)
    assert claim is not None
    assert await frontier.relinquish(claim, finished=True)


async def history(frontier: Frontier, request: Request) -> History:
    """The history of a request that the run must have."""
    request_history = await frontier.find(request)
    assert request_history is not None
    return request_history


async def all_items(frontier: Frontier) -> list[LoggedItem]:
    return await frontier.read_items(0, 1_000_000)


async def check_balance(frontier: Frontier) -> None:
    """Law 1: the counters balance, and agree with the requests themselves."""
    stats = await frontier.stats()
    assert stats.balanced
    assert await frontier.audit() == stats


async def check_refused(frontier: Frontier, lease: Lease) -> None:
    """Law 3: no call with a stale lease changes anything, and each one says so."""
    before = await frontier.stats(), await all_items(frontier), await frontier.find(lease.request)
    child = page("child-of-a-stale-lease")
    completion = Completion(lease=lease, items=[b"stale"], children=[child], duplicates=3)
    if await frontier.complete([completion]) != [None]:  # allowed for a repeat with the token that completed it
        assert before[2] is not None
        assert before[2].state == "done"
        assert await frontier.complete([completion]) == [Pushed(0, 0)]
    for retry_in in (None, 5.0):
        failure = Failure(
            lease=lease, kind="stale", reason="stale", retry_in=retry_in, items=[b"stale"], children=[child]
        )
        assert await frontier.fail([failure]) == [None]
    assert await frontier.renew([lease], TTL) == [None]
    assert await reissue(frontier, [lease]) == [None]
    assert await frontier.release([lease]) == [False]
    assert await frontier.find(child) is None
    assert (await frontier.stats(), await all_items(frontier), await frontier.find(lease.request)) == before


def check_wait(harness: Harness, leased: Leased, seconds: float) -> None:
    """The wait hint is exact: never later, and earlier at most by the drift of the store's clock."""
    assert leased.wait is not None
    assert seconds - harness.drift - 0.01 <= leased.wait <= seconds + 0.01
