"""The frontier of a run on a Redis server.

Each call is one Lua script, which Redis runs atomically, also if the client dies meanwhile. The scripts are in
``lua/``; this module packs their arguments and reads their answers. `shoal.frontier.redis.inspection` reads.

Redis runs one script at a time, so a script with very many links would block all other clients. Therefore the links of
large pages are uploaded in chunks to a stage first. The script that ends the lease only registers the stage. Later
scripts move its chunks into the queue, one at a time. See ``lua/stages.lua``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from shoal.clients.redis import Answer, Word, storable_bytes
from shoal.errors import RunError, StoreAwayError
from shoal.frontier import rules
from shoal.frontier.receipts import Receipts, ServerClock, release_if_cancelled
from shoal.frontier.redis.inspection import RunInspection
from shoal.frontier.redis.records import (
    FOREVER,
    SETTLED,
    WORKER,
    FrontierScripts,
    Parcel,
    call_tokens,
    document_words,
    known_item,
    pack_leases,
    pack_options,
    pack_token,
    pack_update,
    read_learned,
    read_leases,
    read_rewind,
    read_text,
)
from shoal.frontier.rules import DEAD, DONE, READY, STATE_NAMES, WAITING
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Failure,
    FrontierOptions,
    Heartbeat,
    Holder,
    HostUpdate,
    Lease,
    Leased,
    LoggedItem,
    Pushed,
    RequestState,
    Rewind,
    RoleState,
    SilentWorker,
    Stats,
    WorkerState,
)
from shoal.system import chance, clock

_RUNS_PER_CALL = 200
_ALL_HOSTS = bytes(4)
_MAX_TRIES = 3

E = TypeVar("E", Completion, Failure)


class _EndingResult(NamedTuple):
    """The result of an ending. ``state`` is -1 if the lease was lost."""

    state: int
    added: int
    known: int
    refused: int
    order: int


class _Stage(NamedTuple):
    chunks: int
    links: int


_NO_STAGE = _Stage(0, 0)
_REFUSED = _Stage(1, 0)
"""A stage that does not exist: if the lease is held after all, the page is not completed without its links."""


class RedisFrontier:
    """See `shoal.ports.Frontier`. The process keeps only receipts, to notice a store that went back in time."""

    def __init__(
        self, scripts: FrontierScripts, run_id: str, number: int, options: FrontierOptions | None, holder: Holder | None
    ) -> None:
        """``options``: those of the run from ``join`` on. None: it is only looked at."""
        self._scripts = scripts
        self._run_id = run_id
        self._run_key = b"%d %b" % (number, storable_bytes(run_id))
        self._max_queue = None if options is None else options.max_queue_size
        self._options = pack_options(options or FrontierOptions())
        self._weight = (options or FrontierOptions()).weight
        self._slot: tuple[bytes, int] | tuple[()] = ()
        if holder is not None:
            self.hold(holder)
        self._receipts = Receipts[bytes]()
        self._recovering = asyncio.Lock()
        self._client = chance.token_bytes(12)
        self._time = ServerClock(scripts.client.address.timeout)
        self._takes_part = options is not None
        self._has_joined = False
        self._has_stale_lanes = False
        """Whether the lanes were placed under other options, and must be placed again."""
        inspection = RunInspection(self._run, self._run_continued)
        self.read_items, self.trim_items = inspection.read_items, inspection.trim_items
        self._stats, self.audit, self.rewinds = inspection.stats, inspection.audit, inspection.rewinds
        self.repair = inspection.repair
        self.find, self.dead_kinds, self.dead = inspection.find, inspection.dead_kinds, inspection.dead
        self.lease_outcomes = inspection.lease_outcomes
        self.retry_dead, self.host_states = inspection.retry_dead, inspection.host_states
        self.host_state, self.waits = inspection.host_state, inspection.waits

    def hold(self, holder: Holder) -> None:
        self._slot = storable_bytes(holder.slot), holder.epoch

    async def _run(self, script: str, *arguments: Word, proof: bytes = b"") -> Answer:
        try:
            return await self._scripts.run(script, self._run_key, self._options + proof, *arguments)
        except RunError as exc:
            raise RunError(f"run {self._run_id}: {exc}") from exc

    async def _run_proven(self, script: str, *arguments: Word, continues: str = "") -> Answer:
        """Run a script that presents the newest receipt."""
        return await self._run_watched(script, arguments, self._receipts.proof or b"", continues)

    async def _run_continued(self, continues: str, script: str, *arguments: Word) -> Answer:
        """Run a script that continues an earlier call: on a role, or on the item log."""
        return await self._run_watched(script, arguments, b"", continues)

    async def _run_watched(self, script: str, arguments: Sequence[Word], proof: bytes, continues: str) -> Answer:
        with self._receipts.watch(continues, proven=bool(proof)) as call:
            answer = await self._run(script, *arguments, proof=proof)
        if continues and answer:
            self._receipts.confirmed(call, continues)
        return answer

    async def join(self) -> None:
        """Set the options of the run, once, and again after a rewind. Does nothing if it is only looked at."""
        if self._takes_part and not self._has_joined:
            self._has_stale_lanes = bool(await self._run("join", repr(self._weight))) or self._has_stale_lanes
            self._has_joined = True
        if self._has_stale_lanes:
            await self._place_lanes(self._run_key)
            self._has_stale_lanes = False

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        if not requests and seed is None:
            return Pushed(0, 0)
        parcel = Parcel()
        for index, request in enumerate(requests):
            parcel.add_request(request, rules.push_fingerprint(request, seed, cursor, index))
        most = self._max_queue
        role = (b"", b"") if seed is None else (pack_token(seed.token), seed.cursor)
        words = (*role, cursor, "" if most is None else most, *parcel.arguments())
        answer = await self._run_proven("push", *words, continues="" if seed is None else seed.role)
        if not answer:
            raise rules.queue_full(most)
        return Pushed(*answer)

    # -- leasing

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        if nonce:
            rules.check_nonce(nonce)
        return await release_if_cancelled(self._lease(limit, ttl, counts_attempt, nonce), self.release)

    async def _lease(self, limit: int, ttl: float, counts_attempt: bool, nonce: bytes) -> Leased:
        self._receipts.check()
        await self.join()
        limit, part = min(max(0, limit), rules.MAX_LEASES), 0
        while True:
            # Each part of a call has its own tokens. A repeated call gets the leases of the last part.
            call = call_tokens(nonce or rules.new_nonce(), part)
            again = (self._client, nonce, part) if nonce else (b"", b"", 0)
            sent, not_after = clock.now(), self._time.not_after
            until = "" if not_after is None else f"{not_after:.6f}"
            wait, server_time, *granted = await self._run_proven(
                "lease", limit, min(ttl, FOREVER), until, int(counts_attempt), call, *again, *self._slot
            )
            self._time.observe(sent, float(server_time))
            if not granted:  # too late by the server's clock, which has jumped; now its time is known
                continue
            learned, fingerprints, records, buried, poll_after, cookies = granted
            deadline = sent + ttl
            leases, unreadable = read_leases(fingerprints, records, read_learned(learned), deadline)
            if len(leases) < len(records):
                await self._run_proven("settle", *unreadable.endings())
            if leases or not (records or buried):  # else there may be more after the unreadable ones
                return Leased(leases, float(wait) if wait else None, float(poll_after), cookies)
            part += 1

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        if not leases:
            return []
        self._receipts.check()
        deadline = clock.now() + ttl
        held = await self._run("renew", min(ttl, FOREVER), pack_leases(leases))
        return [
            msgspec.structs.replace(lease, deadline=deadline) if is_held else None
            for lease, is_held in zip(leases, held, strict=True)
        ]

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        rules.check_nonce(nonce)
        if not leases:
            return []
        return await release_if_cancelled(self._reissue(leases, ttl, nonce), self.release)

    async def _reissue(self, leases: Sequence[Lease], ttl: float, nonce: bytes) -> list[Lease | None]:
        self._receipts.check()
        deadline = clock.now() + ttl
        tokens = [rules.reissued_token(nonce, lease.token) for lease in leases]
        packed = b"".join(map(pack_token, tokens))
        reissued = await self._run("reissue", min(ttl, FOREVER), pack_leases(leases), packed)
        return [
            msgspec.structs.replace(lease, token=token, deadline=deadline) if is_kept else None
            for lease, token, is_kept in zip(leases, tokens, reissued, strict=True)
        ]

    # -- ending leases

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        return (await self._complete(completions, ()))[1] if completions else []

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        return await self._complete(completions, document_words(*msgspec.structs.astuple(cookies)))

    async def _complete(
        self, completions: Sequence[Completion], cookies: Sequence[bytes]
    ) -> tuple[int, list[Pushed | None]]:
        def add(parcel: Parcel, page: Completion, stage: _Stage | None) -> None:
            parcel.add_ending(
                page.lease, DONE, contacted=page.contacted, redirected=page.redirected, status=page.status,
                duplicates=page.duplicates, item_errors=page.item_errors, text=page.note, items=page.items,
                children=0 if stage else len(page.children), staged=stage or (0, 0),
            )  # fmt: skip

        version, settled = await self._end(completions, add, cookies)
        return version, [
            None if result.state < 0 else Pushed(result.added, result.known, result.refused) for result in settled
        ]

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        def add(parcel: Parcel, failure: Failure, stage: _Stage | None) -> None:
            parcel.add_ending(
                failure.lease, DEAD if failure.retry_in is None else WAITING, contacted=failure.contacted,
                status=failure.status, retry_in=min(failure.retry_in or 0.0, FOREVER), kind=failure.kind,
                text=failure.reason, items=failure.items, children=0 if stage else len(failure.children),
                staged=stage or (0, 0), item_errors=failure.item_errors,
            )  # fmt: skip

        _, settled = await self._end(failures, add) if failures else (0, [])
        return [None if result.state < 0 else STATE_NAMES[result.state] for result in settled]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        if not leases:
            return []
        parcel = Parcel()
        for lease in leases:
            parcel.add_ending(lease, READY, contacted=contacted)
        _, settled = await self._settle(parcel, leases)
        return [result.state >= 0 for result in settled]

    async def _end(
        self, endings: Sequence[E], add: Callable[[Parcel, E, _Stage | None], None], cookies: Sequence[bytes] = ()
    ) -> tuple[int, list[_EndingResult]]:
        """End all in one script, after the links of the largest pages were staged. The same script writes ``cookies``.
        Returns the version of the cookies, and the result of each page, unless they were not written."""
        large = _large(endings)
        for _ in range(_MAX_TRIES):
            stages = {index: await self._upload(endings[index]) for index in large}
            parcel = Parcel()
            for index, ended in enumerate(endings):
                add(parcel, ended, stages.get(index))
                if index not in stages:
                    _add_children(parcel, ended.lease, ended.children)
            version, settled = await self._settle(parcel, [ended.lease for ended in endings], cookies)
            if settled or cookies:
                return version, [
                    await self._move_links(endings[index].lease, result)
                    if stages.get(index, _NO_STAGE).links
                    else result
                    for index, result in enumerate(settled)
                ]
        raise StoreAwayError("the store lost the links of a page while they were uploaded; try again in a moment")

    async def _settle(
        self, parcel: Parcel, leases: Sequence[Lease], cookies: Sequence[bytes] = ()
    ) -> tuple[int, list[_EndingResult]]:
        """The version of the cookies, and the result of each. Both are empty if a stage has expired, or if the cookies
        have another version: then nothing was changed."""
        call = self._receipts.begin()
        answer = await self._run_proven("settle", *parcel.endings(cookies))
        version, answer = answer if isinstance(answer, list) else (0, answer)
        settled = [_EndingResult._make(fields) for fields in SETTLED.iter_unpack(answer)]
        order, index = max(((result.order, index) for index, result in enumerate(settled)), default=(0, 0))
        if order:
            self._receipts.completed(call, order, pack_leases([leases[index]]))
        return version, settled

    async def _upload(self, ended: Completion | Failure) -> _Stage:
        """Stage the links of a page. Nothing is staged if its lease was lost."""
        lease, children = ended.lease, ended.children
        words = lease.fingerprint, pack_token(lease.token)
        for first in range(0, len(children), rules.CHUNK):
            parcel, some = Parcel(), children[first : first + rules.CHUNK]
            _add_children(parcel, lease, some, first)
            if not await self._run_proven("stage", "put", *words, first // rules.CHUNK, parcel.chunk(len(some))):
                return _REFUSED
        return _Stage(-(-len(children) // rules.CHUNK), len(children))

    async def _move_links(self, lease: Lease, settled: _EndingResult) -> _EndingResult:
        """Move the staged links into the queue and count them. If this client dies, others move them."""
        if settled.state not in (DONE, DEAD):
            return settled
        while True:
            remaining, added, known, refused = await self._run_proven("stage", "move", pack_token(lease.token))
            if not remaining:
                return settled._replace(added=added, known=settled.known + known, refused=refused)
            await asyncio.sleep(0)

    async def fence(self, slot: str, epoch: int) -> int:
        lost: int = await self._run("fence", storable_bytes(slot), epoch)
        return lost

    # -- workers

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        name, machine = storable_bytes(heartbeat.worker), storable_bytes(heartbeat.machine)
        due = await self._run("beat", name, heartbeat.epoch, heartbeat.session, heartbeat.pid, machine)
        return None if due is None else float(due)

    async def fence_silent(self) -> list[SilentWorker]:
        """See `shoal.ports.Workers`. One step for each run."""
        fenced: list[SilentWorker] = []
        for run in await self._run("silent"):
            with suppress(RunError):  # it was deleted meanwhile
                workers = await self._scripts.run("fence", run, self._options)
                run_id = run.partition(b" ")[2].decode(errors="replace")
                for name, leases in zip(workers[::2], workers[1::2], strict=True):
                    fenced.append(SilentWorker(run_id, name.decode(errors="replace"), int(leases)))
        return fenced

    async def leave(self, worker: str, epoch: int) -> None:
        await self._run("leave", storable_bytes(worker), epoch)

    async def workers(self) -> list[WorkerState]:
        return sorted((_worker_state(*row) for row in await self._run("workers")), key=lambda state: state.worker)

    # -- roles

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"", above: int = 0) -> Claim | None:
        token = rules.claim_token(nonce or rules.new_nonce())
        words = (storable_bytes(role), pack_token(token), min(ttl, FOREVER), above)
        answer = await self._run_continued(role, "role", "claim", *words, *self._slot)
        return Claim(role, token, *answer) if answer else None

    async def forget(self, role: str) -> bool:
        self._receipts.check()
        return bool(await self._run("role", "forget", storable_bytes(role)))

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        words = storable_bytes(claim.role), pack_token(claim.token), claim.cursor, min(ttl, FOREVER), cursor
        return bool(await self._run_continued(claim.role, "role", "advance", *words, *known_item(last)))

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        words = (storable_bytes(claim.role), pack_token(claim.token), claim.cursor, int(finished))
        return bool(await self._run_continued(claim.role, "role", "relinquish", *words))

    async def roles(self) -> list[RoleState]:
        answer = await self._run("role", "list")
        return [
            RoleState(
                role=name.decode(errors="replace"),
                cursor=cursor,
                held=bool(held),
                finished=bool(finished),
                holder=holder.decode(errors="replace"),
            )
            for name, cursor, held, finished, holder in zip(*(answer[part::5] for part in range(5)), strict=True)
        ]

    # -- a store that went back in time

    async def recover(self) -> Rewind | None:
        async with self._recovering:
            notice = self._receipts.notice
            if notice is None:
                return None
            age = "" if notice.age is None else clock.now() - notice.at + notice.age
            receipts = [part for pair in self._receipts.ages() for part in pair]
            recorded = await self._run("recover", age, clock.now() - notice.at, *receipts)
            self._receipts.clear()
            self._has_joined = False  # the options may have gone back too
            return read_rewind(recorded)

    # -- hosts

    async def update_host(self, host: str, update: HostUpdate) -> None:
        """Lanes are moved in small steps, as Redis does nothing else meanwhile."""
        words = (storable_bytes(host), pack_update(update), storable_bytes(update.block_reason))
        number = await self._run("host", *words)
        if not number:  # no lane of another run can be due earlier
            return
        runs = await self._scripts.run("value", b"", self._options, "HVALS", "runs")
        if number != _ALL_HOSTS:
            for first in range(0, len(runs), _RUNS_PER_CALL):
                await self._run("place_host", number, *runs[first : first + _RUNS_PER_CALL])
            return
        for run in runs:
            with suppress(RunError):  # it was deleted meanwhile
                await self._place_lanes(run)

    async def _place_lanes(self, run: bytes) -> None:
        """Move all lanes of a run to where they belong."""
        cursor = b"0"
        while True:
            cursor = await self._scripts.run("place", run, self._options, cursor)
            if cursor == b"0":
                return

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        await self._scripts.run("fact", b"", b"", storable_bytes(key), value, min(ttl, FOREVER))

    async def recall(self, key: str) -> bytes | None:
        value: bytes | None = await self._scripts.run("fact", b"", b"", storable_bytes(key))
        return value

    # -- inspection

    async def stats(self) -> Stats:
        stats = await self._stats()
        if stats.rewinds or not self._receipts.has_recorded:
            return stats
        await self._run("recover", "", 0)  # the record was lost in another rewind
        return await self._stats()

    async def close(self) -> None:
        """Does nothing: the connections belong to the store."""


def _worker_state(name: bytes, record: bytes, silent_for: bytes, leases: int) -> WorkerState:
    worker = name.decode(errors="replace")
    if not record:
        return WorkerState(worker=worker, leases=leases)
    _, session, _, pid = WORKER.unpack_from(record)
    return WorkerState(
        worker=worker,
        machine=read_text(record, WORKER.size)[0],
        pid=pid,
        session=session,
        silent_for=float(silent_for),
        leases=leases,
    )


def _large(endings: Sequence[Completion | Failure]) -> list[int]:
    """Which pages to stage, largest first, so that the links of the others fit into one script. Never a redirect: its
    child enters a full queue too, and staged links do not."""
    links = sum(len(ended.children) for ended in endings)
    if links <= rules.MAX_LINKS:
        return []
    large = []
    for index in sorted(range(len(endings)), key=lambda index: -len(endings[index].children)):
        if links <= rules.MAX_LINKS:
            break
        if rules.is_redirect(endings[index]):
            continue
        large.append(index)
        links -= len(endings[index].children)
    return large


def _add_children(parcel: Parcel, lease: Lease, children: Sequence[Request], first: int = 0) -> None:
    for index, child in enumerate(children, first):
        parcel.add_request(child, rules.child_fingerprint(child, lease.fingerprint, index), lease.fingerprint)
