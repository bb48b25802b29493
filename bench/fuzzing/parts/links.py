"""Pages of links, and single URLs: resolved, normalized, fingerprinted, and checked against a scope."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

from shoal.config import ScopeSettings
from shoal.crawling.run_queue import KnownLinks
from shoal.errors import RequestError
from shoal.http import Request
from shoal.urls.normalize import Scope, host_of, normalize_url, resolve, url_fingerprint

SECONDS, MEGABYTES = 4.0, 256.0  # for 2 MB of links

_SIZE = 2_000_000
_PIECES = [
    "http://", "https://", "//", "/", "\\", "..", "./", "../", "?", "&", "=", "#", "%", "%2e", "%00", "%ff", "@",
    ":", ":80", ":99999", "[", "]", "[::1]", "[v1.x]", "127.1", "0x7f", "0", "1", "a", "b.", ".", "ex.com", "xn--",
    "xn--a", "ü", "字", "。", "\ufdfa", "\u200d", "\u202e", "א", "\ud800", "\udcff", "\0", "\n", "\t", " ",
    "javascript:", "mailto:", "data:", "e\u0301", "Ⅷ", "ß", "😀", "%C3%BC", ";", "~", "'", '"', "<", "|", "{",
]  # fmt: skip


def make(rng: random.Random) -> Any:
    return {
        "base": rng.choice(["http://ex.com/", "https://ex.com/a/b/../c?d", "http://ex.com/" + "a/" * 2000]),
        "start": rng.choice(["", "http://", "//", "/", "../"]),
        "unit": "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 5))),
        "times": rng.choice([1, 1, 3, 60, 250, 3000, 60_000]),
        "number": rng.random() < 0.7,
    }


def mutate(rng: random.Random, case: Any) -> Any:
    unit, place = case["unit"], rng.randint(0, len(case["unit"]))
    changed = unit[:place] + rng.choice(["", rng.choice(_PIECES)]) + unit[place + rng.randint(0, 1) :]
    return {
        **case,
        "unit": changed or "a",
        "times": max(1, min(100_000, int(case["times"] * rng.choice([0.5, 1, 1, 3])))),
    }


def run(case: Any) -> str:
    href = case["start"] + case["unit"] * case["times"]
    count = max(1, min(100_000, _SIZE // (len(href) + 6)))
    hrefs = [href.replace(case["unit"], f"{case['unit']}{n}", 1) if case["number"] else href for n in range(count)]
    base = normalize_url(case["base"])
    known = KnownLinks()
    found = resolve(base, known.unknown(base, hrefs))
    known.learn(base, hrefs)
    scope = Scope(ScopeSettings(deny=[r"\?.*x=1", r"/private/"]), ["ex.com"])
    for url in found:
        scope.refuses(url)
        url_fingerprint(url)
        assert normalize_url(url) == url, url
        assert host_of(url).isascii()
    for each in hrefs[:50]:
        with suppress(RequestError):
            Request(each)
    return "links found" if found else "no links"
