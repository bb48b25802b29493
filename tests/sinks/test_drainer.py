"""From the item log to a sink, exactly once, whatever fails on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import (
    FrontierError,
    OutputChangedError,
    OutputTakenError,
    SinkError,
    StoreAwayError,
    StoreRewoundError,
)
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.item import decode_item, encode_item
from shoal.ports import Claim, Completion, Frontier, FrontierOptions, LoggedItem, OutputCount, Run, Sink
from shoal.sinks import open_sink, sink_id
from shoal.sinks.drainer import FLUSH_EVERY, Drainer, RoleTakenError, export, position_of
from shoal.sinks.files import CollectSink
from shoal.sinks.patience import Patience


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class FrontierWithFaults:
    """A frontier in memory that calls ``fault`` before and after the steps of a drainer."""

    def __init__(self, inner: Frontier) -> None:
        self.inner = inner
        self.fault: Callable[[str], None] = lambda step: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        self.fault("before advance")
        held = await self.inner.advance(claim, cursor, ttl, last=last)
        self.fault("after advance")
        return held

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        self.fault("before read")
        return await self.inner.read_items(after, limit, last=last, max_bytes=max_bytes)


async def frontier_in_memory(clock: Callable[[], float] = time.time) -> FrontierWithFaults:
    store = MemoryStore(clock=clock)
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
    return FrontierWithFaults(await store.frontier("run", FrontierOptions()))


class SinkWithFaults:
    """A sink around another, with faults at the same places."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.fault: Callable[[str], None] = lambda step: None
        self.steps: list[str] = []
        self.flush_every = FLUSH_EVERY

    async def _step(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self.steps.append(name)
        self.fault(f"before {name}")
        done = await work()
        self.fault(f"after {name}")
        return done

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        last: int | None = await self._step("open", lambda: self.sink.open(state, epoch))
        return last

    async def write(self, items: Sequence[LoggedItem]) -> None:
        await self._step("write", lambda: self.sink.write(items))

    async def flush(self) -> bytes:
        state: bytes = await self._step("flush", self.sink.flush)
        return state

    async def close(self, *, finished: bool) -> None:
        await self._step("end" if finished else "close", lambda: self.sink.close(finished=finished))

    async def count(self, state: bytes) -> OutputCount:
        return await self.sink.count(state)


def fail_times(count: int, where: str, error: Callable[[], BaseException]) -> Callable[[str], None]:
    left = [count]

    def fault(step: str) -> None:
        if step == where and left[0]:
            left[0] -= 1
            raise error()

    return fault


def disk_full() -> SinkError:
    error = SinkError("the disk is full")
    error.__cause__ = OSError(28, "No space left on device")
    return error


async def log_items(frontier: FrontierWithFaults, count: int, start: int = 1) -> None:
    """Items with numbers, in pages of ten."""
    for first in range(start, start + count, 10):
        await frontier.push([Request(f"http://example.com/{first}")])
        lease = (await frontier.lease(1, 600)).leases[0]
        page = range(first, min(first + 10, start + count))
        await frontier.complete([Completion(lease=lease, items=[encode_item({"n": number}) for number in page])])


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(drainer: Drainer) -> AsyncIterator[asyncio.Task[None]]:
    await drainer.start()
    task = asyncio.create_task(drainer.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def frontier() -> FrontierWithFaults:
    return await frontier_in_memory()


def drainer_of(frontier: FrontierWithFaults, sink: Sink, **options: Any) -> Drainer:
    return Drainer(frontier, sink, "out", **({"patience": Patience(60, first_pause=0.001)} | options))


# -- the way of items


async def test_from_the_log_to_the_file(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 25)
    drainer = Drainer(frontier, open_sink(str(path)), sink_id(str(path)), batch=10)
    async with running(drainer) as task:
        await until(lambda: drainer.position == 25)
        await frontier.trim_items(drainer.position)
        await log_items(frontier, 20, 26)
        drainer.nudge()
        await until(lambda: drainer.position == 45)
        await log_items(frontier, 5, 46)
        await drainer.finish(True)
        await asyncio.wait_for(task, 1)
    assert numbers(path) == list(range(1, 51))
    assert drainer.position == 50
    assert await frontier.claim(f"sink:{path}", 60) is not None


async def test_a_nudge_wakes_it(frontier: FrontierWithFaults) -> None:
    found: list[dict[str, Any]] = []
    drainer = drainer_of(frontier, CollectSink(found), poll=60)
    async with running(drainer):
        await asyncio.sleep(0.02)
        await log_items(frontier, 3)
        await asyncio.sleep(0.02)
        assert found == []
        drainer.nudge()
        await until(lambda: len(found) == 3)
        await until(lambda: drainer.position == 3)


async def test_without_a_nudge_it_looks_by_itself(frontier: FrontierWithFaults) -> None:
    found: list[dict[str, Any]] = []
    async with running(drainer_of(frontier, CollectSink(found), poll=0.01)):
        await log_items(frontier, 3)
        await until(lambda: len(found) == 3)


async def test_flushes_are_few(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    sink = SinkWithFaults(open_sink(str(tmp_path / "out.jsonl")))
    drainer = drainer_of(frontier, sink)
    async with running(drainer):
        for start in range(1, 301, 10):
            await log_items(frontier, 10, start)
            drainer.nudge()
            await asyncio.sleep(0.005)
        await until(lambda: drainer.position == 300)
        assert sink.steps.count("write") > 20
        assert sink.steps.count("flush") <= 3


async def test_a_sink_may_flush_more_rarely(frontier: FrontierWithFaults) -> None:
    sink = SinkWithFaults(CollectSink([]))
    sink.flush_every = 30.0
    drainer = drainer_of(frontier, sink)
    async with running(drainer):
        await log_items(frontier, 10)
        drainer.nudge()
        await asyncio.sleep(0.7)
        assert sink.steps == ["open", "write"]
        await drainer.finish(False)
        assert sink.steps == ["open", "write", "flush", "close"]


async def test_the_role_is_renewed_between_rare_flushes(frontier: FrontierWithFaults) -> None:
    sink = SinkWithFaults(CollectSink([]))
    sink.flush_every = 600
    drainer = drainer_of(frontier, sink, ttl=0.5)
    async with running(drainer):
        await log_items(frontier, 10)
        drainer.nudge()
        await until(lambda: "write" in sink.steps)
        for _ in range(12):
            await asyncio.sleep(0.1)
            (role,) = await frontier.roles()
            assert role.held
        assert sink.steps == ["open", "write"]
        await drainer.finish(False)


async def test_a_rare_flush_comes_earlier_when_there_is_much(
    frontier: FrontierWithFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crawl with many items would pause until the time has come."""
    monkeypatch.setattr("shoal.sinks.drainer.MAX_UNFLUSHED", 100)
    sink = SinkWithFaults(CollectSink([]))
    sink.flush_every = 600
    drainer = drainer_of(frontier, sink, ttl=3600, batch=50)
    await log_items(frontier, 150)
    async with running(drainer):
        await until(lambda: drainer.position >= 100)


async def test_several_at_once(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    specs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.csv", "d.parquet", "e.db")]
    drainers = [Drainer(frontier, open_sink(spec), sink_id(spec)) for spec in specs]
    for drainer in drainers:
        await drainer.start()
    tasks = [asyncio.create_task(drainer.run()) for drainer in drainers]
    await log_items(frontier, 1000)
    for drainer in drainers:
        drainer.nudge()
    for drainer in drainers:
        await drainer.finish(True)
    await asyncio.gather(*tasks)
    assert numbers(tmp_path / "a.jsonl") == numbers(tmp_path / "b.jsonl") == list(range(1, 1001))
    assert {drainer.position for drainer in drainers} == {1000}


# -- a crash at every point


class Crash(BaseException):
    pass


async def test_a_crash_at_every_point(tmp_path: Path) -> None:
    """The process ends before or after any step; the next one claims the role, and nothing is lost or doubled."""
    point, places = 0, set()
    while True:
        point += 1
        clock = Clock()
        frontier = await frontier_in_memory(clock)
        await log_items(frontier, 35)
        path = tmp_path / f"out{point}.jsonl"
        steps = 0

        def fault(step: str, last: int = point) -> None:
            nonlocal steps
            steps += 1
            if steps == last:
                places.add(step)
                raise Crash

        first = SinkWithFaults(open_sink(str(path)))
        first.flush_every = 0.0
        frontier.fault = first.fault = fault
        drainer = drainer_of(frontier, first, batch=10)
        crashed = False
        try:
            await drainer.start()
            await drainer.finish(True)
        except Crash:
            crashed = True
            await first.sink.close(finished=False)  # what the end of a process does
        frontier.fault = lambda step: None

        clock.ahead = 100.0  # whatever the dead one held has expired
        drainer = drainer_of(frontier, open_sink(str(path)), batch=7)
        await drainer.start(wait=0)
        await drainer.finish(True)
        assert numbers(path) == list(range(1, 36)), point
        if not crashed:
            break
    assert places == {
        f"{when} {step}" for when in ("before", "after") for step in ("open", "write", "flush", "advance", "end")
    } | {"before read"}


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_cancelled_and_then_finished(frontier: FrontierWithFaults, tmp_path: Path, moment: int) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 500)
    sink = SinkWithFaults(open_sink(str(path)))
    sink.flush_every = 0.0
    drainer = drainer_of(frontier, sink, batch=10)
    async with running(drainer) as task:
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await drainer.finish(True)
    assert numbers(path) == list(range(1, 501))


async def test_abandoned_and_taken_up_again(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 30)
    drainer = drainer_of(frontier, open_sink(str(path)))
    async with running(drainer):
        await until(lambda: path.read_text().count("\n") == 30)
        await drainer.abandon()
        await drainer.abandon()
    assert drainer.position == 0
    drainer = drainer_of(frontier, open_sink(str(path)))
    await drainer.start(wait=0)
    await drainer.finish(False)
    await drainer.finish(False)
    assert numbers(path) == list(range(1, 31))


# -- failures that pass, and those that don't


@pytest.mark.parametrize("where", ["before write", "after write", "before flush", "after flush"])
@pytest.mark.parametrize("error", [disk_full, lambda: OSError(5, "Input/output error")])
async def test_tried_again(
    frontier: FrontierWithFaults, tmp_path: Path, where: str, error: Callable[[], BaseException]
) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 100)
    sink = SinkWithFaults(open_sink(str(path)))
    sink.flush_every = 0.01
    sink.fault = fail_times(4, where, error)
    drainer = drainer_of(frontier, sink, batch=10)
    async with running(drainer) as task:
        await until(lambda: drainer.position == 100)
        await drainer.finish(True)
        await task
    assert numbers(path) == list(range(1, 101))
    assert sink.steps.count("open") == 5


@pytest.mark.parametrize("where", ["before read", "before advance", "after advance"])
async def test_the_frontier_is_tried_again(
    frontier: FrontierWithFaults, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.sinks.drainer._FRONTIER_DELAYS", (0.0,) * 4)
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 100)
    frontier.fault = fail_times(4, where, lambda: FrontierError("connection lost"))
    drainer = drainer_of(frontier, open_sink(str(path)), batch=10)
    async with running(drainer):
        await until(lambda: drainer.position == 100)
        await drainer.finish(True)
    assert numbers(path) == list(range(1, 101))


@pytest.mark.parametrize("good", [0, 1, 3])
async def test_gives_up(frontier: FrontierWithFaults, tmp_path: Path, good: int) -> None:
    """Also when each new try gets as far as some earlier batch, and fails at the same place again."""
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 100)
    sink = SinkWithFaults(open_sink(str(path)))
    written = 0

    def fault(step: str) -> None:
        nonlocal written
        if step == "before open":
            written = 0
        if step == "before write":
            written += 1
            if written > good:
                raise disk_full()

    sink.fault = fault
    drainer = drainer_of(frontier, sink, batch=10, patience=Patience(0.5, first_pause=0.01))
    async with running(drainer) as task:
        with pytest.raises(SinkError, match=r"gave up after .* s: the disk is full"):
            await asyncio.wait_for(task, 5)
        with pytest.raises(SinkError, match="gave up after"):
            await drainer.finish(True)
    assert sink.steps[-1] == "close"
    assert 5 <= sink.steps.count("open") <= 8

    drainer = drainer_of(frontier, open_sink(str(path)))
    await drainer.start(wait=0)
    await drainer.finish(True)
    assert numbers(path) == list(range(1, 101))


async def test_the_frontier_is_given_up(frontier: FrontierWithFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sinks.drainer._FRONTIER_DELAYS", (0.0,) * 4)
    drainer = drainer_of(frontier, CollectSink([]))
    frontier.fault = fail_times(5, "before read", lambda: FrontierError("connection lost"))
    async with running(drainer) as task:
        with pytest.raises(SinkError, match="gave up after 5 attempts: connection lost"):
            await asyncio.wait_for(task, 5)


def broken_pipe() -> SinkError:
    error = SinkError("its reader has gone")
    error.__cause__ = BrokenPipeError()
    return error


@pytest.mark.parametrize("error", [lambda: SinkError("not my table"), broken_pipe])
async def test_a_refusal_is_final(frontier: FrontierWithFaults, error: Callable[[], SinkError]) -> None:
    await log_items(frontier, 10)
    sink = SinkWithFaults(CollectSink([]))
    sink.fault = fail_times(1, "before write", error)
    async with running(drainer_of(frontier, sink, patience=Patience(60, first_pause=60))) as task:
        with pytest.raises(SinkError, match=r"not my table|reader has gone"):
            await asyncio.wait_for(task, 5)


async def test_an_end_that_fails_can_be_repeated(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    await log_items(frontier, 10)
    sink = SinkWithFaults(open_sink(str(path)))
    sink.fault = fail_times(1, "before end", disk_full)
    drainer = drainer_of(frontier, sink, patience=Patience(0))
    await drainer.start()
    with pytest.raises(SinkError, match="disk is full"):
        await drainer.finish(True)
    assert not path.exists()
    drainer = drainer_of(frontier, open_sink(str(path)))
    await drainer.start(wait=0)
    await drainer.finish(True)
    assert path.exists()


async def test_an_end_that_fails_once_is_retried(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    await log_items(frontier, 10)
    sink = SinkWithFaults(open_sink(str(path)))
    sink.fault = fail_times(1, "before end", disk_full)
    drainer = drainer_of(frontier, sink)
    await drainer.start()
    await drainer.finish(True)
    assert path.exists()


# -- the output refuses old writers, and may be set back


class Destination:
    """An output that knows the epoch of its writer, and its items."""

    def __init__(self) -> None:
        self.epoch = 0
        self.numbers: list[int] = []


class FencedSink:
    """A sink that keeps the contract with few lines: item N of the log is the N-th entry of the list."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.epoch = 0
        self.seq = 0

    def check(self, seq: int) -> None:
        if self.destination.epoch > self.epoch:
            raise OutputTakenError("out", self.destination.epoch)
        if len(self.destination.numbers) < seq:
            raise SinkError("it was set back") from OSError()

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self.epoch, self.seq = epoch, int(state or b"0")
        self.check(0)
        self.destination.epoch = epoch
        del self.destination.numbers[self.seq :]
        if len(self.destination.numbers) < self.seq:
            self.seq = len(self.destination.numbers)
            return self.seq
        return None

    async def write(self, items: Sequence[LoggedItem]) -> None:
        self.check(self.seq)
        self.destination.numbers += [int(str(decode_item(item.payload)[1]["n"])) for item in items]
        self.seq = items[-1].seq

    async def flush(self) -> bytes:
        self.check(self.seq)
        return b"%d" % self.seq

    async def close(self, *, finished: bool) -> None:
        if finished:
            self.check(self.seq)

    async def count(self, state: bytes) -> OutputCount:
        return OutputCount(items=len(self.destination.numbers))


async def drained(frontier: FrontierWithFaults, destination: Destination) -> None:
    drainer = drainer_of(frontier, FencedSink(destination))
    await drainer.start()
    await drainer.finish(True)


async def test_a_writer_that_lost_its_role_stops(frontier: FrontierWithFaults) -> None:
    destination = Destination()
    await log_items(frontier, 10)
    old = drainer_of(frontier, FencedSink(destination), ttl=0.2)
    await old.start()
    await asyncio.sleep(0.3)  # until its role has expired
    new = drainer_of(frontier, FencedSink(destination))
    await new.start(wait=0)
    with pytest.raises(RoleTakenError):
        await old.finish(True)
    await new.finish(True)
    assert destination.numbers == list(range(1, 11))


@pytest.mark.parametrize("moment", ["open", "write", "end"])
async def test_a_writer_that_still_has_its_role_claims_it_above_a_newer_epoch(
    frontier: FrontierWithFaults, moment: str
) -> None:
    """The store went back, and its epochs with it; or another store has a run of the same name."""
    destination = Destination()
    far = 2**60
    if moment == "open":
        destination.epoch = far
    await log_items(frontier, 10)
    async with running(drainer := drainer_of(frontier, FencedSink(destination))):
        if moment == "write":
            destination.epoch = far
            await log_items(frontier, 10, 11)
            drainer.nudge()
            await until(lambda: len(destination.numbers) == 20)
        await until(lambda: drainer.position >= 10)
        if moment == "end":
            destination.epoch = far
        await drainer.finish(True)
    assert destination.epoch == far + 1
    assert destination.numbers == list(range(1, 21 if moment == "write" else 11))


async def test_two_stores_with_a_run_of_the_same_name(frontier: FrontierWithFaults) -> None:
    destination = Destination()
    await log_items(frontier, 10)
    drainer = drainer_of(frontier, FencedSink(destination))
    await drainer.start()

    def other_writes(step: str) -> None:
        if step == "before read":
            destination.epoch += 2**40

    frontier.fault = other_writes
    with pytest.raises(SinkError, match="another store has a run of the same name"):
        await drainer.finish(True)


async def test_an_output_that_another_store_has_set_back(frontier: FrontierWithFaults) -> None:
    """Its position is that of the other run: the cursor must not follow it."""
    destination = Destination()
    await log_items(frontier, 20)
    await drained(frontier, destination)
    del destination.numbers[5:]
    destination.epoch = 2**60
    with pytest.raises(SinkError, match="another store has a run of the same name"):
        await drained(frontier, destination)
    (role,) = await frontier.roles()
    assert position_of(role.cursor) == 20


@pytest.mark.parametrize("kept", [0, 7])
@pytest.mark.parametrize("moment", ["between", "during", "at the end"])
async def test_an_output_that_was_set_back(frontier: FrontierWithFaults, kept: int, moment: str) -> None:
    destination = Destination()
    await log_items(frontier, 20)
    if moment == "between":
        await drained(frontier, destination)
        del destination.numbers[kept:]
    else:
        async with running(drainer := drainer_of(frontier, FencedSink(destination))):
            await until(lambda: drainer.position == 20)
            del destination.numbers[kept:]
            if moment == "during":
                await log_items(frontier, 10, 21)
                drainer.nudge()
                await until(lambda: len(destination.numbers) == 30)
            await drainer.finish(True)
    await drained(frontier, destination)
    assert destination.numbers == list(range(1, 31 if moment == "during" else 21))


async def test_an_output_that_was_set_back_too_far(frontier: FrontierWithFaults) -> None:
    """The error names the items that the log no longer has. The cursor stays, so a newer backup can be restored."""
    destination = Destination()
    await log_items(frontier, 20)
    await drained(frontier, destination)
    newer = list(destination.numbers)
    await frontier.trim_items(15)
    del destination.numbers[7:]
    with pytest.raises(SinkError, match=r"ends with item 7.*begins with item 16.*Items 8 to 15 are missing"):
        await drained(frontier, destination)
    destination.numbers = newer
    await drained(frontier, destination)
    assert destination.numbers == list(range(1, 21))


async def test_the_log_is_not_trimmed_while_an_output_is_behind(frontier: FrontierWithFaults) -> None:
    """A process that saw the old cursor must not delete the items that the output needs again."""
    destination = Destination()
    await log_items(frontier, 20)
    await drained(frontier, destination)
    (role,) = await frontier.roles()
    del destination.numbers[5:]
    drainer = drainer_of(frontier, FencedSink(destination))
    await drainer.start()
    await frontier.trim_items(20, cursors={role.role: role.cursor})
    await drainer.finish(True)
    assert destination.numbers == list(range(1, 21))


async def test_a_new_output_of_a_trimmed_log(frontier: FrontierWithFaults, caplog: pytest.LogCaptureFixture) -> None:
    await log_items(frontier, 20)
    await frontier.trim_items(15)
    items: list[dict[str, object]] = []
    drainer = drainer_of(frontier, CollectSink(items))
    await drainer.start()
    await drainer.finish(True)
    assert [item["n"] for item in items] == [16, 17, 18, 19, 20]
    assert "items 1 to 15 of this run are no longer in its log" in caplog.text


# -- the role


async def test_held_by_another(frontier: FrontierWithFaults) -> None:
    other = drainer_of(frontier, CollectSink([]))
    await other.start()
    sink = SinkWithFaults(CollectSink([]))
    with pytest.raises(SinkError, match="another process of this run is writing to out"):
        await drainer_of(frontier, sink).start(wait=0.05)
    assert sink.steps == []
    starting = asyncio.create_task(drainer_of(frontier, sink).start(wait=5))
    await asyncio.sleep(0.05)
    await other.finish(False)
    await starting


async def test_the_role_of_a_dead_one_expires(frontier: FrontierWithFaults) -> None:
    await drainer_of(frontier, CollectSink([]), ttl=0.3).start()
    await drainer_of(frontier, CollectSink([]), ttl=0.3).start()


async def test_lost(tmp_path: Path) -> None:
    clock = Clock()
    frontier = await frontier_in_memory(clock)
    await log_items(frontier, 10)
    sink = SinkWithFaults(CollectSink([]))
    drainer = drainer_of(frontier, sink)
    async with running(drainer) as task:
        await until(lambda: drainer.position == 10)
        clock.ahead = 100.0
        claim = await frontier.claim("sink:out", 60)
        assert claim is not None
        await log_items(frontier, 10, 11)
        drainer.nudge()
        with pytest.raises(SinkError, match="another process of this run took over out"):
            await asyncio.wait_for(task, 5)
        with pytest.raises(SinkError, match="took over out"):
            await drainer.finish(True)
    assert drainer.position == 10
    assert await frontier.advance(claim, claim.cursor, 60)


async def test_an_output_that_refuses_because_another_process_writes_it() -> None:
    """The reason is the lost role, and not the refusal: another process continues."""
    clock = Clock()
    frontier = await frontier_in_memory(clock)
    await log_items(frontier, 10)
    sink = SinkWithFaults(CollectSink([]))
    drainer = drainer_of(frontier, sink)
    await drainer.start()
    clock.ahead = 100.0
    assert await frontier.claim("sink:out", 60) is not None
    sink.fault = fail_times(1, "before write", lambda: SinkError("it was changed"))
    with pytest.raises(RoleTakenError, match="took over out"):
        await drainer.run()


async def test_it_does_not_write_when_the_role_may_have_expired() -> None:
    clock = Clock()
    frontier = await frontier_in_memory(clock)
    sink = SinkWithFaults(CollectSink([]))
    drainer = drainer_of(frontier, sink, ttl=0.3)
    await drainer.start()
    await asyncio.sleep(0.35)  # paused for too long
    assert await frontier.claim("sink:out", 60) is not None
    await log_items(frontier, 10)
    with pytest.raises(SinkError, match="took over"):
        await drainer.run()
    assert sink.steps == ["open"]


async def test_kept_while_idle_and_during_a_long_end(frontier: FrontierWithFaults) -> None:
    class Slow(CollectSink):
        async def close(self, *, finished: bool) -> None:
            await asyncio.sleep(0.5)

    drainer = drainer_of(frontier, Slow([]), ttl=0.3)
    async with running(drainer):
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            assert await frontier.claim("sink:out", 60) is None
            await asyncio.sleep(0.02)
        finishing = asyncio.create_task(drainer.finish(True))
        await asyncio.sleep(0)
        while not finishing.done():
            assert finishing.done() or await frontier.claim("sink:out", 60) is None
            await asyncio.sleep(0.02)
        await finishing
    assert await frontier.claim("sink:out", 60) is not None


async def test_an_output_that_does_not_open_gives_the_role_back(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    spec = str(tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(SinkError, match="does not exist"):
        await drainer_of(frontier, open_sink(spec)).start()
    assert await frontier.claim("sink:out", 60) is not None


async def test_a_cursor_of_something_else(frontier: FrontierWithFaults) -> None:
    claim = await frontier.claim("sink:out", 60)
    await frontier.advance(claim, b"junk", 60)
    await frontier.relinquish(claim)
    with pytest.raises(SinkError, match="can't read the saved cursor of out"):
        await drainer_of(frontier, CollectSink([])).start()
    assert await frontier.claim("sink:out", 60) is not None


# -- export


async def test_export(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    await log_items(frontier, 95)
    seen: list[int] = []
    assert await export(frontier.inner, open_sink(str(tmp_path / "a.jsonl")), batch=40, on_progress=seen.append) == 95
    assert seen == [40, 80, 95]
    assert numbers(tmp_path / "a.jsonl") == list(range(1, 96))


async def test_an_export_that_fails_closes_its_sink(frontier: FrontierWithFaults) -> None:
    await log_items(frontier, 5)
    sink = SinkWithFaults(CollectSink([]))
    sink.fault = fail_times(1, "before write", disk_full)
    with pytest.raises(SinkError, match="disk is full"):
        await export(frontier.inner, sink)
    assert sink.steps == ["open", "write", "close"]


# -- a store that goes back in time


def set_cursor_back(frontier: FrontierWithFaults, role: str, cursor: bytes) -> None:
    frontier.inner._queue._roles._roles[role].cursor = cursor  # type: ignore[attr-defined]


async def test_a_drainer_notices_that_its_cursor_went_back_and_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    frontier = await frontier_in_memory()
    await log_items(frontier, 20)
    drainer = Drainer(frontier, open_sink(str(path)), sink_id(str(path)), batch=10)
    async with running(drainer) as task:
        await until(lambda: drainer.position == 20)
        older = (await frontier.roles())[0].cursor
        await log_items(frontier, 20, start=21)
        drainer.nudge()
        await until(lambda: drainer.position == 40)
        set_cursor_back(frontier, f"sink:{sink_id(str(path))}", older)
        await log_items(frontier, 5, start=41)
        drainer.nudge()
        with pytest.raises(StoreRewoundError):
            await task
    await drainer.start_over()
    assert drainer.position == 20
    task = asyncio.create_task(drainer.run())
    await until(lambda: drainer.position == 45)
    await drainer.finish(True)
    await task
    assert numbers(path) == list(range(1, 46))


async def test_a_move_of_the_cursor_whose_answer_was_lost_is_repeated_as_it_was(tmp_path: Path) -> None:
    """The store may have it or not. Meanwhile the sink fails too, so it is opened again at the confirmed cursor."""
    path = tmp_path / "items.jsonl"
    frontier = await frontier_in_memory()
    sink = SinkWithFaults(open_sink(str(path)))
    drainer = Drainer(frontier, sink, sink_id(str(path)), batch=10)
    async with running(drainer):
        frontier.fault = fail_times(1, "after advance", lambda: StoreAwayError("the answer was lost"))
        sink.fault = fail_times(1, "before flush", disk_full)
        await log_items(frontier, 15)
        drainer.nudge()
        await until(lambda: drainer.position == 15)
        await log_items(frontier, 15, start=16)
        drainer.nudge()
        await until(lambda: drainer.position == 30)
        await drainer.finish(True)
    assert numbers(path) == list(range(1, 31))


# -- a file that another program changed


@pytest.mark.parametrize("trimmed", [0, 20])
async def test_items_that_only_a_changed_file_had_are_named(
    frontier: FrontierWithFaults, tmp_path: Path, trimmed: int
) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 25)
    drainer = Drainer(frontier, open_sink(str(path)), sink_id(str(path)))
    async with running(drainer) as task:
        await until(lambda: drainer.position == 25)
        await frontier.trim_items(trimmed)
        path.write_text("")
        await log_items(frontier, 10, 26)
        with pytest.raises(OutputChangedError) as raised:
            await asyncio.wait_for(task, 10)
    with pytest.raises(OutputChangedError) as at_end:
        await drainer.finish(finished=True)
    with pytest.raises(OutputChangedError) as at_start:
        await Drainer(frontier, open_sink(str(path)), sink_id(str(path))).start()
    for error in (raised.value, at_end.value, at_start.value):
        assert str(error).count("Items 1 to 20 are no longer in the item log") == bool(trimmed)


async def test_a_removed_file_is_restored_at_the_end(frontier: FrontierWithFaults, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await log_items(frontier, 25)
    drainer = Drainer(frontier, open_sink(str(path)), sink_id(str(path)))
    async with running(drainer):
        await until(lambda: drainer.position == 25)
        path.unlink()
        await drainer.finish(finished=True)
    assert numbers(path) == list(range(1, 26))
