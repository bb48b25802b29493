"""Files of outputs: clear errors, one writer at a time, atomic replacement, and a file that grows."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import BinaryIO, TypeVar

from shoal.errors import SinkError
from shoal.ports import LoggedItem

T = TypeVar("T")

TEMPORARY = ".shoal-tmp"
BLOCK = 4096
OUTPUT_MODE = 0o666  # of a new file, restricted by the umask
"""A saved state has a checksum of this many bytes before its offset."""
_OWNER = "user.shoal.run"
"""The extended attribute that names the run that wrote a file. Not every file system supports it."""


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run blocking work in a thread. A cancelled caller still waits for it: nothing else may use the file meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()  # the next call meets the same error
        raise


def unwritten(items: Sequence[LoggedItem], seq: int) -> Sequence[LoggedItem]:
    """The items after ``seq``, so that a repeated write changes nothing."""
    return items if items and items[0].seq > seq else [item for item in items if item.seq > seq]


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn an OSError into a SinkError that names the path and says what to do."""
    try:
        yield
    except OSError as exc:
        raise SinkError(f"can't write {path}: {_explain(path, exc)}") from exc


def _explain(path: str, exc: OSError) -> str:
    folder = os.path.dirname(path) or "."
    match exc.errno:
        case errno.ENOENT:
            return f"the folder {folder} does not exist; create it first"
        case errno.EISDIR:
            return "it is a folder; give the name of a file"
        case errno.ENOTDIR:
            return f"{folder} is not a folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "permission denied; change its permissions, or choose another output"
        case errno.ENOSPC | errno.EDQUOT:
            return "the disk is full; free some space, then resume the run"
        case errno.EFBIG:
            return "it has reached the maximum size of a file"
        case errno.EPIPE:
            return "the reader closed the pipe"
        case _:
            return exc.strerror or str(exc)


def changed(path: str, what: str, run_id: str = "") -> SinkError:
    """The error for an output that another program changed."""
    run = f"run {run_id}" if run_id else "this run"
    return SinkError(
        f"{path} {what}: it changed since {run} wrote it. Nothing was written. Restore the file, choose "
        f"another output, or write all items of the run to a new file with `shoal export {run_id or 'RUN'} -o FILE`"
    )


def taken(path: str, owner: str | None) -> SinkError:
    """The error for a file that a new run may not replace."""
    whose = f"has the output of run {owner}" if owner else "exists and is not empty"
    name = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return SinkError(f"{name} {whose}. Use -O {name} to replace it, or choose another output")


def checksum(tail: bytes) -> bytes:
    """The checksum of the last block before an offset."""
    return blake2b(tail, digest_size=16).digest()


def owner_of(path: str | int) -> str | None:
    """The run that wrote a file; None if unknown."""
    with suppress(OSError, AttributeError, UnicodeDecodeError):  # not every system has such attributes
        return os.getxattr(path, _OWNER).decode()
    return None


def set_owner(path: str | int, run_id: str) -> None:
    """Record the run that writes a file. A copy of the file may lack this, so it can only prove a wrong owner."""
    with suppress(OSError, AttributeError):
        if run_id:
            os.setxattr(path, _OWNER, run_id.encode())
        else:
            os.removexattr(path, _OWNER)


class SinkBusyError(SinkError):
    """Another process is writing to the output."""


def lock(descriptor: int, path: str) -> None:
    """Lock the file against other processes while the descriptor is open. SinkBusyError if one has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SinkBusyError(f"another crawl is writing {path}; choose another output") from None
    except OSError as exc:
        if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # a file system without locks
            raise


def sync_folder(path: str) -> None:
    """Make the entry of a file in its folder durable, if the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: str, write: Callable[[BinaryIO], None], *, mode: int = OUTPUT_MODE) -> int:
    """Write a new file, durably, and rename it to ``path`` in one step. Return its locked descriptor."""
    temporary = path + TEMPORARY
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
    try:
        lock(descriptor, path)
        with open(descriptor, "wb", closefd=False) as file:
            write(file)
        os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path)
    return descriptor


class GrowingFile:
    """A file to append to, which can be truncated. All methods block."""

    def __init__(self, path: str, run_id: str = "", *, replaces: bool = True, mode: int = OUTPUT_MODE) -> None:
        """``replaces``: a new run may replace a file that another run wrote. ``mode``: of a file that it creates."""
        self._replaces = replaces
        self._mode = mode
        self.path = os.path.realpath(path)
        self.run_id = run_id
        self.size = 0
        self._descriptor = -1
        self._is_torn = False
        """Whether an append failed half-way."""
        self._is_old = False
        """Whether the file still has the content that it had before."""
        self._synced = -1

    def open(self, size: int, *, fresh: bool) -> None:
        """Open a file that this run wrote and that has at least this size. With ``fresh``, open or create any file.

        The content stays unchanged until ``truncate``.
        """
        self.close()
        with storage_errors(self.path):
            try:
                descriptor = os.open(self.path, os.O_RDWR | (0 if size else os.O_CREAT), self._mode)
            except FileNotFoundError:
                if size and os.path.isdir(os.path.dirname(self.path)):
                    raise self.changed("no longer exists") from None
                raise
            try:
                lock(descriptor, self.path)
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise SinkError(f"can't write {self.path}: it is not a regular file")
                if not fresh:
                    self._check_owner(descriptor)
                elif found.st_size and not self._replaces and (owner := owner_of(descriptor)) != self.run_id:
                    raise taken(self.path, owner)
                if found.st_size < size:
                    raise self.changed(f"has {found.st_size} bytes, but had {size}")
                with suppress(FileNotFoundError):
                    os.unlink(self.path + TEMPORARY)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor, self.size, self._is_torn, self._synced = descriptor, found.st_size, False, -1
        self._is_old = False
        if not size:
            sync_folder(self.path)

    def _check_owner(self, descriptor: int) -> None:
        owner = owner_of(descriptor)
        if owner is not None and owner != self.run_id:
            raise self.changed(f"was replaced by run {owner}")

    def changed(self, what: str) -> SinkError:
        return changed(self.path, what, self.run_id)

    def tail(self, offset: int) -> bytes:
        """The last block before an offset."""
        with storage_errors(self.path):
            return os.pread(self._descriptor, min(offset, BLOCK), max(0, offset - BLOCK))

    def truncate(self, size: int) -> None:
        """Cut the file to this size, and record this run as its owner."""
        with storage_errors(self.path):
            os.ftruncate(self._descriptor, size)
        self.size = size
        set_owner(self._descriptor, self.run_id)

    def clear_later(self) -> None:
        """Empty the file as soon as something is written to it, or ``clear`` is called. Until then it is as it was."""
        self.size, self._is_old = 0, True

    def clear(self) -> None:
        """Do now what ``clear_later`` put off."""
        if self._is_old:
            self.truncate(0)
            self._is_old = False

    def append(self, data: bytes) -> None:
        """Append all of it. If that fails, the next append or sync removes what was written."""
        self._repair()
        self._is_torn = True
        with storage_errors(self.path):
            view, offset = memoryview(data), self.size
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        self.size, self._is_torn = offset, False

    def _repair(self) -> None:
        self.clear()
        if self._is_torn:
            with storage_errors(self.path):
                os.ftruncate(self._descriptor, self.size)
            self._is_torn = False

    def replace(self, write: Callable[[BinaryIO, BinaryIO], None]) -> None:
        """Rewrite the file in one step. ``write`` gets the old file and the new one."""
        self._repair()
        with storage_errors(self.path), open(self.path, "rb") as old:
            descriptor = replace_file(self.path, lambda new: write(old, new))
        with suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
        set_owner(descriptor, self.run_id)
        os.close(self._descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def sync(self) -> None:
        self._repair()
        if self._synced != self.size:
            with storage_errors(self.path):
                os.fsync(self._descriptor)
            self._synced = self.size

    def close(self) -> None:
        if self._descriptor >= 0:
            if self._is_torn:
                with suppress(SinkError):  # perhaps nothing opens it again
                    self._repair()
            descriptor, self._descriptor = self._descriptor, -1
            with storage_errors(self.path):
                os.close(descriptor)
