"""The words that the contract's tests are written in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, History, Lease, Leased, LoggedItem, Pushed
from shoal.testing.harness import Harness

TTL = 600.0
"""For leases that are not meant to run out."""

HOST = "a.example"


class ContractTests:
    """The fixtures of every part of the contract."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def frontier(self, harness: Harness) -> Frontier:
        """A new run with the default options."""
        return await harness.open()

    @pytest_asyncio.fixture(autouse=True)
    async def books(self, harness: Harness) -> AsyncIterator[None]:
        """Law 1 holds at the end of each test, in whatever state that leaves the store."""
        yield
        for frontier in harness.frontiers.values():
            await check_books(frontier)
        await harness.close()


def page(name: object, host: str = HOST, **options: Any) -> Request:
    """The request for a page, named in its URL."""
    return Request(f"http://{host}/{name}", **options)


def names(leased: Leased | list[Lease]) -> list[str]:
    """Which pages were leased, in order."""
    leases = leased.leases if isinstance(leased, Leased) else leased
    return [lease.request.url.rpartition("/")[2] for lease in leases]


async def push(frontier: Frontier, *pages: object, **options: Any) -> None:
    """Push pages of the first host; each has to be new."""
    pushed = await frontier.push([each if isinstance(each, Request) else page(each, **options) for each in pages])
    assert pushed.added == len(pages)


async def lease_one(frontier: Frontier, ttl: float = TTL, *, begun: bool = True) -> Lease:
    """The best request; there has to be one."""
    leased = await frontier.lease(1, ttl, begun=begun)
    assert len(leased.leases) == 1
    return leased.leases[0]


async def lease_names(frontier: Frontier, limit: int = 100, ttl: float = TTL) -> list[str]:
    return names(await frontier.lease(limit, ttl))


async def reissue(frontier: Frontier, leases: Sequence[Lease], ttl: float = TTL) -> list[Lease | None]:
    """As somebody does who has not tried it before."""
    return await frontier.reissue(leases, ttl, nonce=os.urandom(16))


async def reissue_one(frontier: Frontier, lease: Lease, ttl: float = TTL) -> Lease:
    """The lease under its new token; it must not be lost."""
    (reissued,) = await reissue(frontier, [lease], ttl)
    assert reissued is not None
    return reissued


async def complete(frontier: Frontier, *leases: Lease, **options: Any) -> None:
    """Make them done; none may be lost."""
    pushed = await frontier.complete([Completion(lease=lease, **options) for lease in leases])
    assert None not in pushed


async def fail(frontier: Frontier, lease: Lease, retry_in: float | None = None, **options: Any) -> str | None:
    """Fail one, and return the state it is in now."""
    options = {"kind": "timeout", "reason": "no answer in 30 s"} | options
    (state,) = await frontier.fail([Failure(lease=lease, retry_in=retry_in, **options)])
    return state


async def finish_seeding(frontier: Frontier) -> None:
    claim = await frontier.claim("seed", TTL)
    assert claim is not None
    assert await frontier.relinquish(claim, finished=True)


async def history(frontier: Frontier, request: Request) -> History:
    """What became of a request that the frontier has to know."""
    found = await frontier.find(request)
    assert found is not None
    return found


async def all_items(frontier: Frontier) -> list[LoggedItem]:
    return await frontier.read_items(0, 1_000_000)


async def check_books(frontier: Frontier) -> None:
    """Law 1: nothing is lost, nothing is there twice, and the counters tell the truth."""
    stats = await frontier.stats()
    assert stats.balanced
    assert await frontier.audit() == stats


async def check_refused(frontier: Frontier, lease: Lease) -> None:
    """Law 3: whatever is tried with a lease that was lost changes nothing, and is told so."""
    before = await frontier.stats(), await all_items(frontier), await frontier.find(lease.request)
    child = page("child-of-a-stale-lease")
    completion = Completion(lease=lease, items=[b"stale"], children=[child], duplicates=3)
    if await frontier.complete([completion]) != [None]:  # allowed for a repeat under the token that made it done
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
    """The hint is right: not later, and not earlier than the store's own clock explains."""
    assert leased.wait is not None
    assert seconds - harness.drift - 0.01 <= leased.wait <= seconds + 0.01
