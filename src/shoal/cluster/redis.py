"""The coordinator of a cluster on a Redis server, beside the frontier or anywhere else.

Each call is one script in ``lua/``, which Redis runs alone and whole, by its own clock. It needs nothing that outlives
the server: one that comes back empty has lost all members, they join again, and epochs go on as they follow the time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from shoal.cluster import call_timeout
from shoal.errors import (
    CoordinatorAwayError,
    CoordinatorError,
    FrontierError,
    NameTakenError,
    SessionLostError,
    StoreAwayError,
)
from shoal.frontier.redis.address import parse_url
from shoal.frontier.redis.records import storable
from shoal.frontier.redis.server import Scripts, Server
from shoal.ports import ClusterEvent, ClusterStep, ClusterView, Counts, Member, Slot

_SCRIPTS = Scripts("shoal.cluster", ("base",))
_NOTHING_YET = "0-0"
_GRACE = 1.0
"""Seconds that closing waits for a question to the server to be given up."""


class _Member(msgspec.Struct, array_like=True):
    """As the scripts pack it."""

    session: str
    ttl: float
    where: str
    doing: str
    fit: int
    heard: float


class _Slot(msgspec.Struct, array_like=True):
    """As the scripts pack it."""

    holder: str
    epoch: int
    lost: str


_decode_member = msgspec.msgpack.Decoder(_Member).decode
_decode_slot = msgspec.msgpack.Decoder(_Slot).decode


class RedisCoordinator:
    """See `shoal.ports.Coordinator`."""

    def __init__(self, server: Server, cluster: str, ttl: float) -> None:
        self.ttl = ttl
        self._server = server
        self._cluster = storable(cluster).decode()
        self._name = ""
        self._session = ""
        """What proves that the member of that name is this one; nothing for one who is no member."""
        self._epoch = 0
        """Of the slot that it last knew to be its own."""
        self._seen = _NOTHING_YET
        """The last event that came before what was seen of the cluster."""
        self._news: asyncio.Task[str] | None = None

    @classmethod
    async def open(cls, url: str, cluster: str, ttl: float) -> RedisCoordinator:
        """CoordinatorError if the server can't be used, CoordinatorAwayError if it can't be reached."""
        with _errors():
            address = parse_url(url)
            address = address._replace(timeout=min(address.timeout, call_timeout(ttl)))
            return cls(await Server.open(address, warns=False), cluster, ttl)

    async def _run(self, step: str, *arguments: Any) -> Any:
        with _errors():
            return await self._server.run_script(_SCRIPTS, step, self._cluster, *arguments)

    async def _run_as_member(self, step: str, *arguments: Any) -> Any:
        """None when this one is no member any more."""
        if not self._session:
            return None
        return await self._run(step, storable(self._name), self._session, *arguments)

    # -- members

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        if name != self._name or not self._session:  # else it is repeated: it may have happened
            self._name, self._session = name, secrets.token_hex(8)
        joined = await self._run_as_member("join", self.ttl, storable(where), counts.runner, counts.backup, int(again))
        if not joined:
            self._session = ""
            raise NameTakenError(f"a member named {name} lives in the cluster {self._cluster}; choose another name")

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        answer = await self._run_as_member("beat", storable(doing), int(fit))
        if answer is None:
            raise self._lost()
        return self._view(answer)

    async def leave(self) -> None:
        await self._run_as_member("leave")
        self._session = ""

    def _lost(self) -> SessionLostError:
        self._session = ""
        return SessionLostError(f"{self._name or 'this'} is no member of the cluster {self._cluster} any more")

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

    # -- looking at it

    async def look(self) -> ClusterView:
        answer = await self._run("look")
        if answer is None:
            raise self._unknown()
        return self._view(answer)

    def _view(self, answer: list[Any]) -> ClusterView:
        clock, last, runner, backup, members, slots = answer
        now = float(clock)
        try:
            living = {_text(name): _decode_member(record) for name, record in _pairs(members)}
            held = {int(index): _decode_slot(record) for index, record in _pairs(slots)}
        except (msgspec.MsgspecError, ValueError) as exc:
            where = self._server.address.shown
            raise CoordinatorError(f"the cluster {self._cluster} at {where} can't be read ({exc})") from exc
        self._seen = last.decode()
        self._epoch = next((it.epoch for it in held.values() if it.holder == self._name), self._epoch)
        return ClusterView(
            counts=Counts(runner, backup),
            members=tuple(
                Member(name=name, age=max(0.0, now - it.heard), fit=bool(it.fit), doing=it.doing, where=it.where)
                for name, it in sorted(living.items())
            ),
            slots=tuple(Slot(index, it.holder, it.epoch) for index, it in sorted(held.items())),
        )

    def _unknown(self) -> CoordinatorError:
        return CoordinatorError(f"{self._server.address.shown} knows no cluster {self._cluster}")

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        rows = await self._run("events", max(0, limit))
        return [
            ClusterEvent(
                at=float(at), what=cast(ClusterStep, _text(what)), member=_text(member),
                slot=int(slot) if slot else None, epoch=int(epoch), detail=_text(detail),
            )
            for at, what, member, slot, epoch, detail in reversed(rows)
        ]  # fmt: skip

    # -- waiting

    async def wait(self, seconds: float) -> None:
        """What happened since the cluster was last looked at counts. Whoever gives up waiting leaves the question with
        the server, and the next one waits for the same answer."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            news = self._news = self._news or self._ask_for_news()
            if not (await asyncio.wait({news}, timeout=left))[0]:
                return
            if self._news is news:
                self._news = None
            if news.cancelled():  # it was closed
                return
            with _errors():
                last = news.result()
            if _place(last) > _place(self._seen):
                self._seen = last
                return

    def _ask_for_news(self) -> asyncio.Task[str]:
        stream = f"cluster:event:{self._cluster}"
        asked = asyncio.create_task(self._server.follow(stream, self._seen))
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits any more
        return asked

    async def close(self) -> None:
        """A member that has not left is lost when its time is over."""
        if self._news is not None:
            self._news.cancel()
            await asyncio.wait({self._news}, timeout=_GRACE)
        await self._server.close()


@contextmanager
def _errors() -> Iterator[None]:
    """What went wrong on the way to the server is the coordinator's error here."""
    try:
        yield
    except StoreAwayError as exc:
        raise CoordinatorAwayError(str(exc)) from exc
    except FrontierError as exc:
        raise CoordinatorError(str(exc)) from exc


def _pairs(fields: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """A hash as Redis tells it."""
    return zip(fields[::2], fields[1::2], strict=True)


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _place(event: str) -> tuple[int, int]:
    """Where an entry stands in its stream."""
    milliseconds, number = event.split("-")
    return int(milliseconds), int(number)
