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
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec

from shoal.crawling.onion import preload
from shoal.frontier.local.server import PendingOwner, run_owner


class Inherited(NamedTuple):
    """What a worker process has from the process that forked it."""

    connection: socket.socket
    line: bytes
    """Its part of the crawl."""


_inherited: Inherited | None = None


class WorkerProcess(NamedTuple):
    """A worker process, seen from the process that started it."""

    pid: int
    poll: Callable[[], int | None]
    """The exit code; negative for a signal, None while it runs."""
    connection: socket.socket
    output: int | None
    """Where its standard error can be read. None: it shares the standard error of this process."""


class OwnedStore(msgspec.Struct, frozen=True):
    """The store that an owner opens: see `shoal.frontier.local.server.open_owned`."""

    name: str
    file: str | None


class ForkedOwner:
    """A process that waits to become the owner of a frontier. It exits when this process does not need it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def own(self, file: str | None, name: str) -> PendingOwner:
        """Let it own a SQLite file, or a new frontier in memory."""
        self._connection.sendall(msgspec.json.encode(OwnedStore(name, file)) + b"\n")
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
        made = _fork_worker(connections, relays=relays)
        if made is None:
            return None
        workers.append(made)
    return ForkedProcesses(owner, workers)


def _fork_owner(connections: list[socket.socket]) -> ForkedOwner:
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        _detach()
        os.dup2(0, 1)
        asked = msgspec.json.decode(_wait_for_line(far), type=OwnedStore)
        run_owner(asked.name, asked.file, far.detach())
        os._exit(0)
    far.close()
    connections.append(near)
    return ForkedOwner(near)


def _fork_worker(connections: list[socket.socket], *, relays: bool) -> WorkerProcess | None:
    global _inherited
    near, far = socket.socketpair()
    output, errors = os.pipe() if relays else (None, None)
    pid = os.fork()
    if pid == 0:
        near.close()
        for each in connections:
            each.close()
        _detach()
        if errors is not None:
            os.dup2(errors, 2)
        _inherited = Inherited(far, _wait_for_line(far))
        return None
    far.close()
    if errors is not None:
        os.close(errors)
    connections.append(near)
    return WorkerProcess(pid, partial(_exit_code, pid), near, output)


def _detach() -> None:
    """Detach from the terminal: its signals and its input are for the process that forks."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _wait_for_line(connection: socket.socket) -> bytes:
    """The first line from the process that forked this one. This process exits if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := connection.recv(1)):  # read no further than the line: others read the rest
            os._exit(0)
        line += more
    return line


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def start_worker(command: Sequence[str], environ: Mapping[str, str], *, relays: bool) -> WorkerProcess:
    """Start a worker process with this command. Its standard input is the connection."""
    near, far = socket.socketpair()
    output, errors = os.pipe() if relays else (None, None)
    with far:
        process = subprocess.Popen(command, env=environ, stdin=far.fileno(), stderr=errors, start_new_session=True)
    if errors is not None:
        os.close(errors)
    return WorkerProcess(process.pid, process.poll, near, output)


def end_process(code: int) -> NoReturn:
    """Exit without freeing the memory, which is slow. Threads are waited for and exit handlers run, as always."""
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or the spider has closed it
            stream.flush()
    os._exit(code)


def inherited() -> Inherited | None:
    """What this worker process has from the process that forked it. None in other processes."""
    return _inherited
