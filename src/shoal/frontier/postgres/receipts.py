"""What a client was told by the store, so that it notices when the store does not know it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal import clock
from shoal.errors import StoreRewoundError

_EVERY = 0.1
_MOST = 600


class Receipt(NamedTuple):
    """A completion that the store acknowledged: the number of the request, and the token under which it is done."""

    order: int
    """Of two completions of a run, the later one has the higher number."""
    id: int
    token: int
    at: float
    """On this machine's clock."""


class Receipts:
    """The last completion that was acknowledged, and some older ones to tell how far the store went back."""

    def __init__(self) -> None:
        self.rewound = False
        self.generation = 0
        """How often they were cleared: what was asked before then and answered after it does not count."""
        self._last: Receipt | None = None
        self._older: deque[Receipt] = deque(maxlen=_MOST)
        self._known_at = clock.now()

    @property
    def last(self) -> tuple[int | None, int | None]:
        """The number and token to present. StoreRewoundError once the store was seen to be rewound."""
        self.check()
        return (None, None) if self._last is None else (self._last.id, self._last.token)

    def check(self) -> None:
        """StoreRewoundError once the store was seen to be rewound, until they are cleared."""
        if self.rewound:
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")

    def acknowledged(self, generation: int, order: int, number: int, token: int) -> None:
        """The store said that this request is done under this token. Answers may overtake each other, so the order is
        the store's."""
        if generation != self.generation or (self._last is not None and order <= self._last.order):
            return
        self._last = Receipt(order, number, token, clock.now())
        if not self._older or self._last.at - self._older[-1].at >= _EVERY:
            self._older.append(self._last)

    def confirmed(self) -> None:
        """The store was as this client knew it, which it said without a receipt: a cursor was where it was left."""
        if not self.rewound:
            self._known_at = clock.now()

    def all(self) -> Sequence[Receipt]:
        """Oldest first."""
        older = list(self._older)
        return older if self._last is None or (older and older[-1] == self._last) else [*older, self._last]

    def judged(self, receipts: Sequence[Receipt], surviving: set[int]) -> tuple[float, float | None]:
        """For how many seconds the store may differ from what this client knew, and at most how many are lost.
        ``surviving``: the places of those which the store still knows."""
        now = clock.now()
        lost = [receipt.at for place, receipt in enumerate(receipts) if place not in surviving]
        kept = [receipt.at for place, receipt in enumerate(receipts) if place in surviving]
        known_for = now - (min(lost) if lost else self._known_at)
        return known_for, (now - max(kept) if kept else None)

    def clear(self) -> None:
        """Forget all; the store is good again."""
        self.generation += 1
        self.rewound = False
        self._last = None
        self._older.clear()
        self._known_at = clock.now()
