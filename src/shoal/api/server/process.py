"""Runs the API in this process until it is asked to stop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.api.server.app import create_app
from shoal.api.server.budgets import Budget, BusyError
from shoal.api.server.errors import problem
from shoal.api.server.state import Server
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.fetch.resolving import allow_many_lookups
from shoal.runs.loop_thread import collect_rarely

# -- connections of clients that hold them without use
#
# A client could keep many connections open with half a request each, or with an answer that it does not read.


_EVENTS_AT_ONCE = 16
"""Parts of a body that a connection parses at once. One read may have 40,000 chunks of one byte, which take a fifth of
a second."""
_TURNS_AT_ONCE = 8


class _Turns:
    """Connections with more parts than that, which take turns: a few at a time, so that all other work goes on."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def wait(self, loop: asyncio.AbstractEventLoop, take: Callable[[], None]) -> None:
        self._waiting.append(take)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for _ in range(min(_TURNS_AT_ONCE, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._is_scheduled = bool(self._waiting)
            if self._is_scheduled:
                loop.call_soon(self._run, loop)


def protocol_with_timeout(seconds: float, connections: Budget) -> type[H11Protocol]:
    """An HTTP protocol for uvicorn. It closes a connection if a request does not arrive completely in ``seconds``, or
    if its client reads nothing for ``seconds`` while there is more to send. ``connections``: how many may be open, by
    address."""

    turns = _Turns()

    class TimeoutProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _write_deadline: asyncio.TimerHandle | None = None
        _address: str | None = None
        """Whose budget the connection uses."""
        _events_left = _EVENTS_AT_ONCE

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            address = self.client[0] if self.client else ""
            try:
                connections.take(address)
            except BusyError as exc:
                self.transport.write(_refusal(exc))
                self.transport.close()
                return
            self._address = address
            self._next_event, self.conn.next_event = self.conn.next_event, self._next_event_in_turn  # type: ignore[method-assign]
            self._start_timer()

        def _next_event_in_turn(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
            """The next event, or PAUSED if others have their turn first: then nothing is read meanwhile."""
            if not self._events_left:
                return h11.PAUSED
            event = self._next_event()
            if type(event) is h11.Data:
                self._events_left -= 1
                if self._events_left == _EVENTS_AT_ONCE - 1:
                    turns.wait(self.loop, self._take_turn)
            return event

        def _take_turn(self) -> None:
            was_paused, self._events_left = not self._events_left, _EVENTS_AT_ONCE
            if was_paused and not self.transport.is_closing():
                self.flow.resume_reading()
                try:
                    self.handle_events()
                except h11.LocalProtocolError:  # the rest of the body is invalid, and has its answer already
                    self.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self._address is None:  # refused
                return
            if not self._is_incomplete():
                self._start_timer()
            super().data_received(data)

        def handle_events(self) -> None:
            """uvicorn also calls this when a response is complete, to handle the next request on the connection."""
            super().handle_events()
            if not self._is_incomplete():
                self._stop_timer()
            elif self._deadline is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_write_timer()
            if self._address is not None:
                connections.give_back(self._address)
                self._address = None
            super().connection_lost(exc)

        def _is_incomplete(self) -> bool:
            """Whether a part of a request has arrived, but not all of it."""
            state = self.conn.their_state
            return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def _start_timer(self) -> None:
            self._stop_timer()
            self._deadline = self.loop.call_later(seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        # -- an answer that is not read

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_write_timer()

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def on_response_complete(self) -> None:
            """Without this, a connection would stay open as long as the end of its answer is not read."""
            super().on_response_complete()
            if self._write_deadline is None and self.transport.get_write_buffer_size():
                self._start_write_timer()

        def _start_write_timer(self) -> None:
            self._stop_write_timer()
            self._write_deadline = self.loop.call_later(seconds, self._check_reader, self._count_unread())

        def _check_reader(self, before: int) -> None:
            self._write_deadline = None
            if not self.transport.get_write_buffer_size():
                return
            if self._count_unread() < before:  # slow, but it reads
                self._start_write_timer()
            else:
                self.transport.abort()

        def _count_unread(self) -> int:
            """Bytes that the client has not received, here and in the system."""
            return self.transport.get_write_buffer_size() + _queued_by_system(self.transport)

        def _stop_write_timer(self) -> None:
            if self._write_deadline is not None:
                self._write_deadline.cancel()
                self._write_deadline = None

    return TimeoutProtocol


def _queued_by_system(transport: asyncio.Transport) -> int:
    """Bytes of a connection that its other side has not confirmed. 0 where the system does not tell."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except (OSError, ValueError):
        return 0
    return int(struct.unpack("i", answer)[0])


def _refusal(exc: BusyError) -> bytes:
    """The answer on a connection that is one too many, whatever it wants to ask."""
    body = problem(exc.status_code, "too many connections", exc.detail).body
    reason = {429: b"Too Many Requests", 503: b"Service Unavailable"}[exc.status_code]
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    tail = b"Retry-After: %b\r\nConnection: close\r\n\r\n" % (exc.headers or {})["Retry-After"].encode()
    return head % (exc.status_code, reason, len(body)) + tail + bytes(body)


_SHUTDOWN_TIMEOUT = 3  # seconds for open responses
_REUSED = 8 << 20  # bytes, more than what is needed to encode one answer at once


def serve(config: Config, *, ui_only: bool = False) -> None:
    """Serve until asked to stop. ConfigError if the server would accept anyone on the network, or cannot listen.

    ``ui_only``: see `create_app`.
    """
    app = create_app(config, ui_only=ui_only)
    _check_address(config.serve.host, config.serve.port)
    total = config.serve.max_connections
    connections = Budget("connections", max(1, total // 2), total)  # one address may have half of them
    process = _Process(
        uvicorn.Config(
            app,
            host=config.serve.host,
            port=config.serve.port,
            log_level=config.log_level.lower(),
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            http=protocol_with_timeout(config.serve.request_timeout, connections),
        ),
        app,
    )
    collect_rarely()
    allow_many_lookups()
    keep_freed_memory()
    process.run()
    if not process.started:
        sys.exit(1)


def keep_freed_memory() -> None:
    """Let malloc of glibc keep up to twice this size, which it learns when such a block is freed. Otherwise each answer
    of some megabytes may return its memory to the system and fault it in again, which takes as long as to encode it."""
    bytearray(_REUSED)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError if the server cannot listen there. uvicorn would only log it and exit."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as exc:
        in_use = exc.errno == errno.EADDRINUSE
        reason = "the port is already in use. Choose another with --port" if in_use else exc.strerror
        raise ConfigError(f"can't listen on {host}:{port}: {reason}") from exc


class _Process(uvicorn.Server):
    """Shuts down without waiting for batches: responds to their callers first."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server: Server = self._app.state.server
        server.stop_waiting()
        await super().shutdown(sockets)
