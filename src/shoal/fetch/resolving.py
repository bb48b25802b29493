"""How many names are looked up at a time."""

from __future__ import annotations

import os


def look_up_many_names() -> None:
    """Before the first look-up of a process. uvloop has four threads for them, and some name servers take seconds: a
    few names that nobody answers for would keep all other hosts waiting."""
    os.environ.setdefault("UV_THREADPOOL_SIZE", "32")
