"""Whatever is deleted from a store: an error says so, or an audit does, or nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.frontier.memory import MemoryStore
from shoal.frontier.memory.frontier import MemoryFrontier
from shoal.testing import FakeClock
from tests.contracts.damage import (
    DamagedPostgres,
    DamagedRedis,
    DamagedSQLite,
    DamagedStore,
    Piece,
    audit_all,
    fill,
    finish_all,
    repair_all,
    small_chunks,
)

_IN_MEMORY: dict[str, Callable[[MemoryFrontier], object]] = {
    "ready": lambda run: run._requests.lanes.by_name["a.example"].queue._bucket(0.0)._fresh.pop(),
    "lanes": lambda run: run._requests.lanes._due.clear(),
    "waiting": lambda run: run._queue._waiting.clear(),
    "leases": lambda run: run._queue._expiries.clear(),
    "in flight": lambda run: setattr(run._requests.lanes.by_name["c.example"].host, "in_flight", 0),
    "failures": lambda run: run._requests.deaths.clear(),
    "links": lambda run: run._stages._portions.clear(),
    "counters": lambda run: run._requests.counts.reverse(),
    "items": lambda run: run._queue._items._items.pop(),
}
"""What can be lost in memory, and the kind of fault that it is."""
STORES: dict[str, Callable[[Path], DamagedStore]] = {
    "sqlite": DamagedSQLite,
    "redis": DamagedRedis,
    "postgresql": DamagedPostgres,
}
_OF_A_KIND = 2


@pytest.fixture(params=STORES)
async def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> DamagedStore:
    store = STORES[request.param](tmp_path)
    await store.fill()
    return store


def sample(pieces: list[Piece], thorough: bool) -> list[Piece]:
    """Some of each kind: the first, and the last."""
    kinds: dict[str, list[Piece]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    return pieces if thorough else [piece for some in kinds.values() for piece in {some[0], some[-1]}]


@pytest.mark.parametrize("kind", _IN_MEMORY)
async def test_a_fault_in_memory_is_found(kind: str) -> None:
    store = MemoryStore(clock=FakeClock())
    with small_chunks():
        expected = await fill(store)
    assert await audit_all(store, expected) == []
    _IN_MEMORY[kind](store._frontiers["run"])
    assert kind in {fault.kind for fault in await audit_all(store, expected)}


async def judge(damaged: DamagedStore) -> tuple[str, str]:
    """What a store with a missing piece does: an error, a fault, or harmless."""
    try:
        async with damaged.opened(readonly=True) as store:
            if faults := await audit_all(store, damaged.expected):
                return "fault", "; ".join(fault.what for fault in faults)
        async with damaged.opened() as store:
            await finish_all(store, damaged.expected, damaged.clock)
            return "harmless", ""
    except ShoalError as exc:
        return "error", str(exc)


@pytest.mark.timeout(600)
async def test_nothing_is_lost_in_silence(damaged: DamagedStore, thorough: bool) -> None:
    silent, verdicts = [], Counter[str]()
    for piece in sample(await damaged.pieces(), thorough):
        await damaged.delete(piece)
        try:
            verdict, said = await judge(damaged)
        except Exception as exc:
            verdict, said = "SILENT", f"{type(exc).__name__}: {exc}"
            silent.append(f"{piece.kind} | {piece.name}: {said}")
        verdicts[verdict] += 1
        print(f"{verdict:<9} {piece.kind:<28} {piece.name}: {said}")
    assert not silent, "\n".join(silent)
    assert verdicts["fault"]


@pytest.mark.timeout(600)
async def test_what_can_be_repaired_is_repaired(damaged: DamagedStore, thorough: bool) -> None:
    """After a repair only faults are left that cannot be repaired. If none is left, nothing is lost."""
    wrong, repaired = [], Counter[str]()
    for piece in sample(await damaged.pieces(), thorough):
        await damaged.delete(piece)
        try:
            async with damaged.opened(readonly=True) as store:
                before = {fault.kind for fault in await audit_all(store, damaged.expected)}
        except ShoalError:
            before = {"error"}
        try:
            async with damaged.opened() as store:
                await repair_all(store, damaged.expected)
        except ShoalError as exc:
            if before != {"error"}:  # else the run cannot be opened
                wrong.append(f"{piece.kind} | {piece.name}: {exc}")
            continue
        try:
            async with damaged.opened() as store:
                if left := await audit_all(store, damaged.expected):
                    unrepaired = [fault.what for fault in left if fault.repairable]
                    assert not unrepaired, unrepaired
                    continue
                again = 1 if piece.kind.startswith("outcome") else 0  # a request whose state was lost is ready again
                await finish_all(store, damaged.expected, damaged.clock, again)
                repaired.update(before)
        except Exception as exc:
            wrong.append(f"{piece.kind} | {piece.name}: {type(exc).__name__}: {exc}")
    assert not wrong, "\n".join(wrong)
    print(repaired)
    assert repaired
