"""Who may have how many pages in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def shares(callers: Mapping[str, str], total: int) -> dict[str, int]:
    """The places of each session, whose callers are given: callers have equal shares, whatever number of sessions they
    began, and the sessions of one caller share what it has. Nobody gets less than one."""
    sessions = Counter(callers.values())
    return {session: max(1, total // len(sessions) // sessions[caller]) for session, caller in callers.items()}
