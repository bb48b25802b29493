"""Who may have how many pages in flight."""

from __future__ import annotations

from collections.abc import Mapping


def shares(callers: Mapping[str, str], total: int) -> dict[str, int]:
    """The places of each session, whose callers are given: callers have equal shares, whatever number of sessions they
    began, and the sessions of one caller share what it has. Nobody gets less than one."""
    sessions: dict[str, list[str]] = {}
    for session, caller in callers.items():
        sessions.setdefault(caller, []).append(session)
    return {
        session: max(1, places)
        for own, share in zip(sessions.values(), _split(total, len(sessions)), strict=True)
        for session, places in zip(own, _split(share, len(own)), strict=True)
    }


def _split(total: int, parts: int) -> list[int]:
    """As equal as whole numbers can be; the first ones have what is left over."""
    return [total // parts + (number < total % parts) for number in range(parts)]
