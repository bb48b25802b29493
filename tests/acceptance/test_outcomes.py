"""The outcome of a run, as its users see it: summary, exit code, `shoal runs`, `audit`. The site is the judge."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal import Spider, crawl
from shoal.crawling.outcome import Outcome
from shoal.frontier import open_store
from shoal.http import Response
from shoal.ports import Run
from shoal.runs.run_end import forget_outcome, read_outcome, store_outcome
from tests.support import forking
from tests.support.databases import RedisServer, shared
from tests.support.forking import SHOAL
from tests.support.servers import SiteServer

SPIDER = """
from shoal import Spider

class Shop(Spider):
    name = "shop"
    settings = {"download_delay": 0, "throttle.enabled": False, "retry": {"max_attempts": 1}}
    bad = "36"

    def parse(self, response):
        yield response.follow_all("a")
        number = response.url.rpartition("/p/")[2]
        if number.isdigit() and int(number) < int(self.bad):
            return self.parse_price(response)
        yield {"url": response.url}

    def parse_price(self, response):
        raise ValueError("no price on %s" % response.url)
"""
FAILED = r"41 pages accounted for: 5 done, 36 failed \(ValueError in parse: 36\)"


async def shoal(folder: Path, *words: str) -> tuple[int, str]:
    done = await asyncio.to_thread(forking.run, [*SHOAL, *words], cwd=folder, capture_output=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = SPIDER.replace("return self.parse_price(response)", "self.parse_price(response)")
    (tmp_path / "shop.py").write_text(source)
    return tmp_path


async def test_a_run_with_many_failed_callbacks_is_failed_everywhere(folder: Path) -> None:
    store = ("--frontier", "sqlite:///q.db")
    async with SiteServer(pages=40, links=40) as site:
        words = ["run", "shop.py", "-a", f"start_urls={site.url}", "-o", "shop.jsonl", *store]
        code, text = await shoal(folder, *words)
    assert sum(site.hits[path] for path in site.paths) == 41
    assert code == 5, text
    assert re.search(f"shop: finished, failed: {FAILED}", text), text
    assert re.search(r"36 of 41 pages failed .*; the limit is 10 % \(outcome.max_failed\)", text), text
    assert "every page found is accounted for" not in text
    code, text = await shoal(folder, "runs", *store)
    assert re.search(r"shop +finished +failed ", text), text
    code, text = await shoal(folder, "audit", *store, "-o", "shop.jsonl")
    assert code == 5, text
    assert re.search(f"outcome failed: {FAILED}", text), text


@pytest.mark.parametrize(("bad", "code", "verdict"), [("0", 0, "good"), ("1", 0, "degraded"), ("3", 0, "degraded")])
async def test_a_few_failures_degrade_a_run(folder: Path, bad: str, code: int, verdict: str) -> None:
    store = ("--frontier", "sqlite:///q.db")
    async with SiteServer(pages=40, links=40) as site:
        words = ("run", "shop.py", "-a", f"start_urls={site.url}", "-a", f"bad={bad}", *store)
        ended, text = await shoal(folder, *words)
    assert ended == code
    assert ("every page found is accounted for" in text) == (verdict == "good"), text
    assert re.search(rf"shop +finished +{verdict} ", (await shoal(folder, "runs", *store))[1])


@pytest.mark.parametrize(("above", "code"), [("5%", 5), ("0.05", 5), ("10%", 0), ("0", 5), ("100%", 0)])
async def test_the_limit_is_an_option(folder: Path, above: str, code: int) -> None:
    async with SiteServer(pages=40, links=40) as site:
        words = ("run", "shop.py", "-a", f"start_urls={site.url}", "-a", "bad=3", "--fail-above", above)
        assert (await shoal(folder, *words))[0] == code


async def test_a_wrong_limit_is_refused(folder: Path) -> None:
    for text in ("10", "-1%", "many"):
        code, message = await shoal(folder, "run", "shop.py", "--fail-above", text)
        assert code == 2
        assert f"--fail-above must be a share such as 10% or 0.1, not '{text}'" in message


async def test_workers_of_a_failed_run_exit_with_0(folder: Path) -> None:
    """A supervisor would start them again otherwise."""
    store = ("--frontier", f"{shared(RedisServer).url}?prefix=outcomes")
    async with SiteServer(pages=40, links=40) as site:
        await shoal(folder, "start", "shop.py", "-a", f"start_urls={site.url}", "--run-id", "r1", *store)
        code, text = await shoal(folder, "worker", "shop.py", "--run-id", "r1", *store)
    assert code == 0, text
    assert re.search(f"finished, failed: {FAILED}", text), text
    assert re.search(r"shop +finished +failed ", (await shoal(folder, "runs", *store))[1])
    assert (await shoal(folder, "audit", "r1", *store))[0] == 5


async def test_broken_links_are_no_failures(folder: Path) -> None:
    """A followed link to a missing page says nothing about the crawl. A start URL that is missing does."""
    source = (folder / "shop.py").read_text().replace('follow_all("a")', 'follow_all(["/gone/1", "/gone/2"])')
    (folder / "shop.py").write_text(source)
    store = ("--frontier", "sqlite:///q.db")
    async with SiteServer(pages=1) as site:
        code, text = await shoal(folder, "run", "shop.py", "-a", f"start_urls={site.url}", *store)
        assert code == 0, text
        assert "finished: every page found is accounted for" in text
        assert re.search(r"broken links +2", text)
        assert "broken link" in (await shoal(folder, "audit", *store))[1]
        code, text = await shoal(folder, "run", "shop.py", "-a", f"start_urls={site.url}/gone/3")
    assert code == 5
    assert "no page was fetched: the only request failed (http 404)" in text


class Rule(Spider):
    name = "rule"
    settings = {"download_delay": 0}

    def parse(self, response: Response) -> object:
        yield {"url": response.url}

    def judge(self, run: object) -> str | None:
        return f"{run.items} items are too few" if run.items < 5 else None  # type: ignore[attr-defined]


class BrokenRule(Rule):
    def judge(self, run: object) -> str | None:
        raise KeyError("items")


async def test_a_spider_has_its_own_rule() -> None:
    async with SiteServer(pages=1) as site:
        done = await crawl(Rule, arguments={"start_urls": site.url})
        broken = await crawl(BrokenRule, arguments={"start_urls": site.url})
    assert done.summary is not None
    assert broken.summary is not None
    assert done.summary.outcome is not None
    assert broken.summary.outcome is not None
    assert (done.summary.outcome.verdict, done.summary.outcome.reasons) == ("failed", ("1 items are too few",))
    assert broken.summary.outcome.verdict == "failed"
    assert "the rule of the spider raised KeyError in judge: 'items'" in broken.summary.outcome.reasons[0]


ITEMS = """
from shoal import Spider

class Items(Spider):
    name = "items"
    settings = {"download_delay": 0}

    def parse(self, response):
        yield response.follow_all("a")
        yield {"url": response.url, "bad": object()} if response.url.endswith("/7") else {"url": response.url}
"""


async def test_items_that_could_not_be_stored_degrade_a_run_of_any_process(tmp_path: Path) -> None:
    """The second process finds the item errors of the first one in the store."""
    (tmp_path / "items.py").write_text(ITEMS)
    store = ("--frontier", "sqlite:///q.db")
    async with SiteServer(pages=40, links=40) as site:
        words = ["run", "items.py", "-a", f"start_urls={site.url}", *store]
        await shoal(tmp_path, *words, "--max-pages", "30")
        with closing(sqlite3.connect(tmp_path / "q.db")) as db:
            ((errors, done),) = db.execute("SELECT item_errors, done FROM run")
        assert (errors, done < 41) == (1, True)
        code, text = await shoal(tmp_path, *words)
    assert code == 0
    assert "finished, degraded: 41 pages accounted for: 41 done" in text
    assert "1 item could not be stored" in text


class CareFree(Spider):
    name = "carefree"
    settings = {"download_delay": 0}

    def parse(self, response: Response) -> object:
        yield {"url": response.url}
        yield response.follow("/gone", errback="gone")

    def gone(self, request: object, error: object) -> object:
        raise LookupError("no replacement")


async def test_an_errback_that_raises_degrades_a_run() -> None:
    """Also if the page is a broken link, which alone says nothing about the crawl."""
    async with SiteServer(pages=30) as site:
        done = await crawl(CareFree, arguments={"start_urls": [f"{site.url}/p/{number}" for number in range(30)]})
    assert done.summary is not None
    assert done.summary.outcome is not None
    assert done.summary.outcome.verdict == "degraded"
    assert done.summary.outcome.reasons == ("1 of 31 pages failed (LookupError in gone: 1)",)


CLOSING = (
    ITEMS.replace(', "bad": object()', "")
    + """
    def closed(self, reason):
        raise OSError("the report could not be sent")
"""
)


async def test_a_hook_that_fails_at_the_end_is_in_the_outcome(tmp_path: Path) -> None:
    (tmp_path / "items.py").write_text(CLOSING)
    store = ("--frontier", "sqlite:///q.db")
    async with SiteServer(pages=3) as site:
        code, text = await shoal(tmp_path, "run", "items.py", "-a", f"start_urls={site.url}", *store)
    assert (code, "the report could not be sent" in text) == (1, True)
    assert re.search(r"items +finished +failed ", (await shoal(tmp_path, "runs", *store))[1])
    code, text = await shoal(tmp_path, "audit", *store)
    assert (code, "closed() failed: OSError: the report could not be sent" in text) == (5, True), text


async def test_a_hook_that_failed_in_one_worker_stays_failed(tmp_path: Path) -> None:
    """Another worker that ends later does not know of it. A run that is reopened has a new outcome."""
    store = await open_store(f"sqlite:///{tmp_path}/q.db")
    try:
        good = Outcome(verdict="good", accounted="3 pages accounted for")
        created = await store.create_run(Run(run_id="r1", spider="shop", state="running", created_at=0.0))
        run = replace(created, state="finished")
        frontier = await store.frontier(run.run_id)
        await store_outcome(store, run.run_id, good.with_failed_hooks(("closed() failed: OSError: no",)))
        await store_outcome(store, run.run_id, good)
        outcome = await read_outcome(store, run, frontier)
        assert outcome is not None
        assert (outcome.verdict, outcome.reasons) == ("failed", ("closed() failed: OSError: no",))
        await forget_outcome(store, run.run_id)
        await store_outcome(store, run.run_id, good)
        assert await read_outcome(store, run, frontier) == good
    finally:
        await store.close()
