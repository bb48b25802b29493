"""The latency of a batch of three pages: alone, and while another caller sends large batches all the time."""

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
    """Return two results per site. All batches request pages of the same host."""
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
    """Send batches one after the other, each with other pages, after a warm-up. Return the times and the problems."""
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
    """Sends batches without a pause. It does not decode the responses, which would delay the small batches."""

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
            if figure not in answer[-1000:]:  # the statistics of a batch follow its results
                self.problems.append("a large batch is incomplete")
            self.done += 1


@contextmanager
def large_batches(server: Api, urls: Sequence[str]) -> Iterator[LargeBatches]:
    """Send large batches until the block ends. Then wait for the last one, unless something failed."""
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
