"""Sites a and b: static files, with the same bytes every time.

Page 0 is `/`, page n is `/p/n.html`. Every page links to its two children in a binary tree, which makes all of them
reachable from `/`, and to pages drawn at random for the rest. So nearly every link of a crawl leads to a page that was
seen before, as on a real site.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from crawl.content import Content, Facts

VERSION = 1  # increase it when the bytes of a page change, so that sites in the work folder are generated again

TEXT = (
    "shoal water current drift net harbour tide reef anchor lantern salt rope keel mast wind star chart sound depth "
    "silver grey slow quick narrow open under between along after before toward the a of and in to that it with for"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Site:
    key: str
    title: str
    page_bytes: int
    links: int


SITES = {  # c and d are in web.py
    "a": Site("a", "20 KB pages, 60 links each", 20 * 1024, 60),
    "b": Site("b", "4 KB pages, 5 links each", 4 * 1024, 5),
}


def path_of(number: int) -> str:
    """The root-relative URL of a page, as in links and in the log of the server."""
    return f"/p/{number}.html" if number else "/"


def targets(number: int, pages: int, links: int, rng: random.Random) -> list[int]:
    """The distinct pages that this page links to. Never itself; fewer than `links` only on a tiny site."""
    chosen = dict.fromkeys(child for child in (2 * number + 1, 2 * number + 2) if child < pages)
    while len(chosen) < min(links, pages - 1):
        other = int(rng.random() * pages)  # random() is the one method whose sequence Python promises to keep
        if other != number:
            chosen[other] = None
    order = list(chosen)
    order.sort(key=lambda _: rng.random())
    return order


def page(site: Site, number: int, pages: int) -> bytes:
    rng = random.Random(f"{site.key}/{pages}/{number}")
    links = targets(number, pages, site.links, rng)
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>'
        f"{title_of(site, number)}</title>\n</head>\n<body>\n<h1>The {rng_word(rng)} of page {number}</h1>\n"
    )
    tail = "</body>\n</html>\n"
    anchors = [f'<a href="{path_of(target)}">page {target}</a>' for target in links]
    fixed = len(head) + len(tail) + sum(map(len, anchors))
    room = site.page_bytes - fixed - len(anchors) * len("<p>  </p>\n")
    each = room // len(anchors)
    parts = [head]
    for anchor in anchors:
        text = prose(rng, each)
        cut = text.find(" ", len(text) // 2)
        parts.append(f"<p>{text[:cut]} {anchor} {text[cut + 1 :]}</p>\n")
    body = "".join(parts)
    padding = site.page_bytes - len(body) - len(tail)
    return f"{body}{' ' * (padding - 1)}\n{tail}".encode() if padding > 0 else f"{body}{tail}".encode()


def rng_word(rng: random.Random) -> str:
    return WORDS[int(rng.random() * len(WORDS))]


def prose(rng: random.Random, length: int) -> str:
    words: list[str] = []
    while length > 0:
        word = rng_word(rng)
        words.append(word)
        length -= len(word) + 1
    return " ".join(words[:-1]) + "."


def generate(site: Site, pages: int, folder: Path) -> Content:
    """Write the site into `folder` unless it exists, and return what it contains."""
    root = folder / f"{site.key}-{pages}-v{VERSION}"
    content = Content(root, {path_of(number): Facts(title_of(site, number)) for number in range(pages)})
    complete = root / ".complete"
    if complete.exists():
        return content
    (root / "p").mkdir(parents=True, exist_ok=True)
    (root / "robots.txt").write_text("User-agent: *\nDisallow:\n")
    for number in range(pages):
        name = root / f"p/{number}.html" if number else root / "index.html"
        name.write_bytes(page(site, number, pages))
    complete.touch()
    return content


def title_of(site: Site, number: int) -> str:
    return f"Page {number} of site {site.key}"
