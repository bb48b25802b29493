"""The spider that the containers run: `-a first=URL` is its first page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Request, Response, Spider


class Pages(Spider):
    name = "pages"
    first = ""
    # Few at a time, so that each worker has some. The requests of a killed worker are leased again after 15 s.
    settings = {"concurrency": 3, "lease": {"batch": 3, "ttl": 15}}

    def start(self) -> Iterator[Request]:
        yield Request(self.first)

    def parse(self, response: Response) -> Iterator[Any]:
        yield {"path": response.css("h1::text").get()}
        yield response.follow_all("a")
