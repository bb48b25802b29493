"""The queue of a run in memory: requests enter, are leased, and are completed, failed or released.

`MemoryStages` holds the links of large pages until they enter it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heappop, heappush
from typing import TypeVar

import msgspec

from shoal.frontier import rules
from shoal.frontier.memory.items import MemoryItemLog, MemoryRoles
from shoal.frontier.memory.requests import NO_PARENT, Backlog, NewRequests, Requests, decode_request, encode_request
from shoal.frontier.politeness import Lane
from shoal.frontier.rules import DEAD, DONE, LEASED, READY, STATE_NAMES, WAITING, E, MovedLinks, Portion
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Documents,
    Failure,
    History,
    Holder,
    Lease,
    Leased,
    LeaseKey,
    LeaseOutcome,
    Pushed,
    RequestState,
)
from shoal.system import clock


class MemoryStages:
    """The staged links of a run, in order, by the number of their page. See `shoal.frontier.rules`."""

    def __init__(self, requests: Requests, clock: Callable[[], float]) -> None:
        self.incoming = 0
        """How many links are staged."""
        self._requests = requests
        self._clock = clock
        self._portions: dict[int, deque[Portion]] = {}
        self._movers = 0

    def add(self, parent: int, portions: Sequence[Portion]) -> None:
        """Stage the links of a page."""
        self._portions.setdefault(parent, deque()).extend(portions)
        self.incoming += sum(map(len, portions))

    async def move(self, parent: int) -> MovedLinks:
        """Move all links of a page into the queue. Other tasks run in between. If the caller is cancelled, `help`
        continues."""
        moved = MovedLinks(0, 0)
        self._movers += 1
        try:
            while parent in self._portions:
                moved = moved.plus(self._move_portion(parent))
                await asyncio.sleep(0)
        finally:
            self._movers -= 1
        return moved

    def help(self) -> None:
        """Move a portion of the first page, unless calls of `move` are at work."""
        if self.incoming and not self._movers:
            self._move_portion(next(iter(self._portions)))

    def _move_portion(self, parent: int) -> MovedLinks:
        portions, requests = self._portions[parent], self._requests
        portion = portions.popleft()
        if not portions:
            del self._portions[parent]
        new = {
            fingerprint: (decode_request(payload), payload)
            for fingerprint, payload in rules.first_of_each(portion).items()
            if requests.fingerprints.find(fingerprint) is None
        }
        requests.measure_room()
        refused = requests.add_links(new, parent, len(portion), self._clock())
        self.incoming -= len(portion)
        return MovedLinks(len(new) - refused, refused)

    def find(self, fingerprint: bytes) -> History | None:
        """The history of a staged link. Only for inspection: it reads all staged links."""
        for parent, portions in self._portions.items():
            for name, payload in (link for portion in portions for link in portion):
                if name == fingerprint:
                    return rules.incoming_history(decode_request(payload), self._requests.records.request(parent).url)
        return None

    def count(self) -> int:
        """The number of staged links, recounted."""
        return sum(len(portion) for portions in self._portions.values() for portion in portions)

    def clear(self) -> None:
        self._portions.clear()
        self.incoming = 0


T = TypeVar("T")


class _HeldLease(msgspec.Struct, gc=False):
    """A held lease."""

    number: int
    """The number of its request."""
    token: int
    until: float
    lane: Lane[Backlog]
    rank: float
    holder: Holder | None
    begun: bool
    """Whether its attempt counts. The record of the request includes the attempt either way."""
    origin: tuple[int, bytes] | None = None
    """The old token and the nonce, if it was reissued."""


class MemoryQueue:
    """See `shoal.ports.Queue`. Each call is one atomic step: no method yields to another task while it changes
    something. Only a large page takes more steps: see `MemoryStages`."""

    def __init__(
        self,
        requests: Requests,
        stages: MemoryStages,
        items: MemoryItemLog,
        roles: MemoryRoles,
        clock: Callable[[], float],
        expire_others: Callable[[float], None],
        documents: Documents,
    ) -> None:
        self.halted = False
        """Whether the run is paused or cancelled. Then nothing is leased."""
        self._requests = requests
        self._lanes = requests.lanes
        self._stages = stages
        self._items = items
        self._roles = roles
        self._clock = clock
        self._expire_others = expire_others
        self._documents = documents
        self._held: dict[bytes, _HeldLease] = {}
        """The held leases, by the fingerprint of their request."""
        self._expiries: list[tuple[float, int, bytes]] = []
        """(time, token, fingerprint) of leases. An entry is stale if its lease has ended or was extended."""
        self._waiting: list[tuple[float, int]] = []
        """(time, number) of requests that wait for their next attempt."""
        self._last_calls: dict[Holder | None, tuple[bytes, list[Lease]]] = {}
        """For each holder: the nonce of its last lease call, and what it leased."""
        self._cookies = 0

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        if seed is not None:
            if not self._roles.is_held(seed):
                return Pushed(0, 0)
            self._roles.check_cursor(seed, cursor)
        new = self._requests.select_new(
            (rules.push_fingerprint(request, seed, cursor, i), request) for i, request in enumerate(requests)
        )
        counts = self._requests.counts
        rules.check_queue_size(self._requests.options.max_queue_size, counts[READY] + counts[WAITING], len(new))
        self._requests.add(new, NO_PARENT, len(requests), self._clock())
        if seed is not None:
            self._roles.save_cursor(seed.role, cursor)
        return Pushed(len(new), len(requests) - len(new))

    # -- leasing

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, counts_attempt: bool = True, nonce: bytes = b""
    ) -> Leased:
        nonce = nonce or rules.new_nonce()
        token = rules.token_base(nonce)
        self._roles.check_holder(holder)
        last_nonce, last_leases = self._last_calls.get(holder, (b"", []))
        if nonce == last_nonce:
            renewed = await self.renew(last_leases, ttl)
            return Leased([lease for lease in renewed if lease], 0.0, cookies=self._cookies)
        deadline = clock.now() + ttl
        now = self._clock()
        self.expire_leases(now)
        self._expire_others(now)
        if self.halted:
            return Leased([], None, cookies=self._cookies)
        self._stages.help()
        requests, lanes, leases = self._requests, self._lanes, list[Lease]()
        lanes.reopen(now)
        limit = min(limit, rules.MAX_LEASES)
        until, worker = now + ttl, requests.worker_number("" if holder is None else holder.slot)
        while len(leases) < limit and (lane := lanes.take_best(now)) is not None:
            token += 1
            number, rank, attempt, request = requests.take(lane, now, worker)
            fingerprint = requests.fingerprints[number]
            self._held[fingerprint] = _HeldLease(number, token, until, lane, rank, holder, counts_attempt)
            heappush(self._expiries, (until, token, fingerprint))
            host = lane.host
            learned = host.learned_delay or 0.0
            leases.append(Lease(request, fingerprint, token, attempt, host.name, deadline, learned))
            lanes.place(lane, now)
        self._last_calls[holder] = nonce, leases
        lanes.called, lanes.asked = now, now if len(leases) < limit else 0.0
        return Leased(leases, self._wait(now), cookies=self._cookies)

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        key, value, replaces, version = msgspec.structs.astuple(cookies)
        if not await self._documents.put_document(key, value, replaces=replaces, version=version):
            return 0, []
        self._cookies = stored = self._cookies + 1
        return stored, await self.complete(completions) if completions else []

    def _wait(self, now: float) -> float | None:
        """Seconds until something changes by itself: a retry is due, a lease expires, a host is due, links arrive."""
        next_retry = self._waiting[0][0] if self._waiting else None
        incoming = now + rules.POLL if self._stages.incoming else None
        moments = (next_retry, self._next_expiry(), self._lanes.next_due(), incoming)
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    def _next_expiry(self) -> float | None:
        """When the next lease expires. Drops stale entries on the way."""
        while self._expiries:
            until, token, fingerprint = self._expiries[0]
            held = self._held.get(fingerprint)
            if held is not None and held.token == token and held.until == until:
                return until
            heappop(self._expiries)
        return None

    def expire_leases(self, now: float) -> None:
        """End leases that have run out, and make requests ready that have waited long enough."""
        while self._expiries and self._expiries[0][0] <= now:
            _, token, fingerprint = heappop(self._expiries)
            held = self._held.get(fingerprint)
            if held is not None and held.token == token and held.until <= now:
                self._lose(fingerprint, held, now)
        requests = self._requests
        while self._waiting and self._waiting[0][0] <= now:
            _, number = heappop(self._waiting)
            head, request = requests.read(number)
            requests.update(number, head, head._replace(state=READY))
            requests.requeue(requests.lane_of(request), -request.priority, number, now)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        renewed: list[Lease | None] = []
        for lease in leases:
            held = self._current(lease)
            if held is None:
                renewed.append(None)
                continue
            self._extend(lease.fingerprint, held, until)
            renewed.append(msgspec.structs.replace(lease, deadline=deadline))
        return renewed

    def _extend(self, fingerprint: bytes, held: _HeldLease, until: float) -> None:
        held.until = until
        heappush(self._expiries, (until, held.token, fingerprint))

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        rules.check_nonce(nonce)
        deadline = clock.now() + ttl
        until = self._clock() + ttl
        reissued: set[bytes] = set()
        answer: list[Lease | None] = []
        for lease in leases:
            fingerprint, origin = lease.fingerprint, (lease.token, nonce)
            held = self._held.get(fingerprint)
            if held is None or fingerprint in reissued or (held.token != lease.token and held.origin != origin):
                answer.append(None)
                continue
            reissued.add(fingerprint)
            if held.token == lease.token:
                held.token, held.origin, held.begun = rules.reissued_token(nonce, lease.token), origin, True
            self._extend(fingerprint, held, until)
            answer.append(msgspec.structs.replace(lease, token=held.token, deadline=deadline))
        return answer

    # -- ending a lease

    def _current(self, lease: Lease) -> _HeldLease | None:
        """The held lease, if the token of ``lease`` is its current one."""
        held = self._held.get(lease.fingerprint)
        return None if held is None or held.token != lease.token else held

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        # A client whose answer was lost repeats the completion.
        repeated_tokens = {page.lease.token for page in completions if self.outcome_of(page.lease) == "done"}
        results, moved = await self._end(completions, self._complete)
        for place, links in moved.items():
            results[place] = rules.count_moved(completions[place], links)
        return [
            Pushed(0, 0) if pushed is None and page.lease.token in repeated_tokens else pushed
            for page, pushed in zip(completions, results, strict=True)
        ]

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        states, _ = await self._end(failures, self._fail)
        return states

    async def _end(
        self, pages: Sequence[E], end: Callable[[E, NewRequests, int, float], T]
    ) -> tuple[list[T | None], dict[int, MovedLinks]]:
        """End the leases of pages in one step, then move the links of large pages. Returns a list of what ``end``
        returned, None for a lost lease, and by position what became of the links of large pages. If a child cannot be
        encoded, raises RequestError and changes nothing."""
        pages, staged = await rules.split_large(pages, encode_request)
        now = self._lanes.called = self._clock()
        self._requests.measure_room()
        new = [self._requests.select_children(page) for page in pages]
        results: list[T | None] = []
        ended: dict[int, int] = {}
        for place, (page, children) in enumerate(zip(pages, new, strict=True)):
            held = self._current(page.lease)
            if held is None:
                results.append(None)
                continue
            del self._held[page.lease.fingerprint]
            results.append(end(page, children, held.number, now))
            held.lane.host.end_lease(now, contacted=page.contacted)
            if place in staged and results[place] != STATE_NAMES[WAITING]:
                ended[place] = held.number
                self._stages.add(held.number, staged[place])
        return results, {place: await self._stages.move(parent) for place, parent in ended.items()}

    def _complete(self, page: Completion, new: NewRequests, number: int, now: float) -> Pushed:
        requests, lease = self._requests, page.lease
        items = requests.records.set_done(number, page.status, len(page.items), now, lease.token)
        requests.counts[LEASED] -= 1
        requests.counts[DONE] += 1
        self._items.append(lease.fingerprint, page.items, items)
        if page.note:
            requests.add_event(number, now, rules.NOTE_EVENT, page.note, requests.records.head(number).worker)
        if page.redirected:
            requests.redirects += 1
        return requests.add_children(page, number, new, page.duplicates, now)

    def _fail(self, failure: Failure, new: NewRequests, number: int, now: float) -> RequestState:
        requests = self._requests
        old = requests.records.head(number)
        head = old._replace(status=failure.status, at=now)
        waits = failure.retry_in is not None and head.attempts < self._requests.options.max_attempts
        requests.add_event(number, now, *rules.failure_event(head.attempts, failure, waits=waits), head.worker)
        if waits:
            assert failure.retry_in is not None
            heappush(self._waiting, (now + failure.retry_in, number))
        else:
            requests.deaths[number] = (failure.kind, failure.reason)
            head = head._replace(items=self._items.append(failure.lease.fingerprint, failure.items, head.items))
            requests.add_children(failure, number, new, 0, now)
        state = WAITING if waits else DEAD
        requests.update(number, old, head._replace(state=state))
        return STATE_NAMES[state]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        now = self._clock()
        released = []
        for lease in leases:
            held = self._current(lease)
            if held is not None:
                self._release(lease.fingerprint, held, now, contacted=contacted)
            released.append(held is not None)
        return released

    def _release(self, fingerprint: bytes, held: _HeldLease, now: float, *, contacted: bool) -> None:
        del self._held[fingerprint]
        head = self._requests.records.head(held.number)
        self._requests.update(held.number, head, head._replace(state=READY, attempts=head.attempts - 1, at=now))
        self._requests.requeue(held.lane, held.rank, held.number, now)
        held.lane.host.end_lease(now, contacted=contacted)

    def _lose(self, fingerprint: bytes, held: _HeldLease, now: float) -> None:
        """End a lease whose worker is lost."""
        if not held.begun:
            self._release(fingerprint, held, now, contacted=False)
            return
        del self._held[fingerprint]
        requests, number = self._requests, held.number
        head = requests.records.head(number)
        reason = rules.lost_reason(head.attempts)
        requests.add_event(number, now, rules.LOST_EVENT, reason, head.worker)
        if head.attempts >= self._requests.options.max_attempts:
            requests.deaths[number] = (rules.LOST_KIND, reason)
            requests.update(number, head, head._replace(state=DEAD, at=now))
        else:
            requests.update(number, head, head._replace(state=READY, at=now))
            requests.requeue(held.lane, held.rank, number, now)
        held.lane.host.end_lease(now, contacted=True)

    async def fence(self, slot: str, epoch: int) -> int:
        self._roles.fence(slot, epoch)
        now = self._clock()
        lost = [(name, held) for name, held in self._held.items() if rules.is_fenced(held.holder, slot, epoch)]
        for fingerprint, held in lost:
            self._lose(fingerprint, held, now)
        return len(lost)

    def outcome_of(self, lease: Lease | LeaseKey) -> LeaseOutcome:
        """See `Inspection.lease_outcomes`."""
        held = self._held.get(lease.fingerprint)
        if held is not None:
            return "leased" if held.token == lease.token else "lost"
        number = self._requests.fingerprints.find(lease.fingerprint)
        if number is None or self._requests.records.is_on_disk(number):
            return "lost"
        head = self._requests.records.head(number)
        return "done" if head.state == DONE and head.token == lease.token else "lost"

    def find_faults(self) -> Iterator[tuple[str, int, str]]:
        """The faults of waiting requests and of leases, as (kind, count, example)."""
        states = list(enumerate(self._requests.records.states()))
        waiting = {number for _, number in self._waiting}
        yield "waiting", len(waiting ^ {number for number, state in states if state == WAITING}), ""
        ends = {(until, token, fingerprint) for until, token, fingerprint in self._expiries}
        held = {lease.number for name, lease in self._held.items() if (lease.until, lease.token, name) in ends}
        leased = {number for number, state in states if state == LEASED}
        yield "leases", len(leased - held), ""
        yield "stray leases", len(held - leased), ""
        hosts = Counter(lease.lane.host for lease in self._held.values())
        busy = [host.name for host, count in hosts.items() if host.in_flight < count]
        yield "in flight", len(busy), next(iter(busy), "")

    def holders(self) -> list[Holder | None]:
        """The holder of each lease."""
        return [held.holder for held in self._held.values()]

    def held_at(self, hosts: Collection[str]) -> list[tuple[str, str]]:
        """See `shoal.frontier.politeness.OpenRun`."""
        return [
            (held.lane.host.name, "" if held.holder is None else held.holder.slot)
            for held in self._held.values()
            if held.lane.host.name in hosts
        ]

    def next_retry(self) -> tuple[float, int] | None:
        """When the next waiting request is ready, and its number."""
        return self._waiting[0] if self._waiting else None

    def is_unbegun(self, fingerprint: bytes) -> bool:
        """Whether a request is leased, but its attempt does not count yet."""
        held = self._held.get(fingerprint)
        return held is not None and not held.begun

    def close(self) -> None:
        """End all leases, so that their hosts are free for other runs."""
        for held in self._held.values():
            held.lane.host.end_lease(self._clock(), contacted=True)
        self._held.clear()
