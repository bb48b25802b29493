"""A simulated world: processes in one loop, a network, a disk, a server, a site, and faults that a seed draws."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from shoal.config import plugins
from shoal.system import chance, clock, threads
from shoal.testing.simulation.backends import BACKENDS
from shoal.testing.simulation.database import SimulatedDatabase
from shoal.testing.simulation.loop import Process, SimulatedLoop, current_process
from shoal.testing.simulation.site import Site, SiteFetcher
from shoal.testing.simulation.store import SimulatedServer, open_store

T = TypeVar("T")
SCHEME = "simulated"
"""The scheme of the frontier and of the database for rows, and the name of the HTTP client."""
_EPOCH = 1_700_000_000.0


class Network:
    """Messages on it take a while. Some are lost, late, or arrive twice."""

    def __init__(self, loop: SimulatedLoop, random: Random) -> None:
        self._loop = loop
        self._random = random
        self.loss = 0.0
        """The share of messages that are lost."""
        self.lateness = 0.0
        """The share of messages that are late by seconds."""
        self.repetition = 0.0
        """The share of calls that arrive twice."""

    def send(self, receive: Callable[[], None], context: contextvars.Context, *, repeats: bool = False) -> None:
        """Send a message: call ``receive`` when it arrives, as the process of this context."""
        for _ in range(2 if repeats and self._random.random() < self.repetition else 1):
            if not self.loses():
                self._loop.call_later(self.delay(), receive, context=context)

    def loses(self) -> bool:
        return self._random.random() < self.loss

    def delay(self) -> float:
        if self._random.random() < self.lateness:
            return self._random.uniform(1.0, 20.0)
        return self._random.uniform(0.0002, 0.003)


class Disk:
    """How long work in threads takes, whether files can be written, and what a power failure leaves of them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._open, self._dup, self._write, self._sync, self._close = os.open, os.dup, os.write, os.fsync, os.close
        self._files: dict[int, Process] = {}
        """Which process has opened a file."""
        self._synced: dict[tuple[int, int], int] = {}
        """How much of a file survives a power failure, by device and inode."""
        self.is_full = False
        self.lateness = 0.0
        """The share of work that takes long."""

    def delay(self) -> float:
        """Seconds until a thread has done its work."""
        if self._random.random() < self.lateness:
            return self._random.uniform(5.0, 40.0)
        return self._random.uniform(0.0001, 0.002)

    def open(self, *args: Any, **options: Any) -> int:
        """Replaces ``os.open``."""
        return self._note_file(self._open(*args, **options))

    def dup(self, file: int) -> int:
        """Replaces ``os.dup``."""
        return self._note_file(self._dup(file))

    def _note_file(self, file: int) -> int:
        process = current_process()
        if process is not None:
            self._files[file] = process
        return file

    def close(self, file: int) -> None:
        """Replaces ``os.close``."""
        self._files.pop(file, None)
        self._close(file)

    def close_all(self, process: Process) -> None:
        """Close the files of a dead process, so that its locks end. Their numbers stay taken."""
        nothing = self._open(os.devnull, os.O_RDWR)
        for file in [file for file, owner in self._files.items() if owner is process]:
            del self._files[file]
            os.dup2(nothing, file)
        self._close(nothing)

    def write(self, file: int, data: bytes) -> int:
        """Replaces ``os.write``."""
        if self.is_full:
            size = self._random.randrange(len(data) + 1) if len(data) else 0
            if not size or self._random.random() < 0.5:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[:size]
        return self._write(file, data)

    def sync(self, file: int) -> None:
        """Replaces ``os.fsync``."""
        self._sync(file)
        stat = os.fstat(file)
        self._synced[stat.st_dev, stat.st_ino] = stat.st_size

    def lose_power(self, path: Path) -> int:
        """Cut off what was not synced of a file, at any byte. Returns how much that was."""
        stat = path.stat()
        synced = min(self._synced.get((stat.st_dev, stat.st_ino), 0), stat.st_size)
        size = self._random.randint(synced, stat.st_size)
        os.truncate(path, size)
        return stat.st_size - size


class World:
    """Everything in it depends on the seed alone."""

    def __init__(self, seed: int, folder: Path, backend: str | None = None) -> None:
        """``folder``: for the outputs, empty. ``backend``: the store of the server. None: the seed decides."""
        self.seed = seed
        self.folder = folder
        self.epoch = _EPOCH
        """The time of day when the time of the loop is 0. A scenario may change it before anything happens."""
        self.random = Random(seed)
        self.loop = SimulatedLoop(Random(self.random.random()))
        self.network = Network(self.loop, Random(self.random.random()))
        self.disk = Disk(Random(self.random.random()))
        self._entropy = Random(self.random.random())
        self.site = Site(self)
        self.machine = Process(self.loop, "machine")
        """Where the server runs, and all that goes on when a process is killed."""
        make_backend = BACKENDS[self.random.choice(sorted(BACKENDS)) if backend is None else backend]
        self.server = SimulatedServer(self, lambda clock: make_backend(clock, folder))
        self.database = SimulatedDatabase(self)
        self.processes: list[Process] = []
        self.errors: list[str] = []
        """What broke a law, or went wrong in a way that no part expects."""
        self.trace: list[str] = []
        """What happened. It is the same for the same seed."""

    # -- processes

    def process(self, name: str) -> Process:
        """A new process."""
        process = Process(self.loop, name)
        process.on_kill(lambda: self.disk.close_all(process))
        self.processes.append(process)
        return process

    @property
    def current(self) -> Process:
        return current_process() or self.machine

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.time() - 1000:9.3f} {text}".replace(f"{self.folder}/", ""))

    def require(self, is_kept: bool, violation: str) -> None:
        """Note that a law is broken. The end of the simulation judges it."""
        if not is_kept:
            self.errors.append(f"at {self.loop.time() - 1000:.3f} {violation}")

    # -- what replaces the ports

    def _time(self) -> float:
        return self.epoch + self.loop.time() + self.current.wall_offset

    def _process_id(self) -> int:
        process = current_process()
        return 1000 + (self.processes.index(process) if process in self.processes else 0)

    async def _call_in_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        done: asyncio.Future[T] = self.loop.create_future()

        def execute() -> None:
            outcome: asyncio.Future[T] = self.loop.create_future()
            try:
                outcome.set_result(work(*args, **options))
            except Exception as exc:  # the caller gets it
                outcome.set_exception(exc)
            self.loop.call_soon(_copy_outcome, outcome, done, context=caller.context)

        caller = self.current
        self.loop.call_later(self.disk.delay(), execute, context=caller.context)
        return await done

    def _call_in_pool(self, work: Callable[..., T], *args: Any) -> Coroutine[Any, Any, T]:
        return self._call_in_thread(work, *args)

    def _step_thread(self, name: str) -> SimulatedSteps:
        return SimulatedSteps(self)

    def _load_plugin(self, kind: str, name: str) -> Callable[..., Any] | None:
        if name != SCHEME:
            return None
        factories: dict[str, Callable[..., Any]] = {
            "frontiers": self._open_store,
            "fetchers": lambda config, user_agent: SiteFetcher(self.site),
            "sinks": self.database.sink,
        }
        return factories[kind]

    async def _open_store(self, url: str, *, readonly: bool = False) -> Any:
        return open_store(self)

    @contextmanager
    def ports(self) -> Iterator[None]:
        """Replace the clocks, threads, files and plugins of all code that runs meanwhile."""
        entropy = self._entropy
        replaced: list[tuple[object, dict[str, object]]] = [
            (clock, {"time": self._time, "monotonic": self.loop.time, "now": self.loop.time}),
            (chance, {name: getattr(entropy, name) for name in ("random", "uniform", "choice", "shuffle")}),
            (chance, {"randbits": entropy.getrandbits, "token_bytes": entropy.randbytes}),
            (chance, {"token_hex": lambda count=32: entropy.randbytes(count).hex()}),
            (chance, {"token_urlsafe": lambda count=32: entropy.randbytes(count).hex()}),
            (threads, {"call": self._call_in_thread, "start": _no_thread, "StepThread": self._step_thread}),
            (threads.Pool, {"call": self._call_in_pool}),
            (os, {name: getattr(self.disk, name) for name in ("open", "dup", "write", "close")}),
            (os, {"fsync": self.disk.sync, "getpid": self._process_id}),
            (socket, {"gethostname": lambda: "machine"}),
            (plugins, {"load": self._load_plugin, "names": lambda kind: [SCHEME]}),
        ]
        with ExitStack() as stack:
            for module, names in replaced:
                stack.enter_context(patch.multiple(module, **names))  # type: ignore[call-overload]
            yield

    # -- running

    def run(self, director: Callable[[World], Coroutine[Any, Any, T]]) -> T:
        """Run until the director returns."""
        self.loop.set_exception_handler(self._note_error)
        with self.ports():
            try:
                return self.loop.run_until_complete(director(self))
            finally:
                self._end()

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, Exception):
            self.errors.append(f"{context['message']}: {error!r} {context.get('future')!r}")

    def _end(self) -> None:
        """Drop all tasks. What they would still do has no effect."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda problem: None
        self.loop.set_exception_handler(lambda loop, context: None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that no step has reached
                self.loop.drop_tasks()
                self.loop.close()
                self.processes.clear()
                gc.collect()
        finally:
            sys.unraisablehook = hook


def _copy_outcome(source: asyncio.Future[T], target: asyncio.Future[T]) -> None:
    error = source.exception()
    if target.done():
        return
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


class SimulatedSteps:
    """See `shoal.system.threads.StepThread`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = asyncio.Lock()

    async def run(self, step: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self._world.disk.delay())
            return step()

    def stop(self, last: Callable[[], object] = lambda: None) -> None:
        last()


def _no_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Threads watch a process from outside its loop. In a simulation nothing blocks the loop."""
    return threading.Thread()
