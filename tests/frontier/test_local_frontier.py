"""The parts of a frontier that one process owns and others use: sockets, messages, processes, reports."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import pytest_asyncio

from shoal.crawling.stats import Counters, Vitals
from shoal.errors import FrontierError, QueueFullError, RunError, StoreBusyError, StoreError
from shoal.frontier import join_store, open_store
from shoal.frontier.local import wire
from shoal.frontier.local.places import LocalAddress, ProcessSlot, announced, private_folder, reserved, started_at
from shoal.frontier.local.server import FrontierServer
from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite.file_lock import announce_socket
from shoal.ports import Frontier, FrontierOptions, Holder, Run, Store
from shoal.runs.process_crawl import CrawlPart, PartReport, ProcessPart, WorkerProcesses
from shoal.runs.supervisor import WorkerProcess
from shoal.spider import Spider


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, with a short path."""
    with TemporaryDirectory(prefix="shoal-t-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- sockets


def test_the_folder_is_private_whatever_the_umask(runtime: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder()
    finally:
        os.umask(before)
    assert folder == runtime / "shoal"
    assert mode(folder) == 0o700


def test_a_folder_that_others_can_enter_is_not_used(runtime: Path) -> None:
    (runtime / "shoal").mkdir()
    (runtime / "shoal").chmod(0o755)
    assert private_folder() == runtime / f"shoal-{os.getuid()}"
    (runtime / f"shoal-{os.getuid()}").rmdir()
    (runtime / f"shoal-{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(StoreError, match="nobody else can enter"):
        private_folder()


async def test_the_socket_is_for_its_user_alone(runtime: Path) -> None:
    before = os.umask(0)
    try:
        with reserved("crawl", exact=False) as path:
            server = FrontierServer(MemoryStore(), durable=False)
            await server.start(path)
            assert mode(path) == mode(path.with_suffix(".lock")) == 0o600
            await server.close()
    finally:
        os.umask(before)
    assert list((runtime / "shoal").iterdir()) == []


def test_stale_sockets_are_removed(runtime: Path) -> None:
    folder = private_folder()
    for name in ("books", "news"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / f"{name}.sock"))
        (folder / f"{name}.lock").touch(0o600)
    assert announced() == {}
    with reserved("books", exact=False) as path:
        assert path.name == "books.sock"
        assert not path.exists()
        assert sorted(each.name for each in folder.iterdir()) == ["books.lock"]


def test_a_name_is_given_once(runtime: Path) -> None:
    with reserved("my books/../x", exact=False) as first, reserved("my books/../x", exact=False) as second:
        assert (first.parent, first.name) == (runtime / "shoal", "my-books-..-x.sock")
        assert second.name == "my-books-..-x-2.sock"
        assert announced() == {"my-books-..-x": str(first), "my-books-..-x-2": str(second)}
        with pytest.raises(StoreError, match="2 run on this machine; running now: local:my"):
            LocalAddress.parse("local:")
        with pytest.raises(StoreBusyError), reserved("my books/../x", exact=True):
            pass
    assert announced() == {}


def test_an_address(runtime: Path) -> None:
    assert LocalAddress.parse("local:/run/a.sock?timeout=2.5") == LocalAddress("/run/a.sock", 2.5)
    with reserved("books", exact=False) as path:
        assert LocalAddress.parse("local:books") == LocalAddress.parse("local:") == LocalAddress(str(path))
    for url, words in {
        "local:books": "no crawl named 'books'",
        "local:": "0 run on this machine",
        "local:x?timeout=soon": "must be a number",
        "local:x?color=red": "unknown option 'color'",
    }.items():
        with pytest.raises(StoreError, match=words):
            LocalAddress.parse(url)


# -- messages


def test_every_method_of_the_ports_can_be_called() -> None:
    def methods(port: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(port, inspect.iscoroutinefunction)}

    assert wire.FRONTIER.keys() == methods(Frontier) - {"close"}
    assert wire.STORE.keys() == methods(Store) - {"close", "frontier"}


def test_errors_travel_as_what_they_are() -> None:
    class OwnError(RunError):
        pass

    for error, arrives in (
        (QueueFullError("full"), QueueFullError),
        (OwnError("no run"), RunError),
        (ValueError("a nonce"), ValueError),
        (ZeroDivisionError("oh"), FrontierError),
    ):
        with pytest.raises(arrives, match=str(error)) as caught:
            wire.raise_error(wire.error_of(error))
        assert type(caught.value) is arrives


def test_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 10)
    assert wire.frame(bytes(10)) == b"\0\0\0\x0a" + bytes(10)
    with pytest.raises(FrontierError, match="longer than the limit"):
        wire.frame(bytes(11))
    with pytest.raises(FrontierError, match="longer than the limit"):
        wire.Messages().feed(b"\0\0\0\x0b")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 100])
def test_messages_arrive_in_pieces_of_any_size(size: int) -> None:
    sent = [b"", b"a", bytes(300), b"", b"last"]
    stream = b"".join(map(wire.frame, sent))
    messages = wire.Messages()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [message for piece in pieces for message in messages.feed(piece)] == sent
    assert messages.feed(wire.frame(b"more") + b"\0") == [b"more"]


@pytest_asyncio.fixture
async def path(runtime: Path) -> AsyncIterator[Path]:
    """The socket of a store in memory."""
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
    server = FrontierServer(store, durable=False)
    await server.start(runtime / "a.sock")
    yield runtime / "a.sock"
    await server.close()


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\x05hello",
        wire.frame(wire.encode((1, 1e18, "list_runs", b"", [None]))),
        wire.frame(wire.encode((1, 1e18, "hello", b"", [["0", "client", "pid"]]))),
    ],
    ids=["too long", "not a call", "not a greeting", "a bad greeting"],
)
async def test_a_client_that_sends_something_else_is_disconnected(path: Path, message: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(message)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    store = await open_store(f"local:{path}")  # others are served
    assert [run.run_id for run in await store.list_runs()] == ["run"]
    await store.close()


async def test_only_methods_of_the_ports_are_called(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    run = wire.encode(wire.RunKey("run", FrontierOptions(), None))
    hello = wire.Hello("0.1.0", "client", os.getpid())
    for number, (method, where, arguments) in enumerate(
        [("hello", b"", [hello]), ("close", b"", []), ("__class__", run, []), ("discard", run, []), ("lease", run, "x")]
    ):
        writer.write(wire.frame(wire.encode((number, 1e18, method, where, arguments))))
    messages, answers = wire.Messages(), list[wire.Answer]()
    while len(answers) < 5:
        answers += map(wire.decode_answer, messages.feed(await asyncio.wait_for(reader.read(4096), 10)))
    errors = {answer.number: answer.error for answer in answers}
    assert errors[0] is None
    assert all(errors[number] is not None for number in (1, 2, 3, 4))
    assert "no call 'close'" in str(errors[1])
    assert "can't be read" in str(errors[4])
    writer.close()


async def test_a_file_that_nobody_works_on_is_opened(tmp_path: Path) -> None:
    store = await join_store(f"sqlite:///{tmp_path}/crawl.db")
    assert await store.list_runs() == []
    await store.close()


async def test_a_process_that_closes_the_file_is_waited_for(tmp_path: Path) -> None:
    """It has closed its socket, and writes its log into the file."""
    url = f"sqlite:///{tmp_path}/crawl.db"
    closing = await open_store(url)
    announce_socket(f"{tmp_path}/crawl.db", f"{tmp_path}/nobody-listens")
    joining = asyncio.create_task(join_store(url))
    assert not (await asyncio.wait({joining}, timeout=0.3))[0]
    await closing.close()
    store = await asyncio.wait_for(joining, 10)
    assert await store.list_runs() == []
    await store.close()


async def test_a_process_that_works_alone_is_not_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/crawl.db"
    alone = await open_store(url)
    with pytest.raises(StoreBusyError, match="another process"):
        await asyncio.wait_for(join_store(url), 5)
    await alone.close()


# -- processes


def test_a_slot_names_its_process() -> None:
    started = started_at(os.getpid())
    assert started is not None
    slot = ProcessSlot(os.getpid(), started, "abc")
    assert ProcessSlot.of(slot.holder) == slot
    assert slot.is_alive
    assert not ProcessSlot(os.getpid(), started + 1, "abc").is_alive  # another process had the number before
    assert ProcessSlot.of(Holder("books/0", 3)) is None
    assert ProcessSlot.of(Holder("pid:1:2:x/0", 3)) is None  # a slot of a cluster with such a name


def test_a_process_that_is_not_reaped_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert started_at(pid) is None
    os.waitpid(pid, 0)


# -- reports


def test_reports_add_up() -> None:
    counters = Counters()
    counters.fetched, counters.bytes, counters.errors = 3, 500, Counter({"timeout": 2})
    counters.latency.measured(0.02)
    vitals = Vitals(worker="w", run_id="r", spider="s", counters=counters, in_flight=4, looped_at=None)
    crawl = cast(CrawlPart, SimpleNamespace(vitals=lambda: vitals, spider=Spider()))
    report = msgspec.json.decode(msgspec.json.encode(PartReport.of(crawl)), type=PartReport)
    assert report.in_flight == 4
    total = Counters()
    for _ in range(2):
        report.add_to(total)
    assert (total.fetched, total.bytes, total.errors) == (6, 1000, Counter({"timeout": 4}))
    assert (sum(total.latency.counts), total.latency.seconds) == (2, 0.04)


async def test_the_last_report_of_a_worker_is_noticed_at_once() -> None:
    near, far = socket.socketpair()
    codes: list[int | None] = [None]
    workers = WorkerProcesses([WorkerProcess(os.getpid(), lambda: codes[0], near)], [])
    workers.begin(ProcessPart(frontier="memory:", run_id="run", concurrency=1, relayed=False))
    with far:
        far.setblocking(False)
        async with asyncio.timeout(30):
            assert b"run_id" in await asyncio.get_running_loop().sock_recv(far, 4096)
            far.sendall(msgspec.json.encode(PartReport()) + b"\n")
            await workers.wait_for_end(0.05)
            far.sendall(msgspec.json.encode(PartReport(is_last=True)) + b"\n")
            await workers.wait_for_end(600)
            assert not workers.have_ended
    codes[0] = 0
    async with asyncio.timeout(30):
        await workers.wait_for_end(600)
    assert workers.have_ended
