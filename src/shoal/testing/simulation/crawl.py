"""A fleet that crawls a site while its world fails, and the judges of what came out."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.outcome import BROKEN_LINK
from shoal.crawling.stats import Summary
from shoal.http import Request, Response
from shoal.http.login import LoggedOut, Login
from shoal.ports import Frontier
from shoal.runs.run_end import read_outcome
from shoal.runs.start import start_run
from shoal.runs.worker import Worker
from shoal.spider import Spider
from shoal.testing.simulation.faults import FAULTS, RATES, Faults
from shoal.testing.simulation.processes import Supervisor
from shoal.testing.simulation.site import Session, Visit
from shoal.testing.simulation.store import open_store
from shoal.testing.simulation.world import SCHEME, World
from shoal.urls.normalize import host_of

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
RUN = "run"
_SESSION = 6.0
_LEASE = 20.0
_PATIENCE = 900.0
"""Seconds in which a run must end when nothing fails any more."""
SLACK = 1e-3
_LONGEST_GAP = 12.0
"""Seconds, besides the delay, within which something must happen at the site while nothing fails."""


class SiteSpider(Spider):
    """Follows all links, and yields one item for each page."""

    name = "simulated"

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self._urls = urls

    def start(self) -> Iterator[Request]:
        yield from map(Request, self._urls)

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        yield from response.follow_all("a")


class AccountSpider(SiteSpider):
    """Logs in first."""

    name = "simulated-account"
    logged_out = LoggedOut(statuses=[403])
    login_url = ""

    async def log_in(self, login: Login) -> None:
        """See `Spider.log_in`."""
        if (await login.fetch(self.login_url)).status != 200:
            login.fail("the site does not answer")


class CrawlPlan(Struct, frozen=True):
    """What happens in a simulated crawl."""

    pages: int
    redirects: int
    missing: int
    seeds: int
    hosts: int
    workers: int
    delay: float
    crawl_delay: float
    """What robots.txt asks for. 0: nobody reads it."""
    session: Session
    keeps_items: bool
    outputs: tuple[str, ...]
    seconds: float
    """How long the world fails."""
    faults: tuple[str, ...]

    @classmethod
    def draw(cls, world: World, faults: Sequence[str] = FAULTS) -> CrawlPlan:
        """A plan that the seed decides. ``faults``: those that may happen."""
        random = world.random
        session = cast("Session", random.choice(["none", "none", "none", "cookie", "login"]))
        pages = random.choice([10, 30, 80])
        return cls(
            pages=pages,
            redirects=random.choice([0, 0, 3]),
            missing=random.choice([0, 0, 3]),
            seeds=1 if session == "cookie" else random.choice([1, 1, 5]),
            hosts=random.choice([1, 3, 8]) if session == "none" else 1,
            workers=random.choice([1, 2, 3, 5]),
            delay=random.choice([0.0, 0.0, 0.5, 2.0]),
            crawl_delay=random.choice([0.0, 0.0, 1.0]),
            session=session,
            keeps_items=random.random() < 0.7,
            outputs=tuple(random.sample(["items.jsonl", "items.db", "database"], random.randint(1, 2))),
            seconds=random.choice([20.0, 60.0, 150.0]),
            faults=tuple(random.sample(faults, random.choice([0, 1, 2, 4, len(faults) - 2]))),
        )


class Crawl:
    """One crawl in a world. `run` it, then `judge`."""

    def __init__(self, world: World, plan: CrawlPlan) -> None:
        self.world = world
        self.plan = plan
        world.site.build(plan.pages, plan.hosts, plan.redirects, plan.missing)
        world.site.session, world.site.crawl_delay = plan.session, plan.crawl_delay
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
                "robots.obey": plan.crawl_delay > 0,
                "retry.max_attempts": 1000,
                "items.patience": 3600.0,
                "items.keep": plan.keeps_items,
                "login.attempts": 1000,
            }
        )
        self._supervisor = Supervisor(world)
        self._refusal = ""
        """Why an output cannot be continued. It was set back, and the log no longer has what it lacks."""
        self.faults = self._make_faults()

    def _make_faults(self) -> Faults:
        return Faults(self.world, self.plan.faults, self.world.folder / "items.jsonl", self._note)

    def _note(self, text: str) -> None:
        self.world.note(text)

    def _spider(self) -> Spider:
        urls = list(self.world.site.pages)[: self.plan.seeds]
        if self.plan.session != "login":
            return SiteSpider(urls)
        spider = AccountSpider(urls)
        spider.login_url = self.world.site.login_url
        return spider

    # -- processes

    async def _start(self) -> None:
        store = open_store(self.world)
        await start_run(store, self._spider(), self._config, run_id=RUN)

    async def _work(self) -> None:
        worker = Worker(self._spider(), self._config, RUN, outputs=self._outputs)
        self._note_end(await worker.run())

    def _note_end(self, summary: Summary) -> None:
        self._note(f"{self.world.current.name} ended: {summary.state} {summary.error}")
        if "output-back" in self.plan.faults and not self.plan.keeps_items and "was set back" in summary.error:
            self._refusal = summary.error

    async def _is_over(self, began_calmly: bool) -> bool:
        return began_calmly and bool(self._refusal or await self._has_ended())

    async def _run_state(self) -> str:
        run = await self.world.server.run_of(RUN)
        return "" if run is None else run.state

    async def _has_ended(self) -> bool:
        return await self._run_state() == "finished"

    def _roles(self) -> dict[str, Work]:
        """What processes of the crawl do, by the beginnings of their names."""
        return {f"worker{number}.": self._work for number in range(self.plan.workers)}

    async def run(self) -> None:
        """Crawl. AssertionError if the run does not end."""
        loop = self.world.loop
        keep = self._supervisor.keep
        everybody = [loop.create_task(keep("start", self._start, self._is_over, once=True))]
        everybody += [loop.create_task(keep(role, work, self._is_over)) for role, work in self._roles().items()]
        await self.faults.run(self.plan.seconds)
        self._supervisor.is_calm = True
        try:
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*everybody)
        except TimeoutError:
            stats = await (await self._frontier()).audit()
            raise AssertionError(f"the run did not end: it is {await self._run_state() or 'absent'}, {stats}") from None

    async def _frontier(self) -> Frontier:
        """The frontier where the data is."""
        return await (await self.world.server.store()).frontier(RUN)

    # -- the judges

    async def judge(self) -> None:
        """AssertionError if a law is broken."""
        assert not self.world.errors, self.world.errors[0]
        if self._refusal:
            return
        await self._judge_ledger()
        site = self.world.site
        fetched = {visit.url for visit in site.visits if visit.status == 200}
        missing = set(site.pages) - fetched
        assert not missing, f"not fetched: {sorted(missing)[:3]}"
        for name in self.plan.outputs:
            self._judge_rows(name, self._rows(name))
        self._judge_delays()
        self._judge_session()
        if not self.plan.faults:
            self._judge_gaps()

    async def _judge_ledger(self) -> None:
        """Laws 1, 9 and 16."""
        frontier, site = await self._frontier(), self.world.site
        stats = await frontier.audit()
        assert stats.balanced, f"the ledger is not balanced: {stats}"
        run = await self.world.server.run_of(RUN)
        assert run is not None
        assert run.state == "finished", f"the run is {run.state}"
        assert stats.remaining == 0, f"finished, and {stats.remaining} requests remain"
        kinds = await frontier.dead_kinds()
        expected = {BROKEN_LINK: len(site.missing)} if site.missing else {}
        assert kinds == expected, f"failed pages: {kinds}, the site has broken links: {expected}"
        done = len(site.pages) + len(site.redirects)
        assert stats.done == done, f"{stats.done} requests are done, the site has {done} pages and redirects"
        assert stats.items == len(site.pages), f"{stats.items} items, the site has {len(site.pages)} pages"
        outcome = await read_outcome(await self.world.server.store(), run, frontier)
        assert outcome is not None
        assert outcome.verdict == "good", f"the outcome is {outcome}"

    def _rows(self, name: str) -> list[str]:
        path = self.world.folder / name
        if name.endswith(".jsonl"):
            return [json.loads(line)["url"] for line in path.read_text().splitlines()]
        with sqlite3.connect(path) as db:
            return [url for (url,) in db.execute("SELECT url FROM item")]

    def _judge_rows(self, name: str, rows: list[str]) -> None:
        """Each item is in the output exactly once: laws 4 and 15."""
        counts = Counter(rows)
        missing = sorted(set(self.world.site.pages) - set(counts))
        repeated = [url for url, count in counts.items() if count > 1]
        assert not missing, f"{name}: {len(missing)} items are missing, such as {missing[0]}"
        assert not repeated, f"{name}: {len(repeated)} items are there twice, such as {repeated[0]}"

    def _judge_delays(self) -> None:
        """Between the end of one request and the beginning of the next one of its host is the delay (law 7). The first
        process does not know robots.txt yet."""
        delay = self.plan.delay
        if not delay:
            return
        for host in {host_of(url) for url in self.world.site.pages}:
            visits = sorted(self.world.site.visits_of(host), key=lambda visit: visit.start)
            for visit, following in pairwise(visits):
                gap = following.start - visit.end
                is_known = self._knows(visit, following)
                assert gap >= delay - SLACK or not is_known, f"{gap:.3f} s between {visit} and {following}"

    def _knows(self, visit: Visit, following: Visit) -> bool:
        """Whether the store knew the end of a visit. One that went back does not, and a process that was frozen ends no
        request."""
        restored = any(visit.start <= at <= following.start for at in self.world.server.restored_at)
        return not restored and not visit.process.is_frozen and visit.process.thawed_at < visit.start

    def _judge_session(self) -> None:
        """A session belongs to the run: law 17."""
        site, plan = self.world.site, self.plan
        if plan.session == "cookie":
            lost = [visit for visit in site.visits if visit.status == 403]
            assert not lost, f"requested without the cookie of the run: {lost[0]}"
        if plan.session == "login":
            most = 1 + self.faults.logouts + 2 * self.faults.count
            if set(plan.faults) <= {"logout"}:
                most = 1 + self.faults.logouts
            assert site.logins <= most or set(plan.faults) & set(RATES), (
                f"{site.logins} logins, at most {most} were needed"
            )

    def _judge_gaps(self) -> None:
        """Nobody sleeps while there is work."""
        moments = sorted(moment for visit in self.world.site.visits for moment in (visit.start, visit.end))
        longest = _LONGEST_GAP + self.plan.delay + self.plan.crawl_delay
        for before, after in pairwise(moments):
            assert after - before <= longest, f"nothing happened from {before:.3f} to {after:.3f}"


async def crawl(world: World) -> None:
    """Simulate one crawl, and judge it."""
    plan = CrawlPlan.draw(world)
    world.note(repr(plan))
    crawl = Crawl(world, plan)
    await crawl.run()
    await crawl.judge()
