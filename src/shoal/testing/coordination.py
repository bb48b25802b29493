"""The contract of `shoal.ports.Coordinator` as tests.

Sessions use the clock of the server, so some tests wait until a session expires."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts
from shoal.system import clock

TTL = 2.0
"""Length in seconds of a session that expires in a test. A busy machine may delay heartbeats by a second."""
LASTING = 20.0
"""Length in seconds of a session that does not expire during a test."""
COUNTS = Counts(2, 1)


class CoordinatorHarness(ABC):
    """One kind of coordinator under test, with an empty cluster."""

    def __init__(self) -> None:
        self.opened: list[Coordinator] = []

    @abstractmethod
    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        """Connect one more client to the same server."""

    @abstractmethod
    async def abandon(self, coordinator: Coordinator) -> None:
        """Stop the heartbeats of a client, as if its process was killed. `close` may still be called."""

    async def open(self, cluster: str = "cluster", ttl: float = LASTING) -> Coordinator:
        coordinator = await self.connect(cluster, ttl)
        self.opened.append(coordinator)
        return coordinator

    async def member(self, name: str, counts: Counts = COUNTS, ttl: float = LASTING) -> Coordinator:
        member = await self.open(ttl=ttl)
        await member.join(name, counts)
        return member

    async def close(self) -> None:
        """Clean up after the test."""
        await asyncio.gather(*(coordinator.close() for coordinator in self.opened), return_exceptions=True)


def names(view: ClusterView) -> list[str]:
    return sorted(member.name for member in view.members)


def holders(view: ClusterView) -> dict[int, str]:
    return {slot.index: slot.holder for slot in view.slots if slot.holder}


def select_events(events: list[ClusterEvent], *whats: str) -> list[tuple[str, str]]:
    """The events of these kinds, as (what, member)."""
    return [(event.what, event.member) for event in events if event.what in whats]


async def keep_alive(*members: Coordinator, seconds: float) -> None:
    """Send heartbeats for these members for some seconds."""
    until = clock.monotonic() + seconds
    while (left := until - clock.monotonic()) > 0:
        await asyncio.gather(*(member.beat() for member in members))
        await asyncio.sleep(min(left, TTL / 5))


class CoordinatorContract:
    """A slot has at most one holder. Each holder has a later epoch than the one before. A member without heartbeats is
    lost when its session expires, and its slot is free. So exactly one node takes over from a dead one.

    Subclass it, and give it a ``coordination`` fixture that returns a `CoordinatorHarness`.
    """

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture(autouse=True)
    async def closing(self, coordination: CoordinatorHarness) -> AsyncIterator[None]:
        yield
        await coordination.close()

    # -- members

    async def test_members_see_each_other(self, coordination: CoordinatorHarness) -> None:
        first, second = await coordination.member("crawler_1"), await coordination.member("crawler_2")
        await second.beat("crawls 3 pages", fit=False)
        view = await first.beat("standing by")
        assert names(view) == ["crawler_1", "crawler_2"]
        assert view.counts == COUNTS
        assert holders(view) == {}
        member = next(member for member in view.members if member.name == "crawler_2")
        assert (member.doing, member.fit) == ("crawls 3 pages", False)
        assert 0 <= member.age < LASTING

    async def test_a_member_says_where_it_is(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.open()
        await member.join("a", COUNTS, "machine-7-123")
        assert [other.where for other in (await member.beat()).members] == ["machine-7-123"]

    @pytest.mark.parametrize(
        "name", ["crawler_a_1", "crawler_01", "no-number", "with space/and slash", "naïve ☃ name", ".", "x" * 200]
    )
    async def test_any_text_can_be_a_name(self, coordination: CoordinatorHarness, name: str) -> None:
        member = await coordination.member(name)
        await coordination.member("crawler_1")
        assert names(await member.beat()) == sorted([name, "crawler_1"])
        assert await member.take(0) is not None
        assert holders(await member.beat()) == {0: name}

    async def test_a_name_is_refused_while_its_member_is_alive(self, coordination: CoordinatorHarness) -> None:
        first, second = await coordination.member("crawler_1", ttl=TTL), await coordination.open(ttl=TTL)
        with pytest.raises(NameTakenError, match="crawler_1"):
            await second.join("crawler_1", COUNTS)
        await keep_alive(first, seconds=1.5 * TTL)
        with pytest.raises(NameTakenError):
            await second.join("crawler_1", COUNTS)
        await first.leave()
        await second.join("crawler_1", COUNTS)
        assert names(await second.beat()) == ["crawler_1"]

    async def test_only_one_of_several_members_with_the_same_name_can_join(
        self, coordination: CoordinatorHarness
    ) -> None:
        twins = [await coordination.open() for _ in range(4)]
        joined = await asyncio.gather(*(twin.join("twin", COUNTS) for twin in twins), return_exceptions=True)
        assert sum(result is None for result in joined) == 1
        assert all(isinstance(result, NameTakenError) for result in joined if result is not None)

    async def test_a_member_without_heartbeats_is_lost(self, coordination: CoordinatorHarness) -> None:
        dead, living = await coordination.member("dead", ttl=TTL), await coordination.member("living", ttl=TTL)
        epoch = await dead.take(0)
        last_beat = clock.monotonic()
        await dead.beat()
        await coordination.abandon(dead)
        await keep_alive(living, seconds=0.5 * TTL)
        assert names(await living.beat()) == ["dead", "living"] or clock.monotonic() - last_beat > TTL
        await self._wait_until_lost(living, "dead")
        view = await living.beat()
        assert holders(view) == {}
        assert [(slot.index, slot.epoch) for slot in view.slots] == [(0, epoch)]
        (event,) = [event for event in await living.events() if event.what == "lost"]
        assert (event.member, event.slot, event.epoch, event.detail) == ("dead", 0, epoch, "")

    async def _wait_until_lost(self, living: Coordinator, name: str) -> float:
        started = clock.monotonic()
        while clock.monotonic() - started < 10 * TTL:
            with suppress(CoordinatorAwayError):  # a busy machine answers late
                if name not in names(await living.beat()):
                    return clock.monotonic() - started
                await living.wait(TTL / 10)
        raise AssertionError(f"{name} is not lost after {10 * TTL:g} s")

    async def test_a_lost_member_can_join_again(self, coordination: CoordinatorHarness) -> None:
        dead, living = await coordination.member("dead", ttl=TTL), await coordination.member("living", ttl=TTL)
        await coordination.abandon(dead)
        await self._wait_until_lost(living, "dead")
        await coordination.member("dead", ttl=TTL)
        assert names(await living.beat()) == ["dead", "living"]

    async def test_a_lost_member_gets_session_lost_errors(self, coordination: CoordinatorHarness) -> None:
        """A process that was paused for too long must notice that it is not a member any more."""
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
        assert select_events(await second.events(), "left", "took over", "elected") == [
            ("elected", "a"),
            ("left", "a"),
            ("elected", "b"),
        ]

    # -- slots

    async def test_a_slot_has_one_holder(self, coordination: CoordinatorHarness) -> None:
        members = [await coordination.member(f"m{number}") for number in range(4)]
        epochs = await asyncio.gather(*(member.take(0) for member in members))
        assert sum(epoch is not None for epoch in epochs) == 1
        winner = next(number for number, epoch in enumerate(epochs) if epoch is not None)
        assert holders(await members[0].beat()) == {0: f"m{winner}"}

    async def test_of_two_members_that_try_for_a_slot_one_wins_every_time(
        self, coordination: CoordinatorHarness
    ) -> None:
        first, second = await coordination.member("a", Counts(1, 2)), await coordination.member("b")
        latest = 0
        for _ in range(100):
            epochs = await asyncio.gather(first.take(0), second.take(0))
            (won,) = [epoch for epoch in epochs if epoch is not None]
            assert won > latest
            latest = won
            await (first if epochs[0] is not None else second).retire()
        await asyncio.gather(first.beat(), second.beat())

    async def test_taking_a_held_slot_again_returns_the_same_epoch(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        epoch = await member.take(1)
        assert epoch is not None
        assert await member.take(1) == epoch
        assert await other.take(1) is None
        assert await member.take(0) is None  # a member holds one slot

    async def test_each_holder_of_a_slot_has_a_later_epoch(self, coordination: CoordinatorHarness) -> None:
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

    async def test_a_takeover_event_names_the_lost_member(self, coordination: CoordinatorHarness) -> None:
        dead, successor = await coordination.member("dead", ttl=TTL), await coordination.member("successor", ttl=TTL)
        before = await dead.take(0)
        await coordination.abandon(dead)
        await self._wait_until_lost(successor, "dead")
        epoch = await successor.take(0)
        assert (epoch or 0) > (before or 0)
        (event,) = [event for event in await successor.events() if event.what == "took over"]
        assert (event.member, event.slot, event.epoch) == ("successor", 0, epoch)
        assert "dead" in event.detail
        assert abs(event.at - clock.time()) < 60

    async def test_a_slot_beyond_the_counts_is_refused(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a", Counts(1, 0))
        assert await member.take(1) is None
        assert await member.take(0) is not None

    async def test_a_member_that_retires_stays_a_member(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        await member.take(0)
        await member.retire()
        assert holders(await other.beat()) == {}
        assert await other.take(0) is not None
        assert names(await member.beat()) == ["a", "b"]
        assert select_events(await member.events(), "retired") == [("retired", "a")]

    # -- counts

    async def test_the_first_member_sets_the_counts(self, coordination: CoordinatorHarness) -> None:
        first = await coordination.member("a", Counts(3, 2))
        second = await coordination.member("b", Counts(9, 9))
        assert (await second.beat()).counts == Counts(3, 2)
        await first.leave()
        await second.leave()
        third = await coordination.member("c", Counts(5, 0))
        assert (await third.beat()).counts == Counts(5, 0)

    async def test_joining_again_changes_no_counts(self, coordination: CoordinatorHarness) -> None:
        """It may have missed a `scale` while its session was lost, and may be the first to join again."""
        member, operator = await coordination.member("a", Counts(2, 1)), await coordination.open()
        await operator.scale(Counts(1, 1))
        await member.leave()
        returned = await coordination.open()
        await returned.join("a", Counts(2, 1), again=True)
        assert (await returned.beat()).counts == Counts(1, 1)

    async def test_joining_again_sets_the_counts_of_an_empty_cluster(self, coordination: CoordinatorHarness) -> None:
        returned = await coordination.open()  # the coordinator has lost its data
        await returned.join("a", Counts(3, 0), again=True)
        assert (await returned.beat()).counts == Counts(3, 0)

    async def test_scaling_changes_the_counts_for_all_members(self, coordination: CoordinatorHarness) -> None:
        member, operator = await coordination.member("a"), await coordination.open()
        await operator.scale(Counts(4, 0))
        assert (await member.beat()).counts == Counts(4, 0)
        assert await member.take(3) is not None
        await operator.scale(Counts(1, 1))
        assert holders(await member.beat()) == {3: "a"}  # only its holder releases it
        scaled = [event for event in await operator.events() if event.what == "scaled"]
        assert [(event.member, event.detail) for event in scaled] == [
            ("", "runner 4, backup 0"),
            ("", "runner 1, backup 1"),
        ]

    async def test_a_holder_beyond_the_counts_still_counts_as_a_runner(self, coordination: CoordinatorHarness) -> None:
        """There are never more holders than Runners in the counts."""
        first, second = await coordination.member("a", Counts(3, 0)), await coordination.member("b")
        third, operator = await coordination.member("c"), await coordination.open()
        assert await first.take(1) is not None
        assert await second.take(2) is not None
        await operator.scale(Counts(2, 1))
        assert await third.take(0) is None
        await second.retire()
        assert sum(epoch is not None for epoch in await asyncio.gather(third.take(0), second.take(0))) == 1
        assert len(holders(await first.beat())) == 2

    # -- inspecting

    async def test_an_unknown_cluster_is_an_error(self, coordination: CoordinatorHarness) -> None:
        client = await coordination.open()
        with pytest.raises(CoordinatorError, match="cluster"):
            await client.observe()
        with pytest.raises(CoordinatorError):
            await client.scale(Counts(1, 1))

    async def test_a_client_that_is_not_a_member_can_see_the_cluster(self, coordination: CoordinatorHarness) -> None:
        member, client = await coordination.member("a"), await coordination.open()
        await member.take(1)
        await member.beat("works")
        view = await client.observe()
        assert (names(view), holders(view), view.counts) == (["a"], {1: "a"}, COUNTS)
        assert [other.doing for other in view.members] == ["works"]
        assert names(await member.beat()) == ["a"]

    async def test_clusters_are_independent(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        other = await coordination.open("other")
        await other.join("a", Counts(1, 0))
        assert await member.take(0) is not None
        assert await other.take(0) is not None
        assert names(await other.beat()) == ["a"]
        assert select_events(await other.events(), "joined") == [("joined", "a")]

    async def test_events_are_in_order_and_bounded(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        for _ in range(60):
            await member.take(0)
            await member.retire()
        events = await member.events(7)
        assert [event.what for event in events] == ["retired", "elected"] * 3 + ["retired"]
        assert [event.at for event in events] == sorted(event.at for event in events)
        assert len(await member.events(1000)) <= 500  # old events are dropped

    # -- waiting

    async def test_wait_ends_when_the_cluster_changes(self, coordination: CoordinatorHarness) -> None:
        member, other = await coordination.member("a"), await coordination.member("b")
        await other.take(0)
        await member.beat()
        await member.wait(0.05)
        started = clock.monotonic()
        waiting = asyncio.create_task(self._wait_until_free(member))
        await asyncio.sleep(0.1)
        await other.retire()
        await waiting
        assert clock.monotonic() - started < 4.0  # notified; otherwise it would wait for 5 seconds

    async def _wait_until_free(self, member: Coordinator) -> None:
        while holders(await member.beat()):
            await member.wait(5.0)

    async def test_wait_ends_after_its_timeout(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        started = clock.monotonic()
        while clock.monotonic() - started < 0.3:
            await member.wait(0.3)
        assert clock.monotonic() - started < 3.0

    async def test_a_closed_coordinator_refuses_calls(self, coordination: CoordinatorHarness) -> None:
        member = await coordination.member("a")
        await member.close()
        with pytest.raises(CoordinatorError):
            await member.beat()
        await member.close()
