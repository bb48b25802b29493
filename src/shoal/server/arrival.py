"""Requests have to arrive whole in some time: connections that are kept open by half of one cost nothing to make."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_ARRIVING = (h11.IDLE, h11.SEND_BODY)


def arriving_within(seconds: float) -> type[H11Protocol]:
    """How uvicorn speaks HTTP, if a request that takes longer to arrive ends its connection."""

    class Arriving(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(seconds, self._too_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state not in _ARRIVING:
                self._arrived()
            elif self._deadline is None:  # the next request on this connection
                self._deadline = self.loop.call_later(seconds, self._too_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            super().connection_lost(exc)

        def _arrived(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_late(self) -> None:
            self._deadline = None
            if self.conn.their_state in _ARRIVING:
                self.transport.close()

    return Arriving
