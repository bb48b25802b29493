"""The part of Twisted that spiders use: Deferred, inlineCallbacks, deferToThread, a reactor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from functools import partial, wraps
from types import GeneratorType
from typing import Any, NoReturn, ParamSpec, TypeVar

from shoal.scrapy.failure import Failure
from shoal.scrapy.values import Function
from shoal.system import clock, threads

P = ParamSpec("P")
T = TypeVar("T")


class Deferred:
    """A result that arrives later. You can await it."""

    def __init__(self) -> None:
        self._callbacks: list[Function] = []
        self._result: object = None
        self.called = False

    def addCallback(self, function: Function, *args: object, **kwargs: object) -> Deferred:
        """Call a function with the result; what it returns is the next result."""

        def call(result: object) -> object:
            return function(result, *args, **kwargs)

        if self.called:
            self._result = call(self._result)
        else:
            self._callbacks.append(call)
        return self

    addBoth = addCallback

    def addErrback(self, function: Function, *args: object, **kwargs: object) -> Deferred:
        """Do nothing: errors are raised where they occur."""
        return self

    def addCallbacks(self, callback: Function, errback: object = None, **options: object) -> Deferred:
        return self.addCallback(callback)

    def callback(self, result: object) -> None:
        """Set the result, and call the callbacks."""
        if self.called:
            return
        self.called = True
        for function in self._callbacks:
            result = function(result)
        self._result = result

    def errback(self, failure: Failure | BaseException | None = None) -> None:
        error = failure.value if isinstance(failure, Failure) else failure
        raise RuntimeError("errback() without an error") if error is None else error

    @staticmethod
    def fromFuture(future: T) -> T:
        """Return the future: it can be awaited."""
        return future

    @staticmethod
    def fromCoroutine(coroutine: T) -> T:
        return coroutine

    def asFuture(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[object]:
        return asyncio.ensure_future(_wait(self), loop=loop)

    def __await__(self) -> Generator[object, None, Any]:
        while not self.called:
            yield from asyncio.sleep(0.01).__await__()
        return self._result


def succeed(result: object) -> Deferred:
    deferred = Deferred()
    deferred.callback(result)
    return deferred


def maybeDeferred(function: Function, *args: object, **kwargs: object) -> Deferred:
    result = function(*args, **kwargs)
    return result if isinstance(result, Deferred) else succeed(result)


class _ReturnValue(BaseException):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def returnValue(value: object) -> NoReturn:
    raise _ReturnValue(value)


def inlineCallbacks(function: Callable[P, object]) -> Callable[P, Any]:
    """Decorate a generator function that yields Deferreds and awaitables: calls return an awaitable. Without a running
    event loop the generator runs at once, and a Deferred without a result counts as None."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> object:
        generator = function(*args, **kwargs)
        if not isinstance(generator, GeneratorType):
            return succeed(generator)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return succeed(_drive(generator))
        return _drive_async(generator)

    return call


def _drive(generator: GeneratorType[object, object, object]) -> object:
    value: object = None
    try:
        while True:
            waited = generator.send(value)
            value = waited._result if isinstance(waited, Deferred) else waited
    except StopIteration as stop:
        return stop.value
    except _ReturnValue as returned:
        return returned.value


async def _drive_async(generator: GeneratorType[object, object, object]) -> object:
    value: object = None
    try:
        while True:
            waited = generator.send(value)
            value = await _wait(waited)
    except StopIteration as stop:
        return stop.value
    except _ReturnValue as returned:
        return returned.value


async def deferToThread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread."""
    return await threads.call(function, *args, **kwargs)


async def DeferredList(deferreds: Iterable[object], *options: object, **more_options: object) -> list[tuple[bool, Any]]:
    """Wait for all. Return a pair for each: whether it succeeded, and its result."""
    results = await asyncio.gather(*(_wait(deferred) for deferred in deferreds), return_exceptions=True)
    return [(not isinstance(result, BaseException), result) for result in results]


gatherResults = DeferredList


async def _wait(awaited: object) -> object:
    return await awaited if isinstance(awaited, Awaitable) else awaited


def deferred_from_coro(given: T) -> T:
    return given


ensureDeferred = deferred_from_coro


async def deferLater(
    reactor: object, delay: float, function: Function | None = None, *args: object, **kwargs: object
) -> Any:
    """Wait, and then call a function."""
    await asyncio.sleep(delay)
    return await _wait(function(*args, **kwargs)) if function is not None else None


class LoopingCall:
    """Calls a function again and again."""

    def __init__(self, function: Function, *args: object, **kwargs: object) -> None:
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


async def maybe_deferred_to_future(given: object) -> Any:
    return await _wait(given)


deferred_to_future = maybe_deferred_to_future


class Reactor:
    """The event loop, for the calls that spiders make."""

    running = False

    def run(self, *args: object, **kwargs: object) -> None:
        """Run the crawls of all `CrawlerRunner` objects."""
        from shoal.scrapy.process import CrawlerRunner

        for runner in list(CrawlerRunner.waiting):
            runner.run_all()

    def stop(self) -> None:
        """Do nothing: the crawls end by themselves."""

    def callLater(self, delay: float, function: Function, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, lambda: function(*args, **kwargs))

    def callFromThread(self, function: Function, *args: object, **kwargs: object) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(lambda: function(*args, **kwargs))

    def callInThread(self, function: Function, *args: object, **kwargs: object) -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: function(*args, **kwargs))

    def seconds(self) -> float:
        return clock.time()


reactor = Reactor()


def install_reactor(*args: object, **kwargs: object) -> None:
    """Do nothing: Shoal has its own event loop."""
