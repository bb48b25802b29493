"""Kazoo's threads and its connection, where they have to be other than kazoo makes them."""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kazoo.client import KazooClient
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler

_LONG = 6.0  # seconds of a session in which there is time to leave out a ping


class Result(AsyncResult):  # type: ignore[misc]
    """Told at once by the thread that reads the connection. Kazoo would wake another one to tell it."""

    def _do_callbacks(self) -> None:
        for callback in self._callbacks:
            callback(self)


class Threads(SequentialThreadingHandler):  # type: ignore[misc]
    """A host that can't be reached is given up in time to try the others. Kazoo would take a whole session for it."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self._patience = patience

    def create_connection(self, *args: Any, timeout: float, **kwargs: Any) -> Any:
        return super().create_connection(*args, timeout=min(timeout, self._patience), **kwargs)

    def async_result(self) -> Result:
        return Result(self)

    def select(
        self, readers: Sequence[Any], writers: Sequence[Any], _: Sequence[Any] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """By `poll`, which costs one system call. Kazoo's own makes an epoll object, registers, waits and closes, each
        time. A file is asked to be read from or written to, not both."""
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


class Connection(ConnectionHandler):  # type: ignore[misc]
    """Takes the place of the one that a client was made with."""

    def __init__(self, client: KazooClient, patience: float) -> None:
        made = client._connection
        super().__init__(client, made.retry_sleeper, logger=made.logger)
        self._patience = patience
        self.ttl = 0.0
        """Seconds after which the server forgets a client that is not heard of, as it has decided."""
        self.silent_from = math.inf
        """From this moment of the monotonic clock on the server is not told that the client lives. These threads would
        go on to say so when nothing else does in this process."""
        self._asked = -math.inf
        """When something was last asked of the server."""

    @property
    def wire(self) -> Any:
        """What it is connected by; none before it is."""
        return self._socket

    def drop(self, wire: Any) -> None:
        """Make another connection, if this is still the one: it does not answer."""
        if wire is not None and wire is self._socket:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def _invoke(self, timeout: float, *request: Any, **options: Any) -> Any:
        """The first words. A server that is just starting may never answer them."""
        return super()._invoke(min(timeout, self._patience), *request, **options)

    def _connect(self, *place: Any) -> Any:
        """Kazoo keeps to itself what the session was granted, but for two thirds of it, in milliseconds: the time after
        which it gives a connection up."""
        read_timeout, connect_timeout = super()._connect(*place)
        self.ttl = read_timeout * 1.5 / 1000
        return read_timeout, connect_timeout

    def _send_request(self, *args: Any) -> None:
        self._asked = time.monotonic()
        super()._send_request(*args)

    def _send_ping(self, *args: Any) -> None:
        """Not beside heartbeats, which tell as much; but in a short session every word counts."""
        now = time.monotonic()
        just_heard = self.ttl >= _LONG and now - self._asked < self.ttl / 2
        if now < self.silent_from and not just_heard:
            super()._send_ping(*args)
