"""The contract of `shoal.ports.Coordinator` as tests. They take as long as a session lasts, since its clock is real."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shoal.errors import CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts

TTL = 2.0
"""Seconds of a session whose end is waited for. A busy machine may let a client wait for one of them."""
LASTING = 20.0
"""Of all others: they do not end, however long the steps of a test take."""
COUNTS = Counts(2, 1)


class CoordinatorHarness(ABC):
    """One kind of coordinator under test, with an empty cluster."""

    def __init__(self) -> None:
        self.opened: list[Coordinator] = []

    @abstractmethod
    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        """One more client of the same server."""

    @abstractmethod
    async def abandon(self, coordinator: Coordinator) -> None:
        """The client is not heard of any more, as if its process had been killed. It may be closed all the same."""

    async def open(self, cluster: str = "cluster", ttl: float = LASTING) -> Coordinator:
        made = await self.connect(cluster, ttl)
        self.opened.append(made)
        return made

    async def member(self, name: str, counts: Counts = COUNTS, ttl: float = LASTING) -> Coordinator:
        made = await self.open(ttl=ttl)
        await made.join(name, counts)
        return made

    async def close(self) -> None:
        """The test is over: leave nothing behind."""
        await asyncio.gather(*(each.close() for each in self.opened), return_exceptions=True)


def names(view: ClusterView) -> list[str]:
    return sorted(member.name for member in view.members)


def holders(view: ClusterView) -> dict[int, str]:
    return {slot.index: slot.holder for slot in view.slots if slot.holder}


def told(events: list[ClusterEvent], *whats: str) -> list[tuple[str, str]]:
    """Who did what, of these kinds."""
    return [(event.what, event.member) for event in events if event.what in whats]


async def stay(*members: Coordinator, seconds: float) -> None:
    """Members that live on, as long as that takes."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        await asyncio.gather(*(member.beat() for member in members))
        await asyncio.sleep(min(left, TTL / 5))


class CoordinatorContract:
    """Subclass it, and give it a ``coordination`` fixture that returns a `CoordinatorHarness`."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture(autouse=True)
    async def closing(self, coordination: CoordinatorHarness) -> AsyncIterator[None]:
        yield
        await coordination.close()

    # -- members

    async def test_members_see_each_other(self, coordination: CoordinatorHarness) -> None:
        first, second = await coordination.member("crawler_1"), await coordination.member("crawler_2")
        await second.beat("crawls 3 pages", fit=False)
        view = await first.beat("stands by")
        assert names(view) == ["crawler_1", "crawler_2"]
        assert view.counts == COUNTS
        assert holders(view) == {}
        member = next(member for member in view.members if member.name == "crawler_2")
        assert (member.doing, member.fit) == ("crawls 3 pages", False)
        assert 0 <= member.age < LASTING

    async def test_a_member_says_where_it_is(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.open()
        await member.join("a", COUNTS, "machine-7-123")
        assert [each.where for each in (await member.beat()).members] == ["machine-7-123"]

    @pytest.mark.parametrize(
        "name", ["crawler_a_1", "crawler_01", "no-number", "with space/and slash", "naïve ☃ name", ".", "x" * 200]
    )
    async def test_names_of_all_kinds(self, coordination: CoordinatorHarness, name: str) -> None:
        member = await coordination.member(name)
        await coordination.member("crawler_1")
        assert names(await member.beat()) == sorted([name, "crawler_1"])
        assert await member.take(0) is not None
        assert holders(await member.beat()) == {0: name}

    async def test_a_name_is_refused_while_its_member_lives(self, coordination: CoordinatorHarness) -> None:
        first, twin = await coordination.member("crawler_1", ttl=TTL), await coordination.open(ttl=TTL)
        with pytest.raises(NameTakenError, match="crawler_1"):
            await twin.join("crawler_1", COUNTS)
        await stay(first, seconds=1.5 * TTL)
        with pytest.raises(NameTakenError):
            await twin.join("crawler_1", COUNTS)
        await first.leave()
        await twin.join("crawler_1", COUNTS)
        assert names(await twin.beat()) == ["crawler_1"]

    async def test_of_twins_that_join_at_once_one_is_a_member(self, coordination: CoordinatorHarness) -> None:
        twins = [await coordination.open() for _ in range(4)]
        joined = await asyncio.gather(*(twin.join("twin", COUNTS) for twin in twins), return_exceptions=True)
        assert sum(result is None for result in joined) == 1
        assert all(isinstance(result, NameTakenError) for result in joined if result is not None)

    async def test_a_member_that_is_not_heard_of_is_lost(self, coordination: CoordinatorHarness) -> None:
        dead, living = await coordination.member("dead", ttl=TTL), await coordination.member("living", ttl=TTL)
        epoch = await dead.take(0)
        heard = time.monotonic()
        await dead.beat()
        await coordination.abandon(dead)
        await stay(living, seconds=0.5 * TTL)
        assert names(await living.beat()) == ["dead", "living"] or time.monotonic() - heard > TTL
        await self._until_lost(living, "dead")
        view = await living.beat()
        assert holders(view) == {}
        assert [(slot.index, slot.epoch) for slot in view.slots] == [(0, epoch)]
        (event,) = [event for event in await living.events() if event.what == "lost"]
        assert (event.member, event.slot, event.epoch, event.detail) == ("dead", 0, epoch, "")

    async def _until_lost(self, living: Coordinator, name: str) -> float:
        started = time.monotonic()
        while name in names(await living.beat()):
            await living.wait(TTL / 10)
            assert time.monotonic() - started < 10 * TTL
        return time.monotonic() - started

    async def test_a_lost_member_joins_again(self, coordination: CoordinatorHarness) -> None:
        dead, living = await coordination.member("dead", ttl=TTL), await coordination.member("living", ttl=TTL)
        await coordination.abandon(dead)
        await self._until_lost(living, "dead")
        await coordination.member("dead", ttl=TTL)
        assert names(await living.beat()) == ["dead", "living"]

    async def test_a_member_that_was_lost_is_told_so(self, coordination: CoordinatorHarness) -> None:
        """One that was stopped for too long, and goes on."""
        member = await coordination.member("member")
        await member.take(0)
        await member.leave()
        with pytest.raises(SessionLostError):
            await member.beat()
        with pytest.raises(SessionLostError):
            await member.take(1)
        await member.retire()
        await member.leave()
        await member.join("member", COUNTS)
        assert names(await member.beat()) == ["member"]

    async def test_leaving_frees_the_slot_at_once(self, coordination: CoordinatorHarness) -> None:
        first, second = await coordination.member("a"), await coordination.member("b")
        epoch = await first.take(0)
        assert epoch is not None
        await first.leave()
        view = await second.beat()
        assert names(view) == ["b"]
        assert holders(view) == {}
        assert (await second.take(0) or 0) > epoch
        assert told(await second.events(), "left", "took over", "elected") == [
            ("elected", "a"), ("left", "a"), ("elected", "b"),
        ]  # fmt: skip

    # -- slots

    async def test_a_slot_has_one_holder(self, coordination: CoordinatorHarness) -> None:
        members = [await coordination.member(f"m{number}") for number in range(4)]
        epochs = await asyncio.gather(*(member.take(0) for member in members))
        assert sum(epoch is not None for epoch in epochs) == 1
        winner = next(number for number, epoch in enumerate(epochs) if epoch is not None)
        assert holders(await members[0].beat()) == {0: f"m{winner}"}

    async def test_two_try_for_one_slot_a_hundred_times(self, coordination: CoordinatorHarness) -> None:
        first, second = await coordination.member("a", Counts(1, 2)), await coordination.member("b")
        latest = 0
        for _ in range(100):
            epochs = await asyncio.gather(first.take(0), second.take(0))
            (won,) = [epoch for epoch in epochs if epoch is not None]
            assert won > latest
            latest = won
            await (first if epochs[0] is not None else second).retire()
        await asyncio.gather(first.beat(), second.beat())

    async def test_a_holder_that_asks_again_has_the_same_epoch(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        epoch = await member.take(1)
        assert epoch is not None
        assert await member.take(1) == epoch
        assert await other.take(1) is None
        assert await member.take(0) is None  # one is enough

    async def test_epochs_grow_over_all_slots_and_holders(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        epochs = []
        for index in (0, 1, 0, 0, 1):
            epoch = await member.take(index)
            assert epoch is not None
            epochs.append(epoch)
            await member.retire()
        for index in (0, 1):
            own = [epoch for epoch, at in zip(epochs, (0, 1, 0, 0, 1), strict=True) if at == index]
            assert own == sorted(set(own))
        await member.leave()
        again = await coordination.member("a")
        assert (await again.take(0) or 0) > max(epochs[0], epochs[2], epochs[3])

    async def test_the_successor_is_told_from_whom_it_took_over(self, coordination: CoordinatorHarness) -> None:
        dead, heir = await coordination.member("dead", ttl=TTL), await coordination.member("heir", ttl=TTL)
        before = await dead.take(0)
        await coordination.abandon(dead)
        await self._until_lost(heir, "dead")
        epoch = await heir.take(0)
        assert (epoch or 0) > (before or 0)
        (event,) = [event for event in await heir.events() if event.what == "took over"]
        assert (event.member, event.slot, event.epoch) == ("heir", 0, epoch)
        assert "dead" in event.detail
        assert abs(event.at - time.time()) < 60

    async def test_a_slot_past_the_counts_is_not_given(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a", Counts(1, 0))
        assert await member.take(1) is None
        assert await member.take(0) is not None

    async def test_retiring_keeps_the_member(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        await member.take(0)
        await member.retire()
        assert holders(await other.beat()) == {}
        assert await other.take(0) is not None
        assert names(await member.beat()) == ["a", "b"]
        assert told(await member.events(), "retired") == [("retired", "a")]

    # -- counts

    async def test_the_first_member_says_how_many(self, coordination: CoordinatorHarness) -> None:
        first = await coordination.member("a", Counts(3, 2))
        second = await coordination.member("b", Counts(9, 9))
        assert (await second.beat()).counts == Counts(3, 2)
        await first.leave()
        await second.leave()
        third = await coordination.member("c", Counts(5, 0))
        assert (await third.beat()).counts == Counts(5, 0)

    async def test_a_member_that_joins_again_changes_no_counts(self, coordination: CoordinatorHarness) -> None:
        """It may have missed a `scale` while its session was lost, and be the first to join again."""
        member, operator = await coordination.member("a", Counts(2, 1)), await coordination.open()
        await operator.scale(Counts(1, 1))
        await member.leave()
        returned = await coordination.open()
        await returned.join("a", Counts(2, 1), again=True)
        assert (await returned.beat()).counts == Counts(1, 1)

    async def test_a_member_that_joins_a_new_cluster_again_brings_its_counts(
        self, coordination: CoordinatorHarness
    ) -> None:
        returned = await coordination.open()  # the coordinator has lost its data
        await returned.join("a", Counts(3, 0), again=True)
        assert (await returned.beat()).counts == Counts(3, 0)

    async def test_counts_are_changed_for_all(self, coordination: CoordinatorHarness) -> None:
        member, operator = await coordination.member("a"), await coordination.open()
        await operator.scale(Counts(4, 0))
        assert (await member.beat()).counts == Counts(4, 0)
        assert await member.take(3) is not None
        await operator.scale(Counts(1, 1))
        assert holders(await member.beat()) == {3: "a"}  # it is the holder who gives it back
        scaled = [event for event in await operator.events() if event.what == "scaled"]
        assert [(event.member, event.detail) for event in scaled] == [
            ("", "runner 4, backup 0"), ("", "runner 1, backup 1"),
        ]  # fmt: skip

    async def test_one_who_has_still_to_retire_counts(self, coordination: CoordinatorHarness) -> None:
        """There are never more holders than there are to be Runners."""
        first, second = await coordination.member("a", Counts(3, 0)), await coordination.member("b")
        third, operator = await coordination.member("c"), await coordination.open()
        assert await first.take(1) is not None
        assert await second.take(2) is not None
        await operator.scale(Counts(2, 1))
        assert await third.take(0) is None
        await second.retire()
        assert sum(epoch is not None for epoch in await asyncio.gather(third.take(0), second.take(0))) == 1
        assert len(holders(await first.beat())) == 2

    # -- looking

    async def test_a_cluster_that_never_was(self, coordination: CoordinatorHarness) -> None:
        stranger = await coordination.open()
        with pytest.raises(CoordinatorError, match="cluster"):
            await stranger.look()
        with pytest.raises(CoordinatorError):
            await stranger.scale(Counts(1, 1))

    async def test_anyone_may_look(self, coordination: CoordinatorHarness) -> None:
        member, stranger = await coordination.member("a"), await coordination.open()
        await member.take(1)
        await member.beat("works")
        view = await stranger.look()
        assert (names(view), holders(view), view.counts) == (["a"], {1: "a"}, COUNTS)
        assert [each.doing for each in view.members] == ["works"]
        assert names(await member.beat()) == ["a"]

    async def test_clusters_do_not_see_each_other(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        other = await coordination.open("other")
        await other.join("a", Counts(1, 0))
        assert await member.take(0) is not None
        assert await other.take(0) is not None
        assert names(await other.beat()) == ["a"]
        assert told(await other.events(), "joined") == [("joined", "a")]

    async def test_the_last_events_in_their_order(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        for _ in range(60):
            await member.take(0)
            await member.retire()
        events = await member.events(7)
        assert [event.what for event in events] == ["retired", "elected"] * 3 + ["retired"]
        assert [event.at for event in events] == sorted(event.at for event in events)
        assert len(await member.events(1000)) <= 500  # they do not grow for ever

    # -- waiting

    async def test_waiting_ends_when_something_happens(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        await other.take(0)
        await member.beat()
        await member.wait(0.05)
        started = time.monotonic()
        waiting = asyncio.create_task(self._until_free(member))
        await asyncio.sleep(0.1)
        await other.retire()
        await waiting
        assert time.monotonic() - started < 4.0  # it was woken; 5 seconds would have passed else

    async def _until_free(self, member: Coordinator) -> None:
        while holders(await member.beat()):
            await member.wait(5.0)

    async def test_waiting_ends_in_time(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        started = time.monotonic()
        while time.monotonic() - started < 0.3:
            await member.wait(0.3)
        assert time.monotonic() - started < 3.0

    async def test_what_was_closed_is_closed(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        await member.close()
        with pytest.raises(CoordinatorError):
            await member.beat()
        await member.close()
