"""Faults for the tests of fleets, and snapshots of a frontier to compare before and after a fault."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shoal.frontier import join_store
from shoal.ports import History, HostState, LoggedItem, Run, Stats


class Picture(NamedTuple):
    """A snapshot of everything that a frontier reports about a run."""

    run: Run
    stats: Stats
    audit: Stats
    items: list[LoggedItem]
    hosts: list[HostState]
    dead: list[History]

    @property
    def in_order(self) -> bool:
        return self.stats.balanced and self.audit == self.stats


def picture(frontier: str, run_id: str) -> Picture:
    async def look() -> Picture:
        store = await join_store(frontier)
        try:
            run = await store.get_run(run_id)
            assert run is not None
            found = await store.frontier(run_id)
            return Picture(
                run, await found.stats(), await found.audit(), await found.read_items(0, 100_000),
                await found.host_states(), sorted([each async for each in found.dead()], key=lambda each: each.url),
            )  # fmt: skip
        finally:
            await store.close()

    return asyncio.run(look())


def wrong_clock(seconds: float) -> dict[str, str]:
    """Environment variables that move the wall clock of a process ahead. Its monotonic clock stays right."""
    found = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert found is not None, "these tests need libfaketime: apt-get install faketime"
    return {"LD_PRELOAD": str(found), "FAKETIME": f"{seconds:+.0f}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def seconds_until_exit(process: subprocess.Popen[str], timeout: float) -> float:
    """The seconds until the process ends."""
    began = time.monotonic()
    process.wait(timeout)
    return time.monotonic() - began


class Wire:
    """A proxy to a local port that can drop all traffic while its connections stay open, as when a router loses
    them."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._silent = threading.Event()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """Drop the traffic of all connections, and of new ones until ``mend``. They never recover."""
        self._silent.set()

    def mend(self) -> None:
        """Forward the traffic of new connections again."""
        self._silent = threading.Event()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [near, far]
            silent = self._silent
            for here, there in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(here, there, silent), daemon=True).start()

    def close(self) -> None:
        self._silent.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that waits for connections
        for each in self._sockets:
            each.close()


def _carry(here: socket.socket, there: socket.socket, silent: threading.Event) -> None:
    try:
        while not silent.is_set():
            if not select.select([here], [], [], 0.05)[0]:
                continue
            data = here.recv(65536)
            if silent.is_set():
                return
            if not data:
                there.shutdown(socket.SHUT_WR)
                return
            there.sendall(data)
    except (OSError, ValueError):  # closed meanwhile
        pass


@contextmanager
def wire(port: int) -> Iterator[Wire]:
    with closing(Wire(port)) as made:
        yield made


def fill(disk: Path) -> Path:
    """Fill a file system. Returns the file to remove."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
