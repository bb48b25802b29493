"""Who works and who stands by: pure functions of what the coordinator shows. Every member comes to its own answer, and
the coordinator sees to it that no slot has two holders, so nobody has to lead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from shoal.ports import ClusterView, Member

Role: TypeAlias = Literal["runner", "backup", "spare"]

HESITATION = 0.5
"""Seconds that a member leaves a vacant slot to each one before it in line, who may be hanging."""


class Take(NamedTuple):
    """Try for this slot."""

    slot: int


class Retire(NamedTuple):
    """Give the slot back: there are to be fewer."""


Decision: TypeAlias = Take | Retire | None


def rank(name: str) -> tuple[bool, int, str]:
    """The place of a name in the line: by the number at its end, those without one last, equal ones by the alphabet."""
    number = re.search(r"[0-9]+$", name)
    return (number is None, int(number[0]) if number else 0, name)


def slot_of(view: ClusterView, name: str) -> int | None:
    """Which slot a member has."""
    return next((slot.index for slot in view.slots if slot.holder == name), None)


def line(view: ClusterView) -> list[Member]:
    """Those without a slot, in the order in which they get one: the fit ones first."""
    holders = {slot.holder for slot in view.slots}
    waiting = [member for member in view.members if member.name not in holders]
    return sorted(waiting, key=lambda member: (not member.fit, rank(member.name)))


def vacant(view: ClusterView) -> list[int]:
    """The slots that are to be filled, lowest first. One who has still to retire counts as a Runner."""
    held = {slot.index for slot in view.slots if slot.holder}
    free = [index for index in range(view.counts.runner) if index not in held]
    return free[: max(0, view.counts.runner - len(held))]


def roles(view: ClusterView) -> dict[str, Role]:
    """What each member is at this moment."""
    found: dict[str, Role] = {slot.holder: "runner" for slot in view.slots if slot.holder}
    for place, member in enumerate(line(view)):
        found[member.name] = "backup" if place < view.counts.backup else "spare"
    return found


def decide(view: ClusterView, name: str, vacant_for: Mapping[int, float]) -> Decision:
    """What a member has to do. ``vacant_for``: since when it has seen slots vacant, in seconds.

    The first in line takes the lowest slot, the second the next one. Whoever is further back may overtake those who
    do not come, after a while.
    """
    own = slot_of(view, name)
    if own is not None:
        return Retire() if own >= view.counts.runner else None
    free = vacant(view)
    waiting = line(view)
    place = next((place for place, member in enumerate(waiting) if member.name == name), None)
    if place is None or not free or not waiting[place].fit:
        return None
    if place < len(free):
        return Take(free[place])
    index = free[place % len(free)]
    late_by = place - len(free) + 1
    return Take(index) if vacant_for.get(index, 0.0) >= late_by * HESITATION else None


def shortage(view: ClusterView) -> str:
    """What the cluster lacks, in words; nothing if it is complete."""
    has = Counter(roles(view).values())
    wanted: dict[Role, int] = {"runner": view.counts.runner, "backup": view.counts.backup}
    return " and ".join(f"{has[role]} of {count} {role}s" for role, count in wanted.items() if has[role] < count)
