"""What the nodes are given to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal import Config, Response, Spider

AT_ONCE = 4
"""Requests that a node has in flight."""


class Endless(Spider):
    """Each page of the site links to one more, so there is work as long as there are nodes."""

    name = "endless"

    def parse(self, response: Response) -> Iterator[Any]:
        yield response.follow_all("a")


def config(frontier: str, agent: str = "bench") -> Config:
    """``agent`` is how a node is known at the site."""
    return Config().with_settings(
        {
            "frontier": frontier, "user_agent": agent, "concurrency": AT_ONCE, "lease.batch": AT_ONCE,
            "download_delay": 0, "robots.obey": False, "throttle.enabled": False, "items.keep": False,
        }
    )  # fmt: skip
