"""What every output with a path needs: errors that say what to do, one writer at a time, whole replacement, growth."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, BinaryIO, TypeVar

from shoal.errors import SinkError
from shoal.ports import LoggedItem

T = TypeVar("T")

TEMPORARY = ".shoal-tmp"
BLOCK = 4096
"""So many bytes before an offset are remembered by their checksum."""
_OWNER = "user.shoal.run"
"""The extended attribute that says which run wrote a file, where the file system has such attributes."""


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Blocking work in a thread. If the caller is cancelled, it still waits: no one may touch the file meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()  # whoever comes next will meet it again
        raise


def unwritten(items: Sequence[LoggedItem], seq: int) -> Sequence[LoggedItem]:
    """The items behind ``seq``: a write that is repeated changes nothing."""
    return items if items and items[0].seq > seq else [item for item in items if item.seq > seq]


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """OSError as a SinkError that names the path and says what to do."""
    try:
        yield
    except OSError as exc:
        raise SinkError(_advice(path, exc)) from exc


def _advice(path: str, exc: OSError) -> str:
    folder = os.path.dirname(path) or "."
    match exc.errno:
        case errno.ENOENT:
            return f"can't write {path}: the folder {folder} does not exist; create it first"
        case errno.EISDIR:
            return f"can't write {path}: it is a folder; give the name of a file in it"
        case errno.ENOTDIR:
            return f"can't write {path}: {folder} is not a folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"can't write {path}: no permission; change its permissions, or choose another place"
        case errno.ENOSPC | errno.EDQUOT:
            return f"can't write {path}: the disk is full; free some space, then go on"
        case errno.EFBIG:
            return f"can't write {path}: it has reached the largest size that is allowed for a file"
        case errno.EPIPE:
            return f"can't write {path}: its reader has gone"
        case _:
            return f"can't write {path}: {exc.strerror or exc}"


def changed(path: str, what: str, run_id: str = "") -> SinkError:
    """The error for an output that is not as the run left it."""
    run = f"run {run_id}" if run_id else "this run"
    return SinkError(
        f"{path} {what}: it is not as {run} left it. Nothing was written to it. Restore the file, choose another "
        f"output, or write all items of the run to a new file with `shoal export {run_id or 'RUN'} -o FILE`"
    )


def checksum(tail: bytes) -> bytes:
    """Of the last block before an offset."""
    return blake2b(tail, digest_size=16).digest()


def owner_of(path: str | int) -> str | None:
    """The run that wrote a file; None if that is not known."""
    with suppress(OSError, AttributeError, UnicodeDecodeError):  # not every system has such attributes
        return os.getxattr(path, _OWNER).decode()
    return None


def set_owner(path: str | int, run_id: str) -> None:
    """A copy of the file may lack it, so it only serves to say no."""
    with suppress(OSError, AttributeError):
        if run_id:
            os.setxattr(path, _OWNER, run_id.encode())
        else:
            os.removexattr(path, _OWNER)


class SinkBusyError(SinkError):
    """Another process writes to it at this moment."""


def lock(descriptor: int, path: str) -> None:
    """Keep other processes away for as long as the descriptor is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SinkBusyError(f"{path} is being written by another crawl; choose another output") from None
    except OSError as exc:
        if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # a file system without locks
            raise


def sync_folder(path: str) -> None:
    """Make the entry of a file in its folder durable, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: str, write: Callable[[BinaryIO], None]) -> int:
    """Write a file whole, durably, and put it in the place of ``path`` in one step. Its locked descriptor."""
    temporary = path + TEMPORARY
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
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
    """A file that is only appended to, and can be cut back. All of it blocks."""

    def __init__(self, path: str, run_id: str = "") -> None:
        self.path = os.path.realpath(path)
        self.run_id = run_id
        self.size = 0
        self._descriptor = -1
        self._torn = False
        self._synced = -1

    def open(self, size: int, *, fresh: bool) -> None:
        """Open a file that must be this run's and have at least this size. A ``fresh`` one may be anybody's, or new.

        Nothing is changed before ``cut``.
        """
        self.close()
        with storage_errors(self.path):
            try:
                descriptor = os.open(self.path, os.O_RDWR | (0 if size else os.O_CREAT), 0o666)
            except FileNotFoundError:
                if size and os.path.isdir(os.path.dirname(self.path)):
                    raise self.changed("does not exist any more") from None
                raise
            try:
                lock(descriptor, self.path)
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise SinkError(f"can't write {self.path}: it is not a regular file")
                if not fresh:
                    self._check_owner(descriptor)
                if found.st_size < size:
                    raise self.changed(f"has {found.st_size} bytes, and had {size}")
                with suppress(FileNotFoundError):
                    os.unlink(self.path + TEMPORARY)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor, self.size, self._torn, self._synced = descriptor, found.st_size, False, -1
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

    def cut(self, size: int) -> None:
        """From now on it is this run's."""
        with storage_errors(self.path):
            os.ftruncate(self._descriptor, size)
        self.size = size
        set_owner(self._descriptor, self.run_id)

    def append(self, data: bytes) -> None:
        """All of it, or, as far as the next append and flush can see, nothing."""
        self._mend()
        self._torn = True
        with storage_errors(self.path):
            view, offset = memoryview(data), self.size
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        self.size, self._torn = offset, False

    def _mend(self) -> None:
        if self._torn:
            with storage_errors(self.path):
                os.ftruncate(self._descriptor, self.size)
            self._torn = False

    def replace(self, write: Callable[[BinaryIO, BinaryIO], None]) -> None:
        """Rewrite it in one step: ``write`` gets the old content and the new file."""
        self._mend()
        with storage_errors(self.path), open(self.path, "rb") as old:
            descriptor = replace_file(self.path, lambda new: write(old, new))
        with suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
        set_owner(descriptor, self.run_id)
        os.close(self._descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def sync(self) -> None:
        self._mend()
        if self._synced != self.size:
            with storage_errors(self.path):
                os.fsync(self._descriptor)
            self._synced = self.size

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(SinkError):  # no one may come to mend it later
                self._mend()
            descriptor, self._descriptor = self._descriptor, -1
            with storage_errors(self.path):
                os.close(descriptor)
