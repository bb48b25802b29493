"""Run projects under Scrapy and under Shoal, both against the same shop, and keep what each did."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.scrapy.shop import Shop, Visitor, normalized
from tests.support import forking
from tests.support.forking import SHOAL

ROOT = Path(__file__).parents[3]
SCRAPY = ROOT / ".venv-scrapy" / "bin" / "python"
PROJECTS = Path(__file__).parent / "projects"
AT_ONCE = 3
"""Processes at the same time: more would only wait for each other."""


@dataclass(frozen=True)
class Project:
    """What to run: a file, or a folder and the name of a spider."""

    place: str
    spider: str | None = None
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Settings of Scrapy. ``SHOP`` in them is the address of the shop."""

    def copy_to(self, folder: Path) -> None:
        if self.spider is None:
            folder.mkdir()
            shutil.copy(PROJECTS / self.place, folder)
        else:
            shutil.copytree(PROJECTS / self.place, folder)

    def options(self, visitor: Visitor) -> list[str]:
        """The options that both commands understand."""
        found = ["-a", f"site={visitor.url}"]
        for each in self.arguments:
            found += ["-a", each]
        for each in self.settings:
            found += ["-s", each.replace("SHOP", visitor.url)]
        return [*found, "-o", "items.jsonl"]


@dataclass
class Outcome:
    """What a run did."""

    visitor: Visitor
    folder: Path
    log: str = ""
    problem: str = ""
    """Why the run did not end well; empty if it did."""
    items: list[Any] = field(default_factory=list)

    @property
    def item_texts(self) -> list[str]:
        """The items in an order of their own, without the address of the shop."""
        return sorted(normalized(item, self.visitor) for item in self.items)

    @property
    def requests(self) -> Counter[str]:
        return Counter(line.replace(self.visitor.url, "SHOP") for line in self.visitor.lines)

    def lines(self, name: str) -> list[str]:
        """The lines of a file that the project wrote, in an order of their own."""
        return sorted((self.folder / name).read_text().replace(self.visitor.url, "SHOP").splitlines())


def run_all(projects: Sequence[Project], shop: Shop, folder: Path) -> dict[Project, tuple[Outcome, Outcome]]:
    """Run all projects under both, several at once. Returns the outcomes of Scrapy and of Shoal."""
    places: dict[Project, tuple[Outcome, Outcome]] = {}
    for number, project in enumerate(projects):
        both = [Outcome(shop.visitor(), folder / f"{number}-{each}") for each in ("scrapy", "shoal")]
        for each in both:
            project.copy_to(each.folder)
        places[project] = both[0], both[1]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        theirs = pool.submit(run_scrapy, [(project, places[project][0]) for project in projects])
        ours = [pool.submit(_run_shoal, project, places[project][1]) for project in projects]
        for each in (theirs, *ours):
            each.result()
    return places


def run_scrapy(runs: Sequence[tuple[Project, Outcome]]) -> None:
    orders = []
    for project, outcome in runs:
        what = ["runspider", project.place] if project.spider is None else ["crawl", project.spider]
        words = [*what, *project.options(outcome.visitor)]
        orders.append(json.dumps({"words": words, "folder": str(outcome.folder)}))
    done = subprocess.run(
        [SCRAPY, Path(__file__).parent / "scrapy_runs.py"], input="\n".join(orders), capture_output=True, text=True,
        timeout=150, check=True,
    )  # fmt: skip
    codes = json.loads(done.stdout)
    for project, outcome in runs:
        log = (outcome.folder / "log.txt").read_text()
        _finish(outcome, codes[str(outcome.folder)], log, f"scrapy: {project}")


def _run_shoal(project: Project, outcome: Outcome) -> None:
    what = [project.place] if project.spider is None else [".", project.spider]
    words = [*SHOAL, "run", "--scrapy", *what, *project.options(outcome.visitor)]
    done = forking.run(words, cwd=outcome.folder, capture_output=True, text=True, timeout=100)
    _finish(outcome, done.returncode, done.stdout + done.stderr, f"shoal: {project}")


def _finish(outcome: Outcome, code: int, log: str, what: str) -> None:
    outcome.problem = f"{what} ended with {code}:\n{log[-5000:]}" if code else ""
    output = outcome.folder / "items.jsonl"
    outcome.log = log
    outcome.items = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
