"""The processes of browsers that this test process and its children started."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.browser import guardian


def browsers() -> list[int]:
    """Living processes of any browser of this test run: Chromium, its children and guardians."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and _belongs(int(name)):
            found.append(int(name))
    return found


def _belongs(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return f"{guardian.VARIABLE}=".encode() in environment and state != "Z"
