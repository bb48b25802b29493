"""Helpers for the tests of fleets: a new frontier on a real server, workers as processes, and a site."""

from __future__ import annotations

import io
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from tests.support import forking
from tests.support.databases import PostgresServer, RedisServer, shared
from tests.support.forking import SHOAL

KINDS = ("redis", "postgresql")

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8}

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""


def frontier_url(kind: str, server: RedisServer | PostgresServer | None = None) -> str:
    """The URL of an empty frontier on a server, by default on the shared server."""
    name = "t" + secrets.token_hex(6)
    if kind == "redis":
        return f"{(server or shared(RedisServer)).url}?prefix={name}"
    return f"{(server or shared(PostgresServer)).url}?schema={name}"


@contextmanager
def serving(module: str, **options: object) -> Iterator[str]:
    """Run a module that prints the URL of its server, in its own process, and yield the URL."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with forking.Popen([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def site(pages: int, *, latency: float = 0.0) -> AbstractContextManager[str]:
    """Run a site in its own process, and yield its URL."""
    return serving("tests.support.servers", pages=pages, latency=latency)


def visits(url: str) -> list[tuple[str, str, float, float]]:
    """The requests that the site received: host, path, start and end of each, by the clock of the site."""
    with urllib.request.urlopen(f"{url}/-/log") as answer:
        return [tuple(visit) for visit in json.load(answer)]


class Fleet:
    """One run of one spider file in a folder, and the processes that work on it."""

    def __init__(self, folder: Path, frontier: str, spider: str = SPIDER, *, name: str = "spider.py") -> None:
        self.folder = folder
        self.frontier = frontier
        self.name = name
        self.run_id = ""
        self.processes: list[subprocess.Popen[str]] = []
        (folder / name).write_text(spider)

    def shoal(self, *arguments: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on this frontier until it ends."""
        done = forking.run(
            [*SHOAL, *arguments, "--frontier", self.frontier],
            cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done

    def start(self, *urls: str, settings: dict[str, Any] | None = None, arguments: tuple[str, ...] = ()) -> str:
        """Start a run with these URLs, and return its run_id."""
        (self.folder / "urls.txt").write_text("\n".join(urls))
        options = [f"--set={key}={value}" for key, value in (settings or {}).items()]
        done = self.shoal("start", self.name, "--urls-file", "urls.txt", "--new-run", *options, *arguments)
        self.run_id = json.loads(done.stdout)["run_id"]
        return self.run_id

    def worker(
        self, *arguments: str, settings: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start one more worker process. Its standard error goes to ``worker-N.log``."""
        options = [f"--set={key}={value}" for key, value in (settings or {}).items()]
        command = [*SHOAL, "worker", self.name, "--run-id", self.run_id, "--frontier", self.frontier]
        start = subprocess.Popen if "LD_PRELOAD" in (env or {}) else forking.Popen  # the linker reads it at the start
        with (self.folder / f"worker-{len(self.processes)}.log").open("w") as log:
            process = start(
                [*command, *options, *arguments], cwd=self.folder, stdout=log, stderr=log, text=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.shoal("stats", self.run_id, "--json").stdout)
        return found

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until every worker has ended with exit code 0, except those that were killed."""
        until = time.monotonic() + timeout
        for number, process in enumerate(self.processes):
            code = process.wait(max(0.1, until - time.monotonic()))
            log = (self.folder / f"worker-{number}.log").read_text()
            assert code in (0, -9), f"worker {number} ended with {code}:\n{log[-3000:]}"

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class InProcessFleet(Fleet):
    """A fleet whose commands run in this process, which saves almost a second for each. Workers are still processes.
    Other tests run the commands as processes."""

    def shoal(self, *arguments: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        assert "--processes" not in arguments, "it would fork the process of the tests"
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["shoal", *arguments, "--frontier", self.frontier])
            patch.setattr(sys, "path", [*sys.path])
            patch.chdir(self.folder)
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
        assert not check or code == 0, f"{arguments}: {out.getvalue()}\n{err.getvalue()}"
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
