"""Closes connections whose request takes too long to arrive: a client could keep many open with half a request each."""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with_timeout(seconds: float) -> type[H11Protocol]:
    """An HTTP protocol for uvicorn. It closes a connection if a request does not arrive completely in ``seconds``."""

    class TimeoutProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            self._start_timer()

        def data_received(self, data: bytes) -> None:
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

    return TimeoutProtocol
