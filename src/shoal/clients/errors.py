"""What an error of a server or a database file means for the call that got it.

Each kind of server has one table of its errors. An error that is in no table is `UNCERTAIN`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from shoal.errors import FrontierError, StoreAwayError, StoreError, StoreFullError

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

    @property
    def error(self) -> type[FrontierError]:
        """The class of the error that a call to a store raises."""
        if self.severity is Severity.AWAY:
            return StoreFullError if self.is_full else StoreAwayError
        return StoreError if self.severity is Severity.FINAL else FrontierError


_UNKNOWN = Meaning(Severity.UNCERTAIN)


def meaning_of(code: str, table: Mapping[str, Meaning]) -> Meaning:
    """The meaning of an error code: that of the longest beginning of it that the table has."""
    for length in range(len(code), 0, -1):
        if (meaning := table.get(code[:length])) is not None:
            return meaning
    return _UNKNOWN


# The option ``timeout`` of the URLs of servers.


def timeout_seconds(text: str | None, default: float) -> float:
    """Parse the seconds that a call may take. ValueError if the text is not a positive number."""
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) or float(text) <= 0:
        raise ValueError(f"the timeout {text!r} is not a positive number of seconds")
    return float(text)


# The errors of SQLite, for the frontier and for outputs.


_AWAY, _UNCERTAIN, _FINAL = Severity.AWAY, Severity.UNCERTAIN, Severity.FINAL
_NOTHING = "nothing was changed"
_PERMISSIONS = "check the permissions of the file and its folder"
CODES = {
    sqlite3.SQLITE_BUSY: Meaning(_AWAY, f"another program holds a lock on it; {_NOTHING}. Close that program"),
    sqlite3.SQLITE_FULL: Meaning(_AWAY, f"there is no room on the disk; {_NOTHING}. Free some space", is_full=True),
    sqlite3.SQLITE_LOCKED: Meaning(_AWAY, f"another program holds a lock on it; {_NOTHING}. Close that program"),
    sqlite3.SQLITE_NOMEM: Meaning(_AWAY, f"this machine is out of memory; {_NOTHING}. Free some"),
    # A network file system may be back in a moment. A broken disk is not: after a few attempts it is reported.
    sqlite3.SQLITE_IOERR: Meaning(_UNCERTAIN, f"its disk cannot be read or written; {_NOTHING}. Check the disk"),
    # These two also stand for a folder that is unmounted or remounted, so a few attempts are worth it.
    sqlite3.SQLITE_CANTOPEN: Meaning(_UNCERTAIN, f"it cannot be opened; {_PERMISSIONS}"),
    sqlite3.SQLITE_READONLY: Meaning(_UNCERTAIN, f"it is read-only; {_PERMISSIONS}"),
    sqlite3.SQLITE_PERM: Meaning(_FINAL, f"permission denied; {_PERMISSIONS}"),
    sqlite3.SQLITE_AUTH: Meaning(_FINAL, f"permission denied; {_PERMISSIONS}"),
    sqlite3.SQLITE_CORRUPT: Meaning(_FINAL, "it is damaged"),
    sqlite3.SQLITE_NOTADB: Meaning(_FINAL, "it is not a SQLite database, or damaged"),
    sqlite3.SQLITE_TOOBIG: Meaning(_FINAL, "a value is too large for SQLite"),
    sqlite3.SQLITE_CONSTRAINT: Meaning(_FINAL),  # one that another program added
    sqlite3.SQLITE_MISMATCH: Meaning(_FINAL),  # the same
    sqlite3.SQLITE_NOLFS: Meaning(_FINAL, "its file system cannot hold a file of this size"),
    sqlite3.SQLITE_RANGE: Meaning(_FINAL),
    sqlite3.SQLITE_MISUSE: Meaning(_FINAL),
}
"""Primary result codes. https://www.sqlite.org/rescode.html"""


def meaning(exc: Exception) -> Meaning:
    """What an error of SQLite means."""
    return CODES.get(getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF, Meaning(_UNCERTAIN))
