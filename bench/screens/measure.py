"""What the screens of a real `shoal serve` cost: time, size, and CPU time of the store and of the server."""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from screens.fill import BIG
from shoal.api.dashboard.pages import NAVIGATION
from stores.servers import cpu_seconds

TIMES = 15
OPEN = (1, 50)
"""How many overviews are open."""
ROUNDS = 3
_SETTLED = 0.01
"""A store that uses less of a core has finished its own work."""
_SETTLED_SECONDS = 75.0
"""For so long: PostgreSQL checks once a minute whether there is something to clean up."""
_SETTLE_TIMEOUT = 1200.0
_STEP = 5.0


class Serving(NamedTuple):
    """A server that serves the dashboard of a store."""

    address: str
    server: int
    store: int
    """Their processes."""

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the store and of the server so far."""
        return cpu_seconds(self.store), cpu_seconds(self.server)


@contextmanager
def serving(url: str, store: int) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        words = [sys.executable, "-m", "shoal.cli.main", "serve", "--frontier", url, "--port", str(port)]
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = Serving(f"http://127.0.0.1:{port}", process.pid, store)
        try:
            while True:
                try:
                    _timed(f"{found.address}/ready")
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit("shoal serve did not start") from None
                    time.sleep(0.2)
            yield found
        finally:
            process.terminate()
            process.wait()


def screens() -> dict[str, str]:
    """The screens of the navigation and those of the large run: names by path."""
    return dict(NAVIGATION) | {
        "/ui/runs?q=run_00001": "search of a run", f"/ui/runs/{BIG}": "run",
        f"/ui/runs/{BIG}/url?url=http://host1.example/p/1": "URL", "/ui/hosts/host1.example": "host",
        "/ui/compare?a=run_00001&b=run_00002": "compare",
    }  # fmt: skip


async def cost_of_screen(where: Serving, path: str, idle: tuple[float, float]) -> dict[str, Any]:
    """Medians of several requests; CPU times without what both processes need anyway."""
    await asyncio.to_thread(_timed, where.address + path)  # templates are compiled, connections opened
    before, began = where.cpu(), time.monotonic()
    found = [await asyncio.to_thread(_timed, where.address + path) for _ in range(TIMES)]
    passed, after = time.monotonic() - began, where.cpu()
    store, server = ((now - then - passed * rest) / TIMES for now, then, rest in zip(after, before, idle, strict=True))
    return {
        "seconds": statistics.median(seconds for seconds, _ in found), "size": found[-1][1],
        "store_cpu": max(0.0, store), "server_cpu": max(0.0, server),
    }  # fmt: skip


def _timed(address: str) -> tuple[float, int]:
    """Seconds of an answer, and its size."""
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            size = len(response.read())
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        size = len(error.read())
    return time.perf_counter() - began, size


async def settle(store: int) -> float:
    """Wait until the store has finished the work that the new data cause, such as cleaning up and writing pages: it
    would be counted as work for the dashboard. Returns the seconds that it took."""
    began = since = time.monotonic()
    while time.monotonic() - since < _SETTLED_SECONDS:
        before = cpu_seconds(store)
        await asyncio.sleep(_STEP)
        if cpu_seconds(store) - before > _SETTLED * _STEP:
            since = time.monotonic()
        if since - began > _SETTLE_TIMEOUT:
            raise SystemExit("the store does not come to rest")
    return since - began


async def costs_of_open(where: Serving, seconds: float) -> list[dict[str, Any]]:
    """The share of a core that open overviews cost, beyond what both processes cost without them, which changes: it is
    measured before and after. Medians of several rounds, and the rounds."""
    rounds: dict[int, list[tuple[float, ...]]] = {pages: [] for pages in OPEN}
    idle = await shares(where, seconds)
    for _ in range(ROUNDS):
        for pages, found in rounds.items():
            lookers = [asyncio.create_task(_look(where.address)) for _ in range(pages)]
            await asyncio.sleep(2)
            opened = await shares(where, seconds)
            for each in lookers:
                each.cancel()
            await asyncio.gather(*lookers, return_exceptions=True)
            before, idle = idle, await shares(where, seconds)
            found.append(tuple(now - (then + later) / 2 for now, then, later in zip(opened, before, idle, strict=True)))
    return [
        {
            "pages": pages, "store": max(0.0, statistics.median(store for store, _ in found)),
            "server": max(0.0, statistics.median(server for _, server in found)), "rounds": found,
        }
        for pages, found in rounds.items()
    ]  # fmt: skip


async def _look(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n".encode())
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def shares(where: Serving, seconds: float) -> tuple[float, float]:
    """The shares of a core that the store and the server use now."""
    before, began = where.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    after, passed = where.cpu(), time.monotonic() - began
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed
