"""What an error of a server or a database file means for the call that got it.

Each kind of server has one table of its errors. An error that is in no table is `UNCERTAIN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

FULL_FOR = 5.0
"""Seconds for which a server counts as full after it refused a call for lack of room. Then it is tried again."""


class Severity(Enum):
    """Whether to wait, to try a few times, or to give up."""

    AWAY = "away"
    """It cannot serve this call now, but later: a failover, a restart, a full disk. Nothing was changed. A frontier is
    waited for without a limit, an output as long as ``items.patience``."""
    UNCERTAIN = "uncertain"
    """Nobody knows. A call to a frontier is tried five times within half a minute, and then its error ends the process:
    so a short trouble is survived, and a lasting one is reported. An output is retried like one that is away."""
    FINAL = "final"
    """It will refuse the call each time. The error is reported at once."""


class Meaning(NamedTuple):
    """The meaning of an error, and what to say about it."""

    severity: Severity
    advice: str = ""
    """What happened, and what to do. Empty: the words of the server are enough."""
    is_full: bool = False
    """It is away because it has no room left."""


_UNKNOWN = Meaning(Severity.UNCERTAIN)


def meaning_of(code: str, table: Mapping[str, Meaning]) -> Meaning:
    """The meaning of an error code: that of the longest beginning of it that the table has."""
    for length in range(len(code), 0, -1):
        if (meaning := table.get(code[:length])) is not None:
            return meaning
    return _UNKNOWN
