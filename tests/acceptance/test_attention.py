"""What needs attention, with real servers, workers and outages: it looks at the last minutes, and takes back what was
wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import Fleet, frontier_url
from tests.acceptance.serving import Api, beside, serving, until
from tests.acceptance.target import Target, host_of, target
from tests.acceptance.test_notifications import ENVIRON, Receiver, until_watched, webhook
from tests.support.databases import RedisServer
from tests.support.login_site import PASSWORD, LoginSite
from tests.support.scraping import addresses, get, scrape

pytestmark = pytest.mark.timeout(120)

SPIDER = """
import os, time
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "retry.max_attempts": 50, "throttle.max_delay": 1.0}

    def parse(self, response):
        if "hang" in response.url:
            until = time.monotonic() + float(os.environ.get("HANGS", "0"))
            while time.monotonic() < until:
                pass
        if "broken" in response.url:
            raise ValueError("no price")
        yield {"url": response.url}
"""
ACCOUNT = """
from shoal import LoggedOut, Spider

class Account(Spider):
    name = "account"
    settings = {"download_delay": 0, "robots.obey": False}
    logged_out = LoggedOut(redirect="/login", selector="form#login")

    async def log_in(self, login):
        page = await login.fetch(f"{self.site}/login")
        await login.fetch(page.form("#login").fill(user="me", password=login.secret("SHOP_PASSWORD")).submit())

    def parse(self, response):
        yield {"url": response.url}
"""
STILL_OUT = "the page after the login is still logged out: "
SESSION = 4.0
SETTINGS = """
[notifications]
check_every = 0.3
min_interval = 0

[notifications.rules.fast]
stuck_after = 6
host_failing_after = 4
no_worker_after = 2
login_after = 1
"""


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


class Stage(Fleet):
    """A fleet, and a server that watches it and sends webhooks."""

    def __init__(self, folder: Path, frontier: str, receiver: Receiver) -> None:
        super().__init__(folder, frontier, SPIDER)
        self.receiver = receiver
        self.api: Api

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The current problems of a kind."""
        return [each for each in self.api.get("/api/notifications")[1]["current"] if each["kind"] == kind]

    def messages(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(body) for _, body in self.receiver.messages]
        return [each for each in found if each["problem"]["kind"] == kind]

    def events(self, kind: str) -> list[str]:
        return [each["event"] for each in self.messages(kind)]

    def session_worker(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.worker(*arguments, settings={"worker.session": SESSION}, env=env)


@contextmanager
def watched(folder: Path, frontier: str) -> Iterator[Stage]:
    with beside(Receiver()) as receiver, Stage(folder, frontier, receiver) as stage:
        (folder / "shoal.toml").write_text(f"{SETTINGS}[notifications.channels.ops]\n{webhook(receiver.url)}")
        with serving(folder, {**ENVIRON, "SHOAL_FRONTIER": frontier}) as stage.api:
            until_watched(stage.api)
            yield stage


def test_the_first_error_of_a_callback_and_a_host_that_answers_only_errors(tmp_path: Path, site: Target) -> None:
    with watched(tmp_path, frontier_url("redis")) as stage:
        bad = [f"{site.url}/{number}?status=503" for number in range(30)]
        good = site.url.replace("127.0.0.1", "localhost")  # another host
        stage.start(f"{good}/broken", *bad)
        stage.worker()
        (problem,) = until(lambda: stage.of_kind("callback_errors"), what="the error")
        assert "Callbacks raised on 1 page, on 1 in the last 10 min." in problem["text"]
        assert "ValueError" in problem["text"]
        assert f"no price (spider.py, line 15), at {good}/broken" in problem["text"]
        (problem,) = until(lambda: stage.of_kind("host_failing"), what="the host")
        assert problem["title"] == f"pages: {host_of(site.url)} answers only 503"
        assert "by 1 process failed (http 503: " in problem["text"]
        assert "wait for it" in problem["text"]
        text = until(lambda: "host_failing" in (found := stage.api.text("/metrics")) and found, what="a metric")
        assert 'shoal_problems{kind="callback_errors",severity="warning"} 1' in text
        page = stage.api.text("/")
        assert "answers only 503" in page
        assert "Nothing needs attention" not in page
        site.mend()
        until(lambda: not stage.of_kind("host_failing"), what="a good answer")
        until(lambda: stage.events("host_failing")[-1] == "problem.resolved", what="the message about that")
        stage.wait()
        assert stage.events("callback_errors") == ["problem.new"]  # the end of the run does not resolve that


def test_an_outage_of_the_store_is_one_problem_and_nobody_is_lost(tmp_path: Path, site: Target) -> None:
    redis = RedisServer()
    try:
        with watched(tmp_path, redis.url) as stage:
            stage.start(*(f"{site.url}/{number}?wait=0.3" for number in range(600)))
            for _ in range(2):
                stage.session_worker()
            site.wait_for(10)
            until(lambda: len(stage.api.get("/api/runs")[1]["runs"]) == 1)
            began = time.monotonic()
            redis.kill()
            until(lambda: stage.messages("store_away"), what="the outage")
            until(lambda: " ago: the store does not answer" in stage.api.text("/"), what="its age")
            until(lambda: time.monotonic() > began + 2 * SESSION, what="a long outage")
            for worker in stage.processes:  # the server finds the store before they do
                worker.send_signal(signal.SIGSTOP)
            redis.start()
            until(lambda: len(stage.messages("store_away")) == 2, what="the end of the outage")
            for worker in stage.processes:
                worker.send_signal(signal.SIGCONT)
            before = len(site.visits())
            site.wait_for(before + 20)
            assert stage.messages("worker_lost") == []

            first, second = stage.processes
            second.terminate()  # so that nobody fences the first one before the server has seen it silent
            second.wait()
            first.send_signal(signal.SIGSTOP)
            until(lambda: stage.messages("worker_lost"), what="the frozen worker")
            first.send_signal(signal.SIGCONT)
            until(lambda: len(stage.messages("worker_lost")) == 2, what="its return")
            lost, back = stage.messages("worker_lost")
            assert (lost["event"], back["event"]) == ("problem.new", "problem.resolved")
            assert back["problem"]["title"].endswith(" is back")
            assert lost["problem"]["key"] == back["problem"]["key"]
    finally:
        redis.close()


def test_the_only_worker_hangs_in_a_callback(tmp_path: Path, site: Target) -> None:
    with watched(tmp_path, frontier_url("redis")) as stage:
        stage.start(f"{site.url}/hang", f"{site.url}/next")
        worker = stage.session_worker("--metrics-port", "0", HANGS="25")
        (url,) = addresses(tmp_path / "worker-0.log")
        (problem,) = until(lambda: stage.of_kind("worker_stuck"), what="the hang")
        assert f"by parse of {site.url}/hang." in problem["text"]
        shown = scrape(url)
        assert shown("shoal_worker_loop_age_seconds", spider="pages") > 5
        assert shown.all("shoal_frontier_up") == []  # it could not ask
        assert get(f"{url}/health")[0] == 200  # it hangs for less than a minute
        log = tmp_path / "worker-0.log"
        until(lambda: "the event loop has been blocked for" in log.read_text(), what="the stack")
        assert "while time.monotonic() < until:" in log.read_text()
        assert stage.messages("worker_lost") == []  # its thread says that it is alive
        until(lambda: not stage.of_kind("worker_stuck"), timeout=60, what="the end of the hang")
        until(lambda: stage.events("worker_stuck")[-1] == "problem.resolved", what="the message about its end")
        stage.wait()
        assert worker.returncode == 0
        assert log.read_text().count("the event loop has been blocked for") == 1


def test_a_run_that_nobody_takes(tmp_path: Path, site: Target) -> None:
    with watched(tmp_path, frontier_url("redis")) as stage:
        run_id = stage.start(f"{site.url}/a?wait=1", f"{site.url}/b?wait=1")
        (problem,) = until(lambda: stage.of_kind("no_worker"), what="the queued run")
        assert "It was never begun; 2 requests wait." in problem["text"]
        assert f"`shoal worker FILE --run-id {run_id}`" in problem["text"]
        stage.worker()
        until(lambda: not stage.of_kind("no_worker"), what="a worker")
        stage.wait()


def test_a_login_that_fails(tmp_path: Path) -> None:
    """From the first attempt on, with its reason; the stall has it too. A login that succeeds resolves both."""
    with LoginSite(5) as site, watched(tmp_path, frontier_url("redis")) as stage:
        (tmp_path / "spider.py").write_text(ACCOUNT.replace("{self.site}", site.url))
        stage.start(f"{site.url}/account/0")
        stage.worker("--set", "login.retry_after=25", "--set", "login.attempts=2", env={"SHOP_PASSWORD": "wrong"})
        (problem,) = until(lambda: stage.of_kind("login_failed"), what="the login")
        assert (problem["severity"], problem["title"]) == ("warning", "account: the login failed")
        assert problem["text"] == f"1 attempt failed, the last with: {STILL_OUT}{site.url}/login."
        (problem,) = until(lambda: stage.of_kind("stalled"), what="the hold")
        assert problem["severity"] == "warning"
        assert f"it is on hold until a login succeeds; the last attempt failed: {STILL_OUT}" in problem["text"]
        until(lambda: stage.of_kind("login_failed")[0]["severity"] == "critical", what="the stop")
        assert "2 attempts failed" in stage.of_kind("login_failed")[0]["text"]
        assert (
            f"The run was stopped. When the cause is gone, continue it with `shoal resume {stage.run_id}`"
            in (stage.of_kind("login_failed")[0]["text"])
        )
        assert stage.processes.pop().wait(30) == 1
        until(lambda: not stage.of_kind("stalled"), what="the end of the stall: the run is paused")
        stage.shoal("resume", stage.run_id)
        stage.worker(env={"SHOP_PASSWORD": PASSWORD})
        until(lambda: not stage.of_kind("login_failed"), what="a login")
        stage.wait()
        until(lambda: stage.events("login_failed")[-1:] == ["problem.resolved"], what="the message about that")
        assert PASSWORD not in json.dumps(stage.messages("login_failed"))
