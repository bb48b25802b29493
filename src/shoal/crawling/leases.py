"""The leases of a worker: renewed in time, dropped before they end, and settled when their pages are handled.

`Persistence` repeats calls of the frontier, and `StorageWatch` calls of other stores: a full disk may get room, and a
server may come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from shoal.crawling.page import ParsedPage, ReleasedLease, Settlement
from shoal.crawling.run_queue import RunQueue
from shoal.crawling.stats import Counters
from shoal.errors import (
    FencedError,
    FileStoreError,
    FrontierError,
    QueueFullError,
    RunError,
    SinkError,
    StoreAwayError,
    StoreBusyError,
    StoreError,
    StoreRewoundError,
)
from shoal.ports import Completion, Failure, Inspection, Lease, Pushed, Queue, RequestState
from shoal.sinks.drainer import is_retryable
from shoal.sinks.patience import Patience
from shoal.system import chance, clock

if TYPE_CHECKING:
    from shoal.fetch.sessions.session import Session
    from shoal.sinks.warc import WarcArchive

T = TypeVar("T")
StorageError: TypeAlias = FileStoreError | SinkError
"""A failure of the file store or of the archive."""

store_log = logging.getLogger("shoal.frontier")

_TRIES = 5
_LONGEST_PAUSE = 2.0
_PERMANENT = (QueueFullError, FencedError, StoreError, StoreBusyError, StoreRewoundError, RunError)
"""A retry does not help."""


class Persistence:
    """Repeats a call of the frontier until it succeeds. While the server is away, it waits until ``give_up``.

    A call whose answer was lost may have been applied. That is safe: every call of a frontier can be repeated.
    """

    def __init__(self, *, shared: bool, on_return: Callable[[], None] = lambda: None) -> None:
        """``shared``: the store is on a server, so a call may hang. ``on_return``: called when the server is back."""
        self._shared = shared
        self._name = "the frontier's server" if shared else "the frontier"
        self._on_return = on_return
        self._end: asyncio.Future[None] | None = None
        self._given_up = False
        self._waiting = 0
        """Calls that found the server away, and wait. Other calls may succeed: a read-only server answers queries."""

    @property
    def away(self) -> bool:
        """Whether a call has found the server away, and waits for it."""
        return self._waiting > 0

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        failures, waits = 0, False
        try:
            while True:
                try:
                    result = await (self._interruptible(step()) if self._shared else step())
                    break
                except _PERMANENT:
                    raise
                except FrontierError as error:
                    failures += 1
                    was_waiting, waits = waits, isinstance(error, StoreAwayError)
                    self._note(error, failures, waits - was_waiting)
                    if self._given_up or (failures >= _TRIES and not waits):
                        raise
                    pause = min(_LONGEST_PAUSE, 0.1 * 2.0**failures) if waits else 0.1 * 4.0**failures
                    await self._interruptible(asyncio.sleep(pause * chance.uniform(0.5, 1.0)))
        except BaseException:
            self._waiting -= waits
            raise
        self._waiting -= waits
        if waits and not self._waiting:
            store_log.warning("%s is back", self._name)
            self._on_return()
        return result

    def _note(self, error: FrontierError, failures: int, change: int) -> None:
        """Log a failure. ``change``: how many more calls than before wait for the server."""
        if change > 0 and not self._waiting:
            store_log.warning("%s is away, waiting for it: %s", self._name, error)
        elif not isinstance(error, StoreAwayError):
            store_log.warning("the frontier failed, retrying (%d): %s", failures, error)
        self._waiting += change

    async def _interruptible(self, step: Awaitable[T]) -> T:
        if self._given_up:
            if isinstance(step, Coroutine):
                step.close()
            raise StoreAwayError("the frontier's server is away, and there is no time left to wait for it")
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(step)
        task.add_done_callback(_retrieve_error)
        futures: set[asyncio.Future[T] | asyncio.Future[None]] = {task, self._end}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        task.cancel()  # not awaited: its cleanup may call the same server
        raise StoreAwayError("the frontier's server did not answer in time")

    def give_up_if_away(self) -> None:
        """Give up if the last call found the server away."""
        if self.away:
            self.give_up()

    def give_up(self) -> None:
        """Stop waiting for the server. Calls that hang fail now, and so does every later call."""
        self._given_up = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


class StorageWatch:
    """Waits for the file store or the archive, which must have a page before the page is done. While it is down, the
    engine leases nothing."""

    def __init__(
        self, patience: Patience, on_return: Callable[[], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is called with the error if a retry cannot help, or if the patience ends."""
        self._patience = patience
        self._on_return = on_return
        self._on_failure = on_failure
        self._waiting: asyncio.Task[None] | None = None

    @property
    def is_down(self) -> bool:
        return self._waiting is not None

    def failed(self, error: StorageError, retry: Callable[[], Awaitable[object]]) -> None:
        """Report a failure. ``retry`` repeats the call that failed."""
        if not _is_temporary(error):
            self._on_failure(error)
        elif self._waiting is None:
            self._waiting = asyncio.create_task(self._wait(error, retry))

    async def _wait(self, error: StorageError, retry: Callable[[], Awaitable[object]]) -> None:
        try:
            while await self._patience.pause(error):
                try:
                    await retry()
                except (FileStoreError, SinkError) as exc:
                    error = exc
                    if not _is_temporary(error):
                        break
                except FrontierError:  # the engine meets the same error, and handles it
                    return
                else:
                    self._patience.worked()
                    store_log.warning("the store works again")
                    return
            self._on_failure(error)
        finally:
            self._waiting = None
            self._on_return()

    def stop(self) -> None:
        """Stop waiting."""
        if self._waiting is not None:
            self._waiting.cancel()


def _is_temporary(error: StorageError) -> bool:
    return error.retryable if isinstance(error, FileStoreError) else is_retryable(error)


def _retrieve_error(task: asyncio.Future[T]) -> None:
    """Keep asyncio from logging the error of a call that nobody awaits any more."""
    if not task.cancelled():
        task.exception()


log = logging.getLogger("shoal.engine")

_CHECK = 0.25
"""Seconds between two checks whether the process may still work."""

SettledState: TypeAlias = RequestState | Literal["lost", "released"]
"""The new state of a request. ``lost``: its lease was lost, so nothing changed."""


def lease_of(settlement: Settlement) -> Lease:
    return settlement.completion.lease if isinstance(settlement, ParsedPage) else settlement.lease


class LeaseKeeper:
    """Renews leases. Drops each lease that it could not renew before the lease ends, even if the store does not answer.

    So work on a page stops before another worker may begin the page."""

    def __init__(
        self,
        frontier: Queue,
        ttl: float,
        drop: Callable[[Lease], None],
        may_work: Callable[[], bool] | None = None,
    ) -> None:
        """``drop``: called with each lease that is lost, or that is about to end without a renewal. ``may_work``: see
        `Participation`."""
        self._frontier = frontier
        self._ttl = ttl
        self._drop = drop
        self._may_work = may_work
        self._held: dict[bytes, Lease] = {}

    def add(self, lease: Lease) -> None:
        self._held[lease.fingerprint] = lease

    def remove(self, lease: Lease) -> None:
        """Remove a lease whose work has ended. If its request was leased again meanwhile, the new lease stays."""
        held = self._held.get(lease.fingerprint)
        if held is not None and held.token == lease.token:
            del self._held[lease.fingerprint]

    def is_good(self, lease: Lease) -> bool:
        """Whether work on a lease may begin. Checks the deadline too: after a suspension, the process may call this
        before ``_fence`` runs."""
        held = self._held.get(lease.fingerprint)
        good = held is not None and held.token == lease.token and held.deadline > clock.now()
        return good and (self._may_work is None or self._may_work())

    def clear(self) -> None:
        """Drop all leases without a call to ``drop``."""
        self._held.clear()

    async def run(self) -> None:
        fencing = asyncio.create_task(self._fence())
        try:
            await self._renew()
        finally:
            fencing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 4)
            leases = list(self._held.values())
            if not leases:
                continue
            try:
                renewed = await self._frontier.renew(leases, self._ttl)
            except FrontierError as error:
                log.warning("leases could not be renewed: %s", error)
                continue
            for old, new in zip(leases, renewed, strict=True):
                held = self._held.get(old.fingerprint)
                if held is None or held.token != old.token:
                    continue
                if new is None:
                    self._lose(held)
                else:
                    self._held[old.fingerprint] = new

    async def _fence(self) -> None:
        pause = self._ttl / 20 if self._may_work is None else min(_CHECK, self._ttl / 20)
        while True:
            await asyncio.sleep(pause)
            soon = clock.now() + self._ttl / 8
            all_end = self._may_work is not None and not self._may_work()
            for lease in [lease for lease in self._held.values() if all_end or lease.deadline <= soon]:
                self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        log.warning("lease lost or about to end; the page is dropped url=%s", lease.request.url)
        self.remove(lease)
        self._drop(lease)


async def lost_before(frontier: Inspection, leases: Sequence[Lease]) -> list[Lease]:
    """The leases whose request has lost a worker: it killed the worker, or was in flight when the worker died.

    Unfiltered requests are left out: for them, `find` may have to search the whole run.
    """
    suspects = []
    for lease in leases:
        if lease.fingerprint == lease.request.fingerprint():
            history = await frontier.find(lease.request)
            if history is not None and any(event.kind == "lost" for event in history.events):
                suspects.append(lease)
    return suspects


class Settler:
    """Stores settlements with as few calls as possible, and counts them."""

    def __init__(
        self,
        queue: RunQueue,
        counters: Counters,
        persist: Persistence,
        *,
        learns: bool = True,
        on_items: Callable[[], None] = lambda: None,
        archive: WarcArchive | None = None,
        session: Session | None = None,
    ) -> None:
        """``learns``: remember the links of stored pages. Only for callers that settle one batch at a time: overlapping
        calls cannot tell that the store was rewound. ``on_items``: called when items were stored."""
        self._queue = queue
        self._frontier = queue.frontier
        self._counters = counters
        self._persist = persist
        self._learns = learns
        self._on_items = on_items
        self._archive = archive
        self._session = session

    async def settle(self, batch: Sequence[Settlement]) -> list[SettledState]:
        """Store the settlements. Returns the outcome of each, in order."""
        outcomes: dict[int, SettledState] = {}
        parsed = [settlement for settlement in batch if isinstance(settlement, ParsedPage)]
        failures = [settlement for settlement in batch if isinstance(settlement, Failure)]
        if parsed:
            outcomes |= await self._complete(parsed)
        elif self._session is not None and self._session.jars.has_changes:
            await self._persist(self._session.jars.flush)
        if failures:
            outcomes |= await self._fail(failures)
        for contacted in (True, False):
            leases = [
                settlement.lease
                for settlement in batch
                if isinstance(settlement, ReleasedLease) and settlement.contacted is contacted
            ]
            if leases:
                await self._persist(partial(self._frontier.release, leases, contacted=contacted))
                self._queue.uncount(len(leases))
        return [outcomes.get(id(settlement), "released") for settlement in batch]

    async def _complete(self, parsed: list[ParsedPage]) -> dict[int, SettledState]:
        completions = [page.completion for page in parsed]
        children = (
            [child for completion in completions for child in completion.children] if self._queue.logs_urls else []
        )
        duplicates = await self._queue.look_up(children)
        if self._archive is not None:
            await self._archive.store([(page.completion.lease, page.exchange) for page in parsed if page.exchange])
        results = await self._persist(lambda: self._store(completions))
        if self._archive is not None:
            self._archive.settled(
                [completion.lease for completion in completions], [pushed is not None for pushed in results]
            )
        refused = sum(pushed.refused for pushed in results if pushed is not None)
        if refused and not self._counters.links_refused:
            log.warning(
                "the queue is full (queue.max_size): links that do not fit are refused. "
                "`shoal retry-failed` queues them when there is room"
            )
        self._counters.links_refused += refused
        await self._queue.log_pushed(children, duplicates, refused=bool(refused))
        if self._learns:
            for page, pushed in zip(parsed, results, strict=True):
                # If the page had no links, or the call was a repeat, all counts are 0.
                if pushed is not None and pushed.added + pushed.duplicates + pushed.refused:
                    self._queue.learn(page.admitted)
        outcomes: list[SettledState] = ["lost" if pushed is None else "done" for pushed in results]
        self._count(completions, outcomes)
        return {id(page): outcome for page, outcome in zip(parsed, outcomes, strict=True)}

    async def _store(self, completions: list[Completion]) -> list[Pushed | None]:
        """Complete pages together with the cookies that they set, which workers need for the links of these pages."""
        if self._session is not None and self._session.jars.has_changes:
            return await self._session.jars.flush(completions)
        return await self._frontier.complete(completions)

    async def _fail(self, failures: list[Failure]) -> dict[int, SettledState]:
        states = await self._persist(lambda: self._frontier.fail(failures))
        self._queue.uncount(len(failures))
        outcomes: list[SettledState] = ["lost" if state is None else state for state in states]
        self._count(failures, outcomes)
        return {id(failure): outcome for failure, outcome in zip(failures, outcomes, strict=True)}

    def _count(self, settled: Sequence[Completion | Failure], outcomes: Sequence[SettledState]) -> None:
        items, picked = 0, self._counters.picked
        for settlement, outcome in zip(settled, outcomes, strict=True):
            if outcome == "lost":
                self._counters.leases_lost += 1
                log.warning("lease lost; the page is not counted url=%s", settlement.lease.request.url)
            elif outcome != "waiting":
                items += len(settlement.items)
                if picked.room:
                    picked.offer(settlement.items)
        if items:
            self._counters.items += items
            self._on_items()
