"""One crawl of the shop with the project, under Scrapy or under Shoal, timed from start to end of its process."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crawl.measure import Setup, last_line, timed
from crawl.server import Serving, serve
from shop.pages import pages_of

PROJECT = Path(__file__).parent / "project"
SPIDERS = ("rules", "follow")
ENVIRONMENTS = {"scrapy": "scrapy", "shoal": "shoal-scrapy"}
COMMANDS = {
    "scrapy": ("{bin}/scrapy", "crawl", "{spider}", "-O", "{output}:jsonlines"),
    "shoal": ("{bin}/shoal", "run", "--scrapy", ".", "{spider}", "--frontier", "memory:", "-o", "{output}", "-q"),
}


@dataclass
class Crawl:
    """The figures of one crawl."""

    crawler: str
    spider: str
    round: int
    pages: int
    seconds: float
    cpu_seconds: float
    other_seconds: float
    """CPU time of other programs on the crawler's core."""
    peak_bytes: int
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        flags = f"  !! {'; '.join(self.problems)}" if self.problems else ""
        return (
            f"{self.spider:7} {self.crawler:7} {self.pages / self.seconds:7,.0f} pages/s  {self.seconds:6.2f} s  "
            f"CPU {self.cpu_seconds:6.2f} s  {self.peak_bytes >> 20} MB{flags}"
        )


def run(crawler: str, spider: str, round_: int, root: Path, setup: Setup) -> tuple[Crawl, list[str]]:
    """Crawl once. Returns the figures, and the items as sorted texts without the address of the server."""
    scratch = setup.work / "runs" / f"shop-{crawler}-{spider}"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(PROJECT, scratch)
    output = scratch / "items.jsonl"
    with serve(setup.nginx, root, setup.work / "nginx", setup.server_pin, log=True) as serving:
        command = command_of(crawler, spider, output, setup.venvs)
        timing = timed(command, scratch, variables(serving.url), setup)
    pages, own = serving.pages.total(), timing.cpu_seconds
    made = Crawl(crawler, spider, round_, pages, timing.seconds, own, max(0.0, timing.busy - own), timing.peak_bytes)
    items = read_items(output, serving.url)
    if timing.late or timing.exit_code:
        made.problems.append(
            "too late" if timing.late else f"exit code {timing.exit_code}: {last_line(scratch / 'log.txt')}"
        )
    made.problems += problems_of(items, serving, setup.pages)
    if made.other_seconds > max(0.3, 0.1 * timing.seconds):
        made.problems.append("other programs used the crawler's core")
    return made, items


def variables(url: str) -> dict[str, str]:
    return os.environ | {"BENCH_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}


def command_of(crawler: str, spider: str, output: Path, venvs: Path) -> list[str]:
    values = {"bin": venvs / ENVIRONMENTS[crawler] / "bin", "spider": spider, "output": output}
    return [part.format(**values) for part in COMMANDS[crawler]]


def read_items(output: Path, url: str) -> list[str]:
    if not output.exists():
        return []
    items = [json.loads(line) for line in output.read_text().splitlines()]
    return sorted(json.dumps(item, sort_keys=True).replace(url, "/") for item in items)


def problems_of(items: list[str], serving: Serving, products: int) -> list[str]:
    found = []
    if len(items) != products:
        found.append(f"{len(items)} items instead of {products}")
    if len(set(items)) != len(items):
        found.append("items more than once")
    if len(serving.pages) != pages_of(products):
        found.append(f"{len(serving.pages)} pages fetched instead of {pages_of(products)}")
    if (again := serving.pages.total() - len(serving.pages)) > 0:
        found.append(f"{again} pages fetched again")
    if failed := sum(count for status, count in serving.statuses.items() if status >= 400):
        found.append(f"{failed} requests answered with an error")
    return found
