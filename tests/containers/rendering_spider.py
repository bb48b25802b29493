"""A spider for containers with a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Request, Response, Spider


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
