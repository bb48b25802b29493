"""Request bodies that try to overload a server, and a monitor of the server that receives them."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.acceptance.serving import Api

SIZE = 8_000_000  # just below serve.max_request_bytes


def filled(before: bytes, part: bytes, after: bytes) -> bytes:
    return before + part * ((SIZE - len(before) - len(after)) // len(part)) + after


def numbered(before: bytes, part: bytes, after: bytes, size: int = SIZE) -> bytes:
    """The same, but all parts differ."""
    return before + b",".join(part % number for number in range(size // (len(part) + 7))) + after


def foreign_urls(count: int, labels: int = 40) -> list[str]:
    """URLs with different host names that are slow to convert to ASCII."""
    return [f"http://{'.'.join(['ü'] * labels)}{number}.example/" for number in range(count)]


BODIES: dict[str, bytes] = {
    "numbers": filled(b'{"urls": [', b"1, ", b"1]}"),
    "lists": filled(b'{"urls": [', b"[],", b"1]}"),
    "short texts": filled(b'{"urls": [', b'"ab",', b'"a"]}'),
    "escaped": filled(b'{"urls": [', rb'"\\",', b'"a"]}'),
    "objects in options": filled(b'{"urls": ["http://a.example/"], "options": {"headers": [', b"{},", b"1]}}"),
    "keys": numbered(b'{"urls": ["http://a.example/"],', b'"k%d": 1', b"}"),
    "headers": numbered(b'{"urls": ["http://a.example/"], "options": {"headers": {', b'"k%d": 1', b"}}}"),
    "few headers": numbered(b'{"urls": ["http://a.example/"], "options": {"headers": {', b'"k%d": 1', b"}}}", 100_000),
    "few options": numbered(b'{"urls": ["http://a.example/"], "options": {', b'"k%d": 1', b"}}", 100_000),
    "few fields": numbered(
        b'{"urls": ["http://a.example/"], "options": {"format": "fields", "fields": {', b'"k%d": 1', b"}}}", 100_000
    ),
    "a list": filled(b"[", b"[],", b"1]"),
    "deep": b"[" * SIZE,
    "deep options": b'{"urls": ["http://a.example/"], "options": ' + b"[" * 100_000 + b"}",
    "a long key": b'{"' + b"k" * (SIZE - 100) + b'": 1}',
    "a long text": b'{"urls": ["http://a.example/' + b"x" * (SIZE - 100) + b'"]}',
    "long and wrong": b'{"urls": ["http://a.example/"], "timeout": "' + b"x" * 100_000 + b'"}',
    "no json": b"\xff" * SIZE,
}
"""The server refuses each of these."""


class Watch:
    """Sends requests to a server all the time. Records the longest wait, and the memory of the server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.worst = 0.0
        self.asked = 0
        self._status = Path(f"/proc/{api.process.process.pid}/status")
        self.before = self.memory()

    def memory(self, what: str = "VmHWM") -> int:
        """The peak memory of the process, in MB."""
        line = next(line for line in self._status.read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) // 1024

    @property
    def growth(self) -> int:
        return self.memory() - self.before

    def ask(self, stop: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._api.port, timeout=60)
        while not stop.wait(0.005):
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.worst = max(self.worst, time.monotonic() - began)
            self.asked += 1
        connection.close()


@contextmanager
def watched(api: Api) -> Iterator[Watch]:
    watch = Watch(api)
    stop = threading.Event()
    thread = threading.Thread(target=watch.ask, args=(stop,))
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def post(api: Api, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the raw response."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **api.headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
