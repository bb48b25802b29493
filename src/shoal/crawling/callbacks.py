"""Calls the user's code: the callbacks of a page, whose output it sorts, and the hooks at the beginning and the end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from inspect import isawaitable, signature, unwrap
from itertools import islice
from types import CodeType, GeneratorType, NoneType, coroutine
from typing import Any

from msgspec import Struct

from shoal.crawling.files import FileChains, Step
from shoal.crawling.stats import CodeError, Counters
from shoal.errors import LIBRARIES, DropItem, ItemError, ShoalError, SpiderError, describe
from shoal.http import Duplicates, File, LinkBatch, Request, Response
from shoal.http.files import FILE_CALLBACK
from shoal.http.request import Creation, record_created
from shoal.item import encode_item, is_item
from shoal.selector.selectors import begin_page
from shoal.spider import Spider
from shoal.system import clock

log = logging.getLogger("shoal.engine")
spider_log = logging.getLogger("shoal.spider")

_MAX_REASON = 200  # characters of the reason why an item was dropped


class CallbackOutput(Struct):
    """The output of a callback: encoded items that passed the pipelines, and links."""

    items: list[bytes]
    links: list[Request | LinkBatch]
    dropped: list[str] = []
    """Why pipelines dropped items, one reason for each."""
    files: list[Request] = []
    """Requests for files. The scope allows them."""
    duplicates: int = 0
    """Links that were left out because the frontier has them."""
    errors: int = 0
    """Items that could not be stored."""

    def add(self, step: Step) -> None:
        """Add the request for the next file, or the complete item."""
        if isinstance(step, Request):
            self.files.append(step)
        else:
            self.items.append(step)


class Callbacks:
    """Calls the methods of the spider. Their exceptions are passed on. An item that cannot be stored is left out,
    counted and logged; it does not fail its page."""

    def __init__(self, spider: Spider, counters: Counters, files: FileChains) -> None:
        self._spider = spider
        self._counters = counters
        self._files = files
        self._fields = dict.fromkeys(spider.fields)
        self._see_type = spider.item_types.see
        self.unyielded = Unyielded()
        self.pipelines: list[Callable[..., object]] = [
            pipeline() if isinstance(pipeline, type) else pipeline for pipeline in spider.pipelines
        ]
        for pipeline in self.pipelines:
            if not callable(pipeline):
                name = type(pipeline).__name__
                instead = "rename process_item to __call__" if hasattr(pipeline, "process_item") else "use a function"
                raise SpiderError(f"the pipeline {name} is not callable: {instead}, or write a class with __call__")

    async def call(self, name: str | None, request: Request, /, *arguments: object, **kwargs: object) -> CallbackOutput:
        """Call the method ``name`` and collect its output. ``request`` is the request that it handles."""
        response = arguments[0] if isinstance(arguments[0], Response) else None
        if name == FILE_CALLBACK and response is not None:
            collected = CallbackOutput([], [])
            collected.add(await self._files.fetched(request, response))
            return collected
        begin_page()
        callback = self._spider.callback(name)
        try:
            if name not in self.unyielded.checked:
                return await self._call_watched(name, partial(callback, *arguments, **kwargs), request, response)
            result = callback(*arguments, **kwargs)
            outputs = list(result) if isinstance(result, GeneratorType) else await _collect(result)
            return await self.take(outputs, request, response)
        except TypeError:
            _check_parameters(callback, arguments, kwargs)
            raise

    async def _call_watched(
        self, name: str | None, callback: Callable[[], object], request: Request, response: Response | None
    ) -> CallbackOutput:
        """Call a method, and look for what it forgets to yield."""
        created: list[Creation] = []
        record_created(created)
        try:
            result = callback()
            outputs = list(self.unyielded.watch(result)) if isinstance(result, GeneratorType) else None
        finally:
            record_created(None)
        if outputs is None:
            outputs = await _recorded(_collect(result), created)
        result = None  # it may hold what it created
        collected = await self.take(outputs, request, response)
        self.unyielded.check(name, created, outputs)
        return collected

    async def take(
        self, outputs: Iterable[object], request: Request, response: Response | None = None
    ) -> CallbackOutput:
        """Sort the output of a callback: links, files, and items that pass the pipelines. ``response`` is None in an
        errback. Files that the callback saved are stored first, because items have their paths."""
        if response is not None and response.saved:
            await self._files.store(response)
        collected = CallbackOutput([], [])
        files: dict[int, list[File]] = {}
        for output in outputs:
            if isinstance(output, (LinkBatch, Request)):
                self._check(output)
                collected.links.append(output)
            elif type(output) is File:
                files.setdefault(id(output if output.item is None else output.item), []).append(output)
            elif type(output) is Duplicates:
                collected.duplicates += output.count
            elif output is not None:
                item = await self._pass_pipelines(output, request, collected) if self.pipelines else output
                if item is not None and (encoded := self._encode(item, request, collected)) is not None:
                    collected.items.append(encoded)
        for group in files.values():
            await self._begin(group, request, response, collected)
        return collected

    async def _begin(
        self, files: list[File], request: Request, response: Response | None, collected: CallbackOutput
    ) -> None:
        """Fetch the files of an item. If a pipeline drops the item, nothing is fetched."""
        item, encoded = files[0].item, b""
        if item is not None:
            item = await self._pass_pipelines(item, request, collected)
            encoded_item = None if item is None else self._encode(item, request, collected)
            if encoded_item is None:
                return
            encoded = encoded_item
        collected.add(await self._files.begin(files, encoded, request, response))

    def _check(self, link: Request | LinkBatch) -> None:
        """SpiderError if a new request names a callback that the spider does not have."""
        for name in (link.callback, link.errback):
            if name is not None:
                self._spider.callback(name)

    async def _pass_pipelines(self, item: object, request: Request, collected: CallbackOutput) -> object:
        """What the pipelines make of an item. None: it is not stored."""
        try:
            for pipeline in self.pipelines:
                item = pipeline(item, self._spider)
                if isawaitable(item):
                    item = await item
                if item is None:
                    name = name_of(pipeline)
                    raise ItemError(f"the pipeline {name} returned None: return the item, or raise DropItem")
        except DropItem as dropped:
            reason = str(dropped)[:_MAX_REASON] or "no reason"
            self._counters.drop(reason)
            collected.dropped.append(reason)
            log.debug("item dropped url=%s reason=%s", request.url, dropped)
            return None
        except ItemError as error:
            self._refuse(error, request, collected)
            return None
        return item

    def _encode(self, item: object, request: Request, collected: CallbackOutput) -> bytes | None:
        try:
            if type(item) is not dict:
                self._see_type(type(item))
                return encode_item(item)
            return encode_item(self._fields | item if self._fields else item)
        except ItemError as error:
            self._refuse(error, request, collected)
            return None

    def _refuse(self, error: ItemError, request: Request, collected: CallbackOutput) -> None:
        collected.errors += 1
        self._counters.item_errors += 1
        self._counters.last_item_error = CodeError(clock.time(), str(error), request.url)
        log.error("item not stored url=%s %s", request.url, error)


class Unyielded:
    """Finds places in callbacks that create requests or batches of links and never yield one: mostly a ``yield`` is
    missing. It looks at the first calls of each callback. Later calls cost nothing."""

    _FIRST = 100
    """Calls of a callback that are looked at."""

    def __init__(self) -> None:
        self.checked: set[str | None] = set()
        """Callbacks that were called often enough."""
        self._calls: Counter[str | None] = Counter()
        self._yielding: set[tuple[CodeType, int]] = set()
        self._missing: Counter[tuple[CodeType, int]] = Counter()
        self._returning: Counter[CodeType] = Counter()

    def check(self, name: str | None, created: list[Creation], outputs: Sequence[object]) -> None:
        """Look at what one call of a callback created, and at what it yielded."""
        self._calls[name] += 1
        if self._calls[name] >= self._FIRST:
            self.checked.add(name)
        yielded = {id(output) for output in outputs}
        while created:
            link, code, instruction, references = _take(created)
            place = (code, instruction)
            if id(link) in yielded or references > _ALONE:  # the spider keeps it, perhaps for later
                self._yielding.add(place)
            elif not code.co_filename.startswith(LIBRARIES):
                self._missing[place] += 1

    def watch(self, outputs: GeneratorType[object, None, object]) -> Iterator[object]:
        """The same outputs. A generator that returns an item loses it."""
        if not isinstance((yield from outputs), (LinkBatch, Request, NoneType)):
            self._returning[outputs.gi_code] += 1

    def report(self) -> list[str]:
        """A line for each such place."""
        places = sorted(
            (code.co_filename, _line(code, instruction), count)
            for (code, instruction), count in self._missing.items()
            if (code, instruction) not in self._yielding
        )
        return [
            f"{name}, line {line}: what this line creates was never yielded, on {count} "
            f"{'call' if count == 1 else 'calls'}, so its links were not followed: write `yield` before it"
            for name, line, count in places
        ] + [
            f"{code.co_filename}, line {code.co_firstlineno}: {code.co_name} has a `yield`, so what it returned on "
            f"{count} {'call' if count == 1 else 'calls'} is lost: write `yield` instead of `return`"
            for code, count in self._returning.items()
        ]


def _take(created: list[Creation]) -> tuple[object, CodeType, int, int]:
    """Remove the last one, and count the references to it."""
    link, code, instruction = created.pop()
    return link, code, instruction, sys.getrefcount(link)


_ALONE = _take([(Request("http://a.example/"), _take.__code__, 0)])[3]
"""The count for an object that nothing else refers to. It depends on the version of Python."""


def _line(code: CodeType, instruction: int) -> int:
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    return (position and position[0]) or code.co_firstlineno


@coroutine
def _recorded(work: Coroutine[Any, Any, list[object]], created: list[Creation]) -> Generator[Any, Any, list[object]]:
    """Await ``work``, and record what it creates: only in its own steps, because other callbacks run between them."""
    step: Callable[[Any], Any] = work.send
    value: object = None
    while True:
        record_created(created)
        try:
            future = step(value)
        except StopIteration as stop:
            outputs: list[object] = stop.value
            return outputs
        finally:
            record_created(None)
        try:
            step, value = work.send, (yield future)
        except BaseException as exc:
            step, value = work.throw, exc


async def _collect(result: object) -> list[object]:
    """The output of any kind of callback: generator, coroutine, async generator, list, or a single value."""
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


def _check_parameters(
    callback: Callable[..., object], arguments: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """SpiderError if a method does not take what a callback or an errback gets: it says what to write, and where."""
    try:
        signature(callback).bind(*arguments, **kwargs)
    except TypeError as exc:
        code = getattr(unwrap(callback), "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
        name = getattr(callback, "__name__", type(callback).__name__)
        first = ("response",) if isinstance(arguments[0], Response) else ("request", "error")
        raise SpiderError(
            f"{getattr(callback, '__qualname__', name)}() does not take what it gets: {exc}; write "
            f"`def {name}({', '.join(('self', *first, *kwargs))})`{place}"
        ) from None


# -- the beginning and the end


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
                    await self._call(f"{name_of(pipeline)}.open", pipeline.open, self._spider)
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
        calls += [(f"{name_of(pipeline)}.close", pipeline.close, self._spider) for pipeline in closable]
        self._is_open, self._opened = False, []
        for name, hook, argument in calls:
            try:
                await self._call(name, hook, argument)
            except ShoalError as error:
                spider_log.error("%s", error)
                failures.append(error)
        return failures[0] if failures else None

    async def _call(self, name: str, hook: Callable[..., object], *arguments: object) -> None:
        try:
            result = hook(*arguments)
            if isawaitable(result):
                await result
        except Exception as exc:  # whatever the user's code raises
            raise SpiderError(f"{self._spider.spider_name()}: {name}() failed: {describe(exc)}") from exc


def name_of(pipeline: object) -> str:
    return getattr(pipeline, "__name__", type(pipeline).__name__)
