"""One batch, as it is kept: a run whose start requests are the URLs, and whose items are the results."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

import msgspec
from msgspec import Struct

from shoal.batch.options import BatchOptions
from shoal.batch.quota import PER_ENTRY, Room, size_of
from shoal.batch.redaction import redacted
from shoal.batch.settings import SessionSettings, Webhook, read_settings
from shoal.batch.spider import BatchSpider, no_page, shortened, start_requests
from shoal.batch.urls import GivenUrls
from shoal.config import Config
from shoal.errors import RequestError, RunError
from shoal.item import decode_item
from shoal.ports import Frontier, FrontierOptions, LoggedItem, Run, Stats, Store

OVER = ("finished", "cancelled")
"""The states in which nothing more comes."""
_PUSHED_AT_ONCE = 1000
_READ_AT_ONCE = (16, 1 << 20)  # results, and bytes as far as they can be foreseen: a page may have many megabytes
_BEHIND_ALL = 10**12
"""Results of URLs that have none in the item log are numbered from here, by their place."""
_ROLE_TTL = 60.0
_LOOK = (0.02, 0.25)  # seconds between looks at what others do to a session, first and at most


class SessionTooLargeError(RequestError):
    """A batch that holds more at its beginning than a session may hold."""


class _Outline(Struct):
    """A result without its content, which is not even decoded."""

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


class Results(Struct, frozen=True, kw_only=True):
    """What came of a batch so far: first the given URLs in their order, then what was found on them."""

    results: list[dict[str, Any]]
    stats: dict[str, int]


class Session:
    """A batch in a store. Any process may read it; whoever works on it holds leases."""

    def __init__(
        self, store: Store, run: Run, frontier: Frontier, settings: SessionSettings, options: BatchOptions
    ) -> None:
        self.id = run.run_id
        self.created_at = run.created_at
        self.frontier = frontier
        self.settings = settings
        self.options = options
        self.given = settings.given()
        self.room = Room(settings.max_bytes, held_by(self.given, options), frontier)
        self.changed = asyncio.Event()
        """Set by whoever works on it in this process, when there is something new."""
        self.is_left = False
        """This process ends: nobody waits for it here any longer."""
        self.shared = store.shared
        """Whether other processes may work on it too."""
        self.store = store
        self.run = run

    @classmethod
    async def create(
        cls, store: Store, config: Config, urls: Sequence[str], options: BatchOptions, *, caller: str,
        distributed: bool, address: str = "", webhook: Webhook | None = None,
    ) -> Self:  # fmt: skip
        """Its URLs are in the store when this returns. TooManyNamesError for too many internationalized hosts, and
        SessionTooLargeError if the URLs alone take more than a session may hold."""
        given = await GivenUrls.read(list(urls))
        size, limit = held_by(given, options), config.serve.max_session_bytes
        if size > limit:
            raise SessionTooLargeError(
                f"the URLs with their headers and cookies take {size} bytes; a session holds {limit} at most "
                "(serve.max_session_bytes)"
            )
        settings = SessionSettings(
            urls=list(urls),
            normal=["" if normal == url else normal for url, normal in zip(given.urls, given.normal, strict=True)],
            wrong={str(place): shortened(why) for place, why in given.wrong.items()},
            options=options.model_dump(mode="json"), caller=caller, address=address,
            distributed=distributed, networks=config.serve.allow, max_bytes=config.serve.max_session_bytes,
            webhook=webhook, delay=config.download_delay, concurrency_per_host=config.concurrency_per_host,
            max_attempts=options.retries + 1,
        )  # fmt: skip
        run = Run(
            run_id=secrets.token_hex(16), spider=BatchSpider.name, state="running", created_at=time.time(),
            settings=msgspec.to_builtins(settings),
        )  # fmt: skip
        await store.create_run(run)
        session = await cls._of(store, run)
        await session.seed()
        return session

    @classmethod
    async def find(cls, store: Store, session_id: str) -> Self | None:
        """RunError for one that another version of Shoal has made, and this one can't read."""
        run = await store.get_run(session_id)
        return None if run is None or run.spider != BatchSpider.name else await cls._of(store, run)

    @classmethod
    async def _of(cls, store: Store, run: Run) -> Self:
        settings, asked = read_settings(run)
        options = FrontierOptions(
            max_attempts=settings.max_attempts, delay=settings.delay,
            concurrency_per_host=settings.concurrency_per_host,
        )  # fmt: skip
        return cls(store, run, await store.frontier(run.run_id, options), settings, asked)

    # -- for those who work on it

    def config(self, base: Config) -> Config:
        """What the caller asked for, on top of what the server was given."""
        options = self.options
        return base.with_settings(
            {
                "retry.max_attempts": self.settings.max_attempts,
                "robots.obey": options.robots,
                "http.max_body_bytes": min(options.max_bytes, base.http.max_body_bytes),
                "scope.max_depth": options.depth,
                "scope.max_pages": options.max_pages if options.depth else None,
            }
        )

    def spider(self, worker_id: str) -> BatchSpider:
        return BatchSpider(self.options, worker_id, self.given.places if self.options.depth else (), self.room)

    async def seed(self) -> bool:
        """Push the URLs, or what an earlier attempt at it left. False while another process does, or was killed while
        it did. StoreRewoundError: the caller has to recover, and drop what it knows, before it tries again."""
        claim = await self.frontier.claim("seed", _ROLE_TTL)
        if claim is None:
            return not (await self.frontier.stats()).seeding
        # In a thread: a request checks its URL, and ten thousand of them take a good part of a second.
        requests = await asyncio.to_thread(start_requests, self.spider(""), self.given)
        for begin in range(int(claim.cursor or b"0"), len(requests), _PUSHED_AT_ONCE):
            cursor = b"%d" % (begin + _PUSHED_AT_ONCE)
            await self.frontier.push(requests[begin : begin + _PUSHED_AT_ONCE], seed=claim, cursor=cursor)
            claim = claim.moved_to(cursor)
            await asyncio.sleep(0)
        return await self.frontier.relinquish(claim, finished=True)

    async def is_complete(self) -> bool:
        """Whether there is nothing more to do for anyone: all is settled, or the pages that it may have are done. What
        others have leased may still come back to be done again, so it counts for neither."""
        if (await self.frontier.stats()).finished:
            return True
        if not self.options.depth:
            return False
        stats = await self.frontier.stats()
        return stats.done >= self.options.max_pages and not stats.leased

    # -- its state

    async def state(self) -> str:
        """``running``, ``paused``, ``finished`` or ``cancelled``; RunError when it was removed."""
        state = await self.store.run_state(self.id)
        if state is None:
            raise RunError(f"session {self.id} was removed")
        return state

    async def finish(self) -> None:
        with suppress(RunError):  # it was cancelled in this moment
            await self.store.transition(self.id, "finished")
        self.changed.set()

    async def reopen(self) -> None:
        """It was taken for finished, but the store went back in time."""
        if await self.store.run_state(self.id) == "finished" and not await self.is_complete():
            await self.store.transition(self.id, "running")

    async def cancel(self) -> None:
        """Nothing more of it is fetched; what is there can still be read."""
        with suppress(RunError):  # it was finished in this moment
            await self.store.transition(self.id, "cancelled")
        self.changed.set()

    def leave(self) -> None:
        """Let those go who wait for it: they get what is there."""
        self.is_left = True
        self.changed.set()

    async def wait(self, seconds: float) -> None:
        """Until it is over, or for so long."""
        pause = _LOOK[0]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not await self._is_over() and not self.is_left:
                    await self._pause(pause)
                    pause = min(_LOOK[1], 1.5 * pause)

    async def _is_over(self) -> bool:
        self.changed.clear()
        return await self.state() in OVER

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()

    async def follow(self, after: int = 0) -> AsyncIterator[list[tuple[int, dict[str, Any]]]]:
        """What comes in behind ``after``, with its number, until the session is over, or left: a little at a time, as
        who reads may be slow. Empty now and then, so that who waits can see that all is well."""
        pause = _LOOK[0]
        while True:
            over, before = await self._is_over(), after
            async for portion in self._portions(after):
                after = portion[-1][0]
                yield [(number, self._shown(entry)) for number, entry in portion]
            if after != before:
                pause = _LOOK[0]
                continue
            if over or self.is_left:
                return
            yield []
            await self._pause(pause)
            pause = min(_LOOK[1], 1.5 * pause)

    # -- its results

    async def read(self, after: int, limit: int, max_bytes: int) -> list[tuple[int, dict[str, Any]]]:
        """Results in the order in which they came in, each with its number: up to ``limit``, and as many as fit into
        ``max_bytes``. One that does not fit alone comes without its content. What is no URL is first. What came to no
        result is last, once the session is finished."""
        found: list[tuple[int, dict[str, Any]]] = []
        room = max_bytes
        async for portion in self._portions(after):
            for number, entry in portion:
                size = len(entry.payload) if isinstance(entry, LoggedItem) else 0
                if found and size > room:
                    return found
                found.append((number, self._shown(entry, whole=size <= room)))
                room -= size
                if len(found) == limit:
                    return found
        return found

    async def _portions(self, after: int) -> AsyncIterator[Sequence[tuple[int, LoggedItem | dict[str, Any]]]]:
        """All that is behind ``after`` by now, some at a time and not decoded."""
        finished = await self.state() == "finished"  # asked before the log is read: nothing comes into it after that
        wrong = list(self._wrong.values())
        if after < len(wrong):
            yield list(enumerate(wrong[after:], after + 1))
        if after < _BEHIND_ALL:
            async for items in self._logged(max(0, after - len(wrong))):
                yield [(len(wrong) + item.seq, item) for item in items]
        if finished:
            lost = await self._without_result()
            behind = [(number, lost[place]) for place in sorted(lost) if (number := _BEHIND_ALL + 1 + place) > after]
            if behind:
                yield behind

    async def _logged(self, after: int) -> AsyncIterator[list[LoggedItem]]:
        """The item log. How much is read at once depends on how large the last ones were."""
        most, most_bytes = _READ_AT_ONCE
        count = 1
        while items := await self.frontier.read_items(after, count):
            yield items
            await asyncio.sleep(0)  # a store in memory answers at once: let others have their turn
            after = items[-1].seq
            largest = max(len(item.payload) for item in items)
            count = max(1, min(most, 4 * count, most_bytes // max(1, largest)))

    def _shown(self, entry: LoggedItem | dict[str, Any], *, whole: bool = True) -> dict[str, Any]:
        """As the caller gets it: under the URL that it gave."""
        if isinstance(entry, dict):
            return entry
        result = _decoded(entry, whole=whole)
        place = result.pop("place", None)
        return {**result, "url": self.settings.urls[place]} if place is not None else result

    @cached_property
    def _wrong(self) -> dict[int, dict[str, Any]]:
        """The results of what is no URL, by place: nothing of it is in the frontier."""
        return {
            place: {"url": self.settings.urls[place], **_untried(), **no_page("url", why)}
            for place, why in self.given.wrong.items()
        }

    async def stats(self) -> Stats:
        """The ledger of what is in the frontier."""
        return await self.frontier.stats()

    async def progress(self) -> dict[str, int]:
        """How many pages are where, with what is no URL among those that failed."""
        stats, wrong = await self.stats(), len(self._wrong)
        return {
            "total": stats.pushed + wrong,
            "ready": stats.ready,
            "waiting": stats.waiting,
            "in_work": stats.leased,
            "done": stats.done,
            "failed": stats.dead + wrong,
            "results": stats.items + wrong,
        }

    async def results(self, max_bytes: int) -> Results:
        """All of them. Content that would make the answer larger than ``max_bytes`` is left out, and said to be."""
        state = await self.state()
        by_place: dict[int, dict[str, Any]] = {}
        found: list[dict[str, Any]] = []
        size = 0
        async for items in self._logged(0):
            for item in items:
                size += len(item.payload)
                result = _decoded(item, whole=size <= max_bytes)
                place = result.pop("place", None)
                if place is None:
                    found.append(result)
                else:
                    by_place[place] = result
        if state == "finished":
            by_place |= await self._given_up(by_place)
        results = self._in_order(by_place, "cancelled" if state == "cancelled" else "pending") + found
        return Results(results=results, stats=count(results))

    def _in_order(self, by_place: Mapping[int, dict[str, Any]], otherwise: str) -> list[dict[str, Any]]:
        """A result for each given URL, in its place. ``otherwise``: the status of those that have none."""
        none = {**_untried(), **no_page("", ""), "status": otherwise, "error": None}
        results = []
        for place, url in enumerate(self.settings.urls):
            if place in self._wrong:
                results.append(self._wrong[place])
            else:
                place = self.given.places[self.given.normal[place]]
                results.append({**by_place.get(place, none), "url": url})
        return results

    async def _without_result(self) -> dict[int, dict[str, Any]]:
        """What a finished session says of the URLs that are not in its item log, by their places."""
        stats = await self.stats()
        if not stats.remaining and (
            not stats.dead or (not self.options.depth and stats.items >= len(self.given.places))
        ):
            return {}
        known: set[int] = set()
        async for items in self._logged(0):
            known.update(place for item in items if (place := _decode_outline(item.payload)[1].place) is not None)
        return await self._given_up(known)

    async def _given_up(self, known: Collection[int]) -> dict[int, dict[str, Any]]:
        """Why a finished session has no results for the URLs whose places are not known."""
        missing = {url: place for url, place in self.given.places.items() if place not in known}
        if not missing:
            return {}
        lost = {history.url: history.reason async for history in self.frontier.dead()}
        full = bool(self.options.depth) and (await self.stats()).done >= self.options.max_pages
        results = {}
        for url, place in missing.items():
            if full and url not in lost:
                why = no_page("limit", f"the batch had its {self.options.max_pages} pages (max_pages)")
            else:
                why = no_page("worker lost", redacted(lost.get(url, "it was given up")))
            results[place] = {"url": self.settings.urls[place], **_untried(), **why}
        return results


def held_by(given: GivenUrls, options: BatchOptions) -> int:
    """Bytes of a session before its first page: each URL is kept as it was given and as a request."""
    each = PER_ENTRY + size_of(options.headers) + size_of(options.cookies)
    return size_of(given.urls) + size_of(given.normal) + len(given.places) * each


def _decoded(item: LoggedItem, *, whole: bool) -> dict[str, Any]:
    """A result as it is kept, or all of it but its content."""
    if whole:
        return decode_item(item.payload)[1]
    return {**msgspec.structs.asdict(_decode_outline(item.payload)[1]), "content": None, "truncated": True}


def _untried() -> dict[str, Any]:
    return {"final_url": None, "depth": 0, "worker_id": None, "fetched_at": None}


def count(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The figures of a batch."""
    statuses = [result["status"] for result in results]
    return {
        "total": len(results),
        "success": statuses.count("success"),
        "failed": statuses.count("failed"),
        "pending": statuses.count("pending"),
        "cancelled": statuses.count("cancelled"),
        "workers_used": len({result["worker_id"] for result in results if result["worker_id"]}),
    }
