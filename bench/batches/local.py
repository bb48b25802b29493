"""A large local batch compared with a plain crawl of the same URLs. They take turns on the same core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from batches import sites
from batches.plain import plain
from batches.server import Caller, api, problems
from batches.setup import Setup
from crawl.server import Serving
from nodes.load import Load


def measure(setup: Setup) -> list[dict[str, Any]]:
    """Return one result per method and round. The first round is a warm-up and is not counted."""
    figures: list[dict[str, Any]] = []
    with sites.fast(setup) as site, plain(setup) as crawl, api(setup, core=setup.server_core) as server:
        urls = setup.urls(site.url)

        def batch(urls: Sequence[str]) -> tuple[float, list[str]]:
            seconds, answer = Caller(server.port).timed(urls)
            return seconds, problems(answer, urls)

        ways: dict[str, tuple[Callable[[Sequence[str]], tuple[float, list[str]]], int]] = {
            "crawl": (crawl.timed, crawl.process.pid),
            "batch": (batch, server.pid),
        }
        for number in range(setup.rounds + 1):
            for way, (act, pid) in ways.items():
                with Load(worker=pid, site=site.pid) as load:
                    seconds, wrong = act(urls)
                figure = {
                    "part": "local", "way": way, "round": number, "pages": len(urls), **load.figure(),
                    "seconds": seconds, "cpu_us": 1e6 * load.spent["worker"] / len(urls), "problems": wrong,
                }  # fmt: skip
                print(
                    f"local  round {number}  {way:<6}{len(urls) / seconds:8,.0f} pages/s", file=sys.stderr, flush=True
                )
                if number:
                    figures.append(figure)
        figures[-1]["peak_bytes"] = server.memory()["peak"]
    figures[-1]["problems"] += visits(site, setup, len(ways) * (setup.rounds + 1))
    return figures


def visits(site: Serving, setup: Setup, expected: int) -> list[str]:
    """Check in the log of the site that each page was requested this often."""
    wrong = setup.pages - sum(count == expected for count in site.pages.values())
    return [f"{wrong} pages were not requested {expected} times"] if wrong else []
