"""A plain crawl to compare with a local batch: the same URLs, in a process that has imported everything.

It uses the spider of batches, so a page gives the same item. The difference between the two is the cost of the server.
As a program it prints a line when it is ready. Then it reads the URLs of a crawl as one line of JSON, crawls them in
memory, and prints the seconds from the creation of the crawl to its end, and the result.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

from batches.setup import Setup, read_line, running


@dataclass(frozen=True)
class Plain:
    process: Popen[str]

    def timed(self, urls: Sequence[str]) -> tuple[float, list[str]]:
        """Return the seconds and the problems."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(urls) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(read_line(self.process))
        wrong = answer["good"] != len(urls)
        return answer["seconds"], [f"{answer['good']} pages of {len(urls)} crawled"] if wrong else []


@contextmanager
def plain(setup: Setup) -> Iterator[Plain]:
    """Start the process on the core of the server."""
    with running(setup, "plain-crawl", "-m", "batches.plain", core=setup.server_core, talks=True) as process:
        read_line(process)
        yield Plain(process)


async def _crawl(urls: list[str]) -> dict[str, Any]:
    from shoal.api.batch.options import BatchOptions
    from shoal.api.batch.spider import BatchSpider
    from shoal.runs.crawl import Crawl

    began = time.perf_counter()
    done = await Crawl(BatchSpider(BatchOptions(), "plain"), urls=urls)
    seconds = time.perf_counter() - began
    good = {item["url"] for item in done.items if item["title"] and item["content"]}
    return {"seconds": seconds, "good": len(good)}


async def _work() -> None:
    from shoal.crawling.onion import preload

    preload()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await _crawl(json.loads(line))), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_work())
