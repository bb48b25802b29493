"""What callers may hold of the server at the same time: bytes of bodies, open answers, streams, connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

RETRY_AFTER = 5  # seconds
_PATIENCE = 30.0  # seconds that an open answer waits for others to be read
_POLL_EVERY = 0.05  # seconds


class BusyError(HTTPException):
    """A budget is used up: 429 if the caller holds its share, 503 if all callers together hold everything. An
    HTTPException because FastAPI passes no others through while it reads a body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, {"Retry-After": str(RETRY_AFTER)})


class Budget:
    """An amount that callers share. Each part of the server reserves its share first, and returns it afterwards."""

    def __init__(self, what: str, each: int, total: int) -> None:
        """``each``: what one caller may hold; ``total``: what all may hold together."""
        self._what = what
        self._each, self._total = each, total
        self._held: Counter[str] = Counter()
        self._sum = 0

    def take(self, caller: str, amount: int = 1) -> None:
        """BusyError if the caller, or all callers together, would hold too much."""
        if self._held[caller] + amount > self._each:
            raise BusyError(
                429, f"your requests hold too many {self._what} (the limit is {self._each}); try again later"
            )
        if self._sum + amount > self._total:
            raise BusyError(
                503, f"all requests hold too many {self._what} (the limit is {self._total}); try again later"
            )
        self._held[caller] += amount
        self._sum += amount

    def give_back(self, caller: str, amount: int = 1) -> None:
        self._sum -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]

    @asynccontextmanager
    async def holding(self, caller: str, amount: int) -> AsyncIterator[None]:
        """Hold an amount, at most a caller's share. Wait for it a while; then BusyError."""
        amount = min(amount, self._each)
        end = asyncio.get_running_loop().time() + _PATIENCE
        while True:
            try:
                self.take(caller, amount)
                break
            except BusyError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(_POLL_EVERY)
        try:
            yield
        finally:
            self.give_back(caller, amount)


class Share:
    """An amount of a budget that changes. The end of ``with`` returns it. Nobody waits for it."""

    def __init__(self, budget: Budget, caller: str) -> None:
        self._budget, self._caller = budget, caller
        self.amount = 0

    def change(self, amount: int) -> bool:
        """Hold this amount from now on. False if there is no room; then the amount stays what it was."""
        try:
            if amount > self.amount:
                self._budget.take(self._caller, amount - self.amount)
            elif amount < self.amount:
                self._budget.give_back(self._caller, self.amount - amount)
        except BusyError:
            return False
        self.amount = amount
        return True

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.change(0)


class AnswerBudgets(NamedTuple):
    """What callers may hold with their answers."""

    open: Budget
    """Large answers that clients are reading."""
    decoded: Budget
    """Bytes of large results, from decoding them until they are sent."""
    whole: Budget
    """Bytes of answers that are not sent in pieces: first the most that they may have, then what they have."""
    turn: asyncio.Lock
    """For the work on a large result that cannot be interrupted: other requests are handled between two of them."""


def caller_of(request: Request) -> str:
    """Whose budget a request uses: that of its token's name, or of its address if it has none."""
    return str(request.state.caller or request.state.address)
