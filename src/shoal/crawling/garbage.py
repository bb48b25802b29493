"""Python's garbage collector, in processes that do nothing but crawl."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Never collect the objects that exist now, and collect new ones rarely: pages leave few cycles behind."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
