"""Reads the results of a session: all at once, in pages, or as they are fetched."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from shoal.api.batch.session import POLL_EVERY, Session
from shoal.api.batch.spider import failed_result
from shoal.api.batch.urls import redacted
from shoal.errors import StoreRewoundError
from shoal.item import decode_item
from shoal.ports import LoggedItem
from shoal.urls.normalize import normalize_url

Result: TypeAlias = dict[str, object]
T = TypeVar("T")

_READ_BATCH = (64, 1 << 20)  # results and bytes: one result may have many megabytes
_MAX_TITLE = 1000  # characters, in results without their content
_FIRST_LOST = 10**12
"""The numbers of results that are not in the item log start after this one, in the order of their URLs."""


class _Outline(Struct):
    """A result without its content, which is not decoded."""

    status: str
    url: str
    final_url: str | None
    http_status: int | None
    title: str | None
    content_type: str | None
    worker_id: str | None
    depth: int
    fetched_at: float | None
    error: dict[str, str] | None
    place: int | None = None


_decode_outline = msgspec.msgpack.Decoder(tuple[str, _Outline]).decode


class Entry(Struct, frozen=True):
    """A result that is decoded when it is needed: its content may have many megabytes."""

    number: int
    size: int
    """Of its stored form, in bytes. 0: it has no content."""
    decode: Callable[[bool], Result]
    """Returns the result. False: without its content."""


class BatchResults(NamedTuple):
    """The results so far: first those of the batch's URLs in their order, then those of followed links."""

    stats: dict[str, int]
    portions: AsyncGenerator[list[Entry]]


class SessionResults:
    """The results of a session.

    Each result has a number, by which readers continue where they stopped: first the invalid URLs, then the item log,
    and at the end of a finished session the URLs that have no result in the log.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._frontier = session.frontier
        self._urls = session.urls
        self._follows = False
        self._last: LoggedItem | None = None
        """The item that ``follow`` read last. With it the store notices that it went back in time since."""

    async def read(self, after: int, limit: int, max_bytes: int) -> list[tuple[int, Result]]:
        """One page of numbered results after number ``after``: up to ``limit``, and as many as fit into ``max_bytes``.
        A single result that does not fit is returned without its content."""
        page: list[tuple[int, Result]] = []
        bytes_left = max_bytes
        async for portion in self.portions(after, limit):
            for entry in portion:
                if page and entry.size > bytes_left:
                    return page
                page.append((entry.number, entry.decode(entry.size <= bytes_left)))
                bytes_left -= entry.size
                if len(page) == limit:
                    return page
        return page

    async def portions(self, after: int = 0, limit: int = _READ_BATCH[0]) -> AsyncGenerator[list[Entry]]:
        """The results so far after number ``after``, a few at a time, and no more than ``limit`` at a time."""
        async for portion in self._portions(after, limit):
            yield [self._entry(number, stored) for number, stored in portion]

    async def read_outlines(self, after: int, limit: int, max_bytes: int) -> list[tuple[int, Result]]:
        """One page of numbered results after number ``after``, without their contents: up to ``limit``, and fewer if
        more than ``max_bytes`` had to be read for them."""
        page: list[tuple[int, Result]] = []
        size = 0
        async for portion in self.portions(after, limit):
            for entry in portion:
                page.append((entry.number, entry.decode(False)))
                size += entry.size
                if len(page) == limit or size > max_bytes:
                    return page
        return page

    async def follow(self, after: int = 0) -> AsyncIterator[list[Entry]]:
        """Results after number ``after`` as they are fetched, until the session is over or the server shuts
        down. In small portions, as the reader may be slow. Portions are empty while there is nothing new.

        If the store goes back in time, the results that this call did not return yet follow under their new numbers.
        StoreRewoundError if it does not know them because ``after`` is not 0."""
        self._follows = True
        pause, start, returned = POLL_EVERY[0], after, set[object]()
        while True:
            is_over, before = await self._session.is_over(), after
            try:
                async for portion in self._portions(after):
                    after = portion[-1][0]
                    new = [(number, entry) for number, entry in portion if _identity(number, entry) not in returned]
                    returned.update(_identity(number, entry) for number, entry in new)
                    yield [self._entry(number, entry) for number, entry in new]
            except StoreRewoundError:
                if start:
                    raise
                after, self._last = 0, None
                continue
            if after != before:
                pause = POLL_EVERY[0]
                continue
            if is_over or self._session.is_closing:
                return
            yield []
            await self._session.wait_for_change(pause)
            pause = min(POLL_EVERY[1], 1.5 * pause)

    async def read_all(self) -> BatchResults:
        """All results. Their contents are read again, a few at a time, unless they are small."""
        state = await self._session.state()
        by_position: dict[int, Result] = {}
        followed: list[Result] = []
        size = 0
        async for items in self._read_log(0):
            for item in items:
                outline = _outline(item)
                size += len(item.payload)
                outline[_STORED] = _Stored(item.seq, len(item.payload), item if size <= _READ_BATCH[1] else None)
                position = outline.pop("place")
                if isinstance(position, int):
                    by_position[position] = outline
                else:
                    followed.append(outline)
        if state == "finished":
            by_position |= await self._explain_missing(by_position)
        results = self._in_order(by_position, "cancelled" if state == "cancelled" else "pending") + followed
        return BatchResults(count_statuses(results), self._with_contents(results))

    async def _with_contents(self, results: list[Result]) -> AsyncGenerator[list[Entry]]:
        """The results of outlines, in order."""
        for numbered in grouped(enumerate(results), _stored_size, *_READ_BATCH):
            stored = {number: cast(_Stored, result.pop(_STORED, _NOT_STORED)) for number, result in numbered}
            items = {number: content.item for number, content in stored.items()}
            reads = {
                number: self._read_stored(content)
                for number, content in stored.items()
                if content.size and not content.item
            }
            if reads:
                items.update(zip(reads, await asyncio.gather(*reads.values()), strict=True))
            yield [
                Entry(number, stored[number].size if items[number] else 0, partial(_merge, result, items[number]))
                for number, result in numbered
            ]

    async def _read_stored(self, stored: _Stored) -> LoggedItem | None:
        """The item of an outline. None if it is gone: the session expired meanwhile, or the store went back."""
        items = await self._frontier.read_items(stored.seq - 1, 1)
        return items[0] if items and (items[0].seq, len(items[0].payload)) == stored[:2] else None

    # -- reading

    async def _portions(
        self, after: int, limit: int = _READ_BATCH[0]
    ) -> AsyncIterator[Sequence[tuple[int, LoggedItem | Result]]]:
        """All entries after number ``after``, a few at a time and not decoded."""
        is_finished = await self._session.state() == "finished"  # read first: the log does not grow after that
        invalid = list(self._invalid.values())
        if after < len(invalid):
            yield list(enumerate(invalid[after:], after + 1))
        if after < _FIRST_LOST:
            async for items in self._read_log(max(0, after - len(invalid)), limit):
                yield [(len(invalid) + item.seq, item) for item in items]
        if is_finished:
            lost = await self._find_lost()
            rest = [
                (number, lost[position]) for position in sorted(lost) if (number := _FIRST_LOST + 1 + position) > after
            ]
            if rest:
                yield rest

    async def _read_log(self, after: int, limit: int = _READ_BATCH[0]) -> AsyncIterator[list[LoggedItem]]:
        """The item log after number ``after``, a few items at a time."""
        if self._last is not None and self._last.seq != after:
            self._last = None
        count, most = min(limit, _READ_BATCH[0]), _READ_BATCH[1]
        while items := await self._frontier.read_items(after, count, last=self._last, max_bytes=most):
            yield items
            await asyncio.sleep(0)  # a memory store never suspends: let other tasks run
            after = items[-1].seq
            self._last = items[-1] if self._follows else None

    def _entry(self, number: int, stored: LoggedItem | Result) -> Entry:
        if isinstance(stored, LoggedItem):
            return Entry(number, len(stored.payload), partial(self._decode, stored))
        return Entry(number, 0, lambda whole: stored)

    def _decode(self, item: LoggedItem, whole: bool) -> Result:
        """A result under the URL that the caller sent."""
        result = decode_item(item.payload)[1] if whole else _outline(item)
        position = result.pop("place", None)
        if isinstance(position, int):
            result["url"] = self._urls.urls[position]
        return result

    # -- URLs without a result in the log

    @cached_property
    def _invalid(self) -> dict[int, Result]:
        """The results of invalid URLs, by position. The frontier does not have these URLs."""
        return {
            position: self._unfetched(position, failed_result("url", reason))
            for position, reason in self._urls.invalid.items()
        }

    def _in_order(self, by_position: Mapping[int, Result], status: str) -> list[Result]:
        """A result for each URL, in order. ``status``: that of URLs without a result. A URL that was sent more than
        once has one result; the others only refer to it."""
        missing = {**_UNFETCHED, **failed_result("", ""), "status": status, "error": None}
        results: list[Result] = []
        for position, url in enumerate(self._urls.urls):
            if position in self._invalid:
                results.append(self._invalid[position])
                continue
            first = self._urls.positions[self._urls.normalized[position]]
            if first == position:
                results.append({**by_position.get(first, missing), "url": url})
            else:
                results.append(_duplicate(url, results[first], first))
        return results

    async def _find_lost(self) -> dict[int, Result]:
        """The results of URLs that are not in the log of a finished session, by position."""
        stats = await self._session.stats()
        follows_links = bool(self._session.options.depth)
        if not stats.remaining and (not stats.dead or (not follows_links and stats.items >= len(self._urls.positions))):
            return {}
        numbers: set[int] = set()
        async for items in self._read_log(0):
            numbers.update(place for item in items if (place := _decode_outline(item.payload)[1].place) is not None)
        return await self._explain_missing(numbers)

    async def _explain_missing(self, numbers: Collection[int]) -> dict[int, Result]:
        """Failed results for the URLs of a finished session whose positions are not ``known``."""
        missing = {url: position for url, position in self._urls.positions.items() if position not in numbers}
        if not missing:
            return {}
        dead = {normalize_url(history.url): history.reason async for history in self._frontier.dead()}
        options = self._session.options
        is_full = bool(options.depth) and (await self._session.stats()).done >= options.max_pages
        results = {}
        for url, position in missing.items():
            if is_full and url not in dead:
                failure = failed_result(
                    "limit", f"the batch reached its limit of {options.max_pages} pages (max_pages)"
                )
            else:
                failure = failed_result("worker lost", redacted(dead.get(url, "not fetched")))
            results[position] = self._unfetched(position, failure)
        return results

    def _unfetched(self, position: int, failure: Result) -> Result:
        return {"url": self._urls.urls[position], **_UNFETCHED, **failure}


def _identity(number: int, entry: LoggedItem | Result) -> object:
    """Identifies a result, also after the store went back in time."""
    return (entry.fingerprint, entry.index) if isinstance(entry, LoggedItem) else number


_UNFETCHED = {"final_url": None, "depth": 0, "worker_id": None, "fetched_at": None}


def _duplicate(url: str, result: Result, position: int) -> Result:
    """The result of a URL that was sent before, at ``position``. Nothing in it is as long as a page may make it."""
    same = {name: result[name] for name in ("status", "http_status", "depth", "worker_id", "fetched_at")}
    error = cast(dict[str, str] | None, result["error"])
    if error is not None:
        error = {**error, "message": f"see results[{position}]"}
    return {"url": url, **_UNFETCHED, **failed_result("", ""), **same, "error": error, "same_as": position}


class _Stored(NamedTuple):
    """Where the content of a result is in the item log."""

    seq: int
    size: int
    item: LoggedItem | None


_STORED = "(stored)"  # key of an outline, until it is sent
_NOT_STORED = _Stored(0, 0, None)


def _stored_size(numbered: tuple[int, Result]) -> int:
    return cast(_Stored, numbered[1].get(_STORED, _NOT_STORED)).size


def grouped(values: Iterable[T], size_of: Callable[[T], int], limit: int, max_bytes: int) -> Iterator[list[T]]:
    """The values a few at a time: up to ``limit``, and as many as have ``max_bytes`` together."""
    group: list[T] = []
    total = 0
    for value in values:
        size = size_of(value)
        if group and (len(group) == limit or total + size > max_bytes):
            yield group
            group, total = [], 0
        group.append(value)
        total += size
    if group:
        yield group


def _outline(item: LoggedItem) -> Result:
    """A result as it is stored, without its content. Its title is shortened: a page may have one of megabytes."""
    outline = _decode_outline(item.payload)[1]
    title = None if outline.title is None else outline.title[:_MAX_TITLE]
    return {**msgspec.structs.asdict(outline), "title": title, "content": None, "truncated": True}


def _merge(outline: Result, item: LoggedItem | None, whole: bool) -> Result:
    """The result of an outline, with or without its content."""
    if item is None or not whole:
        return outline
    result = decode_item(item.payload)[1]
    result.pop("place", None)
    return {**result, "url": outline["url"]}


def count_statuses(results: Sequence[Mapping[str, object]]) -> dict[str, int]:
    statuses = Counter(result["status"] for result in results)
    counts = {status: statuses[status] for status in ("success", "failed", "pending", "cancelled")}
    workers = {result["worker_id"] for result in results if result["worker_id"]}
    return {"total": len(results), **counts, "workers_used": len(workers)}
