"""All errors that Shoal raises on purpose.

::

    ShoalError
    ├── ConfigError                  an unknown setting or a bad value
    │   └── DefinitionError          an invalid schedule; names the wrong key (shoal.operations.schedules)
    ├── SpiderError                  a spider file or class that Shoal cannot use
    │   └── PartialOutputError       a callback that failed after some output, which is kept
    ├── RequestError                 an invalid request: bad URL, method or callback
    │   ├── NotStorableError         a value that the frontier cannot store (shoal.scrapy)
    │   ├── SessionTooLargeError     a batch larger than a session may be (shoal.api.batch)
    │   └── TooManyNamesError        a batch with too many internationalized host names (shoal.api.batch)
    ├── SelectorError                an invalid CSS, XPath or JMESPath query
    ├── SitemapError                 a page that is not a sitemap, or a sitemap beyond the limits
    ├── FetchError                   a page that was not fetched; says whether a retry can help
    │   ├── FileTooLargeError        a downloaded file that is too large for its store
    │   ├── ProxyError               the proxy itself failed: unreachable, or refuses its user
    │   ├── ScrapyFetchError         a middleware or a rule of Scrapy refused a page (shoal.scrapy)
    │   └── TooComplexError          a page that needs too much memory or time to parse
    ├── LoginError                   a login failed
    ├── FileStoreError               the store of downloaded files failed
    ├── ArchiveError                 a file of an archive is missing or damaged (shoal.sinks)
    ├── PluginError                  a plugin that is broken, or a name that several plugins have
    ├── BrowserError                 a browser that cannot be started
    ├── TorError                     Tor cannot start, or cannot reach its network
    ├── ItemError                    an item that cannot be stored
    │   └── DropItem                 raised by a pipeline to drop an item
    ├── SinkError                    an output that cannot be opened or written
    │   ├── ItemsLostError           the item log lacks items; the output has all others (shoal.sinks)
    │   ├── OutputChangedError       another program changed the output; it must be restored or replaced
    │   ├── OutputExistsError        a file has content that this run did not write (shoal.sinks)
    │   ├── OutputTakenError         the output has a newer writer; nothing was changed
    │   ├── RoleTakenError           another process writes to this output (shoal.sinks)
    │   └── SinkBusyError            another process has locked this output (shoal.sinks)
    ├── RunError                     a run that does not exist or has the wrong state
    ├── TooManySessionsError         the server runs as many sessions as it may (shoal.api.batch)
    ├── PageFailedError              a page of a Celery task failed: its reason, for Flower (shoal.api.celery)
    ├── BrokerAwayError              the Celery broker cannot be reached (shoal.api.celery)
    ├── CoordinatorError             a cluster's coordinator failed
    │   ├── NameTakenError           a live member of the cluster has this name
    │   ├── SessionLostError         this member's session expired; another may have its slot
    │   └── CoordinatorAwayError     the coordinator's server cannot be reached
    └── FrontierError                the store of URLs failed
        ├── QueueFullError           the queue is full; nothing was stored
        ├── LeaseLostError           the lease is no longer valid; nothing was changed
        ├── RoleLostError            another process has taken over this role (shoal.crawling)
        ├── FencedError              the cluster slot has a new holder; nothing was changed
        ├── StoreBusyError           another process uses this store
        ├── StoreAwayError           the store cannot be reached, or cannot change anything now
        │   └── StoreFullError       the store has no room left
        ├── StoreRewoundError        the store lost changes that it had acknowledged
        └── StoreError               the store cannot be opened, is damaged, or is not a Shoal store

Errors of libraries are wrapped where they occur, with ``raise ... from exc``.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from datetime import timedelta

from msgspec import MsgspecError

DECODING_ERRORS = (MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding data of other programs raises: it has another form, is no UTF-8, or is nested too deeply."""
LIBRARIES = (
    os.path.dirname(__file__) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Beginnings of file names that are not code of the user."""


class ShoalError(Exception):
    """The base class: ``except ShoalError`` catches every error that Shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """A setting is unknown or has a bad value. The message names the key and its source."""


class SpiderError(ShoalError):
    """Shoal cannot use a spider file or class."""


class PartialOutputError(SpiderError):
    """A callback failed, and its cause is the error. ``outputs`` are the items and requests that it had returned
    before: they are kept, and the page counts as failed."""

    def __init__(self, outputs: list[object]) -> None:
        super().__init__("the callback failed after some output")
        self.outputs = outputs


class RequestError(ShoalError, ValueError):
    """A request is invalid."""


class SelectorError(ShoalError, ValueError):
    """A CSS, XPath or JMESPath query is invalid, or its document is."""


class SitemapError(ShoalError):
    """A page is not a sitemap, or the sitemap is damaged or exceeds a limit."""


class FetchError(ShoalError):
    """A page was not fetched.

    ``kind`` is a short label for statistics (``timeout``, ``dns``, ``http 404`` ...). ``retryable`` says whether a
    retry can help. ``retry_after`` is the delay that the server asked for. ``contacted`` is False if nothing was sent
    to the host, so its delay does not apply. ``status`` is the HTTP status, or 0. ``response`` is the page, if the
    server sent one with an error status. ``socks_reply`` is the reply code of a SOCKS proxy that did not connect, or 0.
    """

    response: object = None
    socks_reply: int = 0

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


class FileTooLargeError(FetchError):
    """A file was downloaded, but its store cannot hold a file of this size."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="file store", retryable=False)


class ProxyError(FetchError):
    """The proxy itself failed, whatever the host is. Without ``retryable`` it refuses user and password, or does not
    speak its protocol."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message, kind="proxy", retryable=retryable, contacted=False)


class TooComplexError(FetchError):
    """Parsing or converting a page would need far more memory or time than its size explains."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="too complex", retryable=False)


class LoginError(ShoalError):
    """A login failed. ``retryable``: another attempt may succeed."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class FileStoreError(ShoalError):
    """The store of downloaded files failed, whatever the file is. Without ``retryable`` a retry cannot help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class PluginError(ShoalError):
    """A plugin cannot be imported, or several packages have a plugin of this name."""


class TorError(ShoalError):
    """Tor is not installed, cannot start, or cannot reach its network."""


class BrowserError(ShoalError):
    """The browser cannot be started. The message says what to install or change."""


class ItemError(ShoalError):
    """An item cannot be stored."""


class DropItem(ItemError):
    """Raise it in a pipeline to drop an item. The item is counted as dropped, not as an error."""


class SinkError(ShoalError):
    """An output cannot be opened or written."""


class OutputChangedError(SinkError):
    """Another program removed, moved, replaced or changed the output. The message says what to do."""

    def add(self, sentence: str) -> None:
        """Add to the message."""
        self.args = (f"{self}. {sentence}",)


class OutputTakenError(SinkError):
    """The output was opened under a newer epoch. Nothing was changed.

    The drainer then checks its role: if it lost the role it stops, otherwise it claims the role above this epoch."""

    def __init__(self, name: str, epoch: int) -> None:
        super().__init__(f"another process of this run took over {name}")
        self.epoch = epoch


class RunError(ShoalError):
    """A run does not exist, or its state does not allow the operation."""


class CoordinatorError(ShoalError):
    """The coordinator of a cluster failed, or its data is not a Shoal cluster."""


class NameTakenError(CoordinatorError):
    """A live member of the cluster has this name."""


class SessionLostError(CoordinatorError):
    """This member sent no heartbeat for too long and counts as dead. Another member may have its slot."""


class CoordinatorAwayError(CoordinatorError):
    """The coordinator's server cannot be reached or does not answer. A retry may succeed."""


class FrontierError(ShoalError):
    """The store of URLs failed."""


class QueueFullError(FrontierError):
    """An explicit push exceeded the maximum queue size. Nothing was stored; push again later."""


class LeaseLostError(FrontierError):
    """The lease's token is no longer valid: another worker has the request. Nothing was changed."""


class FencedError(FrontierError):
    """A cluster slot is held under a later epoch. The request of the old holder was refused."""


class StoreBusyError(FrontierError):
    """Another process uses this store."""


class StoreAwayError(FrontierError):
    """The store cannot be reached, does not answer, or cannot change anything now (a failover, a full disk). The call
    was either applied completely or not at all. It may be repeated."""


class StoreFullError(StoreAwayError):
    """The store has no room: its memory or its disk is full, or what the API may use of it. Nothing was changed. The
    call succeeds when there is room again."""


class StoreRewoundError(FrontierError):
    """The store went back in time: it lost a change that it had acknowledged. Nothing was changed.

    Possible causes: a restored backup, a promoted replica that lagged behind, or a power cut before the last second
    reached the disk. Discard everything you learned from the store, call ``Frontier.recover``, and continue from the
    store's state.
    """


class StoreError(FrontierError):
    """The store cannot be opened, is damaged, or is not a Shoal store."""


# The names in other crawlers.
QueueFullException = QueueFullError
QueueConnectionException = FilterConnectionException = StoreAwayError


def describe(exc: BaseException, method: str | None = None) -> str:
    """The exception, the method of the spider, and the last line of the user's own files in the traceback: ``ValueError
    in parse: no price (shop.py, line 12)``. An error that Shoal raises after the callback has no such line."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if not own and not isinstance(exc, ShoalError):
        own = list(frames)
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(exc).__name__}{f' in {method}' if method else ''}: {text_of(exc)}{place}"


def text_of(exc: BaseException) -> str:
    """The text of an exception. One of the user may not have any."""
    try:
        return str(exc)
    except Exception:  # its `__str__` may raise anything
        return "its text cannot be shown"
