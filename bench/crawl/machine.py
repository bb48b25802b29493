"""The machine: who uses which core, and its description for the results."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any


def pins() -> tuple[list[str], list[str], dict[str, int | None]]:
    """One core for the servers and this program, another for the measured process."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2 or shutil.which("taskset") is None:
        print("WARNING: one core only, or no taskset: server and crawler share a core", flush=True)
        return [], [], {"server": None, "crawler": None}
    first, last = available[0], available[-1]
    os.sched_setaffinity(0, {first})
    return pin(first), pin(last), {"server": first, "crawler": last}


def pin(core: int) -> list[str]:
    return ["taskset", "-c", str(core)]


def described(cores: dict[str, int | None]) -> dict[str, Any]:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"WARNING: something else is running (load {load:.1f}): the figures will be too low", flush=True)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "pinned": cores,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(load, 2),
    }


def cpu_model() -> str:
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("model name"):
            return row.partition(":")[2].strip()
    return platform.machine()
