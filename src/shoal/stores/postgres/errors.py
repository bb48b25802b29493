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
    StoreFullError,
    StoreRewoundError,
)
from shoal.stores.postgres.address import PostgresAddress
from shoal.stores.severity import Meaning, Severity, meaning_of

NO_RUN, QUEUE_FULL, FENCED, REWOUND = "SH001", "SH002", "SH003", "SH004"
"""Error codes that Shoal's functions in the database raise."""
CONFLICT = "40001"
"""PostgreSQL's code for a call that conflicts with another one. It is retried."""

_NOTHING = "nothing was changed"
_AWAY, _UNCERTAIN, _FINAL = Severity.AWAY, Severity.UNCERTAIN, Severity.FINAL
CODES = {
    "08": Meaning(_AWAY),  # connection exceptions; poolers use 08P01 for a server that they cannot reach
    "0A": Meaning(_FINAL),  # not supported
    "21": Meaning(_FINAL),  # cardinality
    "22": Meaning(_FINAL),  # a value that does not fit
    "23": Meaning(_FINAL),  # a constraint, which another program added
    "23505": Meaning(_UNCERTAIN),  # two calls that insert the same row at the same moment
    "25006": Meaning(
        _AWAY,
        "it is read-only: a failover is under way, it is a standby, or an administrator made it so; "
        f"{_NOTHING}. If it stays so, name its primary in the URL",
    ),
    "25P03": Meaning(_AWAY),  # the server ended a connection that was idle in a transaction
    "25P04": Meaning(_AWAY),  # transaction_timeout
    "28": Meaning(_FINAL, "this user may not connect; check the user in the URL"),
    "28000": Meaning(
        _FINAL,
        "this user may not connect (pg_hba.conf); check the user, and whether TLS is required (?sslmode=require)",
    ),
    "28P01": Meaning(_FINAL, "the password is wrong or missing; check it in the URL"),
    "3D000": Meaning(_FINAL, "there is no such database; create it (createdb NAME), or name another in the URL"),
    "3F000": Meaning(_FINAL, "it lacks the functions of this version: a newer Shoal changed its tables; upgrade"),
    "40": Meaning(_AWAY),  # conflicts with other calls: the client has tried several times, the load will end
    "42": Meaning(_FINAL, "another program has changed Shoal's tables; use another ?schema=name"),
    "42501": Meaning(
        _FINAL, "this user may not do that; GRANT CREATE ON DATABASE to it, or name a schema that it owns"
    ),
    "42704": Meaning(_FINAL, "check the options behind the ? in the URL"),
    "53": Meaning(_AWAY, f"it lacks resources; {_NOTHING}. Give it more"),
    "53100": Meaning(_AWAY, f"its disk is full; {_NOTHING}. Free some space", is_full=True),
    "53200": Meaning(_AWAY, f"it is out of memory; {_NOTHING}. Give it more memory, or use smaller batches"),
    "53300": Meaning(_AWAY),  # too many clients
    "53400": Meaning(_AWAY, f"a limit in its configuration was reached; {_NOTHING}. Raise the limit"),
    "54": Meaning(_FINAL),  # a value or a statement that is too large for it
    "55006": Meaning(_AWAY),  # an object is in use
    "55P03": Meaning(_AWAY),  # another program holds a lock
    "57": Meaning(_AWAY),  # it starts, stops or crashed, or an administrator or a timeout ended the call
    "58030": Meaning(_AWAY, f"its disk fails; {_NOTHING}. Check the disk"),
    "XX": Meaning(_UNCERTAIN, "it has a bug or is damaged; check its log"),
    "XX001": Meaning(_FINAL, "its data is damaged; check its log"),
    "XX002": Meaning(_FINAL, "an index is damaged; check its log, and REINDEX the schema"),
}
"""SQLSTATE codes, and classes of them. https://www.postgresql.org/docs/current/errcodes-appendix.html"""
_STILL_CONNECTED = ("40", "531", "532", "534", "55")
"""Errors that say *away* and leave the connection usable. After a failover only a new one leads to the primary."""


def severity(code: str) -> Severity:
    """What an error with this SQLSTATE means."""
    return meaning_of(code, CODES).severity


def is_retryable(exc: BaseException) -> bool:
    """Whether the call conflicted with another one and was rolled back."""
    return isinstance(exc, asyncpg.DeadlockDetectedError | asyncpg.SerializationError)


def is_refusal(exc: BaseException) -> bool:
    """Whether the server refused a statement, and the connection is still usable."""
    if not isinstance(exc, asyncpg.PostgresError):
        return False
    code = exc.sqlstate or ""
    return severity(code) is not Severity.AWAY or code.startswith(_STILL_CONNECTED)


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
    meaning = meaning_of(code, CODES)
    told = f"{place}: {meaning.advice} ({text})" if meaning.advice else f"{place}: {text}; {_NOTHING}"
    if meaning.severity is Severity.AWAY:
        away = StoreFullError if meaning.is_full else StoreAwayError
        return away(told if meaning.advice else f"{place} is not available: {text}")
    return StoreError(told) if meaning.severity is Severity.FINAL else FrontierError(told)
