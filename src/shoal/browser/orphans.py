"""Processes of a browser whose parent died: this process adopts them and reaps them.

Otherwise they stay as zombies in a container whose first process is not an init.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE = 0.02


def children() -> set[int]:
    """The child processes of this process, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def adopt() -> None:
    """From now on, descendants whose parent dies become children of this process."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def group_of(pid: int) -> int:
    """The process group of a process, also of a zombie; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError, ValueError):
        return 0


def reap(groups: Collection[int], patience: float) -> None:
    """Reap the children in these process groups, which are being killed. It blocks until none is left."""
    end = time.monotonic() + patience
    while groups and time.monotonic() < end:
        own = [pid for pid in children() if group_of(pid) in groups]
        for pid in own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not own and not any(group_of(int(name)) in groups for name in os.listdir("/proc") if name.isdigit()):
            return
        time.sleep(_PAUSE)
