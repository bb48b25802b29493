"""Where files are stored: a folder, or object storage. Paths come from checksums, so an object never changes."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from contextlib import suppress
from typing import Protocol

from shoal.errors import ConfigError, FileStoreError, FileTooLargeError
from shoal.stores.objects import is_object_url, parse_place
from shoal.suggestions import pip_install

_TEMPORARY = ".tmp"
"""The folder of files that are being written. A rename moves them to their place in one step."""
_OLD = 86400.0  # seconds after which a file there was left by a process that died
_PERMANENT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})


class FileStore(Protocol):
    """A store of files by path. Many processes may use it.

    Its errors, and what becomes of the crawl:

    ==========================  =============================================  ===================================
    error                       examples                                       consequence
    ==========================  =============================================  ===================================
    FileStoreError, retryable   disk full, quota, I/O error, server away,      the page is released, nothing more
                                status 429 or 5xx, a folder that was removed   is fetched until the store works
    FileStoreError              permission denied, read-only, not a folder,    the crawl stops
                                path too long, no credentials, no bucket
    FileTooLargeError           beyond the maximum size of a file or object    an error in the item; the page of
                                                                               ``response.save()`` fails
    ==========================  =============================================  ===================================

    Nothing else depends on the file: names come from checksums, and images that cannot be read are stored.
    """

    async def check(self) -> None:
        """FileStoreError if nothing can be stored here, as far as that can be seen without storing something."""
        ...

    async def put(self, path: str, data: bytes, content_type: str, *, replace: bool = False) -> None:
        """Store a file durably and completely. If the path exists, keep the old file, unless ``replace``."""
        ...

    async def get(self, path: str) -> bytes | None:
        """The content; None if the path does not exist."""
        ...

    async def exists(self, path: str) -> bool: ...


def open_file_store(location: str) -> FileStore:
    """The store at a folder or a URL. ConfigError if it is invalid."""
    if not is_object_url(location):
        return FolderStore(location)
    place, _ = parse_place(location)
    try:
        from shoal.files.object_store import ObjectFileStore
    except ImportError as exc:
        raise ConfigError(f'"files.store" {place.name} needs obstore: {pip_install("objects")}') from exc
    return ObjectFileStore(place)


class FolderStore:
    """Files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._made: set[str] = set()

    async def check(self) -> None:
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        """The folder, or the first one above it that exists, must be a folder in which this process may write."""
        folder = self._folder
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        code = 0
        if not os.path.isdir(folder):
            code = errno.ENOTDIR
        elif not os.access(folder, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code:
            raise self._error(OSError(code, f"{os.strerror(code)}: {folder}"))

    async def put(self, path: str, data: bytes, content_type: str, *, replace: bool = False) -> None:
        await asyncio.to_thread(self._put, path, data, replace)

    async def get(self, path: str) -> bytes | None:
        return await asyncio.to_thread(self._get, path)

    async def exists(self, path: str) -> bool:
        return await asyncio.to_thread(os.path.exists, os.path.join(self._folder, path))

    def _get(self, path: str) -> bytes | None:
        try:
            with open(os.path.join(self._folder, path), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._error(exc) from exc

    def _put(self, path: str, data: bytes, replace: bool) -> None:
        target = os.path.join(self._folder, path)
        if not replace and os.path.exists(target):
            return
        try:
            self._make_folders(os.path.dirname(target))
            temporary = os.path.join(self._folder, _TEMPORARY, secrets.token_hex(16))
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, target)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            _sync(os.path.dirname(target))
        except OSError as exc:
            self._made.clear()  # somebody may have removed a folder
            raise self._error(exc) from exc

    def _make_folders(self, folder: str) -> None:
        """Make the folder durable before its first file."""
        if not self._made:
            os.makedirs(os.path.join(self._folder, _TEMPORARY), exist_ok=True)
            self._remove_old()
            self._made.add(self._folder)
        if folder not in self._made:
            os.makedirs(folder, exist_ok=True)
            while len(folder) > len(self._folder):
                self._made.add(folder)
                folder = os.path.dirname(folder)
                _sync(folder)

    def _remove_old(self) -> None:
        with suppress(OSError), os.scandir(os.path.join(self._folder, _TEMPORARY)) as found:
            for each in found:
                if each.stat().st_mtime < time.time() - _OLD:
                    os.unlink(each.path)

    def _error(self, exc: OSError) -> FileStoreError | FileTooLargeError:
        message = f"can't store a file in {self._folder}: {exc.strerror or exc} (files.store)"
        if exc.errno == errno.EFBIG:
            return FileTooLargeError(message)
        return FileStoreError(message, retryable=exc.errno not in _PERMANENT)


def _sync(folder: str) -> None:
    """Make the entries of a folder durable, if the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
