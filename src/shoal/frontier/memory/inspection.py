"""Inspect a run in memory: its counters, the history of a request, the dead requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from heapq import nsmallest

import msgspec

from shoal.frontier import rules
from shoal.frontier.faults import compare_counters, make_faults
from shoal.frontier.memory.items import MemoryItemLog, MemoryRoles
from shoal.frontier.memory.queue import MemoryQueue, MemoryStages
from shoal.frontier.memory.requests import NO_PARENT, Requests
from shoal.frontier.rules import READY, STATE_NAMES
from shoal.http import Request
from shoal.ports import Event, History, LeaseHolder, LeaseKey, LeaseOutcome, Rewind, Stats, Waits


class MemoryInspection:
    """See `shoal.ports.Inspection`."""

    def __init__(
        self,
        requests: Requests,
        stages: MemoryStages,
        queue: MemoryQueue,
        roles: MemoryRoles,
        items: MemoryItemLog,
        clock: Callable[[], float],
        holders: Callable[[Collection[str]], list[LeaseHolder]],
    ) -> None:
        """``holders``: who has leased requests of hosts."""
        self._requests = requests
        self._stages = stages
        self._queue = queue
        self._roles = roles
        self._items = items
        self._clock = clock
        self._holders = holders

    async def stats(self) -> Stats:
        return self._stats(self._requests.counts, self._stages.incoming)

    async def audit(self) -> Stats:
        counts = [0] * len(STATE_NAMES)
        for state in self._requests.records.states():
            counts[state] += 1
        counted = self._stats(counts, self._stages.count())
        faults = (
            *compare_counters(await self.stats(), counted, sum(counts)),
            *self._requests.find_faults(),
            *self._queue.find_faults(),
            ("items", self._items.missing(), ""),
        )
        return msgspec.structs.replace(counted, faults=make_faults(faults))

    async def repair(self) -> list[str]:
        """Does nothing: only a bug of this process can cause a fault, and nothing outlives the process."""
        return []

    def _stats(self, counts: Sequence[int], incoming: int) -> Stats:
        stats = Stats(
            pushed=self._requests.pushed,
            duplicates=self._requests.duplicates,
            items=self._items.count,
            trimmed=self._items.trimmed,
            redirects=self._requests.redirects,
            item_errors=self._requests.item_errors,
            incoming=incoming,
            seeding=not self._roles.is_finished(rules.SEED_ROLE),
        )
        return msgspec.structs.replace(stats, **dict(zip(STATE_NAMES, counts, strict=True)))

    async def rewinds(self) -> list[Rewind]:
        return []

    # -- histories

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        fingerprint = rules.sought_fingerprint(request, parent)
        number = self._requests.fingerprints.find(fingerprint)
        if number is None:
            if (staged := self._stages.find(fingerprint)) is not None:
                return staged
            numbers = () if exact else map(self._requests.search, rules.sought_urls(request))
            number = next((number for number in numbers if number is not None), None)
        return None if number is None else self._history(number)

    def _history(self, number: int) -> History:
        requests = self._requests
        head, request = requests.read(number)
        fingerprint = requests.fingerprints[number]
        url = None if head.parent == NO_PARENT else requests.read(head.parent)[1].url
        worker = requests.worker_name(head.worker) if head.state in rules.CLAIMED else ""
        kind, reason = requests.deaths.get(number, ("", ""))
        return History(
            url=request.url,
            state=STATE_NAMES[head.state],
            depth=request.depth,
            priority=request.priority,
            attempts=head.attempts - self._queue.is_unbegun(fingerprint),
            status=head.status,
            items=head.items,
            parent=url,
            reason=reason,
            fingerprint=fingerprint,
            kind=kind,
            events=(*requests.events.get(number, ()), Event(head.at, STATE_NAMES[head.state], worker=worker)),
            worker=worker,
        )

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        return [self._queue.outcome_of(lease) for lease in leases]

    async def waits(self, hosts: Sequence[str]) -> Waits:
        holders = self._holders(frozenset(hosts))
        if (retry := self._queue.next_retry()) is None:
            return Waits(holders=holders)
        at, number = retry
        reason = rules.retry_reason(self._requests.events[number][-1].detail)
        return Waits(holders=holders, retry_in=max(0.0, at - self._clock()), retry_reason=reason)

    # -- dead requests

    async def dead_kinds(self) -> dict[str, int]:
        return dict(Counter(kind for kind, _ in self._requests.deaths.values()))

    async def dead(self) -> AsyncIterator[History]:
        for number in list(self._requests.deaths):
            yield self._history(number)

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        deaths = self._requests.deaths
        if only is not None:
            numbers = dict.fromkeys(self._requests.fingerprints.find(fingerprint) for fingerprint in only)
            deaths = {number: deaths[number] for number in numbers if number in deaths}
        chosen = {number: kind for number, (kind, _) in deaths.items() if rules.is_retried(kind, kinds)}
        refused = [number for number, kind in chosen.items() if kind == rules.FULL_KIND]
        others = [number for number, kind in chosen.items() if kind != rules.FULL_KIND]
        self._revive(others, rules.RETRIED_DETAIL)
        room = self._requests.measure_room()
        if room is not None and room < len(refused):
            refused = nsmallest(room, refused, key=self._order)
        self._revive(refused, rules.ADMITTED_DETAIL)
        return len(others) + len(refused)

    def _order(self, number: int) -> tuple[float, int]:
        """The place of a request in the order in which requests are leased."""
        return -self._requests.records.request(number).priority, number

    def _revive(self, numbers: Sequence[int], detail: str) -> None:
        now, requests = self._clock(), self._requests
        for number in numbers:
            del requests.deaths[number]
            head, request = requests.read(number)
            requests.add_event(number, now, rules.RETRIED_EVENT, detail)
            requests.update(number, head, head._replace(state=READY, attempts=0, at=now))
            requests.requeue(requests.lane_of(request), -request.priority, number, now)
