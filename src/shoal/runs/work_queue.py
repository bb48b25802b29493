"""A queue of URLs without a spider, for scripts that fetch pages themselves. It uses the same stores as a crawl.

::

    queue = UrlWorkQueue("postgresql://db.example/crawl", name="products")
    await queue.enqueue_urls(urls)
    while (await queue.get_queue_stats())["remaining"]:
        for claim in await queue.claim_batch(10):  # empty while all hosts must wait: sleep a little then
            ...
            await queue.complete_url(claim)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TypedDict, TypeVar, Unpack

import msgspec

from shoal.config import config_for
from shoal.crawling.stats import counts
from shoal.errors import (
    ConfigError,
    FencedError,
    LeaseLostError,
    RequestError,
    RunError,
    ShoalError,
    StoreError,
    StoreRewoundError,
)
from shoal.frontier import open_store
from shoal.http import Request
from shoal.item import encode_item
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, Run, Store
from shoal.runs.loop_thread import LoopThread
from shoal.runs.start import RunSettings
from shoal.runs.worker_session import WorkerSession, has_heartbeats, new_worker_id
from shoal.system import chance, clock

_BATCH = 1000
_SEED_SECONDS = 10.0
_SPIDER = "(work queue)"
_DEFAULTS = {"max_attempts": 4, "delay": 0.0, "concurrency_per_host": 1000}


T = TypeVar("T")


class UrlClaim(msgspec.Struct, frozen=True):
    """A URL that this worker holds until its lease ends."""

    url: str
    attempt: int
    meta: Mapping[str, object]
    lease: Lease


class Enqueued(msgspec.Struct, frozen=True):
    """The outcome of ``enqueue_urls``."""

    added: int
    duplicates: int
    invalid: tuple[str, ...]


class UrlWorkQueue:
    """A queue of URLs that any number of processes share.

    ``name`` may also be the run_id of a run that ``shoal start`` or an `Orchestrator` started. Then this object claims
    its URLs next to the workers of the run.

    ``dsn`` is the URL of a store: ``postgresql://``, ``redis://``, or ``sqlite:///file`` for one process. Each URL is
    claimed by one worker at a time. If the worker dies, the URL can be claimed again, up to ``max_retries`` times: on a
    server within the session of the worker (the setting ``worker.session``), elsewhere when its lease ends. The queue
    sends the heartbeats itself, also while the program is busy. A queue whose URLs are all completed or failed is
    finished; new URLs begin it again.
    """

    def __init__(
        self,
        dsn: str,
        name: str = "default",
        *,
        max_retries: int | None = None,
        max_attempts: int | None = None,
        lease_seconds: float = 300.0,
        delay: float | None = None,
        concurrency_per_host: int | None = None,
        worker_id: str | None = None,
    ) -> None:
        """``name`` identifies the queue in its store. ``max_retries`` (default 3; ``max_attempts`` is one more),
        ``delay`` (0 s) and ``concurrency_per_host`` (1000) are stored by the first process that opens the queue. Other
        values are refused later. ``worker_id`` is recorded with each claim in a store on a server; by default it names
        this process."""
        if max_retries is not None:
            if max_attempts not in (None, max_retries + 1):
                raise ConfigError(
                    f"max_retries {max_retries} and max_attempts {max_attempts} contradict each other: attempts "
                    "include the first one. Pass one of them"
                )
            max_attempts = max_retries + 1
        self._dsn = dsn
        self._name = name
        self._ttl = lease_seconds
        options = {"max_attempts": max_attempts, "delay": delay, "concurrency_per_host": concurrency_per_host}
        self._asked: dict[str, float] = {key: value for key, value in options.items() if value is not None}
        self.worker_id = worker_id or new_worker_id()
        self._session: WorkerSession | None = None
        self._is_own = False
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
                    Run(run_id=self._name, spider=_SPIDER, state="running", created_at=clock.time(), settings=settings)
                )
        run = run or await store.get_run(self._name)
        assert run is not None
        options = (
            msgspec.convert(dict(run.settings), FrontierOptions)
            if run.spider == _SPIDER
            else await self._share(store, run)
        )
        for key, value in self._asked.items():
            if getattr(options, key) != value:
                raise ConfigError(f"the queue {self._name!r} has {key} {getattr(options, key):g}, not {value:g}")
        self._is_own = run.spider == _SPIDER
        if not has_heartbeats(self._dsn):
            return await self._end_seeding(await store.frontier(self._name, options))
        session = WorkerSession(self._dsn, self._name, self.worker_id, config_for(None, {}, "").worker.session)
        frontier = await store.frontier(self._name, options, session.holder)
        await session.join(frontier)
        self._session = session
        return await self._end_seeding(frontier)

    async def _end_seeding(self, frontier: Frontier) -> Frontier:
        """A queue has no start requests to wait for: it is finished whenever nothing remains."""
        if self._is_own and (await frontier.stats()).seeding:
            claim = await frontier.claim("seed", _SEED_SECONDS, nonce=chance.token_bytes(16))
            if claim is not None:  # otherwise another process is about to do this
                await frontier.relinquish(claim, finished=True)
        return frontier

    async def _share(self, store: Store, run: Run) -> FrontierOptions:
        """Take part in the run of a fleet. StoreError if it is another kind of run."""
        try:
            options = RunSettings.of(run).options
        except RunError as exc:
            raise StoreError(f"{self._name!r} is not a work queue: {exc}") from exc
        if run.state == "queued":
            with suppress(RunError):  # another process was first
                await store.transition(run.run_id, "running", among=["queued"])
        return options

    async def enqueue_urls(
        self, urls: Iterable[str], *, priority: float = 0.0, meta: Mapping[str, object] | None = None
    ) -> Enqueued:
        """Add the URLs that are new to the queue. Repeating the call adds nothing. Invalid URLs are returned as
        errors."""
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
        if added:
            await self._move_to("running")
        return Enqueued(added, duplicates, tuple(invalid))

    async def claim_batch(self, size: int = 10) -> list[UrlClaim]:
        """Claim up to ``size`` URLs whose host is due. URLs of dead workers are claimed again when their lease ends.

        StoreRewoundError: the store went back in time and may have lost the last URLs and claims. It is raised once.
        Enqueue those URLs again, and claim again."""
        frontier = await self._open()
        try:
            leased = await frontier.lease(size, self._ttl)
        except StoreRewoundError:
            await frontier.recover()
            raise
        except FencedError:  # this process was frozen; its claims are lost
            assert self._session is not None
            await self._session.rejoin()
            leased = await frontier.lease(size, self._ttl)
        if not leased.leases:
            await self._end_if_drained(frontier)
        return [UrlClaim(lease.request.url, lease.attempt, lease.request.meta, lease) for lease in leased.leases]

    async def renew(self, claims: Sequence[UrlClaim]) -> list[bool]:
        """Renew the leases of these URLs. Returns False for each that is lost."""
        frontier = await self._open()
        renewed = await _unless_fenced(frontier.renew([_lease_of(claim) for claim in claims], self._ttl))
        return [False] * len(claims) if renewed is None else [lease is not None for lease in renewed]

    async def complete_url(self, claim: UrlClaim, *, status: int = 0, items: Sequence[object] = ()) -> None:
        """Complete a URL and store its items in one step. LeaseLostError: the lease had ended, and nothing was
        changed."""
        completion = Completion(lease=_lease_of(claim), status=status, items=[encode_item(item) for item in items])
        frontier = await self._open()
        await _settle(claim, frontier.complete([completion]))

    async def fail_url(
        self, claim: UrlClaim, reason: str, *, kind: str = "failed", retry_in: float | None = 60.0
    ) -> str:
        """Record a failed attempt. The URL is pending again after ``retry_in`` seconds; it is failed if that is None or
        no attempt is left. Returns its state: ``pending`` or ``failed``."""
        failure = Failure(lease=_lease_of(claim), kind=kind, reason=reason, retry_in=retry_in)
        frontier = await self._open()
        state = await _settle(claim, frontier.fail([failure]))
        return "failed" if state == "dead" else "pending"

    async def release_url(self, claim: UrlClaim) -> None:
        """Release a URL. The attempt does not count."""
        frontier = await self._open()
        await _settle(claim, frontier.release([_lease_of(claim)]))

    async def release_expired_leases(self) -> int:
        """Release expired leases now, and return how many there were. Claiming does this too. The number includes
        leases that other workers ended at the same moment."""
        frontier = await self._open()
        before = (await frontier.stats()).leased
        while (await frontier.lease(0, self._ttl)).wait == 0:  # a server releases them in portions
            pass
        return max(0, before - (await frontier.stats()).leased)

    async def get_queue_stats(self) -> dict[str, int]:
        """pending, claimed, completed, failed, remaining."""
        frontier = await self._open()
        stats = await frontier.stats()
        if not stats.remaining:
            await self._end_if_drained(frontier)
        return counts(stats)

    async def _end_if_drained(self, frontier: Frontier) -> None:
        """Finish the run if nothing is left of it."""
        stats = await (await self._end_seeding(frontier)).stats()
        if stats.pushed and stats.finished:
            await self._move_to("finished")
            if (await frontier.stats()).remaining:  # somebody has enqueued URLs meanwhile
                await self._move_to("running")

    async def _move_to(self, state: Literal["running", "finished"]) -> None:
        assert self._store is not None
        if await self._store.run_state(self._name) in ("running", "finished"):  # neither paused nor cancelled
            with suppress(RunError):  # another process was first
                await self._store.transition(self._name, state)

    async def close(self) -> None:
        """Close the store. Claimed URLs stay claimed until their leases end."""
        store, frontier = self._store, self._frontier
        if store is not None and frontier is not None:
            with suppress(ShoalError):
                await self._end_if_drained(frontier)
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._store = self._frontier = None
        if store is not None:
            await store.close()


class QueueOptions(TypedDict, total=False):
    """The options of a `UrlWorkQueue`, by name."""

    max_retries: int | None
    max_attempts: int | None
    lease_seconds: float
    delay: float | None
    concurrency_per_host: int | None
    worker_id: str | None


class SyncUrlWorkQueue:
    """A `UrlWorkQueue` for programs without an event loop. It runs one in its own thread."""

    def __init__(self, dsn: str, name: str = "default", **options: Unpack[QueueOptions]) -> None:
        self._thread = LoopThread("shoal-work-queue", "the queue")
        self._queue = UrlWorkQueue(dsn, name, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enqueue_urls(
        self, urls: Iterable[str], *, priority: float = 0.0, meta: Mapping[str, object] | None = None
    ) -> Enqueued:
        return self._thread.wait(self._queue.enqueue_urls(urls, priority=priority, meta=meta))

    def claim_batch(self, size: int = 10) -> list[UrlClaim]:
        return self._thread.wait(self._queue.claim_batch(size))

    def renew(self, claims: Sequence[UrlClaim]) -> list[bool]:
        return self._thread.wait(self._queue.renew(claims))

    def complete_url(self, claim: UrlClaim, *, status: int = 0, items: Sequence[object] = ()) -> None:
        self._thread.wait(self._queue.complete_url(claim, status=status, items=items))

    def fail_url(self, claim: UrlClaim, reason: str, *, kind: str = "failed", retry_in: float | None = 60.0) -> str:
        return self._thread.wait(self._queue.fail_url(claim, reason, kind=kind, retry_in=retry_in))

    def release_url(self, claim: UrlClaim) -> None:
        self._thread.wait(self._queue.release_url(claim))

    def release_expired_leases(self) -> int:
        return self._thread.wait(self._queue.release_expired_leases())

    def get_queue_stats(self) -> dict[str, int]:
        return self._thread.wait(self._queue.get_queue_stats())

    def close(self) -> None:
        """Close the store, and end the thread."""
        if self._thread.is_running:
            self._thread.wait(self._queue.close())
            self._thread.stop()


async def _unless_fenced(work: Awaitable[T]) -> T | None:
    """The result; None if this process was silent for too long and lost its claims."""
    try:
        return await work
    except FencedError:
        return None


async def _settle(claim: UrlClaim, work: Awaitable[Sequence[T | None]]) -> T:
    """The answer of the frontier for this claim. LeaseLostError if its lease was lost."""
    answer = (await _unless_fenced(work) or [None])[0]
    if not answer:
        raise LeaseLostError(f"the lease of {claim.url} was lost; nothing was changed")
    return answer


def _lease_of(claim: object) -> Lease:
    """The lease of a claim. RequestError for anything else, such as the URL of a claim."""
    if isinstance(claim, UrlClaim):
        return claim.lease
    raise RequestError(
        f"this needs a claim, not {claim!r:.80}: pass what claim_batch() returned, as in "
        "`for claim in await queue.claim_batch(): await queue.complete_url(claim)`"
    )
