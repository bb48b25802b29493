"""The Python that a benchmark runs in: one that has Shoal with its extras."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from crawl import contenders

WORK = Path(__file__).resolve().parent.parent / ".work"


def in_environment() -> None:
    """Continue in the environment of the fleet benchmarks if this Python does not have Shoal with its extras."""
    try:
        import asyncpg  # noqa: F401
        import redis  # noqa: F401

        import shoal  # noqa: F401
    except ImportError:
        environment = contenders.ENVIRONMENTS["shoal-fleet"]
        WORK.mkdir(exist_ok=True)
        if reason := contenders.install(environment, WORK / "venvs"):
            raise SystemExit(f"{environment.name} cannot be installed: {reason}") from None
        python = str(WORK / "venvs" / environment.name / "bin/python")
        os.execv(python, [python, *sys.argv])
