"""A slow site whose pages are hostile, broken, forbidden or moved. Run as a script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from aiohttp import web

from tests.support import forking

PER_LIST = 10
SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = '"><img src=x onerror="window.hacked = 1">'
HOSTILE_QUERY = f"/page/1?name={quote(IMAGE + SCRIPT)}"
ROBOTS = f"User-agent: *\nDisallow: /secret\n# {SCRIPT}\n"


class SlowSite:
    """The tests' view of the site."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host = url.removeprefix("http://")


@contextmanager
def slow_site(latency: float) -> Iterator[SlowSite]:
    """Run the site in a process of its own."""
    command = [sys.executable, "-m", "tests.dashboard.site", str(latency)]
    with forking.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield SlowSite(process.stdout.readline().strip())
        finally:
            process.kill()


def _page(title: str, *links: str) -> web.Response:
    content = " ".join(f"<a href='{link}'>link</a>" for link in links)
    return web.Response(text=f"<html><h1>{title}</h1>{content}</html>", content_type="text/html")


class _Site:
    """The handlers."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._seen: set[str] = set()

    async def index(self, request: web.Request) -> web.Response:
        broken = [f"/broken/{number}" for number in range(3)]
        return _page("Start", "/list/0", "/hostile", "/secret/1", "/moved", "/flaky", *broken)

    async def listing(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._latency)
        number = int(request.match_info["number"])
        pages = [f"/page/{number * PER_LIST + each}" for each in range(PER_LIST)]
        return _page(f"List {number}", *pages, f"/list/{number + 1}")

    async def page(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._latency)
        return _page(f"Page {request.match_info['number']}")

    async def hostile(self, request: web.Request) -> web.Response:
        title = f"Hostile {SCRIPT} {IMAGE}".replace("<", "&lt;")
        return _page(title, HOSTILE_QUERY)

    async def broken(self, request: web.Request) -> web.Response:
        return web.Response(status=500, text=SCRIPT)

    async def moved(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/page/3")

    async def flaky(self, request: web.Request) -> web.Response:
        """Fails the first time."""
        is_first = request.path not in self._seen
        self._seen.add(request.path)
        return web.Response(status=500) if is_first else _page("Flaky")

    async def robots(self, request: web.Request) -> web.Response:
        return web.Response(text=ROBOTS)


async def _serve(latency: float) -> None:
    site, app = _Site(latency), web.Application()
    app.add_routes(
        [
            web.get("/", site.index),
            web.get("/list/{number}", site.listing),
            web.get("/page/{number}", site.page),
            web.get("/hostile", site.hostile),
            web.get("/broken/{number}", site.broken),
            web.get("/moved", site.moved),
            web.get("/flaky", site.flaky),
            web.get("/secret/1", site.index),
            web.get("/robots.txt", site.robots),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
