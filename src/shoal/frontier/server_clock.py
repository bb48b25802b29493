"""What the time is at a server, as far as a client can tell."""

from __future__ import annotations

from shoal import clock


class ServerTime:
    """So that a call which its client has given up does nothing when the server gets to it at last.

    A server that was frozen finds old calls in its sockets. What such a `lease` took would be nobody's until it ran
    out: its hosts would stand still, and an attempt be lost. So each one says until when it is worth anything.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds after which a client gives up."""
        self._timeout = timeout
        self._ahead: float | None = None

    def heard(self, sent: float, server: float) -> None:
        """The server's clock said this in its answer to a call that was ``sent`` at this time of `shoal.clock`."""
        self._ahead = server - sent

    @property
    def not_after(self) -> float | None:
        """The server's time from which on nobody waits for a call that is made now. None: not known yet."""
        return None if self._ahead is None else clock.now() + self._ahead + self._timeout
