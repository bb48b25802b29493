"""The queue of a run in memory: requests enter, are leased, and are completed, failed or released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

import msgspec

from shoal import clock
from shoal.frontier.memory.backlog import Backlog
from shoal.frontier.memory.items import MemoryItemLog
from shoal.frontier.memory.records import NO_PARENT, decode_request, encode_request, head_of, request_of
from shoal.frontier.memory.requests import NewRequests, Requests
from shoal.frontier.memory.roles import MemoryRoles
from shoal.frontier.memory.stages import MemoryStages
from shoal.frontier.politeness import Lane
from shoal.frontier.rules import (
    DEAD,
    DONE,
    LOST_EVENT,
    LOST_KIND,
    MAX_LEASES,
    NOTE_EVENT,
    READY,
    STATE_NAMES,
    WAITING,
    check_nonce,
    check_queue_size,
    failure_event,
    is_fenced,
    lost_reason,
    new_nonce,
    push_fingerprint,
    reissued_token,
    token_base,
)
from shoal.frontier.staging import POLL, E, Moved, count_moved, split_large
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    Failure,
    FrontierOptions,
    Holder,
    Lease,
    Leased,
    LeaseKey,
    LeaseOutcome,
    Pushed,
    RequestState,
)

_MAX_REPEATED = 10_000
"""Completions that are recognized when they are repeated."""
T = TypeVar("T")


class _Held(msgspec.Struct):
    """A lease that is out."""

    token: int
    until: float
    lane: Lane[Backlog]
    rank: float
    holder: Holder | None
    begun: bool
    """False while its attempt, which the record includes, does not count yet."""
    origin: tuple[int, bytes] | None = None
    """The old token and the nonce, if it was reissued."""


class MemoryQueue:
    """See `shoal.ports.Queue`. No method gives way to another task while it changes something, so each call is one
    atomic step. Only a large page needs more steps: see `MemoryStages`."""

    def __init__(
        self,
        options: FrontierOptions,
        requests: Requests,
        stages: MemoryStages,
        items: MemoryItemLog,
        roles: MemoryRoles,
        clock: Callable[[], float],
        expire_others: Callable[[float], None],
    ) -> None:
        self.halted = False
        """The run is paused or cancelled: nothing is leased."""
        self._options = options
        self._requests = requests
        self._stages = stages
        self._items = items
        self._roles = roles
        self._clock = clock
        self._expire_others = expire_others
        self._held: dict[int, _Held] = {}
        self._expiries: list[tuple[float, int, int]] = []
        """(time, token, request) of leases; an entry is stale if the lease has ended or was extended."""
        self._waiting: list[tuple[float, int, int]] = []
        """(time, sequence, request) of requests that wait for their next attempt."""
        self._last_calls: dict[Holder | None, tuple[bytes, list[Lease]]] = {}
        """For each holder: the nonce of its last lease call, and what it leased."""
        self._completed: dict[int, None] = {}
        """The tokens of the last completions, oldest first."""

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        if seed is not None:
            if not self._roles.is_held(seed):
                return Pushed(0, 0)
            self._roles.check_cursor(seed, cursor)
        new = self._requests.select_new(
            (push_fingerprint(request, seed, cursor, i), request) for i, request in enumerate(requests)
        )
        counts = self._requests.counts
        check_queue_size(self._options.max_queue_size, counts[READY] + counts[WAITING], len(new))
        self._requests.add(new, NO_PARENT, len(requests), self._clock())
        if seed is not None:
            self._roles.save_cursor(seed.role, cursor)
        return Pushed(len(new), len(requests) - len(new))

    # -- leasing

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, counts_attempt: bool = True, nonce: bytes = b""
    ) -> Leased:
        nonce = nonce or new_nonce()
        token = token_base(nonce)
        self._roles.check_holder(holder)
        last_nonce, last_leases = self._last_calls.get(holder, (b"", []))
        if nonce == last_nonce:
            renewed = await self.renew(last_leases, ttl)
            return Leased([lease for lease in renewed if lease], 0.0)
        deadline = clock.now() + ttl
        now = self._clock()
        self.expire_leases(now)
        self._expire_others(now)
        if self.halted:
            return Leased([], None)
        self._stages.help()
        lanes, leases = self._requests.lanes, list[Lease]()
        lanes.reopen(now)
        limit = min(limit, MAX_LEASES)
        worker = self._requests.worker_number("" if holder is None else holder.slot)
        while len(leases) < limit and (lane := lanes.take_best(now)) is not None:
            token += 1
            number, rank, attempt, payload = self._requests.take(lane, now, worker)
            self._held[number] = _Held(token, now + ttl, lane, rank, holder, counts_attempt)
            heappush(self._expiries, (now + ttl, token, number))
            host = lane.host
            learned = host.learned_delay or 0.0
            fingerprint = number.to_bytes(16, "big")
            leases.append(Lease(decode_request(payload), fingerprint, token, attempt, host.name, deadline, learned))
            lanes.place(lane, now)
        self._last_calls[holder] = nonce, leases
        return Leased(leases, self._wait(now))

    def _wait(self, now: float) -> float | None:
        """Seconds until something changes by itself: a retry is due, a lease expires, a host is due, links arrive."""
        next_retry = self._waiting[0][0] if self._waiting else None
        incoming = now + POLL if self._stages.incoming else None
        moments = (next_retry, self._next_expiry(), self._requests.lanes.next_due(), incoming)
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    def _next_expiry(self) -> float | None:
        """When the next lease expires. Drops stale entries on the way."""
        while self._expiries:
            until, token, number = self._expiries[0]
            held = self._held.get(number)
            if held is not None and held.token == token and held.until == until:
                return until
            heappop(self._expiries)
        return None

    def expire_leases(self, now: float) -> None:
        """End leases that have run out, and make requests ready that have waited long enough."""
        while self._expiries and self._expiries[0][0] <= now:
            _, token, number = heappop(self._expiries)
            held = self._held.get(number)
            if held is not None and held.token == token and held.until <= now:
                self._lose(number, held, now)
        requests = self._requests
        while self._waiting and self._waiting[0][0] <= now:
            _, _, number = heappop(self._waiting)
            record = requests.read(number)
            head, request = head_of(record), request_of(record)
            requests.update(number, head._replace(state=READY), record)
            requests.requeue(requests.lane_of(request), -request.priority, head.sequence, number, now)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        renewed: list[Lease | None] = []
        for lease in leases:
            current = self._current(lease)
            if current is None:
                renewed.append(None)
                continue
            self._extend(*current, until)
            renewed.append(msgspec.structs.replace(lease, deadline=deadline))
        return renewed

    def _extend(self, number: int, held: _Held, until: float) -> None:
        held.until = until
        heappush(self._expiries, (until, held.token, number))

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        check_nonce(nonce)
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        reissued: set[int] = set()
        answer: list[Lease | None] = []
        for lease in leases:
            number, origin = int.from_bytes(lease.fingerprint, "big"), (lease.token, nonce)
            held = self._held.get(number)
            if held is None or number in reissued or (held.token != lease.token and held.origin != origin):
                answer.append(None)
                continue
            reissued.add(number)
            if held.token == lease.token:
                held.token, held.origin, held.begun = reissued_token(nonce, lease.token), origin, True
            self._extend(number, held, until)
            answer.append(msgspec.structs.replace(lease, token=held.token, deadline=deadline))
        return answer

    # -- ending a lease

    def _current(self, lease: Lease) -> tuple[int, _Held] | None:
        """The request and its lease, if the lease's token is the current one."""
        number = int.from_bytes(lease.fingerprint, "big")
        held = self._held.get(number)
        return None if held is None or held.token != lease.token else (number, held)

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        repeated = {page.lease.token for page in completions} & self._completed.keys()
        results, moved = await self._end(completions, self._complete)
        for place, links in moved.items():
            results[place] = count_moved(completions[place], links)
        return [
            Pushed(0, 0) if pushed is None and page.lease.token in repeated else pushed
            for page, pushed in zip(completions, results, strict=True)
        ]

    def _remember_completion(self, token: int) -> None:
        """A client whose answer was lost repeats the completion."""
        self._completed[token] = None
        if len(self._completed) > _MAX_REPEATED:
            del self._completed[next(iter(self._completed))]

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        states, _ = await self._end(failures, self._fail)
        return states

    async def _end(
        self, pages: Sequence[E], end: Callable[[E, NewRequests, int, bytes, float], T]
    ) -> tuple[list[T | None], dict[int, Moved]]:
        """End the leases of pages in one step, then move the links of large ones. Returns what ``end`` returns, None
        for a lease that was lost; and by position what became of the links of large pages. RequestError, and nothing
        is changed, if a child cannot be encoded."""
        pages, staged = await split_large(pages, encode_request)
        now = self._clock()
        self._requests.measure_room()
        new = [self._requests.select_children(page) for page in pages]
        results: list[T | None] = []
        ended: dict[int, bytes] = {}
        for place, (page, children) in enumerate(zip(pages, new, strict=True)):
            current = self._current(page.lease)
            if current is None:
                results.append(None)
                continue
            number, held = current
            del self._held[number]
            results.append(end(page, children, number, self._requests.read(number), now))
            held.lane.host.end_lease(now, contacted=page.contacted)
            if place in staged and results[place] != STATE_NAMES[WAITING]:
                ended[place] = page.lease.fingerprint
                self._stages.add(page.lease.fingerprint, staged[place])
        return results, {place: await self._stages.move(parent) for place, parent in ended.items()}

    def _complete(self, page: Completion, new: NewRequests, number: int, record: bytes, now: float) -> Pushed:
        self._remember_completion(page.lease.token)
        requests, head = self._requests, head_of(record)
        items = self._items.append(page.lease.fingerprint, page.items, head.items)
        head = head._replace(state=DONE, status=page.status, items=items, at=now, token=page.lease.token)
        requests.update(number, head, record)
        if page.note:
            requests.add_event(number, now, NOTE_EVENT, page.note, head.worker)
        return requests.add_children(page, new, page.duplicates, now)

    def _fail(self, failure: Failure, new: NewRequests, number: int, record: bytes, now: float) -> RequestState:
        requests, head = self._requests, head_of(record)._replace(status=failure.status, at=now)
        waits = failure.retry_in is not None and head.attempts < self._options.max_attempts
        requests.add_event(number, now, *failure_event(head.attempts, failure, waits=waits), head.worker)
        if waits:
            assert failure.retry_in is not None
            heappush(self._waiting, (now + failure.retry_in, head.sequence, number))
        else:
            requests.deaths[number] = (failure.kind, failure.reason)
            head = head._replace(items=self._items.append(failure.lease.fingerprint, failure.items, head.items))
            requests.add_children(failure, new, 0, now)
        state = WAITING if waits else DEAD
        requests.update(number, head._replace(state=state), record)
        return STATE_NAMES[state]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        now = self._clock()
        released = []
        for lease in leases:
            current = self._current(lease)
            if current is not None:
                self._release(*current, now, contacted=contacted)
            released.append(current is not None)
        return released

    def _release(self, number: int, held: _Held, now: float, *, contacted: bool) -> None:
        del self._held[number]
        record = self._requests.read(number)
        head = head_of(record)
        self._requests.update(number, head._replace(state=READY, attempts=head.attempts - 1, at=now), record)
        self._requests.requeue(held.lane, held.rank, head.sequence, number, now)
        held.lane.host.end_lease(now, contacted=contacted)

    def _lose(self, number: int, held: _Held, now: float) -> None:
        """End a lease whose worker is lost."""
        if not held.begun:
            self._release(number, held, now, contacted=False)
            return
        del self._held[number]
        requests = self._requests
        record = requests.read(number)
        head = head_of(record)
        reason = lost_reason(head.attempts)
        requests.add_event(number, now, LOST_EVENT, reason, head.worker)
        if head.attempts >= self._options.max_attempts:
            requests.deaths[number] = (LOST_KIND, reason)
            requests.update(number, head._replace(state=DEAD, at=now), record)
        else:
            requests.update(number, head._replace(state=READY, at=now), record)
            requests.requeue(held.lane, held.rank, head.sequence, number, now)
        held.lane.host.end_lease(now, contacted=True)

    async def fence(self, slot: str, epoch: int) -> int:
        self._roles.fence(slot, epoch)
        now = self._clock()
        lost = [(number, held) for number, held in self._held.items() if is_fenced(held.holder, slot, epoch)]
        for number, held in lost:
            self._lose(number, held, now)
        return len(lost)

    def outcome_of(self, lease: LeaseKey) -> LeaseOutcome:
        """See `Inspection.lease_outcomes`."""
        number = int.from_bytes(lease.fingerprint, "big")
        held = self._held.get(number)
        if held is not None:
            return "leased" if held.token == lease.token else "lost"
        if number not in self._requests.records:
            return "lost"
        head = head_of(self._requests.read(number))
        return "done" if head.state == DONE and head.token == lease.token else "lost"

    def holders(self) -> list[Holder | None]:
        """The holder of each lease."""
        return [held.holder for held in self._held.values()]

    def is_unbegun(self, number: int) -> bool:
        """Whether a request is leased and its attempt does not count yet."""
        held = self._held.get(number)
        return held is not None and not held.begun

    def close(self) -> None:
        """End all leases, so that their hosts are free for other runs."""
        for held in self._held.values():
            held.lane.host.end_lease(self._clock(), contacted=True)
        self._held.clear()
