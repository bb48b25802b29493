"""A run on a backend and the same run in the model: each step is taken on both, and the results are compared."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple, Protocol, TypeVar

import pytest

from shoal.errors import FencedError, QueueFullError
from shoal.http import Request
from shoal.ports import Claim, Completion, Failure, Frontier, Holder, Lease, Pushed, Stats
from shoal.testing.model import Model, ModelLease

Result = TypeVar("Result")


class Do(Protocol):
    """Runs a call on the backend to its end."""

    def __call__(self, call: Coroutine[object, object, Result], /) -> Result: ...


class LeasePair(NamedTuple):
    """A lease of the backend, and the same lease of the model."""

    lease: Lease
    held: ModelLease


class ClaimedRole(NamedTuple):
    """A claim of the backend, and the token of the model's claim."""

    claim: Claim
    token: int


class BatchOutcome(NamedTuple):
    """How the pages of a batch end. ``make_children`` makes new requests at each call."""

    items: list[bytes]
    contacted: bool
    redirected: bool
    make_children: Callable[[int], Sequence[Request]]
    """Takes the position of the page in the batch."""


class Pair:
    """One run. Every method takes a step on the backend and on the model; AssertionError if the results differ."""

    def __init__(self, do: Do, frontier: Frontier, model: Model) -> None:
        self._do = do
        self.frontier = frontier
        self.model = model
        self._fingerprints: dict[int, bytes] = {}
        self._tokens: dict[int, int] = {}
        """Tokens of reissued leases: the backend's by the model's."""

    # -- pushing and leasing

    def push(self, requests: list[Request], role: ClaimedRole | None = None, cursor: bytes = b"") -> bool:
        """Push with or without the seed role. Returns whether the push was accepted."""
        claim, token = role or (None, None)
        expected: Pushed | None = None
        try:
            expected = self.model.push(requests, token, cursor)
        except QueueFullError:
            with pytest.raises(QueueFullError):
                self._do(self.frontier.push(requests, seed=claim, cursor=cursor))
            return False
        assert self._do(self.frontier.push(requests, seed=claim, cursor=cursor)) == expected
        return token is None or self.model.holds("seed", token)

    def lease(
        self,
        limit: int,
        ttl: float,
        holder: Holder | None = None,
        counts_attempt: bool = True,
        frontier: Frontier | None = None,
    ) -> list[LeasePair]:
        """Lease as ``holder``, whose view of the run is ``frontier``."""
        frontier = frontier or self.frontier
        if self.model.is_refused(holder):
            with pytest.raises(FencedError):
                self._do(frontier.lease(limit, ttl, counts_attempt=counts_attempt))
            return []
        leased = self._do(frontier.lease(limit, ttl, counts_attempt=counts_attempt))
        granted = [lease.request for lease in leased.leases]
        expected, wait = self.model.lease(limit, ttl, holder, counts_attempt=counts_attempt, granted=granted)
        assert [(lease.request, lease.attempt) for lease in leased.leases] == [
            (held.entry.request, held.attempt) for held in expected
        ]
        if len(expected) < limit:
            assert leased.wait is None or leased.wait > 0, "the hint asks the caller to poll at once"
            assert wait is None or (leased.wait is not None and leased.wait <= wait + 0.01), "the hint is too late"
        taken = [LeasePair(lease, held) for lease, held in zip(leased.leases, expected, strict=True)]
        for lease, held in taken:
            assert lease.host == held.entry.host
            name = lease.request.fingerprint() if not lease.request.dont_filter else lease.fingerprint
            assert lease.fingerprint == self._fingerprints.setdefault(id(held.entry), name)
        return taken

    def renew(self, batch: list[LeasePair], ttl: float) -> None:
        renewed = self._do(self.frontier.renew([taken.lease for taken in batch], ttl))
        assert [lease is not None for lease in renewed] == [self.model.renew(taken.held, ttl) for taken in batch]

    def reissue(self, batch: list[LeasePair], ttl: float, nonce: bytes) -> list[LeasePair]:
        reissued = self._do(self.frontier.reissue([taken.lease for taken in batch], ttl, nonce=nonce))
        expected = self.model.reissue([taken.held for taken in batch], ttl, nonce)
        assert [lease and (lease.request, lease.attempt) for lease in reissued] == [
            held and (held.entry.request, held.attempt) for held in expected
        ]
        taken = [LeasePair(lease, held) for lease, held in zip(reissued, expected, strict=True) if lease and held]
        for lease, held in taken:
            assert lease.token == self._tokens.setdefault(held.token, lease.token)
        return taken

    # -- ending leases

    def complete(self, batch: list[LeasePair], outcome: BatchOutcome) -> None:
        completions = [
            Completion(
                lease=taken.lease,
                items=outcome.items,
                children=outcome.make_children(place),
                status=200 + place,
                duplicates=place,
                contacted=outcome.contacted,
                redirected=outcome.redirected and place == 0,
            )
            for place, taken in enumerate(batch)
        ]
        room = self.model.measure_room()
        expected = [
            self.model.complete(
                taken.held, each.items, each.children,
                status=each.status, duplicates=each.duplicates, contacted=each.contacted,
                room=None if each.redirected else room,
            )
            for taken, each in zip(batch, completions, strict=True)
        ]  # fmt: skip
        results = self._do(self.frontier.complete(completions))
        for taken, result, wanted in zip(batch, results, expected, strict=True):
            is_repeat = wanted is None and taken.held.entry.state == "done"
            assert result == wanted or (is_repeat and result == Pushed(0, 0))

    def fail(self, batch: list[LeasePair], retry_in: float | None, kind: str, outcome: BatchOutcome) -> None:
        failures = [
            Failure(
                lease=taken.lease,
                kind=kind,
                reason=f"because of {kind}",
                retry_in=retry_in,
                items=outcome.items,
                children=outcome.make_children(0),
                status=500 + place,
                contacted=outcome.contacted,
            )
            for place, taken in enumerate(batch)
        ]
        room = self.model.measure_room()
        expected = [
            self.model.fail(
                taken.held, retry_in, each.items, each.children,
                status=each.status, kind=kind, reason=each.reason, contacted=each.contacted, room=room,
            )
            for taken, each in zip(batch, failures, strict=True)
        ]  # fmt: skip
        assert self._do(self.frontier.fail(failures)) == expected

    def release(self, batch: list[LeasePair], contacted: bool) -> None:
        expected = [self.model.release(taken.held, contacted=contacted) for taken in batch]
        assert self._do(self.frontier.release([taken.lease for taken in batch], contacted=contacted)) == expected

    def fence(self, holder: Holder) -> None:
        """Fence the slot of a holder under its epoch, and compare the roles."""
        if self.model.is_refused(holder):
            with pytest.raises(FencedError):
                self._do(self.frontier.fence(holder.slot, holder.epoch))
        else:
            assert self._do(self.frontier.fence(holder.slot, holder.epoch)) == self.model.fence(holder)
        roles, known_roles = self._do(self.frontier.roles()), self.model.claimed_roles()
        assert {role.role for role in roles} == known_roles.keys()
        for role in roles:
            known = known_roles[role.role]
            assert (role.cursor, role.finished) == (known.cursor, known.finished)
            assert role.held == (known.until > self.model.world.now)
            if known.claimed_by is not None:  # otherwise a backend may name the process
                assert role.holder == known.claimed_by.slot

    # -- inspecting

    def check_history(self, pick: int) -> None:
        """Compare the history of one request. ``pick`` counts from the last request that has its own fingerprint."""
        assert self._do(self.frontier.find(Request("http://a.example/never-pushed"))) is None
        entries = [entry for entry in self.model.entries if not entry.request.dont_filter]
        if not entries:
            return
        entry = entries[-1 - pick % len(entries)]
        actual = self._do(self.frontier.find(entry.request))
        assert actual is not None
        assert (actual.url, actual.attempts, actual.status, actual.items, actual.parent) == (
            entry.request.url,
            entry.attempts,
            entry.status,
            entry.items,
            entry.parent.request.url if entry.parent else None,
        )
        if entry.state != "waiting":  # when it is due, the backend may already count it as ready
            assert actual.state == entry.state
        if entry.state in ("ready", "waiting"):
            assert actual.worker == ""
        elif entry.holder is not None:  # otherwise a backend may name the process
            assert actual.worker == actual.events[-1].worker == entry.holder.slot
        if entry.state == "dead" and entry.reason:
            assert actual.reason == entry.reason

    def check_log(self) -> None:
        """Compare the item log."""
        log = self._do(self.frontier.read_items(0, 10_000))
        assert [(item.fingerprint, item.index, item.payload) for item in log] == [
            (self._fingerprints[id(entry)], index, payload) for entry, index, payload in self.model.log
        ]

    def check_stats(self) -> None:
        """Compare the counters, the audit, and whether the run is finished."""
        (stats, audit, finished), expected = self._do(self._inspect()), self.model.stats()
        due = sum(entry.until <= self.model.world.now for entry in self.model.in_state("waiting"))
        # A backend may count a waiting request as ready when it is due, or only at the next lease.
        early = expected.waiting - stats.waiting
        assert 0 <= early <= due
        assert stats.balanced
        assert (stats.ready, stats.pushed, stats.leased, stats.done, stats.dead) == (
            expected.ready + early,
            expected.pushed,
            expected.leased,
            expected.done,
            expected.dead,
        )
        assert (stats.duplicates, stats.items, stats.seeding) == (expected.duplicates, expected.items, expected.seeding)
        assert audit == stats
        assert finished == expected.finished

    async def _inspect(self) -> tuple[Stats, Stats, bool]:
        return await self.frontier.stats(), await self.frontier.audit(), (await self.frontier.stats()).finished
