"""Repeated and late calls, and rewound stores (laws 13 and 14)."""

from __future__ import annotations

import pytest

from shoal.errors import StoreRewoundError
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Lease, LeaseKey, Pushed
from shoal.testing.harness import Harness
from shoal.testing.steps import TTL, ContractTests, all_items, complete, history, lease_one, page, push

NONCE = b"a nonce of a call"


class RepeatingContract(ContractTests):
    """Every call can be repeated, and a call that arrives late changes nothing.

    When an answer is lost, the caller does not know whether its call happened. So it repeats the call with the same
    nonce or token: the second time it changes nothing.
    """

    # -- leases

    async def test_a_repeated_lease_returns_the_same_leases(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        first = await frontier.lease(2, TTL, nonce=NONCE)
        before = await frontier.stats()
        again = await frontier.lease(2, TTL, nonce=NONCE)
        assert _identities(again.leases) == _identities(first.leases)
        assert len(again.leases) == 2
        assert await frontier.stats() == before
        assert await frontier.complete([Completion(lease=lease) for lease in again.leases]) == [Pushed(0, 0)] * 2

    async def test_a_lost_answer_costs_no_attempt(self, harness: Harness) -> None:
        frontier = await harness.open(FrontierOptions(max_attempts=1))
        await push(frontier, 1)
        for _ in range(5):
            (lease,) = (await frontier.lease(1, TTL, nonce=NONCE)).leases
            assert lease.attempt == 1
        assert (await history(frontier, page(1))).attempts == 1

    async def test_a_repeated_lease_returns_only_leases_that_are_still_held(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2, 3)
        done, released, held = (await frontier.lease(3, TTL, nonce=NONCE)).leases
        await complete(frontier, done)
        await frontier.release([released])
        again = (await frontier.lease(3, TTL, nonce=NONCE)).leases
        assert _identities(again) == _identities([held])

    async def test_a_repeated_lease_has_a_new_deadline(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, 1)
        await frontier.lease(1, 10, nonce=NONCE)
        await harness.advance(8)
        (lease,) = (await frontier.lease(1, 10, nonce=NONCE)).leases
        await harness.advance(8)
        assert await frontier.complete([Completion(lease=lease)]) == [Pushed(0, 0)]

    async def test_another_nonce_leases_more(self, frontier: Frontier) -> None:
        await push(frontier, 1, 2)
        (first,) = (await frontier.lease(1, TTL, nonce=NONCE)).leases
        (second,) = (await frontier.lease(1, TTL, nonce=NONCE[::-1])).leases
        assert first.fingerprint != second.fingerprint

    async def test_tokens_of_one_request_differ_each_time(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        tokens = set()
        for _ in range(4):
            lease = await lease_one(frontier)
            tokens.add(lease.token)
            assert 0 < lease.token < 2**63
            await frontier.release([lease])
        assert len(tokens) == 4

    async def test_a_nonce_must_be_long_enough(self, frontier: Frontier) -> None:
        with pytest.raises(ValueError, match="nonce"):
            await frontier.lease(1, TTL, nonce=b"short")
        with pytest.raises(ValueError, match="nonce"):
            await frontier.claim("seed", TTL, nonce=b"short")

    async def test_a_repeated_completion_changes_nothing(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        completion = Completion(lease=await lease_one(frontier), items=[b"item"], children=[page(2)])
        assert await frontier.complete([completion]) == [Pushed(1, 0)]
        before = await frontier.stats()
        assert (await frontier.complete([completion]))[0] in (Pushed(0, 0), None)
        assert await frontier.stats() == before
        assert [item.payload for item in await all_items(frontier)] == [b"item"]

    # -- what became of leases

    async def test_what_became_of_leases_can_be_asked_later(self, frontier: Frontier, harness: Harness) -> None:
        await push(frontier, 1, 2, 3, 4)
        done, failed, released, expired = (await frontier.lease(4, TTL)).leases
        keys = [LeaseKey(lease.fingerprint, lease.token) for lease in (done, failed, released, expired)]
        assert await frontier.lease_outcomes(keys) == ["leased"] * 4
        assert await frontier.complete([Completion(lease=done)]) == [Pushed(0, 0)]
        await frontier.fail([Failure(lease=failed, kind="test", reason="test", retry_in=0.0)])
        await frontier.release([released])
        assert await frontier.lease_outcomes(keys) == ["done", "lost", "lost", "leased"]
        await harness.advance(TTL + 1)
        again = (await frontier.lease(4, TTL)).leases
        assert len(again) == 3
        await frontier.complete([Completion(lease=lease) for lease in again])
        assert await frontier.lease_outcomes(keys) == ["done", "lost", "lost", "lost"]
        later = [LeaseKey(lease.fingerprint, lease.token) for lease in again]
        assert await frontier.lease_outcomes(later) == ["done"] * 3
        assert await frontier.lease_outcomes([LeaseKey(bytes(16), 1)]) == ["lost"]
        assert await frontier.lease_outcomes([]) == []

    # -- roles

    async def test_a_repeated_claim_returns_the_same_claim(self, frontier: Frontier) -> None:
        claim = await frontier.claim("seed", TTL, nonce=NONCE)
        assert claim is not None
        assert await frontier.claim("seed", TTL, nonce=NONCE) == claim
        assert await frontier.claim("seed", TTL) is None
        assert await frontier.relinquish(claim, finished=True)
        assert await frontier.claim("seed", TTL, nonce=NONCE) is None

    async def test_a_cursor_moves_only_from_the_value_that_its_holder_saw(self, frontier: Frontier) -> None:
        claim = await frontier.claim("drain", TTL)
        assert claim is not None
        assert await frontier.advance(claim, b"1", TTL)
        assert await frontier.advance(claim, b"1", TTL)  # the answer was lost
        assert await frontier.advance(claim.moved_to(b"1"), b"2", TTL)
        with pytest.raises(StoreRewoundError):
            await frontier.advance(claim, b"1", TTL)  # late
        await frontier.recover()
        assert await _cursor(frontier, "drain") == b"2"

    async def test_a_late_push_of_a_seeder_changes_nothing(self, frontier: Frontier) -> None:
        claim = await frontier.claim("seed", TTL)
        assert claim is not None
        assert await frontier.push([page(1)], seed=claim, cursor=b"1") == Pushed(1, 0)
        assert await frontier.push([page(1)], seed=claim, cursor=b"1") == Pushed(0, 1)
        assert await frontier.push([page(2)], seed=claim.moved_to(b"1"), cursor=b"2") == Pushed(1, 0)
        before = await frontier.stats()
        with pytest.raises(StoreRewoundError):
            await frontier.push([page(3)], seed=claim, cursor=b"1")
        await frontier.recover()
        after = await frontier.stats()
        assert (after.pushed, after.duplicates) == (before.pushed, before.duplicates)
        assert await _cursor(frontier, "seed") == b"2"

    async def test_seeding_is_finished_only_at_its_last_cursor(self, frontier: Frontier) -> None:
        claim = await frontier.claim("seed", TTL)
        assert claim is not None
        await frontier.push([page(1)], seed=claim, cursor=b"1")
        with pytest.raises(StoreRewoundError):
            await frontier.relinquish(claim.moved_to(b"2"), finished=True)
        await frontier.recover()
        assert (await frontier.stats()).seeding
        assert await frontier.relinquish(claim.moved_to(b"1"), finished=True)

    # -- rewinds

    async def test_a_store_that_was_not_rewound_has_no_rewinds(self, frontier: Frontier) -> None:
        await push(frontier, 1)
        await complete(frontier, await lease_one(frontier), items=[b"item"])
        (item,) = await all_items(frontier)
        assert await frontier.read_items(item.seq, 9, last=item) == []
        assert await frontier.recover() is None
        assert await frontier.rewinds() == []
        assert (await frontier.stats()).rewinds == 0


def _identities(leases: list[Lease]) -> list[tuple[bytes, int, int]]:
    return [(lease.fingerprint, lease.token, lease.attempt) for lease in leases]


async def _cursor(frontier: Frontier, role: str) -> bytes:
    return next(state.cursor for state in await frontier.roles() if state.role == role)
