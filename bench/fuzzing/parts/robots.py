"""robots.txt files of up to 2 MB, cut to the size limit, and URLs that are checked against them."""

from __future__ import annotations

import random
from typing import Any

from shoal.config import RobotsSettings
from shoal.fetch.layers.robots import MAX_BYTES, read_rules

SECONDS, MEGABYTES = 2.0, 256.0

_AGENT = "shoal/1.0 (+https://example.com/bot)"
_PIECES = [
    "User-agent: *\n", "User-agent: shoal\n", "User-agent: a%d\n", "Disallow: /\n", "Disallow: /a%d\n",
    "Disallow: ", "Allow: /", "Allow: /a*b*c*d*e$\n", "Disallow: /*a*a*a*a*a*a*b\n", "*", "*a", "$", "%", "%ff",
    "%2F", "/", "?", "a", "Crawl-delay: 1\n", "Crawl-delay: 1e999\n", "Request-rate: 1/1\n",
    "Visit-time: 0600-0845\n", "Sitemap: http://x/%d\n", "Host: x\n", "#", "\r", "\n", "\r\n", "\0", "\ufeff", "é",
    ":", " ", "\t", "\x85", "\u2028", "dissallow:", "user agent",
]  # fmt: skip


def make(rng: random.Random) -> Any:
    return {
        "groups": [
            ["".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 5))), rng.choice([1, 100, 2000, 100_000])]
            for _ in range(rng.randint(1, 4))
        ],
        "path": rng.choice(["/", "/a", "/aaaa", "/%61", "/?a=b"])
        + rng.choice(["", "a" * 2000, "/a" * 1000, "%61" * 500]),
    }


def mutate(rng: random.Random, case: Any) -> Any:
    groups = [[unit, times] for unit, times in case["groups"]]
    chosen = rng.choice(groups)
    place = rng.randint(0, len(chosen[0]))
    chosen[0] = chosen[0][:place] + rng.choice(_PIECES) + chosen[0][place + rng.choice([0, 0, 3]) :]
    chosen[1] = max(1, min(200_000, int(chosen[1] * rng.choice([0.5, 1, 3]))))
    return {**case, "groups": groups}


def run(case: Any) -> str:
    parts, left = [], MAX_BYTES
    for unit, times in case["groups"]:
        for number in range(times):
            parts.append(unit.replace("%d", str(number)))
            left -= len(parts[-1])
            if left < 0:
                break
    text = "".join(parts).encode("utf-8", "replace")[:MAX_BYTES].decode("utf-8-sig", "replace")
    rules = read_rules(text, _AGENT, RobotsSettings())
    if rules.rules is None:
        return "allows all"
    for number in range(20):
        rules.rules.can_fetch(f"http://ex.com{case['path']}{number}", _AGENT)
    return "asked"
