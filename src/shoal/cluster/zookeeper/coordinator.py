"""The coordinator on ZooKeeper. A member lives as long as its session, and whatever it does is one transaction.

What is kept where is in `shoal.cluster.zookeeper.znodes`. A session's calls are done in their order, also those whose
answers nobody waits for any more: so what is read later shows what they did.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import json

from shoal.cluster.zookeeper.address import parse_url
from shoal.cluster.zookeeper.reads import children_of, data_of
from shoal.cluster.zookeeper.session import BadVersionError, NodeExistsError, NoNodeError, Session
from shoal.cluster.zookeeper.znodes import EventRecord, LastRecord, MemberRecord, Paths, SlotRecord, as_name
from shoal.errors import CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import ClusterEvent, ClusterStep, ClusterView, Counts, Member, Slot

_EVENTS = 100
"""How many are kept at least."""
_BELIEVED = 2
"""Heartbeats for which what was seen is believed, while there is no sign of a change. Then it is read again, for what
others do and whether they are fit."""
_TRIM_EVERY = 20
"""Events after which those before are looked through."""


class _Last(NamedTuple):
    record: LastRecord
    version: int


class _Signs(NamedTuple):
    """Versions that grow when something happens in a cluster."""

    config: int
    slots: int
    members: int


class _Known(NamedTuple):
    """What was seen. As long as the signs are the same, only what others do may be different by now."""

    signs: _Signs
    view: ClusterView
    beats: int = 0
    """Since then."""

    def with_own(self, name: str, record: MemberRecord) -> ClusterView:
        members = tuple(
            Member(name=name, age=0.0, fit=record.fit, doing=record.doing, where=record.where)
            if member.name == name
            else member
            for member in self.view.members
        )
        return ClusterView(counts=self.view.counts, members=members, slots=self.view.slots)


class ZookeeperCoordinator:
    """See `shoal.ports.Coordinator`."""

    def __init__(self, session: Session, cluster: str, paths: Paths) -> None:
        self.ttl = session.ttl
        self._session = session
        self._client = session.client
        self._cluster = cluster
        self._paths = paths
        self._turn = asyncio.Lock()
        """What a member does to its slot is done one after the other."""
        self._name = ""
        self._where = ""
        self._joined_in = 0
        """The session that the member lives in."""
        self._elements: list[str] = []
        """The members when they were last looked at: they are likely to be the same the next time."""
        self._known: _Known | None = None
        self._last: dict[int, _Last] = {}
        self._last_seen = 0
        """The change of ``slots`` that it shows."""

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> ZookeeperCoordinator:
        """CoordinatorError says what is wrong: with the URL, the login, or what answers there."""
        address = parse_url(url)
        paths = Paths(address.chroot, cluster)
        session = await Session.open(address, ttl)
        try:
            async with session.step():
                await session.result(session.client.ensure_path_async(address.chroot or "/"))
                await session.read(data_of(paths.config))  # a wrong password is told now
        except BaseException:
            await session.close()
            raise
        return cls(session, cluster, paths)

    async def close(self) -> None:
        await self._session.close()

    # -- members

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        async with self._session.step(), self._turn:
            joining_in = self._session.id
            await self._make_folders(counts)
            while not await self._try_to_join(name, None if again else counts, where):
                pass  # another has joined in this moment: look again
            self._name, self._where, self._joined_in, self._known = name, where, joining_in, None
            self._session.stay_alive(self.ttl / 2)

    async def _make_folders(self, counts: Counts) -> None:
        if await self._session.result(self._client.exists_async(self._paths.config)):
            return
        for path in self._paths.folders:
            await self._session.result(self._client.ensure_path_async(path))
        with suppress(NodeExistsError):
            await self._session.result(self._client.create_async(self._paths.config, json.encode(counts)))

    async def _try_to_join(self, name: str, counts: Counts | None, where: str) -> bool:
        client, paths = self._client, self._paths
        member, enrolled = await self._session.read(data_of(paths.member(name)), data_of(paths.enrolled(name)))
        (_, config), members = await self._session.must_read(data_of(paths.config), children_of(paths.members))
        if member is not None:
            if member[1].ephemeralOwner == self._session.id:
                return True  # in an attempt before, whose answer was lost
            raise NameTakenError(f"a member named {name} lives in the cluster {self._cluster}; choose another name")
        if enrolled is not None:
            await self._tell_lost(name)
        step = client.transaction()
        if counts and not members:
            step.set_data(paths.config, json.encode(counts), config.version)
        step.create(paths.member(name), json.encode(MemberRecord(where=where)), ephemeral=True)
        step.create(paths.enrolled(name))
        try:
            await self._commit(step, EventRecord("joined", name))
        except (NodeExistsError, BadVersionError):
            return False
        return True

    async def leave(self) -> None:
        async with self._session.step(), self._turn:
            if self._is_member:
                slot = await self._own_slot()
                step = self._client.transaction()
                if slot is not None:
                    self._give_back(step, slot)
                step.delete(self._paths.member(self._name))
                step.delete(self._paths.enrolled(self._name))
                with suppress(NoNodeError):  # an attempt before, whose answer was lost, has done it
                    await self._commit(step, EventRecord("left", self._name))
            self._name = ""
            self._session.stay_alive(math.inf)

    @property
    def _is_member(self) -> bool:
        return self._name != "" and self._joined_in == self._session.id

    def _check_member(self) -> None:
        if not self._is_member:
            raise self._lost()

    def _lost(self) -> SessionLostError:
        return SessionLostError(
            f"{self._name or 'this'} is no member of the cluster {self._cluster} any more: it has left, or was not "
            f"heard of for {self.ttl:g} seconds"
        )

    # -- what is seen

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        async with self._session.step():
            self._check_member()
            record = MemberRecord(doing, fit, self._where)
            beating = self._client.set_async(self._paths.member(self._name), json.encode(record))
            try:
                signs = await self._signs()
                own = await self._session.result(beating)
                known = self._known
                if known is None or known.signs != signs or known.beats == _BELIEVED or not self._session.is_watching:
                    known = _Known(signs, await self._view(now=own.mtime))
            except NoNodeError as exc:
                raise self._lost() from exc
            if own.ephemeralOwner != self._joined_in:
                raise self._lost()
            self._known = known._replace(beats=known.beats + 1)
            self._session.stay_alive(self.ttl / 2)
            return known.with_own(self._name, record)

    async def _signs(self) -> _Signs:
        """By which it is seen whether members, slots or counts have changed. A heartbeat changes a member alone."""
        config, slots, members = await self._session.must_read(
            data_of(self._paths.config), data_of(self._paths.slots), data_of(self._paths.members)
        )
        return _Signs(config[1].version, slots[1].pzxid, members[1].pzxid)

    async def look(self) -> ClusterView:
        async with self._session.step():
            try:
                written = await self._session.result(self._client.set_async(self._paths.clock, b""))
                return await self._view(now=written.mtime)
            except NoNodeError as exc:
                raise self._no_cluster() from exc

    async def _view(self, now: int) -> ClusterView:
        """What there is. ``now``: the server's time, by something that was written just now. The roster is read before
        the members: who is in the one and not in the other was lost."""
        paths, known = self._paths, self._elements
        await self._session.watch(data=paths.config, children=(paths.slots, paths.members))
        config, slots, held, roster, elements, *facts = await self._session.read(
            data_of(paths.config),
            data_of(paths.slots),
            children_of(paths.slots),
            children_of(paths.roster),
            children_of(paths.members),
            *(data_of(f"{paths.members}/{element}") for element in known),
        )
        if None in (config, slots, held, roster, elements):
            raise NoNodeError  # somebody has deleted it
        for lost in set(roster) - set(elements):
            await self._tell_lost(as_name(lost))
        if elements != known:
            facts = await self._session.read(*(data_of(f"{paths.members}/{element}") for element in elements))
            self._elements = elements
        members = (
            _member(as_name(element), fact, now=now)
            for element, fact in zip(elements, facts, strict=True)
            if fact is not None  # it was there a moment ago
        )
        return ClusterView(
            counts=json.decode(config[0], type=Counts),
            members=tuple(members),
            slots=await self._slots(held, slots[1].pzxid),
        )

    async def _slots(self, held: Collection[str], seen: int) -> tuple[Slot, ...]:
        """``last`` changes only when ``slots`` does, so it is read again only then."""
        if seen != self._last_seen:
            (indexes,) = await self._session.must_read(children_of(self._paths.last))
            found = await self._session.read(*(data_of(self._paths.last_of(index)) for index in indexes))
            self._last = {
                int(index): _Last(json.decode(data, type=LastRecord), stat.version)
                for index, (data, stat) in zip(indexes, found, strict=True)
            }
            self._last_seen = seen
        return tuple(
            Slot(index, last.record.name if str(index) in held else "", last.record.epoch)
            for index, last in sorted(self._last.items())
        )

    async def _tell_lost(self, name: str) -> None:
        """One of those who notice it does."""
        step = self._client.transaction()
        step.create(self._paths.member(name))  # not if it lives again by now
        step.delete(self._paths.member(name))
        step.delete(self._paths.enrolled(name))
        had = next((index for index, last in self._last.items() if last.record.name == name), None)
        epoch = 0 if had is None else self._last[had].record.epoch
        with suppress(NodeExistsError, NoNodeError):
            await self._commit(step, EventRecord("lost", name, had, epoch))

    def _no_cluster(self) -> CoordinatorError:
        return CoordinatorError(f"{self._session.address.shown} knows no cluster {self._cluster}")

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._session.changed.wait()
        self._session.changed.clear()  # the next beat sees what has changed until then, and watches again

    # -- slots

    async def take(self, index: int) -> int | None:
        async with self._session.step(), self._turn:
            self._check_member()
            paths = self._paths
            try:
                own, config, slots, held = await self._session.must_read(
                    data_of(paths.member(self._name)), data_of(paths.config), data_of(paths.slots),
                    children_of(paths.slots),
                )  # fmt: skip
            except NoNodeError as exc:
                raise self._lost() from exc
            if own[1].ephemeralOwner != self._joined_in:
                raise self._lost()
            for slot in await self._slots(held, slots[1].pzxid):
                if slot.holder == self._name:
                    return slot.epoch if slot.index == index else None
            runner = json.decode(config[0], type=Counts).runner
            if str(index) in held or index >= runner or len(held) >= runner:  # some may have still to retire
                return None
            return await self._take(index, own[1].mtime, config[1].version, slots[1].version)

    async def _take(self, index: int, now: int, config_version: int, slots_version: int) -> int | None:
        """The epoch is also a time, in microseconds: so it grows even after the server has lost its data. One at a time
        takes a slot, so that their number is right."""
        paths, name, known = self._paths, self._name, self._last.get(index)
        before = known.record if known else LastRecord("", 0)
        epoch = max(before.epoch + 1, now * 1000)
        record = json.encode(LastRecord(name, epoch))
        step = self._client.transaction()
        step.check(paths.member(name), -1)
        step.check(paths.config, config_version)
        step.set_data(paths.slots, b"", slots_version)
        if known:
            step.set_data(paths.last_of(index), record, known.version)
        else:
            step.create(paths.last_of(index), record)
        step.create(paths.slot(index), json.encode(SlotRecord(name)), ephemeral=True)
        try:
            what: ClusterStep = "took over" if before.name else "elected"
            await self._commit(step, EventRecord(what, name, index, epoch, before.name))
        except (NodeExistsError, BadVersionError):
            return None
        except NoNodeError as exc:
            raise self._lost() from exc
        return epoch

    async def retire(self) -> None:
        async with self._session.step(), self._turn:
            slot = await self._own_slot() if self._is_member else None
            if slot is not None:
                step = self._client.transaction()
                self._give_back(step, slot)
                await self._commit(step, EventRecord("retired", self._name, slot.index, slot.epoch))

    async def _own_slot(self) -> Slot | None:
        (_, stat), held = await self._session.must_read(data_of(self._paths.slots), children_of(self._paths.slots))
        return next((slot for slot in await self._slots(held, stat.pzxid) if slot.holder == self._name), None)

    def _give_back(self, step: Any, slot: Slot) -> None:
        step.delete(self._paths.slot(slot.index))
        step.set_data(self._paths.last_of(slot.index), json.encode(LastRecord("", slot.epoch)))

    # -- counts and events

    async def scale(self, counts: Counts) -> None:
        async with self._session.step():
            step = self._client.transaction()
            step.set_data(self._paths.config, json.encode(counts))
            detail = f"runner {counts.runner}, backup {counts.backup}"
            try:
                await self._commit(step, EventRecord("scaled", "", detail=detail))
            except NoNodeError as exc:
                raise self._no_cluster() from exc

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        async with self._session.step():
            (numbers,) = await self._session.read(children_of(self._paths.events))
            latest = sorted(numbers or (), reverse=True)[: max(0, limit)]
            found = await self._session.read(*(data_of(f"{self._paths.events}/{each}") for each in latest))
            return [_event(*answer) for answer in reversed(found) if answer is not None]

    async def _commit(self, step: Any, event: EventRecord) -> None:
        """A step and its event, all or nothing."""
        step.create(f"{self._paths.events}/e", json.encode(event), sequence=True)
        *_, made = await self._session.commit(step)
        if int(made[-10:]) % _TRIM_EVERY == 0:
            (numbers,) = await self._session.read(children_of(self._paths.events))
            trimming = self._client.transaction()
            for old in sorted(numbers)[:-_EVENTS]:
                trimming.delete(f"{self._paths.events}/{old}")
            with suppress(NoNodeError):  # another is at it too
                await self._session.commit(trimming)


def _member(name: str, fact: tuple[bytes, Any], now: int) -> Member:
    """``now``: the server's time in milliseconds."""
    data, stat = fact
    record = json.decode(data, type=MemberRecord)
    age = max(0, now - stat.mtime) / 1000
    return Member(name=name, age=age, fit=record.fit, doing=record.doing, where=record.where)


def _event(data: bytes, stat: Any) -> ClusterEvent:
    record = json.decode(data, type=EventRecord)
    return ClusterEvent(
        at=stat.ctime / 1000, what=record.what, member=record.member, slot=record.slot, epoch=record.epoch,
        detail=record.detail,
    )  # fmt: skip
