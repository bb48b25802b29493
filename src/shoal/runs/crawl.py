"""One crawl, put together: spider, configuration, store, onion, engine, outputs.

The command line and a user's own program start crawls in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeVar

from shoal.config import Config, find_config_file, load_config, mask
from shoal.crawling.assembly import frontier_options, make_engine, make_scheduler, new_run_id
from shoal.crawling.engine import Engine
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.seeder import Source, start_requests, url_requests
from shoal.crawling.stats import Counters, Snapshot, Summary, Vitals
from shoal.errors import RunError, ShoalError, SinkError, StoreRewoundError
from shoal.fetch.resolving import look_up_many_names
from shoal.frontier import open_store
from shoal.ports import Fetcher, Frontier, Run, Sink, Store
from shoal.sinks import open_sink, sink_id
from shoal.sinks.collect import CollectSink
from shoal.sinks.drainer import Drainer
from shoal.spider import Spider

log = logging.getLogger("shoal.crawl")

_LAST_WORD = 5.0  # seconds that outputs have after a stop, if the frontier is a server's


def crawl(
    spider: type[Spider] | Spider,
    config: Config | Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    new_run: bool = False,
) -> Crawl:
    """Crawl with a spider.

    In a program without an event loop it runs to the end and returns the finished `Crawl` (``.items``, ``.summary``).
    Inside a running loop it returns at once: ``await`` it, or take its items as they come with ``async for``.
    """
    made = Crawl(spider, config, outputs=outputs, arguments=arguments, new_run=new_run)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_blocking(made)
    return made


class Stoppable(Protocol):
    """A crawl, or a worker's part in one."""

    def stop(self) -> None: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


C = TypeVar("C", bound=Stoppable)


def run_blocking(made: C, during: Callable[[C], Any] | None = None) -> C:
    """Run a crawl on an event loop of its own. SIGINT and SIGTERM end it in good order, a second one at once.

    ``during`` is a coroutine function that runs beside it, to show progress.
    """
    import uvloop

    async def main() -> None:
        beside = asyncio.create_task(during(made)) if during is not None else None
        try:
            with _signals(made, asyncio.get_running_loop()):
                await made
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    look_up_many_names()
    uvloop.run(main())
    return made


@contextmanager
def _signals(made: Stoppable, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Plain handlers, not the loop's: the second signal must be heard also while a callback blocks the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are someone else's
        return
    asked = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            os.write(2, b"\x1b[?25h\n" if os.isatty(2) else b"\n")  # a live panel hides the cursor
            os._exit(128 + number)
        asked = True
        loop.call_soon_threadsafe(made.stop)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Crawl:
    """A crawl that was asked for: awaitable once, or an async iterator over its items."""

    def __init__(
        self,
        spider: type[Spider] | Spider,
        config: Config | Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        new_run: bool = False,
        collect: bool = True,
        urls: Sequence[str] | None = None,
        store: Store | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """``collect`` keeps the items in ``.items`` when there are no outputs; turn it off for large crawls. ``urls``
        are crawled instead of the spider's own start requests. A process that has more than one crawl gives each its
        ``store``, which they share, and a ``fetcher`` if pages are not to be had in the usual way; it closes both."""
        self._urls = urls
        self._store = store
        self._fetcher = fetcher
        self.spider = spider(**(arguments or {})) if isinstance(spider, type) else spider
        if isinstance(config, Config):
            self.config = config
        else:
            self.config = load_config(
                file=find_config_file(os.environ),
                environ=os.environ,
                spider=self.spider.settings,
                spider_name=type(self.spider).__name__,
                code=config,
            ).config
        self.outputs = tuple(outputs)
        self.items: list[dict[str, Any]] = []
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        """Why the crawl could not go on to its end; also in the summary."""
        self.run: Run | None = None
        """What it works on. Set before it begins: the one to go on with, whichever others there are."""
        self.begun = asyncio.Event()
        """Its outputs are open, and it works."""
        self._new_run = new_run
        self._collect = collect and not outputs
        self._engine: Engine | None = None
        self._frontier: Frontier | None = None
        self._stop_asked = False

    def __await__(self) -> Generator[Any, None, Crawl]:
        return self._to_the_end().__await__()

    async def _to_the_end(self) -> Crawl:
        sink = CollectSink(self.items) if self._collect else None
        self.summary = await self._execute(sink)
        return self

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """The items as they come. Leaving the loop early ends the crawl; a crawl that failed raises at the end."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1000)
        sink = CollectSink(queue)

        async def execute() -> None:
            try:
                self.summary = await self._execute(sink)
            finally:
                await queue.put(None)

        task = asyncio.create_task(execute())
        try:
            while (item := await queue.get()) is not None:
                yield item
        finally:
            sink.leave()
            self.stop()
            await task
        if self.error is not None:
            raise self.error

    def stop(self, grace: float | None = None) -> None:
        """End in good order: finish what is in flight up to ``grace`` (default ``shutdown_grace``), and give the rest
        back."""
        self._stop_asked = True
        if self._engine is not None and not self._engine.stopping:
            grace = self.config.shutdown_grace if grace is None else grace
            log.warning("stopping: what is in flight has %g s to end", grace)
            self._engine.stop(grace)

    @property
    def stopping(self) -> bool:
        """It was asked to end."""
        return self._stop_asked

    def halt(self, halted: bool) -> None:
        """While the run is paused: what is in flight is ended, what was leased ahead goes back."""
        if self._engine is not None:
            self._engine.halt(halted)

    async def snapshot(self) -> Snapshot | None:
        """The crawl at this moment; None before it has begun."""
        return None if self._engine is None else await self._engine.snapshot()

    def vitals(self) -> Vitals:
        """What it knows of itself."""
        engine = self._engine
        return Vitals(
            worker=f"{socket.gethostname()}-{os.getpid()}",
            run_id="" if self.run is None else self.run.run_id,
            spider=self.spider.spider_name(),
            counters=Counters() if engine is None else engine.counters,
            in_flight=0 if engine is None else engine.in_flight,
            went_round=None if engine is None else engine.went_round,
            frontier=self._frontier,
        )

    # -- putting it together

    async def _execute(self, collector: Sink | None) -> Summary:
        if self.summary is not None or self._engine is not None:
            raise RunError("this crawl has run already; make another one")
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            store = self._store or await self._open_store(stack)
            run = self.run = self.run or await self.choose_run(store)
            frontier = self._frontier = await store.frontier(run.run_id, frontier_options(self.config))
            if run.state != "running" and not (await frontier.stats()).finished:
                run = self.run = await store.transition(run.run_id, "running")
            shared = store.shared or self._store is not None  # another crawl may keep a host from this one
            scheduler = make_scheduler(self.spider, self.config, frontier, shared=shared)
            passing = self._store is None and self.config.frontier.startswith("memory:")
            drainers = await self._open_outputs(frontier, collector)
            engine = self._engine = make_engine(
                self.spider, self.config, scheduler, stack, drainers,
                source=self._source(), shared=shared, keep_items=self.config.items.keep and not passing,
                fetcher=self._fetcher,
            )  # fmt: skip
            self.begun.set()
            while True:
                ended = False
                try:
                    if self._stop_asked:
                        engine.stop()
                    await engine.run()
                    ended = scheduler.limit_reached or (await frontier.stats()).finished
                except ShoalError as exc:
                    self.error = exc
                finally:
                    # A run in memory of its own can't go on later: what there is now is all there will be.
                    patient = ended or not store.shared
                    rewound = await self._finish_outputs(drainers, ended or passing, patient=patient)
                if self.error is None and ended and not rewound:
                    rewound = not await self._finish_run(store, frontier, run.run_id)
                if not rewound or self.error is not None or engine.stopping:
                    break
                try:
                    await engine.start_over()
                except ShoalError as exc:
                    self.error = exc
                    break
            if self.error is not None:
                log.error("the crawl failed: %s", self.error)
            return await self._summarize(run, frontier, scheduler, started)

    async def _finish_run(self, store: Store, frontier: Frontier, run_id: str) -> bool:
        """The run is over. False if the store went back in time meanwhile, so that it is not."""
        try:
            with suppress(RunError):  # it was cancelled in this moment
                await store.transition(run_id, "finished")
            await frontier.lease(0, 0.0)
        except StoreRewoundError:
            with suppress(RunError):
                await store.transition(run_id, "running")
            return False
        return True

    async def _open_store(self, stack: AsyncExitStack) -> Store:
        store = await open_store(self.config.frontier)
        stack.push_async_callback(store.close)
        return store

    async def _finish_outputs(self, drainers: Sequence[Drainer], finished: bool, *, patient: bool) -> bool:
        """Unless ``patient``, a server that is away is not waited for: the next to work on the run goes on. True if the
        store went back in time, so that there may be more to do."""
        rewound = False
        for drainer in drainers:
            try:
                async with asyncio.timeout(None if patient else _LAST_WORD):
                    await drainer.finish(finished)
            except StoreRewoundError:
                rewound = True
            except ShoalError as exc:
                self.error = self.error or exc
            except TimeoutError:
                log.warning("an output was not brought to its end; the next process goes on with it")
        return rewound

    @property
    def words(self) -> dict[str, Any]:
        """What it was asked for; kept with a run that it begins."""
        return {
            "start_urls": [str(url) for url in (self.spider.start_urls if self._urls is None else self._urls)][:100],
            "arguments": {name: repr(value) for name, value in self.spider.arguments.items()},
        }

    async def choose_run(self, store: Store) -> Run:
        """The run to go on with, or a new one."""
        name, start = self.spider.spider_name(), self.words
        if not self._new_run:
            for run in await store.list_runs(name):
                if run.state == "finished" and self._urls is not None:
                    break  # its URLs were others, or are done
                if run.state != "cancelled" and "seeds" not in run.settings:  # a fleet's run is its workers' alone
                    if run.settings != start:
                        log.warning(
                            "run %s began with other start URLs or arguments; it goes on with its own", run.run_id
                        )
                    return run
        run = Run(run_id=new_run_id(), spider=name, state="running", created_at=time.time(), settings=start)
        return await store.create_run(run)

    def _source(self) -> Source:
        urls = self._urls
        return (lambda: start_requests(self.spider)) if urls is None else (lambda: url_requests(urls))

    async def _open_outputs(self, frontier: Frontier, collector: Sink | None) -> list[Drainer]:
        self._check_outputs()
        assert self.run is not None
        drainers = [
            Drainer(frontier, open_sink(spec, run_id=self.run.run_id, on_reject=self._count_rejects), sink_id(spec))
            for spec in self.outputs
        ]
        if collector is not None:  # a role of its own each time: this program wants the items from the first on
            drainers.append(Drainer(frontier, collector, "collect-" + secrets.token_hex(8)))
        started: list[Drainer] = []
        try:
            for drainer in drainers:
                await drainer.start()
                started.append(drainer)
        except BaseException:
            for drainer in started:
                await drainer.abandon()
            raise
        return drainers

    def _count_rejects(self, count: int) -> None:
        """Items that an output can't take."""
        if self._engine is not None:
            self._engine.counters.item_errors += count

    def _check_outputs(self) -> None:
        identities = [sink_id(spec) for spec in self.outputs]
        for spec, identity in zip(self.outputs, identities, strict=True):
            if identities.count(identity) > 1:
                raise SinkError(f"{mask(spec)} is given twice as an output")
            scheme, _, path = self.config.frontier.partition(":///")
            if scheme == "sqlite" and identity.partition("?")[0] == os.path.realpath(path):
                raise SinkError(f"{spec} is the frontier's own file; write the items to another one")

    async def _summarize(self, run: Run, frontier: Frontier, scheduler: Scheduler, started: float) -> Summary:
        assert self._engine is not None
        error = self.error
        finished = (await frontier.stats()).finished
        state = "finished" if finished else "limit" if scheduler.limit_reached else "stopped"
        return Summary(
            run_id=run.run_id,
            spider=run.spider,
            state="failed" if error is not None else state,
            error="" if error is None else str(error),
            stats=await frontier.stats(),
            dead_kinds=await frontier.dead_kinds(),
            counters=self._engine.counters,
            elapsed=time.monotonic() - started,
            outputs=self.outputs,
        )
