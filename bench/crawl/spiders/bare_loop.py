"""The lower bound: fetch, parse, extract, join, deduplicate and write with the fastest libraries, and nothing else.

It has no robots.txt, retries, delays, priorities, persistence or settings. Every crawler has at least this cost.
`--skip-seen` drops hrefs that were seen before it resolves them: in the same folder, on the same origin or anywhere,
depending on what the href is relative to. `--pyreqwest` fetches with pyreqwest instead of aiohttp.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import ada_url
import msgspec
import turbohtml
import uvloop

Answer = tuple[int, str, str, bytes]
"""Status, Content-Type, Location and body."""
Fetch = Callable[[str], Awaitable[Answer]]
MAILTO = ("mailto:", "javascript:", "tel:")


class Seen:
    """The URLs that were queued, and the hrefs that lead to them."""

    def __init__(self, start: str) -> None:
        self.urls = {start}
        self.absolute: set[str] = set()
        self.relative: dict[str, set[str]] = {}
        """By origin for `/path`, by folder for `path`."""

    def new(self, base: str, hrefs: list[str]) -> list[str]:
        """The hrefs that were not seen in their place."""
        origin = base[: base.index("/", 8)]
        folder = base[: base.partition("?")[0].rindex("/") + 1]
        own, near, anywhere = self.place(origin), self.place(folder), self.absolute
        found = [href for href in hrefs if href not in own and href not in anywhere and href not in near]
        for href in found:
            first = href[:1]
            if first == "/":
                (anywhere if href[:2] == "//" else own).add(href)
            elif first not in ("#", "?", ""):  # those are relative to the page itself
                (anywhere if ":" in href else near).add(href)
        return found

    def place(self, name: str) -> set[str]:
        known = self.relative.get(name)
        if known is None:
            known = self.relative[name] = set()
        return known


async def crawl(start: str, output: str, concurrency: int, fetch: Fetch, skip_seen: bool) -> None:
    todo = deque([start])
    seen = Seen(start)
    urls = seen.urls
    idle = 0
    ready = asyncio.Condition()
    encode = msgspec.json.Encoder().encode

    def add(base: str, href: str) -> None:
        if href.startswith(MAILTO):
            return
        target = ada_url.join_url(base, href).partition("#")[0]
        if target not in urls:
            urls.add(target)
            todo.append(target)

    def handle(url: str, kind: str, body: bytes) -> None:
        page = turbohtml.parse(body, encoding=kind.partition("charset=")[2] or None, positions=False)
        title, h1 = page.find("title"), page.find("h1")
        hrefs = [link.attr("href") for link in page.select("a[href]")]
        item = {"url": url, "title": title and title.text, "h1": h1 and h1.text, "links": len(hrefs)}
        lines.write(encode(item) + b"\n")
        for href in seen.new(url, hrefs) if skip_seen else hrefs:
            add(url, href)

    async def work() -> None:
        nonlocal idle
        while True:
            while not todo:
                idle += 1
                async with ready:
                    if idle == concurrency:
                        ready.notify_all()
                        return
                    await ready.wait()
                if idle == concurrency:
                    return
                idle -= 1
            url = todo.popleft()
            status, kind, location, body = await fetch(url)
            if status == 200:
                handle(url, kind, body)
            elif location:
                add(url, location)
            if idle and todo:
                async with ready:
                    ready.notify(min(idle, len(todo)))

    with open(output, "wb", buffering=1 << 16) as lines:  # noqa: ASYNC230 - a buffered append does not wait
        await asyncio.gather(*(work() for _ in range(concurrency)))


async def with_aiohttp(run: Callable[[Fetch], Awaitable[None]], concurrency: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def fetch(url: str) -> Answer:
            async with session.get(url, allow_redirects=False) as response:
                headers = response.headers
                body = await response.read()
                return response.status, headers.get("Content-Type", ""), headers.get("Location", ""), body

        await run(fetch)


async def with_pyreqwest(run: Callable[[Fetch], Awaitable[None]], concurrency: int) -> None:
    from pyreqwest.client import ClientBuilder

    builder = ClientBuilder().follow_redirects(False).max_connections(concurrency)
    if authority := os.environ.get("BENCH_AUTHORITY"):
        builder = builder.add_root_certificate_pem(Path(authority).read_bytes())
    async with builder.build() as client:

        async def fetch(url: str) -> Answer:
            response = await client.get(url).build().send()
            header = response.get_header
            body = await response.bytes()
            return response.status, header("content-type") or "", header("location") or "", bytes(body)

        await run(fetch)


async def main() -> None:
    concurrency = int(os.environ["BENCH_CONCURRENCY"])

    async def run(fetch: Fetch) -> None:
        start, output = os.environ["BENCH_URL"], os.environ["BENCH_OUTPUT"]
        await crawl(start, output, concurrency, fetch, "--skip-seen" in sys.argv)

    await (with_pyreqwest if "--pyreqwest" in sys.argv else with_aiohttp)(run, concurrency)


uvloop.run(main())
