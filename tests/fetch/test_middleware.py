"""The middleware layers, each around a fake fetcher."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import config
from shoal.errors import FetchError, FrontierError
from shoal.fetch.layers import Postponed, robots, throttle, wrap
from shoal.fetch.layers.cache import Cache
from shoal.fetch.layers.robots import Robots, read_rules
from shoal.fetch.layers.throttle import (
    LearnedDelay,
    RetryPolicy,
    StatusCheck,
    Throttle,
    after_answer,
    after_overload,
    parse_retry_after,
)
from shoal.fetch.sessions import cookies
from shoal.fetch.sessions.cookies import Cookie, CookieJar, read_cookie
from shoal.fetch.sessions.jars import Jars
from shoal.fetch.sessions.session import Session
from shoal.http import Request, Response
from shoal.ports import Frontier, HostUpdate, Lease, Middleware
from shoal.testing import FakeClock
from shoal.urls.normalize import host_of

URL = "http://ex.com/a/b"
Answer = Response | FetchError | bytes | str
Headers = Mapping[str, str] | list[tuple[str, str]]


def answer(status: int = 200, body: bytes | str = b"", headers: Headers = (), elapsed: float = 0.0) -> Response:  # type: ignore[assignment]
    data = body.encode() if isinstance(body, str) else body
    return Response(URL, status=status, headers=headers, body=data, elapsed=elapsed)


def error(
    status: int = 0, kind: str = "timeout", retryable: bool = True, retry_after: float | None = None
) -> FetchError:
    wait = None if retry_after is None else timedelta(seconds=retry_after)
    return FetchError("no luck", kind=kind, retryable=retryable, status=status, retry_after=wait)


class Site:
    """A fetcher with an answer for each URL, and for all others the one for ``*``."""

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        self.answers = dict(answers or {})
        self.requests: list[Request] = []

    @property
    def urls(self) -> list[str]:
        return [request.url for request in self.requests]

    async def __call__(self, request: Request) -> Response:
        self.requests.append(request)
        await asyncio.sleep(0)
        found = self.answers.get(request.url, self.answers.get("*", b""))
        if isinstance(found, FetchError):
            raise found
        response = found if isinstance(found, Response) else answer(body=found)
        return Response(
            request.url, status=response.status, headers=response.headers, body=response.body, request=request,
            elapsed=response.elapsed, flags=response.flags,
        )  # fmt: skip


class Told:
    """A frontier that is only told of hosts, and knows what it was made to know."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, HostUpdate]] = []
        self.notes: dict[str, bytes] = {}
        self.remembered: list[tuple[str, float]] = []
        self.down = False

    async def update_host(self, host: str, update: HostUpdate) -> None:
        if self.down:
            raise FrontierError("down")
        self.updates.append((host, update))

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        if self.down:
            raise FrontierError("down")
        self.remembered.append((key, ttl))

    async def recall(self, key: str) -> bytes | None:
        if self.down:
            raise FrontierError("down")
        return self.notes.get(key)


async def refusal(layer: Middleware, request: Request, site: Site) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await layer(request, site)
    return caught.value


# -- the onion


async def test_the_first_layer_is_outermost() -> None:
    trail: list[str] = []

    def layer(name: str) -> Middleware:
        async def call(request: Request, fetch: Any) -> Response:
            trail.append(name)
            response: Response = await fetch(request)
            trail.append(name.upper())
            return response

        return call

    site = Site()
    await wrap(site, [layer("a"), layer("b")])(Request(URL))
    assert trail == ["a", "b", "B", "A"]
    assert site.urls == [URL]
    assert (await wrap(site, [])(Request(URL))).ok


# -- robots

ROBOTS = "http://ex.com/robots.txt"


def robots_layer(told: Told | None = None, user_agent: str = "shoal/0.1", **options: Any) -> Robots:
    return Robots(config.RobotsSettings(**options), user_agent, cast(Frontier, told or Told()))


async def learned(layer: Robots, site: Site, url: str = URL) -> Robots:
    """The layer, once it has read robots.txt: the page that made it do so is postponed."""
    with pytest.raises(Postponed) as caught:
        await layer(Request(url), site)
    assert caught.value.contacted
    return layer


async def allows(text: str | bytes, path: str, user_agent: str = "shoal/0.1") -> bool:
    site = Site({ROBOTS: text})
    layer = await learned(robots_layer(user_agent=user_agent), site)
    try:
        return (await layer(Request("http://ex.com" + path), site)).ok
    except FetchError as error:
        assert (error.kind, error.retryable, error.contacted) == ("robots", False, False)  # noqa: PT017
        return False


@pytest.mark.parametrize(
    ("text", "path", "allowed"),
    [
        ("", "/", True),
        ("User-agent: *\nDisallow: /a", "/a/b", False),
        ("User-agent: *\nDisallow: /a", "/b", True),
        ("User-agent: *\nDisallow: /a\nAllow: /a/b", "/a/b/c", True),
        ("User-agent: *\nDisallow:", "/a", True),
        ("User-agent: *\nDisallow: /", "/", False),
        ("User-agent: *\nDisallow: /*.pdf$", "/x/y.pdf", False),
        ("User-agent: *\nDisallow: /*.pdf$", "/x/y.pdf?z", True),
        ("User-agent: *\nDisallow: /a*/c", "/abc/d/c", False),
        ("User-agent: *\nDisallow: /*?sort=", "/list?sort=x", False),
        ("User-agent: *\nDisallow: /ü", "/%C3%BC", False),
        # which group is ours
        ("User-agent: shoal\nDisallow: /\n\nUser-agent: *\nDisallow:", "/", False),
        ("User-agent: shoal\nDisallow:\n\nUser-agent: *\nDisallow: /", "/", True),
        ("User-agent: other\nDisallow: /", "/", True),
        ("User-agent: other\nUser-agent: SHOAL\nDisallow: /", "/", False),
        ("User-agent: Shoal*\nDisallow: /", "/", False),
        ("User-agent: oal\nDisallow: /", "/", True),
        ("User-agent: other\nAllow: /\nUser-agent: *\nDisallow: /", "/", False),
        ("user agent shoal\ndisallow /", "/", False),
        # as it is found in the wild
        ("\ufeffUser-agent: *\nDisallow: /", "/", False),
        ("User-agent: *\rDisallow: /\r", "/", False),
        ("User-agent: *\r\n\r\n  DISALLOW :  /a  # why", "/a", False),
        ("User-agent: *\nDissallow: /", "/", False),
        ("Disallow: /", "/", True),
        ("User-agent: *\nDisallow: /", "/robots.txt", True),  # the standard always allows it
        ("<html><title>Not found</title></html>", "/", True),
        ("\0\1\2User-agent", "/", True),
        (bytes(range(256)) * 50, "/", True),
        (b"\xff\xfe" + "User-agent: *\nDisallow: /".encode("utf-16-le"), "/", True),
    ],
)
async def test_what_robots_txt_allows(text: str | bytes, path: str, allowed: bool) -> None:
    assert await allows(text, path) is allowed


@pytest.mark.parametrize(
    "agent", ["Mozilla/5.0 (compatible; MyBot/2.1; +http://ex.com/bot)", "mybot", "MyBot - a crawler"]
)
async def test_the_group_is_found_by_a_word_of_the_user_agent(agent: str) -> None:
    text = "User-agent: bot\nDisallow: /\nUser-agent: mybot\nDisallow: /mine\nUser-agent: *\nDisallow: /all"
    assert await allows(text, "/all", agent)
    assert not await allows(text, "/mine", agent)


@pytest.mark.parametrize("line", ["Sitemap: http://ex.com/s.xml", "Unknown-Line: x", "Noindex: /x", "words", "a: b: c"])
async def test_an_unknown_line_does_not_end_a_group(line: str) -> None:
    assert not await allows(f"User-agent: mybot\n{line}\nUser-agent: other\n{line}\nDisallow: /x", "/x", "mybot")
    assert await allows(
        f"User-agent: mybot\n{line}\nDisallow: /y\n{line}\nUser-agent: other\nDisallow: /x", "/x", "mybot"
    )


@pytest.mark.parametrize("name", ["MyBot/1.0", "mybot 2", "MYBOT * # ours"])
async def test_a_group_is_named_by_the_first_word_without_a_version(name: str) -> None:
    assert not await allows(f"User-agent: {name}\nDisallow: /x", "/x", "MyBot/3.1 (+http://ex.com/)")
    assert await allows(f"User-agent: {name}\nDisallow: /x", "/x", "other/1.0")


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
async def test_any_robots_txt_can_be_read(text: bytes) -> None:
    await allows(text, "/a")


@pytest.mark.parametrize("status", [204, 301, 400, 401, 403, 404, 410])
async def test_a_site_without_robots_txt_allows_all(status: int) -> None:
    site = Site({ROBOTS: answer(status, "User-agent: *\nDisallow: /" if status >= 400 else "")})
    for layers in ([], [StatusCheck(retried=[500])], [StatusCheck(retried=[500], handled=[status])]):
        layer = await learned(robots_layer(), site) if not layers else robots_layer()
        fetch = wrap(site, layers)
        if layers:
            with pytest.raises(Postponed):
                await layer(Request(URL), fetch)
        assert (await layer(Request(URL), site)).ok


@pytest.mark.parametrize("handled", [(), (429, 500, 503)])
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_robots_txt_that_can_not_be_had_now_makes_its_pages_wait(status: int, handled: tuple[int, ...]) -> None:
    site = Site({ROBOTS: answer(status, headers={"Retry-After": "7"})})
    fetch = wrap(site, [StatusCheck(retried=[503], handled=handled)])
    layer = robots_layer()
    with pytest.raises(FetchError, match=r"can't fetch robots\.txt of http://ex.com") as caught:
        await layer(Request(URL), fetch)
    assert (caught.value.kind, caught.value.retryable, caught.value.status) == ("robots unavailable", True, status)
    assert caught.value.retry_after == timedelta(seconds=1 if handled else 7)
    assert site.urls == [ROBOTS]


async def test_a_robots_txt_with_a_long_retry_after_is_tried_again_after_the_limit() -> None:
    site = Site({ROBOTS: answer(503, headers={"Retry-After": "86400"})})
    fetch = wrap(site, [StatusCheck(retried=[503], max_retry_after=0.2)])
    layer = robots_layer()
    for tries in range(1, 4):
        failure = await refusal(layer, Request(URL), fetch)
        assert failure.retry_after == timedelta(seconds=0.2)
        assert len(site.urls) == tries
        await asyncio.sleep(0.21)


@pytest.mark.parametrize(("failure", "retryable"), [(error(), True), (error(kind="too large", retryable=False), False)])
async def test_a_robots_txt_that_failed_is_not_asked_for_again_with_each_page(
    failure: FetchError, retryable: bool
) -> None:
    site, layer = Site({ROBOTS: failure}), robots_layer()
    errors = [await refusal(layer, Request(f"http://ex.com/{number}"), site) for number in range(20)]
    assert site.urls == [ROBOTS]
    assert {(each.kind, each.retryable) for each in errors} == {(failure.kind, retryable)}
    assert [each.contacted for each in errors] == [True] + [False] * 19
    assert all(each.retry_after and each.retry_after <= timedelta(seconds=60) for each in errors)


async def test_a_robots_txt_that_failed_is_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeClock(0)
    monkeypatch.setattr("shoal.system.clock.monotonic", now)
    site, layer = Site({ROBOTS: error()}), robots_layer()
    for hold in (1, 2, 4, 8, 16, 32, 60, 60):
        assert (await refusal(layer, Request(URL), site)).retry_after == timedelta(seconds=hold)
        now.advance(hold)
    site.answers[ROBOTS] = ""
    await learned(layer, site)
    assert (await layer(Request(URL), site)).ok
    now.advance(86400)
    site.answers[ROBOTS] = error()
    assert (await refusal(layer, Request(URL), site)).retry_after == timedelta(seconds=1)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/other.txt", "http://ex.com/other.txt"),
        ("https://ex.com/robots.txt", "https://ex.com/robots.txt"),
        ("//www.ex.com/robots.txt", "http://www.ex.com/robots.txt"),
        ("/a\r\nb.txt", "http://ex.com/ab.txt"),
    ],
)
async def test_a_robots_txt_that_is_elsewhere(location: str, target: str) -> None:
    site = Site({ROBOTS: answer(301, headers={"Location": location}), target: "User-agent: *\nDisallow: /"})
    layer = await learned(robots_layer(), site)
    assert site.urls == [ROBOTS, target]
    assert (await refusal(layer, Request(URL), site)).kind == "robots"


@pytest.mark.parametrize(
    "location", ["http://[bad", "mailto:a@b", "/robots.txt", "", "\ud800://", "http://ex.com:99999/"]
)
async def test_a_robots_txt_that_is_nowhere(location: str) -> None:
    site = Site({ROBOTS: answer(302, headers={"Location": location})})
    layer = await learned(robots_layer(), site)
    assert len(site.requests) <= 6
    assert (await layer(Request(URL), site)).ok


async def test_a_robots_txt_is_found_after_five_redirects() -> None:
    hops = [ROBOTS, *(f"http://ex.com/{number}.txt" for number in range(1, 6))]
    answers: dict[str, Answer] = {hop: answer(301, headers={"Location": to}) for hop, to in pairwise(hops)}
    site = Site(answers | {hops[-1]: "User-agent: *\nDisallow: /"})
    layer = await learned(robots_layer(), site)
    assert site.urls == hops
    assert (await refusal(layer, Request(URL), site)).kind == "robots"


async def test_robots_txt_is_fetched_once_for_all_who_ask_at_the_same_time() -> None:
    site, layer = Site(), robots_layer()
    results = await asyncio.gather(*(layer(Request(f"{URL}/{n}"), site) for n in range(20)), return_exceptions=True)
    assert site.urls == [ROBOTS]
    contacted = [result.contacted for result in results if isinstance(result, Postponed)]
    assert sorted(contacted) == [False] * 19 + [True]
    await layer(Request(URL), site)
    assert site.urls == [ROBOTS, URL]


async def test_one_who_is_cancelled_leaves_the_others_be() -> None:
    asked, never, layer = asyncio.Event(), asyncio.Event(), robots_layer()

    async def hangs(request: Request) -> Response:
        asked.set()
        await never.wait()
        raise AssertionError

    first = asyncio.create_task(layer(Request(URL), hangs))
    await asked.wait()
    second = asyncio.create_task(layer(Request(URL), hangs))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(Postponed):
        await second
    assert first.cancelled()
    await learned(layer, Site())


async def test_each_origin_has_its_own() -> None:
    site = Site({ROBOTS: "User-agent: *\nDisallow: /"})
    layer = await learned(robots_layer(), site)
    await learned(layer, site, "https://ex.com/")
    await learned(layer, site, "http://ex.com:81/")
    assert site.urls == [ROBOTS, "https://ex.com/robots.txt", "http://ex.com:81/robots.txt"]
    assert (await layer(Request("https://ex.com/"), site)).ok


async def test_what_another_worker_fetched_is_not_fetched_again() -> None:
    told, site = Told(), Site({URL: "page"})
    told.notes["robots http://ex.com"] = b"User-agent: *\nDisallow: /private"
    layer = robots_layer(told)
    assert (await layer(Request(URL), site)).ok
    error = await refusal(layer, Request("http://ex.com/private"), site)
    assert error.kind == "robots"
    assert site.urls == [URL]


async def test_what_was_fetched_is_remembered_for_the_others() -> None:
    told = Told()
    await learned(robots_layer(told, cache_seconds=100), Site({ROBOTS: "User-agent: *\nDisallow: /private"}))
    assert told.remembered == [("robots http://ex.com", 100.0)]


async def test_a_frontier_that_is_away_does_not_stop_robots() -> None:
    told, site = Told(), Site({ROBOTS: "User-agent: *\nDisallow: /private"})
    told.down = True
    layer = robots_layer(told)
    with pytest.raises(Postponed, match="can't store robots"):
        await layer(Request(URL), site)


@pytest.mark.parametrize(
    ("value", "delay"),
    [("2", 2.0), ("0.5", 0.5), ("1e9", 60.0), ("0", None), ("-3", None), ("nan", None), ("inf", None), ("soon", None)],
)
async def test_a_crawl_delay_is_told_to_the_frontier(value: str, delay: float | None) -> None:
    told = Told()
    await learned(robots_layer(told), Site({ROBOTS: f"User-agent: *\nCrawl-delay: {value}"}))
    assert told.updates == [("ex.com", HostUpdate(crawl_delay=delay))]


async def test_a_new_process_takes_back_a_crawl_delay_that_an_earlier_one_stored() -> None:
    told = Told()
    await learned(robots_layer(told), Site({ROBOTS: "User-agent: *\nCrawl-delay: 5"}))
    await learned(robots_layer(told), Site({ROBOTS: ""}))
    assert [update.crawl_delay for _, update in told.updates] == [5.0, None]


async def test_a_crawl_delay_that_is_gone_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeClock(0)
    monkeypatch.setattr("shoal.system.clock.monotonic", now)
    told, site = Told(), Site({ROBOTS: "User-agent: *\nCrawl-delay: 5"})
    layer = await learned(robots_layer(told, cache_seconds=100), site)
    now.advance(99)
    await layer(Request(URL), site)
    for text in ("User-agent: *\nCrawl-delay: 5", error(), ""):
        now.advance(101)
        site.answers[ROBOTS] = text
        with pytest.raises((Postponed, FetchError)):
            await layer(Request(URL), site)
    assert [update.crawl_delay for _, update in told.updates] == [5.0, None]


async def test_a_crawl_delay_that_can_not_be_stored_is_read_again() -> None:
    told, site = Told(), Site({ROBOTS: "User-agent: *\nCrawl-delay: 5"})
    told.down = True
    layer = await learned(robots_layer(told), site)
    told.down = False
    await learned(layer, site)
    assert len(told.updates) == 1
    assert (await layer(Request(URL), site)).ok


@pytest.mark.parametrize(
    ("text", "checks"),
    [
        ("User-agent: *\nDisallow:", False),
        ("User-agent: *\nDISALLOW :  # nothing\nAllow: /", False),
        ("User-agent: *\nAllow: /", False),
        ("User-agent: *\nDisallow:\nDissalow: /a", True),
        ("User-agent: *\nDisallow:\u00a0/a", True),
        ("User-agent: *\nDisallow /a", True),
    ],
)
def test_a_robots_txt_without_rules_is_not_asked_again_for_each_page(text: str, checks: bool) -> None:
    assert (read_rules(text, "shoal/0.1", config.RobotsSettings()).rules is not None) is checks


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 500_000, " " * 500_000, "\r" * 500_000, ":" * 500_000, "#" * 500_000, "disallow" + " " * 500_000,
        "disallow" + " " * 500_000 + "x",
        "user" + " " * 500_000, "User-agent" * 50_000, "Disallow: /\n" * 40_000,
        "User-agent: *\nDisallow: /" + "*a" * 240_000 + "b", "User-agent: *\nDisallow: /" + "%41" * 160_000,
        # the rules of a group belong to each of its robots
        "".join(f"User-agent: a{n}\n" for n in range(14_000)) + "Disallow: /x\n" * 20_000,
        "".join(f"User-agent: s{'*' * n}hoal\n" for n in range(900)) + "Disallow: /x\n" * 8_000,
        "".join(f"user  agent {n}\n" for n in range(14_000)) + "Disallow: /x\n" * 20_000,
        "".join(f"User-agent: {'shoal/0.1'[:n % 9 + 1]}\n" for n in range(14_000)) + "Disallow: /x\n" * 20_000,
    ],
    ids=range(16),
)  # fmt: skip
def test_a_hostile_robots_txt_costs_little(text: str) -> None:
    started = time.process_time()
    rules = read_rules(text[:512_000], "shoal/0.1", config.RobotsSettings())
    for _ in range(10):
        rules.rules is None or rules.rules.can_fetch("http://ex.com/" + "a" * 2000, "shoal/0.1")
    assert time.process_time() - started < 3


async def test_only_the_beginning_of_a_huge_robots_txt_is_read() -> None:
    text = "User-agent: *\nDisallow: /a\n" + "#" * 512_000 + "\nDisallow: /b"
    assert not await allows(text, "/a")
    assert await allows(text, "/b")


async def test_what_is_known_of_robots_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robots, "_MAX_CACHED", 10_000)
    site, layer = Site({"*": "User-agent: *\nDisallow: /x"}), robots_layer()
    for number in range(50):
        await learned(layer, site, f"http://h{number}/")
        assert layer._size == sum(rules.size for rules in layer._rules.values()) <= 10_000
    assert (await layer(Request("http://h49/"), site)).ok
    await learned(layer, site, "http://h0/")


# -- retry

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("120", 120),
        (" 7 ", 7),
        ("0", 0),
        ("9" * 5000, 3600),
        ("3601", 3600),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("²", None),
        ("١٢", None),
        ("\udcff", None),
        ("Thu, 01 Jan 2026 00:01:00 GMT", 60),
        ("Thu, 01 Jan 2026 00:01:00", 60),
        ("Thu, 01 Jan 2026 02:01:00 +0200", 60),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600),
        ("Mon, 99 Foo 99999 99:99:99 GMT", None),
        ("1 Jan 2026 00:00:00 +99999999999999", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == (None if seconds is None else timedelta(seconds=seconds))


@given(
    st.text(max_size=50) | st.from_regex(r"[A-Z][a-z]{2}, \d+ [A-Z][a-z]{2} \d+ \d+:\d+:\d+ [+-]?\w+", fullmatch=True)
)
def test_any_retry_after_is_within_the_limit(value: str) -> None:
    for limit in (0.0, 60.0, 3600.0):
        wait = parse_retry_after(value, NOW, limit)
        assert wait is None or timedelta(0) <= wait <= timedelta(seconds=limit)


@pytest.mark.parametrize(
    ("failure", "attempt", "wait"),
    [
        (error(), 1, 1.0),
        (error(), 2, 2.0),
        (error(), 4, 8.0),
        (error(), 5, None),
        (error(retryable=False), 1, None),
        (error(retry_after=30), 1, 30.0),
        (error(retry_after=0), 3, 0.0),
        (error(retry_after=30), 5, None),
        (error(retryable=False, retry_after=30), 1, None),
    ],
)
def test_when_to_try_again(failure: FetchError, attempt: int, wait: float | None) -> None:
    policy = RetryPolicy(config.RetrySettings(max_attempts=5), random_fraction=lambda: 0.5)
    assert policy.retry_in(failure, attempt) == wait


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_wait_is_spread_and_bounded(attempt: int, fraction: float, base: float, most: float) -> None:
    policy = RetryPolicy(config.RetrySettings(max_attempts=5001, base_delay=base, max_delay=most), lambda: fraction)
    wait = policy.retry_in(error(), attempt)
    assert wait is not None
    assert 0 <= wait <= most
    due = base * 2.0 ** min(attempt - 1, 60)
    assert min(most, 0.75 * due) <= wait <= 1.25 * due or wait == most


@pytest.mark.parametrize(
    ("status", "passes", "retryable"),
    [
        (200, True, None),
        (204, True, None),
        (404, False, False),
        (418, True, None),
        (503, False, True),
        (599, False, False),
    ],
)
async def test_which_answers_are_pages(status: int, passes: bool, retryable: bool | None) -> None:
    layer, site = (
        StatusCheck(retried=[429, 503], handled=[418]),
        Site({URL: answer(status, headers={"Retry-After": "9"})}),
    )
    if passes:
        assert (await layer(Request(URL), site)).status == status
        return
    found = await refusal(layer, Request(URL), site)
    assert (found.status, found.kind, found.retryable) == (status, f"http {status}", retryable)
    assert found.retry_after == timedelta(seconds=9)
    assert found.contacted


@pytest.mark.parametrize("status", [300, 301, 302, 304, 399])
async def test_a_redirect_passes_if_it_leads_somewhere(status: int) -> None:
    layer = StatusCheck(retried=[])
    assert (await layer(Request(URL), Site({URL: answer(status, headers={"Location": "/x"})}))).status == status
    assert (await refusal(layer, Request(URL), Site({URL: answer(status)}))).kind == f"http {status}"


# -- throttle

THROTTLES = st.builds(
    config.ThrottleSettings,
    max_delay=st.floats(0, 1e6),
    slow_after=st.floats(0.001, 10),
    backoff_factor=st.floats(1, 100),
)
STEPS = st.lists(st.none() | st.floats(0, 1000), max_size=60)


@given(THROTTLES, STEPS)
def test_the_learned_delay_is_never_longer_than_allowed(
    settings: config.ThrottleSettings, steps: list[float | None]
) -> None:
    host = LearnedDelay()
    for latency in steps:
        host = after_overload(host, settings) if latency is None else after_answer(host, latency, settings)
        assert 0 <= host.delay <= settings.max_delay
        assert host.usual >= 0


@given(THROTTLES, STEPS, st.floats(0, 10))
def test_it_is_forgotten_when_all_is_well(
    settings: config.ThrottleSettings, steps: list[float | None], latency: float
) -> None:
    host = LearnedDelay()
    for step in steps:
        host = after_overload(host, settings) if step is None else after_answer(host, step, settings)
    for _ in range(1000):
        host = after_answer(host, latency, settings)
    assert host.delay == 0


@given(THROTTLES, st.floats(0, 100))
def test_an_overload_makes_it_longer(settings: config.ThrottleSettings, before: float) -> None:
    host = LearnedDelay(delay=min(before, settings.max_delay))
    after = after_overload(host, settings)
    assert after.delay >= host.delay
    assert after.delay >= min(throttle._FIRST_DELAY, settings.max_delay)


def test_a_host_that_gets_slower_and_slower_is_spared() -> None:
    settings, host = config.ThrottleSettings(), LearnedDelay()
    for _ in range(10):
        host = after_answer(host, 0.1, settings)
    assert host.delay == 0
    for _ in range(10):
        host = after_answer(host, 3.0, settings)
    assert host.delay > 1
    slow = LearnedDelay()
    for _ in range(10):  # one that has always been slow is not struggling
        slow = after_answer(slow, 3.0, settings)
    assert slow.delay == 0


def throttle_layer(told: Told) -> Throttle:
    return Throttle(config.ThrottleSettings(), told.update_host)


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("status", [429, 503])
async def test_overload_is_told_to_the_frontier(status: int, handled: bool) -> None:
    told, site = Told(), Site({URL: answer(status, headers={"Retry-After": "30"})})
    layer = throttle_layer(told)
    fetch = wrap(site, [layer, StatusCheck(retried=[], handled=[status] if handled else [])])
    if handled:
        await fetch(Request(URL))
    else:
        with pytest.raises(FetchError):
            await fetch(Request(URL))
    reason = f"answered {status} with Retry-After"
    assert told.updates == [("ex.com", HostUpdate(learned_delay=0.25, block_for=30.0, block_reason=reason))]


@pytest.mark.parametrize("header", ["86400", "Fri, 31 Dec 9999 23:59:59 GMT"])
@pytest.mark.parametrize("handled", [(), (503,)])
async def test_a_long_retry_after_blocks_a_host_up_to_the_limit(header: str, handled: tuple[int, ...]) -> None:
    told, site = Told(), Site({URL: answer(503, headers={"Retry-After": header})})
    layer = Throttle(config.ThrottleSettings(max_retry_after=900), told.update_host)
    fetch = wrap(site, [layer, StatusCheck(retried=[503], handled=handled, max_retry_after=900)])
    with suppress(FetchError):
        await fetch(Request(URL))
    assert [update.block_for for _, update in told.updates] == [900]


async def test_a_delay_grows_and_shrinks_and_only_what_matters_is_told() -> None:
    told, site = Told(), Site({URL: error(429)})
    layer = throttle_layer(told)
    for _ in range(10):
        await refusal(layer, Request(URL), site)
    assert [update.learned_delay for _, update in told.updates] == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60]
    site.answers[URL] = answer(elapsed=0.1)
    for _ in range(60):
        await layer(Request(URL), site)
    delays = [update.learned_delay for _, update in told.updates[9:]]
    assert delays[-1] is None
    assert len(delays) < 45
    assert all(update.block_for.__class__.__name__ == "UnsetType" for _, update in told.updates)


@pytest.mark.parametrize("failure", [error(), error(404), error(500)])
async def test_other_failures_say_nothing_of_the_load(failure: FetchError) -> None:
    told = Told()
    await refusal(throttle_layer(told), Request(URL), Site({URL: failure}))
    assert told.updates == []


async def test_a_cached_page_says_nothing_of_the_load() -> None:
    told = Told()
    layer = throttle_layer(told)

    async def cached(request: Request) -> Response:
        return Response(request.url, elapsed=100.0, from_cache=True)

    await layer(Request(URL), cached)
    assert layer._hosts == {}


async def test_a_frontier_that_is_away_does_not_cost_the_page() -> None:
    told, site = Told(), Site({URL: error(429)})
    layer = throttle_layer(told)
    await refusal(layer, Request(URL), site)
    told.down = True
    site.answers[URL] = answer(elapsed=0.1)
    for _ in range(30):
        assert (await layer(Request(URL), site)).ok
    told.down = False
    await layer(Request(URL), site)
    assert told.updates[-1] == ("ex.com", HostUpdate(learned_delay=None))


async def test_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "_MAX_HOSTS", 5)
    layer, site = throttle_layer(Told()), Site({"*": error(429)})
    for number in range(20):
        await refusal(layer, Request(f"http://h{number}/"), site)
    assert list(layer._hosts) == list(layer._reported) == [f"h{number}" for number in range(15, 20)]


# -- cookies


class Jar:
    """Cookies around a site that sets what it is told, and shows what it was sent."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        jars = Jars(clock=self.clock)
        self.layer = Session(jars, **options)
        self.cookies = jars.jar("").cookies
        self.site = Site()

    async def set(self, *lines: str, url: str = URL) -> None:
        self.site.answers[url] = answer(headers=[("Set-Cookie", line) for line in lines])
        await self.layer(Request(url), self.site)
        del self.site.answers[url]

    async def sent(self, url: str = URL, **options: Any) -> str | None:
        await self.layer(Request(url, **options), self.site)
        return self.site.requests[-1].headers.get("Cookie")


async def test_what_is_set_is_sent_back() -> None:
    jar = Jar()
    assert await jar.sent() is None
    await jar.set("a=1; Path=/", 'b="x, y\\012"', "c=", "d=e=f")
    assert await jar.sent() == 'b="x, y\\012"; c=; d=e=f; a=1'
    await jar.set("a=2; Path=/")
    assert await jar.sent("http://ex.com/") == "a=2"


@pytest.mark.parametrize(
    ("line", "url", "is_sent"),
    [
        # host and domain
        ("a=1", "http://ex.com/a/", True),
        ("a=1", "http://ex.com:81/a/", True),
        ("a=1; Path=/", "http://www.ex.com/", False),
        ("a=1; Path=/", "http://other.com/", False),
        ("a=1; Path=/; Domain=ex.com", "http://www.ex.com/", True),
        ("a=1; Path=/; Domain=.EX.com", "http://a.b.ex.com/", True),
        ("a=1; Path=/; Domain=ex.com", "http://ex.com/", True),
        ("a=1; Path=/; Domain=ex.com", "http://notex.com/", False),
        ("a=1; Path=/; Domain=other.com", "http://other.com/", False),
        ("a=1; Path=/; Domain=www.ex.com", "http://www.ex.com/", False),
        ("a=1; Path=/; Domain=com", "http://ex.com/", False),
        ("a=1; Path=/; Domain=com", "http://other.com/", False),
        ("a=1; Path=/; Domain=.", "http://ex.com/", True),
        ("a=1; Path=/; Domain=other.com; Domain=ex.com", "http://www.ex.com/", True),
        # path
        ("a=1; Path=/a", "http://ex.com/a", True),
        ("a=1; Path=/a", "http://ex.com/a/x?y", True),
        ("a=1; Path=/a", "http://ex.com/ab", False),
        ("a=1; Path=/a/", "http://ex.com/a", False),
        ("a=1; Path=/a/", "http://ex.com/a/x", True),
        ("a=1", "http://ex.com/a/x", True),
        ("a=1", "http://ex.com/x", False),
        ("a=1; Path=x", "http://ex.com/a", True),
        # safety
        ("a=1; Path=/; Secure", "http://ex.com/", False),
        ("a=1; Path=/; secure; HttpOnly; SameSite=Lax", "https://ex.com/", True),
        # what is none
        ("", URL, False),
        ("a", URL, False),
        ("=1", URL, False),
        (";a=1", URL, False),
        ("a=\x01", URL, False),
        ("a=1\r\nX: y", URL, False),
        ("a=\udcff", URL, False),
        ("a=" + "x" * 5000, URL, False),
    ],
)
async def test_where_a_cookie_goes(line: str, url: str, is_sent: bool) -> None:
    jar = Jar()
    await jar.set(line)
    assert (await jar.sent(url) is not None) is is_sent


@pytest.mark.parametrize(
    ("host", "domain", "other", "is_sent"),
    [
        ("shop.co.uk", "co.uk", "bank.co.uk", False),
        ("a.com.au", "com.au", "b.com.au", False),
        ("a.bbc.co.uk", "bbc.co.uk", "b.bbc.co.uk", True),
        ("evil.github.io", "github.io", "good.github.io", False),
        ("evil.github.io", "github.io", "github.io", False),
        ("evil.github.io", "evil.github.io", "www.evil.github.io", True),
        ("github.io", "github.io", "github.io", True),
        ("github.io", "github.io", "good.github.io", False),
        ("evil.s3.amazonaws.com", "s3.amazonaws.com", "good.s3.amazonaws.com", False),
        ("a.foo.kobe.jp", "foo.kobe.jp", "b.foo.kobe.jp", False),  # the rule is *.kobe.jp
        ("a.city.kobe.jp", "city.kobe.jp", "b.city.kobe.jp", True),  # and this is its exception
        ("a.xn--p1ai", "xn--p1ai", "b.xn--p1ai", False),
        ("a.intern.corp", "intern.corp", "b.intern.corp", True),
        ("a.corp", "corp", "b.corp", False),
        ("localhost", "localhost", "localhost", True),
        ("localhost", "localhost", "a.localhost", False),
        ("a.localhost", "localhost", "b.localhost", False),
        ("intranet", "intranet", "intranet", True),
        ("intranet", "", "intranet", True),
        ("127.0.0.1", "0.0.1", "2.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("[::1]", "", "[::1]", True),
        ("[::1]", "", "[::2]", False),
        ("xn--bcher-kva.de", "", "bücher.de", True),
    ],
)
async def test_nobody_sets_cookies_for_strangers(host: str, domain: str, other: str, is_sent: bool) -> None:
    jar = Jar()
    await jar.set(f"a=1; Domain={domain}", url=f"http://{host}/")
    assert (await jar.sent(f"http://{other}/") is not None) is is_sent


def test_the_public_suffix_list_is_loaded_only_when_it_is_needed() -> None:
    code = (
        "import sys; from shoal.fetch.sessions.cookies import read_cookie\n"
        "for line in ('a=1', 'a=1; Domain=com', 'a=1; Domain=other.com', 'a=1; Domain=ex.com'):\n"
        "    read_cookie(line, 'http://www.ex.com/', 0.0); print('publicsuffixlist' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]


@pytest.mark.parametrize(
    ("ends", "after"),
    [
        ("Max-Age=10", 10),
        ("Max-Age=0", 0),
        ("Max-Age=-1", 0),
        ("Expires=Tue, 14 Nov 2023 22:13:30 GMT", 10),
        ("expires=Tuesday, 14-Nov-23 22:13:30 GMT", 10),
        ("Expires=Tue Nov 14 22:13:30 2023", 10),
        ("Expires=Thu, 01-Jan-1970 00:00:00 GMT", 0),
        ("expires=Thu, 01-Jan-1970 00:00:01", 0),
        ("expires=Thu 01 Jan 1970 00:00:01", 0),
        ("Expires=14 Nov 2023 22:13:30", 10),
        ("Expires=22:13:30 2023 Nov 14", 10),
        ("Expires=Tue, 14-November-2023 22:13:30 CET", 10),
        ("Expires=Tue, 31 Feb 2023 22:13:30 GMT", None),
        ("Expires=Tue, 14 Nov 1600 22:13:30 GMT", None),
        ("Expires=Tue, 14 Nov 2023 25:13:30 GMT", None),
        ("Expires=Fri, 31 Dec 9999 23:59:59 GMT; Max-Age=10", 10),
        ("Max-Age=soon; Expires=Tue, 14 Nov 2023 22:13:30 GMT", 10),
        ("Expires=soon", None),
        ("Expires=0", None),
        ("Max-Age=99999999999999999999999", None),
        ("Max-Age=", None),
    ],
)
async def test_cookies_end(ends: str, after: float | None) -> None:
    jar = Jar()
    await jar.set("a=1; Path=/", f"a=2; Path=/; {ends}", "b=1; Path=/")
    jar.clock.advance(9)
    assert await jar.sent() == ("b=1" if after == 0 else "a=2; b=1")
    jar.clock.advance(1)
    assert await jar.sent() == ("b=1" if after is not None else "a=2; b=1")


async def test_the_request_has_the_last_word() -> None:
    jar = Jar()
    await jar.set("a=1; Path=/", "b=1; Path=/")
    await jar.set("a=here; Path=/a")
    assert await jar.sent(cookies={"a": "own", "c": "own"}) == "b=1; a=own; c=own"
    assert await jar.sent(headers={"cookie": "mine=1"}, cookies={"a": "own"}) is None
    assert jar.site.requests[-1].headers == {"cookie": "mine=1"}
    assert await Jar().sent(cookies={"a": "own"}) == "a=own"


async def test_the_page_knows_the_request_as_it_was() -> None:
    jar = Jar()
    await jar.set("a=1")
    request = Request(URL, cookies={"b": "2"}, headers={"X": "y"})
    response = await jar.layer(request, jar.site)
    assert response.request is request
    assert (request.cookies, request.headers) == ({"b": "2"}, {"X": "y"})
    assert jar.site.requests[-1].headers == {"X": "y", "Cookie": "a=1; b=2"}


async def test_a_jar_that_keeps_nothing() -> None:
    jar = Jar(keep=False)
    await jar.set("a=1")
    assert await jar.sent() is None
    assert await jar.sent(cookies={"b": "2"}) == "b=2"


async def test_the_nearest_comes_first() -> None:
    jar = Jar()
    await jar.set("a=root; Path=/", "a=here; Path=/a", "b=1; Path=/")
    assert await jar.sent() == "a=here; a=root; b=1"  # as browsers do: a server takes the first one, or looks at all


async def test_no_host_can_fill_the_jar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cookies, "_MAX_DOMAINS", 3)
    jar = Jar()
    await jar.set("keep=1", url="http://used/")
    for number in range(200):
        await jar.set(f"c{number}={'x' * 4000}; Path=/")
        await jar.set("a=1", url=f"http://h{number}/")
        assert await jar.sent("http://used/") == "keep=1"
    assert sum(map(len, jar.cookies.domains.values())) <= 3 * cookies._MAX_PER_DOMAIN
    header = await jar.sent()
    assert header is not None
    assert len(header) <= 8190


def test_several_jars_share_the_limit_in_bytes() -> None:
    """Each proxy has a jar of its own, and a spider may have thousands."""
    jars: list[CookieJar] = []
    jars += [CookieJar(jars=jars.__len__) for _ in range(16)]
    for jar in jars:
        for number in range(1000):
            jar.put(Cookie("a", "x" * 4000, f"{number}.example.com", "/", host_only=True))
    assert 16 << 20 < sum(jar._size for jar in jars) <= 32 << 20


async def test_the_jar_is_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cookies, "_MAX_BYTES", 200_000)
    jar = Jar()
    wide = "\u00e9" * 2000 + "\U0001f41f"  # each of its characters takes four bytes
    for number in range(40):
        await jar.set(*(f"c{place}={wide}; Path=/{'x' * 1000}" for place in range(10)))
        await jar.set(f"c={'x' * 4000}", url=f"http://h{number}/")
        kept = [cookie for bucket in jar.cookies.domains.values() for cookie in bucket.values()]
        assert sum(sys.getsizeof(cookie.value) + sys.getsizeof(cookie.path) for cookie in kept) <= 200_000
    assert await jar.sent("http://h0/") is None  # the host that was not used for the longest time goes first
    assert await jar.sent("http://h39/") is not None
    assert sum(jar.cookies._sizes.values()) == jar.cookies._size


async def test_a_domain_is_limited_in_bytes_and_loses_its_oldest_cookie_first() -> None:
    jar = Jar()
    for number in range(30):
        await jar.set(f"c{number}={'x' * 4000}; Path=/{number}")
    host = host_of(URL)
    assert jar.cookies._sizes[host] <= cookies._MAX_BYTES_PER_DOMAIN
    names = [name for name, _ in jar.cookies.domains[host]]
    assert names == [f"c{number}" for number in range(30 - len(names), 30)]
    assert len(names) > 10


async def test_cookies_that_end_leave_nothing_behind() -> None:
    jar = Jar()
    await jar.set("a=1", "b=2")
    await jar.set("a=1; Max-Age=0", "b=2; Max-Age=0")
    assert (jar.cookies.domains, jar.cookies._sizes, jar.cookies._size) == ({}, {}, 0)


@given(
    st.text(max_size=100)
    | st.lists(st.sampled_from(["a", "=", ";", "Path", "Domain", "/", "ex.com", " ", '"', ","])).map("".join)
)
def test_any_line_can_be_read(line: str) -> None:
    cookie = read_cookie(line, URL, 0.0)
    if cookie is not None:
        Request(URL, headers={"Cookie": f"{cookie.name}={cookie.value}"})
        assert cookie.path.startswith("/")
        assert cookie.domain == host_of(URL)


def test_a_monstrous_line_costs_little() -> None:
    started = time.process_time()
    for line in ("a=1" + ";" * 10**6, "a=1; Expires=" + "1 " * 10**6, "a=" + "x" * 10**6, "a=1; " + "Path=/x;" * 10**5):
        read_cookie(line, URL, 0.0)
    assert time.process_time() - started < 3


# -- cache


@pytest.fixture
def cache(tmp_path: Path) -> Callable[..., Cache]:
    return lambda **options: Cache(config.CacheSettings(enabled=True, folder=str(tmp_path / "cache"), **options))


@pytest.fixture
def page() -> Site:
    return Site({URL: answer(201, b"\0page", [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X", "ü")])})


async def test_a_page_is_fetched_once(cache: Callable[..., Cache], page: Site) -> None:
    first = await cache()(Request(URL), page)
    request = Request(URL, meta={"a": 1})
    again = await cache()(request, page)
    assert page.urls == [URL]
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.url, again.status, again.body, again.request) == (URL, 201, b"\0page", request)
    assert list(again.headers.items()) == list(first.headers.items())


async def test_an_odd_page_is_not_cached(cache: Callable[..., Cache]) -> None:
    site = Site({URL: Response(URL, body=b"half", flags=("truncated gzip",))})
    await cache()(Request(URL), site)
    assert not (await cache()(Request(URL), site)).from_cache


async def test_a_cached_page_has_the_url_that_was_asked_for(cache: Callable[..., Cache]) -> None:
    url = URL + "?s=%27"
    await cache()(Request(URL + "?s='"), Site({URL + "?s='": answer(200)}))
    again = await cache()(Request(url), Site({}))
    assert (again.from_cache, again.url) == (True, url)


@pytest.mark.parametrize(
    "request_", [Request(URL, method="POST"), Request(URL, json={}), Request(URL, body=b"x")], ids=repr
)
async def test_only_what_asks_for_a_page_is_cached(cache: Callable[..., Cache], page: Site, request_: Request) -> None:
    for _ in range(2):
        assert not (await cache()(request_, page)).from_cache


async def test_a_head_is_not_its_page(cache: Callable[..., Cache], page: Site) -> None:
    await cache()(Request(URL, method="HEAD"), page)
    assert not (await cache()(Request(URL), page)).from_cache


@pytest.mark.parametrize(("status", "kept"), [(200, True), (302, True), (404, False), (500, False)])
async def test_only_what_went_well_is_cached(cache: Callable[..., Cache], status: int, kept: bool) -> None:
    site = Site({URL: answer(status)})
    await cache()(Request(URL), site)
    assert (await cache()(Request(URL), site)).from_cache is kept


async def test_a_failure_is_not_cached(cache: Callable[..., Cache], page: Site) -> None:
    site = Site({URL: error()})
    await refusal(cache(), Request(URL), site)
    assert not (await cache()(Request(URL), page)).from_cache


async def test_time_to_live(cache: Callable[..., Cache], page: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeClock()
    monkeypatch.setattr("shoal.system.clock.time", now)
    layer = cache(ttl=10)
    await layer(Request(URL), page)
    now.advance(10)
    assert (await layer(Request(URL), page)).from_cache
    now.advance(1)
    assert not (await layer(Request(URL), page)).from_cache
    assert (await layer(Request(URL), page)).from_cache


@pytest.mark.parametrize("damage", [b"", b"junk", b"\x95", b"\x95\x00\xa1\xff\x00\x90\xc4\x00", b"\xc1" * 99])
async def test_a_broken_entry_is_none(cache: Callable[..., Cache], page: Site, tmp_path: Path, damage: bytes) -> None:
    await cache()(Request(URL), page)
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    entry.write_bytes(damage)
    assert not (await cache()(Request(URL), page)).from_cache
    assert (await cache()(Request(URL), page)).from_cache


async def test_the_same_page_many_times_at_once(cache: Callable[..., Cache], page: Site, tmp_path: Path) -> None:
    layer = cache()
    responses = await asyncio.gather(*(layer(Request(URL), page) for _ in range(50)))
    assert {response.body for response in responses} == {b"\0page"}
    assert (await layer(Request(URL), page)).from_cache
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


async def test_headers_that_are_no_utf8(cache: Callable[..., Cache]) -> None:
    site = Site({URL: answer(headers={"X": "caf\udce9"})})
    assert (await cache()(Request(URL), site)).ok
    assert (await cache()(Request(URL), site)).headers["X"] == "caf?"


async def test_a_folder_that_can_not_be_used_does_not_cost_the_page(
    tmp_path: Path, cache: Callable[..., Cache], page: Site, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert (await cache()(Request(URL), page)).body == b"\0page"
    assert "can't cache" in caplog.text


async def test_a_throttle_goes_on_from_what_the_fleet_has_learned() -> None:
    told, site = Told(), Site({"*": "page"})
    layer = throttle_layer(told)
    lease = Lease(Request(URL), b"", 1, 1, "ex.com", 0.0, 8.0)
    layer.adopt(lease)
    await layer(Request(URL), site)
    assert [update.learned_delay for _, update in told.updates] == [pytest.approx(6.4)]
    layer.adopt(msgspec.structs.replace(lease, learned_delay=0.0))
    await layer(Request(URL), site)
    assert len(told.updates) == 1  # nothing to tell: it is as the frontier has it
