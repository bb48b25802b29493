"""Kazoo's threads and connection, with changes that Shoal needs."""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, cast

from kazoo.client import KazooClient
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler

_LONG_SESSION = 6.0  # seconds: long enough to skip a ping


class _File(Protocol):
    """A socket or a pipe."""

    def fileno(self) -> int: ...


class DirectResult(AsyncResult):  # type: ignore[misc]
    """Calls its callbacks in the thread that reads the connection. Kazoo would wake another thread for them."""

    def _do_callbacks(self) -> None:
        for callback in self._callbacks:
            callback(self)


class Threads(SequentialThreadingHandler):  # type: ignore[misc]
    """Gives up an unreachable host in time to try the others. Kazoo would spend a whole session on it."""

    def __init__(self, connect_timeout: float) -> None:
        super().__init__()
        self._connect_timeout = connect_timeout

    def create_connection(self, *args: object, timeout: float, **kwargs: object) -> socket.socket:
        timeout = min(timeout, self._connect_timeout)
        return cast(socket.socket, super().create_connection(*args, timeout=timeout, **kwargs))

    def async_result(self) -> DirectResult:
        return DirectResult(self)

    def select(
        self, readers: Sequence[_File], writers: Sequence[_File], _: Sequence[_File] = (), timeout: float | None = None
    ) -> tuple[list[_File], list[_File], list[_File]]:
        """Use `poll`, which costs one system call. Kazoo creates, registers and closes an epoll object each time. A
        file is either read or written, not both."""
        poll = select.poll()
        files = {}
        for file, event in [(file, select.POLLIN) for file in readers] + [(file, select.POLLOUT) for file in writers]:
            fd = file.fileno()
            if fd < 0:
                raise OSError(errno.EBADF, "the connection is closed")
            files[fd] = file
            poll.register(fd, event)
        ready = [files[fd] for fd, _ in poll.poll(None if timeout is None else max(0, math.ceil(timeout * 1000)))]
        return [file for file in ready if file in readers], [file for file in ready if file in writers], []


class ZookeeperConnection(ConnectionHandler):  # type: ignore[misc]
    """Replaces the connection that a kazoo client was created with."""

    def __init__(self, client: KazooClient, connect_timeout: float) -> None:
        made = client._connection
        super().__init__(client, made.retry_sleeper, logger=made.logger)
        self._connect_timeout = connect_timeout
        self.ttl = 0.0
        """Seconds without a message after which the server ends the session, as the server decided."""
        self.silent_from = math.inf
        """From this time of the monotonic clock on, send no pings. Otherwise kazoo's threads would keep the session
        alive when the rest of the process hangs."""
        self._last_request = -math.inf

    @property
    def wire(self) -> socket.socket | None:
        """The socket; None before it is connected."""
        return cast("socket.socket | None", self._socket)

    def drop(self, wire: socket.socket | None) -> None:
        """Close the socket if it is still in use, as it does not answer. Kazoo reconnects."""
        if wire is not None and wire is self._socket:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def _invoke(self, timeout: float, *request: object, **options: object) -> object:
        """Send the first request, with a shorter timeout: a server that is starting may never answer it."""
        return super()._invoke(min(timeout, self._connect_timeout), *request, **options)

    def _connect(self, *place: object) -> tuple[float, float]:
        """Connect, and note the session timeout that the server granted. Kazoo returns only the read timeout in
        milliseconds, which is two thirds of it."""
        read_timeout, connect_timeout = super()._connect(*place)
        self.ttl = read_timeout * 1.5 / 1000
        return read_timeout, connect_timeout

    def _send_request(self, *args: object) -> None:
        self._last_request = time.monotonic()
        super()._send_request(*args)

    def _send_ping(self, *args: object) -> None:
        """Skip a ping if there was a request lately, except in a short session."""
        now = time.monotonic()
        is_recent = self.ttl >= _LONG_SESSION and now - self._last_request < self.ttl / 2
        if now < self.silent_from and not is_recent:
            super()._send_ping(*args)
