"""The queue without a spider: for scripts that fetch for themselves, on the same store and under the same laws.

::

    queue = UrlWorkQueue("postgresql://db.example/crawl", name="products")
    await queue.enqueue_urls(urls)
    while (await queue.get_queue_stats())["remaining"]:
        for claim in await queue.claim_batch(10):  # none while all hosts must wait: sleep a little then
            ...
            await queue.complete_url(claim)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from shoal.crawling.stats import counts
from shoal.errors import ConfigError, LeaseLostError, RequestError, RunError, StoreError, StoreRewoundError
from shoal.frontier import open_store
from shoal.http import Request
from shoal.item import encode_item
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, Run, Store

T = TypeVar("T")

_BATCH = 1000
_SPIDER = "(work queue)"
_DEFAULTS = {"max_attempts": 3, "delay": 0.0, "concurrency_per_host": 1000}


class UrlClaim(msgspec.Struct, frozen=True):
    """A URL that is this worker's until its lease ends."""

    url: str
    attempt: int
    meta: Mapping[str, Any]
    lease: Lease


class Enqueued(msgspec.Struct, frozen=True):
    """What became of URLs that were offered."""

    added: int
    duplicates: int
    invalid: tuple[str, ...]


class UrlWorkQueue:
    """A queue of URLs that any number of processes share.

    ``dsn`` is the URL of a store: ``postgresql://``, ``redis://``, or ``sqlite:///file`` for one process. A URL is
    claimed by one worker at a time; one whose worker dies comes back when its lease ends, up to ``max_attempts``.
    """

    def __init__(
        self,
        dsn: str,
        name: str = "default",
        *,
        max_attempts: int | None = None,
        lease_seconds: float = 300.0,
        delay: float | None = None,
        concurrency_per_host: int | None = None,
    ) -> None:
        """``name`` tells queues on one store apart. Attempts (3), ``delay`` (0 s) and ``concurrency_per_host`` (1000)
        are the queue's: whoever opens it first says what holds for all, and another value is refused later."""
        self._dsn = dsn
        self._name = name
        self._ttl = lease_seconds
        asked = {"max_attempts": max_attempts, "delay": delay, "concurrency_per_host": concurrency_per_host}
        self._asked: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
        self._store: Store | None = None
        self._frontier: Frontier | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self) -> Frontier:
        async with self._opening:
            if self._frontier is None:
                store = await open_store(self._dsn)
                try:
                    self._frontier = await self._prepare(store)
                except BaseException:
                    await store.close()
                    raise
                self._store = store
            return self._frontier

    async def _prepare(self, store: Store) -> Frontier:
        run = await store.get_run(self._name)
        if run is None:
            settings = {**_DEFAULTS, **self._asked}
            with suppress(RunError):  # another process was first
                run = await store.create_run(
                    Run(run_id=self._name, spider=_SPIDER, state="running", created_at=time.time(), settings=settings)
                )
        run = run or await store.get_run(self._name)
        if run is None or run.spider != _SPIDER:
            raise StoreError(f"{self._name!r} is a run of a spider, not a work queue; choose another name")
        for key, value in self._asked.items():
            if run.settings[key] != value:
                raise ConfigError(f"the queue {self._name!r} has {key} {run.settings[key]:g}, not {value:g}")
        return await store.frontier(self._name, FrontierOptions(**run.settings))

    async def enqueue_urls(
        self, urls: Iterable[str], *, priority: float = 0.0, meta: Mapping[str, Any] | None = None
    ) -> Enqueued:
        """Add those that the queue has never had; the same call again adds nothing. What is no URL is told."""
        frontier = await self._open()
        added = duplicates = 0
        invalid: list[str] = []
        batch: list[Request] = []
        for url in urls:
            try:
                batch.append(Request(url, priority=priority, meta=dict(meta or {})))
            except RequestError as error:
                invalid.append(str(error))
            if len(batch) >= _BATCH:
                pushed = await frontier.push(batch)
                added, duplicates, batch = added + pushed.added, duplicates + pushed.duplicates, []
        if batch:
            pushed = await frontier.push(batch)
            added, duplicates = added + pushed.added, duplicates + pushed.duplicates
        return Enqueued(added, duplicates, tuple(invalid))

    async def claim_batch(self, size: int = 10) -> list[UrlClaim]:
        """Up to ``size`` URLs whose host may be fetched from now. Those of dead workers come back by themselves.

        StoreRewoundError: the store went back in time, and may have lost what was enqueued or claimed last. It is
        raised once; enqueue those URLs again, and claim on. What was claimed before has to be claimed again."""
        frontier = await self._open()
        try:
            leased = await frontier.lease(size, self._ttl)
        except StoreRewoundError:
            await frontier.recover()
            raise
        return [UrlClaim(lease.request.url, lease.attempt, lease.request.meta, lease) for lease in leased.leases]

    async def renew(self, claims: Sequence[UrlClaim]) -> list[bool]:
        """Keep them for as long again; False for each that is lost."""
        renewed = await (await self._open()).renew([claim.lease for claim in claims], self._ttl)
        return [lease is not None for lease in renewed]

    async def complete_url(self, claim: UrlClaim, *, status: int = 0, items: Sequence[Any] = ()) -> None:
        """Done, with its items in the same step. LeaseLostError: it came too late, and nothing was changed."""
        completion = Completion(lease=claim.lease, status=status, items=[encode_item(item) for item in items])
        if (await (await self._open()).complete([completion]))[0] is None:
            raise _lost(claim)

    async def fail_url(
        self, claim: UrlClaim, reason: str, *, kind: str = "failed", retry_in: float | None = 60.0
    ) -> str:
        """Try again after ``retry_in`` seconds, or never if that is None or its attempts are used up. Its state now."""
        failure = Failure(lease=claim.lease, kind=kind, reason=reason, retry_in=retry_in)
        state = (await (await self._open()).fail([failure]))[0]
        if state is None:
            raise _lost(claim)
        return state

    async def release_url(self, claim: UrlClaim) -> None:
        """Give it back unused: the attempt does not count."""
        if not (await (await self._open()).release([claim.lease]))[0]:
            raise _lost(claim)

    async def release_expired_leases(self) -> int:
        """How many URLs came back just now. Claiming does it too, so nobody has to call this. While other workers end
        theirs at the same moment, those are counted too."""
        frontier = await self._open()
        before = (await frontier.stats()).leased
        while (await frontier.lease(0, self._ttl)).wait == 0:  # a server takes them in portions
            pass
        return max(0, before - (await frontier.stats()).leased)

    async def get_queue_stats(self) -> dict[str, int]:
        """pending, claimed, completed, failed, remaining."""
        return counts(await (await self._open()).stats())

    async def close(self) -> None:
        """What is claimed stays so until its lease ends."""
        store, self._store, self._frontier = self._store, None, None
        if store is not None:
            await store.close()


class SyncUrlWorkQueue:
    """The same for programs without an event loop: a thread of its own runs one."""

    def __init__(self, dsn: str, name: str = "default", **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-work-queue", daemon=True)
        self._thread.start()
        self._queue = UrlWorkQueue(dsn, name, **options)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enqueue_urls(
        self, urls: Iterable[str], *, priority: float = 0.0, meta: Mapping[str, Any] | None = None
    ) -> Enqueued:
        return self._wait(self._queue.enqueue_urls(urls, priority=priority, meta=meta))

    def claim_batch(self, size: int = 10) -> list[UrlClaim]:
        return self._wait(self._queue.claim_batch(size))

    def renew(self, claims: Sequence[UrlClaim]) -> list[bool]:
        return self._wait(self._queue.renew(claims))

    def complete_url(self, claim: UrlClaim, *, status: int = 0, items: Sequence[Any] = ()) -> None:
        self._wait(self._queue.complete_url(claim, status=status, items=items))

    def fail_url(self, claim: UrlClaim, reason: str, *, kind: str = "failed", retry_in: float | None = 60.0) -> str:
        return self._wait(self._queue.fail_url(claim, reason, kind=kind, retry_in=retry_in))

    def release_url(self, claim: UrlClaim) -> None:
        self._wait(self._queue.release_url(claim))

    def release_expired_leases(self) -> int:
        return self._wait(self._queue.release_expired_leases())

    def get_queue_stats(self) -> dict[str, int]:
        return self._wait(self._queue.get_queue_stats())

    def close(self) -> None:
        """Also ends the thread."""
        if not self._loop.is_closed():
            self._wait(self._queue.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _lost(claim: UrlClaim) -> LeaseLostError:
    return LeaseLostError(f"the lease of {claim.url} was lost; nothing was changed")
