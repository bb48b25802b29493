"""Forks the processes of a crawl after Shoal is imported, and before the spider is.

So a crawl on several processes starts as fast as on one, and each process loads the spider itself: what a spider opens
when it is imported or created is never shared. Each process first waits for a line that says what to do. If its
connection ends before that, it exits: the crawl could not begin, and one error message is enough.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple, NoReturn

import msgspec

from shoal.crawling.onion import preload
from shoal.frontier.local.server import PendingOwner, run_owner
from shoal.runs.supervisor import WorkerProcess, start_process

_IS_PROGRAM = "_SHOAL_PART"


class Inherited(NamedTuple):
    """What a worker process has from the process that started it."""

    connection: socket.socket
    line: bytes
    """Its part of the crawl."""


_inherited: Inherited | None = None


class ForkedOwner:
    """A process that waits to become the owner of a frontier. It exits when this process does not need it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def own(self, file: str | None, name: str) -> PendingOwner:
        """Let it own a SQLite file, or a new frontier in memory."""
        self._connection.sendall(msgspec.json.encode((name, file)) + b"\n")
        return PendingOwner(self._connection.makefile("rb"))

    def close(self) -> None:
        """Let the process exit if it still waits. If it serves, it stays while it has clients."""
        self._connection.close()


class ForkedProcesses(NamedTuple):
    """The processes of a crawl before it begins."""

    owner: ForkedOwner
    workers: list[WorkerProcess]


def fork_processes(count: int, *, relays: bool) -> ForkedProcesses | None:
    """Fork an owner and worker processes. Returns None in each worker process.

    ``relays``: this process reads what the workers write to standard error. Call it before there are threads."""
    preload()
    gc.freeze()
    connections: list[socket.socket] = []
    owner = _fork_owner(connections)
    workers: list[WorkerProcess] = []
    for _ in range(count):
        worker = _fork_worker(connections, relays=relays)
        if worker is None:
            return None
        workers.append(worker)
    return ForkedProcesses(owner, workers)


def _fork_owner(connections: list[socket.socket]) -> ForkedOwner:
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        _detach()
        os.dup2(0, 1)
        name, file = msgspec.json.decode(_wait_for_line(far), type=tuple[str, str | None])
        run_owner(name, file, far.detach())
        os._exit(0)
    far.close()
    connections.append(near)
    return ForkedOwner(near)


def _fork_worker(connections: list[socket.socket], *, relays: bool) -> WorkerProcess | None:
    global _inherited
    near, far = socket.socketpair()
    output, errors = _open_pipe() if relays else (None, None)
    pid = os.fork()
    if pid == 0:
        near.close()
        for connection in connections:
            connection.close()
        _detach()
        if errors is not None:
            os.dup2(errors.fileno(), 2)
        _inherited = Inherited(far, _wait_for_line(far))
        return None
    far.close()
    if errors is not None:
        errors.close()
    connections.append(near)
    return WorkerProcess(pid, _ForkedProcess(pid).poll, near, output)


def start_worker(words: Sequence[str], *, relays: bool) -> WorkerProcess:
    """Start a worker process with this command line of `shoal`, to replace a forked one."""
    output, errors = _open_pipe() if relays else (None, None)
    process = start_process(words, {_IS_PROGRAM: "1"}, stderr=errors)
    if errors is not None:
        errors.close()
    process.output = output
    return process


def inherited() -> Inherited | None:
    """What this worker process has from the process that started it. None in other processes."""
    if os.environ.pop(_IS_PROGRAM, None) is None:
        return _inherited
    connection = socket.socket(fileno=os.dup(0))
    _close_input()  # programs that the spider starts must not hold the connection
    return Inherited(connection, _wait_for_line(connection))


def _open_pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)


def _detach() -> None:
    """Detach from the terminal: its signals and its input are for the process that forks."""
    os.setsid()
    _close_input()


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _wait_for_line(connection: socket.socket) -> bytes:
    """The first line from the process that started this one. This process exits if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := connection.recv(1)):  # read no further than the line: others read the rest
            os._exit(0)
        line += more
    return line


class _ForkedProcess:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


def end_process(code: int) -> NoReturn:
    """Exit without freeing the memory, which is slow. Threads are waited for and exit handlers run, as always."""
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or the spider has closed it
            stream.flush()
    os._exit(code)
