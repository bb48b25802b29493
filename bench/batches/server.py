"""The API: `shoal serve` as a process, and who calls it."""

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

PATIENCE = 60.0
"""Seconds after which something that does not come about is given up."""


class Caller:
    """Sends batches as the owner of a token, one right after the other: over one connection, which the server closes
    when it is not used for some seconds."""

    def __init__(self, port: int, name: str = "small") -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=600)
        self._headers = {"Authorization": f"Bearer {TOKENS[name]}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """The answer as it came. RuntimeError if the server refuses."""
        data = None if body is None else msgspec.json.encode(body)
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer[:300]!r}")
        return answer

    def batch(self, urls: Sequence[str], **more: Any) -> bytes:
        """All of it, as it came."""
        return self.ask("POST", "/api/crawl/batch", {"urls": urls, "timeout": 300, **more})

    def timed(self, urls: Sequence[str], **more: Any) -> tuple[float, Any]:
        """Seconds from the POST to the decoded answer, and that answer."""
        began = time.perf_counter()
        answer = msgspec.json.decode(self.batch(urls, **more))
        return time.perf_counter() - began, answer

    def get(self, path: str) -> Any:
        return msgspec.json.decode(self.ask("GET", path))


@dataclass(frozen=True)
class Api:
    """A server that answers."""

    port: int
    pid: int

    def memory(self) -> dict[str, int]:
        """Bytes that are resident: now, and at most so far."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines)
        return {name: 1024 * int(values[key].split()[0]) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


@contextmanager
def api(setup: Setup, *, core: int | None, environ: Mapping[str, str] | None = None) -> Iterator[Api]:
    """As soon as it answers. Its local sessions are in memory."""
    port = free_port()
    words = ("-m", "shoal.cli.main", "serve", "--port", str(port))
    with running(setup, "server", *words, core=core, environ=environ) as process:

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"`shoal serve` has ended; why is in {FOLDER}")
            try:
                return bool(Caller(port).get("/health"))
            except OSError:
                return False

        until(answers, "the server")
        yield Api(port, process.pid)


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"after {PATIENCE:g} s {what} is not there")
        time.sleep(0.05)


def problems(answer: Any, urls: Sequence[str]) -> list[str]:
    """What is wrong with the answer to a batch: each URL has its page, in the order in which they were given."""
    results = answer["results"]
    if [result["url"] for result in results] != list(urls):
        return [f"the answer has {len(results)} results of {len(urls)} URLs, or in another order"]
    bad = [
        result for result in results if not (result["status"] == "success" and result["title"] and result["content"])
    ]
    return [f"{len(bad)} pages of {len(urls)} not had, the first for {bad[0]['error']}"] if bad else []
