"""The little of Twisted that spiders use: Deferred, inlineCallbacks, deferToThread, a reactor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial, wraps
from types import GeneratorType
from typing import Any


class Deferred:
    """A result that comes later. It can be awaited."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], Any]] = []
        self._result: Any = None
        self.called = False

    def addCallback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
        """Call a function with the result; what it returns is the next result."""

        def call(result: Any) -> Any:
            return function(result, *args, **kwargs)

        if self.called:
            self._result = call(self._result)
        else:
            self._callbacks.append(call)
        return self

    addBoth = addCallback

    def addErrback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
        """Errors are raised where they occur, so it is never called."""
        return self

    def addCallbacks(self, callback: Callable[..., Any], errback: Any = None, **options: Any) -> Deferred:
        return self.addCallback(callback)

    def callback(self, result: Any) -> None:
        """The result is there."""
        if self.called:
            return
        self.called = True
        for function in self._callbacks:
            result = function(result)
        self._result = result

    def errback(self, failure: Any = None) -> None:
        raise getattr(failure, "value", failure)

    @staticmethod
    def fromFuture(future: Any) -> Any:
        """A future can be awaited as it is."""
        return future

    @staticmethod
    def fromCoroutine(coroutine: Any) -> Any:
        return coroutine

    def asFuture(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        return asyncio.ensure_future(_wait(self), loop=loop)

    def __await__(self) -> Generator[Any, None, Any]:
        while not self.called:
            yield from asyncio.sleep(0.01).__await__()
        return self._result


def succeed(result: Any) -> Deferred:
    made = Deferred()
    made.callback(result)
    return made


def maybeDeferred(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
    result = function(*args, **kwargs)
    return result if isinstance(result, Deferred) else succeed(result)


class _ReturnValue(BaseException):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def returnValue(value: Any) -> None:
    raise _ReturnValue(value)


def inlineCallbacks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an awaitable of a generator that yields Deferreds and awaitables. Outside of an event loop it runs at once,
    and a Deferred that has no result yet counts as None."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        if not isinstance(generator, GeneratorType):
            return succeed(generator)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return succeed(_drive(generator))
        return _drive_async(generator)

    return call


def _drive(generator: GeneratorType[Any, Any, Any]) -> Any:
    value: Any = None
    try:
        while True:
            waited = generator.send(value)
            value = waited._result if isinstance(waited, Deferred) else waited
    except StopIteration as stop:
        return stop.value
    except _ReturnValue as returned:
        return returned.value


async def _drive_async(generator: GeneratorType[Any, Any, Any]) -> Any:
    value: Any = None
    try:
        while True:
            waited = generator.send(value)
            value = await waited if hasattr(waited, "__await__") else waited
    except StopIteration as stop:
        return stop.value
    except _ReturnValue as returned:
        return returned.value


async def deferToThread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def DeferredList(deferreds: Any, *options: Any, **named: Any) -> list[tuple[bool, Any]]:
    """Wait for all; pairs of whether each succeeded, and its result."""
    results = await asyncio.gather(*(_wait(each) for each in deferreds), return_exceptions=True)
    return [(not isinstance(each, BaseException), each) for each in results]


gatherResults = DeferredList


async def _wait(given: Any) -> Any:
    return await given if hasattr(given, "__await__") else given


def deferred_from_coro(given: Any) -> Any:
    return given


ensureDeferred = deferred_from_coro


async def deferLater(reactor: Any, delay: float, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Wait, and then call a function."""
    await asyncio.sleep(delay)
    return await _wait(function(*args, **kwargs)) if function is not None else None


class LoopingCall:
    """Calls a function again and again."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._call = partial(function, *args, **kwargs)
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, interval: float, now: bool = True) -> Deferred:
        self._task = asyncio.get_running_loop().create_task(self._repeat(interval, now))
        return Deferred()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _repeat(self, interval: float, now: bool) -> None:
        if not now:
            await asyncio.sleep(interval)
        while True:
            await _wait(self._call())
            await asyncio.sleep(interval)


async def maybe_deferred_to_future(given: Any) -> Any:
    return await _wait(given)


deferred_to_future = maybe_deferred_to_future


class Reactor:
    """The event loop, for the calls that spiders make."""

    running = False

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run the crawls of all `CrawlerRunner`."""
        from shoal.scrapy.process import CrawlerRunner

        for runner in list(CrawlerRunner.waiting):
            runner.run_all()

    def stop(self) -> None:
        """The crawls end by themselves."""

    def callLater(self, delay: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return asyncio.get_running_loop().call_later(delay, lambda: function(*args, **kwargs))

    def callFromThread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(lambda: function(*args, **kwargs))

    def callInThread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: function(*args, **kwargs))

    def seconds(self) -> float:
        return time.time()


reactor = Reactor()


def install_reactor(*args: Any, **kwargs: Any) -> None:
    """Shoal has its own event loop."""
