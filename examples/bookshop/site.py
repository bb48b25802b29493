"""The bookshop: sixty books, and pages that are difficult for a crawler.

All pages are generated, and are the same each time. Besides the catalogue there are a page that robots.txt forbids, a
slow page, a flaky page, an endless calendar, a dead link and a redirect. The footer links to all of them.
"""

import asyncio
import hashlib
import re
import unicodedata
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from time import monotonic
from typing import Self

from examples.bookshop import account, covers, javascript

PER_PAGE = 10

TITLES = {
    "travel": """Slow Trains to the Sea | A Map of Small Islands | The Night Ferry | Walking the Salt Road |
        Nine Bridges | North of the Last Town | Letters from a Lighthouse | The Long Way to Lisbon |
        Harbours & Hills | Under Other Stars""",
    "mystery": """The Clockmaker's Alibi | Murder at Low Tide | The Locked Greenhouse | A Quiet Poison |
        Who Rang the Bell? | The Third Umbrella | Death Takes the Minutes | The Missing Cellist |
        Footprints in Flour | The Borrowed Key""",
    "poetry": """Rain on Slate | Small Hours | Field Notes for Two Voices | The Weather Indoors | Salt, Then Honey |
        Counting Swifts | An Orchard in Winter | Café Hours | What the River Kept | Unposted""",
    "history": """The Paper Empire | Salt, Silk and Silver | A Short History of Doors | The Year of Two Harvests |
        Canals: How Water Built the Towns | The Herring Kings | Twelve Inventions Nobody Wanted |
        The Weavers' Strike | Roads Before Rome | A People's Almanac""",
    "science": """The Patience of Lichens | How Fish Agree | Seven Kinds of Ice | The Secret Life of Tides |
        Numbers in the Dark | A Field Guide to Clouds | The Listening Whale | Dust: A Biography |
        Why Shoals Turn | The Slowest Clock""",
    "cookery": """Salt & Smoke | One Pot, Seven Days | Bread Before Dawn | The Bean Book |
        Pickles, Preserves & Patience | Supper for Six | Soup Weather | The Onion Papers |
        Crème Brûlée and Other Disasters | A Spoonful of Summer""",
}
CATEGORIES = tuple(TITLES)

PRAISE = (
    "Read it in one sitting, then lend it to a friend and regret it.",
    "The chapter on fog alone is worth the price.",
    "Warm, exact, and shorter than you will want it to be.",
    "It begins slowly and ends far from where it began.",
    "Our staff have fought over the last copy twice.",
)

STYLE = """
body { font: 16px/1.5 Georgia, serif; color: #2b2b2b; background: #faf7f2; max-width: 60rem; margin: 0 auto;
  padding: 0 1rem }
a { color: #1d5c63 } header { border-bottom: 3px double #cbbfa8; padding: 1rem 0 }
header strong { font-size: 1.5rem; margin-right: 1.5rem } nav a { margin-right: .8rem }
.books { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1rem }
.product { background: #fff; border: 1px solid #e6dfd1; border-radius: 6px; padding: 0 1rem }
.product h3 { font-size: 1rem } .price { color: #8a3b12; font-weight: bold } .rating { color: #c98a00 }
.pager { display: flex; justify-content: space-between; list-style: none; padding: 0 }
table { border-collapse: collapse } th, td { border: 1px solid #e6dfd1; padding: .3rem .8rem; text-align: left }
footer { border-top: 1px solid #cbbfa8; margin-top: 2rem; padding: 1rem 0; font-size: .9rem }
"""

FOOTER = {
    "/about": "About us",
    "/admin/": "Staff only",
    "/slow": "Slow page",
    "/flaky": "Flaky page",
    "/calendar/2026/11/": "Events",
    "/missing": "Lost page",
    "/old-offers": "Old offers",
}
PROXIED = re.compile(r"http://[^/]*")  # the shop is a proxy for itself
LENGTH = re.compile(r"\r\ncontent-length: *(\d{1,5})\r\n", re.IGNORECASE)
CALENDAR = re.compile(r"/calendar/(-?\d{1,9})/(\d\d)/")


@dataclass(frozen=True)
class Book:
    title: str
    category: str

    @property
    def slug(self) -> str:
        ascii_title = unicodedata.normalize("NFKD", self.title).encode("ascii", "ignore").decode()
        return re.sub(r"[^a-z0-9]+", "-", ascii_title.lower().replace("'", "")).strip("-")

    @property
    def path(self) -> str:
        return f"/book/{self.slug}.html"

    @property
    def _digest(self) -> bytes:
        # Not `random`: its choices may change between Python versions, and tests compare with these numbers.
        return hashlib.sha256(self.slug.encode()).digest()

    @property
    def price(self) -> str:
        return f"£{5 + self._digest[0] % 40}.{self._digest[1] % 100:02}"

    @property
    def stock(self) -> int:
        return self._digest[2] % 21

    @property
    def rating(self) -> int:
        return 1 + self._digest[3] % 5

    @property
    def upc(self) -> str:
        return self._digest[4:12].hex()

    @property
    def cover(self) -> str:
        return f"/covers/{self.upc}.png"

    @property
    def colour(self) -> bytes:
        return self._digest[4:7]

    @property
    def description(self) -> str:
        first = self._digest[12] % len(PRAISE)
        return f"One of our favourite {self.category} books. {PRAISE[first]} {PRAISE[(first + 2) % len(PRAISE)]}"


BOOKS = tuple(
    sorted(
        (Book(" ".join(title.split()), category) for category, titles in TITLES.items() for title in titles.split("|")),
        key=lambda book: book.slug,
    )
)
BY_COVER = {book.cover: book for book in BOOKS}


def _length(head: str) -> int:
    found = LENGTH.search(head)
    return int(found[1]) if found else 0


def document(title: str, body: str) -> bytes:
    categories = "".join(f'<a href="/category/{name}/">{name.title()}</a>' for name in CATEGORIES)
    footer = " · ".join(f'<a href="{path}">{label}</a>' for path, label in FOOTER.items())
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(title)} | The Shoal Bookshop</title><style>{STYLE}</style></head>
<body>
<header><strong><a href="/">The Shoal Bookshop</a></strong><nav>{categories}</nav></header>
<main>{body}</main>
<footer>{footer}</footer>
</body>
</html>
""".encode()


def book_list(heading: str, books: tuple[Book, ...], pager: str = "") -> bytes:
    items = "\n".join(
        f'<article class="product"><h3><a href="{book.path}" title="{escape(book.title)}">{escape(shorten(book.title))}'
        f'</a></h3><p class="price">{book.price}</p></article>'
        for book in books
    )
    return document(heading, f'<h1>{heading}</h1>\n<section class="books">\n{items}\n</section>\n{pager}')


def shorten(title: str) -> str:
    """Shorten a title, as real shops do. So a spider should read the `title` attribute."""
    return title if len(title) <= 24 else title[:22].rstrip() + "…"


def book_page(book: Book) -> bytes:
    stock = f"In stock ({book.stock} available)" if book.stock else "Out of stock"
    category = f'<a class="category" href="/category/{book.category}/">{book.category.title()}</a>'
    facts = {"UPC": book.upc, "Price": book.price, "Stock": str(book.stock), "Category": book.category.title()}
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    body = f"""
<article class="book">
<img class="cover" src="{book.cover}" alt="">
<p>Shelf: {category}</p>
<h1>{escape(book.title)}</h1>
<p class="price">{book.price}</p>
<p class="stock">{stock}</p>
<p class="rating" data-rating="{book.rating}">{"★" * book.rating}{"☆" * (5 - book.rating)}</p>
<p class="description">{escape(book.description)}</p>
<table class="facts">{rows}</table>
</article>"""
    return document(book.title, body)


def catalogue_path(number: int) -> str:
    return "/" if number == 1 else f"/catalogue/page-{number}.html"


def catalogue_page(number: int) -> bytes:
    last = -(-len(BOOKS) // PER_PAGE)
    links = ""
    if number > 1:
        links += f'<li class="previous"><a href="{catalogue_path(number - 1)}">previous</a></li>'
    links += f'<li class="current">Page {number} of {last}</li>'
    if number < last:
        links += f'<li class="next"><a href="{catalogue_path(number + 1)}">next</a></li>'
    books = BOOKS[(number - 1) * PER_PAGE : number * PER_PAGE]
    return book_list("All books", books, f'<ul class="pager">{links}</ul>')


def calendar_page(year: int, month: int) -> bytes:
    def link(css: str, months: int) -> str:
        to_year, to_month = divmod(year * 12 + month - 1 + months, 12)
        return f'<li class="{css}"><a href="/calendar/{to_year}/{to_month + 1:02}/">{css} month</a></li>'

    heading = f"Events in {month:02}/{year}"
    pager = f'<ul class="pager">{link("previous", -1)}{link("next", 1)}</ul>'
    return document(heading, f"<h1>{heading}</h1><p>Nothing planned. Try another month.</p>{pager}")


def note(heading: str, text: str) -> bytes:
    return document(heading, f"<h1>{heading}</h1><p>{text}</p>")


def fixed_pages() -> dict[str, bytes]:
    pages = {catalogue_path(n): catalogue_page(n) for n in range(1, -(-len(BOOKS) // PER_PAGE) + 1)}
    pages |= {book.path: book_page(book) for book in BOOKS}
    for name in CATEGORIES:
        pages[f"/category/{name}/"] = book_list(name.title(), tuple(b for b in BOOKS if b.category == name))
    pages["/about"] = note("About us", "Sixty books, none of which exist. Founded to be crawled.")
    pages["/admin/"] = note("Staff only", "robots.txt asks crawlers to stay away. If one reads this, it did not ask.")
    pages["/slow"] = note("Slow page", "Thank you for waiting.")
    return pages


@dataclass
class Visit:
    """One request, in seconds of `time.monotonic`. `ended` is None until the response is complete."""

    path: str
    arrived: float
    ended: float | None = None


@dataclass(frozen=True)
class Answer:
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html; charset=utf-8"),)

    def encode(self, *, head_only: bool, close: bool) -> bytes:
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if close:
            lines.append("Connection: close")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if head_only else head + self.body


class Bookshop:
    """The shop on 127.0.0.1, as an async context manager. At its end, open connections are closed.

    `url` has no trailing slash. `log` holds the latest visits in order of arrival.
    """

    def __init__(self, port: int = 0, *, crawl_delay: float | None = None, slow: float = 2.0) -> None:
        self.url = ""
        self.log: deque[Visit] = deque(maxlen=100_000)
        self._port = port
        self._slow = slow
        self._flaky_visits = 0
        self._pages = fixed_pages()
        self._connections: set[asyncio.Task[None]] = set()
        self._robots = "User-agent: *\nDisallow: /admin/\n"
        if crawl_delay is not None:
            self._robots += f"Crawl-delay: {crawl_delay:g}\n"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # The client left, or sent headers beyond the limit: there is nobody to respond to.
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while await self._serve_one(reader, writer):
                    pass
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. False if the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        words = head.partition("\r\n")[0].split(" ")
        if len(words) != 3:
            writer.write(Answer(b"", HTTPStatus.BAD_REQUEST).encode(head_only=False, close=True))
            return False
        method, target, version = words
        target = PROXIED.sub("", target) or "/"
        visit = Visit(target, monotonic())
        self.log.append(visit)
        # A request that may have a body ends its connection: only that of the login is read.
        close = method not in ("GET", "HEAD") or version != "HTTP/1.1" or "\r\nconnection: close" in head.lower()
        try:
            path, _, query = target.partition("?")
            if method in ("GET", "HEAD"):
                answer = self._unlinked(path, query, head) or await self._answer(path)
            elif method == "POST" and path == "/login":
                answer = self._login(await reader.readexactly(_length(head)))
            else:
                answer = Answer(b"", HTTPStatus.METHOD_NOT_ALLOWED, (("Allow", "GET, HEAD"),))
            writer.write(answer.encode(head_only=method == "HEAD", close=close))
            await writer.drain()
        finally:
            visit.ended = monotonic()
        return not close

    def _unlinked(self, path: str, query: str, head: str) -> Answer | None:
        """Pages that no other page links to; None for all others."""
        if path == "/login":
            return Answer(document("Sign in", account.login_form()))
        if path == "/account":
            if account.is_signed_in(head):
                return Answer(document("Your orders", account.orders(BOOKS)))
            return Answer(b"", HTTPStatus.FOUND, (("Location", "/login"),))
        if path == "/new-books":
            return Answer(document("New books", account.endless_list(BOOKS)))
        if path == "/api/books":
            return Answer(account.api(BOOKS, query), headers=account.JSON_HEADERS)
        if path == "/app":
            return Answer(javascript.PAGE)
        if book := BY_COVER.get(path):
            return Answer(covers.cover(book.colour), headers=covers.HEADERS)
        if path == "/feed.xml":
            return Answer(account.feed(BOOKS, self.url), headers=account.FEED_HEADERS)
        if sitemap := account.sitemap(path, BOOKS, self.url):
            return Answer(sitemap, headers=account.SITEMAP_HEADERS)
        return None

    def _login(self, body: bytes) -> Answer:
        if not account.is_login(body):
            return Answer(document("Sign in", account.login_form("Wrong name or password.")))
        cookie = f"session={account.SESSION}; Path=/; HttpOnly"
        return Answer(b"", HTTPStatus.SEE_OTHER, (("Location", "/account"), ("Set-Cookie", cookie)))

    async def _answer(self, path: str) -> Answer:
        if path == "/slow":
            await asyncio.sleep(self._slow)
        if page := self._pages.get(path):
            return Answer(page)
        if path == "/robots.txt":
            robots = f"{self._robots}Sitemap: {self.url}/sitemap.xml\n"
            return Answer(robots.encode(), headers=(("Content-Type", "text/plain; charset=utf-8"),))
        if path == "/flaky":
            return self._flaky()
        if path == "/old-offers":
            return Answer(b"", HTTPStatus.MOVED_PERMANENTLY, (("Location", "/category/travel/"),))
        if (match := CALENDAR.fullmatch(path)) and 1 <= int(match[2]) <= 12:
            return Answer(calendar_page(int(match[1]), int(match[2])))
        return Answer(note("Not found", "No such page on our shelves."), HTTPStatus.NOT_FOUND)

    def _flaky(self) -> Answer:
        self._flaky_visits += 1
        if self._flaky_visits > 2:
            return Answer(note("Flaky page", "It works, this time."))
        answer = Answer(note("Flaky page", "Out for tea. Come back soon."), HTTPStatus.SERVICE_UNAVAILABLE)
        if self._flaky_visits == 1:
            return Answer(answer.body, answer.status, (*answer.headers, ("Retry-After", "1")))
        return answer
