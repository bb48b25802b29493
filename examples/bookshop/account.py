"""Parts of the shop that no page links to: a login with a form, a JSON API, a feed, and sitemaps."""

from __future__ import annotations

import gzip
import hashlib
import json
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from examples.bookshop.site import Book

PASSWORD = "open-sesame"
PER_CALL = 20
JSON_HEADERS = (("Content-Type", "application/json"),)
SITEMAP_HEADERS = (("Content-Type", "application/octet-stream"),)
SITEMAPS = "http://www.sitemaps.org/schemas/sitemap/0.9"
FEED_HEADERS = (("Content-Type", "application/rss+xml; charset=utf-8"),)

LOGIN_FORM = """
<h1>Sign in</h1>
<form id="login" method="post" action="/login">
<input type="hidden" name="csrf" value="{token}">
<label>Name <input name="user"></label>
<label>Password <input type="password" name="password"></label>
<label><input type="checkbox" name="remember" value="yes"> Remember me</label>
<button name="go" value="login">Sign in</button>
</form>
<p class="error">{error}</p>
"""
TOKEN = hashlib.sha256(b"a form that was really loaded").hexdigest()[:16]
SESSION = hashlib.sha256(b"a visitor who signed in").hexdigest()[:16]


def login_form(error: str = "") -> str:
    return LOGIN_FORM.format(token=TOKEN, error=escape(error))


def is_login(body: bytes) -> bool:
    """Whether the fields of the form are right, the hidden one included."""
    fields = {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
    return fields.get("csrf") == TOKEN and bool(fields.get("user")) and fields.get("password") == PASSWORD


def is_signed_in(head: str) -> bool:
    return f"session={SESSION}" in head


def orders(books: tuple[Book, ...]) -> str:
    rows = "".join(f"<tr><td>{escape(book.title)}</td><td class='price'>{book.price}</td></tr>" for book in books[:3])
    return f"<h1>Your orders</h1><table class='orders'>{rows}</table>"


def api(books: tuple[Book, ...], query: str) -> bytes:
    """`?page=N`: pages with the address of the next one. `?after=SLUG`: the books after one, as an endless list loads
    them when the visitor scrolls."""
    options = {name: values[0] for name, values in parse_qs(query).items()}
    if "after" in options:
        start = next((place for place, book in enumerate(books, 1) if book.slug == options["after"]), 0)
        found = books[start : start + PER_CALL]
        more: dict[str, object] = {"cursor": found[-1].slug if start + PER_CALL < len(books) else None}
    else:
        number = int(options["page"]) if options.get("page", "1").isdecimal() and options.get("page") else 1
        found = books[(number - 1) * PER_CALL : number * PER_CALL]
        more = {"page": number, "next": f"/api/books?page={number + 1}" if number * PER_CALL < len(books) else None}
    rows = [{"title": book.title, "price": book.price, "stock": book.stock, "slug": book.slug} for book in found]
    return json.dumps({"books": rows, **more}).encode()


def endless_list(books: tuple[Book, ...]) -> str:
    first = "".join(f'<li class="book">{escape(book.title)}</li>' for book in books[:PER_CALL])
    return f'<h1>New books</h1><ul id="list" data-api="/api/books" data-after="{books[PER_CALL - 1].slug}">{first}</ul>'


def feed(books: tuple[Book, ...], url: str) -> bytes:
    entries = "".join(
        f"<item><title>{escape(book.title)}</title><link>{url}{book.path}</link><guid>{book.upc}</guid></item>"
        for book in books[:10]
    )
    head = f"<title>The Shoal Bookshop</title><link>{url}/</link><description>New books</description>"
    return f'<?xml version="1.0"?><rss version="2.0"><channel>{head}{entries}</channel></rss>'.encode()


def sitemap(path: str, books: tuple[Book, ...], url: str) -> bytes | None:
    """The index of the sitemaps, one of its two sitemaps, or None. Every tenth book changed in May."""
    if path == "/sitemap.xml":
        files = "".join(f"<sitemap><loc>{url}/sitemap-{name}</loc></sitemap>" for name in ("books.xml.gz", "shop.xml"))
        return f'<?xml version="1.0"?><sitemapindex xmlns="{SITEMAPS}">{files}</sitemapindex>'.encode()
    if path == "/sitemap-shop.xml":
        return f'<?xml version="1.0"?><urlset xmlns="{SITEMAPS}"><url><loc>{url}/about</loc></url></urlset>'.encode()
    if path == "/sitemap-books.xml.gz":
        entries = "".join(
            f"<url><loc>{url}{book.path}</loc><lastmod>2026-0{4 if number % 10 else 5}-01</lastmod></url>"
            for number, book in enumerate(books)
        )
        return gzip.compress(f'<?xml version="1.0"?><urlset xmlns="{SITEMAPS}">{entries}</urlset>'.encode())
    return None
