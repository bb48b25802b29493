"""How a client notices that its store went back in time.

A completion that the server acknowledged is a receipt: its request is done, under its token, for ever. A server on
which that is not so has lost the completion. All changes of a store are in one order, so the newest receipt
speaks for all.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shoal import clock
from shoal.errors import StoreRewoundError

_EVERY = 0.1
_MOST = 600

MESSAGE = (
    "the store went back in time: it does not know a change that it had acknowledged (a restored backup, a replica "
    "that lagged, a power cut). Drop what was learned from it and call recover()"
)


class Receipt(NamedTuple):
    """A completion that was acknowledged."""

    order: int
    """Of two completions of a run, the later one has the higher number."""
    sent: float
    """When the client made the call, so never later than the completion."""
    proof: bytes
    """Fingerprint and token."""


class Notice(NamedTuple):
    """What a client knows when it notices a rewind."""

    at: float
    age: float | None
    """Seconds since the newest change was acknowledged that is lost; None if that is not known."""


class Receipts:
    """What one frontier object remembers of the store's acknowledgements."""

    def __init__(self) -> None:
        self._newest: Receipt | None = None
        self._older: deque[Receipt] = deque(maxlen=_MOST)
        self._marks: dict[str, float] = {}
        self._notice: Notice | None = None
        self.epoch = 0
        """How often it was cleared. What was asked for in an earlier epoch proves nothing."""

    @property
    def proof(self) -> bytes:
        """What is presented to the store."""
        return b"" if self._newest is None else self._newest.proof

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def check(self) -> None:
        """StoreRewoundError after a rewind was noticed, until `clear`."""
        if self._notice is not None:
            raise StoreRewoundError(MESSAGE)

    def completed(self, epoch: int, sent: float, order: int, proof: bytes) -> None:
        """The store acknowledged a completion. Answers may overtake each other, so the order is the store's."""
        if epoch != self.epoch or (self._newest is not None and order <= self._newest.order):
            return
        self._newest = Receipt(order, sent, proof)
        if not self._older or sent - self._older[-1].sent >= _EVERY:
            self._older.append(self._newest)

    def moved(self, epoch: int, what: str, sent: float) -> None:
        """The store acknowledged a cursor, or told of items."""
        if epoch == self.epoch:
            self._marks[what] = sent

    def rewound(self, epoch: int, what: str, *, proven: bool) -> None:
        """The store does not know its last acknowledgement of that cursor, or of the completion if it was presented."""
        if self._notice is not None or epoch != self.epoch:
            return
        now, known = clock.now(), []
        if what in self._marks:
            known.append(self._marks[what])
        if proven and self._newest is not None:
            known.append(self._newest.sent)
        self._notice = Notice(now, now - min(known) if known else None)

    def ages(self) -> list[float | bytes]:
        """For each receipt, the newest first: how old it was when the rewind was noticed, and what to present."""
        if self._notice is None:
            return []
        known = dict.fromkeys(filter(None, (self._newest, *reversed(self._older))))
        return [part for each in known for part in (self._notice.at - each.sent, each.proof)]

    def clear(self) -> None:
        self._newest = self._notice = None
        self._older.clear()
        self._marks.clear()
        self.epoch += 1
