"""Measure one input in a child process: CPU time, peak memory, and outcome."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CEILING = 2 << 30  # bytes; the machine must survive the worst input


@dataclass(frozen=True)
class Cost:
    seconds: float
    megabytes: float
    outcome: str
    failed: bool


def measure(run: Callable[[Any], str], case: Any, seconds: float) -> Cost:
    """Run the input in a fork of this process. The kernel kills a child that takes three times the limit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(run, case, seconds, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if said:
        return Cost(**json.loads(said))
    why = f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "died"
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, why, failed=True)


def _in_child(run: Callable[[Any], str], case: Any, seconds: float, writer: int) -> None:
    most = max(2, int(3 * seconds) + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (_CEILING, _CEILING))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # reset the peak
    before, started = _peak(), time.process_time()
    try:
        outcome, failed = run(case), False
    except BaseException as exc:  # any exception is a finding
        place = traceback.extract_tb(exc.__traceback__)[-1]
        outcome, failed = f"{type(exc).__name__} in {place.name}: {exc!s:.200}", True
    cost = {"seconds": time.process_time() - started, "megabytes": _peak() - before}
    os.write(writer, json.dumps({**cost, "outcome": outcome, "failed": failed}).encode())
    os._exit(0)


def _peak() -> float:
    """The largest resident set, in MB."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    raise RuntimeError("/proc is missing: this benchmark needs Linux")
