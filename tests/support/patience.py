"""How long tests wait on a busy machine."""

from __future__ import annotations

import os


def allowance(seconds: float) -> float:
    """A limit for a quiet machine; longer while more processes want to run than there are cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
