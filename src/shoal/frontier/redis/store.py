"""Runs on a Redis server, shared by all workers of a fleet.

All keys of a store begin with a prefix in braces: ``{shoal}:``, or another with ``?prefix=name``. So several stores
can be on one server, and Redis Cluster keeps each store on one node. The keys, without the prefix:

- ``store``: the format, the last numbers of runs and hosts, the state of the clock. ``runs``: the number of each run.
- ``name``, ``host``: the number of each host, and its record.
- ``turns``: runs that share hosts; see ``lua/turns.lua``.
- ``lease``: all leases by expiry. ``grant:CLIENT``: the requests that a client's last call leased.
- ``document``, ``documents``: documents by key (size of the version, version, value), and their keys in order.
- ``fact:KEY``: facts that all runs share. ``deleted``: runs with keys that are still to be deleted.
  ``polls``: the next free moment for a poll of an idle client.
- ``run:N``: a run, its options and counters. ``run:N:req``: its requests by fingerprint, in every state.
- ``run:N:lane``: the lane of each host: its best ready requests, and its place: in ``run:N:open`` if the host is due,
  in ``run:N:later`` if it must wait, in ``run:N:full`` if the host has too many requests in flight. More ready requests
  are in ``run:N:q:HOST``, in order, and in ``run:N:p:HOST``, by priority.
- ``run:N:waiting``: requests that wait for another attempt.
- ``run:N:event``, ``run:N:dead``, ``run:N:kinds``: events of requests, reasons of dead ones, counts by kind.
  ``run:N:refused``: links that found the queue full, best first.
- ``run:N:role``, ``run:N:claim``, ``run:N:items``: roles, the last claim of each role, and the item log.
- ``run:N:sent``: leases that no worker has begun yet.
- ``run:N:stage:TOKEN``, ``run:N:stages``: links of very large pages on their way into the queue.
- ``run:N:rewinds``: rewinds of the store that clients noticed.
- ``run:N:slot``, ``run:N:role_slot``, ``run:N:fence``: leases and roles held by workers or under slots of clusters, and
  the epoch before which a slot gets nothing. ``run:N:worker``: workers that send heartbeats; ``beat``, ``heard``: when
  each of them is late, and when heartbeats of any arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar, get_args

import msgspec

from shoal.clients.redis import Answer, RedisAddress, RedisClient, Word, storable_bytes
from shoal.errors import StoreError, StoreFullError
from shoal.frontier.redis.frontier import RedisFrontier
from shoal.frontier.redis.records import FORMAT as FORMAT
from shoal.frontier.redis.records import FrontierScripts, document_words, pack_options, read_document
from shoal.frontier.rules import moved, no_run, read_run, readable_runs, run_exists, unreadable_run
from shoal.ports import Document, FrontierOptions, Holder, Room, Run, RunState

_READABLE = frozenset({5, 6})
"""Older formats whose records this version reads. 5: all records of hosts are long. 6: runs have fewer counters, and
each has its own times of heartbeats."""

_FREED_AFTER = 0.2  # seconds
_FIELDS = ("run_id", "spider", "state", "created_at", "project", "ended_at", "settings")
_MAX_DIGITS = 18
_LAST = "\U0010ffff".encode()  # sorts after every printable character
_STATES: dict[bytes, RunState] = {state.encode(): state for state in get_args(RunState)}
_DEFAULTS = pack_options(FrontierOptions())
_encode = msgspec.msgpack.Encoder().encode


class RedisStore:
    """Runs, their frontiers and documents on a server. The runs share politeness to hosts."""

    shared: ClassVar[bool] = True

    def __init__(self, scripts: FrontierScripts) -> None:
        self._scripts = scripts

    @classmethod
    async def open(cls, url: str, *, offset: Callable[[], float] = lambda: 0.0) -> RedisStore:
        """Connect to the server. StoreAwayError if it cannot be reached now, StoreError if it cannot be used.

        ``offset``: seconds to add to the server's clock, for tests.
        """
        client = await RedisClient.open(RedisAddress.parse(url))
        store = cls(FrontierScripts(client, offset))
        try:
            await store._check_format()
        except BaseException:
            await client.close()
            raise
        return store

    async def _check_format(self) -> None:
        stored = await self._run("value", "HGET", "store", "format")
        where = self._scripts.client.address.shown
        try:
            version = int((stored or b"%d" % FORMAT)[:_MAX_DIGITS])
        except ValueError as exc:
            raise StoreError(
                f"the data at {where} has no valid format ({stored[:_MAX_DIGITS]!r}): another program has changed it; "
                "use another prefix with ?prefix=name"
            ) from exc
        if version in _READABLE:
            leased, live = await self._run("upgrade", version, FORMAT)
            if leased or live:
                raise StoreError(
                    f"an older Shoal (format {version}, this one uses {FORMAT}) works on the data at {where}; requests "
                    f"that it has leased: {leased}, workers that send heartbeats: {live}. Stop its workers, or wait "
                    "until their leases and sessions end, and try again; or use another prefix with ?prefix=name"
                )
        elif version > FORMAT:
            raise StoreError(
                f"the data at {where} was written by a newer Shoal (format {version}, this one knows {FORMAT}); "
                "upgrade, or use another prefix with ?prefix=name"
            )
        elif version < FORMAT:
            raise StoreError(
                f"the data at {where} was written by an older Shoal (format {version}, this one knows {FORMAT}). "
                "Finish its runs with that version, and export their items; meanwhile use another prefix for new runs, "
                "with ?prefix=name"
            )

    async def _run(self, step: str, *arguments: Word, run: int | None = None) -> Answer:
        return await self._scripts.run(step, b"" if run is None else b"%d" % run, _DEFAULTS, *arguments)

    async def create_run(self, run: Run) -> Run:
        if not await self._run("create", *_run_words(run)):
            raise run_exists(run.run_id)
        return run

    async def transition(self, run_id: str, state: RunState, *, among: Sequence[RunState] | None = None) -> Run:
        while True:
            number, run = await self._find_existing(run_id)
            changed = moved(run, state, among)
            if await self._run("transition", run.state, state, _time_word(changed.ended_at), run=number):
                return changed

    async def get_run(self, run_id: str) -> Run | None:
        numbered = await self._find(run_id)
        return numbered[1] if numbered else None

    async def run_state(self, run_id: str) -> RunState | None:
        rows = await self._run("runs", storable_bytes(run_id), "state")
        if rows and rows[0][1] not in _STATES:
            raise unreadable_run(run_id, ValueError(f"its state is {rows[0][1]!r}"))
        return _STATES[rows[0][1]] if rows else None

    async def run_states(self, spider: str, project: str | None = None) -> dict[str, RunState]:
        runs = await self._run("runs", b"", "run_id", "spider", "project", "state")
        wanted = storable_bytes(spider), None if project is None else storable_bytes(project)
        mine = [row for row in reversed(runs) if row[2] == wanted[0] and wanted[1] in (None, row[3])]
        return {run_id.decode(errors="replace"): _STATES[state] for _, run_id, _, _, state in mine if state in _STATES}

    async def _find(self, run_id: str) -> tuple[int, Run] | None:
        """The number of the run, as in its keys, and the run."""
        rows = await self._run("runs", storable_bytes(run_id), *_FIELDS)
        return _run_of(rows[0]) if rows else None

    async def _find_existing(self, run_id: str) -> tuple[int, Run]:
        """The same. RunError if there is no such run."""
        if (numbered := await self._find(run_id)) is None:
            raise no_run(run_id)
        return numbered

    async def list_runs(
        self,
        spider: str | None = None,
        project: str | None = None,
        *,
        states: Sequence[RunState] | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        filters = [b"" if name is None else storable_bytes(name) for name in (spider, project)]
        rows = await self._run("list", *filters, " ".join(states or ()), -1 if limit is None else limit, *_FIELDS)
        return readable_runs(rows if states is None or states else (), lambda row: _run_of(row)[1])

    async def delete_run(self, run_id: str) -> None:
        rows = await self._run("runs", storable_bytes(run_id), "run_id")
        if rows:
            await self._delete_documents(run_id)
            try:
                await self._run("delete", run=rows[0][0])
            except StoreFullError:  # it has made room, which Redis frees in the background
                await asyncio.sleep(_FREED_AFTER)
                await self._run("delete", run=rows[0][0])
        deleted = await self._run("value", "HGETALL", "deleted")  # also runs whose deletion was interrupted
        if not rows and storable_bytes(run_id) not in deleted[1::2]:
            raise no_run(run_id)
        for number in deleted[::2]:
            cursor: bytes | None = b"0"
            while cursor is not None:
                cursor = await self._run("sweep", number, cursor)

    async def _delete_documents(self, run_id: str) -> None:
        while documents := await self.list_documents(f"run/{run_id}/"):
            for document in documents:
                await self.put_document(document.key, None, replaces=document.version, version=bytes(8))

    async def get_document(self, key: str) -> Document | None:
        record = await self._run("value", "HGET", "document", key.encode())
        return read_document(key.encode(), record) if record else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        first = b"(" + after.encode() if after >= prefix else b"[" + prefix.encode()
        rows = await self._run("documents", first, b"(" + prefix.encode() + _LAST, limit)
        return [read_document(*row) for row in zip(rows[::2], rows[1::2], strict=True)]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        created = () if run is None else _run_words(run)
        return bool(await self._run("document", *document_words(key, value, replaces, version), *created))

    async def room(self) -> Room | None:
        """That of the server, which may have other data too. Without ``maxmemory``, it may use the whole machine."""
        info = dict(line.split(b":", 1) for line in (await self._run("room")).split() if b":" in line)
        total = int(info.get(b"maxmemory", 0)) or int(info.get(b"total_system_memory", 0))
        if self._scripts.client.was_full:
            return Room(total, total)
        used = int(info.get(b"used_memory", 0)) - int(info.get(b"mem_not_counted_for_evict", 0))
        return Room(used, total) if total else None

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> RedisFrontier:
        number, _ = await self._find_existing(run_id)
        frontier = RedisFrontier(self._scripts, run_id, number, options, holder)
        await frontier.join()
        return frontier

    async def close(self) -> None:
        """Close the connections. Leases that were not released expire."""
        await self._scripts.client.close()


def _run_words(run: Run) -> tuple[Word, ...]:
    """A run as arguments of ``create_run`` in Lua."""
    return (
        FORMAT, storable_bytes(run.run_id), "spider", storable_bytes(run.spider), "state", run.state,
        "created_at", repr(run.created_at), "settings", _encode(run.settings),
        "project", storable_bytes(run.project), "ended_at", _time_word(run.ended_at),
    )  # fmt: skip


def _time_word(at: float | None) -> str:
    return "" if at is None else repr(at)


def _run_of(row: list[Answer]) -> tuple[int, Run]:
    number, run_id, *texts, settings = row
    try:
        name, spider, state, created_at, project, ended_at = (text.decode() for text in (run_id, *texts))
        moments = float(created_at), float(ended_at) if ended_at else None
    except (AttributeError, ValueError) as exc:
        raise unreadable_run(run_id, exc) from exc
    return number, read_run(name, spider, state, moments[0], settings or b"", project, moments[1])
