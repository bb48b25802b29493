"""New Redis, PostgreSQL and ZooKeeper servers for a benchmark, with full durability, on chosen cores."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests start the same servers

from tests.support.databases import DatabaseServer, PostgresServer, RedisServer, ZookeeperServer

REDIS = {"appendonly": "yes", "appendfsync": "everysec"}
POSTGRES = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "2GB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "30min",
    "wal_compression": "on",
}
ZOOKEEPER = {"tickTime": "200", "forceSync": "yes"}
SETTINGS = {"redis": REDIS, "postgresql": POSTGRES, "zookeeper": ZOOKEEPER}
SERVERS: dict[str, type[DatabaseServer]] = {
    "redis": RedisServer,
    "postgresql": PostgresServer,
    "zookeeper": ZookeeperServer,
}
PROGRAMS = {"redis": "redis-server", "postgresql": "postgres"}


@contextmanager
def server(kind: str, cores: set[int] | None) -> Iterator[DatabaseServer]:
    """Run an empty server on these cores until the block ends, then remove its data."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:  # child processes inherit the cores
        running = SERVERS[kind](**SETTINGS[kind])
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield running
    finally:
        running.close()


def process_of(running: DatabaseServer) -> int:
    assert running._process is not None
    return int(running._process.pid)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of the process and all its children, including those that have ended."""
    parents: dict[int, list[tuple[int, int]]] = {}
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                values = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks = sum(map(int, values[11:15]))
            parents.setdefault(int(values[1]), []).append((int(entry.name), ticks))
            if int(entry.name) == pid:
                total += ticks
    waiting = [pid]
    for each in waiting:
        for child, ticks in parents.get(each, ()):
            total += ticks
            waiting.append(child)
    return total / os.sysconf("SC_CLK_TCK")


def version(kind: str) -> str:
    if kind == "zookeeper":  # it has no command that prints its version
        return next(Path("/usr/share/java").glob("zookeeper-[0-9]*.jar")).stem.partition("-")[2]
    program = shutil.which(PROGRAMS[kind]) or PostgresServer.program(PROGRAMS[kind])
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+\.\d+(\.\d+)?", said)
    return found[0] if found else said.strip()


def sync_us(folder: Path) -> float:
    """Microseconds to write and sync 8 KB on this disk: the lower bound of a durable commit."""
    spent = []
    with TemporaryFile(dir=folder) as file:
        for _ in range(200):
            started = time.perf_counter()
            os.pwrite(file.fileno(), bytes(8192), 0)
            os.fdatasync(file.fileno())
            spent.append(time.perf_counter() - started)
    return 1e6 * statistics.median(spent)


def described(kinds: list[str], folder: Path) -> dict[str, Any]:
    return {
        "servers": {kind: {"version": version(kind), "settings": SETTINGS[kind]} for kind in kinds},
        "sync_us": round(sync_us(folder)),
    }
