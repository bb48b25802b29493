"""Items that an output can't write. They do not stop the others, and each is logged or counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.ports import LoggedItem

log = logging.getLogger("shoal.sinks")

_MAX_LOGGED = 20


class Reject(NamedTuple):
    """An item that was not written, and why."""

    item: LoggedItem
    reason: str


class Rejects:
    """Logs the first rejected items and counts all of them.

    It does so at the next flush, so that items that are written again do not count twice.
    """

    def __init__(self, name: str, on_reject: Callable[[int], None] | None = None) -> None:
        """``on_reject`` is called with the number of newly rejected items."""
        self._name = name
        self._on_reject = on_reject
        self._pending: list[Reject] = []
        self._count = 0

    def open(self) -> None:
        """Drop what was rejected since the last flush: those items are written again."""
        self._pending.clear()

    def add(self, rejects: Sequence[Reject]) -> None:
        self._pending += rejects

    def flush(self) -> None:
        rejects, self._pending = self._pending, []
        if not rejects:
            return
        for item, reason in rejects[: max(0, _MAX_LOGGED - self._count)]:
            log.error("item %s not written to %s: %s", item.key, self._name, reason)
        if self._count < _MAX_LOGGED <= self._count + len(rejects):
            log.error("%s: further rejected items are counted, but not logged", self._name)
        self._count += len(rejects)
        if self._on_reject is not None:
            self._on_reject(len(rejects))

    def finish(self) -> None:
        """Log the total when the run is finished."""
        self.flush()
        if self._count:
            log.error("%s: %d items were not written; they are in the run's item log", self._name, self._count)
            self._count = 0
