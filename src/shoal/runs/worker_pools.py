"""Workers whose number can be changed: processes of this machine, services of Compose, a deployment of Kubernetes."""

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
from shoal.runs.child import command

log = logging.getLogger("shoal.autoscale")

_START_AFTER = (1.0, 30.0)  # seconds after the end of a worker that nobody asked to leave, first and at most
_STEADY = 60.0  # seconds after which a worker's end has nothing to do with the one before
_KILL_AFTER = 15.0  # seconds that a worker has to leave
_COMMAND_TIMEOUT = 60.0  # seconds that another program has for what it is asked


class Pool(Protocol):
    """Workers, however they are started. What could not be done is logged, and done when it is asked for again."""

    async def current(self) -> int | None:
        """How many there are; None when that can't be said now."""
        ...

    async def scale(self, count: int) -> None:
        """Let there be so many. Those who are too many give back what they have leased; the dead are replaced."""
        ...

    async def close(self) -> None:
        """Nobody looks after them any more."""
        ...


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float


class LocalPool:
    """Processes of this machine. They leave with whoever made the pool, also when that one is killed."""

    def __init__(self, arguments: Sequence[str], logs: Path | None = None) -> None:
        """``arguments`` are those of `shoal worker`. What workers print goes to files in the folder ``logs``, or
        nowhere: then only the last line of one that fails is told."""
        self._command, self._environ = command(["worker", *arguments], "shoal.runs.tethered")
        self._logs = logs
        self._count = 0
        self._working: list[_Child] = []
        self._leaving: list[tuple[_Child, float]] = []
        self._pause = _START_AFTER[0]
        self._not_before = 0.0

    async def current(self) -> int:
        self._look()
        return len(self._working)

    async def scale(self, count: int) -> None:
        self._look()
        while len(self._working) > count:
            self._drain(self._working.pop())
        while len(self._working) < count and time.monotonic() >= self._not_before:
            try:
                self._working.append(self._start())
            except OSError as exc:  # of the machine: no memory, no processes, no room on the disk
                log.warning("a worker could not be started: %s; trying again", exc)
                self._not_before = time.monotonic() + _START_AFTER[1]

    async def close(self) -> None:
        """All leave in good order; those who do not are killed."""
        await self.scale(0)
        while self._leaving:
            await asyncio.sleep(0.05)
            self._look()

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
        """The end of its standard input is what a worker leaves at."""
        assert child.process.stdin is not None
        child.process.stdin.close()
        self._leaving.append((child, time.monotonic() + _KILL_AFTER))

    def _look(self) -> None:
        """Notice who has ended."""
        now = time.monotonic()
        for child in [child for child in self._working if child.process.poll() is not None]:
            self._working.remove(child)
            self._mourn(child, now)
        for child, until in list(self._leaving):
            if child.process.poll() is not None:
                self._leaving.remove((child, until))
                child.output.close()
            elif now > until:
                child.process.kill()

    def _mourn(self, child: _Child, now: float) -> None:
        """One that nobody asked to leave gets a successor, but not at once: it may not fare better."""
        code = child.process.returncode
        if code < 0:
            log.warning("worker process %d was killed by signal %d; another one follows", child.process.pid, -code)
        elif code > 0:
            said = _last_line(child.output)
            log.warning("worker process %d failed with exit code %d: %s", child.process.pid, code, said)
        self._pause = _START_AFTER[0] if now - child.started > _STEADY else min(_START_AFTER[1], 2 * self._pause)
        self._not_before = now + self._pause
        child.output.close()
        assert child.process.stdin is not None
        child.process.stdin.close()


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


class CommandPool:
    """Workers that another program looks after; they are drained by the SIGTERM that it sends, and stay when the pool
    is closed."""

    def __init__(self, scale: Callable[[int], Sequence[str]], look: Sequence[str], count: Callable[[str], int]) -> None:
        """``scale`` makes the command for so many workers; ``count`` reads the answer of the command ``look``.
        ConfigError if there is no such program."""
        if shutil.which(look[0]) is None:
            raise ConfigError(f"there is no command {look[0]!r} on this machine's PATH; it is what starts the workers")
        self._scale = scale
        self._look = look
        self._read = count
        self._done: int | None = None
        self._trouble = ""

    async def current(self) -> int | None:
        answer = await self._run(self._look)
        try:
            return None if answer is None else self._read(answer)
        except ValueError:
            self._tell(f"{' '.join(self._look)} answered {answer!r:.200}")
            return None

    async def scale(self, count: int) -> None:
        if count != self._done:
            self._done = None
            if await self._run(self._scale(count)) is not None:
                self._done = count

    async def close(self) -> None:
        pass

    async def _run(self, command: Sequence[str]) -> str | None:
        """What it printed; None if it failed."""
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT):
                code, answer, errors = await _outcome(command)
        except OSError as exc:  # also when it took too long
            self._tell(f"{' '.join(command)} could not be run: {exc.strerror or 'no answer'}")
            return None
        if code:
            self._tell(f"{' '.join(command)} failed: {errors.strip() or f'exit code {code}'}")
            return None
        self._trouble = ""
        return answer

    def _tell(self, trouble: str) -> None:
        """Once, until it is another one or over."""
        if trouble != self._trouble:
            log.warning("%s; trying again", trouble)
        self._trouble = trouble


async def _outcome(command: Sequence[str]) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed and complained of. One that is not waited for is killed."""
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
    """The containers of one service of a Compose file."""
    compose = ["docker", "compose", "-f", file]
    return CommandPool(
        lambda count: [*compose, "up", "-d", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service],
        [*compose, "ps", "-q", service],
        lambda answer: len(answer.split()),
    )


def kubernetes_pool(deployment: str, namespace: str = "") -> CommandPool:
    """The replicas of a deployment; in the namespace that kubectl has by itself, unless another is named."""
    kubectl = ["kubectl", *(["--namespace", namespace] if namespace else [])]
    return CommandPool(
        lambda count: [*kubectl, "scale", f"deployment/{deployment}", f"--replicas={count}"],
        [*kubectl, "get", f"deployment/{deployment}", "-o", "jsonpath={.spec.replicas}"],
        int,
    )
