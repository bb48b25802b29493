"""The spiders of the cookbook find what is in the shop. `test_docs` runs the commands of the page."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
from examples.bookshop import BOOKS, Bookshop

from shoal import Crawl, crawl
from shoal.spider import load_spider

COOKBOOK = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text()
TITLES = {book.title for book in BOOKS}


async def crawl_of(name: str, folder: Path, shop: Bookshop, **arguments: str) -> Crawl:
    code = re.search(rf"```python\n(# {name}\n.*?)```", COOKBOOK, re.DOTALL)
    assert code is not None
    (folder / name).write_text(code[1].replace("127.0.0.1:8000", shop.url.removeprefix("http://")))
    settings = {"download_delay": 0, "login.retry_after": 0.01}
    return await crawl(load_spider(str(folder / name)), settings, arguments=arguments)


async def items_of(name: str, folder: Path, shop: Bookshop, **arguments: str) -> list[dict[str, object]]:
    return (await crawl_of(name, folder, shop, **arguments)).items


@pytest.mark.parametrize("name", ["api_books.py", "endless.py"])
async def test_every_book_once(name: str, tmp_path: Path) -> None:
    async with Bookshop() as shop:
        titles = [item["title"] for item in await items_of(name, tmp_path, shop)]
    assert len(titles) == 60
    assert set(titles) == TITLES


async def test_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Bookshop() as shop:
        items = await items_of("pictures.py", tmp_path, shop)
    assert len(items) == 10
    for item in items:
        (entry,) = cast("list[dict[str, Any]]", item["cover"])
        assert sha256((tmp_path / "pictures" / entry["path"]).read_bytes()).hexdigest() == entry["checksum"]
        assert (tmp_path / "pictures" / entry["thumbs"]["60x60"]).read_bytes().startswith(b"\xff\xd8")


async def test_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bookshop() as shop:
        monkeypatch.setenv("SHOP_PASSWORD", "open-sesame")
        assert len(await items_of("orders.py", tmp_path, shop)) == 3
        assert [visit.path for visit in shop.log][-4:] == ["/login", "/login", "/account", "/account"]
        monkeypatch.setenv("SHOP_PASSWORD", "wrong")
        failed = await crawl_of("orders.py", tmp_path, shop)
        assert failed.items == []
        assert str(failed.error) == "the login failed 3 times (login.attempts): Wrong name or password."


async def test_the_proxy_and_the_signature(tmp_path: Path) -> None:
    async with Bookshop() as shop:
        for name in ("proxied.py", "signed.py"):
            assert [item["title"] for item in await items_of(name, tmp_path, shop)] == ["All books"]


async def test_the_sitemap_of_the_shop(tmp_path: Path) -> None:
    async with Bookshop() as shop:
        assert {item["title"] for item in await items_of("catalogue.py", tmp_path, shop)} == TITLES
        changed = await items_of("catalogue.py", tmp_path, shop, since="2026-05-01")
        assert {item["title"] for item in changed} == {book.title for book in BOOKS[::10]}


async def test_the_feed_of_the_shop() -> None:
    from shoal import Response, Spider

    class News(Spider):
        def parse(self, response: Response) -> object:
            assert response.feed is not None
            return [{"title": entry.title} for entry in response.feed.entries]

    async with Bookshop() as shop:
        done = await crawl(News(start_urls=[shop.url + "/feed.xml"]), {"download_delay": 0})
    assert [item["title"] for item in done.items] == [book.title for book in BOOKS[:10]]
