"""Python's garbage collector, in processes that do nothing but crawl."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """What is here by now stays, and pages leave few cycles behind."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
