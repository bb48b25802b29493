"""Stores files: the content once, its thumbnails, and an index of URLs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TypeVar

import msgspec

from shoal.config import FileSettings, ImageSettings
from shoal.errors import DECODING_ERRORS, ConfigError, FileStoreError, FileTooLargeError
from shoal.files.stores import FileStore, open_file_store
from shoal.http.files import FileEntry, describe_file, is_image
from shoal.suggestions import pip_install
from shoal.urls.normalize import normalize_url

_LARGE = 1 << 20  # bytes; the checksum of more is computed in a thread
_RETRY_DELAYS = (0.25, 0.75, 2.0)

T = TypeVar("T")


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
            entry = await asyncio.to_thread(describe_file, body, url, content_type)
        await self.store(entry, body)
        indexed = _Indexed(normalize_url(url), time.time(), self._images.thumbs, entry)
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
        found = await self._call(partial(self._store.get, _index_path(url)))
        if found is None:
            return None
        try:
            indexed = _decode(found)
            paths = [str(indexed.entry["path"]), *map(str, indexed.entry.get("thumbs", {}).values())]
        except (*DECODING_ERRORS, KeyError, AttributeError):
            return None
        is_fresh = 0 <= time.time() - indexed.fetched_at < self._max_age
        if indexed.url != normalize_url(url) or not is_fresh or indexed.sizes != self._images.thumbs:
            return None
        for path in paths:
            if not await self._call(partial(self._store.exists, path)):
                return None
        return indexed.entry

    async def _add_thumbnails(self, entry: FileEntry, body: bytes) -> None:
        """Add the thumbnails to the entry. If the image cannot be read, the entry gets an error. The file is stored
        anyway."""
        from shoal.files.thumbnails import make_thumbnails

        sizes = [_pixels(name) for name in self._images.thumbs]
        try:
            made = await asyncio.to_thread(make_thumbnails, body, sizes, self._images.max_pixels)
        except ValueError as exc:
            entry["error"] = f"no thumbnail: {exc}"
            return
        checksum, thumbs = entry["checksum"], dict[str, str]()
        for name, data in zip(self._images.thumbs, made, strict=True):
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
