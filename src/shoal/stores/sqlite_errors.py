"""The errors of SQLite, for the frontier and for outputs."""

from __future__ import annotations

import sqlite3

from shoal.stores.severity import Meaning, Severity

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
