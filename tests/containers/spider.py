"""The spider that the containers run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Response, Spider


class Pages(Spider):
    name = "pages"

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start_urls = [start]

    def parse(self, response: Response) -> Iterator[Any]:
        yield {"path": response.css("h1::text").get()}
        yield response.follow_all("a")
