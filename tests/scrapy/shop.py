"""A small shop that Scrapy projects crawl. Each visitor gets a port of its own, and the shop records what it asks for.

The pages are the same on every port: two crawlers must find the same.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

ITEMS = 24
CATEGORIES = 3
PER_PAGE = 4
TOKEN = "t0k&n="


@dataclass
class Seen:
    """A request that arrived."""

    method: str
    target: str
    """Path and query."""
    body: str
    headers: dict[str, str]

    @property
    def line(self) -> str:
        return f"{self.method} {self.target} {self.body}".rstrip()


@dataclass
class Visitor:
    """One port of the shop."""

    url: str
    latency: float = 0.0
    """Seconds that each page takes."""
    seen: list[Seen] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> list[str]:
        """The requests in the order of their arrival."""
        return [each.line for each in self.seen]

    def headers(self, target: str, name: str) -> list[str | None]:
        """The values of a header in the requests for a target."""
        return [each.headers.get(name.lower()) for each in self.seen if each.target == target]


class Shop:
    """The pages, and the ports on which they are served. Runs in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._runners: list[web.AppRunner] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def visitor(self) -> Visitor:
        """Open one more port."""
        return asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)

    async def _open(self) -> Visitor:
        visitor = Visitor("")
        app = web.Application()

        async def answer(request: web.Request) -> web.StreamResponse:
            return await _answer(visitor, request)

        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runners.append(runner)
        visitor.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return visitor

    def close(self) -> None:
        async def end() -> None:
            for runner in self._runners:
                await runner.cleanup()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def shop() -> Iterator[Shop]:
    made = Shop()
    try:
        yield made
    finally:
        made.close()


async def _answer(visitor: Visitor, request: web.Request) -> web.StreamResponse:
    body = (await request.read()).decode()
    # A proxy gets the whole URL.
    target = request.raw_path.removeprefix(f"{request.scheme}://{request.host}")
    headers = {name.lower(): value for name, value in request.headers.items()}
    visitor.seen.append(Seen(request.method, target, body, headers))
    visitor.counts[target] += 1
    await asyncio.sleep(visitor.latency)
    page = _PAGES.get(request.path) or _PAGES.get("/" + request.path.split("/")[1])
    if page is None:
        return _html("<h1>Not found</h1>", status=404)
    made: web.StreamResponse = page(visitor, request, body)
    return made


def _html(body: str, title: str = "Shop", **options: Any) -> web.Response:
    nav = "".join(f'<a href="/category/{number}">Category {number}</a> ' for number in range(1, CATEGORIES + 1))
    extra = (
        '<a href="/about/">About</a> <a href="/files/manual.pdf">Manual</a> <a href="mailto:shop@example.com">Mail</a>'
    )
    text = f"<!doctype html><html><head><title>{title}</title></head><body><nav>{nav}{extra}</nav>{body}</body></html>"
    return web.Response(text=text, content_type="text/html", charset="utf-8", **options)


def _home(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return _html('<h1>Welcome</h1><a href="http://elsewhere.invalid/">Elsewhere</a><a href="/login">Log in</a>')


def _about(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return _html('<h1>About</h1><a href="../item/1?ref=about">Our best</a><a href="team">Team</a>')


def _category(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    category, page = int(request.path.split("/")[2]), int(request.query.get("page", "1"))
    numbers = range(category, ITEMS + 1, CATEGORIES)[(page - 1) * PER_PAGE : page * PER_PAGE]
    rows = "".join(
        f'<li class="product"><a class="name" href="/item/{each}">Item {each}</a><span>{each * 1.5:.2f} EUR</span></li>'
        for each in numbers
    )
    more = page * PER_PAGE * CATEGORIES < ITEMS
    following = f'<a class="next" rel="next" href="/category/{category}?page={page + 1}">Next</a>' if more else ""
    return _html(f"<h1>Category {category}</h1><ul>{rows}</ul>{following}", f"Category {category}, page {page}")


def _item(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    number = int(request.path.split("/")[2])
    related = "".join(
        f'<a class="related" href="/item/{each % ITEMS + 1}#reviews">See</a>' for each in range(number, number + 3)
    )
    return _html(
        f"<h1 class='name'>\n  Item {number} </h1><p class='price'>Price: <b>{number * 1.5:.2f}</b> EUR</p>"
        f"<ul class='tags'><li>tag{number % 3}</li><li> tag{number % 5} </li><li></li></ul>"
        f"<div id='about'><p>Made of &amp; for caf\u00e9s.</p><p>Weight: {number * 10} g</p></div>{related}"
    )


def _missing(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return _html("<h1>Gone</h1>", status=int(request.query.get("status", "404")))


def _flaky(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    if visitor.counts[request.raw_path] == 1:
        return _html("<h1>Busy</h1>", status=503)
    return _html("<h1>Ready</h1>")


def _redirect(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return web.Response(status=302, headers={"Location": request.query.get("to", "/item/1")})


def _login(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    if request.method == "POST":
        right = {"user": "anna", "password": "p w", "token": TOKEN, "stay": "on", "go": "Log in"}
        if dict(parse_qsl(body)) != right:
            return _html(f"<h1>Refused</h1><p>{body}</p>", status=403)
        answer = web.Response(status=302, headers={"Location": "/account"})
        answer.set_cookie("session", "s1")
        return answer
    return _html(
        '<form action="/search"><input name="q"><input type="submit" value="Search"></form>'
        '<form name="login" id="login-form" method="post"><input name="user"><input type="password" name="password">'
        f'<input type="hidden" name="token" value="{TOKEN.replace("&", "&amp;")}">'
        '<input type="checkbox" name="stay" checked>'
        '<input type="checkbox" name="other"><input type="submit" name="go" value="Log in">'
        '<button name="cancel" value="1">Cancel</button></form>'
    )


def _account(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    name = "anna" if request.cookies.get("session") == "s1" else "nobody"
    return _html(f'<h1>Hello {name}</h1><a href="/account/orders">Orders</a>')


def _search(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return _html(f"<h1>Found</h1><p id='q'>{request.query.get('q', '')}</p><p id='query'>{request.query_string}</p>")


def _echo(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    names = ("accept", "accept-language", "cookie", "user-agent", "x-project", "referer", "content-type")
    found = {name: request.headers.get(name) for name in names}
    return web.json_response({"method": request.method, "body": body, "headers": found})


def _api(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    page = int(request.query.get("page", "1"))
    items = [{"id": each, "name": f"Item {each}"} for each in range(page * 3 - 2, page * 3 + 1)]
    return web.json_response({"items": items, "next": page + 1 if page < 3 else None, "sent": body})


def _robots(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    return web.Response(text="User-agent: *\nDisallow: /private\nSitemap: /maps/index.xml\nsitemap: /maps/news.xml\n")


_NAMESPACE = 'xmlns="http://www.sitemaps.org/schemas/sitemap/0.9" xmlns:xhtml="http://www.w3.org/1999/xhtml"'


def _maps(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    name = request.path.split("/")[2]
    text = _map_text(name, visitor.url)
    if name.endswith(".gz"):
        return web.Response(body=gzip.compress(text.encode()), content_type="application/octet-stream")
    return web.Response(text=text, content_type="application/xml")


def _map_text(name: str, base: str) -> str:
    if name == "index.xml":
        names = ("items.xml.gz", "pages.xml", "skipped.xml")
        inner = "".join(f"<sitemap><loc>{base}/maps/{each}</loc></sitemap>" for each in names)
        return f'<?xml version="1.0" encoding="UTF-8"?><sitemapindex {_NAMESPACE}>{inner}</sitemapindex>'
    numbers = range(1, 7) if name == "items.xml.gz" else range(7, 9)
    inner = "".join(
        f"<url><loc> {base}/item/{each}?a=1&amp;b=2 </loc><lastmod>20{10 + each}-01-01</lastmod>"
        f'<xhtml:link rel="alternate" hreflang="de" href="{base}/item/{each}?lang=de"/></url>'
        for each in numbers
    )
    if name == "pages.xml":
        inner = f"<url><loc>{base}/about/</loc></url><url><loc>{base}/category/1</loc></url>"
    return f'<?xml version="1.0" encoding="UTF-8"?><urlset {_NAMESPACE}>{inner}</urlset>'


def _feed(visitor: Visitor, request: web.Request, body: str) -> web.Response:
    name = request.path.split("/")[2]
    if name == "items.csv":
        rows = "".join(f'{each};"Item; {each}";{each * 1.5:.2f}\n' for each in range(1, 5))
        return web.Response(text=f"id;name;price\n{rows}broken;row\n", content_type="text/csv")
    items = "".join(
        f"<item id='{each}'><title>Item {each}</title><link>{visitor.url}/item/{each}</link>"
        f"<m:price>{each * 1.5:.2f}</m:price><description><![CDATA[<b>Big & {each}</b>]]></description></item>"
        for each in range(1, 5)
    )
    text = f'<?xml version="1.0"?><rss xmlns:m="urn:money"><channel><title>News</title>{items}</channel></rss>'
    return web.Response(text=text, content_type="application/rss+xml")


_PAGES: dict[str, Any] = {
    "/": _home, "/about": _about, "/category": _category, "/item": _item, "/missing": _missing, "/flaky": _flaky,
    "/redirect": _redirect, "/login": _login, "/account": _account, "/search": _search, "/echo": _echo, "/api": _api,
    "/robots.txt": _robots, "/maps": _maps, "/feed": _feed,
}  # fmt: skip


def normalized(value: Any, visitor: Visitor) -> str:
    """The JSON text of a value, in which the port of the visitor does not show."""
    return (
        json.dumps(value, sort_keys=True, ensure_ascii=False)
        .replace(visitor.url, "SHOP")
        .replace(visitor.url.replace("127.0.0.1", "localhost"), "LOCALSHOP")
    )
