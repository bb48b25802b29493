"""A store in which another program has changed a value raises errors of Shoal, which say so, and loses nothing of other
runs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.errors import ShoalError
from shoal.ports import Frontier, FrontierOptions, Run, Store
from shoal.testing.steps import TTL, complete, push
from tests.contracts.damage import DamagedPostgres, DamagedRedis, finish_all

STORES: dict[str, Callable[[Path], Any]] = {"redis": DamagedRedis, "postgresql": DamagedPostgres}
DEEP = b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0"
"""A map of msgpack that is nested too deeply to be decoded."""
CRAFTED = (
    b"", b"\0", b"\xff" * 9, DEEP, b"\xc1", b"9" * 5000, b"nan", b"-1", b"1e308", b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\0" * 64, b"\xff" * 64, b"x" * 200_000,
    msgspec.msgpack.encode({"url": 1, "callback": "os.system"}),
    "", "x" * 200_000, "../../../etc/passwd", "\u202e\x1b[31m",
    math.nan, math.inf, -math.inf, -1.0, 1e308, 2**63 - 1, -(2**63), 2**31 - 1, -(2**31), -1,
)  # fmt: skip
LONGEST = 2000  # characters of a message


@pytest.fixture(params=STORES)
async def crafted(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store = STORES[request.param](tmp_path)
    await store.fill()
    return store


async def use(frontier: Frontier) -> None:
    """Read everything about a run, and work on it."""
    await frontier.audit()
    await frontier.host_states()
    await frontier.stats()
    await frontier.roles()
    async for history in frontier.dead():
        assert history.url
    await frontier.read_items(0, 1000)
    await frontier.waits(["a.example"])
    leases = (await frontier.lease(1000, TTL)).leases
    await complete(frontier, *leases)


@pytest.mark.timeout(900)
async def test_a_crafted_value_raises_only_errors_of_shoal(crafted: Any, thorough: bool) -> None:
    wrong, said = [], Counter[str]()
    values = await crafted.values(CRAFTED)
    for value in values if thorough else values[:: max(1, len(values) // 120)]:
        if not await crafted.craft(value):
            continue
        where = f"{value.kind} | {value.name[:80]} | {value.replacement[-1]!r:.40}"
        steps: list[Callable[[Store], Any]] = [lambda store: store.list_runs(), lambda store: store.run_states("s")]
        for run_id in crafted.expected:

            async def work(store: Store, run_id: str = run_id) -> None:
                await use(await store.frontier(run_id))

            steps.append(work)
        for step in steps:
            try:
                async with crafted.opened() as store:
                    await asyncio.wait_for(step(store), 60)
            except ShoalError as exc:
                said[type(exc).__name__] += 1
                if len(str(exc)) > LONGEST:
                    wrong.append(f"{where}: a message of {len(str(exc))} characters")
            except Exception as exc:
                wrong.append(f"{where}: {type(exc).__name__}: {exc!s:.200}")
    assert not wrong, "\n".join(wrong)
    assert said["StoreError"]


RECORDS = {"redis": "run b'", "postgresql": "run state=running "}
"""What the kinds of values of a run's own record begin with."""


@pytest.mark.timeout(900)
async def test_the_record_of_a_run_harms_no_other_run(crafted: Any) -> None:
    """All others are listed and end with all that they have. The run itself can be removed."""
    wrong, count = [], 0
    backend = "redis" if isinstance(crafted, DamagedRedis) else "postgresql"
    others = {run_id: wanted for run_id, wanted in crafted.expected.items() if run_id != "run"}
    for value in await crafted.values(CRAFTED):
        column = value.kind.removeprefix(RECORDS[backend]).strip("'")
        if not value.kind.startswith(RECORDS[backend]) or column in ("id", "number", "run_id", "deleting", "delay"):
            continue  # runs that share a host keep the longest delay among theirs
        if not await crafted.craft(value):
            continue
        count += 1
        try:
            async with crafted.opened() as store:
                assert {run.run_id for run in await store.list_runs()} >= set(others)
                await finish_all(store, others, crafted.clock)
                await store.delete_run("run")
                assert {run.run_id for run in await store.list_runs()} == set(others)
        except Exception as exc:
            wrong.append(f"{value.kind} {value.replacement[-1]!r:.40}: {type(exc).__name__}: {exc!s:.200}")
    assert not wrong, "\n".join(wrong)
    assert count > 20


@pytest.mark.parametrize("backend", STORES)
async def test_a_request_that_is_nested_too_deeply_has_failed(backend: str, tmp_path: Path) -> None:
    """Like any other that cannot be read. The other requests of its run are done."""
    damaged = STORES[backend](tmp_path)
    async with damaged.opened() as store:
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0.0))
        frontier = await store.frontier("r", FrontierOptions())
        nested: list[object] = []
        for _ in range(200):
            nested = [nested]
        await push(frontier, *range(3))
        first = (await frontier.lease(1, TTL)).leases[0]
        request = first.request.replace(meta={"deep": nested})
        await complete(frontier, first, children=[request.replace(url="http://a.example/deep")])
        await damaged.nest(b"\x91" * 200, b"\x91" * 200_000)
        while leases := (await frontier.lease(5, TTL)).leases:
            await complete(frontier, *leases)
        stats = await frontier.stats()
        assert (stats.done, stats.dead) == (3, 1)
        (dead,) = [history async for history in frontier.dead()]
        assert dead.kind == "unreadable"
