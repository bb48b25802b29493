"""The spiders that the containers run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Request, Response, Spider


class Pages(Spider):
    """All pages behind one: `-a first=URL`."""

    name = "pages"
    first = ""
    # Few at a time, so that each worker has some. The requests of a killed worker are leased again after 15 s.
    settings = {"concurrency": 3, "lease": {"batch": 3, "ttl": 15}}

    def start(self) -> Iterator[Request]:
        yield Request(self.first)

    def parse(self, response: Response) -> Iterator[Any]:
        yield {"path": response.css("h1::text").get()}
        yield response.follow_all("a")


class Rendered(Spider):
    """One page that is rendered, and two that are not."""

    name = "rendered"
    settings = {"download_delay": 0, "retry": {"max_attempts": 2, "base_delay": 0.1}}

    def start(self) -> Iterator[Request]:
        yield Request("http://site:8080/script/0", render=True)
        yield Request("http://site:8080/script/1")
        yield Request("http://site:8080/script/2")

    def parse(self, response: Response) -> Iterator[Any]:
        yield {"heading": response.css("h1::text").get()}
