"""Election of Runners and Backup Runners, as pure functions on made-up clusters."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ports import ClusterView, Counts, Member, Slot
from shoal.runs.cluster.election import HESITATION, Retire, Take, decide, line, rank, roles, shortage, slot_of, vacant

NAMES = st.one_of(
    st.sampled_from(["crawler_a_1", "crawler_b_1", "crawler_01", "crawler_1", "worker", "10", "x9", "x10"]),
    st.text(min_size=1, max_size=12),
)


def view(runner: int, backup: int, names: list[str], held: dict[int, str] | None = None, **fit: bool) -> ClusterView:
    members = tuple(Member(name=name, age=0.0, fit=fit.get(name, True)) for name in names)
    slots = tuple(Slot(index, holder, 1) for index, holder in sorted((held or {}).items()))
    return ClusterView(counts=Counts(runner, backup), members=members, slots=slots)


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Any cluster that a coordinator may show: a slot has one holder, who lives and has no other."""
    names = draw(st.lists(NAMES, unique=True, max_size=8))
    runner, backup = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    holders = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    indexes = draw(st.lists(st.integers(0, 7), unique=True, min_size=len(holders), max_size=len(holders)))
    unfit = set(draw(st.lists(st.sampled_from(names), unique=True))) if names else set()
    vacated = dict.fromkeys(draw(st.lists(st.integers(0, 7), max_size=3)), "")
    slots = {**vacated, **dict(zip(indexes, holders, strict=True))}
    return ClusterView(
        counts=Counts(runner, backup),
        members=tuple(Member(name=name, age=0.0, fit=name not in unfit) for name in names),
        slots=tuple(Slot(index, holder, 1) for index, holder in sorted(slots.items())),
    )


def settle(shown: ClusterView, clock: float = 0.0) -> ClusterView:
    """All members act on what they see, one after the other, until nobody has anything to do."""
    held = {slot.index: slot.holder for slot in shown.slots if slot.holder}
    for _ in range(100):
        before = dict(held)
        for member in shown.members:
            now = with_slots(shown, held)
            match decide(now, member.name, dict.fromkeys(vacant(now), clock)):
                case Take(index):
                    held.setdefault(index, member.name)
                case Retire():
                    own = slot_of(now, member.name)
                    assert own is not None
                    del held[own]
                case None:
                    pass
        if held == before:
            return with_slots(shown, held)
    raise AssertionError("it never comes to rest")


def with_slots(shown: ClusterView, held: dict[int, str]) -> ClusterView:
    slots = tuple(Slot(index, holder, 1) for index, holder in sorted(held.items()))
    return ClusterView(counts=shown.counts, members=shown.members, slots=slots)


@given(views())
def test_everyone_has_one_role(shown: ClusterView) -> None:
    found = roles(shown)
    assert set(found) == {member.name for member in shown.members}
    assert list(found.values()).count("Backup Runner") <= shown.counts.backup
    assert [name for name, role in found.items() if role == "Runner"] == [
        slot.holder for slot in shown.slots if slot.holder
    ]


@given(views())
def test_a_cluster_comes_to_rest_with_all_slots_filled_that_can_be(shown: ClusterView) -> None:
    after = settle(shown)
    kept = [slot for slot in shown.slots if slot.holder and slot.index < shown.counts.runner]
    assert all(slot_of(after, slot.holder) == slot.index for slot in kept)  # nobody is disturbed
    fit = [member.name for member in shown.members if member.fit or slot_of(shown, member.name) is not None]
    running = [slot.holder for slot in after.slots if slot.holder]
    assert len(running) == len(set(running))
    assert all(slot.index < shown.counts.runner for slot in after.slots if slot.holder)
    candidates = [name for name in fit if slot_of(after, name) is None]
    able = [member.name for member in shown.members if member.name in candidates and member.fit]
    assert len(running) == shown.counts.runner or not able


@given(views())
def test_two_never_want_the_same_slot_at_first(shown: ClusterView) -> None:
    wanted = [
        decision.slot
        for member in shown.members
        if isinstance(decision := decide(shown, member.name, {}), Take)
    ]  # fmt: skip
    assert len(wanted) == len(set(wanted))
    assert set(wanted) <= set(vacant(shown))
    assert decide(shown, "one who is no member", {}) is None


@given(views())
def test_the_first_in_line_gets_the_lowest_slot(shown: ClusterView) -> None:
    free, waiting = vacant(shown), [member.name for member in line(shown) if member.fit]
    for index, name in zip(free, waiting, strict=False):
        assert decide(shown, name, {}) == Take(index)
    assert [rank(name) for name in waiting] == sorted(rank(name) for name in waiting)


@given(views())
def test_the_order_in_which_members_are_shown_does_not_matter(shown: ClusterView) -> None:
    members = shown.members[:4]
    small = ClusterView(counts=shown.counts, members=members, slots=())
    expected = {member.name: decide(small, member.name, {}) for member in members}
    for order in permutations(members):
        other = ClusterView(counts=shown.counts, members=order, slots=())
        assert {member.name: decide(other, member.name, {}) for member in order} == expected


@given(views())
def test_nobody_waits_for_ever_behind_one_who_hangs(shown: ClusterView) -> None:
    free, waiting = vacant(shown), [member for member in line(shown) if member.fit]
    for place, member in enumerate(waiting[len(free) :] if free else []):
        patience = (place + 1) * HESITATION
        assert decide(shown, member.name, dict.fromkeys(free, patience - 0.01)) is None
        assert isinstance(decide(shown, member.name, dict.fromkeys(free, patience)), Take)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["crawler_10", "crawler_2", "crawler_1"], ["crawler_1", "crawler_2", "crawler_10"]),
        (["crawler_b_1", "crawler_a_1", "crawler_2"], ["crawler_a_1", "crawler_b_1", "crawler_2"]),
        (["crawler_1", "crawler_01"], ["crawler_01", "crawler_1"]),
        (["beta", "alpha", "node7"], ["node7", "alpha", "beta"]),
        (["x999999999999999999999999", "x1"], ["x1", "x999999999999999999999999"]),
        (["x٣", "x2"], ["x2", "x٣"]),  # digits of another script are letters here
    ],
)
def test_the_line(names: list[str], expected: list[str]) -> None:
    assert [member.name for member in line(view(1, 1, names))] == expected


def test_three_runners_and_two_backups() -> None:
    names = [f"crawler_{number}" for number in (3, 1, 5, 2, 4, 6)]
    after = settle(view(3, 2, names))
    assert roles(after) == {
        "crawler_1": "Runner", "crawler_2": "Runner", "crawler_3": "Runner",
        "crawler_4": "Backup Runner", "crawler_5": "Backup Runner", "crawler_6": "Spare",
    }  # fmt: skip
    assert shortage(after) == ""


def test_without_backups_all_are_runners() -> None:
    after = settle(view(4, 0, ["a", "b", "c", "d"]))
    assert set(roles(after).values()) == {"Runner"}


def test_a_dead_backup_is_replaced_by_a_spare() -> None:
    held = {0: "n1", 1: "n2"}
    assert roles(view(2, 1, ["n1", "n2", "n3", "n4"], held))["n4"] == "Spare"
    assert roles(view(2, 1, ["n1", "n2", "n4"], held))["n4"] == "Backup Runner"


def test_one_that_comes_back_disturbs_nobody() -> None:
    held = {0: "n4", 1: "n2", 2: "n3"}  # n1 was lost, n4 took over, n1 is back
    shown = view(3, 2, ["n1", "n2", "n3", "n4", "n5"], held)
    assert settle(shown).slots == shown.slots
    assert roles(shown)["n1"] == "Backup Runner"


def test_more_and_fewer_runners() -> None:
    held = {0: "n1", 1: "n2"}
    more = settle(view(3, 2, ["n1", "n2", "n3", "n4"], held))
    assert slot_of(more, "n3") == 2
    fewer = settle(with_slots(view(1, 2, ["n1", "n2", "n3", "n4"]), {0: "n1", 1: "n2", 2: "n3"}))
    assert [(slot.index, slot.holder) for slot in fewer.slots] == [(0, "n1")]
    assert decide(view(1, 2, ["n1", "n2"], held), "n2", {}) == Retire()


def test_one_that_cant_work_gets_no_slot_and_stands_last() -> None:
    shown = view(1, 1, ["n1", "n2"], n1=False)
    assert decide(shown, "n1", {0: 100.0}) is None
    assert decide(shown, "n2", {}) == Take(0)
    held = view(1, 1, ["n0", "n1", "n2"], {0: "n0"}, n1=False)
    assert roles(held) == {"n0": "Runner", "n2": "Backup Runner", "n1": "Spare"}


def test_one_that_does_not_run_yet_takes_what_no_other_takes() -> None:
    shown = view(1, 1, ["n1", "n2"], n1=False)
    assert decide(shown, "n1", {0: HESITATION / 2}, idle=True) is None
    assert decide(shown, "n1", {0: HESITATION}, idle=True) == Take(0)
    alone = view(2, 1, ["n1", "n2", "n3"], n1=False, n2=False, n3=False)
    assert [decide(alone, name, {}, idle=True) for name in ("n1", "n2", "n3")] == [Take(0), Take(1), None]


def test_a_shortage_is_said() -> None:
    assert shortage(view(3, 2, ["n1", "n2"], {0: "n1", 1: "n2"})) == "2 of 3 Runners and 0 of 2 Backup Runners"
    assert shortage(view(1, 1, ["n1"], {0: "n1"})) == "0 of 1 Backup Runners"


def test_any_number_of_runners_may_be_in_a_store() -> None:
    assert vacant(view(10**18, 0, ["a", "b"], {0: "a"})) == [1, 2]
