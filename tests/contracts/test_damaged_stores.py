"""Whatever is deleted from a store: an error says so, or an audit does, or nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from shoal.errors import ShoalError, SinkError
from shoal.frontier.memory import MemoryStore
from shoal.frontier.memory.store import MemoryFrontier
from shoal.ports import FrontierOptions, LoggedItem, OutputCount, Run, Store
from shoal.sinks.drainer import Drainer, export, read_cursor
from shoal.testing import FakeClock
from shoal.testing.steps import TTL, complete, finish_seeding, lease_one, page, push
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
HARMLESS = {
    "sqlite": "event fence lane note seen_slice",
    "redis": "beat claim event fact fence heard holder lane lease role_slot sent slot stage turns worker"
    " run:asked run:called run:options run:weight store:alone store:defaults store:leased store:leased_by",
    "postgresql": "event functions heard holder lane migration note poll_state presence turn worker",
}
"""Whose loss may pass in silence, because nothing is lost with it: it is made again, as docs/durability.md says. Of
hashes whose fields differ, those fields."""
LOST = {
    "sqlite": {
        "role role=output finished=0": "the cursor of role output: it begins again",
        "role role=named finished=0": "the cursor of role named: it begins again",
        "document": "the document note/1",
        "host *": "the settings of host *, if it had any",
        "host": "the settings of host",
    },
    "redis": {
        "role b'output'": "the cursor of role output: it begins again",
        "document entry": "the document note/1",
        "host entry": "the settings of host",
        "rewinds": "when the store went back in time, and how far: record 1",
        "run b'counters'": "the counter duplicates: it counts from 0 again; the counter redirects: it counts from 0",
    },
    "postgresql": {
        "role role=output finished=0": "the cursor of role output: it begins again",
        "document": "the document note/1",
        "host *": "the settings of host *, if it had any",
        "rewind": "when the store went back in time, and how far: record 1",
        "ledger": "the counter redirects: it was counted again by the status of each page, so it may be inexact",
    },
}
"""What a repair says is lost, by the kind of what was deleted."""


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def damaged(backend: str, tmp_path: Path) -> DamagedStore:
    store = STORES[backend](tmp_path)
    await store.fill()
    return store


def is_harmless(store: str, piece: Piece) -> bool:
    """Whether the loss of this piece may pass in silence."""
    kind = piece.kind.replace(" b'", ":").rstrip("'").split()[0]
    return not {kind, kind.partition(":")[0]}.isdisjoint(HARMLESS[store].split())


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
    _IN_MEMORY[kind](store.frontiers["run"])
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
async def test_nothing_is_lost_in_silence(damaged: DamagedStore, backend: str, thorough: bool) -> None:
    silent, verdicts = [], Counter[str]()
    for piece in sample(await damaged.pieces(), thorough):
        await damaged.delete(piece)
        try:
            verdict, said = await judge(damaged)
            assert verdict != "harmless" or is_harmless(backend, piece), "no fault"
        except Exception as exc:
            verdict, said = "SILENT", f"{type(exc).__name__}: {exc}"
            silent.append(f"{piece.kind} | {piece.name}: {said}")
        verdicts[verdict] += 1
        print(f"{verdict:<9} {piece.kind:<28} {piece.name}: {said}")
    assert not silent, "\n".join(silent)
    assert verdicts["fault"]


@pytest.mark.timeout(600)
async def test_what_can_be_repaired_is_repaired(damaged: DamagedStore, backend: str, thorough: bool) -> None:
    """After a repair only faults are left that cannot be repaired. If none is left, nothing is lost but what the repair
    has named."""
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
                lost = await repair_all(store, damaged.expected)
            expected = LOST[backend].get(piece.kind, "")
            if not "; ".join(lost).startswith(expected):
                wrong.append(f"{piece.kind} | {piece.name}: the repair said {lost} instead of {expected!r}")
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


async def test_counters_that_are_lost_on_postgresql_are_counted_again(tmp_path: Path) -> None:
    """Redirects are known by their status. What is only in the counters is named."""
    damaged = DamagedPostgres(tmp_path)
    async with damaged.opened() as store:
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0.0))
        frontier = await store.frontier("r", FrontierOptions())
        await push(frontier, *range(3))
        await complete(frontier, await lease_one(frontier), children=[page("to")], status=301, redirected=True)
        await complete(frontier, await lease_one(frontier), status=200, item_errors=2, items=[b"1"])
        before = await frontier.stats()
        assert (before.redirects, before.item_errors) == (1, 2)
        async with damaged.linked() as link:
            await link.execute(f"DELETE FROM {damaged.schema}.ledger")
        assert await frontier.repair() == [
            "the counter redirects: it was counted again by the status of each page, so it may be inexact",
            "the counter duplicates: it counts from 0 again",
            "the counter item_errors: it counts from 0 again",
        ]
        assert await frontier.stats() == msgspec.structs.replace(before, item_errors=0)
        assert (await frontier.audit()).balanced
        assert await frontier.repair() == []


async def drain(store: Store, run_id: str) -> list[int]:
    """Drain the log of a run into a new output. Returns the numbers of its items."""
    frontier, numbers = await store.frontier(run_id), list[int]()
    drainer = Drainer(frontier, NumberSink(numbers), "out", batch=4)
    await drainer.start()
    try:
        await drainer.finish(True)
    finally:
        (role,) = [role for role in await frontier.roles() if role.role == "sink:out"]
        assert read_cursor(role.cursor).is_closed
        numbers.sort()
    return numbers


class NumberSink:
    """Keeps the numbers of its items."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        return None

    async def write(self, items: Sequence[LoggedItem]) -> None:
        self._numbers.extend(item.seq for item in items)

    async def flush(self) -> bytes:
        return b"state"

    async def close(self, *, finished: bool) -> None: ...

    async def count(self, state: bytes) -> OutputCount:
        return OutputCount(items=len(self._numbers))


@pytest.mark.parametrize(("trim", "lost"), [(0, 1), (0, 5), (0, 9), (0, 12), (3, 4), (3, 8), (3, 12)])
async def test_an_item_that_is_lost_is_named(backend: str, tmp_path: Path, trim: int, lost: int) -> None:
    """By each drainer of the run, at its end, and by an audit. All other items are written."""
    damaged = STORES[backend](tmp_path)
    async with damaged.opened() as store:
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0.0))
        frontier = await store.frontier("r", FrontierOptions(concurrency_per_host=20))
        await push(frontier, *range(12))
        for lease in (await frontier.lease(12, TTL)).leases:
            await complete(frontier, lease, items=[b"{}"])
        await finish_seeding(frontier)
        await frontier.trim_items(trim)
        assert (await frontier.stats()).trimmed == trim
        assert (await frontier.audit()).balanced
    await damaged.delete_item(lost)
    async with damaged.opened() as store:
        (fault,) = (await (await store.frontier("r")).audit()).faults
        assert (fault.kind, fault.count) == ("items", 1)
        assert fault.example in (f"item {lost}", "")
        for _ in range(2):  # also a drainer that finds nothing more to write
            with pytest.raises(SinkError, match=f"out lacks item {lost}, which the item log of this run does not have"):
                await drain(store, "r")
        frontier, numbers = await store.frontier("r"), list[int]()
        assert await export(frontier, NumberSink(numbers), batch=5) == 12 - trim - 1
        assert numbers == [number for number in range(trim + 1, 13) if number != lost]
