"""What went wrong with a database, in our words: whether it may pass, and what to do. Never with a password."""

from __future__ import annotations

import ssl

import asyncpg

from shoal.errors import (
    FencedError,
    FrontierError,
    QueueFullError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreError,
    StoreRewoundError,
)
from shoal.frontier.postgres.address import Address

NO_RUN, QUEUE_FULL, FENCED, REWOUND = "SH001", "SH002", "SH003", "SH004"
"""Raised by the functions in the database."""

_AWAY = ("08", "57P", "53300", "25P03", "57014")
"""Connections, shutting down and starting, too many clients, cancelled by an administrator."""
_REFUSED = {
    "28000": "this user may not connect (pg_hba.conf); check the user, and whether TLS is asked for (?sslmode=require)",
    "28P01": "the password is wrong, or none was given; check it in the URL",
    "3D000": "there is no such database; make it (createdb NAME), or name another in the URL",
    "42704": "check what stands behind the ? in the URL",
    "42501": "this user may not do that; GRANT CREATE ON DATABASE to it, or name a schema of its own",
}
_TROUBLE = {
    "53100": "no room on its disk; nothing was changed. Make room and go on",
    "53200": "it has no memory left; nothing was changed. Give it more, or take smaller batches",
    "25006": "it takes no changes (a standby, or set read-only); nothing was changed. Name its primary in the URL",
    "53400": "a limit of its configuration was reached; nothing was changed. Raise it and go on",
}


def may_try_again(exc: BaseException) -> bool:
    """Two steps were in each other's way and this one was undone."""
    return isinstance(exc, asyncpg.DeadlockDetectedError | asyncpg.SerializationError)


def is_refusal(exc: BaseException) -> bool:
    """The server said no to a statement; the connection is as good as before."""
    return isinstance(exc, asyncpg.PostgresError) and not (exc.sqlstate or "").startswith(_AWAY)


def timed_out(address: Address) -> StoreAwayError:
    return StoreAwayError(f"{address.place} did not answer within {address.timeout:g} s")


def explained(exc: BaseException, address: Address) -> ShoalError:
    """The error of a driver as one of ours."""
    place = address.place
    if isinstance(exc, ShoalError):
        return exc
    if isinstance(exc, TimeoutError):
        return timed_out(address)
    if isinstance(exc, asyncpg.PostgresError):
        return _explained(exc, exc.sqlstate or "", place)
    if isinstance(exc, asyncpg.ClientConfigurationError):
        return StoreError(f"the URL can't be used: {exc}")
    if isinstance(exc, ssl.SSLError) or (isinstance(exc, ConnectionError) and "SSL" in str(exc)):
        return StoreError(f"{place}: no connection with TLS ({exc}); check its certificate and ?sslmode=")
    if isinstance(exc, OSError | EOFError):
        said = getattr(exc, "strerror", None) or exc
        return StoreAwayError(f"{place} can't be reached: {said}")
    if isinstance(exc, asyncpg.InternalClientError) or "closed" in str(exc):  # the server ended it while it was idle
        return StoreAwayError(f"the connection to {place} was lost")
    if isinstance(exc, asyncpg.InterfaceError):
        return FrontierError(f"{place}: {exc}; nothing was changed")
    return StoreError(f"{place} can't be used: {exc!r:.200}")


def _explained(exc: asyncpg.PostgresError, code: str, place: str) -> ShoalError:
    said = str(exc).splitlines()[0][:300] if str(exc) else type(exc).__name__
    if code == NO_RUN:
        return RunError("the run was deleted; nothing was changed")
    if code == QUEUE_FULL:
        return QueueFullError("the queue holds its maximum; nothing was pushed")
    if code == FENCED:
        return FencedError(said)
    if code == REWOUND:
        return StoreRewoundError(f"{place} went back in time: {said}; nothing was changed")
    if code.startswith(_AWAY):
        return StoreAwayError(f"{place} is not there now: {said}")
    if code in _REFUSED:
        return StoreError(f"{place}: {said}: {_REFUSED[code]}")
    if code in _TROUBLE:
        return FrontierError(f"{place}: {_TROUBLE[code]} ({said})")
    if code == "3F000":
        return StoreError(f"{place} lacks the functions of this version: a newer Shoal changed its tables; upgrade")
    if code.startswith("42"):
        return StoreError(f"{place}: its tables are not as they should be ({said}); name another schema")
    if code.startswith("XX"):
        return StoreError(f"{place} is damaged or has a bug ({said}); look at its log")
    return FrontierError(f"{place}: {said}; nothing was changed")
