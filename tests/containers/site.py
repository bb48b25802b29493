"""A small site for crawlers in containers. It knows its pages and records every request. Standard library only.

Each first part of a path is a site of its own: ``/NAME/0`` is the first page of the site NAME, and each page links to
some of the others. The headings of the site ``script`` are made by a script. ``/-/visits`` returns all requests so
far as JSON: address of the client, and path.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8080
PAGES = 90
LATENCY = {"fleet": 1.5, "killed": 0.8, "redis": 0.8}
OTHERWISE = 0.2
"""Seconds for a page, by site, so that there is time to kill something in the middle of a crawl."""
GATED = {"fleet"}
"""Only the first page of these sites is answered before ``/-/open`` was requested."""


def page_paths(name: str, pages: int = PAGES) -> set[str]:
    """All pages of one site."""
    return {f"/{name}/{number}" for number in range(pages)}


def links(number: int, pages: int = PAGES) -> list[int]:
    """A tree of six children per page, and two links across."""
    children = [child for child in range(6 * number + 1, 6 * number + 7) if child < pages]
    return [*children, (number * 7 + 5) % pages, (number + pages // 2) % pages]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    visits: list[tuple[str, str]] = []
    gate = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/-/visits":
            self._answer(json.dumps(self.visits), "application/json")
            return
        if self.path == "/-/open":
            self.gate.set()
            self._answer("true", "application/json")
            return
        self.visits.append((self.client_address[0], self.path))
        name, _, number = self.path.removeprefix("/").partition("/")
        if not number.isdigit() or int(number) >= PAGES:
            self._answer("no such page", status=404)
            return
        if name in GATED and number != "0":
            self.gate.wait()
        time.sleep(LATENCY.get(name, OTHERWISE))
        heading = f"<h1>{self.path}</h1>"
        if name == "script":
            heading = (
                "<h1>not rendered</h1><script>document.querySelector('h1').textContent = location.pathname</script>"
            )
        found = "".join(f'<a href="/{name}/{other}">{other}</a> ' for other in links(int(number)))
        self._answer(f"<!doctype html><title>page {number}</title>{heading}{found}")

    def _answer(self, body: str, content_type: str = "text/html; charset=utf-8", status: int = 200) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # killed clients are expected
            super().handle_error(request, client_address)  # type: ignore[arg-type]


if __name__ == "__main__":
    Server(("0.0.0.0", PORT), Handler).serve_forever()
