"""How fast pgqueuer enqueues the URLs of the Shoal benchmark: all new, and half of them known. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

BATCH = 500


def url(number: int) -> str:
    """The same URL as in the Shoal benchmark."""
    head = f"https://host{number % 100:02d}.example/catalogue/section/page-"
    return f"{head}{number:0{60 - len(head)}d}"


async def main(urls: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(900):
        return [
            await measure("push-new", 1, [url(number) for number in range(urls)], known=False),
            await measure("push", 1, half_known(urls, 2 * urls), known=True),
            await measure("push", 4, half_known(2 * urls, 3 * urls), known=True),
        ]


def half_known(start: int, stop: int) -> list[str]:
    """All URLs from start to stop, and as many earlier ones."""
    rng, names = random.Random(f"{start}/{stop}"), []
    for number in range(start, stop):
        names += [url(number), url(start + int(rng.random() * (number - start)))]
    return names


async def measure(act: str, callers: int, names: list[str], *, known: bool) -> dict[str, Any]:
    """Enqueue in batches. If URLs may be known, the URL is the deduplication key of pgqueuer."""
    links = [Queries(AsyncpgDriver(await asyncpg.connect())) for _ in range(callers)]
    # Sorted: two batches with the same URLs in a different order would deadlock.
    batches = iter([sorted(names[first : first + BATCH]) for first in range(0, len(names), BATCH)])

    async def push(queries: Queries) -> None:
        while (batch := next(batches, None)) is not None:
            entrypoints, priorities = ["fetch"] * len(batch), [0] * len(batch)
            payloads: list[bytes | None] = [name.encode() for name in batch]
            if known:
                await queries.enqueue(entrypoints, payloads, priorities, dedupe_key=[*batch], on_conflict="skip")
            else:
                await queries.enqueue(entrypoints, payloads, priorities)

    started = time.perf_counter()
    await asyncio.gather(*(push(queries) for queries in links))
    seconds = time.perf_counter() - started
    return {"act": act, "batch": BATCH, "callers": callers, "count": len(names), "rate": len(names) / seconds}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(main(int(sys.argv[1])))))
