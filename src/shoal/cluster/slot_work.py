"""The slot of a node: takes it, runs a worker under it, stops the worker in time, and handles how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from shoal.cluster.election import line
from shoal.cluster.frontier_watch import FrontierWatch
from shoal.cluster.slot_hold import HeldSlot
from shoal.cluster.slot_session import SlotWorker
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
from shoal.ports import ClusterView, Coordinator, Holder, Queue, Slot
from shoal.runs.worker import Worker

log = logging.getLogger("shoal.cluster")

MakeWorker: TypeAlias = Callable[[Holder, Callable[[], bool]], Worker]

_BACKOFF = 0.5  # seconds before the next try for a slot that the frontier refused; doubled each time


class NodeSlot(HeldSlot):
    """The slot of a node that runs, if it has one, and the worker under it."""

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
        """Whether its worker reached the end of the run."""
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
        """Try to take a slot, if the run can be worked on."""
        if time.monotonic() >= self._not_before and await self._watch.poll():
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
        """Release a slot that has no worker: the answer to taking it was lost, or the frontier refused its holder."""
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
        """Handle how a worker ended."""
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
        if worker.worker.engine is not None:  # it has worked: another cluster may have fenced it
            self._fenced = worker.holder
        else:  # the coordinator lost its data and its clock is behind: temporary
            self._not_before = time.monotonic() + min(self.session.ttl, _BACKOFF * 2.0 ** min(self._refusals, 10))
            self._refusals += 1

    # -- slots of lost Runners

    def clear_vacant(self, view: ClusterView) -> None:
        """Release the leases of a lost Runner at once if no member takes its slot, or one that does not run yet."""
        if self.running is None or (self._clearing is not None and not self._clearing.done()):
            return
        has_successor = any(member.fit for member in line(view))
        unfit = {member.name for member in view.members if not member.fit}
        for slot in view.slots:
            is_left = not slot.holder and (slot.index >= view.counts.runner or not has_successor)
            fence = (slot.index, slot.epoch if slot.holder else slot.epoch + 1)
            if (is_left or slot.holder in unfit) and fence not in self._cleared:
                self._clearing = asyncio.create_task(self._clear(*fence))
                return

    async def _clear(self, index: int, epoch: int) -> None:
        """Release the leases of the slot under epochs before this one."""
        try:
            await self._frontier.fence(self._slot_name(index), epoch)
        except FencedError:  # it has a new holder
            pass
        except (FrontierError, RunError) as exc:
            log.debug("cannot release the leases of slot %d yet: %s", index, exc)
            return
        self._cleared.add((index, epoch))

    def stop_clearing(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
