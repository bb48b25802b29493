"""`shoal session` and ``--session``: cookies of a run are shown without values, exported, imported and cleared."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.acceptance.fleets import frontier_url
from tests.dashboard.browsing import chromium
from tests.support import forking
from tests.support.forking import SHOAL

PAGES = 12
VALUE = "s3cret-value-of-the-session"
SPIDER = """
from shoal import LoggedOut, Request, Spider

class Account(Spider):
    name = "account"
    settings = {{"download_delay": {delay}, "robots.obey": False, "throttle.enabled": False}}
    logged_out = LoggedOut(redirect="/login")

    def start(self):
        return ["{url}/account/%d" % number for number in range({pages})]

    def parse(self, response):
        yield {{"url": response.url}}
"""
LOG_IN = """
    async def log_in(self, login):
        await login.fetch(Request("{url}/login", method="POST"))
"""
Shoal = Callable[..., subprocess.CompletedProcess[str]]


class Site(ThreadingHTTPServer):
    """Answers account pages only with a session that is valid, and others with a redirect to the login."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.valid = {VALUE}
        self.logins = 0
        self.served = 0
        self.refused = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_POST(self) -> None:
        self.server.logins += 1
        value = secrets.token_hex(8)
        self.server.valid.add(value)
        self._answer(200, ("Set-Cookie", f"sid={value}; Path=/; HttpOnly"))

    def do_GET(self) -> None:
        sid = re.search(r"sid=([^;]+)", self.headers.get("Cookie", ""))
        if self.path.startswith("/account") and (sid is None or sid[1] not in self.server.valid):
            self.server.refused += 1
            return self._answer(302, ("Location", "/login"))
        self.server.served += self.path.startswith("/account")
        return self._answer(200)

    def _answer(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for header in (*headers, ("Content-Type", "text/html"), ("Content-Length", "2")):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def shoal(tmp_path: Path) -> Shoal:
    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = forking.run([*SHOAL, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert VALUE not in done.stderr
        return done

    return run


def write_spider(folder: Path, site: Site, *, delay: float = 0, logs_in: bool = False, pages: int = PAGES) -> None:
    text = SPIDER + (LOG_IN if logs_in else "")
    (folder / "account.py").write_text(text.format(url=site.url, delay=delay, pages=pages))


def write_state(folder: Path, value: str = VALUE) -> str:
    """A session as Playwright saves it."""
    cookie = {"name": "sid", "value": value, "domain": "127.0.0.1", "path": "/", "expires": -1, "httpOnly": True,
              "secure": False, "sameSite": "Lax"}  # fmt: skip
    (folder / "state.json").write_text(json.dumps({"cookies": [cookie], "origins": []}))
    return "state.json"


def items(file: Path) -> int:
    return len(set(file.read_text().splitlines()))


@pytest.mark.parametrize("words", [(), ("--processes", "2")], ids=["one", "processes"])
@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///q.db"])
def test_a_recorded_session_is_used_from_the_first_page(
    shoal: Shoal, site: Site, tmp_path: Path, frontier: str, words: tuple[str, ...]
) -> None:
    """The spider only knows what a logged-out page is."""
    write_spider(tmp_path, site)
    shoal("run", "account.py", "--session", write_state(tmp_path), "-o", "x.jsonl", "--frontier", frontier, *words)
    assert items(tmp_path / "x.jsonl") == PAGES
    assert (site.served, site.refused) == (PAGES, 0)


def test_the_session_is_shown_without_values_and_exported(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    write_spider(tmp_path, site)
    store = ("--frontier", "sqlite:///q.db")
    shoal("run", "account.py", "--session", write_state(tmp_path), *store, "-o", "x.jsonl")
    shown = shoal("session", *store).stdout
    assert shown.startswith("jar default\n  session since 20")
    assert "  127.0.0.1: 1 cookie (sid), until the session ends\n" in shown
    as_json = shoal("session", "--json", *store).stdout
    assert json.loads(as_json)["sites"] == [{"site": "127.0.0.1", "cookies": 1, "names": ["sid"], "ends": None}]
    assert VALUE not in shown + as_json + shoal("actions", *store).stdout
    for name in ("out.json", "out.txt"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
        shoal("session", "--export", name, *store)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    exported = json.loads((tmp_path / "out.json").read_text())["cookies"]
    assert [(cookie["name"], cookie["value"], cookie["domain"]) for cookie in exported] == [("sid", VALUE, "127.0.0.1")]
    assert f"#HttpOnly_127.0.0.1\tFALSE\t/\tFALSE\t0\tsid\t{VALUE}\n" in (tmp_path / "out.txt").read_text()
    assert shoal("session", "--export", "-", *store).stdout == (tmp_path / "out.txt").read_text()
    assert shoal("session", "--export", "-", "--format", "playwright", *store).stdout.startswith("{")
    assert (
        "has no jar x; its jars are: default" in shoal("session", "--export", "-", "--jar", "x", *store, code=2).stderr
    )


def test_a_session_of_a_real_browser(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    """Log in by hand, crawl with that session, and open the account in the browser with the session of the run."""
    write_spider(tmp_path, site)
    store = ("--frontier", "sqlite:///q.db")
    with chromium() as browser:
        context = browser.new_context()
        context.request.post(f"{site.url}/login")
        site.valid.remove(VALUE)
        context.new_page().goto(f"{site.url}/account/0")
        context.storage_state(path=tmp_path / "recorded.json")
        shoal("run", "account.py", "--session", "recorded.json", "-o", "x.jsonl", *store)
        assert (items(tmp_path / "x.jsonl"), site.logins, site.refused) == (PAGES, 1, 0)
        shoal("session", "--export", "exported.json", *store)
        page = browser.new_context(storage_state=tmp_path / "exported.json").new_page()
        answer = page.goto(f"{site.url}/account/0")
        assert answer is not None
        assert (answer.status, page.url) == (200, f"{site.url}/account/0")


@pytest.mark.parametrize("backend", ["redis", "postgresql"])
def test_an_import_before_the_first_worker(shoal: Shoal, site: Site, tmp_path: Path, backend: str) -> None:
    write_spider(tmp_path, site)
    store = ("--frontier", frontier_url(backend))
    run_id = json.loads(shoal("start", "account.py", *store).stdout)["run_id"]
    assert "has no stored cookies" in shoal("session", *store).stdout
    imported = shoal("session", run_id, "--import", write_state(tmp_path), *store).stdout
    assert imported == f"imported 1 cookie for 127.0.0.1 into jar default of run {run_id}\n"
    shoal("worker", "account.py", "--run-id", run_id, *store)
    assert (site.served, site.refused) == (PAGES, 0)
    assert "import session" in shoal("actions", *store).stdout


def test_many_sites_and_jars(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    write_spider(tmp_path, site, pages=1)
    store = ("--frontier", "sqlite:///q.db")
    shoal("run", "account.py", "--session", write_state(tmp_path), *store)
    lines = [f"site{number}.example\tFALSE\t/\tFALSE\t0\tsid\t{VALUE}" for number in range(1200)]
    (tmp_path / "many.txt").write_text("\n".join(lines))
    imported = shoal("session", "--import", "many.txt", "--jar", "#alice", *store).stdout
    assert "imported 1,200 cookies for site0.example, " in imported
    assert " and 1195 more into jar #alice of run " in imported
    assert "\nthe run is finished: nothing uses the session unless it is reopened" in imported
    shown = shoal("session", *store).stdout
    assert "\njar #alice\n" in shown
    assert shown.endswith("  and 1,150 more sites; --json lists all\n")
    assert len(json.loads(shoal("session", "--json", "--jar", "#alice", *store).stdout)["sites"]) == 1200
    assert (
        "has 2 jars: choose one with --jar: default, #alice" in shoal("session", "--export", "-", *store, code=2).stderr
    )
    assert shoal("session", "--export", "-", "--jar", "#alice", *store).stdout.count(VALUE) == 1200
    unknown = shoal("session", "--import", "many.txt", "--jar", "bob", *store, code=2).stderr
    assert 'The jar of meta["cookiejar"] = "bob" is called "#bob"' in unknown
    assert "removed 1,200 cookies of 1 jar " in shoal("session", "--clear", "--jar", "#alice", *store).stdout


def test_a_fleet_whose_imported_session_ends_is_paused(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    """The spider cannot log in. Its run waits for another session, and new workers do not bother the site."""
    write_spider(tmp_path, site, delay=0.05)
    store = ("--frontier", frontier_url("redis"))
    run_id = json.loads(shoal("start", "account.py", "--session", write_state(tmp_path), *store).stdout)["run_id"]
    with forking.Popen(
        [*SHOAL, "worker", "account.py", "--run-id", run_id, *store], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as worker:
        wait_until(lambda: site.served >= 3)
        site.valid.clear()
        _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 1
    assert f"has no log_in(): import a new session with `shoal session {run_id} --import FILE`" in errors
    shown = shoal("session", *store).stdout
    assert "login failed 1 time, last at 20" in shown
    assert "; the run was stopped: the site has logged the run out" in shown
    site.valid.add("another-session")
    imported = shoal("session", "--import", write_state(tmp_path, "another-session"), *store).stdout
    assert imported.endswith(f"the run is paused: `shoal resume {run_id}` continues it\n")
    assert "login failed" not in shoal("session", *store).stdout
    shoal("resume", run_id, *store)
    shoal("worker", "account.py", "--run-id", run_id, *store)
    assert site.served == PAGES


@pytest.mark.parametrize("backend", ["sqlite", "redis", "postgresql"])
def test_a_clear_while_a_crawl_works(shoal: Shoal, site: Site, tmp_path: Path, backend: str) -> None:
    """It logs in again, and every page is there once."""
    write_spider(tmp_path, site, delay=0.1, logs_in=True)
    frontier = "sqlite:///q.db" if backend == "sqlite" else frontier_url(backend)
    command = [*SHOAL, "run", "account.py", "-o", "x.jsonl", "--frontier", frontier]
    with forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
        wait_until(lambda: site.served >= 3)
        assert "logins: 1" in shoal("session", "--frontier", frontier).stdout
        assert "removed 1 cookie of 1 jar " in shoal("session", "--clear", "--frontier", frontier).stdout
        wait_until(lambda: site.logins == 2)
        _, errors = crawl.communicate(timeout=30)
    assert crawl.returncode == 0, errors
    assert items(tmp_path / "x.jsonl") == PAGES
    assert (site.logins, site.served) == (2, PAGES)


@pytest.mark.parametrize("words", [(), ("--processes", "2")], ids=["one", "processes"])
def test_an_import_while_a_crawl_works(shoal: Shoal, site: Site, tmp_path: Path, words: tuple[str, ...]) -> None:
    """The workers use the new session from their next page on; the old one has ended meanwhile."""
    write_spider(tmp_path, site, delay=0.1)
    store = ("--frontier", "sqlite:///q.db")
    state = write_state(tmp_path)
    command = [*SHOAL, "run", "account.py", "--session", state, "-o", "x.jsonl", *store, *words]
    site.valid.add("another-session")
    with forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
        wait_until(lambda: site.served >= 3)
        shoal("session", "--import", write_state(tmp_path, "another-session"), *store)
        at = site.served
        wait_until(lambda: site.served >= at + 3)
        site.valid.remove(VALUE)
        _, errors = crawl.communicate(timeout=30)
    assert crawl.returncode == 0, errors
    assert (items(tmp_path / "x.jsonl"), site.refused) == (PAGES, 0)


def test_a_resumed_run_imports_a_changed_file_only(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    """The site has ended the session of the file, and the user recorded a new one."""
    write_spider(tmp_path, site)
    command = ("run", "account.py", "--session", write_state(tmp_path, "over"), "-o", "x.jsonl", "--frontier",
               "sqlite:///q.db")  # fmt: skip
    assert "has no log_in(): import a new session" in shoal(*command, code=1).stderr
    refused = site.refused
    assert "the session file is unchanged" in shoal(*command, code=1).stderr
    assert site.refused > refused
    write_state(tmp_path)
    shoal(*command)
    assert items(tmp_path / "x.jsonl") == PAGES


def test_a_cleared_jar_logs_in_before_its_first_page(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    write_spider(tmp_path, site, logs_in=True)
    store = ("--frontier", "sqlite:///q.db")
    shoal("run", "account.py", "--max-pages", "2", *store)
    shoal("session", "--clear", *store)
    assert shoal("session", *store).stdout == "jar default\n  no cookies\n"
    shoal("run", "account.py", *store)
    assert (site.logins, site.refused) == (2, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "x: there is no cookie in it"),
        ("# Netscape HTTP Cookie File\na.example FALSE / FALSE 0 sid s3cret", "x: line 2 has 1 fields"),
        ("a.example\tFALSE\t/\tmaybe\t0\tsid\ts3cret", "x: line 1: secure must be TRUE or FALSE"),
        ("a.example\tFALSE\t/\tTRUE\tsoon\tsid\ts3cret", "x: line 1: the end of the cookie is neither a number"),
        ("a/b\tFALSE\t/\tTRUE\t0\tsid\ts3cret", "x: line 1: the domain is invalid"),
        ("a.example\tFALSE\t/\tTRUE\t1\tsid\ts3cret", "all cookies of the session file have expired"),
        ('{"cookies": [', "x: line 1: it is not valid JSON"),
        ('{"entries": []}', "x: the JSON has no list of cookies"),
        ('[{"name": "sid", "value": "s3cret", "domain": "a"}, {"name": "b"}]', "x: cookie 2: Object missing required"),
        ('[{"name": "sid", "value": 7, "domain": "a.example"}]', "x: cookie 1: Expected `str`, got `int` - at"),
        ('[{"name": "sid", "value": "s3cret; a=b", "domain": "a.example"}]', "x: cookie 1: the value of sid has char"),
        (json.dumps([{"name": "sid", "value": "s3cret" * 1000, "domain": "a.example"}]), "sid has more than 4,096"),
        (" " * (8 * 1024**2 + 1), "x: it has more than 8 MB"),
    ],
)  # fmt: skip
def test_bad_files_change_nothing(shoal: Shoal, site: Site, tmp_path: Path, content: str, message: str) -> None:
    write_spider(tmp_path, site, pages=1)
    store = ("--frontier", "sqlite:///q.db")
    shoal("run", "account.py", "--session", write_state(tmp_path), *store)
    before = shoal("session", "--json", *store).stdout
    (tmp_path / "x").write_text(content)
    error = shoal("session", "--import", "x", *store, code=2).stderr
    assert message in error
    assert "s3cret" not in error
    assert shoal("session", "--json", *store).stdout == before


def test_options_that_contradict_each_other(shoal: Shoal, site: Site, tmp_path: Path) -> None:
    write_spider(tmp_path, site, pages=1)
    state = write_state(tmp_path)
    for words, message in (
        (("session", "--clear", "--import", state), "exclude each other"),
        (("session", "--format", "netscape"), "--format belongs to --export"),
        (("session", "--export", "-", "--format", "netscap"), "did you mean"),
        (("session", "--clear", "--frontier", "memory:"), "cannot be changed from outside"),
        (("run", "account.py", "--session", state, "--tor"), "does not go with --tor"),
        (("run", "account.py", "--session", state, "--proxy", "http://a:1", "--proxy", "http://b:1"), "each proxy has"),
        (("run", "account.py", "--session", "missing.json"), "cannot read missing.json: No such file"),
    ):
        assert message in shoal(*words, code=2).stderr


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
