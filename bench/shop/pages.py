"""A shop of static files, with the same bytes every time: categories with pages of products, and a page per product.

A product page has about 20 KB: navigation to all categories, a table, a description, related products, a footer. As on
a real site, nearly every link leads to a page that was seen before.
"""

from __future__ import annotations

import random
from pathlib import Path

from crawl.site import prose, rng_word

VERSION = 1  # increase it when the bytes of a page change
PER_PAGE = 24
CATEGORIES = 20
RELATED = 24
TEXT_BYTES = 9_000


def product_path(number: int) -> str:
    return f"/product/{number}.html"


def category_path(category: int, page: int) -> str:
    return f"/category/{category}-{page}.html"


def generate(products: int, folder: Path) -> Path:
    """Write the shop into `folder` unless it exists, and return its root."""
    root = folder / f"shop-{products}-v{VERSION}"
    complete = root / ".complete"
    if complete.exists():
        return root
    for name in ("product", "category"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "robots.txt").write_text("User-agent: *\nDisallow:\n")
    (root / "index.html").write_text(_page("Shop", "<h1>Shop</h1>"))
    for number in range(products):
        (root / product_path(number)[1:]).write_text(product(number, products))
    for category in range(CATEGORIES):
        members = range(category, products, CATEGORIES)
        for page, start in enumerate(range(0, len(members), PER_PAGE)):
            text = listing(category, page, members[start : start + PER_PAGE], start + PER_PAGE < len(members))
            (root / category_path(category, page)[1:]).write_text(text)
    complete.touch()
    return root


def pages_of(products: int) -> int:
    """How many pages the shop has."""
    lists = sum(-(-len(range(each, products, CATEGORIES)) // PER_PAGE) for each in range(CATEGORIES))
    return 1 + products + lists


def product(number: int, products: int) -> str:
    rng = random.Random(f"product/{products}/{number}")
    related = "".join(
        f'<li><a class="related" href="{product_path(int(rng.random() * products))}"><img src="/i/{number}.png" alt="">'
        f"<span>{rng_word(rng)} {rng_word(rng)}</span></a></li>"
        for _ in range(RELATED)
    )
    rows = "".join(f"<tr><th>{rng_word(rng)}</th><td> {rng_word(rng)} </td></tr>" for _ in range(12))
    tags = "".join(f'<li class="tag"> {rng_word(rng)} </li>' for _ in range(5))
    text = "".join(f"<p>{prose(rng, TEXT_BYTES // 10)}</p>" for _ in range(10))
    return _page(
        f"Product {number}",
        f'<div class="product" data-id="{number}">'
        f'<h1 class="name">\n  The {rng_word(rng)} {rng_word(rng)} {number}\n</h1>'
        f'<p class="price">Price: <b>{int(rng.random() * 9000) / 100:.2f}</b> EUR</p>'
        f'<p class="stock">{int(rng.random() * 50)} in stock</p><ul class="tags">{tags}</ul>'
        f'<div id="description">{text}</div><table class="data">{rows}</table></div><ul class="more">{related}</ul>',
    )


def listing(category: int, page: int, numbers: range, more: bool) -> str:
    rng = random.Random(f"list/{category}/{page}")
    rows = "".join(
        f'<li class="entry"><a class="name" href="{product_path(each)}">Product {each}</a><p>{prose(rng, 200)}</p></li>'
        for each in numbers
    )
    following = f'<a class="next" href="{category_path(category, page + 1)}">Next</a>' if more else ""
    return _page(f"Category {category}", f'<h1>Category {category}</h1><ul class="list">{rows}</ul>{following}')


def _page(title: str, body: str) -> str:
    categories = "".join(
        f'<li><a href="{category_path(each, 0)}">Category {each}</a></li>' for each in range(CATEGORIES)
    )
    footer = "".join(f'<a href="/files/{each}.pdf">Document {each}</a> ' for each in range(6))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>'
        f'<nav><ul>{categories}</ul></nav>\n<main>{body}</main>\n<footer>{footer}<a href="mailto:shop@example.com">Mail'
        "</a></footer></body></html>\n"
    )
