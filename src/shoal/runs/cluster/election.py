"""Decides which members get slots: pure functions of a view of the cluster. Each member decides for itself, and the
coordinator ensures that no slot has two holders, so no leader is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from shoal.ports import ClusterView, Member

Role: TypeAlias = Literal["Runner", "Backup Runner", "Spare"]
"""A Runner crawls, a Backup Runner replaces a Runner that dies, and a Spare replaces a Backup Runner."""

HESITATION = 0.5
"""Seconds that a member waits for each member before it in line, which may hang, before it takes their slot."""


class Take(NamedTuple):
    """Try for this slot."""

    slot: int


class Retire(NamedTuple):
    """Release the slot: the cluster was scaled down."""


Decision: TypeAlias = Take | Retire | None


def rank(name: str) -> tuple[bool, int, str]:
    """The sort key of a name: by the number at its end, then alphabetically. Names without a number come last."""
    number = re.search(r"[0-9]+$", name)
    return (number is None, int(number[0]) if number else 0, name)


def slot_of(view: ClusterView, name: str) -> int | None:
    """The slot of a member, or None."""
    return next((slot.index for slot in view.slots if slot.holder == name), None)


def line(view: ClusterView) -> list[Member]:
    """Members without a slot, in the order in which they get one: fit members first."""
    holders = {slot.holder for slot in view.slots}
    waiting = [member for member in view.members if member.name not in holders]
    return sorted(waiting, key=lambda member: (not member.fit, rank(member.name)))


def vacant(view: ClusterView) -> list[int]:
    """The slots to fill, lowest first, at most one for each member. A holder that still has to retire counts as a
    Runner."""
    held = {slot.index for slot in view.slots if slot.holder}
    enough = min(view.counts.runner, len(held) + len(view.members))  # any number may be in the store
    free = [index for index in range(enough) if index not in held]
    return free[: max(0, view.counts.runner - len(held))]


def roles(view: ClusterView) -> dict[str, Role]:
    """The current role of each member."""
    role_of: dict[str, Role] = {slot.holder: "Runner" for slot in view.slots if slot.holder}
    for place, member in enumerate(line(view)):
        role_of[member.name] = "Backup Runner" if place < view.counts.backup else "Spare"
    return role_of


def decide(view: ClusterView, name: str, vacant_for: Mapping[int, float], *, idle: bool = False) -> Decision:
    """What a member has to do. ``vacant_for``: for how many seconds it has seen slots vacant. ``idle``: it does not run
    yet. Then it is not fit, but may hold a slot that no fit member takes.

    The first in line takes the lowest slot, the second the next one. Members further back take a slot that stays vacant
    for too long.
    """
    own = slot_of(view, name)
    if own is not None:
        return Retire() if own >= view.counts.runner else None
    free = vacant(view)
    waiting = line(view)
    place = next((place for place, member in enumerate(waiting) if member.name == name), None)
    if place is None or not free or not (waiting[place].fit or idle):
        return None
    if place < len(free):
        return Take(free[place])
    index = free[place % len(free)]
    late_by = place - len(free) + 1
    return Take(index) if vacant_for.get(index, 0.0) >= late_by * HESITATION else None


def next_epoch(last: int, microseconds: int) -> int:
    """The epoch of a new holder, by the coordinator's clock. ``last``: the latest epoch that it knows. The time makes
    epochs grow even if it has lost its data."""
    return max(last + 1, microseconds)


def shortage(view: ClusterView) -> str:
    """What the cluster lacks, in words. Empty if it is complete."""
    has = Counter(roles(view).values())
    wanted: dict[Role, int] = {"Runner": view.counts.runner, "Backup Runner": view.counts.backup}
    return " and ".join(f"{has[role]} of {count} {role}s" for role, count in wanted.items() if has[role] < count)
