"""How long a batch of three takes: alone, and while another caller has large ones worked on all the time."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from batches.server import Api, Caller, api, problems
from batches.setup import Setup
from batches.sites import SITES
from nodes.load import Load

SMALL, LARGE = 3, 1000
WARMING = 10


def measure(setup: Setup) -> list[dict[str, Any]]:
    """Two figures for each site. All batches want pages of the same host."""
    figures = []
    for name, open_site in SITES.items():
        with open_site(setup) as site, api(setup, core=setup.server_core) as server:
            urls = setup.urls(site.url)
            for loaded in (False, True):
                figure = {"part": "small", "site": name, "loaded": loaded, "batches": setup.batches}
                if loaded:
                    with large_batches(server, urls[:LARGE]) as large, Load(worker=server.pid, site=site.pid) as load:
                        times, wrong = small_batches(server, urls, setup.batches)
                    figure["large_batches"] = large.done
                    wrong = [*wrong, *large.problems]
                else:
                    with Load(worker=server.pid, site=site.pid) as load:
                        times, wrong = small_batches(server, urls, setup.batches)
                figure |= {**load.figure(), **spread(times), "problems": wrong}
                print(
                    f"small  {name}  {'loaded' if loaded else 'idle':<7}p50 {1000 * figure['p50']:6.1f} ms"
                    f"  p99 {1000 * figure['p99']:6.1f} ms",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                figures.append(figure)
    return figures


def small_batches(server: Api, urls: Sequence[str], count: int) -> tuple[list[float], list[str]]:
    """The times of so many, one after the other, of other pages each time; and what was wrong. A few come first to warm
    up."""
    caller = Caller(server.port, "small")
    times, wrong = [], []
    for number in range(-WARMING, count):
        first = SMALL * number % (len(urls) - SMALL)
        some = urls[first : first + SMALL]
        seconds, answer = caller.timed(some)
        wrong += problems(answer, some)
        if number >= 0:
            times.append(seconds)
    return times, wrong


class LargeBatches(threading.Thread):
    """Batches back to back. Their answers are read, and not decoded: that would keep the small ones' caller waiting."""

    def __init__(self, server: Api, urls: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._caller = Caller(server.port, "large")
        self._urls = urls
        self.stopping = threading.Event()
        self.done = 0
        self.problems: list[str] = []

    def run(self) -> None:
        figure = b'"success":%d,' % len(self._urls)
        while not self.stopping.is_set():
            try:
                answer = self._caller.batch(self._urls)
            except (OSError, RuntimeError) as exc:
                self.problems.append(f"a large batch failed: {exc}")
                return
            if figure not in answer[-1000:]:  # the figures of a batch come behind its results
                self.problems.append("a large batch did not get all its pages")
            self.done += 1


@contextmanager
def large_batches(server: Api, urls: Sequence[str]) -> Iterator[LargeBatches]:
    """While the block lasts; the last one is waited for, unless something failed."""
    large = LargeBatches(server, urls)
    large.start()
    yield large
    large.stopping.set()
    large.join()


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50": ordered[math.ceil(0.50 * len(ordered)) - 1],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "worst": ordered[-1],
    }
