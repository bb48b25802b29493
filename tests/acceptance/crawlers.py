"""Helpers for the tests of `ZookeeperCrawler`: programs that create one, and run it when they are asked to."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("tests.acceptance.crawlers", "shoal.runs.worker", "shoal.runs.orchestrator", "shoal.fetch.http_fetcher"),
        *(
            "shoal.fetch.sessions.session",
            "shoal.fetch.layers.robots",
            "shoal.fetch.layers.throttle",
            "shoal.sinks.files",
        ),
        *("shoal.frontier.redis", "shoal.frontier.postgres", "shoal.runs.cluster.node", "shoal.runs.cluster.zookeeper"),
    ]
)


class CrawlerProgram:
    """A process with one crawler. Between the commands its main thread is blocked."""

    def __init__(self, folder: Path, options: Mapping[str, Any], number: int) -> None:
        self._pipe, other = _context.Pipe()
        self.log = folder / f"program-{number}.log"
        self._process = _context.Process(target=_serve, args=(str(folder), str(self.log), dict(options), other))
        self._process.start()
        other.close()

    def state(self) -> tuple[str, str | None]:
        """Its name and role."""
        return self._ask("state")  # type: ignore[return-value]

    @property
    def name(self) -> str:
        return self.state()[0]

    @property
    def role(self) -> str | None:
        return self.state()[1]

    def run(self, urls: Sequence[str], **settings: object) -> None:
        """Let it run, and do not wait for the end."""
        self._pipe.send(("run", tuple(urls), settings))

    def _ask(self, *words: object) -> object:
        self._pipe.send(words)
        assert self._pipe.poll(60.0), f"no answer\n{self.log.read_text()[-3000:]}"
        return self._pipe.recv()

    def result(self) -> object:
        """The state of the run at the end of ``run``."""
        assert self._pipe.poll(120.0), f"it still runs\n{self.log.read_text()[-3000:]}"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class CrawlerPrograms(list[CrawlerProgram]):
    """Programs that are killed at the end of a test."""

    def __init__(self, folder: Path, zk_hosts: str, **options: Any) -> None:
        super().__init__()
        self._folder = folder
        self._options = {"zk_hosts": zk_hosts, **options}

    def start(self, **options: Any) -> CrawlerProgram:
        made = CrawlerProgram(self._folder, {**self._options, **options}, len(self))
        self.append(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self:
            program.kill()


def _serve(folder: str, log: str, options: dict[str, Any], pipe: Connection) -> None:
    """The program in its process."""
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    from shoal import Spider, ZookeeperCrawler

    crawler = ZookeeperCrawler(**options)

    class Pages(Spider):
        name = "pages"
        settings = {
            "download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 4,
            "concurrency_per_host": 50, "lease.batch": 4,
        }  # fmt: skip

        def parse(self, response):  # type: ignore[no-untyped-def]
            yield {"url": response.url}

    while True:
        match pipe.recv():
            case ("state",):
                pipe.send((crawler.name, crawler.role))
            case ("run", urls, settings):
                Pages.start_urls = urls
                Pages.settings = {**Pages.settings, "user_agent": crawler.name, **settings}
                pipe.send(crawler.run(Pages).state)
