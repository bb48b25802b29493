"""Redis, PostgreSQL and ZooKeeper for a benchmark: fresh ones, as durable as one would run them, on chosen cores."""

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

from tests.databases import DatabaseServer, PostgresServer, RedisServer, ZookeeperServer

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
    """An empty server on these cores until the block ends; its data is removed."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:  # its processes keep the cores of the one that starts it
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
    """Of the process and all below it, those that have ended included."""
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
    if kind == "zookeeper":  # it has no program that would say so
        return next(Path("/usr/share/java").glob("zookeeper-[0-9]*.jar")).stem.partition("-")[2]
    program = shutil.which(PROGRAMS[kind]) or PostgresServer._binary(PROGRAMS[kind])
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+\.\d+(\.\d+)?", said)
    return found[0] if found else said.strip()


def sync_us(folder: Path) -> float:
    """What it takes to write 8 KB to this disk for good: the floor under each commit of a durable database."""
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
