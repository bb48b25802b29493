"""A site of items with files, as a process: `python -m tests.acceptance.file_site --items 50`.

``/`` links to ``/item/0`` and so on. Each item has a file of its own, one that all items share, one that is missing,
and an image. ``/-/hits`` counts the requests by path.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections import Counter
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from PIL import Image


def content_of(number: int) -> bytes:
    """The own file of an item. Two items in a row have the same content."""
    return b"%PDF-1.7 " + str(number // 2).encode() * 5000


@cache
def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (300, 200), (number % 256, 0, 100)).save(out, "PNG")
    return out.getvalue()


def files_of(number: int) -> list[str]:
    return [f"/own/{number}.pdf", "/shared.txt", f"/missing/{number}.pdf", f"/picture/{number % 5}.png"]


class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    items, latency = 50, 0.0
    hits: Counter[str] = Counter()
    lock = Lock()

    def do_GET(self) -> None:
        if not self.path.startswith("/-/"):
            time.sleep(self.latency)
            with self.lock:
                self.hits[self.path] += 1
        body, kind = self.answer()
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self) -> tuple[bytes, str]:
        """The body and its type; no type: there is no such page."""
        _, first, *rest = self.path.split("/")
        number = int(rest[0].partition(".")[0]) if rest and rest[0].partition(".")[0].isdigit() else 0
        match first:
            case "":
                links = "".join(f'<a href="/item/{each}">{each}</a>' for each in range(self.items))
                return links.encode(), "text/html"
            case "item":
                links = "".join(f'<a class="file" href="{url}">file</a>' for url in files_of(number))
                return f"<h1>{number}</h1>{links}".encode(), "text/html"
            case "own":
                return content_of(number), "application/pdf"
            case "picture":
                return picture(number), "image/png"
            case "shared.txt":
                return b"shared by all", "text/plain"
            case "-":
                with self.lock:
                    return json.dumps(self.hits).encode(), "application/json"
            case _:
                return b"", ""

    def log_message(self, format: str, *values: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.file_site")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--latency", type=float, default=0.0)
    options = parser.parse_args()
    Site.items, Site.latency = options.items, options.latency
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
