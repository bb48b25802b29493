"""The rules of `shoal.frontier.host_policy` are the same in Python, in Lua and in SQL."""

from __future__ import annotations

import random
from math import nan
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from shoal.frontier import host_policy
from shoal.frontier.host_policy import effective_concurrency, effective_delay, is_asking, is_live, pause_for, turns_left
from tests.support.databases import PostgresServer, RedisServer, shared

pytestmark = pytest.mark.asyncio

_dice = random.Random(11)
_TIMES = (0.0, 0.5, 1.0, 3.0, 10.0, 29.0, 30.0, 60.0)
_DELAYS = (None, 0.0, 0.08, 1.0, 20.0)
CASES = [
    {
        "since": _dice.choice(_TIMES),
        "now": _dice.choice(_TIMES),
        "asked": _dice.choice(_TIMES),
        "due": _dice.choice(_TIMES),
        "delay": _dice.choice(_DELAYS[1:]),
        "longest": _dice.choice(_DELAYS),
        "own": _dice.choice(_DELAYS),
        "default": _dice.choice(_DELAYS),
        "crawl": _dice.choice(_DELAYS),
        "learned": _dice.choice(_DELAYS),
        "concurrency": _dice.choice([1, 2, 8]),
        "weight": _dice.choice([0.1, 0.5, 1.0, 3.0]),
        "used": _dice.randrange(30) / _dice.choice([1, 3, 10]),
        "least": _dice.randrange(30) / _dice.choice([1, 3, 10]),
    }
    for _ in range(300)
]


def _expected(case: dict[str, Any]) -> tuple[Any, ...]:
    rival = None if case["longest"] is None else host_policy.RivalDelay(case["longest"], "other")
    delay, _ = effective_delay(case["own"], case["default"], case["delay"], case["crawl"], case["learned"], rival)
    return (
        is_live(case["since"], case["delay"], case["now"]),
        is_asking(case["asked"], case["due"], case["now"]),
        turns_left(case["concurrency"], case["weight"], case["used"], case["least"]),
        pytest.approx(pause_for(case["delay"])),
        pytest.approx(delay),
        effective_concurrency(delay, None, None, case["concurrency"]),
    )


async def test_the_rules_in_lua() -> None:
    script = (
        "\n".join(host_policy.lua().values())
        + """
        local live_for, is_live, is_asking, turns_left, pause_for = sharing_rules()
        local since, now, asked, due, delay, longest, own, default, crawl, learned, most, weight, used, least =
            unpack((function() local n = {} for i, v in ipairs(ARGV) do n[i] = tonumber(v) or 0 / 0 end return n end)())
        if longest ~= longest then longest = nil end
        local host = {delay = own, crawl_delay = crawl, learned_delay = learned, concurrency = -1}
        local in_force, limit = policy(
            host, {delay = default, concurrency = -1}, {delay = delay, concurrency = most}, longest)
        return {
            is_live(since, delay, now) and 1 or 0, is_asking(asked, due, now) and 1 or 0,
            turns_left(most, weight, used, least), tostring(pause_for(delay)), tostring(in_force), limit,
        }"""
    )
    redis: Any = Redis.from_url(shared(RedisServer).url)
    try:
        for case in CASES:
            words = [repr(nan if value is None else value) for value in case.values()]
            live, asking, left, pause, delay, limit = await redis.eval(script, 0, *words)
            assert (bool(live), bool(asking), left, float(pause), float(delay), limit) == _expected(case), case
    finally:
        await redis.aclose()


async def test_the_rules_in_sql() -> None:
    rules = host_policy.sql()
    asking, live = (rules[name].replace("_now", "v.now") for name in ("IS_ASKING", "IS_SEEN"))
    pause = rules["PAUSE"].replace("d.delay", "r.delay")
    query = f"""
        SELECT {live}, {asking}, v.concurrency + {rules["LEAD"]}, {pause}, d.delay, {rules["CONCURRENCY"]}
        FROM (SELECT $1::float8 AS since, $2::float8 AS now, $11::integer AS concurrency) v
        CROSS JOIN (SELECT $3::float8 AS asked) p CROSS JOIN (SELECT $1::float8 AS seen) t
        CROSS JOIN (SELECT $4::float8 AS due, $13::float8 AS used, $14::float8 AS least) s
        CROSS JOIN (SELECT $5::float8 AS delay, $11::integer AS concurrency, $12::float8 AS weight) r
        CROSS JOIN (SELECT $5::float8 AS delay) o
        CROSS JOIN (SELECT $7::float8 AS delay, $9::float8 AS crawl_delay, $10::float8 AS learned_delay,
                    $6::float8 AS longest, NULL::integer AS concurrency) h
        CROSS JOIN (SELECT $8::float8 AS delay, NULL::integer AS concurrency) e
        CROSS JOIN LATERAL (SELECT {rules["DELAY"]} AS delay) d"""
    link: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(shared(PostgresServer).url)
    try:
        for case in CASES:
            assert tuple(await link.fetchrow(query, *case.values()) or ()) == _expected(case), case
    finally:
        await link.close()
