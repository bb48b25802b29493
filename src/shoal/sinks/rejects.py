"""Items that an output can't take. Each costs only itself, and none is dropped without a word."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.ports import LoggedItem

log = logging.getLogger("shoal.sinks")

_SHOWN = 20


class Reject(NamedTuple):
    """An item that was not written, and why."""

    item: LoggedItem
    reason: str


class Rejects:
    """Logs the first ones, counts all of them, at the next flush: what is written again must not count twice."""

    def __init__(self, name: str, on_reject: Callable[[int], None] | None = None) -> None:
        """``on_reject`` is called with a number of items."""
        self._name = name
        self._on_reject = on_reject
        self._pending: list[Reject] = []
        self._count = 0

    def open(self) -> None:
        """The output is opened at its last flush: everything behind it is written again."""
        self._pending.clear()

    def add(self, rejects: Sequence[Reject]) -> None:
        self._pending += rejects

    def flush(self) -> None:
        rejects, self._pending = self._pending, []
        if not rejects:
            return
        for item, reason in rejects[: max(0, _SHOWN - self._count)]:
            log.error("item %s not written to %s: %s", item.key, self._name, reason)
        if self._count < _SHOWN <= self._count + len(rejects):
            log.error("%s: more items like these are only counted", self._name)
        self._count += len(rejects)
        if self._on_reject is not None:
            self._on_reject(len(rejects))

    def finish(self) -> None:
        """The run is over: say how many there were."""
        self.flush()
        if self._count:
            log.error("%s: %d items were not written; the run's item log has them", self._name, self._count)
            self._count = 0
