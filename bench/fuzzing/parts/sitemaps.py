"""Sitemaps of up to 16 MB after decompression, as a compressed file may have them."""

from __future__ import annotations

import random
from typing import Any

from shoal.errors import SitemapError
from shoal.http.sitemaps import SitemapReader

SECONDS, MEGABYTES = 8.0, 256.0

_MAX_BYTES = 16 << 20
_PIECES = [
    "<urlset>", "<sitemapindex>", "<rss>", "<feed>", "<url>", "</url>", "<loc>", "</loc>", "<sitemap>", "</sitemap>",
    "<item>", "<entry>", "<link rel='alternate' href='/%d'/>", '<link href="', "<lastmod>2026-05-01</lastmod>",
    "<lastmod>", "http://ex.com/%d", "<!--", "-->", "<![CDATA[", "]]>", "<!ENTITY a '&a;&a;'>", "<?xml?>", "&amp;",
    "&#x10ffff;", "&", ";", "<", ">", "'", '"', "=", "/", "x:y:", " ", "\n", "\r", "a" * 100, "é", "\0", "\ufeff",
    "<a>", "<a", "</a>", "<a b='>>>>'>", "<%d>", "<link ", "/>",
]  # fmt: skip


def make(rng: random.Random) -> Any:
    groups = [
        ["".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 6))), rng.choice([1, 1000, 50_000, 1_000_000])]
        for _ in range(rng.randint(1, 4))
    ]
    return {"groups": [[rng.choice(["", "<urlset>", "<rss>", "http://ex.com/\n"]), 1], *groups]}


def mutate(rng: random.Random, case: Any) -> Any:
    groups = [[unit, times] for unit, times in case["groups"]]
    chosen = rng.choice(groups)
    place = rng.randint(0, len(chosen[0]))
    chosen[0] = chosen[0][:place] + rng.choice(_PIECES) + chosen[0][place + rng.choice([0, 0, 3]) :]
    chosen[1] = max(1, min(5_000_000, int(chosen[1] * rng.choice([0.5, 1, 4]))))
    return {"groups": groups}


def run(case: Any) -> str:
    body = b""
    for unit, times in case["groups"]:
        text = unit.replace("%d", str(times)).encode("utf-8", "replace")
        body += text * min(times, (_MAX_BYTES - len(body)) // max(1, len(text)))
    try:
        entries = sum(1 for _ in SitemapReader(body))
    except SitemapError:
        return "refused"
    return "entries" if entries else "empty"
