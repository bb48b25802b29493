"""nofollow and noindex in a whole crawl, and what `shoal why` says about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.acceptance.mapped_site import MappedSite
from tests.support import forking
from tests.support.forking import SHOAL

BODIES = {
    "/": '<a href="/a">a</a><a rel="nofollow" href="/marked">marked</a><a href="/closed">closed</a>',
    "/a": "<h1>A</h1>",
    "/closed": '<meta name="robots" content="noindex"><a href="/hidden">hidden</a>',
    "/robots.txt": None,
}
HEADERS = {"/closed": [("X-Robots-Tag", "otherbot: index"), ("X-Robots-Tag", "nofollow")]}


async def test_a_crawl_that_obeys_both(tmp_path: Path) -> None:
    async def shoal(*arguments: str) -> str:
        command = [*SHOAL, *arguments, "--frontier", "sqlite:///crawl.db"]
        done = await asyncio.to_thread(
            forking.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    async with MappedSite(BODIES, HEADERS) as site:
        options = ["--set", "robots.nofollow=true", "--set", "robots.noindex=true", "--delay", "0"]
        said = await shoal("crawl", site.url, "-o", "pages.jsonl", *options)
        assert set(site.visits()) == {"/robots.txt", "/", "/a", "/closed"}
    items = [json.loads(line)["url"] for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert sorted(items) == [site.url + "/", site.url + "/a"]
    assert "2 links (robots.nofollow)" in said
    assert "1 (noindex)" in said
    assert "1 links were not followed: rel says nofollow (robots.nofollow)" in await shoal("why", site.url + "/")
    why = await shoal("why", site.url + "/closed")
    assert "1 items were dropped: a meta tag says noindex (robots.noindex)" in why
    assert "1 links were not followed: X-Robots-Tag says nofollow (robots.nofollow)" in why
