"""The beginning and the end of a spider's work: ``opened`` and ``closed``, ``open`` and ``close`` of its pipelines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from inspect import isawaitable

from shoal.errors import ShoalError, SpiderError, describe
from shoal.spider import Spider

log = logging.getLogger("shoal.spider")


class SpiderHooks:
    """Calls the hooks of a spider and its pipelines, each at most once.

    Pipelines open in their order, before ``spider.opened``. They close in reverse, after ``spider.closed``. A pipeline
    that did not open is not closed.
    """

    def __init__(self, spider: Spider, pipelines: Sequence[Callable[..., object]]) -> None:
        self._spider = spider
        self._pipelines = pipelines
        self._opened: list[Callable[..., object]] = []
        self._is_open = False

    async def open(self) -> ShoalError | None:
        """Open the pipelines and the spider up to the first error, and return it. Call ``close`` also then."""
        try:
            for pipeline in self._pipelines:
                if hasattr(pipeline, "open"):
                    await self._call(f"{_name(pipeline)}.open", pipeline.open, self._spider)
                self._opened.append(pipeline)
            await self._call("opened", self._spider.opened)
        except SpiderError as error:
            return error
        self._is_open = True
        return None

    async def close(self, reason: str) -> ShoalError | None:
        """Close whatever is open. The first error; all of them are logged."""
        failures: list[ShoalError] = []
        calls: list[tuple[str, Callable[..., object], object]] = []
        if self._is_open:
            calls.append(("closed", self._spider.closed, reason))
        closable = [pipeline for pipeline in reversed(self._opened) if hasattr(pipeline, "close")]
        calls += [(f"{_name(pipeline)}.close", pipeline.close, self._spider) for pipeline in closable]
        self._is_open, self._opened = False, []
        for name, hook, argument in calls:
            try:
                await self._call(name, hook, argument)
            except ShoalError as error:
                log.error("%s", error)
                failures.append(error)
        return failures[0] if failures else None

    async def _call(self, name: str, hook: Callable[..., object], *arguments: object) -> None:
        try:
            result = hook(*arguments)
            if isawaitable(result):
                await result
        except Exception as exc:  # whatever the user's code raises
            raise SpiderError(f"{self._spider.spider_name()}: {name}() failed: {describe(exc)}") from exc


def _name(pipeline: object) -> str:
    return getattr(pipeline, "__name__", type(pipeline).__name__)
