"""Turns the errors of redis-py into Shoal's errors. No other module handles redis-py's exceptions."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from shoal.errors import (
    FencedError,
    FrontierError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreRewoundError,
)
from shoal.stores.redis.address import RedisAddress
from shoal.stores.severity import Meaning, Severity

NO_RUN, REWOUND, FENCED = "NORUN", "REWOUND", "FENCED"
"""The first words of errors that Shoal's own scripts return."""

_NOTHING = "nothing was changed"
_AWAY, _FINAL = Severity.AWAY, Severity.FINAL
CODES = {
    "ASK": Meaning(_AWAY),  # a cluster moves the store to another node
    "BUSY": Meaning(_AWAY),  # another script takes too long
    "CLUSTERDOWN": Meaning(_AWAY),
    "INPROG": Meaning(_AWAY),  # a failover is under way
    "IOERR": Meaning(_AWAY),
    "LOADING": Meaning(_AWAY),
    "MASTERDOWN": Meaning(_AWAY),
    "MISCONF": Meaning(_AWAY, f"cannot write to its disk; {_NOTHING}. Check the disk", is_full=True),
    "NOGOODSLAVE": Meaning(_AWAY),
    "NOMASTERLINK": Meaning(_AWAY),
    "NOREPLICAS": Meaning(_AWAY),
    "NOSCRIPT": Meaning(_AWAY),  # it was restarted between two calls: the client sends the whole script
    "OOM": Meaning(_AWAY, f"is out of memory (maxmemory); {_NOTHING}. Raise maxmemory or delete runs", is_full=True),
    "READONLY": Meaning(_AWAY),  # a failover is under way
    "REDIRECT": Meaning(_AWAY),  # the same, in Valkey
    "TRYAGAIN": Meaning(_AWAY),
    "UNBLOCKED": Meaning(_AWAY),  # a call that waited when the server became a replica
    "UNKILLABLE": Meaning(_AWAY),  # another script takes too long, and has written
    "CROSSSLOT": Meaning(_FINAL, "is a node of a Redis Cluster; write redis+cluster://host:port"),
    "DENIED": Meaning(_FINAL),  # protected mode
    "EXECABORT": Meaning(_FINAL),
    "MOVED": Meaning(_FINAL, "is a node of a Redis Cluster; write redis+cluster://host:port"),
    "NOAUTH": Meaning(_FINAL, "refuses the login; give user and password as redis://user:password@host"),
    "NOPERM": Meaning(
        _FINAL,
        "refuses a command of this user, who has too few permissions; "
        "run ACL SETUSER name on >password ~{prefix}* +@all -@dangerous +info",
    ),
    "NOPROTO": Meaning(_FINAL),
    "WRONGPASS": Meaning(_FINAL, "refuses the login; give user and password as redis://user:password@host"),
    "WRONGTYPE": Meaning(
        _FINAL,
        "has a key under the prefix {prefix!r} that another program has written; "
        "choose another prefix with ?prefix=name",
    ),
}
"""First words of the errors of Redis and Valkey. ``ERR`` is final: the server did not understand a command. Another
word is uncertain."""

_CODE = re.compile(rf"\b({'|'.join((NO_RUN, REWOUND, FENCED, *CODES))})\b")


def explain(exc: Exception, address: RedisAddress) -> ShoalError:
    """The error to raise instead: it says what failed, why, and what to do."""
    where = address.shown
    if isinstance(exc, exceptions.RedisClusterException):  # the answer of a node is its cause
        exc = next((each for each in _chain(exc) if isinstance(each, exceptions.RedisError)), exc)
    if address.tls and (problem := _tls_problem(exc)):
        return StoreError(f"no TLS connection to {where}: {problem}")
    code, text = _code_of(exc), _text_of(exc)
    if error := _script_error(code, text, where):
        return error
    if isinstance(exc, exceptions.AuthenticationError):
        code = "NOAUTH"
    if code == "MOVED" and address.kind == "cluster":
        code = "ASK"  # the client follows these itself, as often as it may
    if code not in CODES:
        return _other_error(exc, text, address)
    meaning = CODES[code]
    if meaning.severity is Severity.AWAY:
        away = StoreFullError if meaning.is_full else StoreAwayError
        return away(
            f"{where} {meaning.advice} ({text})"
            if meaning.advice
            else f"{where} is not ready ({text}); try again in a moment"
        )
    advice = meaning.advice.format(prefix=address.prefix) or "refuses the command"
    return StoreError(f"{where} {advice} ({text})")


def _script_error(code: str, text: str, where: str) -> ShoalError | None:
    """Errors that Shoal's own scripts return."""
    if code == NO_RUN:
        return RunError("the run no longer exists: it was deleted, or the server lost its data")
    if code == REWOUND:
        return StoreRewoundError(
            f"{where} went back in time: a change that it had acknowledged is missing (a restored backup, a replica "
            "that lagged, a power cut). Nothing was changed; call recover()"
        )
    if code == FENCED:
        return FencedError(f"{text.removeprefix(FENCED).lstrip()}; calls under earlier epochs are refused")
    return None


def _other_error(exc: Exception, text: str, address: RedisAddress) -> ShoalError:
    where = address.shown
    if isinstance(exc, exceptions.InvalidResponse):
        return StoreError(f"the server at {where} is not Redis; check host and port")
    if isinstance(exc, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError):
        hint = "Is Redis running?" + (" If it requires TLS, write rediss://" if re.search("closed|reset", text) else "")
        return StoreAwayError(f"cannot reach {where}: {text}" + ("" if address.tls else f". {hint}"))
    if isinstance(exc, exceptions.RedisClusterException | exceptions.ClusterError):
        return StoreAwayError(f"cannot reach the cluster at {where}: {text}")
    if "cluster support disabled" in text:
        return StoreError(f"{where} is not a node of a cluster; write redis://host:port/0")
    if "unknown command 'SENTINEL'" in text:
        return StoreError(f"{where} is not a sentinel; write redis://host:port/0")
    if "user_script" in text:
        return StoreError(f"cannot read the data at {where} ({text}): another program has changed it")
    if re.match(r"[A-Z]{3,}\b(?!:)", text):  # a code that this version does not know
        return FrontierError(f"{where} refuses the command: {text}; {_NOTHING}")
    return StoreError(f"{where} refuses the command: {text}")


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _code_of(exc: Exception) -> str:
    """The first word of the server's answer. Before Redis 7 it is in the middle if a script failed."""
    status = getattr(exc, "status_code", None)
    if status not in (None, "ERR"):
        return str(status)
    found = _CODE.search(str(exc)) if isinstance(exc, exceptions.ResponseError) else None
    return found[1] if found else _BY_CLASS.get(type(exc), "")


_BY_CLASS: dict[type[BaseException], str] = {
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}
"""Older versions of redis-py remove the code from the text."""


def _text_of(exc: Exception) -> str:
    """The text of the error, without details of the script."""
    if isinstance(exc, MasterNotFoundError):  # its text shows the login
        return "no sentinel that answers knows a master of that name"
    text = re.sub(r" script: [0-9a-f]{40}.*", "", str(exc), flags=re.DOTALL).strip().rstrip(".")
    return text or type(exc).__name__


def _tls_problem(exc: Exception) -> str:
    for each in _chain(exc):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({each.verify_message}); name its CA with ?ssl_ca_certs=file"
        if isinstance(each, ssl.SSLError) and each.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "the server does not speak TLS on this port; write redis:// instead of rediss://"
        if isinstance(each, ssl.SSLError) and each.reason and "CERTIFICATE" in each.reason:
            return f"{each.reason.lower().replace('_', ' ')}; see ?ssl_certfile= and ?ssl_keyfile="
        if isinstance(each, FileNotFoundError | PermissionError):
            return f"cannot read a file that the URL names ({each.strerror})"
    return ""
