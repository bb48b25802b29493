"""A fleet that crawls a site while its world fails, and the judges of what came out."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any

from msgspec import Struct

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.http import Request, Response
from shoal.ports import Stats
from shoal.runs.start import start_run
from shoal.runs.worker import Worker
from shoal.spider import Spider
from shoal.testing.simulation.loop import Process
from shoal.testing.simulation.store import open_store
from shoal.testing.simulation.world import SCHEME, World
from shoal.urls.normalize import host_of

RUN = "run"
_SESSION = 6.0
_LEASE = 20.0
_PATIENCE = 900.0
"""Seconds in which a run must end when nothing fails any more."""
_RESTART = 3.0
_SLACK = 1e-3


class SiteSpider(Spider):
    """Follows all links, and yields one item for each page."""

    name = "simulated"

    def start(self) -> Iterator[Request]:
        yield Request(self.first_url)

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        yield from response.follow_all("a")

    first_url = ""


class CrawlPlan(Struct, frozen=True):
    """What happens in a simulated crawl."""

    pages: int
    hosts: int
    workers: int
    delay: float
    seconds: float
    """How long the world fails."""
    faults: frozenset[str]
    outputs: tuple[str, ...]
    needs_session: bool

    @classmethod
    def draw(cls, world: World) -> CrawlPlan:
        """A plan that the seed decides."""
        random = world.random
        faults = ["loss", "lateness", "kill", "freeze", "away", "rewind", "disk-full", "disk-late", "clock", "site"]
        faults += ["output-back"]
        needs_session = random.random() < 0.2
        return cls(
            pages=random.choice([10, 30, 80]),
            hosts=1 if needs_session else random.choice([1, 3, 8]),
            workers=random.choice([1, 2, 3, 5]),
            delay=random.choice([0.0, 0.0, 0.5, 2.0]),
            seconds=random.choice([20.0, 60.0, 150.0]),
            faults=frozenset(random.sample(faults, random.randrange(len(faults) + 1))),
            outputs=tuple(random.sample(["items.jsonl", "items.db", "database"], random.randint(1, 2))),
            needs_session=needs_session,
        )


class Crawl:
    """One crawl in a world. `run` it, then `judge`."""

    def __init__(self, world: World, plan: CrawlPlan) -> None:
        self.world = world
        self.plan = plan
        world.site.build(plan.pages, plan.hosts)
        world.site.needs_session = plan.needs_session
        outputs = {
            "items.jsonl": f"{world.folder}/items.jsonl",
            "items.db": f"sqlite:///{world.folder}/items.db",
            "database": f"{SCHEME}://database",
        }
        self._outputs = [outputs[name] for name in plan.outputs]
        self._config = Config().with_settings(
            {
                "frontier": f"{SCHEME}:store",
                "http.client": SCHEME,
                "download_delay": plan.delay,
                "concurrency_per_host": 2,
                "concurrency": 4,
                "lease.ttl": _LEASE,
                "lease.batch": 5,
                "worker.session": _SESSION,
                "robots.obey": False,
                "retry.max_attempts": 1000,
                "items.patience": 3600.0,
            }
        )
        self._number = 0
        self._is_calm = False
        """Whether nothing fails any more."""
        self.trace: list[str] = []
        """What the world did."""

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.world.loop.time() - 1000:8.3f} {text}")

    def _spider(self) -> Spider:
        spider = SiteSpider()
        spider.first_url = self.world.site.start
        return spider

    # -- processes

    async def _start(self) -> None:
        store = open_store(self.world)
        await start_run(store, self._spider(), self._config, run_id=RUN)

    async def _work(self) -> None:
        worker = Worker(self._spider(), self._config, RUN, outputs=self._outputs)
        summary = await worker.run()
        self._note(f"{self.world.current.name} ended: {summary.state} {summary.error}")

    async def _supervise(self, role: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one process after another, until the run has ended and nothing fails any more."""
        while not (self._is_calm and self._has_ended()):
            self._number += 1
            process = self.world.process(f"{role}{self._number}")
            task = process.start(work())
            while not task.done() and process.is_alive:
                await asyncio.sleep(0.25)
            if task.done():
                process.kill()
                error = task.exception()
                if error is None and work == self._start:
                    return
                if error is not None:
                    self._note(f"{process.name} failed: {error!r}")
                    if not isinstance(error, ShoalError):
                        raise error
            await asyncio.sleep(_RESTART)

    def _run_state(self) -> str:
        run = self.world.server.store._runs.get(RUN)
        return "" if run is None else run.state

    def _has_ended(self) -> bool:
        return self._run_state() == "finished"

    # -- the world fails

    async def _fail(self) -> None:
        world, plan, random = self.world, self.plan, self.world.random
        world.network.loss = 0.03 if "loss" in plan.faults else 0.0
        world.network.lateness = 0.02 if "lateness" in plan.faults else 0.0
        world.disk.lateness = 0.05 if "disk-late" in plan.faults else 0.0
        world.site.failure_rate = 0.1 if "site" in plan.faults else 0.0
        events = {
            "kill": self._kill,
            "freeze": self._freeze,
            "away": self._go_away,
            "rewind": self._rewind,
            "disk-full": self._fill_disk,
            "clock": self._step_clock,
            "output-back": self._set_output_back,
        }
        chosen = [event for name, event in events.items() if name in plan.faults]
        end = world.loop.time() + plan.seconds
        while world.loop.time() < end:
            await asyncio.sleep(random.expovariate(1 / 4))
            if chosen:
                await random.choice(chosen)()
        world.network.loss = world.network.lateness = world.disk.lateness = world.site.failure_rate = 0.0
        world.disk.is_full = world.server.is_away = False
        for process in world.processes:
            process.thaw()
        self._is_calm = True
        self._note("nothing fails any more")

    def _victim(self) -> Process | None:
        alive = [process for process in self.world.processes if process.is_alive]
        return self.world.random.choice(alive) if alive else None

    async def _kill(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._note(f"kill {victim.name}")
            victim.kill()

    async def _freeze(self) -> None:
        victim = self._victim()
        if victim is not None:
            seconds = self.world.random.choice([0.5, 5.0, 8.0, 30.0])
            self._note(f"freeze {victim.name} for {seconds} s")
            victim.freeze()
            self.world.loop.call_later(seconds, victim.thaw)

    async def _go_away(self) -> None:
        server, seconds = self.world.server, self.world.random.choice([0.5, 4.0, 15.0])
        self._note(f"the server is away for {seconds} s")
        server.is_away = True
        await asyncio.sleep(seconds)
        server.is_away = False

    async def _rewind(self) -> None:
        if self.world.server.restore():
            self._note("the store goes back")
        elif self._run_state():
            self._note("backup of the store")
            self.world.server.back_up()

    async def _fill_disk(self) -> None:
        self._note("the disk is full")
        self.world.disk.is_full = True
        await asyncio.sleep(self.world.random.choice([0.5, 5.0, 20.0]))
        self.world.disk.is_full = False
        self._note("the disk has room")

    async def _step_clock(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.wall_offset += self.world.random.choice([-3600.0, -5.0, 5.0, 3600.0, 1e6])
            self._note(f"clock of {victim.name}: {victim.wall_offset:+.0f} s")

    async def _set_output_back(self) -> None:
        if self.world.database.restore():
            self._note("the database goes back")
        else:
            self._note("backup of the database")
            self.world.database.back_up()

    # -- the crawl

    async def run(self) -> None:
        """Crawl. AssertionError if the run does not end."""
        loop = self.world.loop
        everybody = [loop.create_task(self._supervise("start", self._start))]
        everybody += [
            loop.create_task(self._supervise(f"worker{number}.", self._work)) for number in range(self.plan.workers)
        ]
        try:
            await self._fail()
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*everybody)
        except TimeoutError:
            stats = await self.stats()
            raise AssertionError(f"the run did not end: it is {self._run_state() or 'absent'}, {stats}") from None

    async def stats(self) -> Stats:
        """The ledger, counted where the data is."""
        frontier = await self.world.server.store.frontier(RUN)
        return await frontier.audit()

    # -- the judges

    async def judge(self) -> None:
        """AssertionError if a law is broken."""
        assert not self.world.errors, self.world.errors[0]
        stats = await self.stats()
        assert stats.balanced, f"the ledger is not balanced: {stats}"
        assert self._has_ended(), f"the run is {self._run_state()}"
        assert stats.remaining == 0, f"finished, and {stats.remaining} requests remain"
        site = self.world.site
        assert stats.dead == 0, f"{stats.dead} pages failed, but each of them could be fetched"
        fetched = {visit.url for visit in site.visits if visit.status == 200}
        assert fetched == set(site.links), f"not fetched: {sorted(set(site.links) - fetched)[:3]}"
        assert stats.done == len(site.links), f"{stats.done} pages are done, the site has {len(site.links)}"
        for name in self.plan.outputs:
            self._judge_rows(name, self._rows(name))
        self._judge_delays()
        if self.plan.needs_session:
            self._judge_session()

    def _rows(self, name: str) -> list[str]:
        path = self.world.folder / name
        if name.endswith(".jsonl"):
            return [json.loads(line)["url"] for line in path.read_text().splitlines()]
        with sqlite3.connect(path) as db:
            return [url for (url,) in db.execute("SELECT url FROM item")]

    def _judge_rows(self, name: str, rows: list[str]) -> None:
        counts = Counter(rows)
        missing = sorted(set(self.world.site.links) - set(counts))
        twice = [url for url, count in counts.items() if count > 1]
        assert not missing, f"{name}: {len(missing)} items are missing, such as {missing[0]}"
        assert not twice, f"{name}: {len(twice)} items are there twice, such as {twice[0]}"

    def _judge_delays(self) -> None:
        """Between the end of one request and the beginning of the next one of its host is the delay. A store that went
        back does not know the last requests."""
        delay, rewinds = self.plan.delay, self.world.server.restored_at
        if not delay:
            return
        for host in {host_of(url) for url in self.world.site.links}:
            visits = sorted(self.world.site.visits_of(host), key=lambda visit: visit.start)
            for visit, following in pairwise(visits):
                gap = following.start - visit.end
                is_known = not any(visit.start <= at <= following.start for at in rewinds)
                assert gap >= delay - _SLACK or not is_known, f"{gap:.3f} s between {visit} and {following}"

    def _judge_session(self) -> None:
        lost = [visit for visit in self.world.site.visits if visit.status == 403]
        assert not lost, f"requested without the cookie of the run: {lost[0]}"


async def crawl(world: World) -> None:
    """Simulate one crawl, and judge it."""
    crawl = Crawl(world, CrawlPlan.draw(world))
    try:
        await crawl.run()
        await crawl.judge()
    except BaseException as exc:
        exc.add_note("\n".join([repr(crawl.plan), *crawl.trace[-40:]]))
        raise
