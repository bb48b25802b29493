"""The pipelines that download files and images: their requests become `File` outputs of the page.

Shoal names and stores the files itself. It stores the item when all its files are stored or have failed. So
``file_path`` and ``item_completed`` of a project's own pipeline are not called. A warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal import http
from shoal.scrapy.components import ProjectComponent
from shoal.scrapy.conversion import text_headers
from shoal.scrapy.exceptions import NotConfigured
from shoal.scrapy.request import Request
from shoal.scrapy.values import fields_of

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler

log = logging.getLogger("shoal.scrapy")

_NOT_CALLED = ("file_path", "thumb_path", "item_completed", "media_downloaded", "convert_image", "file_downloaded")


class FilesPipeline:
    """Downloads the files in ``file_urls`` of an item. The results are in ``files``."""

    DEFAULT_FILES_URLS_FIELD: ClassVar[str] = "file_urls"
    DEFAULT_FILES_RESULT_FIELD: ClassVar[str] = "files"
    _setting: ClassVar[str] = "FILES"

    def __init__(
        self, store_uri: object = None, download_func: object = None, settings: object = None, **options: object
    ) -> None:
        self.crawler: Crawler | None = None
        self.urls_field = self.DEFAULT_FILES_URLS_FIELD
        self.result_field = self.DEFAULT_FILES_RESULT_FIELD

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        store = crawler.settings.get(f"{cls._setting}_STORE")
        if not store:
            raise NotConfigured(f"{cls._setting}_STORE is not set")
        made = cls(store)
        made.crawler = crawler
        made.urls_field = crawler.settings.get(f"{cls._setting}_URLS_FIELD") or made.urls_field
        made.result_field = crawler.settings.get(f"{cls._setting}_RESULT_FIELD") or made.result_field
        return made

    def get_media_requests(self, item: Any, info: Any) -> Iterable[Any]:
        """The requests for the files of an item."""
        return [Request(url) for url in fields_of(item).get(self.urls_field) or ()]


class ImagesPipeline(FilesPipeline):
    """Downloads the images in ``image_urls`` of an item. The results are in ``images``."""

    DEFAULT_FILES_URLS_FIELD: ClassVar[str] = "image_urls"
    DEFAULT_FILES_RESULT_FIELD: ClassVar[str] = "images"
    _setting: ClassVar[str] = "IMAGES"


class MediaPipelines:
    """Finds the files that an item waits for."""

    def __init__(self, components: Iterable[ProjectComponent]) -> None:
        self._pipelines = [each.instance for each in components if isinstance(each.instance, FilesPipeline)]
        for pipeline in self._pipelines:
            own = [name for name in _NOT_CALLED if hasattr(type(pipeline), name)]
            if own:
                log.warning(
                    "%s: %s is not called: Shoal names and stores the files itself, and the item has an entry for each",
                    type(pipeline).__name__, ", ".join(own),
                )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._pipelines)

    def files_of(self, item: object) -> list[http.File]:
        """The files of an item; empty if it has none."""
        found: list[http.File] = []
        for pipeline in self._pipelines:
            requests = pipeline.get_media_requests(item, None)
            for request in [requests] if isinstance(requests, Request) else requests or ():
                headers = text_headers(request) if request._headers else {}
                found.append(http.File(request.url, item=item, field=pipeline.result_field, headers=headers))
        return found
