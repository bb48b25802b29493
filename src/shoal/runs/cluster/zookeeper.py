"""The coordinator of a cluster on ZooKeeper. A member lives as long as its session. Each change is one transaction.

ZooKeeper executes the calls of a session in order, also
calls whose caller was cancelled: so a later read shows their effect.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from kazoo.client import TransactionRequest
from kazoo.protocol.states import ZnodeStat
from msgspec import Struct, json

from shoal.errors import CoordinatorError, SessionLostError
from shoal.ports import ClusterEvent, ClusterStep, ClusterView, Counts, Member, Slot
from shoal.runs.cluster import membership_lost, name_taken, unknown_cluster
from shoal.runs.cluster.election import next_epoch
from shoal.runs.cluster.zookeeper_session import (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    ZookeeperAddress,
    ZookeeperSession,
    children_of,
    data_of,
)

# -- the znodes of a cluster: small JSON records under ``/shoal/<cluster>``
#
#     config             wanted numbers of Runners and Backup Runners
#     members/<name>     ephemeral: a member. Its mtime is the time of its last heartbeat
#     roster/<name>      a member that joined and did not leave. Without members/<name> it was lost, and no event is
#                        recorded yet
#     slots/<index>      ephemeral: the slot is held
#     last/<index>       the holder or last holder of the slot, and its epoch. It changes together with slots/<index>,
#                        and stays when its holder is lost
#     events/<number>    the latest events
#     clock              written to learn the server's time
#
# ZooKeeper deletes all ephemeral znodes of a lost member in one step, so nobody sees a slot of a lost member.


class MemberRecord(Struct, frozen=True):
    """The state of a member."""

    doing: str = ""
    fit: bool = True
    where: str = ""


class SlotRecord(Struct, frozen=True):
    """The holder of a slot, for people who look at the znodes. ``last`` has it too."""

    name: str


class LastRecord(Struct, frozen=True):
    """The last holder of a slot. ``name`` is empty if it released the slot, and stays if it was lost."""

    name: str
    epoch: int


class EventRecord(Struct, frozen=True, omit_defaults=True):
    """An event. Its time is the creation time of its znode."""

    what: ClusterStep
    member: str
    slot: int | None = None
    epoch: int = 0
    detail: str = ""


class Paths:
    """The paths of the znodes of one cluster."""

    def __init__(self, chroot: str, cluster: str) -> None:
        root = f"{chroot}/shoal/{as_element(cluster)}"
        self.config = f"{root}/config"
        self.clock = f"{root}/clock"
        self.members = f"{root}/members"
        self.roster = f"{root}/roster"
        self.slots = f"{root}/slots"
        self.last = f"{root}/last"
        self.events = f"{root}/events"
        self.folders = (self.clock, self.members, self.roster, self.slots, self.last, self.events)
        """The znodes to create before the config."""

    def member(self, name: str) -> str:
        return f"{self.members}/{as_element(name)}"

    def enrolled(self, name: str) -> str:
        return f"{self.roster}/{as_element(name)}"

    def slot(self, index: int) -> str:
        return f"{self.slots}/{index}"

    def last_of(self, index: int) -> str:
        return f"{self.last}/{index}"


def as_element(name: str) -> str:
    """Encode any name as one element of a path."""
    if not name:
        raise CoordinatorError("clusters and members need a name")
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def as_name(element: str) -> str:
    return unquote(element)


_MIN_EVENTS = 100
"""How many events are kept at least."""
_CACHED_HEARTBEATS = 2
"""Heartbeats that use a cached view if nothing changed. Then it is read again, for the state of other members."""
_TRIM_EVERY = 20
"""Events after which old ones are deleted."""


class _Last(NamedTuple):
    record: LastRecord
    version: int


class _Versions(NamedTuple):
    """Versions that grow when the cluster changes."""

    config: int
    slots: int
    members: int


class _Known(NamedTuple):
    """A cached view. While the versions stay the same, only the state of other members may be outdated."""

    versions: _Versions
    view: ClusterView
    beats: int = 0
    """Heartbeats since then."""

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

    def __init__(self, session: ZookeeperSession, cluster: str, paths: Paths) -> None:
        self.ttl = session.ttl
        self._session = session
        self._client = session.client
        self._cluster = cluster
        self._paths = paths
        self._turn = asyncio.Lock()
        """Serializes changes of this member and its slot."""
        self._name = ""
        self._where = ""
        self._joined_in = 0
        """The session of this membership."""
        self._elements: list[str] = []
        """The members at the last read. They are likely to be the same at the next one."""
        self._known: _Known | None = None
        self._last: dict[int, _Last] = {}
        self._last_seen = 0
        """The version of ``slots`` that ``_last`` belongs to."""

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> ZookeeperCoordinator:
        """CoordinatorError if the URL, the login or the server is wrong, CoordinatorAwayError if no server answers."""
        address = ZookeeperAddress.parse(url)
        paths = Paths(address.chroot, cluster)
        session = await ZookeeperSession.open(address, ttl)
        try:
            async with session.step():
                await session.result(session.client.ensure_path_async(address.chroot or "/"))
                await session.read(data_of(paths.config))  # raises an error for a wrong password
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
                pass  # another member joined at the same time: retry
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
                return True  # an earlier attempt, whose answer was lost
            raise name_taken(self._cluster, name)
        if enrolled is not None:
            await self._record_loss(name)
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
                    self._release(step, slot)
                step.delete(self._paths.member(self._name))
                step.delete(self._paths.enrolled(self._name))
                with suppress(NoNodeError):  # an earlier attempt, whose answer was lost, did it
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
        return membership_lost(self._cluster, self._name, self.ttl)

    # -- views

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        async with self._session.step():
            self._check_member()
            record = MemberRecord(doing, fit, self._where)
            beating = self._client.set_async(self._paths.member(self._name), json.encode(record))
            try:
                versions = await self._read_versions()
                own = await self._session.result(beating)
                cached = self._known
                if (
                    cached is None
                    or cached.versions != versions
                    or cached.beats == _CACHED_HEARTBEATS
                    or not self._session.is_watching
                ):
                    cached = _Known(versions, await self._view(now=own.mtime))
            except NoNodeError as exc:
                raise self._lost() from exc
            if own.ephemeralOwner != self._joined_in:
                raise self._lost()
            self._known = cached._replace(beats=cached.beats + 1)
            self._session.stay_alive(self.ttl / 2)
            return cached.with_own(self._name, record)

    async def _read_versions(self) -> _Versions:
        """Read the versions. They change with members, slots and counts, but not with a heartbeat."""
        config, slots, members = await self._session.must_read(
            data_of(self._paths.config), data_of(self._paths.slots), data_of(self._paths.members)
        )
        return _Versions(config[1].version, slots[1].pzxid, members[1].pzxid)

    async def observe(self) -> ClusterView:
        async with self._session.step():
            try:
                stat = await self._session.result(self._client.set_async(self._paths.clock, b""))
                return await self._view(now=stat.mtime)
            except NoNodeError as exc:
                raise self._no_cluster() from exc

    async def _view(self, now: int) -> ClusterView:
        """Read the cluster. ``now``: the server's time, from a write just before. The roster is read before the
        members: a name that is only in the roster was lost."""
        paths, last_elements = self._paths, self._elements
        await self._session.watch(data=paths.config, children=(paths.slots, paths.members))
        config, slots, held, roster, elements, *facts = await self._session.read(
            data_of(paths.config),
            data_of(paths.slots),
            children_of(paths.slots),
            children_of(paths.roster),
            children_of(paths.members),
            *(data_of(f"{paths.members}/{element}") for element in last_elements),
        )
        if None in (config, slots, held, roster, elements):
            raise NoNodeError  # another program deleted it
        for lost in set(roster) - set(elements):
            await self._record_loss(as_name(lost))
        if elements != last_elements:
            facts = await self._session.read(*(data_of(f"{paths.members}/{element}") for element in elements))
            self._elements = elements
        members = (
            _member(as_name(element), fact, now=now)
            for element, fact in zip(elements, facts, strict=True)
            if fact is not None  # else it was just lost
        )
        return ClusterView(
            counts=json.decode(config[0], type=Counts),
            members=tuple(members),
            slots=await self._slots(held, slots[1].pzxid),
        )

    async def _slots(self, held: Collection[str], version: int) -> tuple[Slot, ...]:
        """The slots. ``last`` changes only together with ``slots``, so it is read again only then."""
        if version != self._last_seen:
            (names,) = await self._session.must_read(children_of(self._paths.last))
            indexes = [name for name in names if name.isdecimal() and len(name) < 10]  # others are not Shoal's
            answers = await self._session.read(*(data_of(self._paths.last_of(index)) for index in indexes))
            self._last = {
                int(index): _Last(json.decode(data, type=LastRecord), stat.version)
                for index, (data, stat) in zip(indexes, answers, strict=True)
            }
            self._last_seen = version
        return tuple(
            Slot(index, last.record.name if str(index) in held else "", last.record.epoch)
            for index, last in sorted(self._last.items())
        )

    async def _record_loss(self, name: str) -> None:
        """Record that a member was lost. Only one of the members that notice it succeeds."""
        step = self._client.transaction()
        step.create(self._paths.member(name))  # fails if it has joined again
        step.delete(self._paths.member(name))
        step.delete(self._paths.enrolled(name))
        had = next((index for index, last in self._last.items() if last.record.name == name), None)
        epoch = 0 if had is None else self._last[had].record.epoch
        with suppress(NodeExistsError, NoNodeError):
            await self._commit(step, EventRecord("lost", name, had, epoch))

    def _no_cluster(self) -> CoordinatorError:
        return unknown_cluster(self._session.address.shown, self._cluster)

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._session.changed.wait()
        self._session.changed.clear()  # the next heartbeat sees the changes, and watches again

    # -- slots

    async def take(self, index: int) -> int | None:
        async with self._session.step(), self._turn:
            self._check_member()
            paths = self._paths
            try:
                own, config, slots, held = await self._session.must_read(
                    data_of(paths.member(self._name)),
                    data_of(paths.config),
                    data_of(paths.slots),
                    children_of(paths.slots),
                )
            except NoNodeError as exc:
                raise self._lost() from exc
            if own[1].ephemeralOwner != self._joined_in:
                raise self._lost()
            for slot in await self._slots(held, slots[1].pzxid):
                if slot.holder == self._name:
                    return slot.epoch if slot.index == index else None
            runner = json.decode(config[0], type=Counts).runner
            if str(index) in held or index >= runner or len(held) >= runner:  # some holders may still have to retire
                return None
            return await self._take(index, own[1].mtime, config[1].version, slots[1].version)

    async def _take(self, index: int, now: int, config_version: int, slots_version: int) -> int | None:
        """Take a slot under a new epoch. ``now``: the server's time in milliseconds. The version of ``slots`` ensures
        that members take slots one at a time."""
        paths, name, last = self._paths, self._name, self._last.get(index)
        before = last.record if last else LastRecord("", 0)
        epoch = next_epoch(before.epoch, now * 1000)
        record = json.encode(LastRecord(name, epoch))
        step = self._client.transaction()
        step.check(paths.member(name), -1)
        step.check(paths.config, config_version)
        step.set_data(paths.slots, b"", slots_version)
        if last:
            step.set_data(paths.last_of(index), record, last.version)
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
                self._release(step, slot)
                await self._commit(step, EventRecord("retired", self._name, slot.index, slot.epoch))

    async def _own_slot(self) -> Slot | None:
        (_, stat), held = await self._session.must_read(data_of(self._paths.slots), children_of(self._paths.slots))
        return next((slot for slot in await self._slots(held, stat.pzxid) if slot.holder == self._name), None)

    def _release(self, step: TransactionRequest, slot: Slot) -> None:
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
            answers = await self._session.read(*(data_of(f"{self._paths.events}/{number}") for number in latest))
            return [_event(*answer) for answer in reversed(answers) if answer is not None]

    async def _commit(self, step: TransactionRequest, event: EventRecord) -> None:
        """Commit a transaction together with its event."""
        step.create(f"{self._paths.events}/e", json.encode(event), sequence=True)
        *_, event_path = await self._session.commit(step)
        if int(event_path[-10:]) % _TRIM_EVERY == 0:
            (numbers,) = await self._session.read(children_of(self._paths.events))
            trimming = self._client.transaction()
            for old in sorted(numbers)[:-_MIN_EVENTS]:
                trimming.delete(f"{self._paths.events}/{old}")
            with suppress(NoNodeError):  # another member trims too
                await self._session.commit(trimming)


def _member(name: str, fact: tuple[bytes, ZnodeStat], now: int) -> Member:
    """The member in a znode. ``now``: the server's time in milliseconds."""
    data, stat = fact
    record = json.decode(data, type=MemberRecord)
    age = max(0, now - stat.mtime) / 1000
    return Member(name=name, age=age, fit=record.fit, doing=record.doing, where=record.where)


def _event(data: bytes, stat: ZnodeStat) -> ClusterEvent:
    record = json.decode(data, type=EventRecord)
    return ClusterEvent(
        at=stat.ctime / 1000,
        what=record.what,
        member=record.member,
        slot=record.slot,
        epoch=record.epoch,
        detail=record.detail,
    )
