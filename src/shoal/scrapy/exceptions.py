"""The exceptions that spiders, pipelines and middlewares raise or receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal import errors

if TYPE_CHECKING:
    from shoal.scrapy.response import Response


class CloseSpider(Exception):
    """Raised in a callback to end the crawl, with a reason."""

    def __init__(self, reason: str = "cancelled") -> None:
        super().__init__(reason)
        self.reason = reason


class DontCloseSpider(Exception):
    """Raised by a handler of ``spider_idle`` to keep the crawl open."""


class IgnoreRequest(Exception):
    """Raised by a downloader middleware to drop a request."""


class DropItem(errors.DropItem):
    """Raised by a pipeline to drop an item."""

    def __init__(self, message: str = "", log_level: str | None = None) -> None:
        super().__init__(message)
        self.log_level = log_level


class NotConfigured(Exception):
    """Raised by a pipeline, middleware or extension to be left out."""


class NotSupported(Exception):
    """The operation is not supported, such as a query of a response without text."""


class StopDownload(Exception):
    """Raised to stop the download of a body. It has no effect: Shoal has read the whole body by then."""

    def __init__(self, *, fail: bool = True) -> None:
        super().__init__()
        self.fail = fail


class ScrapyDeprecationWarning(Warning):
    """A warning about a feature that is deprecated in Scrapy."""


class UsageError(Exception):
    """A wrong use of a command."""


class HttpError(IgnoreRequest):
    """An errback's failure: the response has a status that the spider does not handle."""

    def __init__(self, response: Response, *arguments: object) -> None:
        super().__init__(*arguments)
        self.response = response


# -- errors of the network, as Twisted names them


class ConnectError(Exception):
    """No connection was made."""


class ConnectionRefusedError(ConnectError):
    """The host refused the connection."""


class TCPTimedOutError(ConnectError):
    """No connection was made in time."""


class TimeoutError(Exception):
    """The page did not arrive in time."""


class DNSLookupError(OSError):
    """The host name has no address."""


class ConnectionLost(Exception):
    """The host closed the connection."""


class ConnectionDone(ConnectionLost):
    """The host closed the connection cleanly, but too early."""


class ResponseFailed(Exception):
    """The response is incomplete or invalid."""

    def __init__(self, reasons: object = (), response: object = None) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        self.response = response


class TunnelError(Exception):
    """The proxy did not connect to the host."""


# -- the same errors, as Scrapy names them since 2.14; they are also the older ones


class DownloadFailedError(Exception):
    """The page was not fetched."""


class CannotResolveHostError(DNSLookupError):
    """The host name has no address."""


class DownloadConnectionRefusedError(ConnectionRefusedError):
    """The host refused the connection."""


class DownloadTimeoutError(TimeoutError):
    """The page did not arrive in time."""


class DownloadConnectTimeoutError(DownloadTimeoutError, TCPTimedOutError):
    """No connection was made in time."""


class DownloadConnectError(DownloadFailedError, ConnectError):
    """No connection was made."""


class DownloadConnectionLostError(DownloadFailedError, ConnectionLost):
    """The host closed the connection."""


class DownloadTunnelError(DownloadFailedError, TunnelError):
    """The proxy did not connect to the host."""


class InvalidResponseError(DownloadFailedError, ResponseFailed):
    """The response is invalid."""


class ResponseDataLossError(ResponseFailed):
    """The response is incomplete."""


class UnsupportedURLSchemeError(NotSupported):
    """Only http:// and https:// are fetched."""


class DownloadCancelledError(Exception):
    """The download was cancelled."""
