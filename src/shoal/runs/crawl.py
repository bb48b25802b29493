"""A crawl in this process: `crawl()` and `Crawl`, for the command line and for programs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Protocol, TypeVar

from shoal.config import Config, NewRunPolicy, Resolved, config_for, mask
from shoal.config.checks import frontier_kind
from shoal.config.layers import keys, nearest
from shoal.crawling.run_queue import frontier_options
from shoal.crawling.seeder import Source, start_requests, url_requests
from shoal.crawling.stats import Summary
from shoal.errors import ConfigError, RunError, ShoalError, SinkError, SpiderError, StoreBusyError, StoreError
from shoal.fetch.resolving import allow_many_lookups
from shoal.frontier import file_of, open_store
from shoal.frontier.local.places import ProcessWatch
from shoal.frontier.local.server import open_owned, patiently, serving
from shoal.frontier.memory import MemoryStore
from shoal.messages import did_you_mean
from shoal.ports import Frontier, Run, Sink, Store
from shoal.runs.lifecycle import Participant
from shoal.runs.plan import Output, Plan
from shoal.runs.recorder import RecordedProcess
from shoal.runs.run_choice import WantedRun, choose_run, start_settings
from shoal.runs.worker_session import has_heartbeats, make_worker_session
from shoal.sinks import is_shared, named_for_run, sink_id
from shoal.sinks.drainer import Drainer
from shoal.sinks.files import CollectSink
from shoal.sinks.patience import Patience
from shoal.sinks.takeover import ROLE_TTL, StandbyDrainer
from shoal.spider import Spider, create_spider, importing
from shoal.system import chance

if TYPE_CHECKING:
    from shoal.fetch.sessions.stored import SessionImport

log = logging.getLogger("shoal.crawl")
frontier_log = logging.getLogger("shoal.frontier")

_NOT_AWAITED = (
    "this crawl has not run; in a notebook or in async code, write: done = await crawl(...), "
    "or: async for item in crawl(...)"
)
_OUTPUT_TIMEOUT = 5.0
"""Seconds that outputs have after a stop, if the frontier is on a server."""
_OUTPUT_SILENCE = 15.0
"""Longer than a healthy server needs for a transaction or a part, shorter than its timeout."""


def crawl(
    spider: type[Spider] | Spider,
    config: Config | Resolved | Mapping[str, object] | None = None,
    *,
    outputs: Sequence[str] = (),
    arguments: Mapping[str, object] | None = None,
    new_run: bool = False,
    **unknown: Never,
) -> Crawl:
    """Crawl with a spider. ``arguments`` are those of the spider class.

    Without a running event loop, it crawls to the end and returns the finished `Crawl` (``.items``, ``.summary``).
    Inside a running loop (in a notebook, or in async code) it returns at once: write ``done = await crawl(...)``, or
    read the items with ``async for item in crawl(...)``. Items have the types that the spider yielded.
    """
    if importing:
        raise SpiderError('crawl() would run whenever this file is imported; put it below `if __name__ == "__main__":`')
    for name in unknown:
        raise ConfigError(_where_it_belongs(name))
    if isinstance(spider, type) and issubclass(spider, Spider):
        spider = create_spider(spider, arguments or {})
    new_crawl = Crawl(spider, config, outputs=outputs, new_run=new_run)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_blocking(new_crawl)
    new_crawl.must_be_awaited = True
    return new_crawl


class Stoppable(Protocol):
    """A crawl, a worker or a node."""

    def stop(self) -> None: ...

    def __await__(self) -> Generator[object, None, object]: ...


C = TypeVar("C", bound=Stoppable)


def run_blocking(work: C, during: Callable[[C], Coroutine[object, None, None]] | None = None) -> C:
    """Run a crawl on its own event loop. SIGINT and SIGTERM shut it down; a second one ends the process at once.

    ``during``: a coroutine function that runs at the same time, to show progress.
    """
    import uvloop

    async def main() -> None:
        beside = asyncio.create_task(during(work)) if during is not None else None
        try:
            with _signals(work, asyncio.get_running_loop()):
                await work
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    allow_many_lookups()
    uvloop.run(main())
    return work


@contextmanager
def _signals(work: Stoppable, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Stop at the first SIGINT or SIGTERM, and exit at the second. The handlers are not those of the event loop: the
    second signal must work also while a callback blocks the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    stop_asked = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal stop_asked
        if stop_asked:
            os.write(2, b"\x1b[?25h\n" if os.isatty(2) else b"\n")  # the live panel hides the cursor
            os._exit(128 + number)
        stop_asked = True
        loop.call_soon_threadsafe(work.stop)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Crawl(Participant):
    """A crawl: awaitable once, or an async iterator over its items."""

    def __init__(
        self,
        spider: type[Spider] | Spider,
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        outputs: Sequence[str] = (),
        new_run: bool = False,
        collect: bool = True,
        urls: Sequence[str] | None = None,
        store: Store | None = None,
        networks: Sequence[str] | None = None,
    ) -> None:
        """``config`` changes the file, the spider's settings and the environment: see `load_config`.
        ``collect``: keep the items in ``.items`` when there are no outputs. Turn it off for large crawls. ``urls``:
        crawl these instead of the spider's start requests. A process with several crawls passes the same ``store`` to
        all of them, and closes it itself. ``networks``: the only private addresses that may be contacted; None: all."""
        self._urls = urls
        self._store = store
        self._networks = networks
        self._has_started = False
        self.must_be_awaited = False
        """Warn if the program drops this crawl without an ``await``."""
        spider = _spider_of(spider)
        super().__init__(spider, config_for(config, spider.settings, type(spider).__name__))
        self.outputs = self.spider.with_outputs(outputs)
        self._items: list[Any] | None = None
        self._summary: Summary | None = None
        self.run: Run | None = None
        """Set it before the crawl begins to continue that run, whatever other runs exist."""
        self.started = asyncio.Event()
        """Set when the outputs are open and the crawl begins."""
        self.imported: SessionImport | None = None
        """Cookies that the run has before its first page. Set it before the crawl begins."""
        self.command = ""
        """The command that continues the run, for its reports. Empty if there is none."""
        self.serves = False
        """Let other processes of this machine use the store while the crawl works."""
        self.has_heartbeats = store is None
        """Send heartbeats, so that other processes get its pages soon after it was killed."""
        self._new_run = new_run
        self._created: list[Run] = []
        self._collect = collect and not self.outputs

    def __repr__(self) -> str:
        name = type(self.spider).__name__
        return f"<Crawl of {name}>" if self._has_started else f"<Crawl of {name}, {_NOT_AWAITED}>"

    def __del__(self) -> None:
        if not self._has_started and self.must_be_awaited:
            warnings.warn(f"crawl({type(self.spider).__name__}): {_NOT_AWAITED}", RuntimeWarning, stacklevel=2)

    @property
    def items(self) -> list[Any]:
        """The items, in the types that the spider yielded. RunError if the crawl was not awaited, or if its items are
        elsewhere: in its outputs, or in the hands of an ``async for``."""
        if not self._has_started:
            raise RunError(_NOT_AWAITED)
        if self._items is None:
            where = ", ".join(map(mask, self.outputs)) or "the `async for` that reads this crawl"
            raise RunError(f"this crawl keeps no items in memory; they go to {where}")
        return self._items

    @property
    def summary(self) -> Summary | None:
        """How the crawl ended; None until then. RunError if it was not awaited."""
        if not self._has_started:
            raise RunError(_NOT_AWAITED)
        return self._summary

    def __iter__(self) -> Iterator[Any]:
        """The items of a crawl that has run. RunError says what to write if it was not awaited."""
        return iter(self.items)

    def __await__(self) -> Generator[object, None, Crawl]:
        return self._run_to_end().__await__()

    async def _run_to_end(self) -> Crawl:
        sink = None
        if self._collect and not self._has_started:
            self._items = []
            sink = CollectSink(self._items, self.spider.item_types.restore)
        self._summary = await self._execute(sink)
        return self

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """The items as they arrive. Leaving the loop early stops the crawl. A failed crawl raises at the end."""
        queue: asyncio.Queue[Any] = asyncio.Queue(1000)
        sink = CollectSink(queue, self.spider.item_types.restore)

        async def execute() -> None:
            try:
                self._summary = await self._execute(sink)
            finally:
                await queue.put(None)

        task = asyncio.create_task(execute())
        item: object = ()
        try:
            while (item := await queue.get()) is not None:
                yield item
        finally:
            if item is not None:
                sink.leave()
                self.stop()
            await task
        if self.error is not None:
            raise self.error

    @property
    def stopping(self) -> bool:
        """Whether the crawl is shutting down: ``stop`` was called, or the run was cancelled or has ended."""
        return self._stop_asked or (self._life is not None and (self._life.stopping or self._life.is_over))

    async def poll_state(self) -> None:
        """Do at once what the state of the run asks for: pause, continue, or stop."""
        if self._life is not None:
            await self._life.poll_state()

    @property
    def _run_id(self) -> str:
        return "" if self.run is None else self.run.run_id

    async def _execute(self, collector: Sink | None) -> Summary:
        if self._has_started:
            raise RunError("this crawl has already run; make another one")
        self._has_started = True
        async with AsyncExitStack() as stack:
            store = self._store or await self._open_store(stack)
            run = self.run
            if run is None:
                run = self.run = await self.choose_run(store)
                stack.push_async_exit(partial(self._delete_unbegun, store, run))
                await self._report_finished(store, run, "use --new-run to crawl again (in code: new_run=True)")
            self.outputs = named_for_run(self.outputs, run)
            self._check_outputs()
            if self.imported is not None and not isinstance(store, MemoryStore):
                from shoal.fetch.sessions.stored import import_session  # few crawls need it

                await import_session(store, await store.frontier(run.run_id), run.run_id, self.imported)
            summary = await self._take_part(store, run, self._plan(store, collector))
            if self.error is not None:
                log.error("the crawl failed: %s", self.error)
            return summary

    def _plan(self, store: Store, collector: Sink | None) -> Plan:
        is_private = self._store is None and self.config.frontier.startswith("memory:")
        shared = store.shared or self._store is not None  # another crawl may use the same hosts
        session = None
        if self.has_heartbeats and self.run is not None:
            session = make_worker_session(self.config, self.run.run_id, self._worker_id)
        return Plan(
            spider=self.spider,
            config=self.config,
            options=frontier_options(self.config),
            open_outputs=partial(self._open_outputs, collector, shared=store.shared),
            source=self._source(),
            networks=self._networks,
            shared=shared,
            output_names=self.outputs,
            resumes=True,
            watches=self._store is not None or self.serves,
            is_private=is_private,
            keep_items=self.config.items.keep and not is_private,
            output_timeout=_OUTPUT_TIMEOUT if store.shared else None,
            output_silence=None if is_private or not any(map(is_shared, self.outputs)) else _OUTPUT_SILENCE,
            process=RecordedProcess(
                self._worker_id,
                "crawl" if self._store is None else "server",
                address=self.config.frontier if has_heartbeats(self.config.frontier) else "",
                command=self.command,
            ),
            session=session,
            imported=self.imported if isinstance(store, MemoryStore) else None,
            on_begin=self.started.set,
        )

    async def _open_store(self, stack: AsyncExitStack) -> Store:
        if self.serves and frontier_kind(self.config.frontier) in ("memory", "sqlite"):
            served = await open_served(self.config.frontier, self.spider.spider_name(), stack, self._poll_now)
            self.address = served.address or self.address
            return served.store
        store = await open_store(self.config.frontier)
        stack.push_async_callback(store.close)
        return store

    def _poll_now(self) -> None:
        if self._life is not None and self._life.engine is not None:
            self._life.engine.poll_now()

    @property
    def start_settings(self) -> dict[str, object]:
        """The start URLs and arguments. They are stored with a run that this crawl creates."""
        return start_settings(self.spider, self._urls)

    async def choose_run(self, store: Store) -> Run:
        """Find the run to resume, or create one."""
        policy: NewRunPolicy = "always" if self._new_run else self.config.new_run
        if policy == "never" and self._urls is not None:
            policy = "after_finish"  # the finished run had other URLs, or all of them are done
        wanted = WantedRun(
            spider=self.spider.spider_name(), project=self.config.project_name, start=self.start_settings, new=policy
        )
        return await choose_run(store, wanted, self._created.append)

    async def _delete_unbegun(self, store: Store, run: Run, kind: object, error: object, trace: object) -> None:
        """Delete the run if this crawl created it and failed to begin, for example because an output refuses it. On a
        shared store, another process that joined the run has pushed its start requests, and keeps it."""
        if kind is None or self.started.is_set() or run not in self._created:
            return
        with suppress(ShoalError):
            frontier = await store.frontier(run.run_id)
            if not (await frontier.stats()).pushed:
                await store.delete_run(run.run_id)

    def _source(self) -> Source:
        urls = self._urls
        return (lambda: start_requests(self.spider)) if urls is None else (lambda: url_requests(urls))

    async def _open_outputs(self, collector: Sink | None, frontier: Frontier, *, shared: bool) -> list[Output]:
        """Open the outputs. On a shared store, other processes may crawl the same run: one of them writes, and the
        others stand by."""
        assert self._life is not None
        patience = self.config.items.patience
        drainers: list[Drainer | StandbyDrainer] = [
            await self._standby_drainer(frontier, spec)
            if shared
            else Drainer(frontier, self._open_sink(spec), await self._life.role_of(spec), patience=Patience(patience))
            for spec in self.outputs
        ]
        if collector is not None:  # a new role each time: this program reads the items from the first one on
            role, ttl = "collect-" + chance.token_hex(8), min(ROLE_TTL, self.config.lease.ttl)
            drainers.append(
                StandbyDrainer(frontier, lambda: collector, role, ttl=ttl)  # a process that is fenced takes it again
                if shared
                else Drainer(frontier, collector, role)
            )
        started: list[Drainer | StandbyDrainer] = []
        try:
            for drainer in drainers:
                await drainer.start()
                started.append(drainer)
        except BaseException:
            for drainer in started:
                await drainer.abandon()
            raise
        return [*drainers]

    def _check_outputs(self) -> None:
        identities = [sink_id(spec) for spec in self.outputs]
        for spec, identity in zip(self.outputs, identities, strict=True):
            if identities.count(identity) > 1:
                raise SinkError(f"the output {mask(spec)} is given twice; remove one of them")
            scheme, _, path = self.config.frontier.partition(":///")
            if scheme == "sqlite" and _is_same_file(identity.partition("?")[0], path):
                raise SinkError(f"{spec} is the file of the frontier; choose another file for the items")


def _where_it_belongs(name: str) -> str:
    """What to write instead of a keyword that `crawl` does not take."""
    if name in keys(Config):
        return f"crawl() has no argument {name!r}, it is a setting: write crawl(..., {{{name!r}: ...}})"
    hint = did_you_mean(name, ("config", "outputs", "arguments", "new_run")) or nearest(Config, name) or "."
    return (
        f"crawl() has no argument {name!r}{hint} Settings belong into crawl(..., {{KEY: ...}}), arguments of the "
        f"spider into crawl(..., arguments={{{name!r}: ...}})"
    )


def _spider_of(spider: object) -> Spider:
    if isinstance(spider, Spider):
        return spider
    if isinstance(spider, type) and issubclass(spider, Spider):
        return create_spider(spider, {})
    hint = ": import its class, or use `shoal run`" if isinstance(spider, str | os.PathLike) else ""
    if isinstance(spider, str) and "://" in spider:
        hint = ": put the URL into start_urls of a spider, or use `shoal crawl`"
    raise SpiderError(f"a crawl needs a class that inherits from shoal.Spider, not {spider!r:.80}{hint}")


def _is_same_file(first: str, second: str) -> bool:
    """Whether two paths lead to one file, which may not exist yet."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


# -- a store that other processes of this machine use while a crawl, or a server, works


_PATIENCE = 1.5
"""Seconds that a file may be busy: an owner exits shortly after its last client."""


class ServedStore(NamedTuple):
    """A store, and where other processes find it; empty if they cannot."""

    store: Store
    address: str


async def open_served(
    url: str, name: str, stack: AsyncExitStack, on_change: Callable[[], None] = lambda: None
) -> ServedStore:
    """Open a store in memory or in a file, and serve it until the stack is closed. If the socket cannot be created, log
    a warning: this process needs no socket.

    ``name``: how a store in memory is announced. ``on_change``: called when another process changed something."""
    file, watch = file_of(url), ProcessWatch()
    store = await patiently(partial(open_owned, file, watch), StoreBusyError, _PATIENCE)
    stack.push_async_callback(store.close)
    try:
        server = await stack.enter_async_context(serving(store, watch, file, name))
        server.on_change = on_change
    except StoreError as exc:
        frontier_log.warning("other commands cannot use this frontier while this process runs: %s", exc)
        return ServedStore(store, "")
    return ServedStore(store, url if file is not None else f"local:{server.path}")
