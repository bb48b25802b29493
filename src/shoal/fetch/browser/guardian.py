"""Kills the browser of a worker when the worker ends, however it ends.

Run as a script, with the token of the browser as its argument. Its standard input is a pipe that only the worker holds:
when the worker is gone, the pipe ends, and the guardian kills every process with the token in its environment. It
imports nothing of shoal, so it starts fast and stays small.
"""

from __future__ import annotations

import os
import signal
import sys
import time

VARIABLE = "SHOAL_BROWSER"
_PATIENCE = 5.0
"""Seconds for which it searches for processes that are still being created."""


def find(token: str) -> list[int]:
    """The living processes of this browser.

    Not all of them have a readable environment, but they are in a process group with one that has.
    """
    mark = f"{VARIABLE}={token}".encode()
    groups: dict[int, list[int]] = {}
    groups_with_token = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, _, group = file.read().rpartition(b")")[2].split()[:3]
                if state == b"Z":
                    continue
                groups.setdefault(int(group), []).append(int(name))
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        groups_with_token.add(int(group))
            except OSError:  # ended meanwhile, or not readable
                continue
    return [pid for group in groups_with_token - {os.getpgrp()} for pid in groups[group]]


def kill(token: str) -> int:
    """Send SIGKILL to all processes of this browser. Returns how many were found."""
    pids = find(token)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


def main() -> None:
    token, *others = sys.argv[1:]
    os.setsid()  # Ctrl-C and the end of a terminal are for the worker
    while os.read(0, 1024):
        pass
    for pid in others:  # the driver, which would otherwise restart or wait
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    end = time.monotonic() + _PATIENCE
    while kill(token) and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
