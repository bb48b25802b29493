"""What is known of a URL and of a host."""

from __future__ import annotations

import time
from functools import partial

import msgspec
import pytest

from shoal.config import Config
from shoal.fetch.layers.identity_facts import IdentityFacts, Removal
from shoal.fetch.layers.robots import fact_name
from shoal.fetch.routing import LearnedNeeds
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.item import encode_item
from shoal.operations.hosts import MAX_ROBOTS, report_host
from shoal.operations.url_report import (
    MAX_ITEMS,
    MAX_PARENTS,
    MAX_TEXT,
    Agent,
    find_range,
    read_agent,
    read_url_items,
    report_url,
)
from shoal.ports import Completion, Frontier, FrontierOptions, HostUpdate, Run
from shoal.ports.documents import StoredValue
from shoal.runs.reports import ProcessReport, process_key
from shoal.runs.samples import RunSample

SITE = "http://a.example"
AGENT = Agent(Config().user_agent)
ROBOTS = b"User-agent: *\nDisallow: /private\nCrawl-delay: 3\n"


@pytest.fixture
async def store() -> MemoryStore:
    made = MemoryStore()
    for name in ("one", "two"):
        await made.create_run(Run(run_id=name, spider="books", state="running", created_at=time.time()))
    return made


@pytest.fixture
async def frontier(store: MemoryStore) -> Frontier:
    return await store.frontier("one", FrontierOptions(concurrency_per_host=100))


def _replaced_by(report: ProcessReport, _: ProcessReport | None) -> ProcessReport:
    return report


async def follow(frontier: Frontier, *paths: str) -> None:
    """Each page links to the next one."""
    await frontier.push([Request(SITE + paths[0])])
    for path in paths[1:]:
        (lease,) = (await frontier.lease(1, 60)).leases
        await frontier.complete([Completion(lease=lease, status=200, children=[Request(SITE + path)])])


async def test_the_chain_of_pages_that_led_to_a_url(frontier: Frontier) -> None:
    await follow(frontier, "/", "/a", "/b")
    report = await report_url(frontier, f"{SITE}/b", Config(), AGENT)
    assert report is not None
    assert report.parents == (f"{SITE}/a", f"{SITE}/")
    assert report.host.host == "a.example"
    assert await report_url(frontier, f"{SITE}/c", Config(), AGENT) is None


async def test_a_long_chain_is_cut(frontier: Frontier) -> None:
    await follow(frontier, *(f"/{number}" for number in range(MAX_PARENTS + 5)))
    report = await report_url(frontier, f"{SITE}/{MAX_PARENTS + 4}", Config(), AGENT, exact=True)
    assert report is not None
    assert len(report.parents) == MAX_PARENTS


@pytest.mark.parametrize(
    ("path", "is_read", "said"),
    [
        ("/", True, "allowed"),
        ("/", False, "allowed when it was fetched, or not checked"),
        ("/queued", False, "not read yet, or not checked"),
        ("/private/1", True, "disallowed"),
    ],
)
async def test_what_robots_says(path: str, is_read: bool, said: str, frontier: Frontier) -> None:
    await follow(frontier, "/", "/queued")
    await frontier.push([Request(f"{SITE}/private/1")])
    if is_read:
        await frontier.remember(fact_name(SITE), ROBOTS, 60)
    report = await report_url(frontier, SITE + path, Config(), AGENT)
    assert report is not None
    assert report.robots == said


async def test_disallowed_but_fetched(frontier: Frontier) -> None:
    await follow(frontier, "/private/1", "/b")
    await frontier.remember(fact_name(SITE), ROBOTS, 60)
    report = await report_url(frontier, f"{SITE}/private/1", Config(), AGENT)
    assert report is not None
    assert report.robots.startswith("disallowed, but fetched")


async def test_robots_for_the_user_agent_of_the_run(store: MemoryStore, frontier: Frontier) -> None:
    """Processes of the run report it. The newest report counts."""
    await follow(frontier, "/private/1", "/b")
    await frontier.remember(fact_name(SITE), b"User-agent: good\nAllow: /\n\nUser-agent: *\nDisallow: /\n", 60)
    assert await read_agent(store, "one", Config()) == AGENT
    for name, at, user_agent, obeys in (("old", 1.0, "bad", True), ("new", 2.0, "good/1.0", True)):
        report = ProcessReport(
            name=name, role="crawl", started_at=0.0, at=at, user_agent=user_agent, obeys_robots=obeys
        )
        await StoredValue(store, process_key("one", name), ProcessReport).change(partial(_replaced_by, report))
    agent = await read_agent(store, "one", Config())
    assert agent == Agent("good/1.0")
    for each, said in ((agent, "allowed"), (AGENT, "disallowed, but"), (Agent("x", obeys_robots=False), "not checked")):
        found = await report_url(frontier, f"{SITE}/private/1", Config(), each)
        assert found is not None
        assert found.robots.startswith(said)


async def test_the_first_items_of_a_url(store: MemoryStore, frontier: Frontier) -> None:
    await frontier.push([Request(f"{SITE}/{number}") for number in range(30)])
    for lease in (await frontier.lease(30, 60)).leases:
        number = lease.request.url.rpartition("/")[2]
        items = [encode_item({"page": number, "item": index, "text": "x" * 3000}) for index in range(8)]
        await frontier.complete([Completion(lease=lease, status=200, items=items if number != "3" else [])])
    for page, count in ((17, MAX_ITEMS), (3, 0)):
        history = await frontier.find(Request(f"{SITE}/{page}"))
        assert history is not None
        found = await read_url_items(store, frontier, "one", history)
        assert [text[:24] for text in found] == [f'{{"page":"17","item":{index},"te'[:24] for index in range(count)]
        assert all(len(text) == MAX_TEXT + 3 for text in found)
    await frontier.trim_items(240)
    history = await frontier.find(Request(f"{SITE}/17"))
    assert history is not None
    assert await read_url_items(store, frontier, "one", history) == []


def test_where_the_items_of_a_time_are() -> None:
    samples = [RunSample(100.0 * number, 0, 0, 0, 0, 0, 0, 1000 * number, 0, 0) for number in range(11)]
    assert find_range([], None, 20_000) == (15_000, 20_000)
    assert find_range([], 50.0, 300) == (0, 300)
    assert find_range(samples, 450.0, 10_000) == (3000, 6000)  # the clocks may differ by a minute
    assert find_range(samples, 2000.0, 12_000) == (10_000, 12_000)
    coarse = [samples[0], samples[10]]
    assert find_range(coarse, 450.0, 10_000) == (2000, 7000)


async def test_all_that_is_known_of_a_host(store: MemoryStore, frontier: Frontier) -> None:
    other = await store.frontier("two", FrontierOptions())
    await frontier.push([Request(f"{SITE}/{number}") for number in range(3)])
    await other.push([Request(f"{SITE}/{number}") for number in range(2)])
    await frontier.update_host("a.example", HostUpdate(delay=2.0))
    await frontier.remember(fact_name(SITE), ROBOTS, 60)
    await frontier.remember(fact_name("https://a.example"), b"x" * (MAX_ROBOTS + 1), 60)
    needs = {"/product/*": LearnedNeeds("browser", time.time() + 60)}
    await frontier.remember("render:a.example", msgspec.json.encode(needs), 60)
    facts = IdentityFacts(frontier)
    await facts.add_names(["first", "second", "third", "idle"])
    await facts.assign("a.example", "first", 60)
    await facts.rest("second", "a.example", "blocked with 403", 60)
    await facts.remove("third", Removal("refuses everything"), 60)

    report = await report_host(store, await store.list_runs(), Config(), "a.example")
    assert (report.state.delay, report.state.why, report.state.ready) == (2.0, "set for this host", 5)
    assert report.ready_by_run == {"one": 3, "two": 2}
    secure, plain = report.robots
    assert (secure.origin, len(secure.text), secure.is_cut) == ("https://a.example", MAX_ROBOTS, True)
    assert (plain.text, plain.is_cut, plain.crawl_delay) == (ROBOTS.decode(), False, 3.0)
    assert {each.identity: each.state for each in report.identities} == {
        "first": "active",
        "second": "resting",
        "third": "removed",
    }
    assert report.needs == {"/product/*": "browser"}
