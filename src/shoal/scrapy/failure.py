"""``Failure``: the argument of an errback."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from shoal import errors
from shoal.scrapy import exceptions

if TYPE_CHECKING:
    from shoal.scrapy.request import Request


class Failure:
    """An error, with the request that failed. ``value`` is the exception."""

    def __init__(self, value: BaseException | None = None, request: Request | None = None) -> None:
        if value is None:
            import sys

            value = sys.exc_info()[1]
            if value is None:
                raise ValueError("a Failure needs an exception: pass one, or create it in an except block")
        self.value = value
        self.type = type(self.value)
        self.request = request

    @property
    def tb(self) -> TracebackType | None:
        return self.value.__traceback__

    def check(self, *kinds: type[BaseException] | str) -> type[BaseException] | str | None:
        """Return the first of these exception types that the error is an instance of; None if there is none. A type may
        be given by name."""
        for kind in kinds:
            if isinstance(kind, str):
                if any(kind in (base.__name__, f"{base.__module__}.{base.__name__}") for base in self.type.__mro__):
                    return kind
            elif isinstance(self.value, kind):
                return kind
        return None

    def trap(self, *kinds: type[BaseException] | str) -> type[BaseException] | str | None:
        """Like ``check``, but raise the error if it is none of these types."""
        kind = self.check(*kinds)
        if kind is None:
            raise self.value
        return kind

    def getErrorMessage(self) -> str:
        return str(self.value)

    def getTraceback(self, *arguments: object, **options: object) -> str:
        return "".join(traceback.format_exception(self.value))

    getBriefTraceback = getTraceback

    def printTraceback(self, *arguments: object, **options: object) -> None:
        print(self.getTraceback())

    def raiseException(self) -> None:
        raise self.value

    def __repr__(self) -> str:
        return f"<Failure {self.type.__module__}.{self.type.__name__}: {self.value}>"

    __str__ = __repr__


_NETWORK: dict[str, type[Exception]] = {
    "dns": exceptions.CannotResolveHostError,
    "connect": exceptions.DownloadConnectError,
    "reset": exceptions.DownloadConnectionLostError,
    "half body": exceptions.ResponseDataLossError,
    "protocol": exceptions.InvalidResponseError,
    "tls": exceptions.InvalidResponseError,
    "proxy": exceptions.DownloadTunnelError,
    "robots": exceptions.IgnoreRequest,
    "scope": exceptions.IgnoreRequest,
    "redirects": exceptions.IgnoreRequest,
}


def exception_of(error: errors.ShoalError) -> Exception:
    """The exception that Scrapy raises for an error of a fetch."""
    cause = error.__cause__
    if isinstance(cause, Exception) and isinstance(error, ScrapyFetchError):
        return cause
    if not isinstance(error, errors.FetchError):
        return cause if isinstance(cause, Exception) else error
    message = str(error)
    if error.kind == "timeout":
        if message.startswith("no connection"):
            return exceptions.DownloadConnectTimeoutError(message)
        return exceptions.DownloadTimeoutError(message)
    if error.kind == "connect" and "refused" in message.lower():
        return exceptions.DownloadConnectionRefusedError(message)
    kind = _NETWORK.get(error.kind)
    return error if kind is None else kind(message)


class ScrapyFetchError(errors.FetchError):
    """A middleware or a rule of Scrapy ended the fetch. ``__cause__`` is the exception for the errback. ``request`` is
    the request as the middlewares changed it."""

    request: Request | None = None
