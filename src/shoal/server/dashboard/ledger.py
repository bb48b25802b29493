"""The ledger of a run as one bar: every pushed request is in exactly one part."""

from __future__ import annotations

from typing import NamedTuple

from shoal.ports import Stats


class BarPart(NamedTuple):
    """A part of the bar."""

    state: str
    label: str
    number: int


class LedgerBar(NamedTuple):
    """All parts of the bar, and their sum. It balances if the sum is the number of pushed requests."""

    parts: tuple[BarPart, ...]
    total: int
    balanced: bool


def ledger_bar(stats: Stats) -> LedgerBar:
    parts = (
        BarPart("done", "done", stats.done),
        BarPart("dead", "failed", stats.dead),
        BarPart("leased", "in flight", stats.leased),
        BarPart("waiting", "waiting", stats.waiting),
        BarPart("ready", "ready", stats.ready),
    )
    return LedgerBar(parts, stats.pushed, stats.balanced)
