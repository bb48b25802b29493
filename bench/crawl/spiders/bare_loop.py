"""The lower bound: fetch, parse, extract, join, deduplicate and write with the fastest libraries, and nothing else.

It has no robots.txt, retries, delays, priorities, persistence or settings. Every crawler has at least this cost.
`--skip-seen` drops hrefs that were seen before it resolves them. That is correct only for root-relative hrefs, which
is enough here. A real crawler must check that.
"""

import asyncio
import os
import sys
from collections import deque

import ada_url
import aiohttp
import msgspec
import turbohtml
import uvloop


async def crawl(start: str, output: str, concurrency: int, skip_seen: bool) -> None:
    todo = deque([start])
    seen = {start}
    shown: set[str] = set()
    idle = 0
    ready = asyncio.Condition()
    encode = msgspec.json.Encoder().encode

    def handle(url: str, body: bytes) -> None:
        page = turbohtml.parse(body, positions=False)
        title, h1 = page.find("title"), page.find("h1")
        hrefs = [link.attr("href") for link in page.select("a[href]")]
        item = {"url": url, "title": title and title.text, "h1": h1 and h1.text, "links": len(hrefs)}
        lines.write(encode(item) + b"\n")
        for href in hrefs:
            if skip_seen:
                if href in shown:
                    continue
                shown.add(href)
            target = ada_url.join_url(url, href.partition("#")[0])
            if target not in seen:
                seen.add(target)
                todo.append(target)

    async def work(session: aiohttp.ClientSession) -> None:
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
            async with session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    continue
            handle(url, body)
            if idle and todo:
                async with ready:
                    ready.notify(min(idle, len(todo)))

    with open(output, "wb", buffering=1 << 16) as lines:  # noqa: ASYNC230 - a buffered append does not wait
        connector = aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(work(session) for _ in range(concurrency)))


uvloop.run(
    crawl(
        os.environ["BENCH_URL"],
        os.environ["BENCH_OUTPUT"],
        int(os.environ["BENCH_CONCURRENCY"]),
        "--skip-seen" in sys.argv,
    )
)
