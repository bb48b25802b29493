"""Counters of the identities of one process."""

from __future__ import annotations

from msgspec import Struct


class IdentityCounts(Struct):
    """What a process did with its identities."""

    known: int = 0
    removed: int = 0
    resting: int = 0
    """Pairs of an identity and a host, as this process knows them."""
    requests: int = 0
    blocks: int = 0
    failures: int = 0
    """Requests that may have failed because of their proxy."""
