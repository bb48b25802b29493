"""Which requests enter the frontier, and `UrlWorkQueue`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Scheduler, Spider, SyncScheduler
from shoal.config import Config, QueueSettings, ScopeSettings
from shoal.crawling.run_queue import AdmittedLinks
from shoal.errors import (
    FilterConnectionException,
    FrontierError,
    LeaseLostError,
    QueueConnectionException,
    QueueFullError,
    QueueFullException,
    RequestError,
    RunError,
)
from shoal.frontier.memory import MemoryStore
from shoal.http import LinkBatch, Request
from shoal.ports import Completion, Frontier, FrontierOptions, Pushed, Run
from shoal.testing import FakeClock
from shoal.urls.normalize import Scope
from tests.support.names import steady

URL = "http://ex.com/"


async def frontier(clock: FakeClock | None = None, **options: Any) -> Frontier:
    store = MemoryStore(clock=clock or FakeClock())
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0))
    return await store.frontier("run", FrontierOptions(**options))


def scheduler_of(queue: Frontier, **scope: Any) -> Scheduler:
    return Scheduler(queue, Scope(ScopeSettings(**scope)), ttl=60)


@pytest.fixture
async def queue() -> Frontier:
    return await frontier()


@pytest.fixture
def scheduler(queue: Frontier) -> Scheduler:
    return scheduler_of(queue)


def urls(requests: Sequence[Request]) -> list[str]:
    return [request.url.removeprefix("http://ex.com") for request in requests]


def batch(*hrefs: str, base: str = URL, **options: Any) -> LinkBatch:
    return LinkBatch(base=base, hrefs=list(hrefs), **options)


# -- one request at a time


async def test_what_is_new_is_enqueued_once(scheduler: Scheduler) -> None:
    assert await scheduler.enqueue_request(Request(URL))
    assert not await scheduler.enqueue_request(Request(URL))
    assert not await scheduler.enqueue_request(Request(URL + "#f"))
    assert await scheduler.enqueue_request(Request(URL, method="POST"))
    assert await scheduler.enqueue_request(Request(URL, dont_filter=True))
    assert await scheduler.enqueue_requests([Request(URL), Request(URL + "1"), Request(URL + "2")]) == 2
    assert (await scheduler.frontier.stats()).pushed == 5


class Books(Spider):
    name = "books"
    settings = {"download_delay": 0, "scope.deny": ("private",)}


async def test_the_queue_of_a_spider(tmp_path: Path) -> None:
    config = Config(frontier=f"sqlite:///{tmp_path}/x.db", queue=QueueSettings(max_size=2))
    scheduler = await Scheduler.open(Books, config)
    assert await scheduler.idle()
    assert await scheduler.enqueue_request(Request(URL))
    assert not await scheduler.enqueue_request(Request(URL + "private"))
    assert await scheduler.enqueue_request(Request(URL + "2"))
    with pytest.raises(QueueFullError):
        await scheduler.enqueue_request(Request(URL + "3"))
    assert not await scheduler.is_duplicate(Request(URL + "3"))
    assert await scheduler.size() == 2
    request = await scheduler.next_request()
    assert request is not None
    assert (await scheduler.size(), await scheduler.has_pending_requests()) == (1, True)
    await scheduler.close()  # releases the request
    again = await Scheduler.open(Books(), config)  # the same run
    assert await again.size() == 2
    await again.close()
    other = await Scheduler.open(Books, config, new_run=True)
    assert await other.size() == 0
    await other.close()


async def test_asking_for_a_duplicate_records_nothing(scheduler: Scheduler) -> None:
    assert not await scheduler.is_duplicate(Request(URL))
    assert await scheduler.enqueue_request(Request(URL))
    assert await scheduler.is_duplicate(Request(URL + "#part"))
    assert not await scheduler.is_duplicate(Request(URL, method="POST"))
    assert not await scheduler.is_duplicate(Request(URL, dont_filter=True))


async def test_each_url_is_logged_at_debug(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", "shoal.scheduler"), monkeypatch.context() as patch:
        patch.setattr(scheduler.frontier, "find", None)  # nothing is looked up for a log that is off
        patch.setattr(scheduler.frontier, "stats", None)
        await scheduler.enqueue_requests([Request(URL)])
    with caplog.at_level("DEBUG", "shoal.scheduler"):
        await scheduler.enqueue_requests([Request(URL), Request(URL + "1", priority=7.5), Request(URL + "1")])
    assert caplog.messages == [
        f"duplicate {URL} (priority 0, 2 in the queue)",
        f"enqueued {URL}1 (priority 7.5, 2 in the queue)",
        f"duplicate {URL}1 (priority 0, 2 in the queue)",
    ]


def test_the_methods_of_a_script(tmp_path: Path) -> None:
    config = Config(frontier=f"sqlite:///{tmp_path}/x.db", queue=QueueSettings(max_size=3))
    with SyncScheduler(Books, config) as scheduler:
        assert scheduler.idle()
        assert [scheduler.enqueue_request(Request(f"{URL}{priority}", priority=priority)) for priority in (1, 3, 2)]
        assert not scheduler.enqueue_request(Request(URL + "1"))
        assert scheduler._is_duplicate(Request(URL + "1"))
        assert scheduler.filter.check_duplicate(Request(URL + "1"))
        assert not scheduler.filter.check_duplicate(Request(URL + "4"))
        with pytest.raises(QueueFullException):
            scheduler._schedule_request(Request(URL + "4"))
        fetched = []
        while scheduler.has_pending_requests():
            request = scheduler.next_request()
            assert request is not None
            fetched.append((request.url, scheduler.queue_manager.size()))
        assert fetched == [(URL + "3", 2), (URL + "2", 1), (URL + "1", 0)]
        assert scheduler.next_request() is None
    with SyncScheduler(Books, config) as scheduler:
        assert scheduler.idle()
        assert scheduler.is_duplicate(Request(URL + "1"))
    with pytest.raises(RunError, match="the scheduler is closed; open a new one"):
        scheduler.enqueue_request(Request(URL))


def test_the_attributes_of_a_script_and_many_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(frontier=f"sqlite:///{tmp_path}/x.db", download_delay=0.5, queue=QueueSettings(max_size=100))
    with SyncScheduler(Books, config) as scheduler, caplog.at_level("DEBUG", scheduler.logger.name):
        assert (scheduler.settings.download_delay, scheduler.settings.queue.max_size) == (0.5, 100)
        requests = [Request(f"{URL}{number}") for number in range(100)]
        assert scheduler.enqueue_requests(requests) == 100
        assert scheduler.enqueue_requests(requests[:10]) == 0
        with pytest.raises(QueueFullException):
            scheduler.enqueue_requests([Request(URL + "new"), Request(URL + "newer")])
        assert scheduler.size() == 100
    assert caplog.messages[0] == f"enqueued {URL}0 (priority 0, 100 in the queue)"


def test_a_request_of_a_script_that_fails_is_not_lost(tmp_path: Path) -> None:
    config = Config(frontier=f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(ZeroDivisionError), SyncScheduler(Books, config) as scheduler:  # noqa: PT012
        scheduler.enqueue_request(Request(URL))
        scheduler.next_request()
        1 / 0  # noqa: B018
    with SyncScheduler(Books, config, settle=False) as scheduler:
        request = scheduler.next_request()
        assert request is not None
        assert scheduler.fail(request, "busy", retry_in=0.0) == "waiting"
        request = scheduler.next_request()
        assert request is not None
        scheduler.release(request)
        request = scheduler.next_request()
        assert request is not None
        assert scheduler.has_pending_requests()
        scheduler.complete(request)
        assert scheduler.idle()


def test_a_script_waits_while_another_one_has_the_last_request(tmp_path: Path) -> None:
    """Else its loop would ask the store without a pause. Requests that it holds itself are nothing to wait for."""
    config = Config(frontier=f"sqlite:///{tmp_path}/x.db")
    with SyncScheduler(Books, config, settle=False) as scheduler:
        scheduler.enqueue_request(Request(URL))
        held = scheduler.next_request()
        begin = time.monotonic()
        assert scheduler.next_request() is None
        assert time.monotonic() - begin < 0.5
        other, store = scheduler._scheduler, scheduler._scheduler.frontier
        scheduler._scheduler = Scheduler(store, other.scope)  # another process
        assert scheduler.next_request() is None
        assert time.monotonic() - begin > 1
        scheduler._scheduler = other
        assert held is not None
        scheduler.complete(held)
        assert scheduler.next_request() is None


def test_a_store_that_is_away_has_the_names_of_a_connection() -> None:
    for kind in (QueueConnectionException, FilterConnectionException):
        with pytest.raises(kind):
            SyncScheduler(Books, {"frontier": "redis://127.0.0.1:9/0"})


async def test_what_is_outside_is_not_enqueued(queue: Frontier) -> None:
    scheduler = scheduler_of(queue, deny=("private",), max_depth=1)
    assert not await scheduler.enqueue_request(Request(URL + "private"))
    assert not await scheduler.enqueue_request(Request(URL + "deep", depth=2))
    assert await scheduler.enqueue_requests([Request(URL + "private")]) == 0
    assert await scheduler.enqueue_requests([]) == 0
    assert (await queue.stats()).pushed == 0
    assert await scheduler.enqueue_request(Request(URL + "deep", depth=1))


async def test_a_request_is_worked_on_and_completed(scheduler: Scheduler, queue: Frontier) -> None:
    assert await scheduler.next_request() is None
    await scheduler.enqueue_request(Request(URL, meta={"a": 1}, callback="book"))
    request = await scheduler.next_request()
    assert request == Request(URL, meta={"a": 1}, callback="book")
    assert await scheduler.next_request() is None
    assert await scheduler.complete(request, items=[b"item"], children=[Request(URL), Request(URL + "1")]) == 1
    assert [item.payload for item in await queue.read_items(0, 9)] == [b"item"]
    child = await scheduler.next_request()
    assert child is not None
    assert child.url == URL + "1"


async def test_the_best_comes_first(scheduler: Scheduler) -> None:
    await scheduler.enqueue_requests([Request(URL + "1"), Request(URL + "2", priority=5), Request(URL + "3")])
    assert [request.url[-1] for _ in range(3) if (request := await scheduler.next_request())] == ["2", "1", "3"]
    assert len((await scheduler.next_requests(3)).leases) == 0


async def test_a_request_that_fails_waits_or_dies() -> None:
    clock = FakeClock()
    scheduler = scheduler_of(await frontier(clock, max_attempts=2))
    await scheduler.enqueue_request(Request(URL))
    first = await scheduler.next_request()
    assert first is not None
    assert await scheduler.fail(first, "no luck", retry_in=10) == "waiting"
    assert await scheduler.next_request() is None
    assert await scheduler.has_pending_requests()
    clock.advance(11)
    second = await scheduler.next_request()
    assert second is not None
    assert await scheduler.fail(second, "no luck", retry_in=10) == "failed"
    assert await scheduler.idle()
    history = await scheduler.frontier.find(Request(URL))
    assert history is not None
    assert (history.state, history.reason) == ("dead", "no luck")


async def test_a_request_that_is_released_comes_again(scheduler: Scheduler) -> None:
    await scheduler.enqueue_request(Request(URL))
    request = await scheduler.next_request()
    assert request is not None
    await scheduler.release(request)
    assert await scheduler.next_request() == request


async def test_pending_and_idle(scheduler: Scheduler) -> None:
    assert await scheduler.idle()
    await scheduler.enqueue_request(Request(URL))
    assert await scheduler.has_pending_requests()
    request = await scheduler.next_request()
    assert request is not None
    assert not await scheduler.idle()  # it is still being worked on
    await scheduler.complete(request)
    assert await scheduler.idle()
    assert not await scheduler.has_pending_requests()


@pytest.mark.parametrize("act", ["complete", "fail", "release"])
async def test_a_lost_lease_changes_nothing(act: str) -> None:
    clock = FakeClock()
    queue = await frontier(clock)
    scheduler, other = scheduler_of(queue), scheduler_of(queue)
    await scheduler.enqueue_request(Request(URL))
    request = await scheduler.next_request()
    clock.advance(61)
    again = await other.next_request()
    assert again == request
    assert request is not None
    before = await queue.stats()
    steps: dict[str, Callable[[Request], Awaitable[object]]] = {
        "complete": lambda late: scheduler.complete(late, items=[b"x"], children=[Request(URL + "1")]),
        "fail": lambda late: scheduler.fail(late, "late"),
        "release": scheduler.release,
    }
    with pytest.raises(LeaseLostError, match="was lost; nothing was changed"):
        await steps[act](request)
    assert await queue.stats() == before
    assert again is not None
    await other.complete(again)


async def test_what_did_not_come_from_the_queue_can_not_be_settled(scheduler: Scheduler) -> None:
    await scheduler.enqueue_request(Request(URL))
    request = await scheduler.next_request()
    assert request is not None
    with pytest.raises(RequestError, match="was not returned by next_request"):
        await scheduler.complete(Request(URL))
    await scheduler.complete(request)
    for step in (scheduler.complete(request), scheduler.fail(request, "x"), scheduler.release(request)):
        with pytest.raises(RequestError, match="is already settled"):
            await step


async def test_a_full_queue_leaves_no_trace() -> None:
    queue = await frontier(max_queue_size=2)
    scheduler = scheduler_of(queue)
    await scheduler.enqueue_request(Request(URL + "1"))
    with pytest.raises(QueueFullError):
        await scheduler.enqueue_requests([Request(URL + "2"), Request(URL + "3")])
    assert await queue.find(Request(URL + "2")) is None
    assert (await queue.stats()).pushed == 1
    assert await scheduler.enqueue_request(Request(URL + "2"))
    with pytest.raises(QueueFullError):
        await scheduler.enqueue_request(Request(URL + "3"))
    request = await scheduler.next_request()
    assert request is not None
    await scheduler.complete(request)
    assert await scheduler.enqueue_request(Request(URL + "3"))


async def test_close_gives_back_what_is_out(scheduler: Scheduler, queue: Frontier) -> None:
    await scheduler.enqueue_requests([Request(URL + "1"), Request(URL + "2")])
    first = await scheduler.next_request()
    assert first is not None
    await scheduler.complete(first)
    await scheduler.next_request()
    await scheduler.close()
    await scheduler.close()
    stats = await queue.stats()
    assert (stats.ready, stats.leased, stats.done) == (1, 0, 1)


class Failing:
    """A frontier that can't be reached for a while."""

    def __init__(self, inner: Frontier) -> None:
        self.inner = inner
        self.down = False

    def __getattr__(self, name: str) -> Any:
        if self.down:
            raise FrontierError("down")
        return getattr(self.inner, name)


async def test_a_step_that_could_not_be_taken_can_be_taken_again(queue: Frontier) -> None:
    failing = Failing(queue)
    scheduler = scheduler_of(failing)
    await scheduler.enqueue_request(Request(URL))
    request = await scheduler.next_request()
    assert request is not None
    failing.down = True
    for step in (
        scheduler.complete(request),
        scheduler.fail(request, "x"),
        scheduler.release(request),
        scheduler.close(),
    ):
        with pytest.raises(FrontierError, match="down"):
            await step
    failing.down = False
    assert await scheduler.complete(request) == 0


# -- what a page found


def test_admit_resolves_links(scheduler: Scheduler) -> None:
    options: dict[str, Any] = {
        "callback": "book",
        "errback": "oops",
        "priority": 2.0,
        "headers": {"A": "b"},
        "cookies": {"c": "d"},
    }
    links = batch("/1", "x", "mailto:a@b", "#f", "/1", **options, meta={"m": 1})
    admitted = scheduler.admit([links, Request(URL + "2", priority=1)], Request(URL, depth=3))
    assert admitted.children == [
        Request(URL + "1", depth=4, **options, meta={"m": 1}),
        Request(URL + "x", depth=4, **options, meta={"m": 1}),
        Request(URL + "2", depth=4, priority=1),
    ]
    assert admitted.duplicates == 1
    assert admitted.out_of_scope == 0


def test_admit_keeps_to_the_depth(queue: Frontier) -> None:
    scheduler = scheduler_of(queue, max_depth=2)
    found: list[Request | LinkBatch] = [batch("/1", "/2"), Request(URL + "3")]
    assert len(scheduler.admit(found, Request(URL, depth=1)).children) == 3
    admitted = scheduler.admit(found, Request(URL, depth=2))
    assert (admitted.children, admitted.out_of_scope, admitted.hrefs) == ([], 3, [])


def test_admit_keeps_to_the_scope(queue: Frontier) -> None:
    scheduler = scheduler_of(queue, allowed_domains=("ex.com",), deny=("private",), max_url_length=100)
    found: list[Request | LinkBatch] = [
        batch("/1", "/private", "http://evil.org/", "/" + "x" * 100),
        Request(URL + "private"),
        Request(URL + "2"),
    ]
    admitted = scheduler.admit(found, Request(URL))
    assert urls(admitted.children) == ["/1", "/2"]
    assert admitted.out_of_scope == 4


def test_a_batch_that_is_not_filtered_is_not_learned(scheduler: Scheduler) -> None:
    links = batch("/1", "/2", dont_filter=True)
    for _ in range(2):
        admitted = scheduler.admit([links], Request(URL))
        scheduler.learn(admitted)
        assert urls(admitted.children) == ["/1", "/2"]
        assert all(child.dont_filter for child in admitted.children)
        assert admitted.duplicates == 0


def test_a_known_link_is_still_found_by_a_batch_that_is_not_filtered(scheduler: Scheduler) -> None:
    scheduler.learn(scheduler.admit([batch("/1")], Request(URL)))
    assert urls(scheduler.admit([batch("/1")], Request(URL)).children) == []
    assert urls(scheduler.admit([batch("/1", dont_filter=True)], Request(URL)).children) == ["/1"]


@pytest.mark.parametrize(
    "found",
    [
        Request(URL, meta={"a": object()}),
        Request(URL, meta={"a": [2**70]}),
        Request(URL, meta={"a": "\ud800"}),
        batch("/1", meta={"a": object()}),
        batch("/1", headers={"a": "b\r\nc"}),
        batch("/1", priority="high"),
    ],
    ids=steady,
)
def test_what_could_not_be_stored_is_refused_for_its_page_alone(scheduler: Scheduler, found: Any) -> None:
    with pytest.raises(RequestError):
        scheduler.admit([batch("/2"), found], Request(URL))
    assert urls(scheduler.admit([batch("/1", "/2")], Request(URL)).children) == ["/1", "/2"]  # nothing was learned


# -- nothing is learned before it is committed


async def commit(
    queue: Frontier, scheduler: Scheduler, admitted: AdmittedLinks, completion: Completion
) -> Pushed | None:
    """As the engine does it."""
    completion.children = admitted.children
    (pushed,) = await queue.complete([completion])
    if pushed is not None:
        scheduler.learn(admitted)
    return pushed


async def test_a_link_is_skipped_only_once_the_frontier_has_it(queue: Frontier) -> None:
    scheduler = scheduler_of(queue)
    await queue.push([Request(URL + "page")])
    (lease,) = (await queue.lease(1, 60)).leases
    first = scheduler.admit([batch("/1", "rel", "http://ex.com/3")], lease.request)
    again = scheduler.admit([batch("/1", "rel", "http://ex.com/3")], lease.request)
    assert urls(first.children) == urls(again.children) == ["/1", "/rel", "/3"]
    assert await commit(queue, scheduler, first, Completion(lease=lease)) == Pushed(3, 0)
    after = scheduler.admit([batch("/1", "rel", "http://ex.com/3", "/4")], lease.request)
    assert urls(after.children) == ["/4"]
    assert after.duplicates == 3
    elsewhere = LinkBatch(base=URL + "folder/page", hrefs=["/1", "rel"])
    assert urls(scheduler.admit([elsewhere], lease.request).children) == ["/folder/rel"]  # relative to another folder


async def test_a_completion_that_fails_never_hides_a_link() -> None:
    clock = FakeClock()
    queue = await frontier(clock)
    scheduler = scheduler_of(queue)
    await queue.push([Request(URL + "page")])
    (lost,) = (await queue.lease(1, 60)).leases
    clock.advance(61)
    (lease,) = (await queue.lease(1, 60)).leases
    late = scheduler.admit([batch("/1", "/2")], lost.request)
    assert await commit(queue, scheduler, late, Completion(lease=lost)) is None
    assert (await queue.stats()).pushed == 1
    admitted = scheduler.admit([batch("/1", "/2")], lease.request)
    assert await commit(queue, scheduler, admitted, Completion(lease=lease)) == Pushed(2, 0)


PAGES = st.lists(
    st.tuples(
        st.sampled_from(["http://ex.com/", "http://ex.com/a/b", "http://other.org/a/"]),
        st.lists(
            st.sampled_from(["/1", "1", "../1", "http://ex.com/1", "//ex.com/2", "/2", "httpd", "#f", "mailto:x"])
        ),
        st.booleans(),
    ),
    max_size=12,
)


@given(PAGES)
async def test_whatever_is_committed_or_lost_every_link_gets_there(pages: list[tuple[str, list[str], bool]]) -> None:
    """What the frontier has at the end is what the pages that were committed link to, not less and not more."""
    queue = await frontier()
    scheduler = scheduler_of(queue)
    expected: set[str] = set()
    for number, (base, hrefs, kept) in enumerate(pages):
        page = f"http://pages/{number}"
        await queue.push([Request(page, priority=9)])
        (lease,) = (await queue.lease(1, 60)).leases
        assert lease.request.url == page
        admitted = scheduler.admit([batch(*hrefs, base=base)], lease.request)
        completion = Completion(lease=lease)
        if not kept:
            await queue.release([lease])
            assert await commit(queue, scheduler, admitted, completion) is None
            (lease,) = (await queue.lease(1, 60)).leases
            await queue.complete([Completion(lease=lease)])
            continue
        expected |= {request.url for request in batch(*hrefs, base=base)}
        pushed = await commit(queue, scheduler, admitted, completion)
        assert pushed is not None
    stats = await queue.stats()
    assert stats.pushed == len(pages) + len(expected)
    for url in expected:
        assert await queue.find(Request(url)) is not None


async def test_a_repeated_lease_under_a_page_limit_returns_what_it_leased() -> None:
    """Its answer was lost: its own leases must not count as those of others."""
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="x", state="running", created_at=0.0))
    frontier = await store.frontier("run", FrontierOptions(concurrency_per_host=100))
    await frontier.push([Request(f"http://a.example/{number}") for number in range(9)])
    scheduler = Scheduler(frontier, Scope(ScopeSettings()), max_pages=5, shared=True)
    nonce = b"the nonce of a call"
    first = await scheduler.next_requests(9, nonce=nonce)
    again = await scheduler.next_requests(9, nonce=nonce)
    assert len(first.leases) == 5
    assert [lease.token for lease in again.leases] == [lease.token for lease in first.leases]
    assert (await scheduler.next_requests(9, nonce=nonce[::-1])).leases == []


def test_a_request_for_a_known_page_is_a_duplicate(scheduler: Scheduler) -> None:
    page = Request(URL)
    first = scheduler.admit(
        [Request(URL + "a"), Request(URL + "b", dont_filter=True), Request(URL + "c", method="POST")], page
    )
    assert len(first.children) == 3
    assert not scheduler.is_known(URL + "a")  # not before it is stored
    scheduler.learn(first)
    assert [scheduler.is_known(URL + each) for each in "abc"] == [True, False, False]
    again = [
        Request(URL + "a", meta={"x": 1}), Request(URL + "a", dont_filter=True), Request(URL + "a", method="POST"),
        Request(URL + "b"), Request(URL + "c"),
    ]  # fmt: skip
    second = scheduler.admit(again, page)
    assert second.children == again[1:]
    assert second.duplicates == 1
    scheduler.forget()
    assert not scheduler.is_known(URL + "a")
    assert scheduler.admit(again[:1], page).children == again[:1]


@pytest.mark.parametrize("dropped", ["http://ex.com/target#", "/target?a b"])
def test_links_beyond_the_limits_of_a_page_are_not_known(scheduler: Scheduler, dropped: str) -> None:
    """A page with a very long base and many odd links must not hide the links of other pages."""
    base = URL + "x" * 60_000 + "/"
    odd = LinkBatch(base=base, hrefs=[*(f"/{number} x" for number in range(300)), dropped])
    first = scheduler.admit([odd], Request(URL))
    assert len(first.children) < 300
    scheduler.learn(first)
    for page in (base, URL):
        assert len(scheduler.admit([LinkBatch(base=page, hrefs=[dropped])], Request(URL)).children) == 1
