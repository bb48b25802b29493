"""The spider and the settings of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Config, Response, Spider

AT_ONCE = 4
"""Concurrent requests of a node."""


class Endless(Spider):
    """Each page links to another one, so the crawl never ends."""

    name = "endless"

    def parse(self, response: Response) -> Iterator[Any]:
        yield response.follow_all("a")


def config(frontier: str, agent: str = "bench") -> Config:
    """The settings. ``agent`` is the user agent, which identifies the node."""
    return Config().with_settings(
        {
            "frontier": frontier, "user_agent": agent, "concurrency": AT_ONCE, "lease.batch": AT_ONCE,
            "download_delay": 0, "robots.obey": False, "throttle.enabled": False, "items.keep": False,
        }
    )  # fmt: skip
