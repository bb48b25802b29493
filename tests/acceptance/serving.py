"""Helpers for the tests of the API: a server as a process, Celery workers, and a small client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.acceptance.fleets import SHOAL
from tests.acceptance.target import Target
from tests.support import forking
from tests.support.databases import RedisServer, free_port
from tests.support.servers import StreamServer

Server = TypeVar("Server", bound=StreamServer)

CELERY = [sys.executable, "-m", "celery", "-A", "shoal.celery"]
FAST = {
    "SHOAL_DOWNLOAD_DELAY": "0",
    "SHOAL_SERVE__ALLOW": "127.0.0.0/8",
    "SHOAL_RETRY__BASE_DELAY": "0.1",
    "CELERY_TASK_RATE_LIMIT": "none",
}
"""Settings that allow crawling sites on this machine, without a delay."""


PATIENCE = 60.0  # seconds: a busy machine takes ten times as long as an idle one


def until(holds: Callable[[], Any], timeout: float = PATIENCE, what: str = "it", pause: float = 0.1) -> Any:
    """Call the condition until its result is true, and return that."""
    timeout = max(timeout, PATIENCE)
    end = time.monotonic() + timeout
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < end, f"after {timeout:g} s {what} is not so"
        time.sleep(pause)


def stands_still(site: Target, seconds: float = 0.8) -> bool:
    """Whether nobody asks the site for anything."""
    before = len(site.visits())
    time.sleep(seconds)
    return len(site.visits()) == before


def is_genuine(secret: str, signature: str, body: bytes) -> bool:
    """The recipe of the guide."""
    at, _, code = signature.removeprefix("t=").partition(",v1=")
    expected = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(code, expected) and abs(time.time() - int(at)) < 60


@contextmanager
def beside(server: Server) -> Iterator[Server]:
    """Run a test server on an event loop in another thread, for tests that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class Process:
    """A process with its children and its output."""

    def __init__(self, command: Sequence[str], folder: Path, name: str, environ: dict[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            can_fork = command[0] == sys.executable and "PYTHONPATH" not in environ
            start = forking.Popen if can_fork else subprocess.Popen
            self.process: subprocess.Popen[Any] = start(
                command, cwd=folder, stdout=out, stderr=out, env={**os.environ, **environ}, start_new_session=True
            )

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self, timeout: float = 15.0) -> int:
        self.process.terminate()
        return self.process.wait(timeout)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Api:
    """A client of a server."""

    def __init__(self, folder: Path, environ: dict[str, str], arguments: Sequence[str] = ()) -> None:
        self.folder = folder
        self.environ = environ
        self.arguments = arguments
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        command = [*SHOAL, "serve", "--port", str(self.port), *self.arguments]
        self.process = Process(command, self.folder, "api", self.environ)
        until(self._answers, what="the server")

    def _answers(self) -> bool:
        assert self.process.process.poll() is None, self.process.said()
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """The status and the decoded response."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data,
            {"Content-Type": "application/json", **self.headers, **(headers or {})},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def text(self, path: str) -> str:
        """A response that is not JSON."""
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=self.headers), timeout=30
        ) as answer:
            body: bytes = answer.read()
            return body.decode()

    def batch(self, urls: Sequence[str], **more: Any) -> Any:
        """The response to a batch, which must succeed."""
        status, answer = self.ask("POST", "/api/crawl/batch", {"urls": list(urls), **more})
        assert status in (200, 202), answer
        return answer

    def results(self, session_id: str) -> list[dict[str, Any]]:
        """All results of a session, page by page."""
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            status, page = self.get(f"/api/crawl/{session_id}?after={after}&limit=100")
            assert status == 200, page
            if not page["results"]:
                return found
            found += page["results"]
            after = page["next"]

    def wait(self, session_id: str, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for the end of a session, and return it."""

        def over() -> Any:
            status, page = self.get(f"/api/crawl/{session_id}?limit=1")
            assert status == 200, page
            return page if page["state"] in ("finished", "cancelled") else None

        found: dict[str, Any] = until(over, timeout, f"session {session_id}")
        return found


@contextmanager
def serving(folder: Path, environ: dict[str, str] | None = None, *arguments: str) -> Iterator[Api]:
    """Run the API on a free port, by default with a frontier in memory."""
    api = Api(folder, {**FAST, **(environ or {})}, arguments)
    try:
        yield api
    finally:
        api.process.kill()


class Celery:
    """A broker without persistence, a durable store, Celery workers, and Flower."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.broker = RedisServer(appendonly="no")
        self.store = RedisServer()
        self.environ = {
            **FAST,
            "CELERY_BROKER_URL": self.broker.url,
            "CELERY_RESULT_BACKEND": self.broker.url.removesuffix("/0") + "/1",
            "SHOAL_FRONTIER": self.store.url,
            "SHOAL_LEASE__TTL": "6",
            **environ,
        }
        self.workers: list[Process] = []
        self._made = 0
        self._others: list[Process] = []
        self.api = Api(folder, self.environ)

    def worker(self) -> Process:
        self._made += 1
        name = f"worker-{self._made}"
        command = [*CELERY, "worker", "-n", f"{name}@%h", "--loglevel", "INFO"]
        made = Process(command, self.folder, name, self.environ)
        self.workers.append(made)
        return made

    def start_workers(self, count: int) -> None:
        """Start workers, and wait until all of them answer."""
        for _ in range(count):
            self.worker()
        alive = sum(worker.process.poll() is None for worker in self.workers)
        until(lambda: self.status().get("workers") == alive, 40, f"a fleet of {alive} workers")

    def replace_the_dead(self) -> int:
        """Restart workers that have ended, as a supervisor does, and return their number. Some end with the broker."""
        dead = [worker for worker in self.workers if worker.process.poll() is not None]
        for worker in dead:
            self.workers.remove(worker)
            self.worker()
        return len(dead)

    def control(self, *words: str) -> None:
        """Send a control command to the workers."""
        done = forking.run(
            [*CELERY, "control", "--timeout", "1", *words], cwd=self.folder, env={**os.environ, **self.environ},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        status, answer = self.api.get("/api/crawl/distributed/status")
        assert status == 200
        found: dict[str, Any] = answer
        return found

    def flower(self) -> str:
        """The URL of Flower."""
        port = free_port()
        command = [*CELERY, "flower", f"--port={port}", "--address=127.0.0.1"]
        self._others.append(
            Process(command, self.folder, "flower", {**self.environ, "FLOWER_UNAUTHENTICATED_API": "true"})
        )
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        for process in (*self.workers, *self._others, self.api.process):
            process.kill()
        self.broker.close()
        self.store.close()


@contextmanager
def celery(folder: Path, workers: int, **environ: str) -> Iterator[Celery]:
    made = Celery(folder, **environ)
    try:
        made.start_workers(workers)
        yield made
    finally:
        made.close()
