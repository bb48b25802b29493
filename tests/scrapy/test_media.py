"""Files and images of items: FilesPipeline, ImagesPipeline, and Shoal's own File."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import scrapy
from shoal.scrapy.http import Request
from shoal.scrapy.pipelines import ImagesPipeline
from tests.scrapy.crawling import SITE, Answer, Page, crawl

PNG = b"\x89PNG\r\n\x1a\n"
PAGES: dict[str, Page] = {
    "/": "home",
    "/a.png": Answer(PNG + b"a", kind="image/png"),
    "/b.png": Answer(PNG + b"b", kind="image/png"),
    "/doc.pdf": Answer(b"%PDF-1", kind="application/pdf"),
}


class Shop(scrapy.Spider):
    name = "shop"
    start_urls = [f"{SITE}/"]
    item: Any = {}

    def parse(self, response: Any) -> Any:
        yield dict(self.item)


def shop(**item: Any) -> type[Shop]:
    return type("Shop", (Shop,), {"item": item})


class Agent:
    def process_request(self, request: Any, spider: Any) -> None:
        request.headers["X-Agent"] = "1"


async def test_files_and_images_of_an_item(tmp_path: Path) -> None:
    settings = {
        "ITEM_PIPELINES": {
            "scrapy.pipelines.images.ImagesPipeline": 1, "scrapy.pipelines.files.FilesPipeline": 2,
        },
        "FILES_STORE": str(tmp_path / "files"),
        "IMAGES_STORE": str(tmp_path / "files"),
        "DOWNLOADER_MIDDLEWARES": {Agent: 543},
    }  # fmt: skip
    spider = shop(
        title="T", image_urls=[f"{SITE}/a.png", f"{SITE}/b.png"], file_urls=[f"{SITE}/doc.pdf", f"{SITE}/gone.pdf"]
    )
    done = await crawl(spider, PAGES, settings=settings)
    (item,) = done.items
    assert [each["url"] for each in item["images"]] == [f"{SITE}/a.png", f"{SITE}/b.png"]
    assert (tmp_path / "files" / item["images"][0]["path"]).read_bytes() == PNG + b"a"
    assert item["files"][0]["size"] == 6
    assert "404" in item["files"][1]["error"]
    assert done.web.header("/a.png", "x-agent") == ["1"], "middlewares see requests for files too"


class OwnImages(ImagesPipeline):
    def get_media_requests(self, item: Any, info: Any) -> Any:
        yield Request(f"{SITE}/{item['picture']}", headers={"Referer": "own"})

    def item_completed(self, results: Any, item: Any, info: Any) -> Any:
        raise AssertionError("it is not called")


async def test_requests_of_the_projects_own_pipeline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"ITEM_PIPELINES": {OwnImages: 1}, "IMAGES_STORE": str(tmp_path), "IMAGES_RESULT_FIELD": "pictures"}
    done = await crawl(shop(picture="a.png"), PAGES, settings=settings)
    assert [each["url"] for each in done.items[0]["pictures"]] == [f"{SITE}/a.png"]
    assert done.web.header("/a.png", "referer") == ["own"]
    assert "OwnImages: item_completed is not called" in caplog.text


async def test_an_error_in_a_media_pipeline_costs_one_item(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Two(Shop):
        def parse(self, response: Any) -> Any:
            yield {"title": "without a picture"}
            yield {"picture": "a.png"}

    done = await crawl(Two, PAGES, settings={"ITEM_PIPELINES": {OwnImages: 1}, "IMAGES_STORE": str(tmp_path)})
    assert [each["picture"] for each in done.items] == ["a.png"]
    assert done.stats["items left out"] == 1
    assert "get_media_requests failed: KeyError: 'picture'" in caplog.text


class LatePictures:
    def process_item(self, item: Any, spider: Any) -> Any:
        return {**item, "image_urls": [f"{SITE}/a.png"]}


async def test_files_that_a_pipeline_adds_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipelines = {LatePictures: 1, "scrapy.pipelines.images.ImagesPipeline": 300}
    done = await crawl(shop(title="T"), PAGES, settings={"ITEM_PIPELINES": pipelines, "IMAGES_STORE": str(tmp_path)})
    assert done.web.paths == ["/"]
    assert done.stats["items with files added too late"] == 1
    assert "these files are not fetched: a pipeline set image_urls too late. Set it in the callback" in caplog.text


async def test_a_pipeline_without_a_store_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"ITEM_PIPELINES": {"scrapy.pipelines.images.ImagesPipeline": 1}}
    done = await crawl(shop(image_urls=[f"{SITE}/a.png"]), PAGES, settings=settings)
    assert done.items == [{"image_urls": [f"{SITE}/a.png"]}]
    assert done.web.paths == ["/"]
    assert "ImagesPipeline is not used: IMAGES_STORE is not set" in caplog.text


async def test_a_file_of_shoal_in_a_scrapy_spider(tmp_path: Path) -> None:
    class Own(scrapy.Spider):
        name = "own"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            yield shoal.File("/a.png", item={"title": "T"}, field="cover")

    done = await crawl(Own, PAGES, config={"files.store": str(tmp_path)})
    assert done.items[0]["title"] == "T"
    assert done.items[0]["cover"][0]["url"] == f"{SITE}/a.png"


def test_the_settings_of_files() -> None:
    from shoal.scrapy.settings import Settings
    from shoal.scrapy.translation import translate

    given = {"IMAGES_STORE": "pictures", "IMAGES_THUMBS": {"small": (50, 40)}, "IMAGES_EXPIRES": 30}
    found = translate(Settings(given)).settings
    assert found["files.store"] == "pictures"
    assert (found["images.thumbs"], found["files.max_age"]) == (("50x40",), 30 * 86400)
