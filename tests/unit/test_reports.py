"""What is known of a URL and of a host."""

from __future__ import annotations

import time

import msgspec
import pytest

from shoal.config import Config
from shoal.fetch.page_needs import Learned
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.identities.facts import IdentityFacts, Removal
from shoal.middleware.robots import fact_name
from shoal.monitoring.host_report import MAX_ROBOTS, report_host
from shoal.monitoring.url_report import MAX_PARENTS, report_url
from shoal.ports import Completion, Frontier, FrontierOptions, HostUpdate, Run

SITE = "http://a.example"
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


async def follow(frontier: Frontier, *paths: str) -> None:
    """Each page links to the next one."""
    await frontier.push([Request(SITE + paths[0])])
    for path in paths[1:]:
        (lease,) = (await frontier.lease(1, 60)).leases
        await frontier.complete([Completion(lease=lease, status=200, children=[Request(SITE + path)])])


async def test_the_chain_of_pages_that_led_to_a_url(frontier: Frontier) -> None:
    await follow(frontier, "/", "/a", "/b")
    report = await report_url(frontier, f"{SITE}/b", Config())
    assert report is not None
    assert report.parents == (f"{SITE}/a", f"{SITE}/")
    assert report.host.host == "a.example"
    assert await report_url(frontier, f"{SITE}/c", Config()) is None


async def test_a_long_chain_is_cut(frontier: Frontier) -> None:
    await follow(frontier, *(f"/{number}" for number in range(MAX_PARENTS + 5)))
    report = await report_url(frontier, f"{SITE}/{MAX_PARENTS + 4}", Config(), exact=True)
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
    report = await report_url(frontier, SITE + path, Config())
    assert report is not None
    assert report.robots == said


async def test_disallowed_but_fetched(frontier: Frontier) -> None:
    await follow(frontier, "/private/1", "/b")
    await frontier.remember(fact_name(SITE), ROBOTS, 60)
    report = await report_url(frontier, f"{SITE}/private/1", Config())
    assert report is not None
    assert report.robots.startswith("disallowed, but fetched")


async def test_all_that_is_known_of_a_host(store: MemoryStore, frontier: Frontier) -> None:
    other = await store.frontier("two", FrontierOptions())
    await frontier.push([Request(f"{SITE}/{number}") for number in range(3)])
    await other.push([Request(f"{SITE}/{number}") for number in range(2)])
    await frontier.update_host("a.example", HostUpdate(delay=2.0))
    await frontier.remember(fact_name(SITE), ROBOTS, 60)
    await frontier.remember(fact_name("https://a.example"), b"x" * (MAX_ROBOTS + 1), 60)
    needs = {"/product/*": Learned("browser", time.time() + 60)}
    await frontier.remember("render:a.example", msgspec.json.encode(needs), 60)
    facts = IdentityFacts(frontier)
    await facts.add_names(["first", "second", "third", "idle"])
    await facts.assign("a.example", "first", 60)
    await facts.rest("second", "a.example", "blocked with 403", 60)
    await facts.remove("third", Removal("refuses everything"), 60)

    report = await report_host(store, await store.list_runs(), Config(), "a.example")
    assert (report.state.delay, report.state.why, report.state.ready) == (2.0, "set for this host", 5)
    assert report.queued == {"one": 3, "two": 2}
    secure, plain = report.robots
    assert (secure.origin, len(secure.text), secure.is_cut) == ("https://a.example", MAX_ROBOTS, True)
    assert (plain.text, plain.is_cut, plain.crawl_delay) == (ROBOTS.decode(), False, 3.0)
    assert {each.identity: each.state for each in report.identities} == {
        "first": "active",
        "second": "resting",
        "third": "removed",
    }
    assert report.needs == {"/product/*": "browser"}
