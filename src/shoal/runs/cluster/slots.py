"""The slot of a node: takes it, runs a worker under it, stops the worker in time, and handles how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from shoal.crawling.stats import Counters
from shoal.errors import (
    CoordinatorError,
    FencedError,
    FrontierError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreBusyError,
)
from shoal.ports import ClusterView, Coordinator, Holder, Queue, Slot, Store
from shoal.runs.cluster.election import line
from shoal.runs.worker import Worker
from shoal.system import clock

log = logging.getLogger("shoal.cluster")

MakeWorker: TypeAlias = Callable[[Holder, Callable[[], bool]], Worker]

_BACKOFF = 0.5  # seconds before the next try for a slot that the frontier refused; doubled each time
_MARGIN = 1 / 8  # of a session: the worker stops this long before the session ends
_HEARTBEATS = 3  # per session


class NodeSession:
    """How long the coordinator considers this node alive, counted from the moment before it sent its last heartbeat."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._last_heartbeat = float("-inf")

    def renewed(self, sent: float) -> None:
        self._last_heartbeat = sent

    def lost(self) -> None:
        self._last_heartbeat = float("-inf")

    @property
    def left(self) -> float:
        """Seconds that the node may still work."""
        return max(0.0, self._last_heartbeat + self.ttl * (1 - _MARGIN) - clock.now())

    @property
    def is_good(self) -> bool:
        return self.left > 0

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return self.ttl / _HEARTBEATS


class SlotWorker:
    """A worker that runs under a slot. It stops before the session ends."""

    def __init__(self, index: int, holder: Holder, worker: Worker, session: NodeSession) -> None:
        self.index = index
        self.holder = holder
        self.worker = worker
        self.was_stopped = False
        """Whether the node stopped the worker. False if the run ended."""
        self._session = session
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        work = asyncio.ensure_future(self.worker.run())
        try:
            while not work.done() and self._session.is_good:
                await asyncio.wait({work}, timeout=self._session.left)
            if not work.done():
                log.warning("slot %d: the session is about to expire without a heartbeat; its worker stops", self.index)
                self.abort()
            await work
        finally:
            work.cancel()

    def stop(self) -> None:
        """Shut down, and finish the requests in flight."""
        self.was_stopped = True
        self.worker.stop()

    def abort(self) -> None:
        """Stop at once, because another node may hold the slot."""
        self.was_stopped = True
        self.worker.abort()

    @property
    def doing(self) -> str:
        engine = self.worker.engine
        if engine is None:
            return "starting"
        if engine.away:
            return "waits for the frontier"
        return f"crawling: {engine.counters.fetched} pages, {engine.in_flight} in flight"


class HeldSlot:
    """The slot of a node that does not run yet, if it has one. No worker uses the slot."""

    def __init__(self, cluster: str, coordinator: Coordinator) -> None:
        self.name = ""
        """The name of the node. Empty until it is a member."""
        self.session = NodeSession(coordinator.ttl)
        self.event_counts: Counter[str] = Counter()
        self.held: Slot | None = None
        self._cluster = cluster
        self._coordinator = coordinator

    @property
    def is_over(self) -> bool:
        """Whether the node has nothing more to do."""
        return False

    @property
    def has_slot(self) -> bool:
        return self.held is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The work under the slot."""
        return None

    @property
    def doing(self) -> str:
        return "waits for run()"

    # -- taking

    async def take(self, index: int) -> None:
        """Try to take a slot."""
        epoch = await self._coordinator.take(index)
        if epoch is None:
            return
        self._begin(Slot(index, self.name, epoch))
        lost_node = ""
        with suppress(CoordinatorError):
            events = [event for event in await self._coordinator.events() if event.epoch == epoch]
            lost_node = next((event.detail for event in events if event.what == "took over"), "")
        self.event_counts["took over" if lost_node else "elected"] += 1
        after = f", takes over from {lost_node}" if lost_node else ""
        log.warning("%s is a Runner of %s: slot %d%s", self.name, self._cluster, index, after)

    def _begin(self, mine: Slot) -> None:
        self.held = mine

    # -- holding

    async def check(self, mine: Slot | None, beat: Callable[[], Awaitable[object]]) -> None:
        """Adapt to the coordinator's view. ``mine``: the slot that this node holds there."""
        self.held = mine

    async def retire(self, why: str, beat: Callable[[], Awaitable[object]]) -> None:
        log.warning("%s releases its slot: %s", self.name, why)
        self.event_counts["retired"] += 1
        await self.end(beat, abort=False)
        await self._coordinator.retire()

    async def end(self, beat: Callable[[], Awaitable[object]], *, abort: bool) -> None:
        """End the work under the slot. Send heartbeats until the work has ended. ``abort``: the slot was lost."""
        self.held = None

    # -- slots of other nodes

    def clear_vacant(self, view: ClusterView) -> None:
        """Release the leases of lost Runners."""

    def stop_clearing(self) -> None:
        """Cancel a release that `clear_vacant` began."""


class FrontierWatch:
    """Checks for a node whether it can reach the frontier, and whether the run has ended."""

    def __init__(self, store: Store, run_id: str, timeout: float, *, keep_alive: bool) -> None:
        """``timeout``: seconds to wait for an answer. ``keep_alive``: a finished run may get more work."""
        self.fit = True
        """Whether the last poll reached the frontier."""
        self.ended = False
        """Whether the run is finished, cancelled or deleted."""
        self._store = store
        self._run_id = run_id
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._away_since: float | None = None

    async def poll(self) -> bool:
        """Poll the state of the run. Returns whether a worker may work on it."""
        began = clock.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                state = await self._store.run_state(self._run_id)
        except (FrontierError, TimeoutError) as exc:
            self.lost(str(exc) or f"no answer in {self._timeout:g} s", began)
            return False
        self.fit = True
        self._away_since = None
        self.ended = state in (None, "cancelled") or (state == "finished" and not self._keep_alive)
        if self.ended:
            log.info("run %s is %s", self._run_id, state or "deleted")
        return not self.ended

    def lost(self, why: str, since: float | None = None) -> None:
        """Note that the node cannot reach the frontier."""
        if self.fit:
            log.warning("cannot reach the frontier: %s", why)
        self.fit = False
        if self._away_since is None:
            self._away_since = clock.monotonic() if since is None else since

    @property
    def away_for(self) -> float:
        """For how many seconds the node has not reached the frontier. 0 if it can."""
        return 0.0 if self._away_since is None else clock.monotonic() - self._away_since


class NodeSlot(HeldSlot):
    """The slot of a running node, if it has one, and the worker under it."""

    def __init__(
        self,
        cluster: str,
        coordinator: Coordinator,
        frontier: Queue,
        watch: FrontierWatch,
        make_worker: MakeWorker,
        before: HeldSlot | None = None,
    ) -> None:
        """``before``: the slot that the node has held since before it ran."""
        super().__init__(cluster, coordinator)
        if before is not None:
            self.name, self.session, self.held = before.name, before.session, before.held
            self.event_counts = before.event_counts
        self.running: SlotWorker | None = None
        self.error: ShoalError | None = None
        """Why the node must stop."""
        self.is_done = False
        """Whether its worker has reached the end of the run."""
        self._frontier = frontier
        self._watch = watch
        self._make_worker = make_worker
        self._ending: SlotWorker | None = None
        self._before = Counters()
        """Counters of earlier workers."""
        self._fenced: Holder | None = None
        self._refusals = 0
        self._not_before = 0.0
        self._cleared: set[tuple[int, int]] = set()
        self._clearing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    @property
    def has_slot(self) -> bool:
        return self.running is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        return None if self.running is None else self.running.task

    @property
    def doing(self) -> str:
        if self.running is not None:
            return self.running.doing
        if self._ending is not None:
            return "stopping"
        return "standing by" if self._watch.fit else "cannot reach the frontier"

    @property
    def worker(self) -> Worker | None:
        """The worker that runs or stops."""
        worker = self.running or self._ending
        return None if worker is None else worker.worker

    @property
    def counters(self) -> Counters:
        """Counters of all its workers."""
        total = Counters()
        total.add(self._before)
        if self.worker is not None and self.worker.engine is not None:
            total.add(self.worker.engine.counters)
        return total

    def _slot_name(self, index: int) -> str:
        return f"{self._cluster}/{index}"

    # -- taking

    async def take(self, index: int) -> None:
        """Try to take a slot, if a worker may work on the run."""
        if clock.monotonic() >= self._not_before and await self._watch.poll():
            await super().take(index)

    def _begin(self, mine: Slot) -> None:
        holder = Holder(self._slot_name(mine.index), mine.epoch)
        worker = self._make_worker(holder, lambda: self.session.is_good)
        self.running = SlotWorker(mine.index, holder, worker, self.session)

    # -- holding

    async def check(self, mine: Slot | None, beat: Callable[[], Awaitable[object]]) -> None:
        worker, held, self.held = self.running, self.held, None
        if worker is None:
            if mine is not None and mine == held and await self._watch.poll():
                self._begin(mine)
            elif mine is not None:
                await self._drop(mine)
        elif mine is None or (mine.index, mine.epoch) != (worker.index, worker.holder.epoch):
            await self.end(beat, abort=True)
        elif self._watch.away_for > self.session.ttl:
            await self.retire("this node cannot reach the frontier; another node may", beat)

    async def _drop(self, mine: Slot) -> None:
        """Release a slot without a worker: the answer to `take` was lost, or the frontier refused the holder."""
        if self._fenced == Holder(self._slot_name(mine.index), mine.epoch):
            self.error = RunError(
                f"the frontier knows a later holder of slot {mine.index} than the coordinator: another cluster named "
                f"{self._cluster} works on the same run; check --coordinator, or use another --cluster name"
            )
            return
        await self._coordinator.retire()

    async def end(self, beat: Callable[[], Awaitable[object]], *, abort: bool) -> None:
        worker, self.running = self.running, None
        if worker is None:
            return
        if abort:
            worker.abort()
        elif not worker.task.done():
            worker.stop()
        self._ending = worker
        while not worker.task.done():
            await asyncio.wait({worker.task}, timeout=self.session.interval)
            if not abort:
                with suppress(CoordinatorError):
                    await beat()
        self._ending = None
        if worker.worker.engine is not None:
            self._before.add(worker.worker.engine.counters)
        self._handle_end(worker)

    def _handle_end(self, worker: SlotWorker) -> None:
        """Decide what the end of a worker means for the node."""
        error = worker.task.exception() or worker.worker.error
        if isinstance(error, FencedError):
            self._handle_fence(worker, error)
        elif isinstance(error, (StoreAwayError, StoreBusyError)):
            self._watch.lost(str(error))
        elif isinstance(error, ShoalError):
            self.error = self.error or error
        elif error is not None:
            raise error
        elif not worker.was_stopped:  # the run is finished, was cancelled, or has reached its limit
            self.is_done = True
        else:
            self._refusals = 0

    def _handle_fence(self, worker: SlotWorker, error: FencedError) -> None:
        self.event_counts["fenced"] += 1
        log.warning("slot %d: %s", worker.index, error)
        if worker.worker.engine is not None:  # the worker has worked, so another cluster may have fenced it
            self._fenced = worker.holder
        else:  # the coordinator lost its data and its clock is behind: temporary
            self._not_before = clock.monotonic() + min(self.session.ttl, _BACKOFF * 2.0 ** min(self._refusals, 10))
            self._refusals += 1

    # -- slots of lost Runners

    def clear_vacant(self, view: ClusterView) -> None:
        """Release the leases of a lost Runner at once, if no running member takes its slot."""
        if self.running is None or (self._clearing is not None and not self._clearing.done()):
            return
        has_successor = any(member.fit for member in line(view))
        unfit = {member.name for member in view.members if not member.fit}
        for slot in view.slots:
            is_abandoned = not slot.holder and (slot.index >= view.counts.runner or not has_successor)
            fence = (slot.index, slot.epoch if slot.holder else slot.epoch + 1)
            if (is_abandoned or slot.holder in unfit) and fence not in self._cleared:
                self._clearing = asyncio.create_task(self._clear(*fence))
                return

    async def _clear(self, index: int, epoch: int) -> None:
        """Release the leases that the slot has under earlier epochs."""
        try:
            await self._frontier.fence(self._slot_name(index), epoch)
        except FencedError:  # the slot has a new holder
            pass
        except (FrontierError, RunError) as exc:
            log.debug("cannot release the leases of slot %d yet: %s", index, exc)
            return
        self._cleared.add((index, epoch))

    def stop_clearing(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
