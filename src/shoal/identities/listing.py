"""The identities of a store, for people: what each does on which host, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct

from shoal.identities.facts import IdentityFacts


class IdentityState(Struct, frozen=True):
    """One identity on one host. Without a host: on no host, or removed from all."""

    identity: str
    state: str
    """``active`` (assigned to the host), ``resting``, ``given up`` (the host blocks it), ``removed``, or ``free``."""
    host: str = ""
    reason: str = ""
    returns_in: float | None = None
    """Seconds until it returns, by the clock of this machine."""


async def list_identities(facts: IdentityFacts, hosts: Sequence[str], limit: int) -> list[IdentityState]:
    """The identities that workers of the store used during the last day, on these hosts."""
    names = (await facts.names())[:limit]
    assigned = {host: await facts.assigned(host) for host in hosts}
    return [row for name in names for row in await _rows(facts, name, assigned)]


async def _rows(facts: IdentityFacts, name: str, assigned: dict[str, str | None]) -> list[IdentityState]:
    if (removed := await facts.removed(name)) is not None:
        return [IdentityState(name, "removed", reason=removed.reason)]
    rows = []
    for host, chosen in assigned.items():
        if (rest := await facts.resting(name, host)) is not None:
            state = "given up" if rest.is_final else "resting"
            rows.append(IdentityState(name, state, host, rest.reason, max(0.0, rest.returns - time.time())))
        elif chosen == name:
            rows.append(IdentityState(name, "active", host))
    return rows or [IdentityState(name, "free")]
