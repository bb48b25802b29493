"""The item pipelines of a project, as one pipeline of the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal import http
from shoal.errors import DropItem, ItemError, describe
from shoal.scrapy import signals
from shoal.scrapy.components import ProjectComponent, hooks_of
from shoal.scrapy.conversion import text_headers
from shoal.scrapy.exceptions import NotConfigured
from shoal.scrapy.item import serialized
from shoal.scrapy.request import Request
from shoal.scrapy.values import fields_of

if TYPE_CHECKING:
    from shoal.scrapy.adapter import ScrapyAdapter
    from shoal.scrapy.crawler import Crawler

# The pipelines that download files and images: their requests become `File` outputs of the page.
#
# Shoal names and stores the files itself. It stores the item when all its files are stored or have failed. So
# ``file_path`` and ``item_completed`` of a project's own pipeline are not called. A warning says so.


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
        pipeline = cls(store)
        pipeline.crawler = crawler
        pipeline.urls_field = crawler.settings.get(f"{cls._setting}_URLS_FIELD") or pipeline.urls_field
        pipeline.result_field = crawler.settings.get(f"{cls._setting}_RESULT_FIELD") or pipeline.result_field
        return pipeline

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
        self._pipelines = _media_pipelines(components)
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
        files: list[http.File] = []
        for pipeline in self._pipelines:
            requests = pipeline.get_media_requests(item, None)
            for request in [requests] if isinstance(requests, Request) else requests or ():
                headers = text_headers(request) if request._headers else {}
                files.append(http.File(request.url, item=item, field=pipeline.result_field, headers=headers))
        return files


log = logging.getLogger("shoal.scrapy")


class ItemPipelines:
    """Passes each item through ``process_item`` of all pipelines. One that returns nothing drops the item."""

    def __init__(self, adapter: ScrapyAdapter, components: list[ProjectComponent]) -> None:
        self._adapter = adapter
        spider = adapter.spider
        self._process = hooks_of(components, "process_item", spider)
        self._open = hooks_of(components, "open_spider", spider)
        self._close = hooks_of(components, "close_spider", spider)
        self._url_fields = [pipeline.urls_field for pipeline in _media_pipelines(components)]
        self._fields = _export_fields(adapter.scrapy_settings.get("FEED_EXPORT_FIELDS"))

    async def open(self, spider: object) -> None:
        for hook in self._open:
            await hook()

    async def close(self, spider: object) -> None:
        """Close all pipelines, even if one of them fails. Then raise the first error."""
        failure: Exception | None = None
        hooks, self._close = self._close, []  # at most once
        for hook in reversed(hooks):
            try:
                await hook()
            except Exception as exc:  # the user's code may raise anything
                log.error("%s failed: %s", hook.name, describe(exc))
                failure = failure or exc
        if failure is not None:
            raise failure

    async def __call__(self, item: object, spider: object) -> object:
        sent = self._adapter.crawler_view.signals
        view = self._adapter
        response = view.current_response.get()
        original = item
        without_files = [field for field in self._url_fields if not fields_of(item).get(field)]
        name = ""
        try:
            for hook in self._process:
                name = hook.name
                item = await hook(item=item)
                if item is None:
                    raise DropItem(f"{name} returned nothing")
        except DropItem as dropped:
            view.crawler_view.stats.count("item_dropped_count")
            if sent.has_receivers(signals.item_dropped):
                await sent.send(
                    signals.item_dropped, item=original, response=response, exception=dropped, spider=view.spider
                )
            raise
        except Exception as exc:  # it costs this item
            if sent.has_receivers(signals.item_error):
                await sent.send(signals.item_error, item=original, response=response, spider=view.spider, failure=exc)
            raise ItemError(f"{name} failed: {describe(exc)}") from exc
        self._report_late_files(item, without_files)
        view.scraped()
        if sent.has_receivers(signals.item_scraped):
            await sent.send(signals.item_scraped, item=item, response=response, spider=view.spider)
        item = serialized(item)
        return item if self._fields is None else self._chosen(item)

    def _report_late_files(self, item: object, without_files: list[str]) -> None:
        """Report files that a pipeline added: the requests for files are made before the pipelines run."""
        for field in without_files:
            if fields_of(item).get(field):
                stats = self._adapter.crawler_view.stats
                if not stats.get_value("items with files added too late"):
                    log.error("these files are not fetched: a pipeline set %s too late. Set it in the callback", field)
                stats.inc_value("items with files added too late")

    def _chosen(self, item: object) -> object:
        """The fields of FEED_EXPORT_FIELDS, in their order and with their names."""
        assert self._fields is not None
        fields = fields_of(item)
        return {shown: fields[name] for name, shown in self._fields.items() if name in fields}


def _media_pipelines(components: Iterable[ProjectComponent]) -> list[FilesPipeline]:
    return [component.instance for component in components if isinstance(component.instance, FilesPipeline)]


def _export_fields(setting: str | Mapping[str, str] | Iterable[str] | None) -> dict[str, str] | None:
    if not setting:
        return None
    if isinstance(setting, str):
        setting = setting.split(",")
    return dict(setting) if isinstance(setting, Mapping) else {name: name for name in setting}
