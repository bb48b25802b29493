"""CPU usage during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from crawl.measure import busy_seconds
from stores.servers import cpu_seconds


class Load:
    """CPU seconds of some processes and their children, and of all others, until the block ends."""

    def __init__(self, **processes: int) -> None:
        self._processes = processes
        self._cores = os.sched_getaffinity(0).union(*map(os.sched_getaffinity, processes.values()))
        self.seconds = self._own = self._busy = 0.0
        self.spent = dict.fromkeys(processes, 0.0)

    def __enter__(self) -> Load:
        self._count(-1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._count(1)

    def _count(self, sign: int) -> None:
        self.seconds += sign * time.monotonic()
        self._own += sign * time.process_time()
        self._busy += sign * sum(map(busy_seconds, self._cores))
        for name, pid in self._processes.items():
            self.spent[name] += sign * cpu_seconds(pid)

    def figure(self) -> dict[str, Any]:
        """Shares of one core. ``others`` are unrelated programs."""
        others = max(0.0, self._busy - self._own - sum(self.spent.values()))
        return {
            "seconds": self.seconds,
            "cpu": {name: spent / self.seconds for name, spent in self.spent.items()},
            "others": others / self.seconds,
        }


def memory_of(pid: int) -> dict[str, int]:
    """Bytes: the resident set, and the proportional set (shared pages are divided among the processes)."""
    values = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.lower(): 1024 * int(values[name].split()[0]) for name in ("Rss", "Pss")}
