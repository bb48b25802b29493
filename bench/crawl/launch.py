"""Runs one command and reports what it used: `launch.py REPORT SECONDS COMMAND...`.

On Linux the peak memory of a process starts with that of the process that started it. This one is small, so the report
is true for every program that needs more than 10 MB. After SECONDS the command is killed.
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    report, limit, *command = sys.argv[1:]
    late = False
    started = time.monotonic()
    child = os.posix_spawnp(command[0], command, os.environ)

    def kill(*_: object) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, float(limit))
    _, status, usage = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    values = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "exit_code": os.waitstatus_to_exitcode(status),
        "late": late,
    }
    with open(report, "w") as file:
        json.dump(values, file)


main()
