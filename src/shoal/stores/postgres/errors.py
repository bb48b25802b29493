"""Turns the errors of asyncpg into Shoal's errors. Their messages never show a password."""

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
from shoal.stores.postgres.address import PostgresAddress

NO_RUN, QUEUE_FULL, FENCED, REWOUND = "SH001", "SH002", "SH003", "SH004"
"""Error codes that Shoal's functions in the database raise."""
CONFLICT = "40001"
"""PostgreSQL's code for a call that conflicts with another one. It is retried."""

_AWAY = ("08", "57P", "53300", "25P03", "57014")
"""The connection failed, the server starts or shuts down, it has too many clients, or an administrator cancelled."""
_REFUSED = {
    "28000": "this user may not connect (pg_hba.conf); check the user, and whether TLS is required (?sslmode=require)",
    "28P01": "the password is wrong or missing; check it in the URL",
    "3D000": "there is no such database; create it (createdb NAME), or name another in the URL",
    "42704": "check the options behind the ? in the URL",
    "42501": "this user may not do that; GRANT CREATE ON DATABASE to it, or name a schema that it owns",
}
_TROUBLE = {
    "53100": "its disk is full; nothing was changed. Free some space",
    "53200": "it is out of memory; nothing was changed. Give it more memory, or use smaller batches",
    "25006": "it is read-only (a standby, or set so); nothing was changed. Name its primary in the URL",
    "53400": "a limit in its configuration was reached; nothing was changed. Raise the limit",
}


def is_retryable(exc: BaseException) -> bool:
    """Whether the call conflicted with another one and was rolled back."""
    return isinstance(exc, asyncpg.DeadlockDetectedError | asyncpg.SerializationError)


def is_refusal(exc: BaseException) -> bool:
    """Whether the server refused a statement, and the connection is still usable."""
    return isinstance(exc, asyncpg.PostgresError) and not (exc.sqlstate or "").startswith(_AWAY)


def timed_out(address: PostgresAddress) -> StoreAwayError:
    return StoreAwayError(f"{address.place} did not answer within {address.timeout:g} s")


def explain(exc: BaseException, address: PostgresAddress) -> ShoalError:
    """The error to raise instead: it says what failed, why, and what to do."""
    place = address.place
    if isinstance(exc, ShoalError):
        return exc
    if isinstance(exc, TimeoutError):
        return timed_out(address)
    if isinstance(exc, asyncpg.PostgresError):
        return _explain_answer(exc, exc.sqlstate or "", place)
    if isinstance(exc, asyncpg.ClientConfigurationError):
        return StoreError(f"invalid PostgreSQL URL: {exc}")
    if isinstance(exc, ssl.SSLError) or (isinstance(exc, ConnectionError) and "SSL" in str(exc)):
        return StoreError(f"no TLS connection to {place} ({exc}); check its certificate and ?sslmode=")
    if isinstance(exc, OSError | EOFError):
        return StoreAwayError(f"cannot reach {place}: {getattr(exc, 'strerror', None) or exc}. Is it running?")
    if isinstance(exc, asyncpg.InternalClientError) or "closed" in str(exc):  # the server closed it while it was idle
        return StoreAwayError(f"the connection to {place} was lost")
    if isinstance(exc, asyncpg.InterfaceError):
        return FrontierError(f"{place}: {exc}; nothing was changed")
    return StoreError(f"cannot use {place}: {exc!r:.200}")


def _explain_answer(exc: asyncpg.PostgresError, code: str, place: str) -> ShoalError:
    text = str(exc).splitlines()[0][:300] if str(exc) else type(exc).__name__
    if code == NO_RUN:
        return RunError("the run was deleted; nothing was changed")
    if code == QUEUE_FULL:
        return QueueFullError("the queue is full; nothing was pushed")
    if code == FENCED:
        return FencedError(text)
    if code == REWOUND:
        return StoreRewoundError(f"{place} went back in time: {text}. Nothing was changed; call recover()")
    if code.startswith(_AWAY):
        return StoreAwayError(f"{place} is not available: {text}")
    if code in _REFUSED:
        return StoreError(f"{place}: {text}: {_REFUSED[code]}")
    if code in _TROUBLE:
        return FrontierError(f"{place}: {_TROUBLE[code]} ({text})")
    if code == "3F000":
        return StoreError(f"{place} lacks the functions of this version: a newer Shoal changed its tables; upgrade")
    if code.startswith("42"):
        return StoreError(f"{place}: another program has changed Shoal's tables ({text}); use another ?schema=name")
    if code.startswith("XX"):
        return StoreError(f"{place} is damaged or has a bug ({text}); check its log")
    return FrontierError(f"{place}: {text}; nothing was changed")
