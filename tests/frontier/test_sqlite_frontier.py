"""The frontier in a SQLite file: what the contracts do not cover."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from shoal.errors import FrontierError, QueueFullError, RequestError, RunError, StoreBusyError, StoreError
from shoal.frontier import open_store
from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.frontier.sqlite import lanes as sqlite_lanes
from shoal.frontier.sqlite import run_file as sqlite_seen
from shoal.frontier.sqlite.file import VERSION
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Holder, HostUpdate, Lease, Pushed, Run, Store
from shoal.testing import FakeClock
from tests.support import forking

OPTIONS = FrontierOptions(max_attempts=3, concurrency_per_host=100)
RUN = Run(run_id="r", spider="s", state="running", created_at=1.0, settings={"delay": 1.5, "tags": ["a"]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "frontier.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SQLiteStore]:
    store = await SQLiteStore.open(path)
    await store.create_run(RUN)
    yield store
    await store.close()


@pytest.fixture
async def frontier(store: SQLiteStore) -> Frontier:
    return await store.frontier("r", OPTIONS)


def page(number: int, host: str = "a.com", **options: float) -> Request:
    return Request(f"http://{host}/{number}", **options)


async def lease_all(frontier: Frontier, limit: int = 1000) -> list[Lease]:
    return (await frontier.lease(limit, 60)).leases


async def check_balance(frontier: Frontier) -> None:
    stats = await frontier.stats()
    assert stats.balanced
    assert await frontier.audit() == stats


def spawn(code: str, *arguments: object, pipesize: int = -1) -> subprocess.Popen[str]:
    """Start a process that reports on its standard output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return forking.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pipesize=pipesize)


def read_lines(process: subprocess.Popen[str], count: int) -> str:
    assert process.stdout is not None
    line = ""
    for _ in range(count):
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            pytest.fail(process.stderr.read())
    return line


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


# -- a process that is killed

PAGES = 3000
CRAWL = """
import asyncio, sys
from shoal.errors import RunError
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request
from shoal.ports import Completion, FrontierOptions, Run

def page(number):
    return Request(f"http://h{number % 3}.com/{number}", meta={"number": number})

def handled(lease, pages):
    number = lease.request.meta["number"]
    children = [page(child) for child in (2 * number + 1, 2 * number + 2, number // 2) if child < pages]
    return Completion(lease=lease, items=[b"%d" % number], children=children, status=200)

async def main(path, pages):
    store = await SQLiteStore.open(path)
    if await store.get_run("r") is None:
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
    frontier = await store.frontier("r", FrontierOptions(max_attempts=1000, concurrency_per_host=100))
    await frontier.push([page(0)])
    while leases := (await frontier.lease(7, 600)).leases:
        print("leased".ljust(500), flush=True)
        await frontier.complete([handled(lease, pages) for lease in leases])
    print("finished", flush=True)
    await store.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("most", [20, sqlite_seen._MAX_IN_MEMORY], ids=["indexed", "not indexed"])
async def test_a_crawl_that_is_killed_many_times_does_each_page_once(
    path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from shoal.frontier.sqlite import run_file; run_file._MAX_IN_MEMORY = {most}\n" + CRAWL
    monkeypatch.setattr(sqlite_seen, "_MAX_IN_MEMORY", most)
    chance = random.Random(most)
    for _ in range(8):
        process = spawn(code, path, PAGES, pipesize=4096)  # so that it cannot run far ahead of a busy machine
        read_lines(process, chance.randrange(1, 50))
        kill(process)
        store = await SQLiteStore.open(path)
        frontier = await store.frontier("r", FrontierOptions(max_attempts=1000))
        await check_balance(frontier)
        assert (await frontier.stats()).leased == 0
        await store.close()
    output, _ = spawn(code, path, PAGES).communicate()
    assert output.endswith("finished\n")

    store = await SQLiteStore.open(path, readonly=True)
    frontier = await store.frontier("r", OPTIONS)
    await check_balance(frontier)
    stats = await frontier.stats()
    assert (stats.pushed, stats.done, stats.items) == (PAGES, PAGES, PAGES)
    items = await frontier.read_items(0, 2 * PAGES)
    assert [item.seq for item in items] == list(range(1, PAGES + 1))
    assert len({item.key for item in items}) == PAGES
    assert {int(item.payload) for item in items} == set(range(PAGES))
    await store.close()


CREATE = """
import asyncio, sys
from shoal.frontier.sqlite import SQLiteStore
from shoal.ports import Run

async def main(folder):
    for number in range(10_000):
        store = await SQLiteStore.open(f"{folder}/{number}.db")
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
        await store.close()
        print(number, flush=True)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_file_whose_creation_was_killed_can_be_used(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        process = spawn(CREATE, folder)
        read_lines(process, 3 * attempt + 1)
        kill(process)
        for path in sorted(folder.glob("*.db")):
            store = await SQLiteStore.open(path)
            assert len(await store.list_runs()) <= 1
            await store.close()


async def test_a_lease_of_a_killed_process_was_an_attempt(path: Path) -> None:
    code = CRAWL.replace("await frontier.complete", "sys.stdin.read(); await frontier.complete")
    for _ in range(2):
        process = spawn(code, path, 9)
        read_lines(process, 1)
        kill(process)
    store = await SQLiteStore.open(path)
    frontier = await store.frontier("r", FrontierOptions(max_attempts=2))
    history = await frontier.find(page(0, "h0.com"))
    assert history is not None
    assert (history.state, history.attempts) == ("dead", 2)
    assert [event.kind for event in history.events] == ["lost", "lost", "dead"]
    assert await frontier.dead_kinds() == {"worker lost": 1}
    await check_balance(frontier)
    await store.close()


# -- one process works on a file

HOLD = """
import asyncio, sys
from shoal.frontier.sqlite import SQLiteStore

async def main():
    store = await SQLiteStore.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


async def test_the_error_for_a_second_process_names_the_first(path: Path) -> None:
    process = spawn(HOLD, path)
    read_lines(process, 1)
    with pytest.raises(StoreBusyError, match=rf"\(pid {process.pid}\)"):
        await SQLiteStore.open(path)
    kill(process)
    store = await SQLiteStore.open(path)
    await store.close()
    assert os.listdir(path.parent) == [path.name]


async def test_a_second_store_in_the_same_process_is_refused(store: SQLiteStore, path: Path) -> None:
    with pytest.raises(StoreBusyError):
        await SQLiteStore.open(path)
    link = path.with_name("link.db")
    link.symlink_to(path)
    with pytest.raises(StoreBusyError):
        await SQLiteStore.open(link)


async def test_a_file_can_be_inspected_while_another_process_works_on_it(
    store: SQLiteStore, frontier: Frontier, path: Path
) -> None:
    looking = await open_store(f"sqlite:///{path}", readonly=True)
    seen = await looking.frontier("r", OPTIONS)
    assert (await seen.stats()).pushed == 0
    await frontier.update_host("b.com", HostUpdate(delay=3.0))
    await frontier.push([page(number) for number in range(5)])
    one, two = await lease_all(frontier, 2)
    await frontier.complete([Completion(lease=one, items=[b"item"], children=[page(9)])])
    await frontier.fail([Failure(lease=two, kind="dns", reason="no such host")])
    await lease_all(frontier, 1)

    assert await seen.stats() == await frontier.stats()
    assert await seen.audit() == await frontier.audit()
    assert await seen.host_states() == await frontier.host_states()
    assert await seen.dead_kinds() == {"dns": 1}
    assert [history.url async for history in seen.dead()] == [two.request.url]
    assert await seen.read_items(0, 10) == await frontier.read_items(0, 10)
    history = await seen.find(page(9))
    assert history is not None
    assert history.parent == one.request.url
    assert await looking.list_runs() == await store.list_runs() == [RUN]
    assert not (await seen.stats()).finished
    await looking.close()


async def test_a_readonly_store_cannot_be_changed(store: SQLiteStore, frontier: Frontier, path: Path) -> None:
    await frontier.push([page(1)])
    (lease,) = await lease_all(frontier)
    looking = await SQLiteStore.open(path, readonly=True)
    seen = await looking.frontier("r", OPTIONS)
    changes: list[Callable[[], object]] = [
        lambda: looking.create_run(RUN),
        lambda: looking.transition("r", "paused"),
        lambda: seen.push([page(2)]),
        lambda: seen.lease(1, 60),
        lambda: seen.renew([lease], 60),
        lambda: seen.reissue([lease], 60, nonce=bytes(16)),
        lambda: seen.complete([Completion(lease=lease)]),
        lambda: seen.fail([Failure(lease=lease, kind="dns", reason="")]),
        lambda: seen.release([lease]),
        lambda: seen.claim("seed", 60),
        lambda: seen.forget("seed"),
        lambda: seen.trim_items(1),
        lambda: seen.update_host("a.com", HostUpdate(delay=1.0)),
        lambda: seen.retry_dead(),
    ]
    for change in changes:
        with pytest.raises(StoreError, match="opened readonly"):
            await change()  # type: ignore[misc]
    await looking.close()
    assert (await frontier.stats()).leased == 1


# -- files that cannot be used


async def test_opening_readonly_creates_no_file(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no file"):
        await SQLiteStore.open(path, readonly=True)
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        await SQLiteStore.open(path, readonly=True)
    assert os.listdir(path.parent) == [path.name]


async def test_opening_creates_no_folder(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        await SQLiteStore.open(path / "sub.db")
    with pytest.raises(StoreError, match="Is a directory"):
        await SQLiteStore.open(path.parent)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("readonly", [False, True])
async def test_files_of_other_programs_are_not_changed(path: Path, readonly: bool) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE run (number)")
    other.close()
    for content, message in ((b"url,title\n" * 100, "not a database"), (path.read_bytes(), "another program")):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=message):
            await SQLiteStore.open(path, readonly=readonly)
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]


async def test_an_empty_file_can_be_used(path: Path) -> None:
    path.touch()
    store = await SQLiteStore.open(path)
    assert await store.list_runs() == []
    await store.close()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("PRAGMA user_version = 99", r"written by a newer Shoal \(format 99, this one knows \d+\); upgrade"),
        ("PRAGMA user_version = 4", r"written by an older Shoal .* Finish its runs with that version, and export .*; "
         "meanwhile name another file"),
        ("DROP TABLE seen", "damaged: it has no table seen"),
    ],
)  # fmt: skip
async def test_a_file_of_another_format_is_refused(path: Path, sql: str, message: str, readonly: bool) -> None:
    await (await SQLiteStore.open(path)).close()
    other = sqlite3.connect(path)
    other.execute(sql)
    other.close()
    with pytest.raises(StoreError, match=message) as caught:
        await SQLiteStore.open(path, readonly=readonly)
    assert "delete" not in str(caught.value)


FORMATS = Path(__file__).with_name("sqlite_formats")


@pytest.mark.parametrize("name", sorted(file.stem for file in FORMATS.iterdir()))
async def test_a_file_of_an_older_format_is_upgraded(name: str, path: Path) -> None:
    """The files were written by earlier versions, as SQL: 13 requests in all states, items, hosts, a role, an event. A
    reader leaves a file as it is."""
    with closing(sqlite3.connect(path)) as old:
        old.executescript((FORMATS / f"{name}.sql").read_text())
        old.execute("PRAGMA journal_mode = WAL")
        now = [old.execute("SELECT max(at) FROM request").fetchone()[0] + 10]
    format_before = _format_of(path)
    assert format_before == int(name[:2])
    for readonly in (True, False, False):
        assert _format_of(path) == format_before
        store = await SQLiteStore.open(path, readonly=readonly, clock=lambda: now[0])
        assert [(run.run_id, run.state, run.project) for run in await store.list_runs()] == [
            ("old", "running", "shoal")
        ]
        frontier = await store.frontier("old", FrontierOptions(concurrency_per_host=100, max_attempts=2))
        await check_balance(frontier)
        items = await frontier.read_items(0, 3)
        assert [(item.seq, item.payload) for item in items] == [(1, b"one"), (2, b"two"), (3, b"three")]
        assert await frontier.dead_kinds() == {"dns": 1}
        assert {state.host: state.delay for state in await frontier.host_states()}["h1.com"] == 0.25
        assert await frontier.recall("robots http://h1.com") == b"x"
        if not readonly and format_before != VERSION:
            format_before = VERSION
            claim = await frontier.claim("drain", 60)
            assert claim is not None
            assert claim.cursor == b"cursor"
            again = await frontier.push([page(number, f"h{number % 3}.com") for number in range(12)])
            assert again == Pushed(0, 12)
            assert (await frontier.push([page(99, "new.com")])).added == 1
            while leases := await lease_all(frontier):
                await frontier.complete([Completion(lease=lease, items=[b"new"]) for lease in leases])
                now[0] += 1
            stats = await frontier.stats()
            assert (stats.pushed, stats.done, stats.dead, stats.items) == (14, 13, 1, 14)
            await check_balance(frontier)
        await store.close()


_NO_COUNTERS = "".join(
    f"ALTER TABLE run DROP COLUMN {name};" for name in ("redirects", "item_errors", "trimmed", "options")
)
_NO_INVENTORY = "DROP TABLE inventory;" + "".join(
    f"DROP TRIGGER {name}_listed;" for name in ("role", "document", "host")
)
_OLDER = {
    10: f"{_NO_INVENTORY} {_NO_COUNTERS} ALTER TABLE role DROP COLUMN claim_epoch; PRAGMA user_version = 10",
    11: f"{_NO_INVENTORY} {_NO_COUNTERS} PRAGMA user_version = 11",
    12: f"{_NO_INVENTORY} PRAGMA user_version = 12",
}
"""Makes a file of an older format."""


@pytest.mark.parametrize("number", _OLDER)
async def test_a_file_of_an_older_format(store: SQLiteStore, frontier: Frontier, path: Path, number: int) -> None:
    """A reader leaves it as it is. A writer adds what is missing, and all else stays."""
    claim = await (await store.frontier("r", OPTIONS, Holder("w", 1))).claim("drain", 60)
    assert claim is not None
    assert await frontier.advance(claim, b"far", 60)
    await frontier.push([page(1)])
    await store.close()
    other = sqlite3.connect(path)
    other.executescript(_OLDER[number])
    other.close()

    reader = await SQLiteStore.open(path, readonly=True)
    view = await reader.frontier("r")
    assert [state.ready for state in await view.host_states()] == [1]
    (seen,) = await view.roles()
    assert (seen.role, seen.cursor, seen.holder) == ("drain", b"far", "w")
    assert (await view.stats()).pushed == 1
    await reader.close()
    assert _format_of(path) == number

    for claims in range(2):  # the second time, nothing is left to change
        writer = await SQLiteStore.open(path)
        again = await writer.frontier("r", OPTIONS)
        successor = await again.claim("drain", 60)
        assert successor is not None
        assert (successor.cursor, (await again.stats()).pushed) == (b"far", 1)
        assert successor.epoch > claim.epoch + claims
        await check_balance(again)
        await writer.close()
        assert _format_of(path) == VERSION

    with closing(sqlite3.connect(path)) as other:
        other.execute("DELETE FROM role")
        other.commit()
    reader = await SQLiteStore.open(path, readonly=True)
    assert [fault.example for fault in (await (await reader.frontier("r")).audit()).faults] == ["drain"]
    await reader.close()


def _format_of(path: Path) -> int:
    file = sqlite3.connect(path)
    (version,) = file.execute("PRAGMA user_version").fetchone()
    file.close()
    return int(version)


async def test_a_damaged_file_is_refused(path: Path) -> None:
    store = await SQLiteStore.open(path)
    await store.create_run(RUN)
    frontier = await store.frontier("r", OPTIONS)
    await frontier.push([page(number) for number in range(5000)])
    await store.close()
    content = path.read_bytes()

    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match="damaged"):
        await (await SQLiteStore.open(path)).frontier("r", OPTIONS)
    path.with_name(path.name + "-wal").unlink(missing_ok=True)

    broken = content[:8192] + random.Random(1).randbytes(len(content) - 8192)
    path.with_name("broken.db").write_bytes(broken)
    with pytest.raises(StoreError, match="damaged"):
        await (await SQLiteStore.open(path.with_name("broken.db"))).frontier("r", OPTIONS)


async def test_a_closed_store_refuses_calls(store: SQLiteStore, frontier: Frontier) -> None:
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="is closed"):
        await frontier.stats()
    with pytest.raises(StoreError, match="is closed"):
        await frontier.push([page(1)])


# -- a full disk


async def set_room(store: SQLiteStore, pages: int | None) -> None:
    """Let the file grow by this many pages, or without limit."""

    def limit() -> None:
        db = store._file.db
        (now,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {2**30 if pages is None else now + pages}")

    await store._file.read(limit)


@pytest.mark.parametrize("room", [0, 1, 3, 6])
async def test_a_full_disk_changes_nothing_and_work_resumes_when_there_is_room(
    store: SQLiteStore, frontier: Frontier, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_seen, "_MAX_IN_MEMORY", 50)
    await frontier.push([page(number, f"h{number % 3}.com", priority=number % 2) for number in range(100)])
    leases = await lease_all(frontier, 10)
    before = (await frontier.stats(), await frontier.host_states())
    children = [page(number, f"h{number % 7}.com") for number in range(100, 400)]
    completions = [Completion(lease=lease, items=[b"x" * 5000], children=children) for lease in leases]

    await set_room(store, room)
    with pytest.raises(FrontierError, match="no room on the disk"):
        await frontier.push(children)
    with pytest.raises(FrontierError, match="no room on the disk"):
        await frontier.complete(completions)
    with pytest.raises(FrontierError, match="no room on the disk"):
        await frontier.fail([Failure(lease=lease, kind="x", reason="y" * 90_000) for lease in leases])
    assert (await frontier.stats(), await frontier.host_states()) == before
    await check_balance(frontier)
    assert await frontier.find(children[0]) is None
    assert None not in await frontier.renew(leases, 60)

    await set_room(store, None)
    pushed = await frontier.complete(completions)
    assert [result.added for result in pushed if result] == [300] + 9 * [0]
    assert [item.index for item in await frontier.read_items(0, 100)] == 10 * [0]
    rest = await lease_all(frontier)
    assert [lease.request.priority for lease in rest] == sorted(
        (lease.request.priority for lease in rest), reverse=True
    )
    assert len({lease.fingerprint for lease in rest}) == 390
    await check_balance(frontier)


async def test_slots_keep_their_leases_after_a_full_disk(store: SQLiteStore, frontier: Frontier) -> None:
    await frontier.push([page(number) for number in range(3)])
    held_by = await store.frontier("r", OPTIONS, Holder("c/0", 1))
    leases = await lease_all(held_by, 2)
    plain = await lease_all(frontier)
    await set_room(store, 0)
    with pytest.raises(FrontierError, match="no room on the disk"):
        await held_by.complete([Completion(lease=lease, items=[b"x" * 90_000]) for lease in leases])
    await set_room(store, None)
    assert await frontier.fence("c/0", 2) == 2
    assert None not in await frontier.complete([Completion(lease=lease) for lease in plain])
    await check_balance(frontier)


async def test_leases_that_are_not_begun_stay_so_after_a_full_disk(store: SQLiteStore, frontier: Frontier) -> None:
    await frontier.push([page(number) for number in range(3)])
    first, second, third = (await frontier.lease(3, 60, counts_attempt=False)).leases
    (begun,) = await frontier.reissue([second], 60, nonce=b"one-receiver")
    assert begun is not None
    await set_room(store, 0)
    with pytest.raises(FrontierError, match="no room on the disk"):
        await frontier.complete([Completion(lease=first, items=[b"x" * 90_000])])
    await set_room(store, None)
    (again,) = await frontier.reissue([second], 60, nonce=b"one-receiver")
    assert again is not None
    assert again.token == begun.token
    assert await frontier.reissue([second], 60, nonce=b"another-receiver") == [None]
    for lease, attempts in ((first, 0), (second, 1), (third, 0)):
        found = await frontier.find(lease.request)
        assert found is not None
        assert found.attempts == attempts
    await check_balance(frontier)


FULL = """
import asyncio, resource, signal, sys
from shoal.errors import FrontierError
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request
from shoal.ports import Completion, FrontierOptions, Run

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = await SQLiteStore.open(sys.argv[1])
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
    frontier = await store.frontier("r", FrontierOptions(max_attempts=99, concurrency_per_host=1000))
    await frontier.push([Request("http://a.com/start")])
    limit(3_000_000)
    number = failed = 0
    leases = []
    while failed < 5:
        children = [Request(f"http://a.com/{number + child}") for child in range(500)]
        try:
            leases = leases or (await frontier.lease(1, 600)).leases
            await frontier.complete([Completion(lease=leases[0], items=[b"i" * 20_000], children=children)])
            number += 500
            leases = []
        except FrontierError as error:
            failed += 1
            print(error, flush=True)
        stats = await frontier.stats()
        assert stats.balanced and stats == await frontier.audit(), stats
        assert (stats.pushed, stats.items) == (number + 1, number / 500), stats
    limit(resource.RLIM_INFINITY)
    leases = leases or (await frontier.lease(1, 600)).leases
    await frontier.complete([Completion(lease=leases[0], children=[Request("http://b.com/")])])
    assert (await frontier.stats()).pushed == number + 2
    await store.close()
    print("done", number)

asyncio.run(main())
"""


async def test_a_process_on_a_really_full_disk_loses_nothing(path: Path) -> None:
    output, errors = spawn(FULL, path).communicate()
    assert errors == ""
    assert output.count("nothing was changed") == 5
    assert output.splitlines()[-1].startswith("done ")
    store = await SQLiteStore.open(path)
    frontier = await store.frontier("r", OPTIONS)
    await check_balance(frontier)
    assert (await frontier.stats()).leased == 0
    await store.close()


# -- what is kept in memory


async def test_a_run_has_one_frontier(store: SQLiteStore) -> None:
    one, two = await asyncio.gather(store.frontier("r", OPTIONS), store.frontier("r", OPTIONS))
    assert one is two
    with pytest.raises(RunError, match="no run x"):
        await store.frontier("x", OPTIONS)
    with pytest.raises(RunError, match="already"):
        await store.create_run(RUN)


async def test_a_refused_push_changes_nothing(store: SQLiteStore) -> None:
    frontier = await store.frontier("r", FrontierOptions(max_queue_size=3))
    await frontier.push([page(1), page(2)])
    with pytest.raises(QueueFullError):
        await frontier.push([page(3), page(4)])
    with pytest.raises(RequestError, match="cannot store"):
        await frontier.push([page(3), Request("http://a.com/", meta={"odd": object()})])
    assert [lease.request.url for lease in await lease_all(frontier)] == [page(1).url, page(2).url]
    await check_balance(frontier)


async def test_a_cancelled_lease_is_released(store: SQLiteStore, frontier: Frontier) -> None:
    await frontier.push([page(number) for number in range(10)])
    waiting = asyncio.create_task(frontier.lease(5, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stats = await frontier.stats()
    assert (stats.ready, stats.leased) == (10, 0)
    assert [lease.attempt for lease in await lease_all(frontier)] == 10 * [1]


async def test_urls_are_known_whether_indexed_or_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_seen, "_MAX_IN_MEMORY", 300)
    store = await SQLiteStore.open(path)
    await store.create_run(RUN)
    await store.create_run(Run(run_id="other", spider="s", state="running", created_at=2.0))
    pages = [page(number) for number in range(1000)]
    for start in range(0, 1000, 50):
        for run in ("r", "other"):
            frontier = await store.frontier(run, OPTIONS)
            pushed = await frontier.push(pages[max(0, start - 500) : start + 50])
            assert pushed.added == 50
    for _ in range(2):
        for run in ("r", "other"):
            frontier = await store.frontier(run, OPTIONS)
            assert (await frontier.push(pages)).added == 0
            assert None not in [await frontier.find(page) for page in pages[::50]]
            assert await frontier.find(page(1001)) is None
        await store.close()
        store = await SQLiteStore.open(path)
    with sqlite3.connect(path) as db:
        (indexed,) = db.execute("SELECT count(*) FROM seen WHERE run = 1").fetchone()
    assert 700 <= indexed < 1000
    looking = await SQLiteStore.open(path, readonly=True)
    frontier = await looking.frontier("r", OPTIONS)
    assert None not in [await frontier.find(page) for page in pages[::50]]
    await looking.close()
    await store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_requests_leave_in_the_order_of_a_frontier_in_memory(
    path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a lane has more ready requests than keys in memory."""
    monkeypatch.setattr(sqlite_lanes, "_MAX_AHEAD", 3)
    monkeypatch.setattr(sqlite_lanes, "_MIN_AHEAD", 2)
    rng, clock = random.Random(seed), FakeClock()
    stores: list[Store] = [MemoryStore(clock=clock), await SQLiteStore.open(path, clock=clock)]
    for store in stores:
        await store.create_run(RUN)
    for step in range(150):
        frontiers = [await store.frontier("r", OPTIONS) for store in stores]
        pages = [
            page(100 * step + number, rng.choice(("a.com", "b.com")), priority=rng.choice((0, 0, 0, 1, -2.5)))
            for number in range(rng.randrange(6))
        ]
        limit, outcomes = rng.randrange(7), rng.choices(("done", "released", "failed"), (5, 3, 1), k=7)
        leased = []
        for frontier in frontiers:
            await frontier.push(pages)
            leases = await lease_all(frontier, limit)
            leased.append([(lease.request, lease.attempt) for lease in leases])
            ended = list(zip(leases, outcomes, strict=False))
            await frontier.complete([Completion(lease=lease) for lease, outcome in ended if outcome == "done"])
            await frontier.release([lease for lease, outcome in ended if outcome == "released"])
            failures = [lease for lease, outcome in ended if outcome == "failed"]
            await frontier.fail([Failure(lease=lease, kind="k", reason="r", retry_in=2.0) for lease in failures])
        assert leased[0] == leased[1]
        clock.advance(rng.random())
        if rng.random() < 0.1:
            await stores[1].close()
            stores[1] = await SQLiteStore.open(path, clock=clock)
    await check_balance(await stores[1].frontier("r", OPTIONS))
    for store in stores:
        await store.close()


async def test_text_that_is_not_utf8_is_stored_with_replacements(frontier: Frontier) -> None:
    await frontier.push([page(1)])
    (lease,) = await lease_all(frontier)
    assert await frontier.fail([Failure(lease=lease, kind="odd", reason="sent \udcff and \0")]) == ["dead"]
    history = await frontier.find(page(1))
    assert history is not None
    assert history.reason == "sent ? and \0"


async def test_many_dead_requests_are_listed_and_retried(frontier: Frontier) -> None:
    await frontier.push([page(number, priority=number % 3) for number in range(250)])
    while leases := await lease_all(frontier):
        await frontier.fail([Failure(lease=lease, kind="dns", reason="no such host") for lease in leases])
    assert len({history.url async for history in frontier.dead()}) == 250
    assert await frontier.retry_dead(["dns"]) == 250
    assert [history async for history in frontier.dead()] == []
    leases = await lease_all(frontier, 100)
    assert [lease.attempt for lease in leases] == 100 * [1]
    assert [lease.request.url for lease in leases[:83]] == [page(number).url for number in range(2, 250, 3)]
    await check_balance(frontier)


# -- politeness


async def test_politeness_is_kept_in_the_file(path: Path) -> None:
    clock = FakeClock()
    store = await SQLiteStore.open(path, clock=clock)
    await store.create_run(RUN)
    frontier = await store.frontier("r", OPTIONS)
    update = HostUpdate(delay=2.0, concurrency=5, crawl_delay=3.0, learned_delay=4.0)
    await frontier.update_host("a.com", update)
    await frontier.update_host("b.com", HostUpdate(block_for=100.0, block_reason="429"))
    await frontier.push([page(1), page(2), page(1, "b.com")])
    (lease,) = await lease_all(frontier)
    await frontier.complete([Completion(lease=lease)])
    states = await frontier.host_states()
    await store.close()

    clock.advance(3.5)
    store = await SQLiteStore.open(path, clock=clock)
    frontier = await store.frontier("r", OPTIONS)
    assert [state.delay for state in await frontier.host_states()] == [state.delay for state in states] == [4.0, 0.0]
    leased = await frontier.lease(10, 60)
    assert leased.leases == []
    assert leased.wait == pytest.approx(0.5)
    clock.advance(0.5)
    (lease,) = await lease_all(frontier)
    assert lease.request.url == page(2).url
    await frontier.complete([Completion(lease=lease)])
    assert (await frontier.lease(10, 60)).wait == pytest.approx(96.0)
    clock.advance(96.0)
    assert [lease.host for lease in await lease_all(frontier)] == ["b.com"]
    await store.close()


async def test_two_runs_share_a_host(path: Path) -> None:
    clock = FakeClock()
    store = await SQLiteStore.open(path, clock=clock)
    frontiers = []
    for name in ("one", "two"):
        await store.create_run(Run(run_id=name, spider="s", state="running", created_at=1.0))
        frontiers.append(await store.frontier(name, FrontierOptions(concurrency_per_host=3, max_attempts=3)))
        await frontiers[-1].push([page(number) for number in range(5)])
    one, two = frontiers
    assert len(await lease_all(one, 2)) == 2
    assert len(await lease_all(two)) == 1
    assert await lease_all(one) == []
    await one.update_host("a.com", HostUpdate(delay=10.0))
    assert [state.delay for state in await two.host_states()] == [10.0]
    await store.close()

    # The process that held the leases of both runs is gone. Each run ends its own.
    clock.advance(1.0)
    store = await SQLiteStore.open(path, clock=clock)
    one = await store.frontier("one", OPTIONS)
    two = await store.frontier("two", OPTIONS)
    assert (await one.lease(10, 60)).wait == pytest.approx(10.0)
    clock.advance(10.0)
    assert len(await lease_all(one)) == 1
    assert await lease_all(two) == []
    assert [(await frontier.stats()).ready for frontier in (one, two)] == [4, 5]
    await store.close()


async def test_a_damaged_payload_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "crawl.db"
    store = await SQLiteStore.open(path)
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=0))
    frontier = await store.frontier("r", FrontierOptions())
    await frontier.push([Request("http://shop.example/")])
    await store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE request SET payload = x'FFFF'")
    db.close()
    store = await SQLiteStore.open(path)
    frontier = await store.frontier("r", FrontierOptions())
    with pytest.raises(StoreError, match="is damaged"):
        await frontier.lease(1, 60)
    await store.close()


async def test_the_room_of_a_file_is_that_of_its_disk(store: SQLiteStore, frontier: Frontier) -> None:
    before = await store.room()
    await frontier.push([page(1)])
    (lease,) = await lease_all(frontier)
    await frontier.complete([Completion(lease=lease, items=[os.urandom(5_000_000)])])
    full = await store.room()
    await store.delete_run("r")
    after = await store.room()
    assert before is not None
    assert full is not None
    assert after is not None
    assert before.total > full.used > 5_000_000
    assert after.used < full.used - 4_000_000  # pages that are free inside of the file
