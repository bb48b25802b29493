"""Values that many readers share for a short time."""

from __future__ import annotations

import asyncio

import pytest

from shoal.api.server.state import TimedCache
from shoal.errors import StoreAwayError


async def test_readers_at_the_same_time_share_one_value() -> None:
    cache, made = TimedCache(), []

    async def make() -> int:
        made.append(1)
        await asyncio.sleep(0)
        return len(made)

    assert await asyncio.gather(*(cache.get("key", 60, make) for _ in range(20))) == [1] * 20
    assert await cache.get("key", 0, make) == 2  # too old
    assert await cache.get("other", 60, make) == 3


async def test_errors_are_not_kept_and_the_number_of_values_is_limited() -> None:
    cache = TimedCache()

    async def fail() -> int:
        raise StoreAwayError("away")

    async def make() -> int:
        return 7

    with pytest.raises(StoreAwayError):
        await cache.get("key", 60, fail)
    assert await cache.get("key", 60, make) == 7
    for number in range(1000):
        await cache.get(number, 60, make)
    assert len(cache._values) <= 300
    assert len(cache._locks) <= 301
