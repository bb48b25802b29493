"""Background work of a worker: retries when a server is away, leases renewed and dropped, the item log polled."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from shoal.crawling import pacing as itemlog
from shoal.crawling.leases import LeaseKeeper, Persistence
from shoal.crawling.onion import _guarded
from shoal.crawling.pacing import ItemLogKeeper
from shoal.errors import FencedError, FrontierError, QueueFullError, SinkError, StoreAwayError
from shoal.fetch.layers import Postponed
from shoal.frontier.memory import MemoryStore
from shoal.http import Request, Response
from shoal.item import encode_item
from shoal.ports import Claim, Completion, Frontier, FrontierOptions, Holder, Lease, LoggedItem, Run
from shoal.runs.supervisor import RestartBackoff, Supervisor, WorkerProcess
from shoal.sinks import open_sink
from shoal.sinks import takeover as standby
from shoal.sinks.drainer import Drainer, position_of
from shoal.sinks.files import CollectSink
from shoal.sinks.patience import Patience
from shoal.sinks.storage import SinkBusyError
from shoal.sinks.takeover import StandbyDrainer


async def memory_frontier() -> Frontier:
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="x", state="running", created_at=0.0))
    return await store.frontier("run", FrontierOptions(concurrency_per_host=1000))


async def log_items(frontier: Frontier, count: int) -> None:
    await frontier.push([Request(f"http://a.example/{time.monotonic_ns()}")])
    (lease,) = (await frontier.lease(1, 60)).leases
    await frontier.complete([Completion(lease=lease, items=[encode_item({"n": n}) for n in range(count)])])


# -- persistence


def failing(*errors: BaseException) -> Callable[[], Awaitable[str]]:
    left = list(errors)

    async def step() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return step


async def test_a_step_is_repeated_while_the_server_is_away() -> None:
    persist = Persistence(shared=True)
    assert await persist(failing(*[StoreAwayError("gone")] * 3)) == "done"
    assert not persist.away


async def test_other_failures_are_repeated_a_few_times() -> None:
    persist = Persistence(shared=False)
    assert await persist(failing(FrontierError("no room"))) == "done"
    with pytest.raises(QueueFullError):  # that is an answer, not a failure
        await persist(failing(QueueFullError("full")))


async def test_a_step_that_hangs_is_given_up() -> None:
    persist = Persistence(shared=True)
    asyncio.get_running_loop().call_later(0.05, persist.give_up)
    with pytest.raises(StoreAwayError, match="did not answer"):
        await persist(lambda: asyncio.sleep(60))
    with pytest.raises(StoreAwayError, match="no time left"):
        await persist(failing())


async def test_a_pause_between_tries_is_given_up() -> None:
    persist = Persistence(shared=True)
    asyncio.get_running_loop().call_later(0.05, persist.give_up)
    async with asyncio.timeout(5):
        with pytest.raises(StoreAwayError):
            await persist(failing(*[StoreAwayError("gone")] * 1000))


async def test_who_is_cancelled_is_cancelled() -> None:
    persist = Persistence(shared=True)
    task = asyncio.create_task(persist(lambda: asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- leases


class Renewing:
    """A frontier that renews what it likes to."""

    def __init__(self) -> None:
        self.lost: set[bytes] = set()
        self.hangs = False
        self.renewals = 0

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        self.renewals += 1
        if self.hangs:
            await asyncio.sleep(60)
        deadline = time.monotonic() + ttl
        return [
            None if lease.fingerprint in self.lost else msgspec.structs.replace(lease, deadline=deadline)
            for lease in leases
        ]


def lease(name: bytes, ttl: float) -> Lease:
    return Lease(Request(f"http://a.example/{name.decode()}"), name, 1, 1, "a.example", time.monotonic() + ttl)


async def kept_for(seconds: float, frontier: Renewing, *leases: Lease, ttl: float = 0.4) -> list[bytes]:
    """Which of them are dropped within so long."""
    dropped: list[bytes] = []
    keeper = LeaseKeeper(frontier, ttl, lambda each: dropped.append(each.fingerprint))  # type: ignore[arg-type]
    for each in leases:
        keeper.add(each)
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return dropped


async def test_leases_are_renewed() -> None:
    frontier = Renewing()
    assert await kept_for(1.0, frontier, lease(b"a", 0.4), lease(b"b", 0.4)) == []
    assert frontier.renewals >= 3


async def test_what_is_lost_is_dropped() -> None:
    frontier = Renewing()
    frontier.lost = {b"b"}
    assert await kept_for(0.3, frontier, lease(b"a", 0.4), lease(b"b", 0.4)) == [b"b"]


async def test_what_can_not_be_renewed_is_dropped_before_it_ends() -> None:
    frontier = Renewing()
    frontier.hangs = True
    ends = time.monotonic() + 0.8
    moments: list[float] = []
    keeper = LeaseKeeper(frontier, 0.8, lambda each: moments.append(time.monotonic()))  # type: ignore[arg-type]
    keeper.add(lease(b"a", 0.8))
    task = asyncio.create_task(keeper.run())
    while not moments and time.monotonic() < ends + 2:
        await asyncio.sleep(0.01)
    task.cancel()
    assert moments
    assert moments[0] < ends


async def test_what_has_ended_is_not_kept() -> None:
    keeper = LeaseKeeper(Renewing(), 0.1, pytest.fail)  # type: ignore[arg-type]
    old = lease(b"a", 0.0)
    keeper.add(old)
    keeper.remove(msgspec.structs.replace(old, token=0))  # another's
    assert keeper._held
    keeper.remove(old)
    assert not keeper._held


async def test_no_lease_is_good_without_the_right_to_work() -> None:
    """A node that was asleep looks here before it does anything."""
    allowed = True
    keeper = LeaseKeeper(Renewing(), 5.0, pytest.fail, lambda: allowed)  # type: ignore[arg-type]
    held = lease(b"a", 5.0)
    keeper.add(held)
    assert keeper.is_good(held)
    allowed = False
    assert not keeper.is_good(held)


async def test_nothing_is_sent_without_the_right_to_work() -> None:
    sent: list[Request] = []

    async def fetch(request: Request) -> Response:
        sent.append(request)
        return Response(request.url)

    allowed = True
    guarded = _guarded(fetch, lambda: allowed)
    await guarded(Request("http://a.example/1"))
    allowed = False
    with pytest.raises(Postponed) as caught:
        await guarded(Request("http://a.example/2"))
    assert not caught.value.contacted
    assert [request.url for request in sent] == ["http://a.example/1"]


# -- the item log


async def claimed(frontier: Frontier, role: str, position: int) -> Claim:
    claim = await frontier.claim(role, 60)
    assert claim is not None
    await frontier.advance(claim, msgspec.msgpack.encode((position, b"")), 60)
    return claim


async def watched(frontier: Frontier, outputs: Sequence[str] = (), *, keep: bool = False) -> ItemLogKeeper:
    keeper = ItemLogKeeper(frontier, Persistence(shared=False), outputs, keep=keep, every=0.01)
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.1)
    task.cancel()
    return keeper


async def test_the_log_is_trimmed_behind_the_slowest_output() -> None:
    frontier = await memory_frontier()
    await log_items(frontier, 10)
    slow, fast = await claimed(frontier, "sink:slow", 3), await claimed(frontier, "sink:fast", 9)
    await frontier.relinquish(slow)  # nobody writes it now, but somebody will
    await watched(frontier)
    assert [item.seq for item in await frontier.read_items(0, 100)] == [4, 5, 6, 7, 8, 9, 10]
    assert (await frontier.stats()).items == 10
    await frontier.relinquish(fast)


async def test_nothing_is_trimmed_before_each_output_has_begun() -> None:
    """The disk of one output was full when the run began: its first items must still be there later."""
    frontier = await memory_frontier()
    await log_items(frontier, 5)
    await claimed(frontier, "sink:open", 5)
    await watched(frontier, ["sink:open", "sink:full"])
    assert len(await frontier.read_items(0, 100)) == 5
    await claimed(frontier, "sink:full", 2)
    await watched(frontier, ["sink:open", "sink:full"])
    assert [item.seq for item in await frontier.read_items(0, 100)] == [3, 4, 5]


async def test_a_log_that_is_to_be_kept_is_kept() -> None:
    frontier = await memory_frontier()
    await log_items(frontier, 5)
    await claimed(frontier, "sink:x", 5)
    await watched(frontier, keep=True)
    assert len(await frontier.read_items(0, 100)) == 5


async def test_without_an_output_nothing_is_forgotten() -> None:
    frontier = await memory_frontier()
    await log_items(frontier, 5)
    await claimed(frontier, "seed", 5)
    await watched(frontier)
    assert len(await frontier.read_items(0, 100)) == 5


async def test_workers_wait_for_an_output_that_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(itemlog, "_MAX_LAG", 4)
    frontier = await memory_frontier()
    await log_items(frontier, 10)
    claim = await claimed(frontier, "sink:x", 5)
    assert (await watched(frontier, keep=True)).far_behind
    cursor = msgspec.msgpack.encode((6, b""))
    await frontier.advance(claim.moved_to(msgspec.msgpack.encode((5, b""))), cursor, 60)
    assert not (await watched(frontier, keep=True)).far_behind
    claim = claim.moved_to(cursor)
    await frontier.advance(claim, msgspec.msgpack.encode((0, b"")), 60)
    await frontier.relinquish(claim)  # for one that nobody writes, waiting would never end
    assert not (await watched(frontier, keep=True)).far_behind


async def test_an_output_that_nobody_writes_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is kept for it, and grows. Nothing is trimmed, and nobody waits."""
    monkeypatch.setattr(itemlog, "_MAX_LAG", 4)
    frontier = await memory_frontier()
    await log_items(frontier, 10)
    await claimed(frontier, "sink:held", 10)
    for role, position in (("sink:/out/x.csv#web1-8f3ad2c1", 5), ("sink:near", 6), ("sink:collect-1", 0)):
        await frontier.relinquish(await claimed(frontier, role, position))
    keeper = await watched(frontier)
    assert not keeper.far_behind
    warning = "no process writes /out/x.csv (web1), and 5 items wait for it in the log; start one that does, or forget"
    assert [record.message[: len(warning)] for record in caplog.records] == [warning]
    assert "`shoal outputs RUN forget '/out/x.csv#web1-8f3ad2c1'`" in caplog.text
    assert [item.seq for item in await frontier.read_items(0, 100)] == [6, 7, 8, 9, 10]


# -- an output that stands by


async def test_an_output_is_written_by_one_and_taken_over() -> None:
    frontier = await memory_frontier()
    first: list[dict[str, object]] = []
    second: list[dict[str, object]] = []
    one = StandbyDrainer(frontier, lambda: CollectSink(first), "x", ttl=0.5)
    other = StandbyDrainer(frontier, lambda: CollectSink(second), "x", ttl=0.5)
    task = asyncio.create_task(one.run())
    await asyncio.sleep(0.05)
    beside = asyncio.create_task(other.run())
    await log_items(frontier, 3)
    one.nudge()
    other.nudge()
    await asyncio.sleep(0.8)
    assert (len(first), len(second)) == (3, 0)
    task.cancel()  # as if its process were gone: the role runs out
    await log_items(frontier, 2)
    await asyncio.sleep(2.0)
    beside.cancel()
    await asyncio.gather(task, beside, return_exceptions=True)
    await other.finish(finished=True)
    assert (len(first), len(second)) == (3, 2)


async def test_at_the_end_somebody_has_written_everything() -> None:
    frontier = await memory_frontier()
    await log_items(frontier, 3)
    items: list[dict[str, object]] = []
    late = StandbyDrainer(frontier, lambda: CollectSink(items), "x", ttl=60)
    await late.finish(finished=True)  # it never ran: but nobody else did it
    assert len(items) == 3
    again: list[dict[str, object]] = []
    await StandbyDrainer(frontier, lambda: CollectSink(again), "x", ttl=60).finish(finished=True)
    assert again == []


class Down(CollectSink):
    """Storage that is down for the first few times."""

    left = 2

    async def open(self, state: bytes, epoch: int = 0) -> None:
        if Down.left:
            Down.left -= 1
            raise SinkError("can't write: no connection") from OSError("refused")


async def test_an_output_that_is_down_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_POLL", 0.01)
    frontier = await memory_frontier()
    await log_items(frontier, 3)
    items: list[dict[str, object]] = []
    drain = StandbyDrainer(frontier, lambda: Down(items), "x", ttl=60)
    task = asyncio.create_task(drain.run())
    await asyncio.sleep(0.5)
    assert len(items) == 3
    task.cancel()
    await drain.finish(finished=True)


class Full(CollectSink):
    """Storage that has room for a number of writes."""

    room = 0
    opened = 0
    flush_every = 0.01

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        Full.opened += 1
        return await super().open(state, epoch)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not Full.room:
            raise SinkError("the disk is full") from OSError("no space")
        Full.room -= 1
        await super().write(items)


async def test_an_output_that_stays_down_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_POLL", 0.01)
    frontier = await memory_frontier()
    await log_items(frontier, 3)
    Full.room = Full.opened = 0
    drain = StandbyDrainer(frontier, lambda: Full([]), "x", ttl=60, patience=0.3)
    with pytest.raises(SinkError, match=r"^gave up after \d+ s: the disk is full"):
        await asyncio.wait_for(drain.run(), 5)
    assert Full.opened > 2
    assert not any(role.held for role in await frontier.roles())  # another process may try


async def test_the_time_counts_from_the_first_failure_since_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_POLL", 0.01)
    monkeypatch.setattr(standby, "_HAND_OVER", 0.05)
    frontier = await memory_frontier()
    items: list[dict[str, object]] = []
    Full.room = 0
    drain = StandbyDrainer(frontier, lambda: Full(items), "x", ttl=60, patience=1.0)
    task = asyncio.create_task(drain.run())
    for count in (1, 2, 3):  # each outage is shorter than the patience, all together are not
        await log_items(frontier, 1)
        drain.nudge()
        await asyncio.sleep(0.6)
        assert not task.done()
        Full.room = 1
        async with asyncio.timeout(5):
            while position_of((await frontier.roles())[0].cursor) < count:
                await asyncio.sleep(0.01)
    task.cancel()


async def test_a_process_that_stops_does_not_wait_for_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sinks.patience.HURRY", 0.1)
    frontier = await memory_frontier()
    await log_items(frontier, 3)
    Full.room = 0
    drainer = Drainer(frontier, Full([]), "x", patience=Patience(60, first_pause=30))
    await drainer.start()
    finishing = asyncio.create_task(drainer.finish(True))
    await asyncio.sleep(0.2)
    assert not finishing.done()
    drainer.hurry()
    with pytest.raises(SinkError, match="the disk is full"):
        await asyncio.wait_for(finishing, 1)


class Refusing(CollectSink):
    async def open(self, state: bytes, epoch: int = 0) -> None:
        raise SinkError("wrong password")


async def test_an_output_that_refuses_is_an_error() -> None:
    frontier = await memory_frontier()
    drain = StandbyDrainer(frontier, lambda: Refusing([]), "x", ttl=60)
    with pytest.raises(SinkError, match="wrong password"):
        await drain.run()


async def take_role(frontier: Frontier, role: str) -> Claim:
    """Take a role whose time has run out, as another process does."""
    async with asyncio.timeout(10):
        while (claim := await frontier.claim(role, 60)) is None:
            await asyncio.sleep(0.05)
    return claim


async def test_a_process_that_lost_its_role_ends_without_an_error() -> None:
    frontier = await memory_frontier()
    drain = StandbyDrainer(frontier, lambda: CollectSink([]), "x", ttl=0.2)
    await drain.start()
    claim = await take_role(frontier, "sink:x")  # while the process was frozen
    await log_items(frontier, 3)
    await drain.finish(finished=False)
    assert await frontier.advance(claim, claim.cursor, 60)


async def test_a_process_that_lost_its_role_while_it_opened_the_output_ends_without_an_error() -> None:
    frontier = await memory_frontier()

    class Locked(CollectSink):
        async def open(self, state: bytes, epoch: int = 0) -> int | None:
            await asyncio.sleep(0.1)
            raise SinkBusyError("another crawl is writing it")

    drain = StandbyDrainer(frontier, lambda: Locked([]), "x", ttl=60)
    task = asyncio.create_task(drain.run())
    await asyncio.sleep(0.05)
    task.cancel()
    await drain.finish(finished=False)


async def test_a_fence_is_reported_at_once_and_not_as_a_failure_of_the_output() -> None:
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="x", state="running", created_at=0.0))
    frontier = await store.frontier("run", FrontierOptions(), Holder("slot", 1))
    await frontier.fence("slot", 2)
    drain = StandbyDrainer(frontier, lambda: CollectSink([]), "x", ttl=60)
    await drain.start()  # `run` reports it
    with pytest.raises(FencedError):
        await asyncio.wait_for(drain.run(), 0.2)


# -- several processes


async def test_a_killed_process_is_replaced_and_others_are_not(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "marks = pathlib.Path(sys.argv[1]); mark = marks / str(os.getpid()); mark.touch()\n"
        "if len(list(marks.iterdir())) <= 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(3)\n"
    )

    def start() -> WorkerProcess:
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
        return WorkerProcess(process.pid, process.poll, socket.socket())

    assert await Supervisor(start).run(1) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_children_are_restarted_with_longer_pauses_until_one_lives_long() -> None:
    backoff = RestartBackoff()
    assert [backoff.pause_after(1.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [backoff.pause_after(61.0), backoff.pause_after(1.0)] == [0.5, 1.0]


async def test_an_output_is_complete_only_when_its_writer_has_closed_it(tmp_path: Path) -> None:
    """The writer died after its last cursor, while it joined the parts of a Parquet file."""
    frontier = await memory_frontier()
    await log_items(frontier, 3)
    path = tmp_path / "x.parquet"
    writer = Drainer(frontier, open_sink(str(path)), "x", ttl=0.3)
    await writer.start()
    await writer._catch_up()  # all items are in parts, and its role stays taken
    os.close(writer._sink._lock)  # type: ignore[attr-defined]
    assert not path.exists()
    drain = StandbyDrainer(frontier, lambda: open_sink(str(path)), "x", ttl=60)
    await drain.finish(finished=True)
    assert path.exists()
    await StandbyDrainer(frontier, lambda: open_sink(str(path)), "x", ttl=60).finish(finished=True)  # nothing to do
