"""The frontier of a run on a Redis server.

Each call is one Lua script, which Redis runs atomically, also if the client dies meanwhile. The scripts are in
``lua/``; this module packs their arguments and reads their answers. `shoal.frontier.redis.endings` ends leases,
`shoal.frontier.redis.inspection` reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from shoal.clients.redis import Answer, Word, storable_bytes
from shoal.errors import RunError
from shoal.frontier.receipts import Receipts, ServerClock, release_if_cancelled
from shoal.frontier.redis.endings import Endings
from shoal.frontier.redis.inspection import RunInspection
from shoal.frontier.redis.layouts import FOREVER, WORKER, FrontierScripts, read_text
from shoal.frontier.redis.records import (
    Parcel,
    call_tokens,
    known_item,
    pack_leases,
    pack_options,
    pack_token,
    pack_update,
    read_learned,
    read_leases,
    read_rewind,
)
from shoal.frontier.rules import (
    MAX_LEASES,
    check_nonce,
    claim_token,
    new_nonce,
    push_fingerprint,
    queue_full,
    reissued_token,
)
from shoal.http import Request
from shoal.ports import (
    Claim,
    FrontierOptions,
    Heartbeat,
    Holder,
    HostUpdate,
    Lease,
    Leased,
    LoggedItem,
    Pushed,
    Rewind,
    RoleState,
    SilentWorker,
    Stats,
    WorkerState,
)
from shoal.system import chance, clock

_RUNS_PER_CALL = 200
_ALL_HOSTS = bytes(4)


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
        self._endings = endings = Endings(self._run_proven, self._receipts)
        self._time = ServerClock(scripts.client.address.timeout)
        self._takes_part = options is not None
        self._has_joined = False
        self._has_stale_lanes = False
        """Whether the lanes were placed under other options, and must be placed again."""
        self.complete, self.fail, self.release = endings.complete, endings.fail, endings.release
        self.store_cookies = endings.store_cookies
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
            parcel.add_request(request, push_fingerprint(request, seed, cursor, index))
        most = self._max_queue
        role = (b"", b"") if seed is None else (pack_token(seed.token), seed.cursor)
        words = (*role, cursor, "" if most is None else most, *parcel.arguments())
        answer = await self._run_proven("push", *words, continues="" if seed is None else seed.role)
        if not answer:
            raise queue_full(most)
        return Pushed(*answer)

    # -- leasing

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        if nonce:
            check_nonce(nonce)
        return await release_if_cancelled(
            self._lease(limit, ttl, counts_attempt, nonce), lambda leased: self.release(leased.leases)
        )

    async def _lease(self, limit: int, ttl: float, counts_attempt: bool, nonce: bytes) -> Leased:
        self._receipts.check()
        await self.join()
        limit, part = min(max(0, limit), MAX_LEASES), 0
        while True:
            # Each part of a call has its own tokens. A repeated call gets the leases of the last part.
            call = call_tokens(nonce or new_nonce(), part)
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
        check_nonce(nonce)
        if not leases:
            return []
        # The former holder may have contacted the host.
        return await release_if_cancelled(
            self._reissue(leases, ttl, nonce),
            lambda anew: self.release([lease for lease in anew if lease], contacted=True),
        )

    async def _reissue(self, leases: Sequence[Lease], ttl: float, nonce: bytes) -> list[Lease | None]:
        self._receipts.check()
        deadline = clock.now() + ttl
        tokens = [reissued_token(nonce, lease.token) for lease in leases]
        packed = b"".join(map(pack_token, tokens))
        reissued = await self._run("reissue", min(ttl, FOREVER), pack_leases(leases), packed)
        return [
            msgspec.structs.replace(lease, token=token, deadline=deadline) if is_kept else None
            for lease, token, is_kept in zip(leases, tokens, reissued, strict=True)
        ]

    # -- ending leases

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
        token = claim_token(nonce or new_nonce())
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
