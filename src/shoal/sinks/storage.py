"""Files of outputs: clear errors, one writer at a time, atomic replacement, and a file that grows."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import BinaryIO, TypeVar

from shoal.errors import OutputChangedError, OutputTakenError, SinkError
from shoal.ports import LoggedItem
from shoal.system import threads

T = TypeVar("T")

log = logging.getLogger("shoal.sinks")

TEMPORARY = ".shoal-tmp"
BLOCK = 4096
"""A saved state has a checksum of this many bytes before its offset."""
OUTPUT_MODE = 0o666  # of a new file, restricted by the umask
_COPY_BLOCK = 1 << 20
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_OWNER = "user.shoal.run"
"""The extended attribute that names the run that wrote a file. Not every file system supports it."""
_EPOCH = "user.shoal.epoch"
"""The extended attribute with the epoch of the last writer, and its run."""
_unlocked: set[str] = set()
"""Files on file systems without locks for which a warning was logged."""
_unfenced: set[str] = set()
"""The same for file systems without extended attributes."""


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run blocking work in a thread. A cancelled caller still waits for it: nothing else may use the file meanwhile."""
    task = asyncio.ensure_future(threads.call(work, *args))
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
            if os.path.isdir(folder):
                return f"the folder {folder} takes no new files; choose another output"
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


def changed(path: str, what: str, run_id: str = "") -> OutputChangedError:
    """The error for an output that another program changed."""
    run = f"run {run_id}" if run_id else "this run"
    return OutputChangedError(
        f"{path} {what}: it changed since {run} wrote it. Restore the file, choose another output, or (if the run is "
        f"stored) write all its items again with `shoal export {run_id or 'RUN'} -O FILE`"
    )


class OutputExistsError(SinkError):
    """A file has content that this run did not write. It stays as it is."""


def taken(path: str, owner: str | None) -> OutputExistsError:
    """The error for a file that a new run may not replace."""
    whose = f"has the output of run {owner}" if owner else "exists and is not empty"
    name = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    stem, ending = os.path.splitext(name)
    part, time_span = ("run", "in each run") if _DATE.search(stem) else ("date", "each day")
    return OutputExistsError(
        f"{name} {whose}. Use -O {name} to replace it, or choose another output; "
        f"{stem}-{{{part}}}{ending} is a new one {time_span}"
    )


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


def fence(descriptor: int, path: str, run_id: str, epoch: int) -> None:
    """Record the epoch of a writer. OutputTakenError if the file has a newer epoch of this run. Epoch 0 has no order.

    While a process has the file locked, no other can write it. The epoch stops a writer that opens the file late, after
    its successor has written the file and closed it."""
    if not epoch:
        return
    newest = newest_epoch(descriptor, run_id)
    if newest > epoch:
        raise OutputTakenError(path, newest)
    try:
        os.setxattr(descriptor, _EPOCH, f"{epoch} {run_id}".encode())
    except (OSError, AttributeError):
        if path not in _unfenced:
            _unfenced.add(path)
            log.warning(
                "%s can't have extended attributes: a process that opens it late, after another one has taken over, is "
                "not refused",
                path,
            )


def newest_epoch(path: str | int, run_id: str) -> int:
    """The epoch of the last writer of a file; 0 if it is unknown, or another run wrote the file."""
    with suppress(OSError, AttributeError, UnicodeDecodeError, ValueError):
        epoch, _, owner = os.getxattr(path, _EPOCH).decode().partition(" ")
        return int(epoch) if owner == run_id else 0
    return 0


class SinkBusyError(SinkError):
    """Another process is writing to the output."""


def lock(descriptor: int, path: str) -> None:
    """Lock the file against other processes while the descriptor is open. SinkBusyError if one has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SinkBusyError(f"another crawl is writing {path}; choose another output") from None
    except OSError as exc:
        if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path not in _unlocked:
            _unlocked.add(path)
            log.warning("%s is on a file system without locks: make sure that only one process writes it", path)


def sync_folder(path: str) -> None:
    """Make the entry of a file in its folder durable, if the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it. A disk that is almost full takes a part of it without an error."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: str, write: Callable[[BinaryIO], None], *, mode: int = OUTPUT_MODE) -> int:
    """Write a new file, durably, and rename it to ``path`` in one step. Return its locked descriptor."""
    temporary = path + TEMPORARY
    descriptor = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, mode)
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
    """A file to append to, which notices what other programs do to it. All methods block.

    A process has it locked while it is open. A removed file is restored; any other change is an OutputChangedError.
    """

    def __init__(self, path: str, run_id: str = "", *, replaces: bool = True, mode: int = OUTPUT_MODE) -> None:
        """``replaces``: a new run may replace a file that another run wrote. ``mode``: of a file that it creates."""
        self._replaces = replaces
        self._mode = mode
        self.path = os.path.realpath(path)
        self.run_id = run_id
        self.size = 0
        self._epoch = 0
        self._descriptor = -1
        self._is_torn = False
        """Whether an append failed half-way."""
        self._has_rest = False
        """Whether the file has content that is not kept."""
        self._synced = -1

    # -- open

    def open(self, size: int, *, fresh: bool, epoch: int = 0) -> None:
        """Open a file that this run wrote and that has at least this size. With ``fresh``, open or create any file.

        OutputTakenError if a writer with a newer epoch has opened it before.
        """
        self.close()
        with storage_errors(self.path):
            descriptor = self._open_locked(size)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise SinkError(f"can't write {self.path}: it is not a regular file")
                owner = owner_of(descriptor)
                if not fresh and owner not in (None, self.run_id):
                    raise self.changed(f"was replaced by run {owner}")
                if fresh and status.st_size and not self._replaces and owner != self.run_id:
                    raise taken(self.path, owner)
                if status.st_size < size:
                    raise self.changed(f"has {status.st_size} bytes, but had {size}")
                fence(descriptor, self.path, self.run_id, epoch)
                with suppress(FileNotFoundError):
                    os.unlink(self.path + TEMPORARY)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor, self._epoch, self.size = descriptor, epoch, status.st_size
        self._is_torn, self._has_rest, self._synced = False, False, -1
        if not size:
            sync_folder(self.path)

    def _open_locked(self, size: int) -> int:
        while True:
            try:
                flags = os.O_RDWR | os.O_APPEND | (0 if size else os.O_CREAT)
                descriptor = os.open(self.path, flags, self._mode)
            except FileNotFoundError:
                if size and os.path.isdir(os.path.dirname(self.path)):
                    raise self.changed("no longer exists") from None
                raise
            try:
                lock(descriptor, self.path)
                if is_at(descriptor, self.path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last writer replaced the file before it released the lock

    def changed(self, what: str) -> OutputChangedError:
        return changed(self.path, what, self.run_id)

    # -- read

    def tail(self, offset: int) -> bytes:
        """The last block before an offset."""
        with storage_errors(self.path):
            return os.pread(self._descriptor, min(offset, BLOCK), max(0, offset - BLOCK))

    def reader(self) -> BinaryIO:
        """The content from its beginning, whatever is at the path now."""
        reader = os.fdopen(os.dup(self._descriptor), "rb")
        reader.seek(0)
        return reader

    # -- write

    def keep(self, size: int) -> None:
        """Keep this much of the content. The rest stays until something is written, or ``settle`` is called: a process
        that ends before has changed nothing."""
        self.size, self._has_rest = size, True

    def settle(self) -> None:
        """Remove what is not kept, and what a failed append left."""
        if not self._has_rest and not self._is_torn:
            return
        self._check_place()
        with storage_errors(self.path):
            size = os.fstat(self._descriptor).st_size
            if size < self.size:
                raise self.changed(f"has {size} bytes, but had {self.size}")
            os.ftruncate(self._descriptor, self.size)
        set_owner(self._descriptor, self.run_id)
        self._has_rest = self._is_torn = False

    def append(self, data: bytes) -> None:
        """Append all of it. If that fails, the next append or sync removes what was written."""
        self.settle()
        self._is_torn = True
        with storage_errors(self.path):
            write_all(self._descriptor, data)
        self.size, self._is_torn = self.size + len(data), False

    def replace(self, write: Callable[[BinaryIO, BinaryIO], None]) -> None:
        """Rewrite the file in one step. ``write`` gets the old file and the new one."""
        self.check()
        with storage_errors(self.path), self.reader() as old:
            self._use(replace_file(self.path, lambda new: write(old, new)))

    def _use(self, descriptor: int) -> None:
        """Continue with a new file in place of the old one."""
        with suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
        set_owner(descriptor, self.run_id)
        fence(descriptor, self.path, self.run_id, self._epoch)
        os.close(self._descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def sync(self) -> None:
        self.settle()
        if self._synced != self.size:
            with storage_errors(self.path):
                os.fsync(self._descriptor)
            self._synced = self.size

    # -- check

    def check(self) -> None:
        """Check that the file is where it was, and has the size that it had after the last write."""
        self.settle()
        self._check_place()
        with storage_errors(self.path):
            size = os.fstat(self._descriptor).st_size
        if size != self.size:
            raise self.changed(f"has {size} bytes, but had {self.size}")

    def _check_place(self) -> None:
        with storage_errors(self.path):
            own = os.fstat(self._descriptor)
            at_path = stat_of(self.path)
            if at_path is not None and os.path.samestat(own, at_path):
                return
            if own.st_nlink:
                raise self.changed(self._describe_move(at_path))
            if at_path is not None:
                raise self.changed("was replaced by another file")
            self._restore()

    def _describe_move(self, at_path: os.stat_result | None) -> str:
        place = ""
        with suppress(OSError):  # not every system has /proc
            place = os.readlink(f"/proc/self/fd/{self._descriptor}")
        is_there = place and is_at(self._descriptor, place)
        return f"was moved{f' to {place}' if is_there else ''}{'' if at_path is None else ' and replaced'}"

    def _restore(self) -> None:
        """Write a removed file again, from the descriptor, which still has its content."""
        size = self.size

        def copy(new: BinaryIO) -> None:
            for offset in range(0, size, _COPY_BLOCK):
                new.write(os.pread(self._descriptor, min(_COPY_BLOCK, size - offset), offset))

        log.warning("%s was removed while it was written; restoring it", self.path)
        self._use(replace_file(self.path, copy))
        self.size = size

    # -- close

    def end(self, *, finished: bool) -> None:
        """Close the file, after a last check if the run is ``finished``. Otherwise only restore it if it was removed:
        the next process continues with it."""
        try:
            if finished:
                self.check()
            elif self._descriptor >= 0 and self.size and not os.fstat(self._descriptor).st_nlink:
                with suppress(SinkError):
                    self._check_place()
        finally:
            self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            if self._is_torn:
                with suppress(SinkError):  # perhaps nothing opens it again
                    self.settle()
            descriptor, self._descriptor = self._descriptor, -1
            with storage_errors(self.path):
                os.close(descriptor)


def stat_of(path: str) -> os.stat_result | None:
    """The status of a file; None if it does not exist."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file or folder is the one at this path."""
    at_path = stat_of(path)
    return at_path is not None and os.path.samestat(at_path, os.fstat(descriptor))
