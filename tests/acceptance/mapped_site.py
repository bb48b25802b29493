"""A site with sitemaps, for tests: a dictionary of bodies. Every other path is a page."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from tests.support.servers import StreamServer, answer, read_head


class MappedSite(StreamServer):
    """``bodies``: path to body; None is a 404. ``headers``: path to further headers. ``delay``: seconds per page."""

    def __init__(
        self,
        bodies: Mapping[str, bytes | str | None],
        headers: Mapping[str, list[tuple[str, str]]] | None = None,
        delay: float = 0.0,
    ) -> None:
        super().__init__()
        self.bodies = dict(bodies)
        self.headers = headers or {}
        self.delay = delay

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep = True
        while keep:
            request = await read_head(reader)
            keep = not request.wants_close
            self._log(request)
            await asyncio.sleep(self.delay)
            body = self.bodies.get(request.path, f"<h1>{request.path}</h1>")
            if body is None or (request.path == "/robots.txt" and request.path not in self.bodies):
                writer.write(answer("no", status=404))
            else:
                text = body.encode() if isinstance(body, str) else body
                kind = "application/xml" if request.path.endswith((".xml", ".gz")) else "text/html"
                extra = self.headers.get(request.path, [])
                writer.write(answer(text.replace(b"{site}", self.url.encode()), *extra, content_type=kind))
            await writer.drain()

    def visits(self) -> Counter[str]:
        return Counter(visit.path for visit in self.requests)


def urlset(*paths: str) -> str:
    return "<urlset>" + "".join(f"<url><loc>{path}</loc></url>" for path in paths) + "</urlset>"


def index(*paths: str) -> str:
    return "<sitemapindex>" + "".join(f"<sitemap><loc>{path}</loc></sitemap>" for path in paths) + "</sitemapindex>"
