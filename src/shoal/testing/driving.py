"""Clients that make random calls on one run at the same time, while their connections fail: a history to check."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from shoal.errors import FencedError, RunError, StoreAwayError
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Holder, HostUpdate, Lease, Run, Store
from shoal.testing.histories import RecordedFrontier, Recording, show

T = TypeVar("T")

TTLS = (0.08, 0.25, 1.0)
"""Seconds of leases: some expire while their client works."""
OPTIONS = FrontierOptions(max_attempts=3, concurrency_per_host=2)
_LATEST = 30.0
"""Seconds until all requests must be done, when nothing fails any more."""


async def drive(stores: Sequence[Store], seed: int, *, steps: int = 30) -> Recording:
    """A history of random calls on a new run, one client for each store, and its check. No other run of the store works
    meanwhile; each history has its own hosts.

    ``stores``: of the same server or file, each with its own connections. Their calls may fail with StoreAwayError: the
    client repeats such a call, or goes on without the answer. AssertionError if the history cannot be explained, if a
    request is never leased again, or if an audit finds a fault. ``seed`` chooses the calls; their timing is real.
    """
    recording = Recording(OPTIONS, seed)
    run_id = f"h{os.urandom(5).hex()}"
    await _persistently(lambda: _create(stores[0], run_id))
    clients: list[_Client] = []
    hosts = [f"{name}.{run_id}.example" for name in "abc"]
    pages = [Request(f"http://{host}/{number}") for host in hosts for number in range(3)]
    for number, store in enumerate(stores):
        name = f"w{number + 1}"
        holder = Holder(name, 1)
        frontier = await _persistently(partial(store.frontier, run_id, OPTIONS, holder))
        recorded = RecordedFrontier(recording, name, frontier, holder)
        clients.append(_Client(recorded, store, run_id, pages, random.Random(f"{seed} {name}"), clients))
    for host, update in zip(hosts, (HostUpdate(delay=0.03), HostUpdate(concurrency=1)), strict=False):
        await _persistently(partial(clients[0].frontier.update_host, host, update))
    await asyncio.gather(*(client.work(steps) for client in clients))
    try:
        async with asyncio.timeout(_LATEST):
            await clients[0].finish()
    except TimeoutError:
        await asyncio.to_thread(recording.check)
        stuck = await _stuck(clients[0].frontier.frontier, stores[0], run_id)
        raise AssertionError(f"seed {seed}: {stuck}\n{show(recording.operations[-10:])}") from None
    await asyncio.to_thread(recording.check)  # it may take seconds
    audit = await _persistently(clients[0].frontier.frontier.audit)
    assert audit.balanced, f"seed {seed}: {audit}"
    with suppress(RunError):  # it was deleted by a call whose answer was lost
        await _persistently(lambda: stores[0].delete_run(run_id))
    return recording


async def _stuck(frontier: Frontier, store: Store, run_id: str) -> str:
    """Why requests are left although a client has leased again and again."""
    state, audit = await _persistently(lambda: store.run_state(run_id)), await _persistently(frontier.audit)
    hosts = await _persistently(frontier.host_states)
    return f"after {_LATEST:g} s, requests are left. The run is {state}. {audit}\n" + "\n".join(map(str, hosts))


async def _create(store: Store, run_id: str) -> None:
    with suppress(RunError):  # it was created by a call whose answer was lost
        await store.create_run(Run(run_id=run_id, spider="history", state="running", created_at=0.0))


async def _persistently(step: Callable[[], Awaitable[T]]) -> T:
    """Again while the store is away."""
    while True:
        try:
            return await step()
        except StoreAwayError:
            await asyncio.sleep(0.01)


class _Client:
    """Makes random calls, one after the other."""

    def __init__(
        self, frontier: RecordedFrontier, store: Store, run_id: str, pages: Sequence[Request], dice: random.Random,
        clients: Sequence[_Client],
    ) -> None:  # fmt: skip
        self.frontier = frontier
        self._store = store
        self._run_id = run_id
        self._pages = pages
        self._dice = dice
        self._clients = clients
        """All clients of the run."""
        self._leases: list[Lease] = []
        self._spent: list[Lease] = []
        """Leases that it has used already, or that others had."""
        self._epoch = 1
        """Of its holder; others may fence the holder and raise it."""

    async def work(self, steps: int) -> None:
        chances = {
            self._push: 4, self._lease: 6, self._complete: 5, self._fail: 3, self._renew: 2, self._release: 1,
            self._reissue: 1, self._use_spent: 2, self._find: 2, self._count: 1, self._fence: 1, self._pause: 1,
            self._retry_dead: 1, self._rest: 2,
        }  # fmt: skip
        for step in self._dice.choices(list(chances), list(chances.values()), k=steps):
            await step()
            await asyncio.sleep(0)  # in memory, no call waits for anything

    async def finish(self) -> None:
        """Work until no request is left, and look at each of them."""
        await _persistently(lambda: self.frontier.transition(self._store, self._run_id, "running"))
        leases = [lease for client in self._clients for lease in client._leases]
        while (await _persistently(self.frontier.stats)).remaining:
            await self._lease()
            for lease in leases + self._leases:
                await self._try(partial(self.frontier.complete, [Completion(lease=lease)]))
            leases, self._leases = [], []
            await asyncio.sleep(0.01)
        for page in self._pages:
            await _persistently(partial(self.frontier.find, page))
        await _persistently(self.frontier.stats)

    async def _try(self, step: Callable[[], Awaitable[T]]) -> T | None:
        """The answer of a call. If it gets lost, the call is repeated, or not. None: it got lost, or was refused."""
        while True:
            try:
                return await step()
            except StoreAwayError:
                if self._dice.random() < 0.4:
                    return None
            except (FencedError, RunError):
                return None

    def _some_pages(self, most: int) -> list[Request]:
        return self._dice.choices(self._pages, k=self._dice.randint(0, most))

    async def _push(self) -> None:
        pages = self._some_pages(2) or [self._dice.choice(self._pages)]
        await self._try(lambda: self.frontier.push(pages))

    async def _lease(self) -> None:
        limit, ttl, nonce = self._dice.randint(0, 3), self._dice.choice(TTLS), os.urandom(16)
        counts_attempt = self._dice.random() < 0.8
        if self.frontier.holder != (holder := Holder(self.frontier.client, self._epoch)):
            self.frontier.hold(holder)  # it was fenced, and joins again
        leased = await self._try(lambda: self.frontier.lease(limit, ttl, counts_attempt=counts_attempt, nonce=nonce))
        self._leases += leased.leases if leased else []

    def _take(self) -> list[Lease]:
        """One of its leases, from now on spent. Nothing if it has none."""
        if not self._leases:
            return []
        self._spent.append(self._leases.pop(self._dice.randrange(len(self._leases))))
        return self._spent[-1:]

    async def _complete(self) -> None:
        leases = self._take() + (self._take() if self._dice.random() < 0.5 else [])
        pages = [
            Completion(lease=lease, children=self._some_pages(2), contacted=self._dice.random() < 0.8)
            for lease in leases
        ]
        if pages:
            await self._try(lambda: self.frontier.complete(pages))

    async def _fail(self) -> None:
        for lease in self._take():
            retry_in = self._dice.choice([None, 0.0, 0.05])
            page = Failure(lease=lease, kind="timeout", reason="slow", retry_in=retry_in, children=self._some_pages(1))
            await self._try(partial(self.frontier.fail, [page]))

    async def _release(self) -> None:
        if leases := self._take():
            await self._try(lambda: self.frontier.release(leases))

    async def _renew(self) -> None:
        leases, ttl = list(self._leases), self._dice.choice(TTLS)
        if leases:
            renewed = await self._try(lambda: self.frontier.renew(leases, ttl))
            self._leases = leases if renewed is None else [lease for lease in renewed if lease]

    async def _reissue(self) -> None:
        if leases := self._take():
            ttl, nonce = self._dice.choice(TTLS), os.urandom(16)
            reissued = await self._try(lambda: self.frontier.reissue(leases, ttl, nonce=nonce))
            self._leases += [lease for lease in reissued or () if lease]

    async def _use_spent(self) -> None:
        """Use a lease that is over, or that another client has."""
        leases = [*self._spent, *(lease for client in self._clients for lease in client._leases)]
        if not leases:
            return
        lease, client = self._dice.choice(leases), self.frontier
        step: Callable[[], Awaitable[object]] = self._dice.choice([
            lambda: client.complete([Completion(lease=lease, children=self._pages[:1])]),
            lambda: client.fail([Failure(lease=lease, kind="timeout", reason="slow", retry_in=0.0)]),
            lambda: client.release([lease]),
            lambda: client.renew([lease], TTLS[0]),
        ])  # fmt: skip
        await self._try(step)

    async def _find(self) -> None:
        page = self._dice.choice(self._pages)
        await self._try(lambda: self.frontier.find(page))

    async def _count(self) -> None:
        await self._try(self.frontier.stats)

    async def _fence(self) -> None:
        """Fence a client, as if it were silent. It leases under a later epoch from then on."""
        client = self._dice.choice(self._clients)
        client._epoch = epoch = client._epoch + 1
        await self._try(lambda: self.frontier.fence(client.frontier.client, epoch))

    async def _pause(self) -> None:
        await self._try(lambda: self.frontier.transition(self._store, self._run_id, "paused"))
        await self._rest()
        await self._try(lambda: self.frontier.transition(self._store, self._run_id, "running"))

    async def _retry_dead(self) -> None:
        await self._try(self.frontier.retry_dead)

    async def _rest(self) -> None:
        await asyncio.sleep(self._dice.random() * 0.05)
