"""The coordinator of a cluster on a Redis server, beside the frontier or in another place.

Each call is one script in ``lua/``, which Redis runs atomically and by its own clock. The server may lose its data:
then all members are lost and join again. Epochs still grow, as they follow the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import msgspec

from shoal.clients.redis import Answer, RedisAddress, RedisClient, ScriptFolder, Word, storable_bytes
from shoal.errors import DECODING_ERRORS, CoordinatorError, SessionLostError
from shoal.ports import ClusterEvent, ClusterStep, ClusterView, Counts, Member, Slot
from shoal.runs.cluster import call_timeout, coordinator_errors, membership_lost, name_taken, unknown_cluster
from shoal.system import chance, clock

_SCRIPTS = ScriptFolder("shoal.runs.cluster", ("base",))
_STREAM_START = "0-0"
_CLOSE_TIMEOUT = 1.0
"""Seconds that ``close`` waits for the end of a call."""


class MemberRecord(msgspec.Struct, array_like=True):
    """A member as the scripts pack it."""

    session: str
    ttl: float
    where: str
    doing: str
    fit: int
    last_heartbeat: float


class SlotRecord(msgspec.Struct, array_like=True):
    """A slot as the scripts pack it."""

    holder: str
    epoch: int
    lost: str


_decode_member = msgspec.msgpack.Decoder(MemberRecord).decode
_decode_slot = msgspec.msgpack.Decoder(SlotRecord).decode


class RedisCoordinator:
    """See `shoal.ports.Coordinator`."""

    def __init__(self, server: RedisClient, cluster: str, ttl: float) -> None:
        self.ttl = ttl
        self._server = server
        self._cluster = storable_bytes(cluster).decode()
        self._name = ""
        self._session = ""
        """Proves that the member of that name is this one. Empty: this is not a member."""
        self._epoch = 0
        """The epoch of the last slot that this member knows it held."""
        self._seen = _STREAM_START
        """The last event before the view that this client has seen."""
        self._follower: asyncio.Task[str] | None = None

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> RedisCoordinator:
        """Connect. CoordinatorError if the server cannot be used, CoordinatorAwayError if it cannot be reached."""
        with coordinator_errors():
            address = RedisAddress.parse(url)
            address = address._replace(timeout=min(address.timeout, call_timeout(ttl)))
            return cls(await RedisClient.open(address, warn=False), cluster, ttl)

    async def _run(self, step: str, *arguments: Word) -> Answer:
        with coordinator_errors():
            return await self._server.run_script(_SCRIPTS, step, self._cluster, *arguments)

    async def _run_as_member(self, step: str, *arguments: Word) -> Answer:
        """Run a script as this member. None if this is not a member any more."""
        if not self._session:
            return None
        return await self._run(step, storable_bytes(self._name), self._session, *arguments)

    # -- members

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        if name != self._name or not self._session:  # else this is a retry: the first call may have succeeded
            self._name, self._session = name, chance.token_hex(8)
        joined = await self._run_as_member(
            "join", self.ttl, storable_bytes(where), counts.runner, counts.backup, int(again)
        )
        if not joined:
            self._session = ""
            raise name_taken(self._cluster, name)

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        answer = await self._run_as_member("beat", storable_bytes(doing), int(fit))
        if answer is None:
            raise self._lost()
        return self._view(answer)

    async def leave(self) -> None:
        await self._run_as_member("leave")
        self._session = ""

    def _lost(self) -> SessionLostError:
        self._session = ""
        return membership_lost(self._cluster, self._name, self.ttl)

    # -- slots

    async def take(self, index: int) -> int | None:
        epoch: int | None = await self._run_as_member("take", index)
        if epoch is None:
            raise self._lost()
        self._epoch = epoch or self._epoch
        return epoch or None

    async def retire(self) -> None:
        await self._run_as_member("retire", self._epoch)

    async def scale(self, counts: Counts) -> None:
        if not await self._run("scale", counts.runner, counts.backup):
            raise self._unknown()

    # -- inspection

    async def observe(self) -> ClusterView:
        answer = await self._run("observe")
        if answer is None:
            raise self._unknown()
        return self._view(answer)

    def _view(self, answer: list[Answer]) -> ClusterView:
        clock, last, runner, backup, members, slots = answer
        now = float(clock)
        try:
            living = {_text(name): _decode_member(record) for name, record in _pairs(members)}
            held = {int(index): _decode_slot(record) for index, record in _pairs(slots)}
        except (ValueError, *DECODING_ERRORS) as exc:
            where = self._server.address.shown
            raise CoordinatorError(
                f"cannot read the cluster {self._cluster} at {where} ({exc}): another program has changed it"
            ) from exc
        self._seen = last.decode()
        self._epoch = next((slot.epoch for slot in held.values() if slot.holder == self._name), self._epoch)
        return ClusterView(
            counts=Counts(runner, backup),
            members=tuple(
                Member(
                    name=name,
                    age=max(0.0, now - member.last_heartbeat),
                    fit=bool(member.fit),
                    doing=member.doing,
                    where=member.where,
                )
                for name, member in sorted(living.items())
            ),
            slots=tuple(Slot(index, slot.holder, slot.epoch) for index, slot in sorted(held.items())),
        )

    def _unknown(self) -> CoordinatorError:
        return unknown_cluster(self._server.address.shown, self._cluster)

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        rows = await self._run("events", max(0, limit))
        return [
            ClusterEvent(
                at=float(at),
                what=cast(ClusterStep, _text(what)),
                member=_text(member),
                slot=int(slot) if slot else None,
                epoch=int(epoch),
                detail=_text(detail),
            )
            for at, what, member, slot, epoch, detail in reversed(rows)
        ]

    # -- waiting

    async def wait(self, seconds: float) -> None:
        """Wait for a change since the last view of the cluster. When the time is over, the call to the server stays
        open, and the next ``wait`` continues with it."""
        until = clock.monotonic() + seconds
        while (seconds_left := until - clock.monotonic()) > 0:
            follower = self._follower = self._follower or self._follow()
            if not (await asyncio.wait({follower}, timeout=seconds_left))[0]:
                return
            if self._follower is follower:
                self._follower = None
            if follower.cancelled():  # by close()
                return
            with coordinator_errors():
                last = follower.result()
            if _position(last) > _position(self._seen):
                self._seen = last
                return

    def _follow(self) -> asyncio.Task[str]:
        stream = f"cluster:event:{self._cluster}"
        task = asyncio.create_task(self._server.follow(stream, self._seen))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller may be gone
        return task

    async def close(self) -> None:
        """Disconnect. A member that has not left is lost when its session ends."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower}, timeout=_CLOSE_TIMEOUT)
        await self._server.close()


def _pairs(fields: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a hash and their values."""
    return zip(fields[::2], fields[1::2], strict=True)


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _position(event: str) -> tuple[int, int]:
    """The position of an entry in its stream."""
    milliseconds, number = event.split("-")
    return int(milliseconds), int(number)
