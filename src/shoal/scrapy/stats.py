"""The statistics of a crawl by the names that Scrapy gives them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from shoal.scrapy.shared_types import Given, Values
from shoal.spider import SpiderStats

_LIVE = {
    "downloader/request_count": "fetched",
    "downloader/response_count": "fetched",
    "downloader/response_bytes": "bytes",
    "response_received_count": "fetched",
    "item_scraped_count": "items",
    "item_dropped_count": "dropped",
    "retry/count": "retried",
    "dupefilter/filtered": "duplicates",
}
"""Scrapy's names, and Shoal's counter for each of them."""


class StatsCollector:
    """The statistics of this process: the spider's own values, and the counters of the crawl.

    Numbers that a spider increases are also counters of the run's summary."""

    def __init__(self, shown: SpiderStats) -> None:
        self._shown = shown
        self._values: Values = {"start_time": datetime.now(UTC)}

    def get_value(self, key: str, default: object = None, spider: object = None) -> Any:
        if key in self._values:
            return self._values[key]
        return self._counted().get(key, default)

    def get_stats(self, spider: object = None) -> Values:
        return {**self._counted(), **self._values}

    def set_value(self, key: str, value: object, spider: object = None) -> None:
        self._values[key] = value
        if type(value) is int:
            self._shown.own[key] = value

    def set_stats(self, stats: Given, spider: object = None) -> None:
        self._values = dict(stats)

    def inc_value(self, key: str, count: int = 1, start: int = 0, spider: object = None) -> None:
        value = self._values.get(key, start) + count
        self._values[key] = value
        if type(count) is int:
            self._shown.inc(key, count if key in self._shown.own else value)

    def count(self, key: str, count: int = 1) -> None:
        """Increase a value that the summary does not show."""
        self._values[key] = self._values.get(key, 0) + count

    def max_value(self, key: str, value: Any, spider: object = None) -> None:
        self.set_value(key, max(self._values.get(key, value), value))

    def min_value(self, key: str, value: Any, spider: object = None) -> None:
        self.set_value(key, min(self._values.get(key, value), value))

    def clear_stats(self, spider: object = None) -> None:
        self._values.clear()

    def open_spider(self, spider: object = None) -> None:
        """Do nothing: it is here for projects that call it."""

    def close_spider(self, spider: object = None, reason: str = "") -> None:
        """Do nothing: it is here for projects that call it."""

    def _counted(self) -> Values:
        own = self._shown
        return {name: own[counter] for name, counter in _LIVE.items() if own.get(counter)}
