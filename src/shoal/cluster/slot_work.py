"""The slot of a node: takes it, runs a worker under it, stops the worker in time, and handles how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from shoal.cluster.election import line
from shoal.cluster.frontier_watch import FrontierWatch
from shoal.cluster.slot_session import NodeSession, SlotWorker
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


class NodeSlot:
    """The slot of one node, if it has one."""

    def __init__(
        self,
        name: str,
        cluster: str,
        coordinator: Coordinator,
        frontier: Queue,
        watch: FrontierWatch,
        make_worker: MakeWorker,
    ) -> None:
        self.session = NodeSession(coordinator.ttl)
        self.running: SlotWorker | None = None
        self.event_counts: Counter[str] = Counter()
        self.error: ShoalError | None = None
        """Why the node must stop."""
        self.is_done = False
        """Its worker reached the end of the run."""
        self._name = name
        self._cluster = cluster
        self._coordinator = coordinator
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
        if time.monotonic() < self._not_before or not await self._watch.poll():
            return
        epoch = await self._coordinator.take(index)
        if epoch is None:
            return
        holder = Holder(self._slot_name(index), epoch)
        self.running = SlotWorker(index, holder, self._make_worker(holder, lambda: self.session.is_good), self.session)
        lost = ""
        with suppress(CoordinatorError):
            mine = [event for event in await self._coordinator.events() if event.epoch == epoch]
            lost = next((event.detail for event in mine if event.what == "took over"), "")
        self.event_counts["took over" if lost else "elected"] += 1
        after = f", takes over from {lost}" if lost else ""
        log.warning("%s is a Runner of %s: slot %d, epoch %d%s", self._name, self._cluster, index, epoch, after)

    # -- holding

    async def check(self, mine: Slot | None, beat: Callable[[], Awaitable[object]]) -> None:
        """Compare with the coordinator's view. ``mine``: the slot that this node holds there."""
        worker = self.running
        if worker is None:
            if mine is not None:
                await self._drop(mine)
        elif mine is None or (mine.index, mine.epoch) != (worker.index, worker.holder.epoch):
            await self.end(beat, abort=True)
        elif self._watch.away_for > self.session.ttl:
            await self.retire("cannot reach the frontier, but another node may", beat)

    async def _drop(self, mine: Slot) -> None:
        """Release a slot without a worker: its answer was lost, or the frontier refused it."""
        if self._fenced == Holder(self._slot_name(mine.index), mine.epoch):
            self.error = RunError(
                f"the frontier knows a later holder of slot {mine.index} than the coordinator: another cluster named "
                f"{self._cluster} works on the same run; check --coordinator, or use another --cluster name"
            )
            return
        await self._coordinator.retire()

    async def retire(self, why: str, beat: Callable[[], Awaitable[object]]) -> None:
        log.warning("%s releases its slot: %s", self._name, why)
        self.event_counts["retired"] += 1
        await self.end(beat, abort=False)
        await self._coordinator.retire()

    async def end(self, beat: Callable[[], Awaitable[object]], *, abort: bool) -> None:
        """Stop the worker, and send heartbeats until it has stopped. ``abort``: the slot was lost."""
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
        """Release the leases of a lost Runner at once if no member takes its slot."""
        if self.running is None or (self._clearing is not None and not self._clearing.done()):
            return
        left = [slot for slot in view.slots if not slot.holder and (slot.index, slot.epoch) not in self._cleared]
        has_successor = bool(left) and any(member.fit for member in line(view))
        for slot in left:
            if slot.index >= view.counts.runner or not has_successor:
                self._clearing = asyncio.create_task(self._clear(slot.index, slot.epoch))
                return

    async def _clear(self, index: int, epoch: int) -> None:
        try:
            await self._frontier.fence(self._slot_name(index), epoch + 1)
        except FencedError:  # it has a new holder
            pass
        except (FrontierError, RunError) as exc:
            log.debug("cannot release the leases of slot %d yet: %s", index, exc)
            return
        self._cleared.add((index, epoch))

    def stop_clearing(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
