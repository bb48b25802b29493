"""The API server (`shoal serve`) as a process, and its callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec

from batches.setup import FOLDER, TOKENS, Setup, running
from crawl.server import free_port

TIMEOUT = 60.0
"""Seconds to wait for a condition before giving up."""


class Caller:
    """Sends batches with one token, one after the other, over one connection. The server closes it when it is idle."""

    def __init__(self, port: int, name: str = "small") -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=600)
        self._headers = {"Authorization": f"Bearer {TOKENS[name]}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the raw response. RuntimeError if the server refuses the request."""
        data = None if body is None else msgspec.json.encode(body)
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer[:300]!r}")
        return answer

    def batch(self, urls: Sequence[str], **more: Any) -> bytes:
        """Send a batch and return the whole raw response."""
        return self.ask("POST", "/api/crawl/batch", {"urls": urls, "timeout": 300, **more})

    def timed(self, urls: Sequence[str], **more: Any) -> tuple[float, Any]:
        """Return the seconds from the POST to the decoded response, and the response."""
        began = time.perf_counter()
        answer = msgspec.json.decode(self.batch(urls, **more))
        return time.perf_counter() - began, answer

    def get(self, path: str) -> Any:
        return msgspec.json.decode(self.ask("GET", path))


@dataclass(frozen=True)
class Api:
    """A running server."""

    port: int
    pid: int

    def memory(self) -> dict[str, int]:
        """Resident bytes: now, and the peak so far."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines)
        return {name: 1024 * int(values[key].split()[0]) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


@contextmanager
def api(setup: Setup, *, core: int | None, environ: Mapping[str, str] | None = None) -> Iterator[Api]:
    """Start a server, and yield it when it answers. Its local sessions are in memory."""
    port = free_port()
    words = ("-m", "shoal.cli.main", "serve", "--port", str(port))
    with running(setup, "server", *words, core=core, environ=environ) as process:

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"`shoal serve` ended; see {FOLDER}")
            try:
                return bool(Caller(port).get("/health"))
            except OSError:
                return False

        wait_until(answers, "the server")
        yield Api(port, process.pid)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"after {TIMEOUT:g} s {what} did not answer")
        time.sleep(0.05)


def problems(answer: Any, urls: Sequence[str]) -> list[str]:
    """Problems in the response to a batch: each URL must have its page, in the order of the request."""
    results = answer["results"]
    if [result["url"] for result in results] != list(urls):
        return [f"the answer has {len(results)} results of {len(urls)} URLs, or in another order"]
    bad = [
        result for result in results if not (result["status"] == "success" and result["title"] and result["content"])
    ]
    return [f"{len(bad)} pages of {len(urls)} not had, the first for {bad[0]['error']}"] if bad else []
