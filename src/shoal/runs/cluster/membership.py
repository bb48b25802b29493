"""A node's membership in a cluster: it sends heartbeats, watches the cluster, and acts on the election."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from contextlib import suppress

from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import ClusterView, Coordinator, Counts, Member
from shoal.runs.cluster.election import HESITATION, Retire, Role, Take, decide, roles, shortage, vacant
from shoal.runs.cluster.slots import FrontierWatch, HeldSlot
from shoal.runs.worker_session import new_worker_id
from shoal.system import chance, clock

log = logging.getLogger("shoal.cluster")

INDEX = "<index>"
"""A placeholder in the name of a node: it becomes the first free number."""
_EXPIRY_MARGIN = 0.02  # seconds after the end of another member's session
_POLL_INTERVAL = 0.1  # seconds, while a slot is vacant
_RETRY = (0.1, 2.0)  # seconds between tries to reach the coordinator, first and maximum
_LEAVE_TIMEOUT = 1.0  # seconds


class Membership:
    """The membership of one node in one cluster, from joining to leaving."""

    def __init__(
        self,
        name: str,
        cluster: str,
        counts: Counts,
        coordinator: Coordinator,
        watch: FrontierWatch | None,
        slot: HeldSlot,
    ) -> None:
        """``name`` may contain ``<index>``: it becomes the first number that makes the name unique. ``watch`` is None
        before the node runs."""
        self.name = name.replace(INDEX, "1")
        self.over = asyncio.Event()
        """Set when it should leave."""
        self.settled = asyncio.Event()
        """Set when every slot of the cluster has a holder, or this node has one: its role is decided."""
        self._role: Role | None = None
        self._pattern = name
        self._cluster = cluster
        self._counts = counts
        """The configured counts, then the last ones it saw. If a cluster loses all members, the first member that joins
        again restores its counts."""
        self._coordinator = coordinator
        self._watch = watch
        self._slot = slot
        self._session = slot.session
        self._poll_now = asyncio.Event()
        self._seen: ClusterView | None = None
        self._is_member = False
        self._was_member = False
        self._stays = False
        """Whether to stay a member when ``live`` ends: another object continues the membership."""
        self._vacant_since: dict[int, float] = {}
        self._failures = 0
        """Consecutive calls that failed."""
        self._is_stable = False
        """Whether the last two views lacked the same roles."""
        self._shortage = ""
        """The last shortage that was logged."""

    async def live(self) -> None:
        """Run until there is nothing more to do, or ``over`` is set."""
        watching = None
        if self._watch is not None:
            watching = asyncio.create_task(self._watch_frontier(self._watch))
            watching.add_done_callback(lambda task: self.over.set())  # it ends only by an error
        try:
            while not self.over.is_set():
                try:
                    if not self._is_member:
                        await self._join()
                    while not self.over.is_set():
                        await self._step()
                except SessionLostError:
                    await self._handle_loss()
            if watching is not None and watching.done():
                watching.result()
        finally:
            if watching is not None:
                watching.cancel()
            self._slot.stop_clearing()
            if not self._stays:
                await self._leave()

    async def _leave(self) -> None:
        try:
            await self._slot.end(self._beat, abort=False)
        finally:
            self._role = None
            with suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT):
                    await self._coordinator.leave()

    @property
    def role(self) -> Role | None:
        """The current role; None while it may not be a member, also shortly before its session expires."""
        return self._role if self._session.is_good else None

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in the last view of the cluster."""
        return () if self._seen is None else self._seen.members

    def hand_over(self) -> None:
        """End ``live`` without leaving the cluster."""
        self._stays = True
        self.over.set()

    def continue_from(self, before: Membership) -> None:
        """Continue a membership that was handed over."""
        self.name, self._role, self._pattern = before.name, before._role, before._pattern
        self._counts, self._shortage = before._counts, before._shortage
        self._is_member, self._was_member = before._is_member, before._was_member

    async def _handle_loss(self) -> None:
        self._slot.event_counts["lost"] += 1
        log.warning("%s missed its heartbeats and was removed; it joins again", self.name)
        self._session.lost()
        self._role, self._is_member = None, False
        await self._slot.end(self._beat, abort=True)

    async def _join(self) -> None:
        """Join the cluster. A taken name may belong to an earlier process of this node: wait for its session to end. If
        the name has an index, try the next one instead."""
        pause, began, waits = _RETRY[0], clock.monotonic(), False
        numbers = itertools.count(1)
        while not self.over.is_set():
            sent = clock.now()
            try:
                await self._coordinator.join(self.name, self._counts, new_worker_id(), again=self._was_member)
            except NameTakenError:
                if INDEX in self._pattern:
                    self.name = self._pattern.replace(INDEX, str(next(numbers)))
                    continue
                if clock.monotonic() - began > 1.5 * self._session.ttl + 2.0:
                    raise
                if not waits:
                    log.warning("the name %s is taken; waiting in case its owner has died", self.name)
                waits = True
            except CoordinatorError as exc:
                if not self._was_member and not isinstance(exc, CoordinatorAwayError):
                    raise
                began = clock.monotonic()
                self._note_failure(exc)
                pause = min(_RETRY[1], 2 * pause)
            else:
                self._session.renewed(sent)
                self._seen, self._is_member, self._was_member, self._slot.name = None, True, True, self.name
                return
            await self._sleep(pause * chance.uniform(0.5, 1.0))

    # -- one heartbeat and its consequences

    async def _step(self) -> None:
        if self._slot.task is not None and self._slot.task.done():
            await self._slot.end(self._beat, abort=False)
        if self._is_done():
            return
        try:
            view = await self._beat()
            await self._act(view)
        except SessionLostError:
            raise
        except CoordinatorError as exc:
            self._note_failure(exc)
            if self._failures > 1:  # the first failure may have been an old connection
                await self._sleep(min(1.0, self._session.interval))
        else:
            if self._is_done():
                return
            self._take_role("Runner" if self._slot.has_slot else roles(view).get(self.name))
            if self._slot.has_slot or not vacant(view):
                self.settled.set()
            await self._wait(view)

    def _is_done(self) -> bool:
        has_ended = self._watch is not None and self._watch.ended
        if self._slot.is_over or (has_ended and not self._slot.has_slot):
            self.over.set()
        return self.over.is_set()

    @property
    def _is_fit(self) -> bool:
        """Whether it could crawl: it runs, and reaches the frontier."""
        return self._watch is not None and self._watch.fit

    async def _beat(self) -> ClusterView:
        sent = clock.now()
        view = await self._coordinator.beat(self._slot.doing, fit=self._is_fit)
        self._session.renewed(sent)
        if self._failures > 1:
            log.warning("the coordinator answers again")
        self._failures = 0
        self._see(view)
        return view

    def _note_failure(self, error: CoordinatorError) -> None:
        self._failures += 1
        if self._failures == 2:
            log.warning("the coordinator does not answer; retrying: %s", error)

    def _see(self, view: ClusterView) -> None:
        """Log what has changed, and note since when slots are vacant."""
        before, self._seen = self._seen, view
        if before is not None and _is_same(before, view) and self._is_stable:
            return
        moment = clock.monotonic()
        self._vacant_since = {index: self._vacant_since.get(index, moment) for index in vacant(view)}
        if view.counts != self._counts:
            log.warning(
                "%s now has runner=%d and backup=%d; change them with `shoal cluster scale`",
                self._cluster,
                view.counts.runner,
                view.counts.backup,
            )
            self._counts = view.counts
        if before is None:
            return
        for name in {member.name for member in before.members} - {member.name for member in view.members}:
            log.warning("%s left %s or was lost", name, self._cluster)
            self._poll_now.set()
        missing = shortage(view)
        self._is_stable = missing == shortage(before)
        if self._is_stable and missing != self._shortage:  # not while a slot is being taken over
            if missing:
                log.warning("%s has only %s", self._cluster, missing)
            else:
                log.info("%s is complete", self._cluster)
            self._shortage = missing

    def _take_role(self, role: Role | None) -> None:
        if role == "Backup Runner" != self._role:
            log.info("%s is a Backup Runner of %s", self.name, self._cluster)
        elif role == "Spare" != self._role:
            log.warning(
                "%s is a Spare: %s has its %d Runners and %d Backup Runners; it waits until one of them leaves",
                self.name,
                self._cluster,
                self._counts.runner,
                self._counts.backup,
            )
        self._role = role

    async def _act(self, view: ClusterView) -> None:
        mine = next((slot for slot in view.slots if slot.holder == self.name), None)
        await self._slot.check(mine, self._beat)
        if self._slot.is_over or (mine is not None and not self._slot.has_slot):
            return
        moment = clock.monotonic()
        vacant_for = {index: moment - since for index, since in self._vacant_since.items()}
        match decide(view, self.name, vacant_for, idle=self._watch is None):
            case Take(slot):
                await self._slot.take(slot)
            case Retire():
                await self._slot.retire("the cluster was scaled down", self._beat)
            case None:
                self._slot.clear_vacant(view)

    # -- waiting

    async def _watch_frontier(self, watch: FrontierWatch) -> None:
        """Poll the frontier from time to time, and at once when a member is gone: the run may have ended."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._session.interval if watch.fit else 1.0):
                    await self._poll_now.wait()
            self._poll_now.clear()
            await watch.poll()
            self._is_done()

    async def _wait(self, view: ClusterView) -> None:
        """Wait for the next heartbeat. Without a slot, also wake on a change, or when a session may have ended."""
        interval = self._session.interval
        if self._slot.has_slot:
            await self._sleep(interval)
            return
        ages = {member.name: member.age for member in view.members}
        ends = [self._session.ttl - ages[slot.holder] for slot in view.slots if slot.holder in ages]
        soon = [end + _EXPIRY_MARGIN for end in ends if end > 0]
        if (self._is_fit or self._watch is None) and vacant(view):
            soon.append(_POLL_INTERVAL)
        await self._sleep(min([interval, *soon]), self._coordinator.wait(interval))
        if self._role == "Spare":
            await self._sleep(chance.random() * HESITATION)  # spread, not all at once

    async def _sleep(self, seconds: float, event: Coroutine[object, object, None] | None = None) -> None:
        """Sleep, but wake on the event, when the worker ends, or when the node should leave."""
        own = {asyncio.ensure_future(event) for event in (event, self.over.wait()) if event is not None}
        worker = set() if self._slot.task is None else {self._slot.task}
        try:
            done, _ = await asyncio.wait({*own, *worker}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() for future in done - worker):
                await asyncio.sleep(min(seconds, _POLL_INTERVAL))  # the next heartbeat will raise the error
        finally:
            for future in own:
                future.cancel()


def _is_same(before: ClusterView, after: ClusterView) -> bool:
    """Whether nothing changed between the two views."""
    return (
        before.slots == after.slots
        and before.counts == after.counts
        and [(member.name, member.fit) for member in before.members]
        == [(member.name, member.fit) for member in after.members]
    )
