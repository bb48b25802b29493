"""Stores what became of pages: completions, failures and released leases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from shoal.crawling.page import Parsed, Released, Settlement
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.stats import Counters
from shoal.ports import Completion, Failure, Lease, Queue, RequestState

log = logging.getLogger("shoal.engine")

Outcome: TypeAlias = RequestState | Literal["lost", "released"]
"""The new state of a request. ``lost``: its lease was lost, and nothing was changed."""


def lease_of(settlement: Settlement) -> Lease:
    return settlement.completion.lease if isinstance(settlement, Parsed) else settlement.lease


class Settler:
    """Stores settlements with as few calls as possible, and counts them."""

    def __init__(
        self,
        queue: Queue,
        scheduler: Scheduler,
        counters: Counters,
        persist: Persistence,
        *,
        learns: bool = True,
        on_items: Callable[[], None] = lambda: None,
    ) -> None:
        """``learns``: remember the links of stored pages. Only for callers that settle one batch at a time: calls that
        overlap cannot tell that the store was rewound. ``on_items``: called when items were stored."""
        self._queue = queue
        self._scheduler = scheduler
        self._counters = counters
        self._persist = persist
        self._learns = learns
        self._on_items = on_items

    async def settle(self, batch: Sequence[Settlement]) -> list[Outcome]:
        """The outcome of each, in order."""
        outcomes: dict[int, Outcome] = {}
        parsed = [each for each in batch if isinstance(each, Parsed)]
        failures = [each for each in batch if isinstance(each, Failure)]
        if parsed:
            outcomes |= await self._complete(parsed)
        if failures:
            outcomes |= await self._fail(failures)
        for contacted in (True, False):
            released = [each for each in batch if isinstance(each, Released) and each.contacted is contacted]
            if released:
                outcomes |= await self._release(released, contacted=contacted)
        return [outcomes[id(each)] for each in batch]

    async def _complete(self, parsed: list[Parsed]) -> dict[int, Outcome]:
        completions = [each.completion for each in parsed]
        results = await self._persist(lambda: self._queue.complete(completions))
        if self._learns:
            for each, pushed in zip(parsed, results, strict=True):
                if pushed is not None and pushed.added + pushed.duplicates:  # otherwise no links, or a repeat
                    self._scheduler.learn(each.admitted)
        outcomes: list[Outcome] = ["lost" if pushed is None else "done" for pushed in results]
        self._count(completions, outcomes)
        return {id(each): outcome for each, outcome in zip(parsed, outcomes, strict=True)}

    async def _fail(self, failures: list[Failure]) -> dict[int, Outcome]:
        states = await self._persist(lambda: self._queue.fail(failures))
        self._scheduler.not_a_page(len(failures))
        outcomes: list[Outcome] = ["lost" if state is None else state for state in states]
        self._count(failures, outcomes)
        return {id(each): outcome for each, outcome in zip(failures, outcomes, strict=True)}

    async def _release(self, released: list[Released], *, contacted: bool) -> dict[int, Outcome]:
        leases = [each.lease for each in released]
        await self._persist(lambda: self._queue.release(leases, contacted=contacted))
        self._scheduler.not_a_page(len(leases))
        return {id(each): "released" for each in released}

    def _count(self, settled: Sequence[Completion | Failure], outcomes: Sequence[Outcome]) -> None:
        items = 0
        for each, outcome in zip(settled, outcomes, strict=True):
            if outcome == "lost":
                self._counters.leases_lost += 1
                log.warning("lease lost; its work is not counted url=%s", each.lease.request.url)
            elif outcome != "waiting":
                items += len(each.items)
        if items:
            self._counters.items += items
            self._on_items()
