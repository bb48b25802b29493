"""The rules of identities: how long they rest, which error is whose fault, and what a failure costs. They do no I/O."""

from __future__ import annotations

from enum import Enum, auto

from shoal.config import IdentitySettings
from shoal.errors import FetchError, ProxyError

_UNRELATED = frozenset({"too large", "request", "address"})
"""Kinds of errors that no other identity would change."""


class Fault(Enum):
    """Whose fault a failed fetch is."""

    REFUSED = auto()
    """The proxy refuses this user, or is not a proxy: a retry cannot help."""
    PROXY = auto()
    """The proxy can't be reached."""
    UNSURE = auto()
    """The host's, or that of a proxy that lies."""
    PAGE = auto()
    """The page's own."""


def fault_of(error: FetchError) -> Fault:
    """Whose fault it is that a page was not fetched through a proxy."""
    if isinstance(error, ProxyError):
        return Fault.PROXY if error.retryable else Fault.REFUSED
    if error.status or error.kind in _UNRELATED:
        return Fault.PAGE
    return Fault.UNSURE


def rest_seconds(settings: IdentitySettings, streak: int, retry_after: float = 0.0) -> float:
    """How long an identity rests after a block. ``streak``: blocks before it without a page in between.

    The time doubles with each block in a row, and is never shorter than the host asked for.
    """
    return max(min(settings.rest * 2.0 ** min(streak, 30), settings.max_rest), retry_after)


def is_removed(settings: IdentitySettings, failures: int, since: float) -> bool:
    """Whether an identity that failed so often in a row, over so many seconds, is removed."""
    return failures >= settings.max_failures and since >= settings.remove_after


def free_failures(settings: IdentitySettings, identities: int) -> int:
    """How many failures of a page that may be the fault of a proxy cost it no attempt: enough for every other
    identity to try, up to a limit."""
    return min(settings.max_blocks, max(0, identities - 1))
