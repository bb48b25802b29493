"""Helpers for the tests of clusters: nodes as processes. The site identifies each node by its name."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from shoal.item import decode_item
from shoal.ports import ClusterEvent, ClusterView, Coordinator
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import roles
from tests.acceptance.faults import picture
from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.forked_workers import ForkedFleet, ForkedWorker
from tests.acceptance.target import Target, Visit
from tests.support.databases import ZookeeperServer, shared

COORDINATORS = ("zookeeper", "redis", "postgresql")
FRONTIER_OF = {"zookeeper": "redis", "redis": "redis", "postgresql": "postgresql"}
SESSION = 3.0  # on a busy machine, a node may be delayed by a second or two

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 4,
                "concurrency_per_host": 50, "lease.batch": 4}

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")
"""


def coordinator_url(kind: str, server: object = None) -> str:
    """The URL of a coordinator that only one test uses, by default on the shared server."""
    if kind == "zookeeper":
        assert server is None or isinstance(server, ZookeeperServer)
        return f"{(server or shared(ZookeeperServer)).url}/t{secrets.token_hex(6)}"
    return frontier_url(kind, server)  # type: ignore[arg-type]


class _Observer:
    """Looks at a cluster again and again with one connection, and with another one after an error: to connect costs
    more than to look."""

    def __init__(self, coordinator: str, cluster: str) -> None:
        self._runner = asyncio.Runner()
        self._address = coordinator, cluster
        self._opened: Coordinator | None = None

    def observe(self) -> ClusterView:
        return self._runner.run(self._observe())

    async def _observe(self) -> ClusterView:
        try:
            if self._opened is None:
                self._opened = await open_coordinator(*self._address, ttl=SESSION)
            return await self._opened.observe()
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):
                await opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.close()


class Cluster(ForkedFleet):
    """One run, one coordinator, and the nodes of one cluster."""

    def __init__(self, folder: Path, frontier: str, coordinator: str, spider: str = SPIDER) -> None:
        super().__init__(folder, frontier, spider)
        self.coordinator = coordinator
        self.nodes: dict[str, ForkedWorker] = {}

    def node(
        self,
        name: str,
        *arguments: str,
        runner: int = 3,
        backup: int = 2,
        session: float = SESSION,
        coordinator: str | None = None,
        frontier: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> ForkedWorker:
        """Start a node, or start a dead node again."""
        options = {"user_agent": name, **(settings or {})}
        words = [
            *self._words(name, runner, backup, session), "--coordinator", coordinator or self.coordinator,
            *([] if frontier is None else ["--frontier", frontier]),
            *(f"--set={key}={value}" for key, value in options.items()), *arguments,
        ]  # fmt: skip
        log = self.folder / f"{name}-{len(self.workers)}.log"
        made = ForkedWorker(self, log, words, None, command="node")
        self.workers.append(made)
        self.nodes[name] = made
        return made

    def _words(self, name: str, runner: int, backup: int, session: float) -> list[str]:
        counts = ["--runner", str(runner), "--backup", str(backup)]
        return ["--name", name, *counts, "--session-timeout", str(session)]

    def node_of_its_own(
        self, name: str, runner: int, backup: int, session: float, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a node with other environment variables."""
        words = [*self._words(name, runner, backup, session), "--coordinator", self.coordinator]
        command = [*SHOAL, "node", self.name, "--run-id", self.run_id, "--frontier", self.frontier, *words]
        with (self.folder / f"worker-{len(self.processes)}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, f"--set=user_agent={name}"], cwd=self.folder, stdout=log, stderr=log, text=True,
                env={**os.environ, **env},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def five(self, **options: object) -> None:
        """Start crawler_1 to crawler_5."""
        for number in range(1, 6):
            self.node(f"crawler_{number}", **options)  # type: ignore[arg-type]

    # -- inspecting

    def view(self) -> ClusterView:
        return self._observe()[0]

    def events(self) -> list[ClusterEvent]:
        return self._observe()[1]

    def _observe(self) -> tuple[ClusterView, list[ClusterEvent]]:
        async def observe() -> tuple[ClusterView, list[ClusterEvent]]:
            opened = await open_coordinator(self.coordinator, self.run_id, ttl=SESSION)
            try:
                return await opened.observe(), await opened.events(1000)
            finally:
                await opened.close()

        return asyncio.run(observe())

    def role_counts(self) -> dict[str, int]:
        return dict(Counter(roles(self.view()).values()))

    def with_role(self, role: str) -> list[str]:
        """The names of the nodes with this role, in the order of their slots."""
        shown = self.view()
        if role == "Runner":
            return [slot.holder for slot in shown.slots if slot.holder]
        return [name for name, found in roles(shown).items() if found == role]

    def until(self, holds: Callable[[ClusterView], bool], timeout: float = 60.0) -> float:
        """Wait until the condition is true, and return the seconds that it took."""
        began = time.monotonic()
        shown: object = None
        with _Observer(self.coordinator, self.run_id) as observer:
            while time.monotonic() - began < timeout:
                try:
                    shown = observer.observe()
                    if holds(shown):
                        return time.monotonic() - began
                except Exception as exc:  # no node has joined yet, or the server is still away
                    shown = exc
                time.sleep(0.1)
        logs = "\n".join(f"--- {worker.log.name}\n{worker.log.read_text()[-1500:]}" for worker in self.workers)
        raise AssertionError(f"after {timeout:g} s the cluster is {shown}\n{logs}")

    def until_complete(self, runner: int = 3, backup: int = 2, timeout: float = 60.0, *, spares: int = 0) -> float:
        counts = (("Runner", runner), ("Backup Runner", backup), ("Spare", spares))
        wanted = {role: count for role, count in counts if count}
        return self.until(lambda shown: dict(Counter(roles(shown).values())) == wanted, timeout)


def urls(site: Target, count: int, wait: float = 0.0) -> list[str]:
    return [f"{site.url}/{number}?wait={wait}" for number in range(count)]


def check_items(cluster: Cluster, expected: list[str]) -> None:
    """Check that each page has its item exactly once, and that the counters balance."""
    shown = picture(cluster.frontier, cluster.run_id)
    assert shown.in_order
    assert shown.stats.done == len(expected)
    assert (shown.stats.dead, shown.stats.remaining) == (0, 0)
    assert sorted(decode_item(item.payload)[1]["url"] for item in shown.items) == sorted(expected)


def times_asked(site: Target) -> Counter[int]:
    """The number of pages by how often they were requested."""
    return Counter(Counter(visit.path for visit in site.visits()).values())


def most_crawlers(visits: list[Visit], window: float = 0.0) -> int:
    """The largest number of nodes that had a request in flight within the same window of time."""
    moments = []
    for visit in visits:
        end = visit.start if visit.end is None else visit.end
        moments += [(visit.start - window / 2, 1, visit.agent), (end + window / 2, -1, visit.agent)]
    now: Counter[str] = Counter()
    most = 0
    for _, change, agent in sorted(moments, key=lambda moment: moment[:2]):
        now[agent] += change
        most = max(most, sum(count > 0 for count in now.values()))
    return most
