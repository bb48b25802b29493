"""A member's life in a cluster: heard of in time, it sees the others, and does what the election says."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from shoal.cluster.election import HESITATION, Retire, Role, Take, decide, roles, shortage, vacant
from shoal.cluster.frontier_watch import FrontierWatch
from shoal.cluster.slot_session import now
from shoal.cluster.slot_work import Holding
from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import ClusterView, Coordinator, Counts
from shoal.runs.worker import new_worker_id

log = logging.getLogger("shoal.cluster")

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
        watch: FrontierWatch,
        holding: Holding,
    ) -> None:
        self.role: Role | None = None
        self.over = asyncio.Event()
        """It is to leave."""
        self._name = name
        self._cluster = cluster
        self._counts = counts
        """Those that it was told, and then those that it last saw: a cluster that has lost all its members at once gets
        them back from the first that joins again."""
        self._coordinator = coordinator
        self._watch = watch
        self._holding = holding
        self._session = holding.session
        self._look_now = asyncio.Event()
        self._seen: ClusterView | None = None
        self._was_member = False
        self._vacant_since: dict[int, float] = {}
        self._failures = 0
        """Calls in a row that the coordinator did not answer."""
        self._is_calm = False
        """What it saw last is no different from what it saw before."""
        self._lack = ""
        """What was told last that the cluster has too few of."""

    async def live(self) -> None:
        """Until there is nothing more to do, or ``over``."""
        watch = asyncio.create_task(self._watch_frontier())
        watch.add_done_callback(lambda task: self.over.set())  # it ends only by an error
        try:
            while not self.over.is_set():
                try:
                    await self._join()
                    while not self.over.is_set():
                        await self._step()
                except SessionLostError:
                    await self._be_lost()
            if watch.done():
                watch.result()
        finally:
            watch.cancel()
            self._holding.stop_clearing()
            try:
                await self._holding.end(self._beat, cut=False)
            finally:
                self.role = None
                with suppress(CoordinatorError, TimeoutError):
                    async with asyncio.timeout(_LAST_WORD):
                        await self._coordinator.leave()

    async def _be_lost(self) -> None:
        self._holding.happened["lost"] += 1
        log.warning("%s was taken for dead; it joins again", self._name)
        self._session.lost()
        await self._holding.end(self._beat, cut=True)

    async def _join(self) -> None:
        """Become a member. A name that is taken may be that of this node's own past, which has a session to live."""
        pause, began, waits = _RETRY[0], time.monotonic(), False
        while not self.over.is_set():
            sent = now()
            try:
                await self._coordinator.join(self._name, self._counts, new_worker_id(), again=self._was_member)
            except NameTakenError:
                if time.monotonic() - began > 1.5 * self._session.ttl + 2.0:
                    raise
                if not waits:
                    log.warning("%s is a member already; if that one is dead, it is gone in a moment", self._name)
                waits = True
            except CoordinatorError as exc:
                if not self._was_member and not isinstance(exc, CoordinatorAwayError):
                    raise
                began = time.monotonic()
                self._note_trouble(exc)
                pause = min(_RETRY[1], 2 * pause)
            else:
                self._session.renewed(sent)
                self._seen, self._was_member = None, True
                return
            await self._sleep(pause * random.uniform(0.5, 1.0))

    # -- one heartbeat, and what follows from what it shows

    async def _step(self) -> None:
        tenure = self._holding.tenure
        if tenure is not None and tenure.task.done():
            await self._holding.end(self._beat, cut=False)
        if self._is_done():
            return
        try:
            view = await self._beat()
            await self._act(view)
        except SessionLostError:
            raise
        except CoordinatorError as exc:
            self._note_trouble(exc)
            if self._failures > 1:  # the first may have been an old connection
                await self._sleep(min(1.0, self._session.interval))
        else:
            if self._is_done():
                return
            if self._holding.tenure is None:
                self._take_role(roles(view).get(self._name))
            await self._wait(view)

    def _is_done(self) -> bool:
        if self._holding.is_over or (self._watch.ended and self._holding.tenure is None):
            self.over.set()
        return self.over.is_set()

    async def _beat(self) -> ClusterView:
        sent = now()
        view = await self._coordinator.beat(self._holding.doing, fit=self._watch.fit)
        self._session.renewed(sent)
        if self._failures > 1:
            log.warning("the coordinator is back")
        self._failures = 0
        self._see(view)
        return view

    def _note_trouble(self, error: CoordinatorError) -> None:
        self._failures += 1
        if self._failures == 2:
            log.warning("the coordinator is away, waiting for it: %s", error)

    def _see(self, view: ClusterView) -> None:
        """Tell what has changed, and remember since when slots are vacant."""
        before, self._seen = self._seen, view
        if before is not None and _is_alike(before, view) and self._is_calm:
            return  # as mostly
        moment = time.monotonic()
        self._vacant_since = {index: self._vacant_since.get(index, moment) for index in vacant(view)}
        if view.counts != self._counts:
            log.warning(
                "%s has runner=%d and backup=%d now; `shoal cluster scale` changes that",
                self._cluster, view.counts.runner, view.counts.backup,
            )  # fmt: skip
            self._counts = view.counts
        if before is None:
            return
        for name in {member.name for member in before.members} - {member.name for member in view.members}:
            log.warning("%s is gone from %s", name, self._cluster)
            self._look_now.set()
        lack = shortage(view)
        self._is_calm = lack == shortage(before)
        if self._is_calm and lack != self._lack:  # not what is being mended in this moment
            if lack:
                log.warning("%s has only %s", self._cluster, lack)
            else:
                log.info("%s is complete", self._cluster)
            self._lack = lack

    def _take_role(self, role: Role | None) -> None:
        if role not in (None, "runner", self.role):
            log.info("%s is a %s of %s", self._name, _TITLES[role], self._cluster)
        self.role = role

    async def _act(self, view: ClusterView) -> None:
        mine = next((slot for slot in view.slots if slot.holder == self._name), None)
        await self._holding.look(mine, self._beat)
        if self._holding.is_over or (self._holding.tenure is None and mine is not None):
            return
        moment = time.monotonic()
        match decide(view, self._name, {index: moment - since for index, since in self._vacant_since.items()}):
            case Take(slot):
                await self._holding.take(slot)
                if self._holding.tenure is not None:
                    self.role = "runner"
            case Retire():
                await self._holding.retire("there are to be fewer Runners", self._beat)
            case None:
                self._holding.clear_vacant(view)

    # -- waiting

    async def _watch_frontier(self) -> None:
        """Who is gone may have left because there is no more to do."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._session.interval if self._watch.fit else 1.0):
                    await self._look_now.wait()
            self._look_now.clear()
            await self._watch.look()
            self._is_done()

    async def _wait(self, view: ClusterView) -> None:
        """Until the next heartbeat. Who stands by also wakes when something happens, or a session may have run out."""
        interval = self._session.interval
        if self._holding.tenure is not None:
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
        own = {asyncio.ensure_future(each) for each in (event, self.over.wait()) if each is not None}
        worker = set() if self._holding.tenure is None else {self._holding.tenure.task}
        try:
            done, _ = await asyncio.wait({*own, *worker}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() for future in done - worker):
                await asyncio.sleep(min(seconds, _LOOK_AGAIN))  # the next heartbeat says what is wrong
        finally:
            for future in own:
                future.cancel()


def _is_alike(one: ClusterView, other: ClusterView) -> bool:
    """Whether nothing has happened between the two."""
    return (
        one.slots == other.slots
        and one.counts == other.counts
        and [(member.name, member.fit) for member in one.members]
        == [(member.name, member.fit) for member in other.members]
    )
