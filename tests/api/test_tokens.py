"""Who has a token, and who only guesses."""

from __future__ import annotations

import pytest

from shoal.api.server import auth
from shoal.api.server.auth import BURST, CallerTokens
from shoal.api.server.errors import ProblemError
from shoal.config import ServerSettings

ANN, BOB = "the-token-of-ann", "the-token-of-bob"
HERE, THERE = "10.0.0.1", "10.0.0.2"


class Door:
    """Tokens of two callers, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.callers = CallerTokens(ServerSettings(tokens={"ann": ANN, "bob": BOB}), lambda: self.now)
        self.guesses = 0

    def find(self, token: str, address: str = HERE) -> str | None:
        try:
            return self.callers.find(token.encode(), address)
        except ProblemError:
            return "refused"

    def guess(self, address: str = HERE) -> str | None:
        self.guesses += 1
        return self.find(f"guess-{self.guesses}", address)

    def exhaust(self, address: str = HERE) -> None:
        assert [self.guess(address) for _ in range(BURST)] == [None] * BURST
        assert self.guess(address) == "refused"


def test_an_address_that_guesses_is_slowed() -> None:
    door = Door()
    door.exhaust()
    assert door.find(ANN) == "refused"  # or else the number of guesses would not matter
    assert door.guess(THERE) is None
    door.now += 1
    assert [door.guess(), door.guess()] == [None, "refused"]
    door.now += 1
    assert door.find(ANN) == "ann"


def test_a_token_that_worked_from_there_always_works() -> None:
    door = Door()
    assert door.find(ANN) == "ann"
    door.exhaust()
    assert [door.find(ANN), door.find(BOB), door.find(BOB, THERE)] == ["ann", "refused", "bob"]


def test_a_client_with_an_old_token_slows_nobody() -> None:
    door = Door()
    assert [door.find(f"old-{number % 8}") for number in range(500)] == [None] * 500
    assert door.find(ANN) == "ann"


def test_a_network_of_ipv6_is_one_address() -> None:
    door = Door()
    for number in range(BURST):
        assert door.guess(f"2001:db8::{number:x}") is None
    assert [door.guess("2001:db8::ffff:1"), door.guess("2001:db8:0:1::1")] == ["refused", None]
    door.exhaust("::ffff:10.0.0.9")
    assert [door.guess("10.0.0.9"), door.guess("::ffff:10.0.0.8"), door.guess("")] == ["refused", None, None]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_ADDRESSES", 10)
    door = Door()
    door.exhaust()
    for number in range(9):
        door.guess(f"10.1.0.{number}")
        assert door.guess() == "refused"
    for number in range(10):
        door.guess(f"10.2.0.{number}")
    assert len(door.callers._visitors) == 10
    assert door.guess() is None
