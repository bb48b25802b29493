"""Items that wait for their files.

The files of an item are fetched one after the other. Each is a request of its own, which carries the encoded item, the
entries of the files that are done, and the files that are left. When it is settled, the same atomic step of the
frontier adds either the request for the next file, or the complete item to the item log. So an item is never lost, and
never stored twice, whatever crashes. See decision 0020.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from shoal.clients.object_urls import is_object_url
from shoal.config import Config
from shoal.errors import FileStoreError, RequestError, SpiderError
from shoal.http import File, Request, Response
from shoal.http.files import FILE_CALLBACK, FileEntry
from shoal.item import decode_item, encode_item, encode_record
from shoal.sinks.downloads import FileKeeper
from shoal.spider import SpiderStats
from shoal.urls.normalize import Scope, join_url

log = logging.getLogger("shoal.files")

MAX_FILES = 1000
"""Maximum files of one item. Each request carries the entries of the files before it."""


class WantedFile(msgspec.Struct, array_like=True):
    """A file that is not fetched yet."""

    field: str
    url: str
    headers: dict[str, str] = {}
    cookies: dict[str, str] = {}
    error: str = ""
    """Why it cannot be fetched."""


class Chain(msgspec.Struct, omit_defaults=True):
    """An item and its files. Requests carry it as ``cb_kwargs``."""

    item: bytes
    """Encoded; empty if there is none: then the entry itself is the item."""
    wanted: list[WantedFile]
    """The first one is being fetched."""
    priority: float = 0
    done: list[tuple[str, FileEntry]] = []

    def finish(self, entry: FileEntry) -> None:
        """Record the result of the first file."""
        self.done = [*self.done, (self.wanted[0].field, entry)]
        self.wanted = self.wanted[1:]

    def complete(self) -> bytes:
        """The encoded item, with the entries of all files."""
        if not self.item:
            return encode_item(self.done[0][1])
        name, record = decode_item(self.item)
        entries: dict[str, list[FileEntry]] = {}
        for field, entry in self.done:
            entries.setdefault(field, []).append(entry)
        return encode_record(name, record | entries)


Step: TypeAlias = bytes | Request
"""What follows a file: the request for the next one, or the encoded item."""


class StoredResponse(Response):
    """Stands for the response to a request for a file that is in the store already."""

    __slots__ = ("entry",)

    def __init__(self, request: Request, entry: FileEntry) -> None:
        super().__init__(request.url, request=request, from_cache=True)
        self.entry = entry


class FileChains:
    """Makes the requests for files, and stores what they fetch. Many tasks may call it at the same time."""

    def __init__(self, config: Config, scope: Scope, stats: SpiderStats) -> None:
        self._config = config
        self._scope = scope
        self._stats = stats
        self._opened: FileKeeper | None = None
        if config.images.thumbs or is_object_url(config.files.store):
            _ = self.keeper  # a wrong setting, or a missing package, is an error before the first page

    @property
    def keeper(self) -> FileKeeper:
        """The store, opened when it is needed. ConfigError if a setting is wrong."""
        if self._opened is None:
            self._opened = FileKeeper(self._config.files, self._config.images)
        return self._opened

    async def begin(self, files: Sequence[File], item: bytes, page: Request, response: Response | None) -> Step:
        """The first step for an item and its files. ``response`` is the page; None in an errback."""
        if len(files) > MAX_FILES:
            raise SpiderError(f"an item has {len(files)} files; the limit is {MAX_FILES}")
        wanted = [_wanted(file, page, response) for file in files]
        priorities = [file.priority for file in files if file.priority is not None]
        return await self._next(Chain(item, wanted, priorities[0] if priorities else page.priority + 1), page)

    async def known(self, request: Request) -> Response | None:
        """The response to a request for a file that another item had stored meanwhile; None if it must be fetched.
        FileStoreError if the store fails."""
        entry = await self.keeper.known(_chain_of(request).wanted[0].url)
        return None if entry is None else StoredResponse(request, entry)

    async def fetched(self, request: Request, response: Response) -> Step:
        """Store a file, and return the next step. FileStoreError if the store fails.
        FileTooLargeError if it cannot hold this file."""
        if isinstance(response, StoredResponse):
            self._stats.inc("files reused")
            return await self._finish(request, response.entry)
        if not response.ok:
            return await self.failed(request, f"HTTP status {response.status}")
        url = _chain_of(request).wanted[0].url
        entry = await self.keeper.save(response.body, url, response.headers.get("Content-Type", ""))
        self._stats.inc("files stored")
        return await self._finish(request, entry)

    async def failed(self, request: Request, reason: str) -> Step:
        """Record that a file cannot be fetched, and return the next step."""
        self._stats.inc("files failed")
        return await self._finish(request, {"url": _chain_of(request).wanted[0].url, "error": reason})

    async def store(self, response: Response) -> None:
        """Store what a callback passed to ``response.save()``. Raises the same as ``fetched``."""
        for entry in response.saved or ():
            await self.keeper.store(entry, response.body)
            self._stats.inc("files stored")

    async def _finish(self, request: Request, entry: FileEntry) -> Step:
        chain = _chain_of(request)
        chain.finish(entry)
        return await self._next(chain, request)

    async def _next(self, chain: Chain, origin: Request) -> Step:
        """The request for the next file that must be fetched. Files that are stored, or refused, need none."""
        while chain.wanted:
            first = chain.wanted[0]
            error = first.error or self._scope.refuses(first.url)
            if error:
                self._stats.inc("files failed")
                chain.finish({"url": first.url, "error": first.error or f"not fetched: the URL is {error}"})
            elif (entry := await self._known(first.url)) is not None:
                self._stats.inc("files reused")
                chain.finish(entry)
            else:
                return _request(chain, origin)
        return chain.complete()

    async def _known(self, url: str) -> FileEntry | None:
        try:
            return await self.keeper.known(url)
        except FileStoreError as error:  # the request for it meets the error too
            log.info("can't look up a file: %s", error)
            return None


def _wanted(file: File, page: Request, response: Response | None) -> WantedFile:
    """RequestError or SpiderError if the file is wrong. A wrong URL may come from the page: it is an entry."""
    if not isinstance(file.field, str) or not file.field or "\0" in file.field:
        raise SpiderError(f"the field of a file must be a name, not {file.field!r:.80}")
    if not isinstance(file.url, str) or not file.url.strip():
        return WantedFile(file.field, "", error="not fetched: there is no URL")
    is_absolute = file.url.startswith(("http://", "https://"))  # then the page need not be parsed for its base
    base = page.url if response is None else response.url if is_absolute else response.base_url
    try:
        url = join_url(base, file.url)
    except RequestError as exc:
        return WantedFile(file.field, file.url, error=f"not fetched: {exc}")
    Request(url, headers=file.headers, cookies=file.cookies)  # checks them, for all files of the item
    return WantedFile(file.field, url, file.headers, file.cookies)


def _request(chain: Chain, origin: Request) -> Request:
    first = chain.wanted[0]
    carried: dict[str, object] = msgspec.to_builtins(chain, builtin_types=(bytes,))
    return Request(
        first.url, FILE_CALLBACK, headers=first.headers, cookies=first.cookies, cb_kwargs=carried,
        priority=chain.priority, depth=origin.depth, render=False,
        dont_filter=True,  # an item needs its file, even if another item has the same one
    )  # fmt: skip


def _chain_of(request: Request) -> Chain:
    return msgspec.convert(request.cb_kwargs, Chain)
