"""`shoal map`: the URLs of a site from its sitemaps, or from its links."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.acceptance.mapped_site import MappedSite, index, urlset
from tests.support import forking
from tests.support.forking import SHOAL

DATED = """<urlset><url><loc>/old</loc><lastmod>2025-05-01</lastmod></url>
<url><loc>/new</loc><lastmod>2026-05</lastmod></url></urlset>"""


async def shoal_map(*arguments: str, code: int = 0) -> tuple[list[str], str]:
    """The lines on standard output, and standard error."""
    command = [*SHOAL, "map", *arguments, "--delay", "0"]
    done = await asyncio.to_thread(forking.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr


async def test_the_sitemaps_of_robots_txt() -> None:
    bodies = {
        "/robots.txt": "Sitemap: /index.xml",
        "/index.xml": index("/a.xml", "/b.xml", "/gone.xml"),
        "/a.xml": urlset("/1", "/2", "/café"),
        "/b.xml": urlset("/2", "/3", "mailto:x"),
        "/gone.xml": None,
        "/sitemap.xml": urlset("/not-used"),
    }
    async with MappedSite(bodies) as site:
        lines, said = await shoal_map(site.url)
        assert sorted(lines) == [site.url + path for path in ("/1", "/2", "/3", "/caf%C3%A9")]
        assert said == "4 URLs from 3 sitemaps\n"
        assert site.visits() == {"/robots.txt": 2, "/index.xml": 1, "/a.xml": 1, "/b.xml": 1, "/gone.xml": 1}


async def test_the_default_sitemap_with_dates() -> None:
    async with MappedSite({"/robots.txt": None, "/sitemap.xml": DATED}) as site:
        lines, _ = await shoal_map(site.url + "/some/page", "--json", "--quiet")
        assert [json.loads(line) for line in lines] == [
            {"url": site.url + "/old", "lastmod": "2025-05-01T00:00:00+00:00"},
            {"url": site.url + "/new", "lastmod": "2026-05-01T00:00:00+00:00"},
        ]
        assert (await shoal_map(site.url, "--since", "2026-01-01"))[0] == [site.url + "/new"]
        assert (await shoal_map(site.url, "--match", "/o"))[0] == [site.url + "/old"]
        assert (await shoal_map(site.url, "--match", "/x", code=5))[0] == []
        assert (await shoal_map(site.url + "/sitemap.xml", "--limit", "1")) == (
            [site.url + "/old"],
            "1 URLs from 1 sitemaps\nthere may be more: --limit is reached\n",
        )


async def test_the_links_of_a_site_without_sitemaps() -> None:
    bodies = {
        "/": '<a href="/a">a</a><a href="/private/x">x</a><a href="http://x.example/">x</a><a href="/b?x=1">b</a>',
        "/a": '<a href="/c">c</a><a href="/">home</a>',
        "/robots.txt": "User-agent: *\nDisallow: /private",
        "/sitemap.xml": None,
    }
    async with MappedSite(bodies) as site:
        lines, said = await shoal_map(site.url.removeprefix("http://"))
        assert sorted(lines) == sorted(site.url + path for path in ("/", "/a", "/private/x", "/b?x=1", "/c"))
        assert said == "5 URLs from the links of 4 pages (no sitemap lists URLs)\n"
        assert "/private/x" not in site.visits()
        lines, said = await shoal_map(site.url, "--max-pages", "2")
        assert "--max-pages is reached" in said
        assert lines[0] == site.url + "/"


async def test_a_reader_that_leaves() -> None:
    """As in ``shoal map URL | head``."""
    async with MappedSite({"/sitemap.xml": urlset(*(f"/{n}" for n in range(20_000)))}) as site:
        reading, writing = os.pipe()
        process = forking.Popen([*SHOAL, "map", site.url, "--delay", "0"], stdout=writing, stderr=PIPE, text=True)
        os.close(writing)
        first = await asyncio.to_thread(os.read, reading, 10)
        os.close(reading)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert first == site.url.encode()[:10]
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    assert process.returncode == 0


async def test_a_site_that_cannot_be_reached(unused_tcp_port: int) -> None:
    _, said = await shoal_map(f"127.0.0.1:{unused_tcp_port}", "--set", "retry.max_attempts=1", code=5)
    assert said.endswith("shoal: no page was fetched: the only request failed (connect)\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--since", "soon"], "'soon' is not a date"),
        (["--match", "("], "--match '(' is not a regular expression: missing )"),
        (["--limit", "0"], "--limit"),
        (["--tor"], "unknown option"),
    ],
)
async def test_mistakes(options: list[str], says: str) -> None:
    assert says.lower() in (await shoal_map("http://ex.com", *options, code=2))[1].lower()


async def test_a_fleets_frontier_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_FRONTIER", f"sqlite:///{tmp_path}/crawl.db")
    async with MappedSite({"/sitemap.xml": urlset("/a")}) as site:
        assert (await shoal_map(site.url))[0] == [site.url + "/a"]
    assert list(tmp_path.iterdir()) == []
