"""Scales workers with the depth of the queue. `step` decides, as a function of values. `Autoscaler` polls the run and
scales a pool."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Protocol

from msgspec import Struct

from shoal.errors import ConfigError, FrontierError, RunError
from shoal.frontier import open_store
from shoal.ports import Inspection, Store
from shoal.runs.supervisor import RestartBackoff, Supervisor, WorkerProcess, start_process
from shoal.system import clock

log = logging.getLogger("shoal.autoscale")

_TIMEOUT = 3.0  # seconds that the frontier has to answer
_KILL_AFTER = 15.0  # seconds that a worker has to stop
_COMMAND_TIMEOUT = 60.0  # seconds that docker or kubectl may take


class PoolLimits(Struct, frozen=True, kw_only=True):
    """The limits for the number of workers."""

    per_worker: int = 1000
    """Requests per worker."""
    min: int = 1
    max: int = 50
    cool_down: float = 60.0
    """Seconds for which fewer workers must be enough before any is stopped."""


class Scale(Struct, frozen=True):
    """The number of workers, and since when fewer would be enough."""

    workers: int
    lower_since: float | None = None
    enough: int = 0
    """The largest number that was needed since then."""


def wanted(depth: int, limits: PoolLimits) -> int:
    """The number of workers for a queue of this depth."""
    return min(limits.max, max(limits.min, -(-depth // limits.per_worker)))


def step(scale: Scale, depth: int, limits: PoolLimits, now: float) -> Scale:
    """The next scale for a queue of this depth.

    It grows at once: the depth is work that exists, not a peak of a rate. It shrinks only if fewer workers were enough
    for the whole cool-down, and then to the largest number that was needed during it. So a queue that swings around a
    threshold changes nothing.
    """
    want = wanted(depth, limits)
    workers = min(scale.workers, limits.max)
    if want >= workers:
        return Scale(want)
    since = now if scale.lower_since is None else scale.lower_since
    enough = max(scale.enough, want)
    return Scale(workers, since, enough) if now - since < limits.cool_down else Scale(enough)


class Autoscaler:
    """Scales a pool with the queue of a run. ``await`` it once. It returns when the run is over, or after ``stop``."""

    def __init__(self, frontier: str, run_id: str, pool: Pool, limits: PoolLimits, *, every: float) -> None:
        """``frontier``: the URL of the store. ``every``: seconds between polls."""
        self._url = frontier
        self._run_id = run_id
        self._pool = pool
        self._limits = limits
        self._every = every
        self._asked = asyncio.Event()
        self._scale: Scale | None = None
        self._away = False
        self._over = False

    def stop(self) -> None:
        """Stop scaling. Local workers stop too; those that another program manages keep running."""
        self._asked.set()

    def __await__(self) -> Generator[object, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Scale until the run is finished, cancelled or removed, and its workers have stopped."""
        store = await open_store(self._url)
        try:
            frontier = await self._open(store)
            while not self._asked.is_set():
                depth = await self._depth(store, frontier)
                if self._over:
                    break
                await self._scale_pool(depth)
                await self._wait()
            while self._over and not self._asked.is_set():
                await self._pool.scale(0)
                if await self._pool.current() == 0:
                    break
                await self._wait()
        finally:
            await self._pool.close()
            with suppress(FrontierError, TimeoutError):
                async with asyncio.timeout(_TIMEOUT):
                    await store.close()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), self._every)

    async def _open(self, store: Store) -> Inspection:
        """Open the frontier. A finished run that has new requests (`shoal retry-failed`) becomes running again."""
        run = await store.get_run(self._run_id)
        if run is None:
            raise RunError(f"there is no run {self._run_id}")
        frontier = await store.frontier(run.run_id)
        if run.state == "finished" and not (await frontier.stats()).finished:
            with suppress(RunError):  # another process was first
                await store.transition(run.run_id, "running", among=["finished"])
        return frontier

    async def _depth(self, store: Store, frontier: Inspection) -> int | None:
        """The number of ready and leased requests. None if the frontier does not answer, or the run is over.

        Requests that wait for their next attempt do not count: more workers would not make them due earlier. The depth
        of a paused run is 0.
        """
        try:
            async with asyncio.timeout(_TIMEOUT):
                state = await store.run_state(self._run_id)
                if state in (None, "finished", "cancelled"):
                    log.info("run %s is %s", self._run_id, state or "removed")
                    self._over = True
                    return None
                stats = await frontier.stats()
        except (FrontierError, TimeoutError) as exc:
            if not self._away:
                why = str(exc) or f"no answer in {_TIMEOUT:g} s"
                log.warning("the number of workers stays the same: the frontier cannot be reached: %s", why)
            self._away = True
            return None
        if self._away:
            log.warning("the frontier is back")
        self._away = False
        return 0 if state == "paused" else stats.ready + stats.leased

    async def _scale_pool(self, depth: int | None) -> None:
        """Scale the pool, also if the number has not changed: workers may have died."""
        if self._scale is None:
            workers = await self._pool.current()
            if workers is None:
                return
            self._scale = Scale(workers)
        if depth is not None:
            before, self._scale = self._scale.workers, step(self._scale, depth, self._limits, clock.monotonic())
            if self._scale.workers != before:
                log.info("%s for %s (was %d)", _count(self._scale.workers, "worker"), _count(depth, "request"), before)
        await self._pool.scale(self._scale.workers)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


# -- pools of workers: local processes, a Compose service, a Kubernetes deployment


class Pool(Protocol):
    """A group of workers. A step that fails is logged, and tried again with the next call."""

    async def current(self) -> int | None:
        """The number of workers. None if it is not known now."""
        ...

    async def scale(self, count: int) -> None:
        """Start or stop workers until there are ``count``. Stopped workers release their leases; dead ones are
        replaced."""
        ...

    async def close(self) -> None:
        """Stop managing the workers."""
        ...


class LocalPool(Supervisor):
    """Processes on this machine. They stop when the process that made the pool ends, even if it is killed."""

    def __init__(self, arguments: Sequence[str], logs: Path | None = None) -> None:
        """``arguments`` are those of `shoal worker`. The output of workers goes to files in the folder ``logs``.
        Without it, only the last line of a worker that fails is logged."""
        super().__init__(self._start_worker)
        self._words = ["worker", *arguments]
        self._logs = logs
        self._count = 0
        self._backoff = RestartBackoff()
        self._not_before = 0.0

    async def current(self) -> int:
        return len(self.working)

    async def scale(self, count: int) -> None:
        while len(self.working) > count:
            self.retire()
        while len(self.working) < count and clock.monotonic() >= self._not_before:
            try:
                self.add()
            except OSError as exc:  # no memory, too many processes, disk full
                log.warning("a worker could not be started: %s; trying again", exc)
                self._not_before = clock.monotonic() + self._backoff.longest

    async def close(self) -> None:
        self.stop()
        await self.wait(_KILL_AFTER)

    def _start_worker(self) -> WorkerProcess:
        output = self._open_output()
        try:
            process = start_process(self._words, tethered=True, stdout=output, stderr=output)
        except OSError:
            output.close()
            raise
        process.output = output
        return process

    def _open_output(self) -> IO[bytes]:
        self._count += 1
        if self._logs is None:
            return TemporaryFile()
        name = self._logs / f"worker-{os.getpid()}-{self._count}.log"
        return open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b")

    async def _watch(self, process: WorkerProcess) -> int:
        """Log why a worker failed. One that exits is replaced with backoff, because the next one may fail too."""
        code = await super()._watch(process)
        assert process.output is not None
        if code > 0 and not process.is_retired:
            last = _last_line(process.output)
            log.warning("worker process %d failed with exit code %d: %s", process.pid, code, last)
        if code >= 0:
            self._not_before = clock.monotonic() + self._backoff.pause_after(clock.monotonic() - process.started)
        process.output.close()
        return code


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


class CommandPool:
    """Workers that another program manages. It stops them with SIGTERM, and they keep running when the pool is
    closed."""

    def __init__(
        self, scale: Callable[[int], Sequence[str]], query: Sequence[str], count: Callable[[str], int]
    ) -> None:
        """``scale`` returns the command for a number of workers. ``query`` is the command whose output ``count`` turns
        into the number of workers. ConfigError if the program is not installed."""
        if shutil.which(query[0]) is None:
            raise ConfigError(f"command {query[0]!r} is not on the PATH; it is needed to start workers")
        self._scale = scale
        self._query = query
        self._read = count
        self._scaled_to: int | None = None
        self._problem = ""

    async def current(self) -> int | None:
        answer = await self._run(self._query)
        try:
            return None if answer is None else self._read(answer)
        except ValueError:
            self._warn(f"{' '.join(self._query)} answered {answer!r:.200}")
            return None

    async def scale(self, count: int) -> None:
        if count != self._scaled_to:
            self._scaled_to = None
            if await self._run(self._scale(count)) is not None:
                self._scaled_to = count

    async def close(self) -> None:
        pass

    async def _run(self, command: Sequence[str]) -> str | None:
        """The output of a command. None if it failed."""
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT):
                code, answer, errors = await _outcome(command)
        except OSError as exc:  # TimeoutError is an OSError
            self._warn(f"{' '.join(command)} could not be run: {exc.strerror or 'no answer'}")
            return None
        if code:
            self._warn(f"{' '.join(command)} failed: {errors.strip() or f'exit code {code}'}")
            return None
        self._problem = ""
        return answer

    def _warn(self, problem: str) -> None:
        """Log a problem once, until it changes or is over."""
        if problem != self._problem:
            log.warning("%s; trying again", problem)
        self._problem = problem


async def _outcome(command: Sequence[str]) -> tuple[int, str, str]:
    """The exit code, output and errors of a command. It is killed if this call is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        answer, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait(), answer.decode(errors="replace"), errors.decode(errors="replace")


def compose_pool(file: str, service: str = "worker") -> CommandPool:
    """The containers of one service in a Compose file."""
    compose = ["docker", "compose", "-f", file]
    return CommandPool(
        lambda count: [*compose, "up", "-d", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service],
        [*compose, "ps", "-q", service],
        lambda answer: len(answer.split()),
    )


def kubernetes_pool(deployment: str, namespace: str = "") -> CommandPool:
    """The replicas of a deployment, in the given namespace or in the default of kubectl."""
    kubectl = ["kubectl", *(["--namespace", namespace] if namespace else [])]
    return CommandPool(
        lambda count: [*kubectl, "scale", f"deployment/{deployment}", f"--replicas={count}"],
        [*kubectl, "get", f"deployment/{deployment}", "-o", "jsonpath={.spec.replicas}"],
        int,
    )
