"""A member's life in a cluster: heard of in time, it wins a slot, works for it, loses it, and stands by again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from shoal.cluster.election import HESITATION, Retire, Role, Take, decide, line, roles, shortage, slot_of, vacant
from shoal.cluster.standby import FrontierWatch
from shoal.cluster.tenure import Session, Tenure
from shoal.errors import (
    CoordinatorAwayError,
    CoordinatorError,
    FencedError,
    FrontierError,
    NameTakenError,
    SessionLostError,
    ShoalError,
    StoreAwayError,
    StoreBusyError,
)
from shoal.events import Counters
from shoal.ports import ClusterView, Coordinator, Counts, Frontier, Holder
from shoal.runs.worker import Worker, new_worker_id

log = logging.getLogger("shoal.cluster")

MakeWorker: TypeAlias = Callable[[Holder, Callable[[], bool]], Worker]

_TITLES: dict[Role, str] = {"runner": "Runner", "backup": "Backup Runner", "spare": "spare"}
_AFTER_A_DEADLINE = 0.02
_LOOK_AGAIN = 0.1  # seconds, while a slot is vacant
_RETRY = (0.1, 2.0)  # seconds between tries to reach the coordinator, first and at most
_LAST_WORD = 1.0  # seconds that leaving may take


class Membership:
    """One node in one cluster, from joining to leaving."""

    def __init__(
        self,
        name: str,
        cluster: str,
        counts: Counts,
        coordinator: Coordinator,
        frontier: Frontier,
        watch: FrontierWatch,
        make_worker: MakeWorker,
    ) -> None:
        self.role: Role | None = None
        self.tenure: Tenure | None = None
        self.happened: Counter[str] = Counter()
        self.counters = Counters()
        """What all its workers did."""
        self.error: ShoalError | None = None
        self._name = name
        self._cluster = cluster
        self._counts = counts
        self._coordinator = coordinator
        self._frontier = frontier
        self._watch = watch
        self._make_worker = make_worker
        self._session = Session(coordinator.ttl)
        self._over = watch.ended
        self._look_now = asyncio.Event()
        self._seen: ClusterView | None = None
        self._vacant_since: dict[int, float] = {}
        self._lost: dict[int, str] = {}
        """By slot, who was seen to have it and to vanish."""
        self._cleared: set[tuple[int, int]] = set()
        self._clearing: asyncio.Task[None] | None = None
        self._away = False
        self._lack = ""
        """What was told last that the cluster has too few of."""

    async def live(self) -> None:
        """Until the run has ended."""
        watch = asyncio.create_task(self._watch_frontier())
        try:
            while not self._over.is_set():
                try:
                    await self._join()
                    while not self._over.is_set():
                        await self._step()
                except SessionLostError:
                    await self._be_lost()
        finally:
            watch.cancel()
            if self._clearing is not None:
                self._clearing.cancel()
            await self._end_tenure(cut=False)
            self.role = None
            with suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD):
                    await self._coordinator.leave()

    async def _be_lost(self) -> None:
        self.happened["lost"] += 1
        log.warning("%s was taken for dead; it joins again", self._name)
        self._session.lost()
        await self._end_tenure(cut=True)

    async def _join(self) -> None:
        """Become a member. A name that is taken may be that of this node's own past, which has a session to live."""
        pause, began, waits = _RETRY[0], time.monotonic(), False
        while not self._over.is_set():
            sent = time.monotonic()
            try:
                await self._coordinator.join(self._name, self._counts, new_worker_id())
            except NameTakenError:
                if time.monotonic() - began > 1.5 * self._session.ttl + 2.0:
                    raise
                if not waits:
                    log.warning("%s is a member already; if that one is dead, it is gone in a moment", self._name)
                waits = True
            except CoordinatorAwayError as exc:
                began = time.monotonic()
                self._note_away(exc)
                pause = min(_RETRY[1], 2 * pause)
            else:
                self._session.renewed(sent)
                self._seen = None
                return
            await self._sleep(pause * random.uniform(0.5, 1.0))

    # -- one heartbeat, and what follows from what it shows

    async def _step(self) -> None:
        if self.tenure is not None and self.tenure.task.done():
            await self._end_tenure(cut=False)
            return
        try:
            view = await self._beat()
            await self._act(view)
        except CoordinatorAwayError as exc:
            self._note_away(exc)
            await self._sleep(min(1.0, self._session.interval))
        else:
            if self.tenure is None:
                self._take_role(roles(view).get(self._name))
            await self._wait(view)

    async def _beat(self) -> ClusterView:
        sent = time.monotonic()
        view = await self._coordinator.beat(self._doing(), fit=self._watch.fit)
        self._session.renewed(sent)
        if self._away:
            self._away = False
            log.warning("the coordinator is back")
        self._see(view)
        return view

    def _note_away(self, error: CoordinatorAwayError) -> None:
        if not self._away:
            log.warning("the coordinator is away, waiting for it: %s", error)
        self._away = True

    def _doing(self) -> str:
        if self.tenure is not None:
            return self.tenure.doing
        return "stands by" if self._watch.fit else "can't reach the frontier"

    def _see(self, view: ClusterView) -> None:
        """Tell what has changed, and remember since when slots are vacant."""
        now = time.monotonic()
        self._vacant_since = {index: self._vacant_since.get(index, now) for index in vacant(view)}
        before, self._seen = self._seen, view
        if before is None:
            if view.counts != self._counts:
                log.warning(
                    "%s has runner=%d and backup=%d, whatever this node was told; `shoal cluster scale` changes it",
                    self._cluster, view.counts.runner, view.counts.backup,
                )  # fmt: skip
            return
        for name in {member.name for member in before.members} - {member.name for member in view.members}:
            log.warning("%s is gone from %s", name, self._cluster)
            self._look_now.set()
            self._lost.update({slot.index: name for slot in before.slots if slot.holder == name})
        lack = shortage(view)
        if lack == shortage(before) != self._lack:  # not what is being mended in this moment
            log.warning("%s %s", self._cluster, f"has only {lack}" if lack else "is complete")
            self._lack = lack

    def _take_role(self, role: Role | None) -> None:
        if role not in (None, "runner", self.role):
            log.info("%s is a %s of %s", self._name, _TITLES[role], self._cluster)
        self.role = role

    async def _act(self, view: ClusterView) -> None:
        await self._look_at_tenure(view)
        if self._over.is_set():
            return
        if self.tenure is None and slot_of(view, self._name) is not None:
            await self._coordinator.retire()  # it was won, or kept, without this node's knowledge
            return
        now = time.monotonic()
        match decide(view, self._name, {index: now - since for index, since in self._vacant_since.items()}):
            case Take(slot):
                await self._take(slot)
            case Retire():
                await self._retire("there are to be fewer Runners")
            case None:
                self._clear_vacant(view)

    # -- having a slot

    async def _take(self, index: int) -> None:
        if not await self._watch.look():
            return
        epoch = await self._coordinator.take(index)
        if epoch is None:
            return
        lost = self._lost.pop(index, "")
        self.happened["took over" if lost else "elected"] += 1
        after = f", after {lost}" if lost else ""
        log.warning("%s is a Runner of %s: slot %d, epoch %d%s", self._name, self._cluster, index, epoch, after)
        self.role = "runner"
        holder = Holder(self._slot_name(index), epoch)
        worker = self._make_worker(holder, lambda: self._session.is_good)
        self.tenure = Tenure(index, holder, worker, self._session)

    def _slot_name(self, index: int) -> str:
        return f"{self._cluster}/{index}"

    async def _look_at_tenure(self, view: ClusterView) -> None:
        tenure = self.tenure
        if tenure is None:
            return
        mine = next((slot for slot in view.slots if slot.index == tenure.index), None)
        if mine is None or (mine.holder, mine.epoch) != (self._name, tenure.holder.epoch):
            await self._end_tenure(cut=True)
        elif tenure.away_for > self._session.ttl:
            self._watch.lost("its server has been away for a whole session")
            await self._retire("another may reach the frontier")

    async def _retire(self, why: str) -> None:
        log.warning("%s gives its slot back: %s", self._name, why)
        self.happened["retired"] += 1
        await self._end_tenure(cut=False)
        await self._coordinator.retire()

    async def _end_tenure(self, *, cut: bool) -> None:
        """Have no worker any more, and be heard of while it comes to its end. ``cut``: the slot is lost."""
        tenure, self.tenure = self.tenure, None
        if tenure is None:
            return
        if cut:
            tenure.cut()
        elif not tenure.task.done():
            tenure.stop()
        while not tenure.task.done():
            await asyncio.wait({tenure.task}, timeout=self._session.interval)
            if not cut:
                with suppress(CoordinatorError):
                    await self._beat()
        engine = tenure.worker.engine
        if engine is not None:
            self.counters.add(engine.counters)
        self._judge(tenure)

    def _judge(self, tenure: Tenure) -> None:
        """What the end of a worker means for the node."""
        error = tenure.task.exception() or tenure.worker.error
        if isinstance(error, FencedError):
            self.happened["fenced"] += 1
            log.warning("slot %d has a later holder: %s", tenure.index, error)
        elif isinstance(error, (StoreAwayError, StoreBusyError)):
            self._watch.lost(str(error))
        elif isinstance(error, ShoalError):
            self.error = self.error or error
            self._over.set()
        elif error is not None:
            raise error
        elif not tenure.was_ended:  # the run is finished, was cancelled, or has reached its limit
            self._over.set()

    def _clear_vacant(self, view: ClusterView) -> None:
        """What a lost Runner had is given back at once also when there is nobody to take its slot."""
        if self.tenure is None or any(member.fit for member in line(view)):
            return
        if self._clearing is not None and not self._clearing.done():
            return
        for slot in view.slots:
            if not slot.holder and (slot.index, slot.epoch) not in self._cleared:
                self._clearing = asyncio.create_task(self._clear(slot.index, slot.epoch))
                return

    async def _clear(self, index: int, epoch: int) -> None:
        with suppress(StoreAwayError):  # it is tried again
            with suppress(FrontierError):  # it has a new holder already
                await self._frontier.fence(self._slot_name(index), epoch + 1)
            self._cleared.add((index, epoch))

    # -- waiting

    async def _watch_frontier(self) -> None:
        """For one who stands by; a worker sees for itself. Who is gone may have left because there is no more to do."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._session.interval):
                    await self._look_now.wait()
            self._look_now.clear()
            if self.tenure is None:
                await self._watch.look()

    async def _wait(self, view: ClusterView) -> None:
        """Until the next heartbeat. Who stands by also wakes when something happens, or a session may have run out."""
        interval = self._session.interval
        if self.tenure is not None:
            await self._sleep(interval)
            return
        ages = {member.name: member.age for member in view.members}
        ends = [self._session.ttl - ages[slot.holder] for slot in view.slots if slot.holder in ages]
        soon = [end + _AFTER_A_DEADLINE for end in ends if end > 0]
        if self._watch.fit and vacant(view):
            soon.append(_LOOK_AGAIN)
        await self._sleep(min([interval, *soon]), self._coordinator.wait(interval))
        if self.role == "spare":
            await self._sleep(random.random() * HESITATION)  # not all at once

    async def _sleep(self, seconds: float, event: Coroutine[Any, Any, None] | None = None) -> None:
        """For so long, or until this happens, the worker ends, or the node is to."""
        own = {asyncio.ensure_future(each) for each in (event, self._over.wait()) if each is not None}
        worker = set() if self.tenure is None else {self.tenure.task}
        try:
            done, _ = await asyncio.wait({*own, *worker}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() for future in done - worker):
                await asyncio.sleep(min(seconds, _LOOK_AGAIN))  # the next heartbeat says what is wrong
        finally:
            for future in own:
                future.cancel()
