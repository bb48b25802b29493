"""Where the time of a crawl goes: a profiled run, its time summed up by parts of the program."""

from __future__ import annotations

import pstats
import shutil
import subprocess
from pathlib import Path
from typing import Any

from crawl.measure import Setup
from crawl.server import serve
from shop.crawls import PROJECT, command_of, variables

PARTS = (
    ("links", ("shoal/scrapy/linkextractors", "shoal/scrapy/crawl_spider")),
    ("loaders", ("itemloaders/", "itemadapter/", "shoal/scrapy/loader", "shoal/scrapy/item")),
    ("parsing", ("shoal/selector/parsing", "shoal/http/response")),
    ("queries", ("shoal/selector/", "shoal/scrapy/selector", "parsel/")),
    ("requests and responses of Scrapy", ("shoal/scrapy/",)),
    ("spider", ("/shop/",)),
    ("middleware, robots.txt", ("shoal/fetch/layers/", "shoal/fetch/sessions/")),
    ("HTTP", ("shoal/fetch/", "aiohttp/", "yarl/", "multidict/")),
    ("engine and frontier", ("shoal/crawling/", "shoal/frontier/", "shoal/runs/", "shoal/http/", "shoal/urls/")),
    ("output", ("shoal/sinks/", "shoal/item")),
    (
        "start: imports and settings",
        ("<frozen importlib", "shoal/config", "shoal/cli", "typer/", "click/", "typing", "re/"),
    ),
    ("event loop", ("asyncio/", "uvloop")),
)
"""Each part, and what the paths of its modules contain. The first match counts."""
_RUN = """
import cProfile, sys
from shoal.cli.main import main
target, *sys.argv = sys.argv[1:]
profile = cProfile.Profile()
try:
    profile.runcall(main)
except SystemExit:
    pass
profile.dump_stats(target)
"""


def profiled(spider: str, root: Path, setup: Setup) -> list[tuple[str, float]]:
    """Run the crawl under cProfile. Returns the share of each part, the largest first."""
    scratch = setup.work / "runs" / f"shop-profile-{spider}"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(PROJECT, scratch)
    target = scratch / "profile"
    with serve(setup.nginx, root, setup.work / "nginx", setup.server_pin, log=False) as serving:
        program, *words = command_of("shoal", spider, scratch / "items.jsonl", setup.venvs)
        python = str(Path(program).with_name("python"))
        command = [*setup.crawler_pin, python, "-c", _RUN, str(target), program, *words]
        subprocess.run(command, cwd=scratch, env=variables(serving.url), check=True, capture_output=True)
    return shares(target)


def shares(target: Path) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    stats: dict[Any, Any] = pstats.Stats(str(target)).stats  # type: ignore[attr-defined]
    for place, (_, _, own, _, callers) in stats.items():
        if place[0] != "~" or not callers:
            found[part_of(place[0], place[2])] = found.get(part_of(place[0], place[2]), 0.0) + own
            continue
        for caller, counts in callers.items():  # a function in C belongs to the code that calls it
            name = part_of(caller[0], place[2])
            found[name] = found.get(name, 0.0) + counts[2]
    found.pop("waiting", None)
    total = sum(found.values())
    return sorted(((name, seconds / total) for name, seconds in found.items()), key=lambda each: -each[1])


def part_of(path: str, function: str) -> str:
    if "poll" in function or "uvloop.Loop.run" in function:
        return "waiting"
    if "turbohtml" in function and "parse" in function:
        return "parsing"
    return next((name for name, ends in PARTS if any(end in path for end in ends)), "other")
