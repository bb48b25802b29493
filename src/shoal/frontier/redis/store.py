"""Runs on a Redis server: shared by all workers of a fleet.

All keys of a store begin with a prefix in braces (``{shoal}:`` unless the URL says ``?prefix=name``), so that several
stores can be on one server, and a cluster keeps each store in one place. Behind it:

- ``store``: the format, the last number that a run and a host got, what is known of the clock. ``runs``: the number of
  each run.
- ``name``, ``host``: the number of each host, and what is known of it.
- ``lease``: all leases, by when they run out.
- ``fact:KEY``: what is remembered for all. ``deleted``: runs of which something is left to delete.
  ``polls``: until when callers who got nothing were told to wait.
- ``run:N``: a run, its options and counters. ``run:N:req``: its requests by fingerprint, in every state.
- ``run:N:q:HOST``: those that are ready on a host, best first. ``run:N:waiting``: those that wait for another attempt.
- ``run:N:lane``: where each of its hosts stands: in ``run:N:open`` if it is due, in ``run:N:later`` if it has to wait,
  in ``run:N:full`` if the host has no room.
- ``run:N:event``, ``run:N:dead``, ``run:N:kinds``: what happened to a request, why it is dead, how many are by kind.
- ``run:N:role``, ``run:N:items``: its roles, and its item log.
- ``run:N:sent``: leases that nobody has begun yet. ``grant:CLIENT``: what a client's last call leased.
- ``run:N:stage:TOKEN``, ``run:N:stages``: links of pages with very many, on their way into the queue.
- ``run:N:rewinds``: when clients found that the store had gone back in time.
- ``run:N:slot``, ``run:N:role_slot``, ``run:N:fence``: what was leased and claimed under slots of clusters, and the
  epoch before which each slot gets nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import msgspec

from shoal.errors import RunError, StoreError
from shoal.frontier.redis.address import parse_url
from shoal.frontier.redis.frontier import RedisFrontier
from shoal.frontier.redis.records import pack_options, storable
from shoal.frontier.redis.server import Server
from shoal.frontier.rules import check_transition
from shoal.ports import FrontierOptions, Holder, Run, RunState

FORMAT = 2
"""Of what is stored; another one is not touched."""

_DEFAULTS = pack_options(FrontierOptions())
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class RedisStore:
    """Runs and their frontiers on a server, with the politeness that they share."""

    shared: ClassVar[bool] = True

    def __init__(self, server: Server) -> None:
        self._server = server

    @classmethod
    async def open(cls, url: str, *, offset: Callable[[], float] = lambda: 0.0) -> RedisStore:
        """StoreAwayError if the server can't be reached now, StoreError if it can't be used.

        ``offset`` is for tests: how many seconds the server's clock is to be ahead of itself.
        """
        server = await Server.open(parse_url(url), offset=offset)
        store = cls(server)
        try:
            await store._check_format()
        except BaseException:
            await server.close()
            raise
        return store

    async def _check_format(self) -> None:
        found = await self._run("format")
        if found and int(found) != FORMAT:
            age, advice = (
                ("newer", "upgrade") if int(found) > FORMAT else ("older", "finish its runs with that version")
            )
            raise StoreError(
                f"what is at {self._server.address.shown} was written by a {age} Shoal (format {int(found)}, this one "
                f"knows {FORMAT}); {advice}, or choose another place with ?prefix=name"
            )

    async def _run(self, step: str, *arguments: Any, run: int | None = None) -> Any:
        return await self._server.run(step, b"" if run is None else b"%d" % run, _DEFAULTS, *arguments)

    async def create_run(self, run: Run) -> Run:
        made = await self._run(
            "create", FORMAT, storable(run.run_id), "spider", storable(run.spider), "state", run.state,
            "created_at", repr(run.created_at), "settings", _encode(run.settings),
        )  # fmt: skip
        if not made:
            raise RunError(f"there is a run {run.run_id} already")
        return run

    async def transition(self, run_id: str, state: RunState) -> Run:
        while True:
            found = await self._find(run_id)
            check_transition(run_id, found[1] if found else None, state)
            assert found is not None
            number, run = found
            if await self._run("transition", run.state, state, run=number):
                return msgspec.structs.replace(run, state=state)

    async def get_run(self, run_id: str) -> Run | None:
        found = await self._find(run_id)
        return found[1] if found else None

    async def run_state(self, run_id: str) -> RunState | None:
        found = await self._run("run_state", storable(run_id))
        return cast("RunState", found.decode()) if found else None

    async def run_states(self, spider: str) -> dict[str, RunState]:
        found = [each.decode() for each in await self._run("run_states", storable(spider))]
        return dict(zip(found[::2], cast("list[RunState]", found[1::2]), strict=True))

    async def _find(self, run_id: str) -> tuple[int, Run] | None:
        """The run, and the number that its keys are named by."""
        rows = await self._run("runs", storable(run_id))
        return _run_of(rows[0]) if rows else None

    async def list_runs(self, spider: str | None = None) -> list[Run]:
        runs = [_run_of(row)[1] for row in await self._run("runs")]
        return [run for run in runs if spider is None or run.spider == spider]

    async def delete_run(self, run_id: str) -> None:
        found = await self._find(run_id)
        if found is not None:
            await self._run("delete", run=found[0])
        left = await self._run("deleted")  # also of a call that was interrupted
        if found is None and storable(run_id) not in left[1::2]:
            raise RunError(f"there is no run {run_id}")
        for number in left[::2]:
            cursor: bytes | None = b"0"
            while cursor is not None:
                cursor = await self._run("sweep", number, cursor)

    async def frontier(self, run_id: str, options: FrontierOptions, holder: Holder | None = None) -> RedisFrontier:
        found = await self._find(run_id)
        if found is None:
            raise RunError(f"there is no run {run_id}")
        return RedisFrontier(self._server, run_id, found[0], options, holder)

    async def close(self) -> None:
        """Leases that are still out end when their time is over."""
        await self._server.close()


def _run_of(row: list[Any]) -> tuple[int, Run]:
    number, run_id, *texts, settings = row
    try:
        spider, state, created_at = (text.decode() for text in texts)
        run = Run(
            run_id=run_id.decode(), spider=spider, state=state, created_at=float(created_at), settings=_decode(settings)
        )
    except (AttributeError, TypeError, ValueError, msgspec.MsgspecError) as exc:
        raise StoreError(f"run {run_id!r} can't be read ({exc}): something else has changed it") from exc
    return number, run
