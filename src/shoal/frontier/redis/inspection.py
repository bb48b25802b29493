"""Reads a run on Redis: counters, items, hosts, dead requests, the history of a URL.

Long answers are read in pages, so that no call blocks the server for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from heapq import nsmallest
from math import isfinite
from struct import Struct

import msgspec

from shoal.clients.redis import Answer, Word, storable_bytes
from shoal.frontier import rules
from shoal.frontier.faults import compare_counters, describe_losses, make_faults
from shoal.frontier.redis.records import (
    COUNTERS,
    FORMAT,
    HEAD,
    NO_HOST,
    RecordHead,
    UnreadableError,
    known_item,
    read_cause,
    read_events,
    read_head,
    read_host,
    read_items,
    read_record,
    read_rewind,
    read_rival,
    state_of,
)
from shoal.frontier.rules import DEAD, DONE, LEASED, STATE_NAMES
from shoal.http import Request
from shoal.ports import (
    REPAIRED_LEASE,
    Event,
    History,
    HostState,
    LeaseHolder,
    LeaseKey,
    LeaseOutcome,
    LoggedItem,
    Rewind,
    Stats,
    Waits,
)

# Faults of a run on Redis, and their repair.
#
# Each script is one atomic step, and checks requests against what leads to them within that step. So nothing that
# workers do meanwhile looks like a fault.


AUDIT_LIMIT = 200_000
"""Requests that one call counts, so that the count is exact while others work. It takes about a tenth of a second."""
_STEP = 20_000
_LANES = 20_000
"""Hosts that one call checks."""
_AUDIT_ITEMS = 500
_DEEP_STEP = 2_000
"""Requests that one call looks for in their lanes."""
_TRIES = 3
_LEDGER = Struct(f"<{2 + len(COUNTERS)}d")
"""As in ``lua/base.lua``."""
_TEXTS = frozenset({"run", "store", "roles", "items"})
"""Kinds whose examples are texts."""
_COUNTED = frozenset({"counters", "failures", "items", "links", "requests"})
"""Kinds that a wrong counter may cause."""
_HOST_SIZE, _FINGERPRINT_SIZE = 4, 16

FaultCounts = dict[str, tuple[int, bytes]]
"""Count and example of faults, by kind."""


async def _scan(
    run: Callable[..., Awaitable[Answer]], script: str, *arguments: Word, start: bytes = b"0"
) -> AsyncIterator[list[Answer]]:
    """Run a script with one cursor after the other until it has read everything. Yields the rest of each answer."""
    cursor = start
    while True:
        cursor, *answer = await run(script, cursor, *arguments)
        yield answer
        if cursor == b"0":
            return


def _add(found: FaultCounts, faults: Sequence[Answer]) -> None:
    """Add the faults of a script: kind, count, example, ..."""
    for kind, count, example in zip(faults[::3], faults[1::3], faults[2::3], strict=True):
        before, first = found.get(kind.decode(), (0, b""))
        found[kind.decode()] = before + count, first or example


def _read_ledger(packed: bytes) -> dict[str, int]:
    """The counters of a run. Those that are missing are 0: an older version did not know the last ones. So are those
    that are no numbers."""
    values = _LEDGER.unpack_from(packed.ljust(_LEDGER.size, b"\0"))
    return dict(zip(COUNTERS, (int(value) if isfinite(value) else 0 for value in values[2:]), strict=True))


_SEARCH_STEP = 10_000
_RETRY_STEP = 10_000
_PAGE = 200
_ITEMS = "item log"


class RunInspection:
    """Reads a run. ``run`` runs one of its scripts, ``run_continued`` one that continues reading the item log."""

    def __init__(self, run: Callable[..., Awaitable[Answer]], run_continued: Callable[..., Awaitable[Answer]]) -> None:
        self._run = run
        self._run_continued = run_continued

    # -- counters

    async def stats(self) -> Stats:
        *counters, trimmed, seeded = await self._run("stats")
        return Stats(**dict(zip(COUNTERS, counters, strict=True)), trimmed=trimmed, seeding=not seeded)

    async def rewinds(self) -> list[Rewind]:
        return [read_rewind(record) for record in await self._run("value", "LRANGE", ":rewinds", 0, -1)]

    # -- items

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        words = (after, max(0, limit), *known_item(last), "" if max_bytes is None else max_bytes)
        begin, entries = await self._run_continued(_ITEMS, "items", "read", *words)
        items = (item for last, _, key, *words in entries for item in read_items(last, key, words[1::2]))
        return [item for item in items if item.seq > begin][:limit]

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        seen_cursors = [word for role, cursor in (cursors or {}).items() for word in (storable_bytes(role), cursor)]
        await self._run_continued(_ITEMS, "items", "trim", through, *seen_cursors)

    # -- hosts

    async def host_states(self, limit: int = 100) -> list[HostState]:
        states = await self._states()
        return nsmallest(max(0, limit), states, key=lambda state: (-(state.ready + state.in_flight), state.host))

    async def host_state(self, host: str) -> HostState:
        (state,) = await self._states(storable_bytes(host))
        return msgspec.structs.replace(state, host=host)

    async def _states(self, *name: bytes) -> list[HostState]:
        now, every, options, *rest = await self._run("states", *name)
        others = read_host(every) if every else NO_HOST
        return [
            state_of(read_host(record), others, options, ready, float(now), read_rival(longest, run_id))
            for record, ready, longest, run_id in zip(*(rest[first::4] for first in range(4)), strict=True)
        ]

    async def waits(self, hosts: Sequence[str]) -> Waits:
        retry_in, events, *rest = await self._run("waits", *map(storable_bytes, hosts))
        holders = [
            LeaseHolder(
                host=host.decode(errors="replace"),
                run_id=run_id.decode(errors="replace"),
                worker=worker.decode(errors="replace"),
                leases=leases,
                silent_for=float(silent_for),
            )
            for host, run_id, worker, leases, silent_for in zip(*(rest[part::5] for part in range(5)), strict=True)
        ]
        if not retry_in:
            return Waits(holders=holders)
        reason = rules.retry_reason(read_events(events)[-1].detail) if events else ""
        return Waits(holders=holders, retry_in=float(retry_in), retry_reason=reason)

    # -- histories

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        fingerprint = rules.sought_fingerprint(request, parent)
        (queued,) = await self._histories([fingerprint])
        for url in rules.sought_urls(request) if queued is None and not exact else ():
            if (other := await self._search(url)) is not None:
                (queued,) = await self._histories([other])
                break
        return queued or await self._staged(fingerprint)

    async def _staged(self, fingerprint: bytes) -> History | None:
        """The history of a link that is not in the queue yet."""
        stage, chunk = 0, 0
        while stage >= 0:
            stage, chunk, record, parent = await self._run("stage", "find", fingerprint, stage, chunk)
            if record:
                return _history(fingerprint, record, parent, b"", b"", 0, b"")
        return None

    async def _search(self, url: str) -> bytes | None:
        """Find a request whose fingerprint differs: it was not filtered, or is not a GET. Reads all requests."""
        matches: list[tuple[int, bytes]] = []
        async for (some,) in _scan(self._run, "search", _SEARCH_STEP, url.encode()):
            for fingerprint, record in zip(some[::2], some[1::2], strict=True):
                head, request = _readable(record)
                if request is not None and request.url == url:
                    matches.append((head.sequence, fingerprint))
        return min(matches)[1] if matches else None

    async def _histories(self, fingerprints: Sequence[bytes]) -> list[History | None]:
        answer = await self._run("histories", *fingerprints)
        return [
            _history(fingerprint, *parts) if parts else None
            for fingerprint, parts in zip(fingerprints, answer, strict=True)
        ]

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        outcomes: list[LeaseOutcome] = []
        for begin in range(0, len(leases), _PAGE):
            some = leases[begin : begin + _PAGE]
            answer = await self._run("histories", *(lease.fingerprint for lease in some))
            outcomes += [
                _outcome(lease, parts[0]) if parts else "lost" for lease, parts in zip(some, answer, strict=True)
            ]
        return outcomes

    # -- audit

    async def audit(self) -> Stats:
        """A run with more than `AUDIT_LIMIT` requests is read in portions. While workers change it, its counters are
        compared only with the sizes of its keys, which is one step."""
        stats = await self.stats()
        lanes, lost = await self._check_lanes()
        counted, requests, compared = await self._check_requests(stats)
        items = await self._check_items()
        if lost:
            lanes["ready"] = max(lost, lanes.get("ready", (0, b""))[0]), await self._find_lost()
        named_faults = [
            (kind, count, await self._name(kind, example))
            for part in (lanes, requests, items)
            for kind, (count, example) in part.items()
        ]
        return msgspec.structs.replace(counted, faults=make_faults((*named_faults, *compared)))

    async def repair(self) -> list[str]:
        """Each step leaves what it found intact, so workers may go on, and a repair that was
        interrupted may begin again. Counters are counted in one step, so only if they are wrong."""
        lost = await self._repair("store", b"0")
        for act in ("requests", "lanes"):
            await self._repair_all(act)
        if any(fault.kind in _COUNTED for fault in (await self.audit()).faults):
            await self._repair_all("counters")
        names = [word.decode(errors="replace") for word in lost]
        return describe_losses(zip(names[::2], names[1::2], strict=True))

    async def _repair_all(self, act: str) -> None:
        cursor = b"0"
        while True:
            cursor = await self._repair(act, cursor)
            if cursor == b"0":
                break

    async def _repair(self, act: str, cursor: bytes) -> Answer:
        return await self._run("repair", act, FORMAT, REPAIRED_LEASE, cursor, _DEEP_STEP)

    async def _check_lanes(self) -> tuple[FaultCounts, int]:
        """The faults of everything but the requests, and how many ready requests the lanes lack."""
        found: FaultCounts = {}
        for _ in range(_TRIES):
            found, ready, ledgers = {}, 0, set()
            async for ledger, queued, faults in _scan(self._run, "audit_lanes", _LANES):
                ready += queued
                ledgers.add(ledger)
                _add(found, faults)
            if len(ledgers) == 1:  # else the number of ready requests has changed meanwhile
                return found, max(0, _read_ledger(ledgers.pop())["ready"] - ready)
        return found, 0

    async def _check_requests(self, stats: Stats) -> tuple[Stats, FaultCounts, list[tuple[str, int, str]]]:
        """The recounted stats, the faults of requests, and those of counters."""
        step = AUDIT_LIMIT if stats.pushed <= AUDIT_LIMIT else _STEP
        found: FaultCounts = {}
        for _ in range(_TRIES):
            found, counts, ledgers = {}, [0] * len(STATE_NAMES), set()
            async for ledger, some, faults in _scan(self._run, "audit", step, 0):
                counts = [before + more for before, more in zip(counts, some, strict=True)]
                ledgers.add(ledger)
                _add(found, faults)
            if len(ledgers) > 1:
                continue
            stored = msgspec.structs.replace(stats, **_read_ledger(ledgers.pop()))
            counted = msgspec.structs.replace(stored, **dict(zip(STATE_NAMES, counts, strict=True)))
            readable = sum(counts) + found.get("unreadable", (0, b""))[0]
            if counted == stored or step == AUDIT_LIMIT:
                return counted, found, compare_counters(stored, counted, readable)
        return await self.stats(), found, []

    async def _find_lost(self) -> bytes:
        """The fingerprint of a ready request that is in no lane."""
        async for _, _, faults in _scan(self._run, "audit", _DEEP_STEP, 1):
            found: FaultCounts = {}
            _add(found, faults)
            if "ready" in found:
                return found["ready"][1]
        return b""

    async def _check_items(self) -> FaultCounts:
        found: FaultCounts = {}
        at: Answer = 0
        while at != b"":
            at, faults = await self._run("audit_items", at, _AUDIT_ITEMS)
            _add(found, faults)
        return found

    async def _name(self, kind: str, example: bytes) -> str:
        """The example of a fault for people: the URL of a fingerprint, the name of a host."""
        if kind in _TEXTS or len(example) not in (_HOST_SIZE, _FINGERPRINT_SIZE):
            return example.decode(errors="replace")
        if len(example) == _HOST_SIZE:
            return (await self._run("host_name", example) or b"").decode(errors="replace")
        (history,) = await self._histories([example])
        return history.url if history else ""

    # -- the dead

    async def dead_kinds(self) -> dict[str, int]:
        pairs = await self._run("value", "HGETALL", ":kinds")
        return {kind.decode(errors="replace"): int(count) for kind, count in zip(pairs[::2], pairs[1::2], strict=True)}

    async def dead(self) -> AsyncIterator[History]:
        seen: set[bytes] = set()
        async for (fields,) in _scan(self._run, "dead", _PAGE):
            fresh = [fingerprint for fingerprint in dict.fromkeys(fields) if fingerprint not in seen]
            seen.update(fresh)
            for history in await self._histories(fresh) if fresh else ():
                if history is not None and history.state == STATE_NAMES[DEAD]:
                    yield history

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        """One call for every ten thousand requests. Refused links come last."""
        if only is not None:
            listed = [storable_bytes(kind) for kind in (sorted(rules.KINDS_NOT_RETRIED) if kinds is None else kinds)]
            answer = await self._run("retry", b"named", len(listed), 0 if kinds is None else 1, *listed, *only)
            return int(answer[1])
        others = rules.KINDS_NOT_RETRIED | {rules.FULL_KIND} if kinds is None else {*kinds} - {rules.FULL_KIND}
        retried = await self._retry(0 if kinds is None else 1, *map(storable_bytes, sorted(others)))
        return retried + (await self._retry(start=b"refused") if rules.is_retried(rules.FULL_KIND, kinds) else 0)

    async def _retry(self, *words: Word, start: bytes = b"0") -> int:
        return sum([count async for (count,) in _scan(self._run, "retry", _RETRY_STEP, *words, start=start)])


def _readable(record: bytes) -> tuple[RecordHead, Request | None]:
    try:
        return read_record(record)
    except UnreadableError:
        return read_head(record.ljust(HEAD.size, b"\0")), None


def _history(
    fingerprint: bytes, record: bytes, parent: bytes, events: bytes, cause: bytes, unbegun: int, slot: bytes
) -> History:
    head, request = _readable(record)
    worker = slot.decode(errors="replace")
    above = _readable(parent)[1] if parent else None
    kind, reason = read_cause(cause)
    state = STATE_NAMES[head.state] if head.state < len(STATE_NAMES) else STATE_NAMES[DEAD]
    return History(
        url=request.url if request else f"unreadable:{fingerprint.hex()}",
        state=state,
        depth=request.depth if request else 0,
        priority=request.priority if request else 0.0,
        attempts=head.attempts - unbegun,
        status=head.status,
        items=head.items,
        parent=above.url if above else None,
        reason=reason,
        fingerprint=fingerprint,
        kind=kind,
        events=(*read_events(events), Event(rules.moment(head.at), state, worker=worker)),
        worker=worker,
    )


def _outcome(lease: LeaseKey, record: bytes) -> LeaseOutcome:
    head, _ = _readable(record)
    if head.token != lease.token or head.state not in (DONE, LEASED):
        return "lost"
    return "done" if head.state == DONE else "leased"
