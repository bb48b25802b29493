"""The border to the user's code: callbacks, errbacks and pipelines, and what they give."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from inspect import isawaitable
from types import GeneratorType
from typing import Any

from msgspec import Struct

from shoal.crawling.stats import Counters
from shoal.errors import DropItem, ItemError, SpiderError
from shoal.http import LinkBatch, Request
from shoal.item import encode_item, is_item
from shoal.selector.usage import begin_page
from shoal.spider import Spider

log = logging.getLogger("shoal.callbacks")

_MAX_REASON = 200  # characters of the reason why an item was dropped

_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)


class Found(Struct):
    """What a callback gave: items, through the pipelines and encoded, and what leads to new requests."""

    items: list[bytes]
    links: list[Request | LinkBatch]
    dropped: list[str] = []
    """The reasons of the items that pipelines dropped."""


class Callbacks:
    """Calls the spider's methods. What they raise comes through, but for an item that can't be stored: that one is
    left out, counted and logged, and the rest of its page goes on."""

    def __init__(self, spider: Spider, counters: Counters) -> None:
        self._spider = spider
        self._counters = counters
        self.pipelines: list[Callable[..., Any]] = [
            each() if isinstance(each, type) else each for each in spider.pipelines
        ]
        self._fields = dict.fromkeys(spider.fields)
        for pipeline in self.pipelines:
            if not callable(pipeline):
                name = type(pipeline).__name__
                raise SpiderError(f"the pipeline {name} can't be called: give a function, or a class with __call__")

    async def call(self, name: str | None, request: Request, /, *arguments: Any, **named: Any) -> Found:
        """Everything that the method of this name gives, sorted. ``request`` is the one that it is about."""
        found = Found([], [])
        begin_page()
        for output in await _collect(self._spider.callback(name)(*arguments, **named)):
            if isinstance(output, (LinkBatch, Request)):
                self._check(output)
                found.links.append(output)
            elif output is not None and (encoded := await self._encode(output, request, found)) is not None:
                found.items.append(encoded)
        return found

    def _check(self, link: Request | LinkBatch) -> None:
        """A request that nobody could answer is an error of the callback that made it, and shows up there."""
        for name in (link.callback, link.errback):
            if name is not None:
                self._spider.callback(name)

    async def _encode(self, item: Any, request: Request, found: Found) -> bytes | None:
        try:
            for pipeline in self.pipelines:
                item = pipeline(item, self._spider)
                if isawaitable(item):
                    item = await item
                if item is None:
                    name = getattr(pipeline, "__name__", type(pipeline).__name__)
                    raise ItemError(f"the pipeline {name} returned None: return the item, or raise DropItem")
            if self._fields and type(item) is dict:
                item = self._fields | item
            return encode_item(item)
        except DropItem as dropped:
            reason = str(dropped)[:_MAX_REASON] or "no reason"
            self._counters.drop(reason)
            found.dropped.append(reason)
            log.debug("item dropped url=%s reason=%s", request.url, dropped)
        except ItemError as error:
            self._counters.item_errors += 1
            log.error("item not stored url=%s %s", request.url, error)
        return None


async def _collect(result: Any) -> list[Any]:
    """Everything that a callback gives, whatever kind of callback it is."""
    if isinstance(result, GeneratorType):
        return list(result)
    if isawaitable(result):
        result = await result
    if result is None:
        return []
    if isinstance(result, AsyncIterator):
        return [output async for output in result]
    if isinstance(result, (str, LinkBatch, Request)) or is_item(result) or not isinstance(result, Iterable):
        return [result]
    return list(result)


def describe(exc: BaseException) -> str:
    """What went wrong, and where in the user's own files."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(exc).__name__}: {exc}{place}"
