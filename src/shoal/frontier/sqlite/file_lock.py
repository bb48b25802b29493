"""One process at a time changes a frontier file, whatever name leads to it.

A file may have several names: hard links, mounts, symbolic links. SQLite keeps its log beside *one* name, so all
processes must use the same one. The process that works on a file

- writes the name that it uses into the file (`NAME_KEY`), and removes it when it closes the file. Another process finds
  it there, and uses that name too: `name_in_use`.
- locks ``NAME.lock`` beside the file. It has the id of the process, and the path of its socket if it serves others.
- locks the file itself. This also refuses processes that see the file elsewhere, such as in another container.

The system releases both locks when the process ends, however that happens.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from contextlib import closing, suppress
from urllib.parse import quote

from shoal.errors import StoreBusyError, StoreError

NAME_KEY = "shoal file in use as"
"""The key of the name in the table ``note``."""
_PLACE = 1 << 62
"""The byte of the file that is locked. SQLite locks bytes at one GiB."""
_held: dict[tuple[int, int, int], str] = {}
"""Files that this process has open: process, device and inode, and the name. A process that opens such a file again,
and then closes it, loses the locks that SQLite has on it."""


def name_in_use(path: str | os.PathLike[str]) -> str:
    """The absolute name to use for a file: the one under which a process works on it or was killed, if that is still
    the same file."""
    name = os.path.realpath(path)
    recorded = recorded_name(name)
    with suppress(OSError):
        if recorded is not None and os.path.samefile(recorded, name):
            return recorded
    return name


def recorded_name(name: str) -> str | None:
    """The name in a file. None if the file was closed, is a copy, or cannot be read."""
    with suppress(OSError, sqlite3.Error, ValueError):
        status = os.stat(name)
        key = _key_of(status)
        if key in _held:
            return _held[key]
        # Only the file, without its log: that may be beside another name.
        with closing(sqlite3.connect(f"file:{quote(name)}?mode=ro&immutable=1", uri=True)) as db:
            row = db.execute("SELECT value FROM note WHERE key = ?", (NAME_KEY,)).fetchone()
        if row is not None:
            device, inode, recorded = bytes(row[0]).split(b" ", 2)
            return os.fsdecode(recorded) if (int(device), int(inode)) == (status.st_dev, status.st_ino) else None
    return None


def name_record(name: str) -> bytes:
    """The name as it is written into the file, with device and inode: a copy of the file has others."""
    status = os.stat(name)
    return b"%d %d %b" % (status.st_dev, status.st_ino, os.fsencode(name))


def check_log(name: str, recorded: str | None) -> None:
    """StoreError if a process was killed while it used the file under the name ``recorded``, and its log has stayed
    there. Changes without that log would destroy the file when the log is found again."""
    if recorded in (None, name) or os.path.exists(f"{name}-wal"):
        return
    if os.path.exists(f"{recorded}-wal"):
        raise StoreError(
            f"{name} was {recorded} before, and its log has stayed there: move {recorded}-wal to {name}-wal first"
        )
    raise StoreError(
        f"{name} was used as {recorded} by a process that did not close it, and the log with its last changes is not "
        f"here. Use it as {recorded} once; or, if the log is lost, copy the file and use the copy"
    )


def is_open_here(name: str) -> bool:
    """Whether this process has the file open."""
    with suppress(OSError):
        return _key_of(os.stat(name)) in _held
    return False


class FileLock:
    """The right to change a file. Hold it for longer than SQLite has the file open."""

    def __init__(self, name: str) -> None:
        """Take it, and create the file if there is none. StoreBusyError while another process has it."""
        self._name = name
        self._beside = self._lock_beside()
        self._file = -1
        try:
            if is_open_here(name):
                raise self._busy(os.getpid())
            # Requests may hold cookies and passwords. SQLite gives its log and index the mode of the file.
            self._file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            self._status = os.fstat(self._file)
            try:
                _lock_byte(self._file)
            except OSError as exc:
                raise StoreBusyError(
                    f"another process works on {name} under another name (a hard link or a mount); stop it first, or "
                    "name another file"
                ) from exc
        except BaseException:
            self.release()
            raise
        _held[_key_of(self._status)] = name

    def _lock_beside(self) -> int:
        path = self._name + ".lock"
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(lock, 20, 0).decode(errors="replace").partition("\n")[0]
                os.close(lock)
                raise self._busy(pid) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, b"%d" % os.getpid(), 0)
                    return lock
            os.close(lock)  # its last holder has just removed it

    def _busy(self, pid: object) -> StoreBusyError:
        return StoreBusyError(
            f"another process{f' (pid {pid})' if pid else ''} works on {self._name}; "
            "stop it first, or name another file"
        )

    def check(self) -> None:
        """StoreError if the name no longer leads to the file: what is written to it would be lost."""
        with suppress(OSError):
            if os.path.samestat(self._status, os.stat(self._name)):
                return
        raise StoreError(
            f"{self._name} was removed or replaced while this process worked on it; its last changes are not in the "
            "file of this name. Restore the file, then resume the run"
        )

    def release(self) -> None:
        """Release it after SQLite has closed the file."""
        if self._file >= 0:
            _held.pop(_key_of(self._status), None)
            os.close(self._file)
        with suppress(FileNotFoundError):
            os.unlink(self._name + ".lock")
        os.close(self._beside)


def _key_of(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _lock_byte(file: int) -> None:
    """Lock one byte for this open file. Unlike ``flock``, this never collides with SQLite's locks on a network file
    system; unlike an ordinary lock of a byte, closing another descriptor of the file does not release it. OSError while
    another process has the lock."""
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is not None:  # Linux
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _PLACE, 1, 0))


def announce_socket(path: str, socket: str) -> None:
    """Write the path of this process's socket into the lock file. Call it while this process has the file open."""
    with open(name_in_use(path) + ".lock", "r+b") as lock:
        lock.write(b"%d\n%b" % (os.getpid(), os.fsencode(socket)))


def announced_socket(path: str) -> str | None:
    """The path of the socket in the lock file of a file. The process that announced it may have been killed since."""
    try:
        with open(name_in_use(path) + ".lock", "rb") as lock:
            socket = lock.read(4096).partition(b"\n")[2]
    except OSError:
        return None
    return os.fsdecode(socket) or None
