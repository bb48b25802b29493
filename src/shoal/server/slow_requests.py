"""Requests have to arrive whole in some time: connections that are kept open by half of one cost nothing to make."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def arriving_within(seconds: float) -> type[H11Protocol]:
    """How uvicorn speaks HTTP, if a request that takes longer to arrive ends its connection."""

    class Arriving(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._begin()

        def data_received(self, data: bytes) -> None:
            if not self._is_arriving():
                self._begin()
            super().data_received(data)

        def handle_events(self) -> None:
            """Also called when an answer is complete, for the request behind it."""
            super().handle_events()
            if not self._is_arriving():
                self._end()
            elif self._deadline is None:
                self._begin()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            super().connection_lost(exc)

        def _is_arriving(self) -> bool:
            """Whether some of a request is there, but not all."""
            state = self.conn.their_state
            return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def _begin(self) -> None:
            self._end()
            self._deadline = self.loop.call_later(seconds, self.transport.close)

        def _end(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Arriving
