"""Sessions: cookies that survive a kill, and one login for all workers, judged by the site and the outputs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import LoggedOut, Login, Response, Spider, crawl
from tests.acceptance.fleets import Fleet, frontier_url
from tests.support import forking
from tests.support.forking import SHOAL
from tests.support.login_site import PASSWORD, Answer, LoginSite
from tests.support.servers import ProxyServer

SPIDER = """
from shoal import LoggedOut, Spider

class Account(Spider):
    name = "account"
    settings = {"download_delay": 0.0, "robots.obey": False, "concurrency": 4}
    logged_out = LoggedOut(redirect="/login")

    async def log_in(self, login):
        page = await login.fetch(f"{self.arguments.get('site') or self.start_urls[0].rpartition('/account')[0]}/login")
        await login.fetch(page.form("#login").fill(user="me", password=login.secret("SHOP_PASSWORD")).submit())

    def parse(self, response):
        yield {"title": response.css("h1::text").get()}
        yield from response.follow_all(response.css("a"))
"""
ENV = {**os.environ, "SHOP_PASSWORD": PASSWORD}


def titles_in(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["title"] for line in path.read_text().splitlines())


def titles_of(site: LoginSite, *, without: frozenset[int] = frozenset()) -> Counter[str]:
    return Counter(f"account {number}" for number in range(site.pages) if number not in without)


def until(holds: Callable[[], bool], timeout: float = 60.0) -> None:
    limit = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)


def crawl_of(folder: Path, site: LoginSite, *arguments: str) -> list[str]:
    (folder / "spider.py").write_text(SPIDER)
    return [
        *SHOAL, "run", "spider.py", "-a", f"start_urls={site.url}/account/0", "-a", f"site={site.url}", "-q",
        "--frontier", f"sqlite:///{folder}/crawl.db", "-o", "out.jsonl", *arguments,
    ]  # fmt: skip


# -- one process


def test_a_killed_crawl_goes_on_with_its_cookies(tmp_path: Path) -> None:
    with LoginSite(60, latency=0.05) as site:
        command = crawl_of(tmp_path, site)
        for kill in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
            served = site.served.total()
            crawl = forking.Popen(command, cwd=tmp_path, env=ENV)
            until(lambda served=served: site.served.total() > served + 4)  # type: ignore[misc]
            crawl.send_signal(kill)
            crawl.wait(30)
        assert site.served.total() < 60
        forking.run(command, cwd=tmp_path, check=True, timeout=60, env=ENV)
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert len(site.logins) == 1
        assert not site.refused


@pytest.mark.parametrize("arguments", [(), ("--processes", "2")], ids=["one process", "processes"])
def test_sessions_end_and_the_crawl_is_killed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with LoginSite(100, lasts=20) as site:
        command = crawl_of(tmp_path, site, *arguments)
        for _ in range(3):
            served = site.served.total()
            crawl = forking.Popen(command, cwd=tmp_path, env=ENV)
            until(lambda served=served: site.served.total() > served + 10)  # type: ignore[misc]
            time.sleep(random.uniform(0, 0.1))
            crawl.kill()
            crawl.wait(30)
        forking.run(command, cwd=tmp_path, check=True, timeout=60, env=ENV)
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert site.overlaps == 0


def test_a_page_that_nobody_may_see_fails_alone(tmp_path: Path) -> None:
    with LoginSite(30, always_out=frozenset({7})) as site:
        done = forking.run(crawl_of(tmp_path, site), cwd=tmp_path, capture_output=True, text=True, timeout=60, env=ENV)
        assert "logged out: 1" in done.stderr
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site, without=frozenset({7}))
        assert len(site.logins) <= 5
        assert 3 <= site.refused[7] <= 6


def test_a_wrong_password_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    with LoginSite(10) as site:
        command = [*crawl_of(tmp_path, site), "--set", "login.retry_after=0.05"]
        wrong = {**ENV, "SHOP_PASSWORD": "wrong"}
        done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=wrong)
        assert done.returncode == 1
        assert "the login failed 3 times (login.attempts)" in done.stderr
        assert site.wrong == 3
        missing = {name: value for name, value in ENV.items() if name != "SHOP_PASSWORD"}
        done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=missing)
        assert "the secret SHOP_PASSWORD is missing" in done.stderr
        (tmp_path / "secret").write_text(PASSWORD + "\n")
        forking.run(
            command,
            cwd=tmp_path,
            check=True,
            timeout=60,
            env={**missing, "SHOP_PASSWORD_FILE": str(tmp_path / "secret")},
        )
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)


def test_queries_of_the_login_are_not_reported_as_mistakes(tmp_path: Path) -> None:
    with LoginSite(5) as site:
        command = [word for word in crawl_of(tmp_path, site) if word != "-q"]
        rule = SPIDER.replace('LoggedOut(redirect="/login")', 'LoggedOut(selector="form#login")')
        (tmp_path / "spider.py").write_text(rule)
        done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=ENV, check=True)
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert "matched nothing" not in done.stderr


def test_a_login_keeps_the_delay_of_its_host(tmp_path: Path) -> None:
    with LoginSite(8, lasts=3, latency=0.0) as site:
        command = crawl_of(tmp_path, site, "--set", "download_delay=0.3")
        forking.run(command, cwd=tmp_path, check=True, timeout=60, env=ENV)
        moments = [moment for moment, _ in site.requests]
        gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
        assert min(gaps) > 0.25, gaps
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)


# -- fleets


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_a_fleet_has_one_session(kind: str, tmp_path: Path) -> None:
    """Six workers; sessions end every 20 pages; workers are killed and frozen."""
    with LoginSite(240, lasts=20, latency=0.02) as site, Fleet(tmp_path, frontier_url(kind), SPIDER) as fleet:
        fleet.start(f"{site.url}/account/0", arguments=("-a", f"site={site.url}"), settings={"lease.ttl": 5})
        settings = {"lease.ttl": 5, "worker.session": 3}
        workers = [fleet.worker("-o", "out.jsonl", env=ENV, settings=settings) for _ in range(6)]
        frozen: list[subprocess.Popen[str]] = []
        for number in range(4):
            served = site.served.total()
            until(lambda served=served: site.served.total() > served + 25)  # type: ignore[misc]
            worker = workers.pop(random.randrange(len(workers)))
            if number % 2:
                worker.kill()
                workers.append(fleet.worker("-o", "out.jsonl", env=ENV, settings=settings))
            else:
                worker.send_signal(signal.SIGSTOP)
                frozen.append(worker)
        time.sleep(3.5)
        for worker in frozen:
            worker.send_signal(signal.SIGCONT)
        fleet.wait()
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert site.overlaps <= len(frozen)
        assert site.wrong == 0


# -- Scrapy projects, named jars, identities

SCRAPY = """
import scrapy

class Account(scrapy.Spider):
    name = "account"
    custom_settings = {"CONCURRENT_REQUESTS": 2, "DOWNLOAD_DELAY": 0, "ROBOTSTXT_OBEY": False}

    def start_requests(self):
        yield scrapy.Request(self.site + "/login")

    def parse(self, response):
        yield scrapy.FormRequest.from_response(
            response, formdata={"user": "me", "password": "open sesame"}, callback=self.begin
        )

    def begin(self, response):
        yield scrapy.Request(self.site + "/account/0", callback=self.account)

    def account(self, response):
        yield {"title": response.css("h1::text").get()}
        yield from response.follow_all(css="a", callback=self.account)
"""


def test_a_scrapy_project_goes_on_with_its_cookies(tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SCRAPY)
    with LoginSite(30, latency=0.05) as site:
        command = [
            *SHOAL, "run", "spider.py", "--scrapy", "-a", f"site={site.url}", "-q",
            "--frontier", f"sqlite:///{tmp_path}/crawl.db", "-o", "out.jsonl",
        ]  # fmt: skip
        crawl = forking.Popen(command, cwd=tmp_path)
        until(lambda: site.served.total() >= 8)
        crawl.kill()
        crawl.wait(30)
        forking.run(command, cwd=tmp_path, check=True, timeout=60)
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert (len(site.logins), site.refused.total()) == (1, 0)


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_workers_of_a_scrapy_project_share_the_cookies(kind: str, tmp_path: Path) -> None:
    with LoginSite(60, latency=0.05) as site, Fleet(tmp_path, frontier_url(kind), SCRAPY) as fleet:
        fleet.shoal("start", "spider.py", "--scrapy", "-a", f"site={site.url}", "--run-id", "accounts")
        fleet.run_id = "accounts"
        workers = [fleet.worker("--scrapy", "-o", "out.jsonl") for _ in range(3)]
        until(lambda: site.served.total() >= 15)
        workers[0].kill()
        fleet.wait()
        assert titles_in(tmp_path / "out.jsonl") == titles_of(site)
        assert (len(site.logins), site.refused.total()) == (1, 0)


JARS = """
from shoal import Request, Spider

class Jars(Spider):
    name = "jars"
    settings = {"download_delay": 0.0, "robots.obey": False, "concurrency": 2}

    def start(self):
        for name in "ab":
            yield Request(f"{self.site}/set/{name}", meta={"cookiejar": name})

    def parse(self, response):
        jar = response.meta["cookiejar"]
        for number in range(20):
            yield Request(f"{self.site}/show/{jar}/{number}", self.shown, meta={"cookiejar": jar})

    def shown(self, response):
        yield {"jar": response.meta["cookiejar"], "sent": response.text}
"""


class CookieSite(LoginSite):
    """Sets the cookie ``who``, and shows what it was sent."""

    def _answer(self, method: str, path: str, cookies: dict[str, str], fields: dict[str, str]) -> Answer:
        time.sleep(self.latency)
        if path.startswith("/set/"):
            return 200, [("Set-Cookie", f"who={path[-1]}; Path=/")], "set"
        if path.startswith("/show/"):
            self.served[len(self.served)] += 1
        return 200, [], cookies.get("who", "nobody")


def test_named_jars_are_separate_and_survive(tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(JARS)
    with CookieSite(0, latency=0.03) as site:
        command = [
            *SHOAL, "run", "spider.py", "-a", f"site={site.url}", "-q", "--frontier", f"sqlite:///{tmp_path}/crawl.db",
            "-o", "out.jsonl",
        ]  # fmt: skip
        crawl = forking.Popen(command, cwd=tmp_path)
        until(lambda: site.served.total() >= 8)
        crawl.kill()
        crawl.wait(30)
        forking.run(command, cwd=tmp_path, check=True, timeout=60)
        items = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert Counter((item["jar"], item["sent"]) for item in items) == {("a", "a"): 20, ("b", "b"): 20}


class AddressSite(LoginSite):
    """Each address has a session of its own, and is blocked for a moment after some pages."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.owners: dict[str, str] = {}
        self.stolen = 0
        self._pages: Counter[str] = Counter()

    def log_in(self, cookies: dict[str, str], fields: dict[str, str]) -> Answer:
        answer = super().log_in(cookies, fields)
        with self._lock:
            self.owners[self._session] = self.client.address
        return answer

    def account(self, number: int, cookies: dict[str, str]) -> Answer:
        with self._lock:
            owner = self.owners.get(cookies.get("session", ""))
            self._pages[self.client.address] += 1
            if self._pages[self.client.address] % 8 == 0:
                return 429, [], ""
            self.stolen += owner not in (None, self.client.address)
            if owner is not None:
                self._session, self._left = cookies["session"], 10
        return super().account(number, cookies)


class Identified(Spider):
    name = "identified"
    logged_out = LoggedOut(redirect="/login")

    async def log_in(self, login: Login) -> None:
        page = await login.fetch(self.start_urls[0].replace("/account/0", "/login"))
        await login.fetch(page.form("#login").fill(user=login.jar, password=PASSWORD).submit())

    def parse(self, response: Response) -> Iterator[Any]:
        yield {"title": response.css("h1::text").get()}
        yield from response.follow_all(response.css("a"))


async def test_each_identity_has_its_own_session(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "download_delay": 0, "robots.obey": False, "concurrency": 1, "identities.rest": 0.2,
        "identities.give_up_after": 100, "frontier": f"sqlite:///{tmp_path}/crawl.db",
    }  # fmt: skip
    with AddressSite(40) as site:
        async with ProxyServer("127.0.0.11") as one, ProxyServer("127.0.0.12") as two:
            settings["proxies"] = [one.address, two.address]
            crawled = crawl(Identified, settings, arguments={"start_urls": [f"{site.url}/account/0"]})
            items = [item async for item in crawled]
        assert Counter(item["title"] for item in items) == titles_of(site)
        assert set(site.owners.values()) == {"127.0.0.11", "127.0.0.12"}
        assert (len(site.logins), site.stolen) == (2, 0)
