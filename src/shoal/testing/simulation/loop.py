"""An event loop in virtual time. A seed decides which of the ready steps runs next."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from math import inf
from random import Random
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_STEP = 2e-5
"""At most so many seconds does a step take."""


class StuckError(AssertionError):
    """Nothing is ready and nothing is scheduled: somebody waits for a wake-up that never comes."""


class Process:
    """A simulated process: its tasks run in one loop with those of other processes, until it is killed."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.killed_at = inf
        self.thawed_at = -inf
        """When it continued for the last time."""
        self.wall_offset = 0.0
        """How far its clock of the time of day is ahead."""
        self.max_wall_offset = 0.0
        """How far it was ahead at most."""
        self.was_frozen = False
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._corpses: list[asyncio.Task[Any]] = []
        self._frozen: list[asyncio.Handle] | None = None
        self._at_end: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this process."""
        return self._loop.create_task(work, context=self.context)

    def run(self, work: Callable[[], T]) -> T:
        """Call a function as this process."""
        return self.context.run(work)

    def kill(self) -> None:
        """End it between two steps, as SIGKILL does: no further code of it runs, not even a ``finally``."""
        self.is_alive, self.killed_at = False, self._loop.time()
        self._frozen = None
        self._corpses = list(self._tasks)  # were they collected, their ``finally`` blocks would run
        while self._at_end:
            self._at_end.pop()()

    def on_kill(self, action: Callable[[], object]) -> None:
        """Call this when the process is killed: what the operating system does for a dead process."""
        self._at_end.append(action)

    def freeze(self) -> None:
        """Stop it, as SIGSTOP does. The time goes on."""
        self.was_frozen = True
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        """Continue it: everything that became ready meanwhile is ready now."""
        if self._frozen is not None:
            self.thawed_at = self._loop.time()
        frozen, self._frozen = self._frozen or [], None
        for handle in frozen:
            self._loop.add_ready(handle)

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Note a task of this process."""
        self._tasks.add(task)

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether a step of this process may run now. A frozen process keeps it, a dead one drops it."""
        if self._frozen is not None:
            self._frozen.append(handle)
            return False
        return self.is_alive


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated process", default=None)


def current_process() -> Process | None:
    """The simulated process whose code is running."""
    return _process.get()


class SimulatedTask(asyncio.Task[T]):
    """Has the same hash in each simulation of a seed, as code may loop over sets of tasks."""

    def __init__(self, work: Any, *, loop: SimulatedLoop, **options: Any) -> None:
        self._hash = next(loop.numbers)
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._hash


class SimulatedFuture(asyncio.Future[T]):
    """The same for a future."""

    def __init__(self, *, loop: SimulatedLoop) -> None:
        self._hash = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._hash


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs one step at a time. Of the steps that are ready, the seed picks the next one. When none is ready, the time
    jumps to the next timer."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._time = 1000.0
        self.steps = 0
        """How many steps have run."""
        self.numbers = count()
        """Of tasks and futures."""
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._time

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(loop=self)

    def add_ready(self, handle: asyncio.Handle) -> None:
        """Add a step that was kept back."""
        self._ready.append(handle)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and (scheduled[0].cancelled() or scheduled[0].when() <= self._time or not ready):
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self._time = max(self._time, timer.when())
                ready.append(timer)
        if not ready:
            if self._stopping:  # type: ignore[attr-defined]
                return
            raise StuckError(f"at {self._time:.3f} nothing is ready and nothing is scheduled")
        self._time += self._random.random() * _STEP
        pick = self._random.randrange(len(ready))
        ready.rotate(-pick)
        handle = ready.popleft()
        ready.rotate(pick)
        if handle.cancelled():
            return
        process = handle._context.get(_process)
        if process is None or process.takes(handle):
            self.steps += 1
            handle._run()

    def drop_tasks(self) -> None:
        """Close what is not done, when the simulation is over."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio offers no other way
            with suppress(BaseException):  # of a ``finally`` that needs a running loop
                task.get_coro().close()

    def _process_events(self, event_list: object) -> None:
        """There are no files to wait for."""

    def _write_to_self(self) -> None:
        """There are no other threads."""


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, SimulatedLoop)
    task: SimulatedTask[Any] = SimulatedTask(work, loop=loop, **options)
    context: contextvars.Context | None = options.get("context")
    process = _process.get() if context is None else context.get(_process)
    if process is not None:
        process.adopt(task)
    return task
