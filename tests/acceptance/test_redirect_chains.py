"""`why` of any URL of a chain of redirects shows the whole chain and how it ended, in commands, the API and the
dashboard."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.acceptance.fleets import KINDS, Fleet, InProcessFleet, frontier_url
from tests.acceptance.serving import serving

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {
        "download_delay": 0, "throttle.enabled": False, "retry.max_attempts": 1, "http.max_redirects": 4,
        "outcome.max_failed": 1,
    }

    def __init__(self, site="", **more):
        super().__init__(site=site, **more)
        names = "loop self a gone out secret known bounce".split()
        self.start_urls = [f"{site}/page", *(f"{site}/{name}" for name in names)]
        self.allowed_domains = ["127.0.0.1"]

    def parse(self, response):
        yield {"url": response.url}
"""
ROUTES = {
    "/loop": "/loop2", "/loop2": "/loop",
    "/self": "/self",
    "/a": "/b", "/b": "/c",
    "/gone": "/gone2", "/gone2": "/nowhere",
    "/out": "/out2", "/out2": "http://elsewhere.example/",
    "/secret": "/forbidden/page",
    "/known": "/page",
    "/bounce": "/cookie",
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    bounced = False

    def do_GET(self) -> None:
        location = ROUTES.get(self.path)
        if self.path == "/cookie":  # back to where it came from, which then redirects elsewhere
            location = "/bounce"
        elif self.path == "/bounce":
            location = "/inside" if _Handler.bounced else "/cookie"
            _Handler.bounced = True
        body = b"User-agent: *\nDisallow: /forbidden/\n" if self.path == "/robots.txt" else b"<h1>page</h1>"
        self.send_response(302 if location else 404 if self.path == "/nowhere" else 200)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Type", "text/plain" if self.path == "/robots.txt" else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def redirecting() -> Iterator[str]:
    _Handler.bounced = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def chain(site: str, *paths: str) -> str:
    return "redirected to " + " → ".join(f"{site}{path}" for path in paths) + ": "


@pytest.mark.parametrize("kind", ["sqlite", "local", *KINDS])
def test_each_url_of_a_chain_shows_its_end(kind: str, tmp_path: Path) -> None:
    frontier = frontier_url(kind) if kind in KINDS else "sqlite:///crawl.db"
    fleet_type = Fleet if kind == "local" else InProcessFleet
    with redirecting() as site, fleet_type(tmp_path, frontier, SPIDER) as fleet:
        words = ["--processes", "2"] if kind == "local" else []
        fleet.shoal("run", "spider.py", "-a", f"site={site}", "-o", "out.jsonl", *words)

        def why(path: str) -> str:
            return fleet.shoal("why", site + path).stdout

        loop = chain(site, "/loop2", "/loop", "/loop2", "/loop")
        for path in ("/loop", "/loop2"):
            assert f"outcome   {loop}failed (redirects): more than 4 redirects, from {site}/loop" in why(path)
        assert f"{chain(site, *['/self'] * 4)}failed (redirects): more than 4 redirects" in why("/self")
        for path in ("/a", "/b", "/c"):
            assert f"outcome   {chain(site, '/b', '/c')}done, HTTP 200" in why(path)
        for path in ("/gone", "/gone2", "/nowhere"):
            assert f"{chain(site, '/gone2', '/nowhere')}failed (http 404): " in why(path)
        for path in ("/out", "/out2"):
            assert f"{chain(site, '/out2')}failed (scope): redirects to http://elsewhere.example/" in why(path)
        for path in ("/secret", "/forbidden/page"):
            assert f"{chain(site, '/forbidden/page')}failed (robots): " in why(path)
        assert f"{chain(site, '/page')}done, HTTP 200; the run had it already, as a start request" in why("/known")
        assert "outcome" not in why("/page")
        bounced = chain(site, "/cookie", "/bounce", "/inside")
        for path in ("/bounce", "/cookie", "/inside"):
            assert f"outcome   {bounced}done, HTTP 200" in why(path)


def test_a_chain_that_is_still_in_the_queue(tmp_path: Path) -> None:
    with redirecting() as site, InProcessFleet(tmp_path, "sqlite:///crawl.db", SPIDER) as fleet:
        fleet.shoal("run", "spider.py", "-a", f"site={site}", "--max-pages", "3", "--set", "concurrency=1")
        assert f"{chain(site, '/loop2')}still in the queue" in fleet.shoal("why", f"{site}/loop").stdout


def test_the_api_and_the_dashboard(tmp_path: Path) -> None:
    frontier = frontier_url("redis")
    with redirecting() as site, InProcessFleet(tmp_path, frontier, SPIDER) as fleet:
        fleet.shoal("run", "spider.py", "-a", f"site={site}", "-o", "out.jsonl")
        with serving(tmp_path, {"SHOAL_FRONTIER": frontier}) as api:
            (run,) = api.get("/api/runs")[1]["runs"]
            found = api.get(f"/api/runs/{run['run_id']}/url?url={quote(f'{site}/gone', safe='')}")[1]
            assert [(hop["url"], hop["state"], hop["status"]) for hop in found["redirects"]] == [
                (f"{site}/gone", "done", 302), (f"{site}/gone2", "done", 302), (f"{site}/nowhere", "failed", 404),
            ]  # fmt: skip
            assert "failed (http 404)" in found["outcome"]
            assert found["state"] == "done"
            address = f"{api.url}/ui/runs/{run['run_id']}/url?url={quote(f'{site}/loop', safe='')}"
            with urllib.request.urlopen(address) as answer:
                page = answer.read().decode()
            assert 'id="redirects" class="alert bad"' in page
            assert "failed (redirects): more than 4 redirects" in page
