"""Reads the results of a session: all at once, in pages, or as they are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, cast

import msgspec
from msgspec import Struct

from shoal.batch.redaction import redacted
from shoal.batch.session import POLL_EVERY, Session
from shoal.batch.spider import failed_result
from shoal.errors import StoreRewoundError
from shoal.item import decode_item
from shoal.ports import LoggedItem

Result: TypeAlias = dict[str, object]

_READ_BATCH = (16, 1 << 20)  # results, and expected bytes: one result may have many megabytes
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


class BatchResults(Struct, frozen=True, kw_only=True):
    """The results so far: first those of the batch's URLs in their order, then those of followed links."""

    results: list[Result]
    stats: dict[str, int]


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
        async for portion in self._portions(after):
            for number, entry in portion:
                size = len(entry.payload) if isinstance(entry, LoggedItem) else 0
                if page and size > bytes_left:
                    return page
                page.append((number, self._decode(entry, whole=size <= bytes_left)))
                bytes_left -= size
                if len(page) == limit:
                    return page
        return page

    async def read_outlines(self, after: int, limit: int, max_bytes: int) -> list[tuple[int, Result]]:
        """One page of numbered results after number ``after``, without their contents: up to ``limit``, and fewer if
        more than ``max_bytes`` had to be read for them."""
        page: list[tuple[int, Result]] = []
        size = 0
        async for portion in self._portions(after):
            for number, entry in portion:
                page.append((number, self._decode(entry, whole=False)))
                size += len(entry.payload) if isinstance(entry, LoggedItem) else 0
                if len(page) == limit or size > max_bytes:
                    return page
        return page

    async def follow(self, after: int = 0) -> AsyncIterator[list[tuple[int, Result]]]:
        """Numbered results after number ``after`` as they are fetched, until the session is over or the server shuts
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
                    yield [(number, self._decode(entry)) for number, entry in new]
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

    async def read_all(self, max_bytes: int) -> BatchResults:
        """All results. Contents beyond ``max_bytes`` are left out; ``truncated`` marks these results."""
        state = await self._session.state()
        by_position: dict[int, Result] = {}
        found: list[Result] = []
        size = 0
        async for items in self._read_log(0):
            for item in items:
                size += len(item.payload)
                result = _decode_item(item, whole=size <= max_bytes)
                position = result.pop("place", None)
                if isinstance(position, int):
                    by_position[position] = result
                else:
                    found.append(result)
        if state == "finished":
            by_position |= await self._explain_missing(by_position)
        results = self._in_order(by_position, "cancelled" if state == "cancelled" else "pending") + found
        return BatchResults(results=results, stats=count_statuses(results))

    # -- reading

    async def _portions(self, after: int) -> AsyncIterator[Sequence[tuple[int, LoggedItem | Result]]]:
        """All entries after number ``after``, a few at a time and not decoded."""
        is_finished = await self._session.state() == "finished"  # read first: the log does not grow after that
        invalid = list(self._invalid.values())
        if after < len(invalid):
            yield list(enumerate(invalid[after:], after + 1))
        if after < _FIRST_LOST:
            async for items in self._read_log(max(0, after - len(invalid))):
                yield [(len(invalid) + item.seq, item) for item in items]
        if is_finished:
            lost = await self._find_lost()
            rest = [
                (number, lost[position]) for position in sorted(lost) if (number := _FIRST_LOST + 1 + position) > after
            ]
            if rest:
                yield rest

    async def _read_log(self, after: int) -> AsyncIterator[list[LoggedItem]]:
        """The item log after number ``after``. The size of the last items decides how many are read next."""
        max_count, max_bytes = _READ_BATCH
        count = 1
        if self._last is not None and self._last.seq != after:
            self._last = None
        while items := await self._frontier.read_items(after, count, last=self._last):
            yield items
            await asyncio.sleep(0)  # a memory store never suspends: let other tasks run
            after = items[-1].seq
            self._last = items[-1] if self._follows else None
            largest = max(len(item.payload) for item in items)
            count = max(1, min(max_count, 4 * count, max_bytes // max(1, largest)))

    def _decode(self, entry: LoggedItem | Result, *, whole: bool = True) -> Result:
        """A result under the URL that the caller sent."""
        if isinstance(entry, dict):
            return entry
        result = _decode_item(entry, whole=whole)
        position = result.pop("place", None)
        return {**result, "url": self._urls.urls[position]} if isinstance(position, int) else result

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
        known: set[int] = set()
        async for items in self._read_log(0):
            known.update(place for item in items if (place := _decode_outline(item.payload)[1].place) is not None)
        return await self._explain_missing(known)

    async def _explain_missing(self, known: Collection[int]) -> dict[int, Result]:
        """Failed results for the URLs of a finished session whose positions are not ``known``."""
        missing = {url: position for url, position in self._urls.positions.items() if position not in known}
        if not missing:
            return {}
        dead = {history.url: history.reason async for history in self._frontier.dead()}
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
    kept = {name: result[name] for name in ("status", "http_status", "depth", "worker_id", "fetched_at")}
    error = cast(dict[str, str] | None, result["error"])
    if error is not None:
        error = {**error, "message": f"see results[{position}]"}
    return {"url": url, **_UNFETCHED, **failed_result("", ""), **kept, "error": error, "same_as": position}


def _decode_item(item: LoggedItem, *, whole: bool) -> Result:
    """A result as it is stored, with or without its content."""
    if whole:
        return decode_item(item.payload)[1]
    return {**msgspec.structs.asdict(_decode_outline(item.payload)[1]), "content": None, "truncated": True}


def count_statuses(results: Sequence[Mapping[str, object]]) -> dict[str, int]:
    statuses = [result["status"] for result in results]
    return {
        "total": len(results),
        "success": statuses.count("success"),
        "failed": statuses.count("failed"),
        "pending": statuses.count("pending"),
        "cancelled": statuses.count("cancelled"),
        "workers_used": len({result["worker_id"] for result in results if result["worker_id"]}),
    }
