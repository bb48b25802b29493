"""The ledger of a run as one bar: every pushed request is in exactly one part."""

from __future__ import annotations

from typing import NamedTuple

from shoal.ports import Stats


class Part(NamedTuple):
    """A part of the bar."""

    state: str
    label: str
    number: int


class LedgerBar(NamedTuple):
    """All parts of the bar, and their sum. It balances if the sum is the number of pushed requests."""

    parts: tuple[Part, ...]
    total: int
    balanced: bool


def ledger_bar(stats: Stats) -> LedgerBar:
    parts = (
        Part("done", "done", stats.done),
        Part("dead", "failed", stats.dead),
        Part("leased", "in flight", stats.leased),
        Part("waiting", "waiting to retry", stats.waiting),
        Part("ready", "queued", stats.ready),
    )
    return LedgerBar(parts, stats.pushed, stats.balanced)
