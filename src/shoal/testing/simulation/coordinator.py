"""A simulated Redis server that coordinates clusters. Its clients are those of production: `RedisCoordinator`.

The steps are those of ``shoal/runs/cluster/lua``, and pass the contract of coordinators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

from msgspec import Struct, msgpack

from shoal.clients.redis import Answer, RedisAddress, RedisClient, ScriptFolder, Word
from shoal.errors import StoreAwayError, StoreError
from shoal.ports import ClusterEvent, ClusterStep, Counts
from shoal.runs.cluster.election import next_epoch
from shoal.runs.cluster.redis import MemberRecord, SlotRecord
from shoal.testing.simulation.calls import NetworkCall
from shoal.testing.simulation.loop import Process

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World

URL = "redis://coordinator"
_MAX_EVENTS = 200
_FOLLOW = "follow"
"""Waits for an event. The other calls are scripts."""


class Tenure(Struct):
    """For how long a member had a slot, by the coordinator's clock."""

    index: int
    epoch: int
    name: str
    process: Process
    since: float
    until: float = inf


class Cluster:
    """One cluster, as the scripts keep it."""

    def __init__(self, clock: Callable[[], float], tenures: list[Tenure]) -> None:
        """``tenures``: what it appends to."""
        self.counts: Counts | None = None
        self.members: dict[str, MemberRecord] = {}
        self.processes: dict[str, Process] = {}
        """The process of each member."""
        self.slots: dict[int, SlotRecord] = {}
        self.events: list[tuple[str, ClusterEvent]] = []
        """The last ones, with their positions."""
        self.tenures = tenures
        self._clock = clock
        self._last_epoch = 0
        self._event_count = 0

    def execute(self, step: str, words: tuple[Word, ...], caller: Process) -> Answer:
        """Run a script."""
        self.remove_lost()
        arguments = [word.decode() if isinstance(word, bytes) else word for word in words]
        steps: dict[str, Callable[..., Answer]] = {
            "join": partial(self._join, caller),
            "take": partial(self._take, caller),
            "beat": self._beat,
            "leave": self._leave,
            "retire": self._retire,
            "scale": self._scale,
            "observe": self._observe,
            "events": self._list_events,
        }
        return steps[step](*arguments)

    @property
    def last_event(self) -> str:
        """The position of the last event."""
        return self.events[-1][0] if self.events else "0-0"

    def _record_event(self, what: ClusterStep, member: str, slot: int | None, epoch: int, detail: str = "") -> None:
        now = self._clock()
        self._event_count += 1
        event = ClusterEvent(at=now, what=what, member=member, slot=slot, epoch=epoch, detail=detail)
        self.events = [*self.events, (f"{int(now * 1000)}-{self._event_count}", event)][-_MAX_EVENTS:]

    # -- members

    def _join(
        self, caller: Process, name: str, session: str, ttl: float, where: str, runner: int, backup: int, again: int
    ) -> int:
        known = self.members.get(name)
        if known is not None and known.session != session:
            return 0
        if known is None:
            if not self.members and not (again and self.counts):
                self.counts = Counts(runner, backup)
            self._record_event("joined", name, None, 0)
        doing, fit = ("", 1) if known is None else (known.doing, known.fit)
        self.members[name] = MemberRecord(session, ttl, where, doing, fit, self._clock())
        self.processes[name] = caller
        return 1

    def _is_member(self, name: str, session: str) -> bool:
        return name in self.members and self.members[name].session == session

    def _beat(self, name: str, session: str, doing: str, fit: int) -> Answer:
        if not self._is_member(name, session):
            return None
        member = self.members[name]
        member.doing, member.fit, member.last_heartbeat = doing, fit, self._clock()
        return self._view()

    def _leave(self, name: str, session: str) -> int:
        if not self._is_member(name, session):
            return 0
        self._remove_member(name, "left", self._clock())
        return 1

    def _remove_member(self, name: str, what: ClusterStep, at: float) -> None:
        index, epoch = self._vacate(name, at, lost=name if what == "lost" else "")
        del self.members[name]
        self._record_event(what, name, index, epoch)

    def end_of(self, name: str) -> float:
        """When the session of a member ends if it sends nothing more."""
        return self.members[name].last_heartbeat + self.members[name].ttl

    def remove_lost(self) -> None:
        """Remove the members whose sessions have ended."""
        for name in sorted(self.members, key=self.end_of):
            if self.end_of(name) <= self._clock():
                self._remove_member(name, "lost", self.end_of(name))

    def forget(self) -> None:
        """All data is lost. The members do not know that yet, and may work until their sessions end."""
        self.remove_lost()
        longest = max((member.ttl for member in self.members.values()), default=0.0)
        for tenure in self.tenures:
            tenure.until = min(tenure.until, self._clock() + longest)

    # -- slots

    def _slot_of(self, name: str) -> tuple[int | None, int]:
        held = ((index, slot.epoch) for index, slot in self.slots.items() if slot.holder == name)
        return next(held, (None, 0))

    def _vacate(self, name: str, at: float, lost: str) -> tuple[int | None, int]:
        index, epoch = self._slot_of(name)
        if index is not None:
            self.slots[index] = SlotRecord("", epoch, lost)
            for tenure in self.tenures:
                if tenure.index == index:
                    tenure.until = min(tenure.until, at)
        return index, epoch

    def _take(self, caller: Process, name: str, session: str, index: int) -> int | None:
        if not self._is_member(name, session):
            return None
        own, held_under = self._slot_of(name)
        if own is not None:
            return held_under if own == index else 0
        runner = self.counts.runner if self.counts else 0
        slot = self.slots.get(index, SlotRecord("", 0, ""))
        if index >= runner or slot.holder or sum(bool(each.holder) for each in self.slots.values()) >= runner:
            return 0
        now = self._clock()
        epoch = self._last_epoch = next_epoch(self._last_epoch, int(now * 1e6))
        self.slots[index] = SlotRecord(name, epoch, "")
        self.tenures.append(Tenure(index, epoch, name, caller, now))
        self._record_event("took over" if slot.lost else "elected", name, index, epoch, slot.lost)
        return epoch

    def _retire(self, name: str, session: str, epoch: int) -> int:
        index, held_under = self._slot_of(name)
        if not self._is_member(name, session) or index is None or held_under != epoch:
            return 0
        self._vacate(name, self._clock(), lost="")
        self._record_event("retired", name, index, epoch)
        return 1

    # -- inspection

    def _scale(self, runner: int, backup: int) -> int:
        if self.counts is None:
            return 0
        self.counts = Counts(runner, backup)
        self._record_event("scaled", "", None, 0, f"runner {runner}, backup {backup}")
        return 1

    def _observe(self) -> Answer:
        return self.counts and self._view()

    def _view(self) -> Answer:
        counts = self.counts or Counts(0, 0)
        members = [word for name, each in self.members.items() for word in (name.encode(), msgpack.encode(each))]
        slots = [word for index, each in self.slots.items() for word in (b"%d" % index, msgpack.encode(each))]
        now = b"%.6f" % self._clock()
        return [now, self.last_event.encode(), counts.runner, counts.backup, members, slots]

    def _list_events(self, limit: int) -> Answer:
        return [
            [
                str(word).encode()
                for word in (
                    *(event.at, event.what, event.member),
                    *("" if event.slot is None else event.slot, event.epoch, event.detail),
                )
            ]
            for _, event in reversed(self.events[-limit:] if limit else [])
        ]


class CoordinatorServer:
    """Coordinates clusters. It may be away, restart, or lose its data."""

    def __init__(self, world: World) -> None:
        self.tenures: list[Tenure] = []
        """Of all slots, in the order in which they were taken."""
        self.lost_at: list[float] = []
        """When it lost its data, in the time of the loop."""
        self.is_away = False
        self.cut_off: set[Process] = set()
        """Processes whose calls do not arrive."""
        self._world = world
        self._clusters: dict[str, Cluster] = {}
        self._waiting: list[tuple[CoordinatorCall, str]] = []
        """Calls that wait for an event after a position."""

    def cluster(self, name: str) -> Cluster:
        """The cluster of that name."""
        return self._clusters.setdefault(name, Cluster(self._world.server.clock, self.tenures))

    # -- calls

    def receive(self, call: CoordinatorCall) -> None:
        """A call has arrived."""
        if self.is_away or call.caller in self.cut_off:
            return
        if call.step == "ping":
            call.finish(None)
        elif call.step == _FOLLOW:
            self._waiting.append((call, str(call.words[0])))
            self._world.loop.call_later(call.patience, self._end_wait, call)
        else:
            call.finish(self.cluster(call.cluster).execute(call.step, call.words, call.caller))
        for waiting, after in list(self._waiting):
            if _position(last := self.cluster(waiting.cluster).last_event) > _position(after):
                waiting.finish(last)
                self._waiting.remove((waiting, after))

    def _end_wait(self, call: CoordinatorCall) -> None:
        for waiting, after in list(self._waiting):
            if waiting is call:
                waiting.finish(after)
                self._waiting.remove((waiting, after))

    # -- faults

    def restart(self) -> None:
        """The process of the server is killed, and starts again with its data. Connections end."""
        waiting, self._waiting = self._waiting, []
        for call, _ in waiting:
            call.fail(StoreAwayError("the simulated coordinator closed the connection"))

    def lose_data(self) -> None:
        """The server starts again without its data."""
        self.restart()
        self.lost_at.append(self._world.loop.time())
        for cluster in self._clusters.values():
            cluster.forget()
        self._clusters.clear()


def _position(event: str) -> tuple[int, int]:
    milliseconds, number = event.split("-")
    return int(milliseconds), int(number)


class CoordinatorCall(NetworkCall[Answer]):
    """A call to the coordinator."""

    def __init__(self, world: World, timeout: float, step: str, cluster: str, words: tuple[Word, ...]) -> None:
        super().__init__(world, timeout)
        self.step = step
        self.cluster = cluster
        self.words = words
        self.patience = 0.8 * timeout
        """Seconds that the server waits for an event."""


class CoordinatorClient:
    """Replaces `shoal.clients.redis.RedisClient` in a simulated process."""

    def __init__(self, world: World, server: CoordinatorServer, address: RedisAddress) -> None:
        self.address = address
        self._world = world
        self._server = server
        self._is_closed = False

    async def ask(self, step: str, cluster: Word = "", *words: Word) -> Answer:
        """Send a call."""
        if self._is_closed:
            raise StoreError(f"the connection to {self.address.shown} is closed")
        call = CoordinatorCall(self._world, self.address.timeout, step, str(cluster), words)
        return await call.send(lambda: self._server.receive(call))

    async def run_script(self, folder: ScriptFolder, name: str, *arguments: Word) -> Answer:
        return await self.ask(name, *arguments)

    async def follow(self, stream: str, after: str) -> Answer:
        return await self.ask(_FOLLOW, stream.removeprefix("cluster:event:"), after)

    async def close(self) -> None:
        self._is_closed = True


@contextmanager
def coordinated(world: World, server: CoordinatorServer) -> Iterator[None]:
    """Have all Redis clients call this server."""

    async def connect(address: RedisAddress, *, warn: bool = True) -> RedisClient:
        client = CoordinatorClient(world, server, address)
        await client.ask("ping")
        return cast("RedisClient", client)

    with patch.object(RedisClient, "open", connect):
        yield
