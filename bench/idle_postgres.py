#!/usr/bin/env python3
"""What a thousand idle workers cost a PostgreSQL server: they poll an empty run, each as often as it is told to.

Prints the CPU time of all server processes as a share of one core. The pollers are coroutines of a few processes, each
with the two connections of a worker; the server's cost is that of their calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP = 25.0
"""Seconds until the store knows how many they are."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--poll", nargs=2, metavar="X", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.poll:
        asyncio.run(poll(options.poll[0], int(options.poll[1])))
        return 0

    from tests.databases import PostgresServer

    server = PostgresServer(synchronous_commit="on")
    try:
        asyncio.run(prepare(server.url))
        each = str(options.pollers // options.processes)
        command = [sys.executable, __file__, "--poll", server.url, each]
        pollers = [subprocess.Popen(command) for _ in range(options.processes)]
        try:
            time.sleep(WARM_UP)
            assert server._process is not None
            before, since, calls = cpu_seconds(server._process.pid), time.monotonic(), transactions(server.url)
            time.sleep(options.seconds)
            span = time.monotonic() - since
            used = cpu_seconds(server._process.pid) - before
            rate = (transactions(server.url) - calls) / span
        finally:
            for poller in pollers:
                poller.terminate()
                poller.wait()
    finally:
        server.close()
    print(f"{options.pollers} idle workers: {rate:.0f} calls/s, {100 * used / span:.1f} % of one core of the server")
    return 0


async def prepare(url: str) -> None:
    from shoal.frontier.postgres import PostgresStore
    from shoal.ports import Run

    store = await PostgresStore.open(url)
    await store.create_run(Run(run_id="idle", spider="s", state="running", created_at=0.0))
    await store.close()


async def poll(url: str, count: int) -> None:
    from shoal.frontier.postgres import PostgresStore
    from shoal.ports import FrontierOptions

    store = await PostgresStore.open(f"{url}?timeout=60")

    async def one() -> None:
        frontier = await store.frontier("idle", FrontierOptions())
        while True:
            leased = await frontier.lease(10, 60)
            await asyncio.sleep(max(0.5, leased.poll_after) * (0.9 + random.random() / 5))

    await asyncio.gather(*(one() for _ in range(count)))


def cpu_seconds(parent: int) -> float:
    """Of a process and its children."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if parent in (int(entry.name), int(fields[1])):
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def transactions(url: str) -> int:
    async def ask() -> int:
        import asyncpg

        link = await asyncpg.connect(url)
        try:
            return int(await link.fetchval("SELECT sum(xact_commit) FROM pg_stat_database"))
        finally:
            await link.close()

    return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(main())
