"""The process that owns a frontier and serves it: ``python -m shoal.frontier.local.owner FILE``.

Clients start it when they need it and nobody else owns the frontier. It detaches itself from the client that started
it, and exits when no client has been connected for a moment. So it outlives a killed client as long as others need it,
and no longer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import IO

from shoal.errors import ShoalError, StoreError
from shoal.frontier.local import wire
from shoal.frontier.local.places import name_of_file, reserved
from shoal.frontier.local.processes import ProcessSlot, ProcessWatch, name_process
from shoal.frontier.local.server import FrontierServer
from shoal.ports import Holder, Store

log = logging.getLogger("shoal.frontier")

_IDLE = 0.5
"""Seconds without a client after which an owner exits."""
_FIRST = 10.0
"""Seconds that the first client has to connect."""


async def open_owned(file: str | None, watch: ProcessWatch) -> Store:
    """Open the store of a SQLite file to own it, or a new one in memory. StoreBusyError while another process works on
    the file.

    Leases of processes that still run are kept, and watched. Those of cluster slots are kept until the slots are
    fenced."""
    if file is None:
        from shoal.frontier.memory import MemoryStore

        return MemoryStore()
    from shoal.frontier.sqlite import SQLiteStore

    def keeps(store: SQLiteStore, run_id: str, holder: Holder | None) -> bool:
        async def fence(slot: str, epoch: int) -> int:
            return await (await store.frontier(run_id)).fence(slot, epoch)

        slot = None if holder is None else ProcessSlot.of(holder)
        if slot is None:
            return holder is not None
        if slot.is_alive:
            watch.add(slot, run_id, fence)
            return True
        return False

    return await SQLiteStore.open(file, keeps=keeps)


@asynccontextmanager
async def serving(store: Store, watch: ProcessWatch, file: str | None, name: str) -> AsyncIterator[FrontierServer]:
    """Serve a store that `open_owned` opened. A store in memory is announced under this name, or one like it.
    StoreError if there is no place for a socket."""
    with reserved(name if file is None else name_of_file(file), exact=file is not None) as path:
        server = FrontierServer(store, durable=file is not None, watch=watch)
        await server.start(path)
        try:
            if file is not None:
                from shoal.frontier.sqlite.file_lock import announce_socket  # a crawl in memory needs no SQLite

                announce_socket(file, str(path))
            yield server
        finally:
            await server.close()


# -- starting one


class PendingOwner:
    """An owner that is being started. It writes a line when it serves, or fails."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines

    def wait(self) -> str:
        """Block until the owner serves, and return the path of its socket. Raises the error that the owner failed with,
        such as StoreBusyError."""
        line = self._lines.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            raise StoreError(
                "the process that owns the frontier ended before it could serve; its standard error says why"
            ) from None
        if "path" not in answer:
            wire.raise_error((answer["error"], answer["message"]))
        return str(answer["path"])


def start_owner(file: str) -> str:
    """Start an owner of a SQLite file. See `PendingOwner.wait`."""
    command = [sys.executable, "-m", __spec__.name, os.path.abspath(file)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        return PendingOwner(child.stdout).wait()


def main(file: str) -> None:
    """Detach from the process that started this one, and own a file."""
    if os.fork():
        os._exit(0)  # its parent waits only for the line
    answers = os.dup(1)
    _redirect_to_null(1)
    run_owner("", file, answers)


def run_owner(name: str, file: str | None, answers: int) -> None:
    """Own a frontier until nobody needs it. ``answers``: where to write the line for `PendingOwner`."""
    import uvloop

    name_process("shoal-frontier")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.raiseExceptions = False  # standard error may be closed before this process ends
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(_serve(name, file, answers))


async def _serve(name: str, file: str | None, answers: int) -> None:
    try:
        watch = ProcessWatch()
        store = await open_owned(file, watch)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            server = await stack.enter_async_context(serving(store, watch, file, name))
            _report_start({"path": str(server.path)}, answers)
            await _until_idle(server)
    except ShoalError as exc:
        kind, message = wire.error_of(exc)
        _report_start({"error": kind, "message": message}, answers)


def _report_start(answer: dict[str, str], answers: int) -> None:
    """Report to the process that started this one: the path of the socket, or the error."""
    with suppress(OSError):
        os.write(answers, json.dumps(answer).encode() + b"\n")
        os.close(answers)


def _redirect_to_null(output: int) -> None:
    """Release this process's end of an output that it inherited, so that its reader does not wait for this process."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, output)
    os.close(nothing)


async def _until_idle(server: FrontierServer) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    patience = _FIRST
    while not stopping.done():
        changing = asyncio.create_task(server.wait_for_change())
        timeout = None if server.clients else patience
        await asyncio.wait({changing, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        has_changed = changing.done()
        changing.cancel()
        if not has_changed and not server.clients:
            return
        if not server.clients:
            _redirect_to_null(2)
        patience = _IDLE


if __name__ == "__main__":
    main(sys.argv[1])
