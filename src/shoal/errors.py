"""Every error that Shoal raises on purpose.

::

    ShoalError
    ├── ConfigError          a setting: names the key and the layer it came from
    ├── SpiderError          a spider file or class that can't be used
    ├── RequestError         a request that can't be made: bad URL, method or callback
    ├── SelectorError        a CSS or XPath query that can't be read
    ├── FetchError           a page that could not be had; says whether a retry can help
    │   └── TooComplexError  a page that takes too much memory or time to parse
    ├── ItemError            an item that can't be stored
    │   └── DropItem         raised by a pipeline to drop an item on purpose
    ├── SinkError            an output that can't be opened or written
    ├── RunError             a run that does not exist, or is not in the right state
    ├── CoordinatorError     the members and slots of a cluster
    │   ├── NameTakenError   a living member of the cluster has this name
    │   ├── SessionLostError this member was taken for dead; others may have its slot
    │   └── CoordinatorAwayError   its server can't be reached or does not answer now
    └── FrontierError        the store of URLs
        ├── QueueFullError   an explicit push past the maximum; nothing was recorded
        ├── LeaseLostError   the lease's token is no longer current; nothing was changed
        ├── FencedError      a slot of a cluster has another holder now; nothing was given to the old one
        ├── StoreBusyError   another process works on this store
        ├── StoreAwayError   its server can't be reached or does not answer now; it may be back in a moment
        ├── StoreRewoundError   the store went back in time: what this client knows of it is no longer true
        └── StoreError       the store can't be opened, is corrupt, or is something else

Errors of libraries are wrapped at the border, with ``raise ... from exc``.
"""

from __future__ import annotations

from datetime import timedelta


class ShoalError(Exception):
    """The root: ``except ShoalError`` catches whatever Shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """A setting is unknown or has a bad value."""


class SpiderError(ShoalError):
    """A spider file or class can't be used."""


class RequestError(ShoalError, ValueError):
    """A request can't be made from what was given."""


class SelectorError(ShoalError, ValueError):
    """A CSS or XPath query can't be read."""


class FetchError(ShoalError):
    """A page could not be had.

    ``kind`` is a short word that failures are counted by (``timeout``, ``dns``, ``http 404`` ...). ``retryable`` says
    whether another attempt can help, ``retry_after`` how long the server asked to wait. ``contacted`` is False when
    nothing was sent to the host, so that its delay need not be kept. ``status`` is the HTTP status if there was one.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        retryable: bool,
        status: int = 0,
        retry_after: timedelta | None = None,
        contacted: bool = True,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after
        self.contacted = contacted


class TooComplexError(FetchError):
    """A page is built so that parsing or converting it would take far more memory or time than its size explains."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="too complex", retryable=False)


class ItemError(ShoalError):
    """An item can't be stored."""


class DropItem(ItemError):
    """Raised by a pipeline: this item is not wanted. It is counted, not an error."""


class SinkError(ShoalError):
    """An output can't be opened or written."""


class RunError(ShoalError):
    """A run does not exist, or is not in the state that this needs."""


class CoordinatorError(ShoalError):
    """The coordinator of a cluster could not do what was asked, or is something else."""


class NameTakenError(CoordinatorError):
    """A living member of the cluster has this name."""


class SessionLostError(CoordinatorError):
    """This member was not heard of for too long, and was taken for dead: others may have its slot by now."""


class CoordinatorAwayError(CoordinatorError):
    """The coordinator's server can't be reached, or does not answer. It may be back in a moment."""


class FrontierError(ShoalError):
    """The store of URLs could not do what was asked."""


class QueueFullError(FrontierError):
    """An explicit push went past the maximum queue size. Nothing was recorded; push it again later."""


class LeaseLostError(FrontierError):
    """The lease's token is no longer current: someone else has the request now. Nothing was changed."""


class FencedError(FrontierError):
    """A slot of a cluster is held under a later epoch: what this one asked for was not given."""


class StoreBusyError(FrontierError):
    """Another process works on this store."""


class StoreAwayError(FrontierError):
    """The store's server can't be reached, or does not answer. What was asked of it was done whole or not at all."""


class StoreRewoundError(FrontierError):
    """The store went back in time: it does not know a change that it had acknowledged. Nothing was changed.

    A restored backup, a promoted replica that lagged behind, or a power cut before the last second reached the disk.
    Drop everything that was learned from the store, call ``Frontier.recover``, and continue from what the store has.
    """


class StoreError(FrontierError):
    """The store can't be opened, is corrupt, or is something else."""
