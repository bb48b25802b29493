"""Site c: 200 hosts with realistic pages of 5 to 150 KB, as static files with the same bytes every time.

Page n belongs to host n % hosts. It links to its two children in a binary tree, which makes all pages reachable, and to
pages drawn at random, mostly of its own host. Links have every usual form. Some pages are reachable through a redirect
only, and some links lead to an error.
"""

from __future__ import annotations

import json
import posixpath
import random
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from crawl import markup
from crawl.content import Content, Facts

VERSION = 1  # increase it when the bytes of a page change, so that sites in the work folder are generated again
PORT = 30443  # pages contain absolute links, so it cannot be chosen at random
MOVED = ERRORS = 0.056  # as shares of the pages: together a tenth of all requests
SECTIONS = ("harbours", "reefs", "tides", "charts", "boats", "weather", "history", "people")


@dataclass(frozen=True)
class Kind:
    """A group of pages with the same form of URL and the same encoding."""

    name: str
    share: float
    language: str
    encoding: str
    header: bool
    """The Content-Type header declares the encoding. Otherwise a meta tag does."""
    folder: str


KINDS = (
    Kind("article", 0.30, "en", "utf-8", False, "articles"),
    Kind("docs", 0.22, "en", "utf-8", True, "docs"),
    Kind("shop", 0.20, "fr", "utf-8", False, "shop"),
    Kind("latin", 0.09, "fr", "iso-8859-1", True, "archive"),
    Kind("latin-meta", 0.05, "fr", "iso-8859-1", False, "actualités"),
    Kind("cyrillic", 0.06, "ru", "windows-1251", True, "arhiv"),
    Kind("cyrillic-meta", 0.05, "ru", "windows-1251", False, "news"),
    Kind("japanese", 0.03, "ja", "shift_jis", False, "ja"),
)
HOME = Kind("home", 0, "en", "utf-8", False, "")
HEADERS = {kind.folder: kind.encoding for kind in KINDS if kind.header}


@dataclass(frozen=True)
class Page:
    number: int
    host: str
    kind: Kind
    path: str
    """Not percent-encoded, with its query."""
    moved: str
    """The host and path that redirect to it; empty if links lead to the page itself."""

    @property
    def file(self) -> str:
        """Below the folder of the host."""
        if self.kind.name == "shop":
            return f"shop/item-{self.number}.html"
        return self.path.lstrip("/") + ("index.html" if self.path.endswith("/") else "")


def hosts_of(pages: int) -> tuple[str, ...]:
    return tuple(f"127.0.{1 + index // 100}.{1 + index % 100}" for index in range(max(2, min(200, pages // 5))))


def page_of(number: int, hosts: tuple[str, ...], pages: int) -> Page:
    rng = random.Random(f"c/{pages}/{number}/url")
    host = hosts[number % len(hosts)]
    if number < len(hosts):
        return Page(number, host, HOME, "/", "")
    drawn, section = rng.random(), SECTIONS[int(rng.random() * len(SECTIONS))]
    for kind in KINDS:
        drawn -= kind.share
        if drawn < 0:
            break
    path = {
        "article": f"/articles/{section}/{markup.word(rng, 'en')}-{number}.html",
        "docs": f"/docs/{section}/{number}/",
        "shop": f"/shop/item?id={number}&ref=list",
    }.get(kind.name, f"/{kind.folder}/{section}/{number}.html")
    moved = ""
    if kind.name in ("article", "docs", "latin") and rng.random() < MOVED / 0.61 / (1 - len(hosts) / pages):
        away = hosts[int(rng.random() * len(hosts))]
        moved = f"{host}/old{path}" if rng.random() < 0.6 else f"{away}/away/{host}{path}"
    return Page(number, host, kind, path, moved)


def error_of(number: int, hosts: tuple[str, ...]) -> str:
    host = hosts[number * 7 % len(hosts)]
    return f"{host}/{('articles/missing', 'gone', 'docs/lost')[number % 3]}-{number}.html"


class Web:
    """All pages of the site, and the bytes of each one."""

    def __init__(self, pages: int) -> None:
        self.hosts = hosts_of(pages)
        self.pages = [page_of(number, self.hosts, pages) for number in range(pages)]
        self.errors = [error_of(number, self.hosts) for number in range(int(pages * ERRORS))]

    def targets(self, page: Page, count: int, rng: random.Random) -> Iterator[str]:
        """The host and path that each link of the page leads to."""
        total, step = len(self.pages), len(self.hosts)
        numbers = [child for child in (2 * page.number + 1, 2 * page.number + 2) if child < total]
        while len(numbers) < count:
            other = int(rng.random() * total)
            own = other - other % step + page.number % step
            numbers.append(own if rng.random() < 0.75 and own < total else other)
        for number in numbers:
            target = self.pages[number]
            yield target.moved or target.host + target.path
        if page.number < len(self.errors):
            yield self.errors[page.number]

    def render(self, page: Page) -> tuple[bytes, Facts]:
        rng = random.Random(f"c/{len(self.pages)}/{page.number}")
        size = int(6_000 * 23 ** (rng.random() ** 1.4))  # 5 to 150 KB, more small ones
        links = [anchor(page, target, rng) for target in self.targets(page, 8 + size // 700, rng)]
        if not page.moved:  # crawlers that follow redirects by themselves would fetch the page again
            words = [markup.word(rng, page.kind.language) for _ in range(4)]
            links += [f'<a class="toc" href="#part-{index}">{word}</a>' for index, word in enumerate(words)]
        links += ['<a href="mailto:desk@example.com">@</a>', '<a href="javascript:void(0)" onclick="more()">+</a>']
        links.sort(key=lambda _: rng.random())
        title = f"{markup.phrase(rng, page.kind.language, 5)} & {page.number}"
        h1 = f"{markup.phrase(rng, page.kind.language, 4)} <{page.number}>"
        text = markup.document(page.kind.language, title, h1, links, size, rng, declared(page.kind))
        return text.encode(page.kind.encoding, "xmlcharrefreplace"), Facts(title, h1, len(links))


def declared(kind: Kind) -> str:
    """The meta tag with the encoding, in one of its two forms."""
    if kind.header:
        return ""
    if kind.encoding == "utf-8":
        return '<meta charset="utf-8">'
    return f'<meta http-equiv="Content-Type" content="text/html; charset={kind.encoding}">'


def anchor(page: Page, target: str, rng: random.Random) -> str:
    host, _, rest = target.partition("/")
    path, mark, query = f"/{rest}".partition("?")
    draw = rng.random()
    written = path if draw < 0.5 else quote(path)  # browsers percent-encode what is not ASCII
    tail = mark + query
    if host != page.host:
        href = f"//{host}:{PORT}{written}{tail}" if draw < 0.1 else f"https://{host}:{PORT}{written}{tail}"
        href = f"HTTPS{href[5:]}" if 0.1 <= draw < 0.12 else href
    elif draw < 0.08:
        href = f"https://{host}:{PORT}{written}{tail}"
    elif draw < 0.5:
        href = f"{written}{tail}"
    else:
        href = relative(page.path.partition("?")[0], path, "./" if draw > 0.95 else "") + tail
    if rng.random() < 0.12:
        href += f"#{markup.word(rng, 'en')}"
    if draw > 0.985:
        href = f" {href}\n"
    text = markup.phrase(rng, page.kind.language, 3)
    return f'<a class="link link--{int(draw * 9)}" data-id="{int(draw * 1e6)}" href="{escape(href)}">{escape(text)}</a>'


def relative(base: str, path: str, prefix: str) -> str:
    folder = base if base.endswith("/") else posixpath.dirname(base)
    found = posixpath.relpath(path, folder) + ("/" if path.endswith("/") else "")
    return prefix + quote("./" if found in ("./", ".//") else found)


def generate(pages: int, folder: Path) -> Content:
    """Write the site into `folder` unless it exists, and return what it contains."""
    root = folder / f"c-{pages}-v{VERSION}"
    manifest = root / "content.json"
    if not manifest.exists():
        write(pages, root, manifest)
    found = json.loads(manifest.read_text())
    return Content(
        root,
        {key: Facts(*facts) for key, facts in found["pages"].items()},
        found["redirects"],
        frozenset(found["errors"]),
        tuple(found["hosts"]),
    )


def write(pages: int, root: Path, manifest: Path) -> None:
    web = Web(pages)
    facts = {}
    for host in web.hosts:
        (root / host).mkdir(parents=True, exist_ok=True)
        (root / host / "robots.txt").write_text("User-agent: *\nDisallow:\n")
    for page in web.pages:
        body, found = web.render(page)
        facts[page.host + page.path] = (found.title, found.h1, found.links)
        file = root / page.host / page.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
    content = {
        "hosts": web.hosts,
        "pages": facts,
        "redirects": {page.moved: page.host + page.path for page in web.pages if page.moved},
        "errors": web.errors,
    }
    manifest.write_text(json.dumps(content, ensure_ascii=False))
