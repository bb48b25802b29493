"""The parts of the memory and SQLite frontiers, each alone."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import stat
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from shoal.errors import FencedError, QueueFullError, StoreError, StoreRewoundError
from shoal.frontier.host_policy import effective_concurrency, effective_delay
from shoal.frontier.memory.items import ItemSpace, MemoryItemLog, MemoryRoles
from shoal.frontier.memory.requests import (
    NO_PARENT,
    Backlog,
    Fingerprints,
    Head,
    Records,
    Requests,
    encode_request,
    make_record,
    pack_head,
    read_record,
)
from shoal.frontier.politeness import OpenRuns
from shoal.frontier.postgres.columns import RequestColumns, read_request
from shoal.frontier.rules import (
    DONE,
    FAILED_EVENT,
    LEASED,
    LOST_EVENT,
    NOTE_EVENT,
    READY,
    RETRIED_EVENT,
    UNREADABLE,
    check_queue_size,
    is_retried,
    read_event,
    room_for_links,
)
from shoal.frontier.sqlite.file import SQLiteFile
from shoal.frontier.sqlite.items import SQLiteItemLog, SQLiteRoles
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.http import Request
from shoal.ports import FrontierOptions, Holder, Stats
from shoal.system import threads
from shoal.testing import FakeClock

# -- rules


@pytest.mark.parametrize(
    ("own", "default", "configured", "crawl", "learned", "expected"),
    [
        (None, None, 0.0, None, None, (0.0, "no delay")),
        (None, None, 1.0, None, None, (1.0, "download_delay")),
        (None, 2.0, 1.0, None, None, (2.0, "set for all hosts")),
        (0.0, 2.0, 1.0, None, None, (0.0, "no delay")),
        (0.5, 2.0, 1.0, None, None, (0.5, "set for this host")),
        (0.5, 2.0, 1.0, 3.0, 2.5, (3.0, "robots.txt Crawl-delay")),
        (0.5, 2.0, 1.0, 3.0, 4.0, (4.0, "learned from its answers")),
        (3.0, None, 1.0, 3.0, 3.0, (3.0, "set for this host")),
    ],
)
def test_the_largest_delay_is_in_force(
    own: float | None,
    default: float | None,
    configured: float,
    crawl: float | None,
    learned: float | None,
    expected: tuple[float, str],
) -> None:
    assert effective_delay(own, default, configured, crawl, learned) == expected


def test_the_most_specific_concurrency_is_in_force_unless_there_is_a_delay() -> None:
    assert effective_concurrency(0.0, None, None, 8) == 8
    assert effective_concurrency(0.0, None, 4, 8) == 4
    assert effective_concurrency(0.0, 16, 4, 8) == 16
    assert effective_concurrency(0.1, 16, 4, 8) == 1


def test_a_queue_is_full_only_for_new_requests() -> None:
    check_queue_size(None, 10**9, 1)
    check_queue_size(5, 4, 1)
    check_queue_size(5, 9, 0)
    with pytest.raises(QueueFullError, match="maximum of 5 requests"):
        check_queue_size(5, 4, 2)


def test_links_have_room_only_below_the_limit() -> None:
    assert room_for_links(None, 10**9) is None
    assert [room_for_links(5, queued) for queued in (0, 4, 5, 9)] == [5, 1, 0, 0]
    assert FrontierOptions(max_queue_size=5).link_limit is None
    assert FrontierOptions(overflow="refuse").link_limit is None
    assert FrontierOptions(max_queue_size=5, overflow="refuse").link_limit == 5


def test_robots_and_scope_are_retried_only_when_named() -> None:
    assert is_retried("timeout", None)
    assert not is_retried("robots", None)
    assert is_retried("robots", ["robots"])
    assert not is_retried("timeout", ["robots"])


def test_a_run_is_finished_when_nothing_remains_and_seeding_is_complete() -> None:
    assert Stats(pushed=2, done=1, dead=1).finished
    assert not Stats(seeding=True).finished
    for state in ("ready", "waiting", "leased", "incoming"):
        assert not Stats(**{state: 1}).finished


class _Run:
    def __init__(self) -> None:
        self.checks: list[float] = []

    def expire_leases(self, now: float) -> None:
        self.checks.append(now)


def test_leases_of_other_runs_are_checked_once_in_a_while() -> None:
    runs: OpenRuns[_Run] = OpenRuns(one=_Run(), two=_Run())
    for now in (10.0, 10.01, 10.04, 10.06):
        runs.expire_others(runs["one"], now)
    assert (runs["one"].checks, runs["two"].checks) == ([], [10.0, 10.06])


# -- requests in memory


def _requests(*urls: str, in_memory: int = 100) -> Requests:
    requests = Requests(FrontierOptions(in_memory=in_memory), {})
    new = requests.select_new((request.fingerprint(), request) for request in map(Request, urls))
    requests.add(new, NO_PARENT, len(urls), 0.0)
    return requests


def test_requests_are_added_once_and_counted() -> None:
    requests = _requests("http://a.example/1", "http://a.example/1", "http://b.example/2")
    assert (requests.pushed, requests.duplicates, requests.counts[READY]) == (2, 1, 2)
    assert sorted(requests.lanes.by_name) == ["a.example", "b.example"]


@pytest.mark.parametrize("in_memory", [100, 2])
def test_requests_leave_in_order_from_memory_and_disk(in_memory: int) -> None:
    urls = [f"http://a.example/{number}" for number in range(6)]
    requests = _requests(*urls, in_memory=in_memory)
    lane = requests.lane("a.example")
    assert [requests.take(lane, 1.0).request.url for _ in urls] == urls
    assert requests.counts[LEASED] == 6
    assert lane.best is None
    requests.close()


def test_requests_that_return_keep_their_place() -> None:
    rng, numbers = random.Random(5), list(range(3000))
    backlog = Backlog(0)
    for number in numbers:
        backlog.push(0.0, number)
    taken: list[int] = []
    while (found := backlog.best()) is not None:
        rank, number = found
        assert number == numbers[0]
        backlog.remove_best(rank, number)
        taken.append(numbers.pop(0))
        if rng.random() < 0.4:
            returned = taken.pop(rng.randrange(len(taken)))
            backlog.put_back(rank, returned)
            insort(numbers, returned)
    assert sorted(taken) == list(range(3000))


def test_a_queue_is_in_order_of_rank_and_number_while_it_grows_and_shrinks() -> None:
    rng, backlog = random.Random(7), Backlog(0)
    queued: list[tuple[float, int]] = []
    taken: list[tuple[float, int]] = []
    for number in range(5000):
        if rng.random() < 0.45:
            insort(queued, (rng.choice((-1.0, 0.0, 0.0, 2.5)), number))
            backlog.push(*next(each for each in queued if each[1] == number))
        elif taken and rng.random() < 0.2:
            insort(queued, taken[-1])
            backlog.put_back(*taken.pop())
        assert backlog.best() == (queued[0] if queued else None)
        if queued and rng.random() < 0.6:
            backlog.remove_best(*queued[0])
            taken.append(queued.pop(0))


def test_fingerprints_have_numbers() -> None:
    rng = random.Random(3)
    # Some start with the same bytes, and some bytes look like entries at other places.
    heads = [rng.randbytes(4) for _ in range(50)] + [bytes(4), bytes([0, 0, 0, 1])]
    names = list(
        {rng.choice(heads) + rng.randbytes(12) if rng.random() < 0.3 else rng.randbytes(16) for _ in range(5000)}
    )
    known, others = names[:4000], names[4000:]
    fingerprints = Fingerprints()
    assert fingerprints.find(known[0]) is None
    assert [fingerprints.add(name) for name in known] == list(range(4000))
    assert [fingerprints.find(name) for name in known] == list(range(4000))
    assert [fingerprints[number] for number in range(4000)] == known
    assert not any(fingerprints.find(name) is not None for name in others)


def test_records_are_changed_in_place_and_found_by_text() -> None:
    records = Records()
    head = Head(READY, 0, 0, 0, 0, 1.5, NO_PARENT)
    requests = [Request(f"http://a.example/{number}", meta={"n": number}) for number in range(3)]
    stored = [make_record(pack_head(head), encode_request(request)) for request in requests]
    records.append(stored[0])
    records.append(None)
    records.append(stored[2])
    records.set_head(0, head._replace(state=DONE, items=7, token=2**63 - 1))
    assert [records.is_on_disk(number) for number in range(3)] == [False, True, False]
    assert list(records.states()) == [DONE, READY, READY]
    records.put(1, stored[1])
    assert [records.request(number) for number in range(3)] == requests
    assert (records.head(0).token, records.head(0).items, records.head(1), records.head(2)) == (
        2**63 - 1,
        7,
        head,
        head,
    )
    assert list(records.search(b"example/1")) == [1]
    assert list(records.search(b"example/3")) == []
    assert read_record(stored[2]) == (head, requests[2])


def test_workers_have_numbers_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.frontier.rules.MAX_WORKERS", 2)
    requests = _requests()
    assert [requests.worker_number(name) for name in ("", "a", "b", "a", "c", "b")] == [0, 1, 2, 1, 0, 2]
    assert [requests.worker_name(number) for number in range(3)] == ["", "a", "b"]


# -- requests in PostgreSQL


@pytest.mark.parametrize("length", [17, 31, 32, 255, 256, 60_000])
def test_a_request_is_stored_in_postgresql_as_its_url_and_the_rest(length: int) -> None:
    url = "http://a.example/".ljust(length, "x")
    for request in (Request(url), Request(url, "parse_page", meta={"url": "http"}, depth=3, body=b"\xa3url")):
        columns = RequestColumns()
        columns.add(1, [(request.fingerprint(), request)])
        *_, (stored,), (payload,) = cast("tuple[tuple[Any, ...], ...]", columns.as_push())
        assert stored == url
        assert b"a.example" not in payload
        assert read_request(stored, payload) == request


# -- roles and item logs, in memory and in a file


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def run_file(tmp_path: Path, clock: FakeClock) -> AsyncIterator[RunFile]:
    file = SQLiteFile(tmp_path / "f.db", readonly=False)
    await file.open()
    run = (
        "INSERT INTO run (number, run_id, spider, state, created_at, settings, project)"
        " VALUES (1, 'r', 's', 'running', 0, '', 'p')"
    )
    await file.write(lambda: file.db.execute(run))
    yield RunFile(file, 1, clock)
    await file.close()


@pytest.fixture(params=["memory", "sqlite"])
def roles(request: pytest.FixtureRequest, run_file: RunFile, clock: FakeClock) -> MemoryRoles | SQLiteRoles:
    return MemoryRoles(clock) if request.param == "memory" else SQLiteRoles(run_file)


async def test_a_role_is_free_again_when_it_expires(roles: MemoryRoles | SQLiteRoles, clock: FakeClock) -> None:
    first = await roles.claim("drain", 5.0)
    assert first is not None
    assert await roles.advance(first, b"1", 5.0)
    assert await roles.claim("drain", 5.0) is None
    clock.advance(5.0)
    second = await roles.claim("drain", 5.0)
    assert second is not None
    assert second.cursor == b"1"
    assert not await roles.advance(first, b"2", 5.0)
    with pytest.raises(StoreRewoundError, match="drain"):
        await roles.advance(second.moved_to(b"7"), b"8", 5.0)
    assert await roles.relinquish(second, finished=True)
    assert [(state.held, state.finished) for state in await roles.roles()] == [(False, True)]


def test_a_fence_refuses_earlier_epochs(clock: FakeClock) -> None:
    roles = MemoryRoles(clock)
    roles.fence("cluster/0", 3)
    roles.check_holder(None)
    roles.check_holder(Holder("cluster/0", 3))
    roles.check_holder(Holder("cluster/1", 1))
    with pytest.raises(FencedError, match="epoch 3"):
        roles.check_holder(Holder("cluster/0", 2))
    with pytest.raises(FencedError):
        roles.fence("cluster/0", 2)


async def test_an_item_log_is_read_and_trimmed_in_memory() -> None:
    log = MemoryItemLog(MemoryRoles(lambda: 0.0), ItemSpace())
    assert log.append(b"a", [b"1", b"2"], 0) == 2
    assert log.append(b"a", [b"3"], 2) == 3
    await _check_log(log)
    assert log.count == 3


def _open_files() -> list[Path]:
    """Files without a name that this process has open."""
    files = Path("/proc/self/fd").iterdir()
    return [file for file in files if file.is_symlink() and os.readlink(file).endswith("(deleted)")]


async def test_items_beyond_a_limit_are_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.frontier.memory.items._FILE_BYTES", 2_000_000)
    space, roles = ItemSpace(), MemoryRoles(lambda: 0.0)
    space.limit = 1_000_000
    logs = [MemoryItemLog(roles, space), MemoryItemLog(roles, space)]
    before = len(_open_files())
    payloads = [random.Random(number).randbytes(300_000) for number in range(20)]
    for number, payload in enumerate(payloads):
        logs[number % 2].append(b"a", [payload], number // 2)
    assert space.held == 900_000
    files = _open_files()
    assert len(files) - before == 3
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files[before:])
    for place, log in enumerate(logs):
        items = await log.read_items(0, 100)
        assert [(item.seq, item.index, item.payload) for item in items] == [
            (number + 1, number, payload) for number, payload in enumerate(payloads[place::2])
        ]
        assert [item.seq for item in await log.read_items(3, 100, max_bytes=700_000)] == [4, 5]
    logs[0].clear()
    await logs[1].trim_items(9)
    assert len(_open_files()) - before == 1  # of the last item
    assert space.held == 0
    logs[1].append(b"a", [b"x"], 10)
    assert (space.held, [item.seq for item in await logs[1].read_items(0, 9)]) == (1, [10, 11])
    logs[1].clear()
    assert (space.held, len(_open_files())) == (0, before)


async def test_items_stay_in_memory_if_the_disk_is_full() -> None:
    space = ItemSpace()
    space.limit = 10
    log = MemoryItemLog(MemoryRoles(lambda: 0.0), space)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        log.append(b"a", [b"%d" % number * 20 for number in range(5)], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [item.payload for item in await log.read_items(0, 9)] == [b"%d" % number * 20 for number in range(5)]


async def test_an_item_log_is_read_and_trimmed_in_a_file(run_file: RunFile) -> None:
    log = SQLiteItemLog(run_file, SQLiteRoles(run_file))
    pages = [(b"a", 0, [b"1", b"2"]), (b"a", 2, [b"3"])]
    await run_file.change(lambda ledger, _: log.append(pages, ledger))
    await _check_log(log)
    assert await run_file.read(lambda: run_file.ledger().items) == 3


async def test_the_last_items_of_a_file_are_also_in_memory(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.frontier.sqlite.items._MAX_RECENT", 3 * 251)
    log = SQLiteItemLog(run_file, SQLiteRoles(run_file))

    def append(ledger: Ledger, fails: bool) -> None:
        log.append([(b"a", ledger.items, [b"%d" % (ledger.items % 10)])], ledger)
        if fails:
            raise ZeroDivisionError

    for fails in (False, False, True, False, False, True):
        with suppress(ZeroDivisionError):
            await run_file.change(lambda ledger, _, fails=fails: append(ledger, fails))
    in_file = [(1, b"0"), (2, b"1"), (3, b"2"), (4, b"3")]
    for after in range(5):
        assert [(item.seq, item.payload) for item in await log.read_items(after, 9)] == in_file[after:]
    await run_file.file.close()
    assert [item.seq for item in await log.read_items(1, 2)] == [2, 3]
    with pytest.raises(StoreError, match="closed"):
        await log.read_items(0, 1)


async def _check_log(log: MemoryItemLog | SQLiteItemLog) -> None:
    items = await log.read_items(0, 9)
    assert [(item.seq, item.index, item.payload) for item in items] == [(1, 0, b"1"), (2, 1, b"2"), (3, 2, b"3")]
    assert await log.read_items(1, 1) == items[1:2]
    await log.trim_items(2)
    assert await log.read_items(0, 9) == items[2:]


async def test_steps_run_in_order_even_if_their_caller_is_cancelled() -> None:
    thread, begun, may_end, done = threads.StepThread("steps"), Event(), Event(), list[str]()

    def first() -> int:
        begun.set()
        may_end.wait(10)
        done.append("first")
        return 1

    def fail() -> None:
        raise ZeroDivisionError

    running = asyncio.create_task(thread.run(first))
    await asyncio.to_thread(begun.wait, 10)
    cancelled = asyncio.create_task(thread.run(lambda: done.append("second")))
    await asyncio.sleep(0)
    cancelled.cancel()
    may_end.set()
    assert await running == 1
    with pytest.raises(ZeroDivisionError):
        await thread.run(fail)
    assert cancelled.cancelled()
    ended = Event()
    thread.stop(ended.set)
    assert await asyncio.to_thread(ended.wait, 10)
    assert done == ["first", "second"]


def test_states_have_fixed_numbers() -> None:
    """They are stored in files and on servers."""
    assert (READY, LEASED, DONE) == (0, 2, 3)


@pytest.mark.parametrize(
    ("stored", "kind", "attempt", "what"),
    [
        (FAILED_EVENT % 2, "failed", 2, "attempt 2 failed"),
        (LOST_EVENT, "lost", 0, "lease lost"),
        (NOTE_EVENT, "note", 0, "note"),
        (RETRIED_EVENT, "retried", 0, "retried"),
        (UNREADABLE, "unreadable", 0, "unreadable"),
    ],
)
def test_events_are_stored_by_kind(stored: str, kind: str, attempt: int, what: str) -> None:
    event = read_event(1.0, stored, "detail", "worker-1")
    assert (event.at, event.kind, event.attempt, event.detail, event.worker) == (
        1.0,
        kind,
        attempt,
        "detail",
        "worker-1",
    )
    assert event.what == what
