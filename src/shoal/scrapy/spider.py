"""Scrapy's Spider: the base class of the spiders that an adapter runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Self

from shoal.scrapy.request import Request
from shoal.scrapy.values import Values

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.response import Response
    from shoal.scrapy.settings import Settings


class SpiderLogger(logging.LoggerAdapter[logging.Logger]):
    """The logger of a spider. Log records have the spider as an attribute."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class Spider:
    """Base class of Scrapy spiders. It is not a `shoal.Spider`, so its subclasses may use any names."""

    custom_settings: Values | None = None
    crawler: Crawler
    settings: Settings
    state: Values
    start_urls: Iterable[str]
    if TYPE_CHECKING:
        name: str
    else:
        name = None

    def __init__(self, name: str | None = None, **kwargs: Any) -> None:
        if name is not None:
            self.name = name
        elif not getattr(self, "name", None):
            raise ValueError(f"{type(self).__name__} must have a name")
        self.__dict__.update(kwargs)
        if not hasattr(self, "start_urls"):
            self.start_urls = []

    @classmethod
    def from_crawler(cls, crawler: Crawler, *args: Any, **kwargs: Any) -> Self:
        spider = cls(*args, **kwargs)
        spider._set_crawler(crawler)
        return spider

    def _set_crawler(self, crawler: Crawler) -> None:
        self.crawler = crawler
        self.settings = crawler.settings

    @classmethod
    def update_settings(cls, settings: Settings) -> None:
        """Let the spider's own settings replace those of the project."""
        settings.setdict(cls.custom_settings or {}, "spider", f"custom_settings of {cls.__name__}")

    @property
    def logger(self) -> SpiderLogger:
        return SpiderLogger(logging.getLogger(str(self.name)), {"spider": self})

    def log(self, message: object, level: int = logging.DEBUG, **kw: Any) -> None:
        self.logger.log(level, message, **kw)

    async def start(self) -> AsyncIterator[Any]:
        for url in [self.start_urls] if isinstance(self.start_urls, str) else self.start_urls:
            yield Request(url, dont_filter=True)

    def start_requests(self) -> Iterable[Any]:
        """The requests for ``start_urls``, for a subclass that calls its base."""
        for url in [self.start_urls] if isinstance(self.start_urls, str) else self.start_urls:
            yield Request(url, dont_filter=True)

    def _parse(self, response: Response, **kwargs: Any) -> Any:
        return self.parse(response, **kwargs)

    if TYPE_CHECKING:
        parse: Callable[..., Any]  # a subclass may take any arguments
    else:

        def parse(self, response, **kwargs):
            raise NotImplementedError(f"{type(self).__name__}.parse callback is not defined")

    @classmethod
    def handles_request(cls, request: Request) -> bool:
        from shoal.scrapy.scope import OffsiteFilter

        return OffsiteFilter([cls.name, *(getattr(cls, "allowed_domains", None) or [])]).allows(request.url)

    @staticmethod
    def close(spider: Spider, reason: str) -> Any:
        closed = getattr(spider, "closed", None)
        return closed(reason) if callable(closed) else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    __str__ = __repr__
