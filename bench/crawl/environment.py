"""The Python that a benchmark runs in: one that has Shoal with its extras."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from crawl import contenders

WORK = Path(__file__).resolve().parent.parent / ".work"


def in_environment(name: str = "shoal-fleet", modules: tuple[str, ...] = ("asyncpg", "redis", "shoal")) -> None:
    """Continue in an environment of the benchmarks if this Python does not have these modules."""
    if all(find_spec(module) is not None for module in modules):
        return
    environment = contenders.ENVIRONMENTS[name]
    WORK.mkdir(exist_ok=True)
    if reason := contenders.install(environment, WORK / "venvs"):
        raise SystemExit(f"{environment.name} cannot be installed: {reason}")
    python = str(WORK / "venvs" / environment.name / "bin/python")
    os.execv(python, [python, *sys.argv])
