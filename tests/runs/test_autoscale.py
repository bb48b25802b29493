"""The number of workers for a queue, as pure functions, and the commands that start them, with a real program."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.runs import autoscale as pools
from shoal.runs.autoscale import CommandPool, PoolLimits, Scale, compose_pool, kubernetes_pool, step, wanted

LIMITS = PoolLimits(per_worker=100, min=1, max=4, cool_down=60.0)
DEPTHS = st.integers(0, 10_000)
PAUSES = st.floats(0.0, 30.0)


@st.composite
def limits(draw: st.DrawFn) -> PoolLimits:
    fewest = draw(st.integers(1, 10))
    most = draw(st.integers(fewest, 60))
    return PoolLimits(
        per_worker=draw(st.integers(1, 2000)), min=fewest, max=most, cool_down=draw(st.sampled_from([0.0, 10.0, 60.0]))
    )


def follow(scale: Scale, looks: list[tuple[float, int]], given: PoolLimits) -> list[tuple[float, int, Scale]]:
    """What comes of a queue that is looked at after these pauses, with these depths: when, how deep, and then."""
    moments = list(accumulate(pause for pause, _ in looks))
    found = []
    for now, (_, depth) in zip(moments, looks, strict=True):
        scale = step(scale, depth, given, now)
        found.append((now, depth, scale))
    return found


LOOKS = st.lists(st.tuples(PAUSES, DEPTHS), min_size=1, max_size=40)


@pytest.mark.parametrize(("depth", "workers"), [(0, 1), (1, 1), (100, 1), (101, 2), (399, 4), (400, 4), (10**9, 4)])
def test_a_worker_for_so_many_requests(depth: int, workers: int) -> None:
    assert wanted(depth, LIMITS) == workers


def test_more_come_at_once_and_fewer_after_a_while() -> None:
    told = follow(Scale(0), [(0, 50), (5, 350), (5, 90), (30, 90), (29, 90), (1, 90)], LIMITS)
    assert [scale.workers for _, _, scale in told] == [1, 4, 4, 4, 4, 1]


def test_a_queue_that_swings_moves_nothing() -> None:
    told = follow(Scale(2), [(5, 90 + 20 * (number % 2)) for number in range(100)], LIMITS)
    assert {scale.workers for _, _, scale in told} == {2}


def test_as_many_stay_as_the_worst_moment_needed() -> None:
    told = follow(Scale(4), [(0, 10), (30, 250), (30, 10), (1, 10), (59, 10), (1, 10)], LIMITS)
    assert [scale.workers for _, _, scale in told] == [4, 4, 3, 3, 3, 1]


@given(limits(), st.integers(0, 100), LOOKS)
def test_never_outside_the_limits(given: PoolLimits, workers: int, looks: list[tuple[float, int]]) -> None:
    """Whatever was there before."""
    assert all(given.min <= scale.workers <= given.max for _, _, scale in follow(Scale(workers), looks, given))


@given(limits(), st.integers(0, 60), DEPTHS, st.lists(PAUSES, min_size=2, max_size=30))
def test_it_comes_to_rest(given: PoolLimits, workers: int, depth: int, pauses: list[float]) -> None:
    """Under a queue that stays as it is there is one change at most after the first look, down to what is wanted."""
    looks = [(pause, depth) for pause in [0.0, *pauses, given.cool_down + 1.0]]
    numbers = [scale.workers for _, _, scale in follow(Scale(workers), looks, given)]
    assert numbers[-1] == wanted(depth, given)
    assert len(set(numbers)) <= 2
    assert numbers == sorted(numbers, reverse=True)


@given(limits(), st.integers(0, 60), LOOKS)
def test_enough_for_the_whole_cool_down(given: PoolLimits, workers: int, looks: list[tuple[float, int]]) -> None:
    """There are never fewer than were needed at some look within the last cool-down."""
    told = follow(Scale(workers), looks, given)
    for index, (now, depth, scale) in enumerate(told):
        lately = [before for then, before, _ in told[:index] if now - then < given.cool_down]
        assert scale.workers >= max(wanted(each, given) for each in [depth, *lately])


@given(limits(), st.integers(0, 60), LOOKS)
def test_two_steps_down_are_a_cool_down_apart(given: PoolLimits, workers: int, looks: list[tuple[float, int]]) -> None:
    told = follow(Scale(min(workers, given.max)), looks, given)
    numbers = [workers, *(scale.workers for _, _, scale in told)]
    falls = [now for (now, _, _), before, after in zip(told, numbers, numbers[1:], strict=False) if after < before]
    assert all(later - earlier >= given.cool_down for earlier, later in zip(falls[1:], falls[2:], strict=False))


@given(limits(), st.integers(0, 60), LOOKS, DEPTHS, DEPTHS)
def test_a_deeper_queue_never_has_fewer(
    given: PoolLimits, workers: int, looks: list[tuple[float, int]], one: int, other: int
) -> None:
    now, _, scale = follow(Scale(workers), looks, given)[-1]
    shallow, deep = sorted((one, other))
    for later in (now, now + given.cool_down):
        assert step(scale, shallow, given, later).workers <= step(scale, deep, given, later).workers


# -- those whom others look after

PROGRAM = """#!{python}
import pathlib, sys
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    print(pathlib.Path(sys.argv[0]).name, *sys.argv[1:], file=calls)
if (folder / "trouble").exists():
    sys.exit((folder / "trouble").read_text())
print((folder / "answer").read_text())
"""


class Program:
    """A program on the PATH that writes down how it was called, answers what it is told to, or fails."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        (folder / name).write_text(PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
        self.answer("")

    def answer(self, text: str) -> None:
        (self._folder / "answer").write_text(text)

    def fail(self, text: str | None) -> None:
        if text is None:
            (self._folder / "trouble").unlink()
        else:
            (self._folder / "trouble").write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Program]:
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda name: Program(tmp_path, name)


async def test_compose_is_told_by_its_command(program: Callable[[str], Program]) -> None:
    docker = program("docker")
    docker.answer("4f1d\n99ab\n")
    pool = compose_pool("fleet.yml")
    assert await pool.current() == 2
    for count in (3, 3, 0):
        await pool.scale(count)
    await compose_pool("fleet.yml", "crawler").scale(1)
    up = "docker compose -f fleet.yml up -d --no-recreate --no-deps --scale"
    assert docker.calls == [
        "docker compose -f fleet.yml ps -q worker", f"{up} worker=3 worker", f"{up} worker=0 worker",
        f"{up} crawler=1 crawler",
    ]  # fmt: skip


async def test_kubernetes_is_told_by_its_command(program: Callable[[str], Program]) -> None:
    kubectl = program("kubectl")
    kubectl.answer("7")
    pool = kubernetes_pool("shoal-worker")
    assert await pool.current() == 7
    await pool.scale(12)
    await kubernetes_pool("shoal-worker", "crawls").scale(1)
    assert kubectl.calls == [
        "kubectl get deployment/shoal-worker -o jsonpath={.spec.replicas}",
        "kubectl scale deployment/shoal-worker --replicas=12",
        "kubectl --namespace crawls scale deployment/shoal-worker --replicas=1",
    ]


async def test_a_command_that_fails_is_told_once_and_tried_again(
    program: Callable[[str], Program], caplog: pytest.LogCaptureFixture
) -> None:
    kubectl = program("kubectl")
    pool = kubernetes_pool("shoal-worker")
    kubectl.fail("the server is away")
    with caplog.at_level(logging.WARNING, "shoal.autoscale"):
        assert await pool.current() is None
        for _ in range(3):
            await pool.scale(2)
        assert [record.message for record in caplog.records] == [
            "kubectl get deployment/shoal-worker -o jsonpath={.spec.replicas} failed: the server is away; trying again",
            "kubectl scale deployment/shoal-worker --replicas=2 failed: the server is away; trying again",
        ]
    kubectl.fail(None)
    for _ in range(3):
        await pool.scale(2)
    assert kubectl.calls[1:] == ["kubectl scale deployment/shoal-worker --replicas=2"] * 4


async def test_an_answer_that_is_none(program: Callable[[str], Program], caplog: pytest.LogCaptureFixture) -> None:
    program("kubectl").answer("what?")
    with caplog.at_level(logging.WARNING, "shoal.autoscale"):
        assert await kubernetes_pool("shoal-worker").current() is None
    assert "answered 'what?\\n'" in caplog.text


async def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pools, "_COMMAND_TIMEOUT", 0.1)
    pool = CommandPool(lambda count: ["sleep", f"6{count}"], ["sleep"], int)
    with caplog.at_level(logging.WARNING, "shoal.autoscale"):
        await pool.scale(1)
    assert "sleep 61 could not be run: no answer; trying again" in caplog.text


def test_a_missing_command_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="command 'docker' is not on the PATH"):
        compose_pool("fleet.yml")
