"""How many host names are resolved at the same time."""

from __future__ import annotations

import os


def allow_many_lookups() -> None:
    """Let uvloop resolve 32 names at once. Call it before the first lookup of the process.

    uvloop uses four threads by default, and some name servers take seconds: a few names without an answer would block
    all other hosts.
    """
    os.environ.setdefault("UV_THREADPOOL_SIZE", "32")
