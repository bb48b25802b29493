"""Pools of workers that can be scaled: local processes, a Compose service, a Kubernetes deployment."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple, Protocol

from shoal.errors import ConfigError
from shoal.runs.child import RestartBackoff, command

log = logging.getLogger("shoal.autoscale")

_KILL_AFTER = 15.0  # seconds that a worker has to stop
_COMMAND_TIMEOUT = 60.0  # seconds that docker or kubectl may take


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


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float


class LocalPool:
    """Processes on this machine. They stop when the process that made the pool ends, even if it is killed."""

    def __init__(self, arguments: Sequence[str], logs: Path | None = None) -> None:
        """``arguments`` are those of `shoal worker`. The output of workers goes to files in the folder ``logs``.
        Without it, only the last line of a worker that fails is logged."""
        self._command, self._environ = command(["worker", *arguments], tethered=True)
        self._logs = logs
        self._count = 0
        self._working: list[_Child] = []
        self._stopping: list[tuple[_Child, float]] = []
        self._backoff = RestartBackoff()
        self._not_before = 0.0

    async def current(self) -> int:
        self._check()
        return len(self._working)

    async def scale(self, count: int) -> None:
        self._check()
        while len(self._working) > count:
            self._drain(self._working.pop())
        while len(self._working) < count and time.monotonic() >= self._not_before:
            try:
                self._working.append(self._start())
            except OSError as exc:  # no memory, too many processes, disk full
                log.warning("a worker could not be started: %s; trying again", exc)
                self._not_before = time.monotonic() + self._backoff.longest

    async def close(self) -> None:
        """Stop all workers. Those that do not stop in time are killed."""
        await self.scale(0)
        while self._stopping:
            await asyncio.sleep(0.05)
            self._check()

    def _start(self) -> _Child:
        output = self._open_output()
        try:
            process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.PIPE, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            output.close()
            raise
        return _Child(process, output, time.monotonic())

    def _open_output(self) -> IO[bytes]:
        self._count += 1
        if self._logs is None:
            return TemporaryFile()
        name = self._logs / f"worker-{os.getpid()}-{self._count}.log"
        return open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b")

    def _drain(self, child: _Child) -> None:
        """Close the standard input of a worker. That stops it."""
        assert child.process.stdin is not None
        child.process.stdin.close()
        self._stopping.append((child, time.monotonic() + _KILL_AFTER))

    def _check(self) -> None:
        """Handle workers that have ended."""
        now = time.monotonic()
        for child in [child for child in self._working if child.process.poll() is not None]:
            self._working.remove(child)
            self._ended(child, now)
        for child, until in list(self._stopping):
            if child.process.poll() is not None:
                self._stopping.remove((child, until))
                child.output.close()
            elif now > until:
                child.process.kill()

    def _ended(self, child: _Child, now: float) -> None:
        """Log why a worker ended. It is replaced with backoff, because the next one may fail too."""
        code = child.process.returncode
        if code < 0:
            log.warning("worker process %d was killed by signal %d; restarting it", child.process.pid, -code)
        elif code > 0:
            last = _last_line(child.output)
            log.warning("worker process %d failed with exit code %d: %s", child.process.pid, code, last)
        self._not_before = now + self._backoff.pause_after(now - child.started)
        child.output.close()
        assert child.process.stdin is not None
        child.process.stdin.close()


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
