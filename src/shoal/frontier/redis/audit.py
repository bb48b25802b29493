"""Faults of a run on Redis, and their repair.

Each script is one atomic step, and checks requests against what leads to them within that step. So nothing that workers
do meanwhile looks like a fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import isfinite
from struct import Struct

import msgspec

from shoal.frontier.faults import compare_counters, describe_losses, make_faults
from shoal.frontier.redis.layouts import COUNTERS, FORMAT
from shoal.frontier.rules import STATE_NAMES
from shoal.ports import REPAIRED_LEASE, Stats
from shoal.stores.redis.client import Answer

AUDIT_LIMIT = 200_000
"""Requests that one call counts, so that the count is exact while others work. It takes about a tenth of a second."""
_STEP = 20_000
_LANES = 20_000
"""Hosts that one call checks."""
_ITEMS = 500
_DEEP_STEP = 2_000
"""Requests that one call looks for in their lanes."""
_TRIES = 3
_LEDGER = Struct(f"<{2 + len(COUNTERS)}d")
"""As in ``lua/base.lua``."""
_TEXTS = frozenset({"run", "store", "roles", "items"})
"""Kinds whose examples are texts."""
_COUNTED = frozenset({"counters", "failures", "items", "links", "requests"})
"""Kinds that a wrong counter may cause."""
_HOST_SIZE, _FINGERPRINT_SIZE = 4, 16

Found = dict[str, tuple[int, bytes]]
"""Count and example of faults, by kind."""


class RedisAudit:
    """Audits and repairs a run. ``run`` runs one of its scripts, ``urls`` returns the URLs of requests."""

    def __init__(
        self, run: Callable[..., Awaitable[Answer]], urls: Callable[[Sequence[bytes]], Awaitable[list[str]]]
    ) -> None:
        self._run = run
        self._urls = urls

    async def audit(self, stats: Stats) -> Stats:
        lanes, lost = await self._check_lanes()
        counted, requests, compared = await self._check_requests(stats)
        items = await self._check_items()
        if lost:
            lanes["ready"] = max(lost, lanes.get("ready", (0, b""))[0]), await self._find_lost()
        named = [
            (kind, count, await self._name(kind, example))
            for part in (lanes, requests, items)
            for kind, (count, example) in part.items()
        ]
        return msgspec.structs.replace(counted, faults=make_faults((*named, *compared)))

    async def repair(self, stats: Stats) -> list[str]:
        """Returns what is lost. Each step leaves what it found intact, so workers may go on, and a repair that was
        interrupted may begin again. Counters are counted in one step, so only if they are wrong."""
        lost = await self._repair("store", b"0")
        for act in ("requests", "lanes"):
            await self._repair_all(act)
        if any(fault.kind in _COUNTED for fault in (await self.audit(stats)).faults):
            await self._repair_all("counters")
        names = [word.decode(errors="replace") for word in lost]
        return describe_losses(zip(names[::2], names[1::2], strict=True))

    async def _repair_all(self, act: str) -> None:
        cursor = b"0"
        while True:
            cursor = await self._repair(act, cursor)
            if cursor == b"0":
                break

    async def _repair(self, act: str, cursor: bytes) -> Answer:
        return await self._run("repair", act, FORMAT, REPAIRED_LEASE, cursor, _DEEP_STEP)

    async def _check_lanes(self) -> tuple[Found, int]:
        """The faults of everything but the requests, and how many ready requests the lanes lack."""
        found: Found = {}
        for _ in range(_TRIES):
            found, ready, cursor, ledgers = {}, 0, b"0", set()
            while True:
                cursor, ledger, queued, faults = await self._run("audit_lanes", cursor, _LANES)
                ready += queued
                ledgers.add(ledger)
                _add(found, faults)
                if cursor == b"0":
                    break
            if len(ledgers) == 1:  # else the number of ready requests has changed meanwhile
                return found, max(0, _read_ledger(ledgers.pop())["ready"] - ready)
        return found, 0

    async def _check_requests(self, stats: Stats) -> tuple[Stats, Found, list[tuple[str, int, str]]]:
        """The recounted stats, the faults of requests, and those of counters."""
        step = AUDIT_LIMIT if stats.pushed <= AUDIT_LIMIT else _STEP
        found: Found = {}
        for _ in range(_TRIES):
            found, counts, cursor, ledgers = {}, [0] * len(STATE_NAMES), b"0", set()
            while True:
                cursor, ledger, some, faults = await self._run("audit", cursor, step, 0)
                counts = [before + more for before, more in zip(counts, some, strict=True)]
                ledgers.add(ledger)
                _add(found, faults)
                if cursor == b"0":
                    break
            if len(ledgers) > 1:
                continue
            stored = msgspec.structs.replace(stats, **_read_ledger(ledgers.pop()))
            counted = msgspec.structs.replace(stored, **dict(zip(STATE_NAMES, counts, strict=True)))
            readable = sum(counts) + found.get("unreadable", (0, b""))[0]
            if counted == stored or step == AUDIT_LIMIT:
                return counted, found, compare_counters(stored, counted, readable)
        return await self._read_stats(stats), found, []

    async def _read_stats(self, stats: Stats) -> Stats:
        *counters, _, _ = await self._run("stats")
        return msgspec.structs.replace(stats, **dict(zip(COUNTERS, counters, strict=True)))

    async def _find_lost(self) -> bytes:
        """The fingerprint of a ready request that is in no lane."""
        cursor = b"0"
        while True:
            cursor, _, _, faults = await self._run("audit", cursor, _DEEP_STEP, 1)
            found: Found = {}
            _add(found, faults)
            if "ready" in found:
                return found["ready"][1]
            if cursor == b"0":
                return b""

    async def _check_items(self) -> Found:
        found: Found = {}
        at: Answer = 0
        while at != b"":
            at, faults = await self._run("audit_items", at, _ITEMS)
            _add(found, faults)
        return found

    async def _name(self, kind: str, example: bytes) -> str:
        """The example of a fault for people: the URL of a fingerprint, the name of a host."""
        if kind in _TEXTS or len(example) not in (_HOST_SIZE, _FINGERPRINT_SIZE):
            return example.decode(errors="replace")
        if len(example) == _HOST_SIZE:
            return (await self._run("host_name", example) or b"").decode(errors="replace")
        (url,) = await self._urls([example])
        return url


def _add(found: Found, faults: Sequence[Answer]) -> None:
    """Add the faults of a script: kind, count, example, ..."""
    for kind, count, example in zip(faults[::3], faults[1::3], faults[2::3], strict=True):
        before, first = found.get(kind.decode(), (0, b""))
        found[kind.decode()] = before + count, first or example


def _read_ledger(packed: bytes) -> dict[str, int]:
    """The counters of a run. Those that are missing are 0: an older version did not know the last ones. So are those
    that are no numbers."""
    values = _LEDGER.unpack_from(packed.ljust(_LEDGER.size, b"\0"))
    return dict(zip(COUNTERS, (int(value) if isfinite(value) else 0 for value in values[2:]), strict=True))
