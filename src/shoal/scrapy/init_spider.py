"""``InitSpider``: requests something first, such as a login, and then its start URLs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.scrapy.response import Response
from shoal.scrapy.results import each_result
from shoal.scrapy.spider import Spider


class InitSpider(Spider):
    """Starts with ``init_request``. Its callback returns ``initialized()``, which starts the crawl."""

    def start_requests(self) -> Iterable[object]:
        return each_result(self.init_request())

    def init_request(self) -> Any:
        """Return the first request or requests. By default the crawl starts at once."""
        return self.initialized()

    def initialized(self, response: Response | None = None) -> Iterable[Any]:
        """Return the requests for the start URLs. Every process of a fleet can call it."""
        return super().start_requests()
