"""What an error of Redis means, and what to do about it. The only place that knows redis-py's exceptions."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from shoal.errors import FencedError, FrontierError, RunError, ShoalError, StoreAwayError, StoreError, StoreRewoundError
from shoal.frontier.redis.address import Address
from shoal.frontier.redis.receipts import MESSAGE

_CODE = re.compile(
    r"\b(NORUN|REWOUND|FENCED|OOM|MISCONF|READONLY|WRONGTYPE|LOADING|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|NOPERM"
    r"|NOAUTH|WRONGPASS|MOVED|ASK|CROSSSLOT|DENIED)\b"
)
_PASSING = frozenset({"READONLY", "LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "ASK"})


def explained(exc: Exception, address: Address) -> ShoalError:
    """The error of ours that says what happened and what to do."""
    where = address.shown
    if isinstance(exc, exceptions.RedisClusterException):  # what the nodes said is behind it
        exc = next((each for each in _chain(exc) if isinstance(each, exceptions.RedisError)), exc)
    if address.tls and (problem := _tls_problem(exc)):
        return StoreError(f"no TLS with {where}: {problem}")
    code, text = _code_of(exc), _text_of(exc)
    if code == "NORUN":
        return RunError("there is no such run any more: it was deleted, or the server has lost its data")
    if code == "REWOUND":
        return StoreRewoundError(MESSAGE)
    if code == "FENCED":
        return FencedError(f"{text.removeprefix('FENCED ')}; nothing is given to an earlier one")
    if isinstance(exc, exceptions.AuthenticationError) or code in ("NOAUTH", "WRONGPASS"):
        return StoreError(f"{where} refuses the login ({text}); give user and password as redis://user:password@host")
    if code == "NOPERM":
        return StoreError(f"the Redis user of {where} may not do what Shoal needs ({text}); {_acl(address)}")
    if code in _PASSING:
        return StoreAwayError(f"{where} can't work now ({text}); it may be back in a moment")
    if code == "OOM":
        return FrontierError(
            f"{where} has used up its memory (maxmemory); nothing was changed. Raise maxmemory, or delete runs"
        )
    if code == "MISCONF":
        return FrontierError(f"{where} can't write to its disk ({text}); nothing was changed. Look at the disk")
    if code == "WRONGTYPE":
        return StoreError(
            f"a key of {where} is not what Shoal made it: something else uses the prefix {address.prefix!r}; "
            "choose another with ?prefix=name"
        )
    if code in ("MOVED", "CROSSSLOT"):
        return StoreError(f"{where} is a node of a cluster; write redis+cluster://host:port")
    if isinstance(exc, exceptions.InvalidResponse):
        return StoreError(f"what answers at {where} is not Redis; look at host and port")
    if isinstance(exc, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError):
        hint = "; if it wants TLS, write rediss://" if not address.tls and re.search("closed|reset", text) else ""
        return StoreAwayError(f"{where} can't be reached or does not answer ({text}){hint}")
    if isinstance(exc, exceptions.RedisClusterException | exceptions.ClusterError):
        return StoreAwayError(f"the cluster at {where} can't be reached ({text})")
    if "cluster support disabled" in text:
        return StoreError(f"{where} is no node of a cluster; write redis://host:port/0")
    if "unknown command 'SENTINEL'" in text:
        return StoreError(f"{where} is no sentinel; write redis://host:port/0")
    if "user_script" in text:
        return StoreError(f"what is stored at {where} can't be read ({text}): something else has changed it")
    return StoreError(f"{where} refuses: {text}")


def _acl(address: Address) -> str:
    return f"allow it: ACL SETUSER name on >password ~{address.prefix}* +@all -@dangerous +info"


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _code_of(exc: Exception) -> str:
    """The first word of the server's answer. Before Redis 7 an error inside a script has it in its middle."""
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
"""Older versions of the library take the word away."""


def _text_of(exc: Exception) -> str:
    """What the server or the system said, without what only a programmer of scripts wants to know."""
    if isinstance(exc, MasterNotFoundError):  # whose text shows how it is logged in
        return "no sentinel that answers knows a master of that name"
    text = re.sub(r" script: [0-9a-f]{40}.*", "", str(exc), flags=re.DOTALL).strip().rstrip(".")
    return text or type(exc).__name__


def _tls_problem(exc: Exception) -> str:
    for each in _chain(exc):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({each.verify_message}); name its CA with ?ssl_ca_certs=file"
        if isinstance(each, ssl.SSLError) and each.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "it does not speak TLS there; write redis:// instead of rediss://"
        if isinstance(each, ssl.SSLError) and each.reason and "CERTIFICATE" in each.reason:
            return f"{each.reason.lower().replace('_', ' ')}; see ?ssl_certfile= and ?ssl_keyfile="
        if isinstance(each, FileNotFoundError | PermissionError):
            return f"can't read a file that the URL names ({each.strerror})"
    return ""
