"""Late and repeated calls: of the former holder of a cluster slot (law 3), of a caller whose answer was lost (law 13),
and on a store that was rewound (law 14)."""

from __future__ import annotations

import pytest

from shoal.errors import FencedError, StoreRewoundError
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Holder, Lease, LeaseKey, Pushed
from shoal.testing.roles import claim_role
from shoal.testing.steps import (
    TTL,
    ContractTests,
    Harness,
    all_items,
    check_refused,
    complete,
    history,
    lease_names,
    lease_one,
    page,
    push,
)


class FencingContract(ContractTests):
    """A node that takes over a slot fences it first. From then on, calls of the old holder have no effect, even if it
    is still alive. So a page is never completed by two nodes."""

    async def test_a_fence_ends_the_leases_of_earlier_epochs_at_once(
        self, harness: Harness, frontier: Frontier
    ) -> None:
        await push(frontier, *range(4))
        old = await harness.open_run("run", holder=Holder("cluster/0", 1))
        lost = (await old.lease(2, TTL)).leases
        assert len(lost) == 2
        new = await harness.open_run("run", holder=Holder("cluster/0", 2))
        assert await new.fence("cluster/0", 2) == 2
        for lease in lost:
            await check_refused(old, lease)
        assert await lease_names(new) == ["0", "1", "2", "3"]
        assert (await new.stats()).leased == 4

    async def test_a_fenced_attempt_counts(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(max_attempts=2))
        for epoch in (1, 2):
            holder = await harness.open_run("run", holder=Holder("s", epoch))
            await holder.push([page("deadly")])
            assert (await lease_one(holder)).attempt == epoch
            assert await holder.fence("s", epoch + 1) == 1
        found = await history(await harness.open_run("run"), page("deadly"))
        assert found.state == "dead"
        assert "lost" in found.reason
        assert [event.kind for event in found.events].count("lost") == 2

    async def test_a_fenced_fetch_starts_the_delay(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(delay=10.0))
        old = await harness.open_run("run", holder=Holder("s", 1))
        await push(old, "a", "b")
        await lease_one(old)
        await harness.advance(5)
        new = await harness.open_run("run", holder=Holder("s", 2))
        assert await new.fence("s", 2) == 1
        assert await lease_names(new) == []
        await harness.advance(10)
        assert await lease_names(new) == ["a"]

    async def test_an_earlier_epoch_gets_no_leases_and_no_roles(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        old = await harness.open_run("run", holder=Holder("s", 5))
        assert await frontier.fence("s", 6) == 0
        with pytest.raises(FencedError):
            await old.lease(1, TTL)
        with pytest.raises(FencedError):
            await old.claim("seed", TTL)
        assert (await frontier.stats()).ready == 1
        new = await harness.open_run("run", holder=Holder("s", 6))
        await complete(new, await lease_one(new))

    async def test_a_fence_under_an_earlier_epoch_is_refused(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        new = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(new)
        assert await frontier.fence("s", 8) == 1
        with pytest.raises(FencedError):
            await frontier.fence("s", 7)
        assert await frontier.fence("s", 8) == 0  # a repeat
        await check_refused(new, lease)

    async def test_a_fence_keeps_the_leases_of_its_own_epoch(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        holder = await harness.open_run("run", holder=Holder("s", 7))
        lease = await lease_one(holder)
        assert await holder.fence("s", 7) == 0
        await complete(holder, lease)

    async def test_a_fence_does_not_affect_other_slots_and_runs(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(3))
        mine = await lease_one(await harness.open_run("run", holder=Holder("s/0", 1)))
        plain = await lease_one(frontier)
        theirs = await lease_one(await harness.open_run("run", holder=Holder("s/1", 1)))
        other = await harness.open_run("other", holder=Holder("s/0", 1))
        await push(other, "x")
        elsewhere = await lease_one(other)
        assert await frontier.fence("s/0", 2) == 1
        await check_refused(frontier, mine)
        await complete(frontier, plain, theirs)
        await complete(other, elsewhere)

    async def test_a_fence_keeps_a_lease_that_another_slot_has_now(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, "a")
        old = await harness.open_run("run", holder=Holder("s/0", 1))
        await lease_one(old, ttl=5)
        await harness.advance(6)
        lease = await lease_one(await harness.open_run("run", holder=Holder("s/1", 1)))
        assert await frontier.fence("s/0", 2) == 0
        await complete(frontier, lease)

    async def test_a_fence_does_not_affect_leases_that_have_ended(self, harness: Harness, frontier: Frontier) -> None:
        await push(frontier, *range(3))
        old = await harness.open_run("run", holder=Holder("s", 1))
        first, second, third = (await old.lease(3, TTL)).leases
        await complete(old, first)
        assert await old.release([second]) == [True]
        assert (await old.renew([third], TTL))[0] is not None
        assert await frontier.fence("s", 2) == 1
        assert sorted(await lease_names(frontier)) == ["1", "2"]

    async def test_a_fence_frees_roles_and_keeps_their_cursors(self, harness: Harness, frontier: Frontier) -> None:
        old = await harness.open_run("run", holder=Holder("s", 1))
        claim = await claim_role(old, "drain")
        assert await old.advance(claim, b"here", TTL)
        finished = await claim_role(old, "seed")
        assert await old.relinquish(finished, finished=True)
        theirs = await claim_role(frontier, "other")
        await frontier.fence("s", 2)
        assert not await old.advance(claim, b"late", TTL)
        again = await claim_role(frontier, "drain")
        assert again.cursor == b"here"
        assert await frontier.advance(theirs, b"", TTL)
        assert await frontier.claim("seed", TTL) is None

    async def test_a_fence_ends_thousands_of_leases_in_one_step(self, harness: Harness) -> None:
        await harness.open(FrontierOptions(concurrency_per_host=5000))
        old = await harness.open_run("run", holder=Holder("s", 1))
        await push(old, *range(2500))
        assert len((await old.lease(2500, TTL)).leases) == 2500
        assert await old.fence("s", 2) == 2500
        assert (await old.stats()).ready == 2500

    async def test_fences_survive_a_restart(self, harness: Harness) -> None:
        if not harness.durable:
            pytest.skip("the store does not survive its process")
        frontier = await harness.open()
        await push(frontier, "a")
        await frontier.fence("s", 9)
        await harness.reopen()
        old = await harness.open_run("run", holder=Holder("s", 8))
        with pytest.raises(FencedError):
            await old.lease(1, TTL)


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
