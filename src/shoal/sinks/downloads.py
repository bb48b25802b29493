"""Stores files: the content once, its thumbnails, and an index of URLs."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Protocol, TypeVar

import msgspec

from shoal.clients.object_urls import is_object_url, parse_place
from shoal.config import FileSettings, ImageSettings
from shoal.errors import DECODING_ERRORS, ConfigError, FileStoreError, FileTooLargeError
from shoal.http.files import FileEntry, describe_file, is_image
from shoal.messages import pip_install
from shoal.sinks.storage import sync_folder
from shoal.system import chance, clock, threads
from shoal.urls.normalize import normalize_url

T = TypeVar("T")

_LARGE = 1 << 20  # bytes; the checksum of more is computed in a thread
_RETRY_DELAYS = (0.25, 0.75, 2.0)
_TEMPORARY = ".tmp"
"""The folder of files that are being written. A rename moves them to their place in one step."""
_OLD = 86400.0  # seconds after which a file there was left by a process that died
_PERMANENT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})


# -- stores: a folder, or object storage. Paths come from checksums, so an object never changes.


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
        from shoal.sinks.object_downloads import ObjectFileStore
    except ImportError as exc:
        raise ConfigError(f'"files.store" {place.name} needs obstore: {pip_install("objects")}') from exc
    return ObjectFileStore(place)


class FolderStore:
    """Files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._made: set[str] = set()

    async def check(self) -> None:
        await threads.call(self._check)

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
        await threads.call(self._put, path, data, replace)

    async def get(self, path: str) -> bytes | None:
        return await threads.call(self._get, path)

    async def exists(self, path: str) -> bool:
        return await threads.call(os.path.exists, os.path.join(self._folder, path))

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
            temporary = os.path.join(self._folder, _TEMPORARY, chance.token_hex(16))
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
            sync_folder(target)
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
                sync_folder(folder)
                folder = os.path.dirname(folder)

    def _remove_old(self) -> None:
        with suppress(OSError), os.scandir(os.path.join(self._folder, _TEMPORARY)) as entries:
            for entry in entries:
                if entry.stat().st_mtime < clock.time() - _OLD:
                    os.unlink(entry.path)

    def _error(self, exc: OSError) -> FileStoreError | FileTooLargeError:
        message = f"can't store a file in {self._folder}: {exc.strerror or exc} (files.store)"
        if exc.errno == errno.EFBIG:
            return FileTooLargeError(message)
        return FileStoreError(message, retryable=exc.errno not in _PERMANENT)


# -- the keeper


class _Indexed(msgspec.Struct):
    """A file in the index, under the checksum of its URL."""

    url: str
    fetched_at: float
    sizes: tuple[str, ...]
    """The sizes of the thumbnails that were made."""
    entry: FileEntry


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Indexed).decode


async def check_store(files: FileSettings) -> None:
    """FileStoreError if the store that a user chose cannot be used. Most crawls have no files, so the folder that is
    the default is checked with the first file."""
    if files.store != FileSettings().store:
        await _retried(open_file_store(files.store).check)


class FileKeeper:
    """Stores files, and finds those that are stored. Many tasks and processes may use one store."""

    def __init__(self, files: FileSettings, images: ImageSettings) -> None:
        """ConfigError if a setting is invalid, or needs a package that is not installed."""
        self._store: FileStore = open_file_store(files.store)
        self._max_age = files.max_age
        self._images = images
        self._failed: Callable[[], Awaitable[object]] | None = None
        """The call of the store that failed last, until it succeeds. Others may succeed meanwhile: a disk that is full
        has room for a small file."""
        if images.thumbs:
            _need_pillow()

    async def save(self, body: bytes, url: str, content_type: str = "") -> FileEntry:
        """Store a file with its thumbnails, and return its entry. FileStoreError if the store fails.

        A repeated call stores nothing new."""
        if len(body) < _LARGE:
            entry = describe_file(body, url, content_type)
        else:
            entry = await threads.call(describe_file, body, url, content_type)
        await self.store(entry, body)
        indexed = _Indexed(normalize_url(url), clock.time(), self._images.thumbs, entry)
        await self._put(_index_path(url), _encode(indexed), "application/json", replace=True)
        return entry

    async def store(self, entry: FileEntry, body: bytes) -> None:
        """Store the content that `describe_file` described, and add its thumbnails to the entry."""
        await self._put(entry["path"], body, entry["content_type"])
        if self._images.thumbs and is_image(body, entry["content_type"]):
            await self._add_thumbnails(entry, body)

    async def known(self, url: str) -> FileEntry | None:
        """The entry of a URL that was stored less than ``files.max_age`` seconds ago, if its content and its thumbnails
        are still there. None if there is none. FileStoreError if the store fails."""
        if not self._max_age:
            return None
        content = await self._call(partial(self._store.get, _index_path(url)))
        if content is None:
            return None
        try:
            indexed = _decode(content)
            paths = [str(indexed.entry["path"]), *map(str, indexed.entry.get("thumbs", {}).values())]
        except (*DECODING_ERRORS, KeyError, AttributeError):
            return None
        is_fresh = 0 <= clock.time() - indexed.fetched_at < self._max_age
        if indexed.url != normalize_url(url) or not is_fresh or indexed.sizes != self._images.thumbs:
            return None
        for path in paths:
            if not await self._call(partial(self._store.exists, path)):
                return None
        return indexed.entry

    async def _add_thumbnails(self, entry: FileEntry, body: bytes) -> None:
        """Add the thumbnails to the entry. If the image cannot be read, the entry gets an error. The file is stored
        anyway."""
        from shoal.sinks.thumbnails import make_thumbnails

        sizes = [_pixels(name) for name in self._images.thumbs]
        try:
            thumbnails = await threads.call(make_thumbnails, body, sizes, self._images.max_pixels)
        except ValueError as exc:
            entry["error"] = f"no thumbnail: {exc}"
            return
        checksum, thumbs = entry["checksum"], dict[str, str]()
        for name, data in zip(self._images.thumbs, thumbnails, strict=True):
            thumbs[name] = f"thumbs/{name}/{checksum[:2]}/{checksum}.jpg"
            await self._put(thumbs[name], data, "image/jpeg")
        entry["thumbs"] = thumbs

    async def _put(self, path: str, data: bytes, content_type: str, *, replace: bool = False) -> None:
        await self._call(partial(self._store.put, path, data, content_type, replace=replace))

    async def _call(self, step: Callable[[], Awaitable[T]]) -> T:
        """Call the store. While it fails there are no retries: `retry` finds out when it works again."""
        try:
            return await _retried(step, _RETRY_DELAYS if self._failed is None else ())
        except FileStoreError:
            self._failed = step
            raise

    async def retry(self) -> None:
        """Repeat the call that failed last. FileStoreError if it fails again."""
        if self._failed is not None:
            with suppress(FileTooLargeError):  # the store works again, with another limit
                await self._failed()
            self._failed = None


async def _retried(step: Callable[[], Awaitable[T]], delays: Sequence[float] = _RETRY_DELAYS) -> T:
    """Do a step again if it fails: a store may be away for a moment."""
    for delay in delays:
        try:
            return await step()
        except FileStoreError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(delay)
    return await step()


def _index_path(url: str) -> str:
    name = sha256(normalize_url(url).encode()).hexdigest()
    return f"urls/{name[:2]}/{name}.json"


def _pixels(size: str) -> tuple[int, int]:
    width, _, height = size.partition("x")
    return int(width), int(height)


def _need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as exc:
        raise ConfigError(f'"images.thumbs" needs Pillow: {pip_install("images")}') from exc
