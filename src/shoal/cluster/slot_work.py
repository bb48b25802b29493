"""What a node does with its slot: it has a worker for it, ends that in time, and judges how it ended."""

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
from shoal.cluster.slot_session import Session, Tenure
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

_BACK_OFF = 0.5  # seconds before the next try for a slot that the frontier has refused; doubled each time


class Holding:
    """The slot of one node, when it has one."""

    def __init__(
        self,
        name: str,
        cluster: str,
        coordinator: Coordinator,
        frontier: Queue,
        watch: FrontierWatch,
        make_worker: MakeWorker,
    ) -> None:
        self.session = Session(coordinator.ttl)
        self.tenure: Tenure | None = None
        self.happened: Counter[str] = Counter()
        self.error: ShoalError | None = None
        """What makes it useless to go on."""
        self.is_done = False
        """Its worker has come to the end of the run."""
        self._name = name
        self._cluster = cluster
        self._coordinator = coordinator
        self._frontier = frontier
        self._watch = watch
        self._make_worker = make_worker
        self._ending: Tenure | None = None
        self._before = Counters()
        """What its workers did that have ended."""
        self._fenced: Holder | None = None
        self._refusals = 0
        self._not_before = 0.0
        self._told_of_file = False
        self._cleared: set[tuple[int, int]] = set()
        self._clearing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    @property
    def doing(self) -> str:
        if self.tenure is not None:
            return self.tenure.doing
        if self._ending is not None:
            return "ends its work"
        return "stands by" if self._watch.fit else "can't use the frontier"

    @property
    def worker(self) -> Worker | None:
        """Who works for the slot, or is coming to its end."""
        tenure = self.tenure or self._ending
        return None if tenure is None else tenure.worker

    @property
    def counters(self) -> Counters:
        """What all its workers did until now."""
        total = Counters()
        total.add(self._before)
        if self.worker is not None and self.worker.engine is not None:
            total.add(self.worker.engine.counters)
        return total

    def _slot_name(self, index: int) -> str:
        return f"{self._cluster}/{index}"

    # -- taking

    async def take(self, index: int) -> None:
        """Try for a slot, if there is something to do for it."""
        if time.monotonic() < self._not_before or not self._may_hold(index) or not await self._watch.look():
            return
        epoch = await self._coordinator.take(index)
        if epoch is None:
            return
        holder = Holder(self._slot_name(index), epoch)
        self.tenure = Tenure(index, holder, self._make_worker(holder, lambda: self.session.is_good), self.session)
        lost = ""
        with suppress(CoordinatorError):
            mine = [event for event in await self._coordinator.events() if event.epoch == epoch]
            lost = next((event.detail for event in mine if event.what == "took over"), "")
        self.happened["took over" if lost else "elected"] += 1
        after = f", after {lost}, which was lost" if lost else ""
        log.warning("%s is a Runner of %s: slot %d, epoch %d%s", self._name, self._cluster, index, epoch, after)

    def _may_hold(self, index: int) -> bool:
        if index == 0 or self._watch.shared:
            return True
        if not self._told_of_file:
            log.warning("one Runner at a time can work on a file: %s stands by", self._name)
        self._told_of_file = True
        return False

    # -- having

    async def look(self, mine: Slot | None, beat: Callable[[], Awaitable[object]]) -> None:
        """``mine``: the slot that the coordinator says is this node's."""
        tenure = self.tenure
        if tenure is None:
            if mine is not None:
                await self._drop(mine)
        elif mine is None or (mine.index, mine.epoch) != (tenure.index, tenure.holder.epoch):
            await self.end(beat, cut=True)
        elif self._watch.away_for > self.session.ttl:
            await self.retire("another may reach the frontier", beat)

    async def _drop(self, mine: Slot) -> None:
        """A slot without a worker: it was won, or kept, without this node's knowledge; or the frontier refuses it."""
        if self._fenced == Holder(self._slot_name(mine.index), mine.epoch):
            self.error = RunError(
                f"the frontier knows a later holder of slot {mine.index} than the coordinator does: another cluster "
                f"named {self._cluster} works on the same run; look at --coordinator, or give one another --cluster"
            )
            return
        await self._coordinator.retire()

    async def retire(self, why: str, beat: Callable[[], Awaitable[object]]) -> None:
        log.warning("%s gives its slot back: %s", self._name, why)
        self.happened["retired"] += 1
        await self.end(beat, cut=False)
        await self._coordinator.retire()

    async def end(self, beat: Callable[[], Awaitable[object]], *, cut: bool) -> None:
        """Have no worker any more, and be heard of while it comes to its end. ``cut``: the slot is lost."""
        tenure, self.tenure = self.tenure, None
        if tenure is None:
            return
        if cut:
            tenure.cut()
        elif not tenure.task.done():
            tenure.stop()
        self._ending = tenure
        while not tenure.task.done():
            await asyncio.wait({tenure.task}, timeout=self.session.interval)
            if not cut:
                with suppress(CoordinatorError):
                    await beat()
        self._ending = None
        if tenure.worker.engine is not None:
            self._before.add(tenure.worker.engine.counters)
        self._judge(tenure)

    def _judge(self, tenure: Tenure) -> None:
        """What the end of a worker means for the node."""
        error = tenure.task.exception() or tenure.worker.error
        if isinstance(error, FencedError):
            self._be_fenced(tenure, error)
        elif isinstance(error, (StoreAwayError, StoreBusyError)):
            self._watch.lost(str(error))
        elif isinstance(error, ShoalError):
            self.error = self.error or error
        elif error is not None:
            raise error
        elif not tenure.was_ended:  # the run is finished, was cancelled, or has reached its limit
            self.is_done = True
        else:
            self._refusals = 0

    def _be_fenced(self, tenure: Tenure, error: FencedError) -> None:
        self.happened["fenced"] += 1
        log.warning("slot %d: %s", tenure.index, error)
        if tenure.worker.engine is not None:  # it has worked: who has fenced it?
            self._fenced = tenure.holder
        else:  # the coordinator's clock is behind, after its data was lost: that passes
            self._not_before = time.monotonic() + min(self.session.ttl, _BACK_OFF * 2.0 ** min(self._refusals, 10))
            self._refusals += 1

    # -- the slots of others

    def clear_vacant(self, view: ClusterView) -> None:
        """What a lost Runner had is given back at once also when nobody takes its slot."""
        if self.tenure is None or (self._clearing is not None and not self._clearing.done()):
            return
        left = [slot for slot in view.slots if not slot.holder and (slot.index, slot.epoch) not in self._cleared]
        has_heir = bool(left) and any(member.fit for member in line(view))
        for slot in left:
            if slot.index >= view.counts.runner or not has_heir:
                self._clearing = asyncio.create_task(self._clear(slot.index, slot.epoch))
                return

    async def _clear(self, index: int, epoch: int) -> None:
        try:
            await self._frontier.fence(self._slot_name(index), epoch + 1)
        except FencedError:  # it has had a new holder since
            pass
        except (FrontierError, RunError) as exc:
            log.debug("what slot %d had could not be given back yet: %s", index, exc)
            return
        self._cleared.add((index, epoch))

    def stop_clearing(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
