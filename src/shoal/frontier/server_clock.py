"""Estimate the time of a server's clock from its answers."""

from __future__ import annotations

from shoal import clock


class ServerClock:
    """Computes until when, by the server's clock, the client waits for a call.

    A server that was frozen finds old calls in its sockets. A `lease` that it executes then would block hosts and use
    up attempts until it expires, as its client has given up. So each call carries the server time after which the
    server must ignore it.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds after which the client gives up."""
        self._timeout = timeout
        self._offset: float | None = None

    def observe(self, sent: float, server: float) -> None:
        """Record the server time in the answer to a call that was ``sent`` at this time of `shoal.clock`."""
        self._offset = server - sent

    @property
    def not_after(self) -> float | None:
        """The server time when the client gives up a call that it makes now. None until the first answer."""
        return None if self._offset is None else clock.now() + self._offset + self._timeout
