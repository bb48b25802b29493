"""Where the socket of a frontier is, how an address leads to it, and which processes use it.

Sockets are in a folder of the user that nobody else can enter: ``$XDG_RUNTIME_DIR/shoal``, or ``shoal-UID`` in the
folder for temporary files. The owner of a SQLite file writes the path of its socket into the lock file beside the
file, so ``sqlite:///file`` is enough to find it. A frontier in memory has a name: ``local:NAME``.

The owner holds a lock on ``NAME.lock`` beside its socket. A process that gets the lock knows that a socket left there
is stale.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from shoal.errors import FencedError, FrontierError, RunError, StoreBusyError, StoreError
from shoal.ports import Holder

log = logging.getLogger("shoal.frontier")

TIMEOUT = 10.0
_MAX_PATH = 100  # bytes that the path of a Unix socket may have on every system
_MAX_NAMES = 1000
_TRIES = 5
_BETWEEN_TRIES = 0.02
_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_FILE_PREFIX = "file-"
_PROCESS_PREFIX = "pid"
_POLL = 0.2
"""Seconds between two checks whether the processes are alive."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalAddress(NamedTuple):
    """The socket of a frontier. ``timeout``: seconds that a call may take."""

    path: str
    timeout: float = TIMEOUT

    @classmethod
    def parse(cls, url: str) -> LocalAddress:
        """``local:NAME``, ``local:/path/of/a.sock``, or ``local:`` for the only crawl that runs. StoreError if there is
        no such crawl."""
        place, _, query = url.removeprefix("local:").partition("?")
        options = dict(parse_qsl(query))
        try:
            timeout = float(options.pop("timeout", TIMEOUT))
        except ValueError:
            raise StoreError(f"{url!r}: timeout must be a number of seconds") from None
        if options:
            raise StoreError(f"{url!r}: unknown option {min(options)!r}; there is only timeout")
        return cls(place if place.startswith("/") else _find(place), timeout)


def _find(name: str) -> str:
    sockets = announced()
    if name in sockets:
        return sockets[name]
    shown = ", ".join(f"local:{crawl}" for crawl in sorted(sockets)) or "none"
    if name:
        raise StoreError(f"no crawl named {name!r} runs on this machine; running now: {shown}")
    if len(sockets) != 1:
        raise StoreError(f"local: needs the name of a crawl: {len(sockets)} run on this machine; running now: {shown}")
    return next(iter(sockets.values()))


def announced() -> dict[str, str]:
    """The running crawls of this user by name, and their sockets. Crawls with a file are found by the file."""
    sockets: dict[str, str] = {}
    for folder in _folders():
        with suppress(OSError, StoreError):
            _check(folder)
            for lock in folder.glob("*.lock"):
                if not lock.stem.startswith(_FILE_PREFIX) and _is_held(lock):
                    sockets.setdefault(lock.stem, str(lock.with_suffix(".sock")))
    return sockets


def _is_held(lock: Path) -> bool:
    """Whether a process holds a lock."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in folder.glob("*.lock"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_suffix(".sock").unlink(missing_ok=True)
                path.unlink()
            finally:
                os.close(lock)


def name_of_file(path: str) -> str:
    """The name of the socket of a SQLite file."""
    from shoal.frontier.sqlite.file_lock import name_in_use  # a crawl in memory needs no SQLite

    return _FILE_PREFIX + blake2b(os.fsencode(name_in_use(path)), digest_size=12).hexdigest()


def _folders() -> list[Path]:
    temporary = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(runtime) / "shoal", temporary] if runtime else [temporary]


def private_folder() -> Path:
    """The folder for sockets. It is created if need be. StoreError if others could enter it."""
    failure: OSError | StoreError | None = None
    for folder in _folders():
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            _check(folder)
            return folder
        except (OSError, StoreError) as exc:  # such as a runtime folder that the system has removed
            failure = exc
    raise StoreError(f"no private folder for a socket: {failure}") from failure


def _check(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StoreError(f"{folder} must be a folder of this user that nobody else can enter; remove it")


@contextmanager
def reserved(name: str, *, exact: bool) -> Iterator[Path]:
    """Reserve a name for this process. Yields the path for its socket; a stale socket there is removed, and both are
    removed at the end.

    If another process has the name, ``name-2`` is tried, and so on; or, if ``exact``, StoreBusyError."""
    folder = private_folder()
    _remove_stale(folder)
    plain = _UNSAFE.sub("-", name).strip("-.")[:40] or "crawl"
    for number in range(1, 2 if exact else _MAX_NAMES):
        path = folder / f"{plain}{'' if number == 1 else f'-{number}'}.sock"
        if len(os.fsencode(path)) > _MAX_PATH:
            raise StoreError(f"the path {path} is too long for a socket; set XDG_RUNTIME_DIR or TMPDIR to a short one")
        lock = _lock(path.with_suffix(".lock"), tries=_TRIES if exact else 1)
        if lock is None:
            continue
        try:
            path.unlink(missing_ok=True)
            yield path
        finally:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
            os.close(lock)
        return
    raise StoreBusyError(f"another process has the socket {folder / plain}.sock")


def _lock(path: Path, tries: int) -> int | None:
    """A lock on a file, or None while another process holds it. The system releases it when this process ends.

    Several tries: a process that only checks the lock holds it for a moment."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BlockingIOError:
            tries -= 1
            if tries <= 0:
                os.close(lock)
                return None
            time.sleep(_BETWEEN_TRIES)
        os.close(lock)  # or its last holder has just removed it


# -- the processes that hold leases
#
# A lease that a client takes belongs to its process: it is held under a slot that names the process. When the
# process has ended, that slot is fenced, so its leases and roles are free at once. Nobody waits until they expire.


class ProcessSlot(NamedTuple):
    """One client of one process. Its name is the slot of its leases; no cluster has a slot of such a name."""

    pid: int
    started: int
    """When the process was started, so that a later process with the same number is not taken for it. 0: unknown."""
    client: str

    @property
    def holder(self) -> Holder:
        return Holder(f"{_PROCESS_PREFIX}:{self.pid}:{self.started}:{self.client}", 0)

    @property
    def is_alive(self) -> bool:
        return started_at(self.pid) == self.started

    @classmethod
    def of(cls, holder: Holder) -> ProcessSlot | None:
        """The process behind a holder. None for a slot of a cluster."""
        with suppress(ValueError):
            prefix, pid, started, client = holder.slot.split(":")
            if prefix == _PROCESS_PREFIX and "/" not in client:
                return cls(int(pid), int(started), client)
        return None


def started_at(pid: int) -> int | None:
    """When a process was started, in clock ticks since the system booted. None if it has ended; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else _answers(pid)
    except ProcessLookupError:
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, as `ps` and `top` show it. On systems without /proc it keeps
    its name."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _answers(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return 0


def peer_of(connection: socket.socket, stated: int) -> int:
    """The process id at the other end of a connection; 0 if unknown. ``stated``: the id that the client sent, for
    systems that do not report it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return stated
    pid: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))[0]
    return pid


Fence = Callable[[str, int], Awaitable[int]]


class ProcessWatch:
    """Fences the slots of processes that have ended."""

    def __init__(self) -> None:
        self._held: dict[ProcessSlot, dict[str, Fence]] = {}
        """For each client, the runs in which it may hold something."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, slot: ProcessSlot, run_id: str, fence: Fence) -> None:
        """Call ``fence`` with the name of the slot and a later epoch when the process has ended."""
        self._held.setdefault(slot, {})[run_id] = fence

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_POLL)
            for slot in [slot for slot in list(self._held) if not slot.is_alive]:
                await self._fence(slot, self._held.pop(slot))

    async def _fence(self, slot: ProcessSlot, runs: dict[str, Fence]) -> None:
        for run_id, fence in runs.items():
            try:
                count = await fence(slot.holder.slot, slot.holder.epoch + 1)
            except (FencedError, RunError):  # it was fenced before, or the run was deleted
                continue
            except FrontierError as exc:
                log.warning("cannot release the leases of process %d, which has ended; trying again: %s", slot.pid, exc)
                self.add(slot, run_id, fence)
                continue
            if count:
                log.warning("released %d leases of process %d, which has ended", count, slot.pid)
