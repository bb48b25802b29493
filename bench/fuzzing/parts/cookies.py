"""Set-Cookie headers of many hosts: parsed, stored within limits, and sent back."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from shoal.fetch.sessions.session import Session
from shoal.http import Request, Response

SECONDS, MEGABYTES = 4.0, 64.0  # for 2 MB of lines

_SIZE = 2_000_000
_PIECES = [
    "a", "=", ";", "; ", "Path=", "/", "/x", "Domain=", ".ex.com", "ex.com", "com", "co.uk", "Expires=", "Max-Age=",
    "99999999999", "-1", "Wed, 21 Oct 2099 07:28:00 GMT", "1 1 1", "Secure", "HttpOnly", "SameSite=None", '"', ",",
    " ", "\t", "é", "\0", "\x1b", "\udcff", "%00", "__Host-", "$", "\\",
]  # fmt: skip


def make(rng: random.Random) -> Any:
    pieces = [rng.choice(_PIECES) for _ in range(rng.randint(1, 8))]
    return {
        "name": rng.choice(["c", "c%d", "%d"]),
        "line": "".join(pieces),
        "times": rng.choice([1, 1, 10, 500, 4000, 100_000]),
        "hosts": rng.choice([1, 10, 1000, 50_000]),
        "lines": rng.choice([1, 20, 100]),
    }


def mutate(rng: random.Random, case: Any) -> Any:
    line, place = case["line"], rng.randint(0, len(case["line"]))
    changed = line[:place] + rng.choice(["", rng.choice(_PIECES)]) + line[place + rng.randint(0, 2) :]
    return {**case, "line": changed or "a", "hosts": max(1, int(case["hosts"] * rng.choice([0.5, 1, 2])))}


def run(case: Any) -> str:
    layer, sent = Session(), 0

    async def crawl() -> None:
        nonlocal sent
        left, number = _SIZE, 0
        while left > 0 and number < 20_000:
            host = f"h{number % case['hosts']}.ex.com"
            number += 1
            lines = []
            for each in range(case["lines"]):
                name = case["name"].replace("%d", f"{number}-{each}")
                lines.append((name + "=" + case["line"] * case["times"])[:65_536])
                left -= len(lines[-1]) + 100

            async def fetch(request: Request, lines: list[str] = lines) -> Response:
                nonlocal sent
                header = request.headers.get("Cookie", "")
                assert len(header) <= 8190
                sent += bool(header)
                return Response(request.url, headers=[("Set-Cookie", line) for line in lines], request=request)

            await layer(Request(f"http://{host}/a/b"), fetch)

    asyncio.run(crawl())
    return "sent back" if sent else "not sent"
