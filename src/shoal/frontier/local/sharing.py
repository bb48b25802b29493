"""Find the process that owns a SQLite file, or start one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial

from shoal.errors import StoreAwayError, StoreBusyError
from shoal.frontier.local.owner import start_owner
from shoal.frontier.local.store import SocketStore
from shoal.ports import Store

_PATIENCE = 10.0
"""Seconds that another process may take to begin or to end its work on a file."""
_BETWEEN_TRIES = 0.05


async def join_owner(file: str) -> Store | None:
    """The store of the process that works on a file now. None if there is none, or it cannot be reached."""

    async def find() -> str:
        path = _socket_of(file)
        if path is None:
            raise StoreAwayError(f"the process that worked on {file} has ended")
        return path

    return None if _socket_of(file) is None else await SocketStore.connect(find)


async def join_or_open(file: str, open_it: Callable[[], Awaitable[Store]]) -> Store:
    """The store of the process that works on a file now, or the one that ``open_it`` opens if there is none.

    Waits for a process that no longer serves clients but still has to close the file. StoreBusyError if another process
    uses the file alone."""
    from shoal.frontier.sqlite.file_lock import announced_socket  # takes a while to import

    until = time.monotonic() + _PATIENCE
    while True:
        # The name of a socket stays in the lock file until its process has closed the file.
        may_be_closing = announced_socket(file) is not None
        try:
            return await join_owner(file) or await open_it()
        except (StoreBusyError, StoreAwayError):
            if not may_be_closing or time.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)


async def share_file(file: str) -> Store:
    """The store in a file, for one of several processes of this machine. A process that owns the file is started if
    there is none, now and whenever it was lost. StoreError as `SQLiteStore.open`."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return await SocketStore.connect(partial(_start, file, join=True))
        except StoreAwayError:  # it listened a moment ago, and ended before it answered
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)


async def start_new_owner(file: str) -> str:
    """Start a process that owns a file, and return its socket. Wait a few seconds for another process that works on the
    file to end; StoreBusyError if it does not."""
    return await _start(file, join=False)


async def _start(file: str, *, join: bool) -> str:
    until = time.monotonic() + _PATIENCE
    while True:
        path = _socket_of(file) if join else None
        if path is not None:
            return path
        try:
            return await asyncio.to_thread(start_owner, file)
        except StoreBusyError:  # another process starts one at this moment, or has not ended yet
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)


def _socket_of(file: str) -> str | None:
    """The socket of the process that works on a file. None if nobody listens there."""
    from shoal.frontier.sqlite.file_lock import announced_socket

    path = announced_socket(file)
    if path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # it is busy, or frozen
        except OSError:
            return None
    return path
