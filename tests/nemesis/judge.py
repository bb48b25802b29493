"""Compares the log of the site with the outputs. It does not trust the counters of the run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import asyncpg

from tests.nemesis.site import Site, Visit, record_count

GAP_TOLERANCE = 0.02
"""Seconds by which a delay may seem shorter: the site sees each request a little after it was sent."""

ROBOTS = "/robots.txt"
_STORED_AFTER = 0.5
"""Seconds until a worker has stored the content of a robots.txt."""

_COMPLETED_AFTER = 1.0
"""Seconds from a response to the completion of its page, even on a busy machine."""

Span: TypeAlias = tuple[float, float]
Expectation = Literal["went back", "maybe", "never"]


class Item(NamedTuple):
    """An item of an output: a line of the file or a row of the table."""

    page: str
    record: int
    visit: int


def lines_of(file: Path) -> list[Item]:
    if not file.exists():
        return []
    return [Item(**json.loads(line)) for line in file.read_text().splitlines()]


def rows_of(database: str, table: str) -> list[Item]:
    async def read() -> list[Item]:
        link = await asyncpg.connect(database)
        try:
            if await link.fetchval("SELECT to_regclass($1)", table) is None:
                return []
            return [Item(*row) for row in await link.fetch(f'SELECT page, record, visit FROM "{table}"')]
        finally:
            await link.close()

    return asyncio.run(read())


def judge_visits(site: Site, visits: Sequence[Visit], *, once: bool = False) -> list[str]:
    """Every page was fetched. With ``once``, no page was fetched twice."""
    counts = Counter(f"{visit.host}{visit.path}" for visit in visits)
    missing = site.pages() - counts.keys()
    starts = {page for page in missing if "/s/" in page}
    problems = _some(starts, f"of {site.plan.starts} start URLs were never fetched")
    problems += _some(missing - starts, f"of {len(site.pages()) - site.plan.starts} linked pages were never fetched")
    if once:
        again = {f"{page} ({count} times)" for page, count in counts.items() if count > 1 and page in site.pages()}
        problems += _some(again, "pages were fetched more than once")
    return problems


def judge_items(site: Site, items: Collection[Item], where: str) -> list[str]:
    """For each page, the output has exactly the records of one visit, each once."""
    problems = _some([item for item, count in Counter(items).items() if count > 1], f"items are repeated in {where}")
    by_page: dict[str, set[Item]] = defaultdict(set)
    for item in items:
        by_page[item.page].add(item)
    problems += _some(site.pages() - by_page.keys(), f"of {len(site.pages())} pages have no item in {where}")
    problems += _some(by_page.keys() - site.pages(), f"pages in {where} do not exist")
    mixed = [page for page, found in by_page.items() if len({item.visit for item in found}) > 1]
    problems += _some(mixed, f"pages have items of several visits in {where}")
    torn = []
    for page, found in by_page.items():
        visit = min(item.visit for item in found)
        records = {item.record for item in found if item.visit == visit}
        if records != set(range(record_count(int(page.rpartition("/")[2]), visit))):
            torn.append(page)
    return problems + _some(torn, f"pages have only some items of a visit in {where}")


def judge_outputs(site: Site, outputs: dict[str, list[Item]]) -> list[str]:
    """Each output has every item once, and all outputs have the same items."""
    problems = [problem for where, items in outputs.items() for problem in judge_items(site, items, where)]
    (first, items), *others = outputs.items()
    for where, found in others:
        differing = set(items) ^ set(found)
        problems += _some(differing, f"items are in only one of {first} and {where}")
    return problems


def judge_gaps(
    site: Site, visits: Iterable[Visit], *, lost: Sequence[Span] = (), unjudged: Sequence[Span] = ()
) -> list[str]:
    """Two requests to a slow host are at least its Crawl-delay apart.

    Requests within a span of ``unjudged`` are not compared with the previous one. ``lost`` are spans that the store
    forgot: if it learned the Crawl-delay of a host then, its robots.txt may be requested again at any time.
    """
    by_host: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        by_host[visit.host].append(visit)
    close = []
    for host in site.hosts[1:]:
        for before, after in zip(by_host[host], by_host[host][1:], strict=False):
            gap = after.start - before.end
            if _within(after.start, unjudged) or (after.path == ROBOTS and not _knows(by_host[host], after, lost)):
                continue
            if gap < site.plan.crawl_delay - GAP_TOLERANCE:
                close.append(f"{host}: {before.path} and {after.path} {gap:.3f} s apart at {after.start:.3f}")
    return _some(close, f"times a host was asked sooner than its delay of {site.plan.crawl_delay:g} s allows")


def _within(moment: float, spans: Iterable[Span]) -> bool:
    return any(begin <= moment <= end for begin, end in spans)


def _knows(visits: Iterable[Visit], at: Visit, lost: Iterable[Span]) -> bool:
    """Whether the store knew the robots.txt of the host at this time."""
    forgotten = [(then - _STORED_AFTER, killed) for then, killed in lost]
    return any(each.path == ROBOTS and each.end < at.start and not _within(each.end, forgotten) for each in visits)


def expectation(visits: Sequence[Visit], lost: Sequence[Span]) -> Expectation:
    """Whether `shoal audit` must report a rewind. A rewind that loses no completed page is harmless and may stay
    undetected."""
    if not lost:
        return "never"
    pages = [visit.end for visit in visits if visit.path != ROBOTS]
    harmed = any(then <= end <= killed - _COMPLETED_AFTER for then, killed in lost for end in pages)
    return "went back" if harmed else "maybe"


def judge_audit(text: str, expected: Expectation) -> list[str]:
    """`shoal audit` reports a finished run, and reports a rewind exactly when there was one."""
    if ": finished" not in text.partition("\n")[0]:
        return [f"the run is not finished: {text.strip()[:300]!r}"]
    says_so = "went back" in text.lower()
    if expected == "went back" and not says_so:
        claim = ', and claims "nothing lost"' if "nothing lost" in text else ""
        return [f"audit does not say that the store went back{claim}: {text.strip()[-300:]!r}"]
    if expected == "never" and says_so:
        return [f"audit says that the store went back, but it did not: {text.strip()[-300:]!r}"]
    return ["the ledger does not balance: " + text.strip()[-300:]] if "NOT BALANCED" in text else []


def _some(found: Collection[object], what: str) -> list[str]:
    if not found:
        return []
    examples = ", ".join(sorted(map(str, found))[:3])
    return [f"{len(found)} {what}, e.g. {examples}"]
