"""Short histories of concurrent clients on every backend, and histories that the check must refuse."""

from __future__ import annotations

import secrets
from math import inf
from typing import Any

import pytest

from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.ports import (
    Completion,
    Failure,
    FrontierOptions,
    History,
    Holder,
    HostUpdate,
    Lease,
    Leased,
    Pushed,
    Stats,
)
from shoal.testing.driving import drive
from shoal.testing.histories import Operation, find_contradiction
from shoal.testing.simulation.planted import DEFECTS
from tests.contracts.history_clients import BACKENDS, clients

CLIENTS = 4


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_order_of_the_calls_explains_the_answers(backend: str) -> None:
    async with clients(backend, CLIENTS, "lost", seed := secrets.randbits(32)) as stores:
        for number in range(3):
            recording = await drive(stores, seed + number)
            assert len(recording.operations) > 50


@pytest.mark.parametrize("name", ["missing fence", "repeated token", "delay from the lease", "links twice"])
async def test_a_planted_defect_is_found(name: str) -> None:
    defect = next(defect for defect in DEFECTS if defect.name == name)
    with defect.planted():
        for seed in range(50):
            try:
                await drive([MemoryStore()] * CLIENTS, seed)
            except AssertionError as exc:
                assert f"seed {seed}: " in str(exc)  # noqa: PT017 - the first seed that finds it
                return
    pytest.fail("50 seeds did not find it")


# -- histories that were made up


PAGE, OTHER = Request("http://a.example/1"), Request("http://a.example/2")
OPTIONS = FrontierOptions(max_attempts=3, concurrency_per_host=1)
LOST = object()
"""The answer was lost."""


def call(client: str, begin: float, end: float, name: str, *arguments: Any, answer: Any, epoch: int = 1) -> Operation:
    if answer is LOST:
        return Operation(client, name, arguments, begin, Holder(client, epoch))
    return Operation(client, name, arguments, begin, Holder(client, epoch), end, answer, "answered")


def leased(token: int, attempt: int = 1, page: Request = PAGE) -> Lease:
    return Lease(page, page.fingerprint(), token, attempt, "a.example", 0.0)


def push(client: str, begin: float, end: float, added: int, *pages: Request) -> Operation:
    pages = pages or (PAGE,)
    return call(client, begin, end, "push", pages, answer=Pushed(added, len(pages) - added))


def lease(
    client: str, begin: float, end: float, *leases: Lease, ttl: float = 10.0, nonce: object = None, epoch: int = 1
) -> Operation:
    """Without ``end``, the answer was lost."""
    answer = LOST if end == inf else Leased(list(leases), None)
    nonce = nonce or object()
    return call(client, begin, end, "lease", 1, ttl, True, (client, nonce), answer=answer, epoch=epoch)


def complete(client: str, begin: float, end: float, given: Lease, answer: Any, *children: Request) -> Operation:
    answer = answer if answer is LOST else [answer]
    return call(client, begin, end, "complete", [Completion(lease=given, children=children)], answer=answer)


def fail(client: str, begin: float, end: float, given: Lease, retry_in: float | None, answer: Any) -> Operation:
    failure = Failure(lease=given, kind="timeout", reason="slow", retry_in=retry_in)
    return call(client, begin, end, "fail", [failure], answer=answer if answer is LOST else [answer])


def find(
    client: str, begin: float, end: float, state: str | None, attempts: int = 0, page: Request = PAGE
) -> Operation:
    found: Any = state and History(
        url=page.url, state=state, depth=0, priority=0, attempts=attempts, status=0, items=0, parent=None, reason="",
        events=(),
    )  # type: ignore[arg-type]  # fmt: skip
    return call(client, begin, end, "find", page, answer=found)


def stats(client: str, begin: float, end: float, **counts: int) -> Operation:
    return call(client, begin, end, "stats", answer=Stats(**counts))


DELAY = call("w1", 0.0, 0.1, "update_host", "a.example", HostUpdate(delay=1.0), answer=None)

EXPLAINED = {
    "two pushes at the same time": [push("w1", 0.0, 1.0, 0), push("w2", 0.0, 1.0, 1)],
    "a push while it is leased": [push("w1", 0.0, 2.0, 1), lease("w2", 1.0, 3.0, leased(7)), push("w3", 1.5, 1.6, 0)],
    "a lease after another one expired": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0), lease("w2", 3.0, 3.1, leased(8, 2)),
        complete("w1", 4.0, 4.1, leased(7), None), complete("w2", 5.0, 5.1, leased(8, 2), Pushed(0, 0)),
    ],
    "an expired lease is valid until another call": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0),
        complete("w1", 4.0, 4.1, leased(7), Pushed(0, 0)),
    ],
    "a lost lease that counts": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, inf, ttl=2.0), lease("w2", 3.0, 3.1, leased(8, 2)),
    ],
    "a lost lease that never happened": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, inf, ttl=2.0), lease("w2", 1.5, 1.6, leased(8)),
    ],
    "a lease that is repeated": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, inf, nonce="n"), find("w2", 1.5, 1.6, "leased", 1),
        lease("w1", 2.0, 2.1, leased(7), nonce="n"), complete("w1", 3.0, 3.1, leased(7), Pushed(0, 0)),
    ],
    "a lost completion": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, inf, leased(7), LOST, OTHER),
        find("w2", 3.0, 3.1, "ready", 0, OTHER), complete("w1", 4.0, 4.1, leased(7), Pushed(0, 0), OTHER),
    ],
    "a lost completion that never happened": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0),
        complete("w1", 2.0, inf, leased(7), LOST, OTHER), lease("w2", 3.0, 3.1, leased(8, 2)),
        find("w2", 4.0, 4.1, None, 0, OTHER),
    ],
    "a lost completion that happens later": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, inf, leased(7), LOST),
        find("w2", 3.0, 3.1, "leased", 1), find("w2", 4.0, 4.1, "done", 1),
    ],
    "a lost fence": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)),
        call("w2", 2.0, inf, "fence", "w1", 2, answer=LOST), lease("w2", 3.0, 3.1, leased(8, 2)),
    ],
    "a retry": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), fail("w1", 2.0, 2.1, leased(7), 1.0, "waiting"),
        find("w1", 2.5, 2.6, "waiting", 1), lease("w2", 3.0, 3.1, leased(8, 2)),
    ],
    "the delay of a host": [
        DELAY, push("w1", 1.0, 1.1, 2, PAGE, OTHER), lease("w1", 2.0, 2.1, leased(7)),
        complete("w1", 3.0, 3.5, leased(7), Pushed(0, 0)), lease("w2", 3.9, 4.1, leased(8, 1, OTHER)),
    ],
    "counters during a push": [
        push("w1", 0.0, 2.0, 1), stats("w2", 1.0, 1.1), stats("w2", 1.2, 1.3, pushed=1, ready=1),
    ],
}  # fmt: skip

REFUSED = {
    "a request leased twice": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), lease("w2", 2.0, 2.1, leased(8, 2)),
    ],
    "leased twice at the same time": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 2.0, leased(7)), lease("w2", 1.0, 2.0, leased(8)),
    ],
    "added twice": [push("w1", 0.0, 1.0, 1), push("w2", 0.5, 1.5, 1)],
    "added by nobody": [push("w1", 0.0, 1.0, 0)],
    "a lost push": [push("w1", 0.0, 1.0, 1), find("w2", 2.0, 2.1, None)],
    "a lost link": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)),
        complete("w1", 2.0, 2.1, leased(7), Pushed(1, 0), OTHER), find("w2", 3.0, 3.1, None, 0, OTHER),
    ],
    "a repeated token": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0), lease("w2", 4.0, 4.1, leased(7, 2)),
    ],
    "an old token completes": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0), lease("w2", 4.0, 4.1, leased(8, 2)),
        complete("w1", 5.0, 5.1, leased(7), Pushed(0, 0)),
    ],
    "an old token fails": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0), lease("w2", 4.0, 4.1, leased(8, 2)),
        fail("w1", 5.0, 5.1, leased(7), None, "dead"),
    ],
    "a valid token is refused": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, 2.1, leased(7), None),
    ],
    "a completion that did not last": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, 2.1, leased(7), Pushed(0, 0)),
        find("w2", 3.0, 3.1, "ready", 1),
    ],
    "half of a lost completion": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, inf, leased(7), LOST, OTHER),
        find("w2", 3.0, 3.1, "done", 1), find("w2", 4.0, 4.1, None, 0, OTHER),
    ],
    "a lost call that happens and unhappens": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, inf, leased(7), LOST),
        find("w2", 3.0, 3.1, "done", 1), find("w2", 4.0, 4.1, "leased", 1),
    ],
    "done, and leased again": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), complete("w1", 2.0, 2.1, leased(7), Pushed(0, 0)),
        lease("w2", 3.0, 3.1, leased(8, 2)),
    ],
    "an attempt that does not count": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7), ttl=2.0), lease("w2", 4.0, 4.1, leased(8, 1)),
    ],
    "a retry that is too early": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), fail("w1", 2.0, 2.1, leased(7), 5.0, "waiting"),
        lease("w2", 3.0, 3.1, leased(8, 2)),
    ],
    "too many at a host": [
        push("w1", 0.0, 0.1, 2, PAGE, OTHER), lease("w1", 1.0, 1.1, leased(7)),
        lease("w2", 2.0, 2.1, leased(8, 1, OTHER)),
    ],
    "the delay of a host is too short": [
        DELAY, push("w1", 1.0, 1.1, 2, PAGE, OTHER), lease("w1", 2.0, 2.1, leased(7)),
        complete("w1", 3.0, 3.5, leased(7), Pushed(0, 0)), lease("w2", 3.8, 3.9, leased(8, 1, OTHER)),
    ],
    "a lease in a pause": [
        push("w1", 0.0, 0.1, 1), call("w2", 1.0, 1.1, "transition", "paused", answer="paused"),
        lease("w1", 2.0, 2.1, leased(7)),
    ],
    "a lease of a fenced worker": [
        push("w1", 0.0, 0.1, 1), call("w2", 1.0, 1.1, "fence", "w1", 2, answer=0), lease("w1", 2.0, 2.1, leased(7)),
    ],
    "a fence that ends no lease": [
        push("w1", 0.0, 0.1, 1), lease("w1", 1.0, 1.1, leased(7)), call("w2", 2.0, 2.1, "fence", "w1", 2, answer=1),
        complete("w1", 3.0, 3.1, leased(7), Pushed(0, 0)),
    ],
    "a push that is not counted": [push("w1", 0.0, 1.0, 1), stats("w2", 2.0, 2.1)],
    "counters that do not balance": [push("w1", 0.0, 1.0, 1), stats("w2", 0.5, 2.0, pushed=1)],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_good_history_is_explained(name: str) -> None:
    assert not find_contradiction(EXPLAINED[name], OPTIONS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_history_is_refused(name: str) -> None:
    """Each one is good until its last answer, which the message shows."""
    history = REFUSED[name]
    found = find_contradiction(history, OPTIONS)
    assert found
    assert history[-1].name in found
    assert name == "added by nobody" or not find_contradiction(history[:-1], OPTIONS)


def test_a_contradiction_shows_only_the_calls_that_matter() -> None:
    history = [
        push("w1", 0.0, 0.1, 2, PAGE, OTHER), find("w1", 0.2, 0.3, "ready"), lease("w1", 1.0, 1.1, leased(7), ttl=2.0),
        call("w2", 1.2, 1.3, "fence", "w9", 2, answer=0), lease("w2", 4.0, 4.1, leased(8, 2)),
        find("w1", 4.2, 4.3, "leased", 2), complete("w1", 5.0, 5.1, leased(7), Pushed(0, 0)),
        find("w1", 6.0, 6.1, "done", 2),
    ]  # fmt: skip
    assert find_contradiction(history, OPTIONS).splitlines() == [
        "no order of the calls explains the answers about http://a.example/1.",
        "  w1    0.0000  0.1000  push(http://a.example/1, http://a.example/2) -> 2 new",
        "  w1    1.0000  1.1000  lease(1, 2.0, True) -> [http://a.example/1 under t1, attempt 1]",
        "  w2    4.0000  4.1000  lease(1, 10.0, True) -> [http://a.example/1 under t2, attempt 2]",
        "* w1    5.0000  5.1000  complete([http://a.example/1 under t1, attempt 1]) -> [0 new]",
        "Before the stars: http://a.example/1 is leased, attempts: 2, at least until 14.0000",
    ]
