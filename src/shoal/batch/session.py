"""One batch, as it is kept: a run whose start requests are the URLs, and whose items are the results."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

import msgspec
from msgspec import Struct

from shoal.batch.options import BatchOptions
from shoal.batch.spider import BatchSpider, no_page, start_requests
from shoal.config import Config
from shoal.errors import RequestError, RunError
from shoal.item import decode_item
from shoal.links import normalize_url
from shoal.ports import Frontier, FrontierOptions, History, Run, Stats, Store

OVER = ("finished", "cancelled")
"""The states in which nothing more comes."""
_PUSHED_AT_ONCE = 1000
_READ_AT_ONCE = 100
_LEFT_OUT = {"content": None, "truncated": True}
_ROLE_TTL = 60.0
_LOOK = (0.02, 0.25)  # seconds between looks at what others do to a session, first and at most


class Webhook(Struct, frozen=True):
    """Who is told when a batch is done."""

    url: str
    secret: str


class SessionSettings(Struct, frozen=True, kw_only=True):
    """What a session is about; kept with its run."""

    urls: list[str]
    options: dict[str, Any]
    caller: str
    distributed: bool
    webhook: Webhook | None = None
    delay: float
    concurrency_per_host: int
    max_attempts: int


class Results(Struct, frozen=True, kw_only=True):
    """What came of a batch so far: first the given URLs in their order, then what was found on them."""

    results: list[dict[str, Any]]
    stats: dict[str, int]


class Session:
    """A batch in a store. Any process may read it; whoever works on it holds leases."""

    def __init__(self, store: Store, run: Run, frontier: Frontier, settings: SessionSettings) -> None:
        self.id = run.run_id
        self.created_at = run.created_at
        self.frontier = frontier
        self.settings = settings
        self.options = BatchOptions.model_validate(settings.options)
        self.changed = asyncio.Event()
        """Set by whoever works on it in this process, when there is something new."""
        self.is_left = False
        """This process ends: nobody waits for it here any longer."""
        self.shared = store.shared
        """Whether other processes may work on it too."""
        self._store = store

    @classmethod
    async def create(
        cls, store: Store, config: Config, urls: Sequence[str], options: BatchOptions, *, caller: str,
        distributed: bool, webhook: Webhook | None = None,
    ) -> Self:  # fmt: skip
        """Its URLs are in the store when this returns."""
        settings = SessionSettings(
            urls=list(urls), options=options.model_dump(mode="json"), caller=caller, distributed=distributed,
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
        run = await store.get_run(session_id)
        return None if run is None or run.spider != BatchSpider.name else await cls._of(store, run)

    @classmethod
    async def _of(cls, store: Store, run: Run) -> Self:
        try:
            settings = msgspec.convert(dict(run.settings), SessionSettings)
        except msgspec.ValidationError as exc:
            raise RunError(f"session {run.run_id} has settings that can't be read: {exc}") from exc
        options = FrontierOptions(
            max_attempts=settings.max_attempts, delay=settings.delay,
            concurrency_per_host=settings.concurrency_per_host,
        )  # fmt: skip
        return cls(store, run, await store.frontier(run.run_id, options), settings)

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
        given: set[str] = set()
        if self.options.depth:
            for url in self.settings.urls:
                with suppress(ValueError):
                    given.add(normalize_url(url))
        return BatchSpider(self.options, worker_id, given)

    async def seed(self) -> None:
        """Push the URLs, or what an earlier attempt at it left."""
        claim = await self.frontier.claim("seed", _ROLE_TTL)
        if claim is None:
            return
        requests = start_requests(self.spider(""), self.settings.urls)
        for begin in range(int(claim.cursor or b"0"), len(requests), _PUSHED_AT_ONCE):
            end = begin + _PUSHED_AT_ONCE
            await self.frontier.push(requests[begin:end], seed=claim, cursor=b"%d" % end)
        await self.frontier.relinquish(claim, finished=True)

    # -- its state

    async def state(self) -> str:
        """``running``, ``paused``, ``finished`` or ``cancelled``; RunError when it was removed."""
        run = await self._store.get_run(self.id)
        if run is None:
            raise RunError(f"session {self.id} was removed")
        return run.state

    async def finish(self) -> None:
        with suppress(RunError):  # it was cancelled in this moment
            await self._store.transition(self.id, "finished")
        self.changed.set()

    async def cancel(self) -> None:
        """Nothing more of it is fetched; what is there can still be read."""
        with suppress(RunError):  # it was finished in this moment
            await self._store.transition(self.id, "cancelled")
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
        """What comes in behind ``after``, with its number, until the session is over, or left. Empty now and then, so
        that who waits can see that all is well."""
        pause = _LOOK[0]
        while True:
            over = await self._is_over()
            found = await self.read(after, _READ_AT_ONCE)
            if found:
                after, pause = found[-1][0], _LOOK[0]
            elif over or self.is_left:
                return
            yield found
            if not found:
                await self._pause(pause)
                pause = min(_LOOK[1], 1.5 * pause)

    # -- its results

    async def read(self, after: int, limit: int, max_bytes: int | None = None) -> list[tuple[int, dict[str, Any]]]:
        """Results in the order in which they came in, each with its number: up to ``limit``, and as many as fit into
        ``max_bytes``. One that does not fit alone comes without its content. What is no URL is first."""
        wrong = list(self._wrong.values())
        found = list(enumerate(wrong, 1))[after : after + limit]
        after = max(0, after - len(wrong))
        room = float("inf") if max_bytes is None else max_bytes
        while len(found) < limit:
            items = await self.frontier.read_items(after, min(_READ_AT_ONCE, limit - len(found)))
            if not items:
                break
            for logged in items:
                result = self._shown(decode_item(logged.payload)[1])
                if len(logged.payload) > room:
                    if found:
                        return found
                    result |= _LEFT_OUT
                room -= len(logged.payload)
                after = logged.seq
                found.append((len(wrong) + after, result))
        return found

    @cached_property
    def _wrong(self) -> dict[int, dict[str, Any]]:
        """The results of what is no URL, by place: nothing of it is in the frontier."""
        wrong = {}
        for place, url in enumerate(self.settings.urls):
            try:
                normalize_url(url)
            except RequestError as exc:
                wrong[place] = {"url": url, **_untried(), **no_page("url", str(exc))}
        return wrong

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

    def _shown(self, result: dict[str, Any]) -> dict[str, Any]:
        """As the caller gets it: under the URL that it gave."""
        place = result.pop("place", None)
        return {**result, "url": self.settings.urls[place]} if place is not None else result

    async def results(self, max_bytes: int) -> Results:
        """All of them. Content that would make the answer larger than ``max_bytes`` is left out, and said to be."""
        state = await self.state()
        by_place: dict[int, dict[str, Any]] = {}
        found: list[dict[str, Any]] = []
        after = size = 0
        while items := await self.frontier.read_items(after, _READ_AT_ONCE):
            after = items[-1].seq
            for logged in items:
                result = decode_item(logged.payload)[1]
                size += len(logged.payload)
                if size > max_bytes:
                    result |= _LEFT_OUT
                place = result.pop("place", None)
                if place is None:
                    found.append(result)
                else:
                    by_place[place] = result
        lost = {history.url: history async for history in self.frontier.dead()} if state == "finished" else {}
        results = self._in_order(by_place, lost, state) + found
        return Results(results=results, stats=count(results))

    def _in_order(
        self, by_place: Mapping[int, dict[str, Any]], lost: Mapping[str, History], state: str
    ) -> list[dict[str, Any]]:
        first: dict[str, int] = {}
        results = []
        for place, url in enumerate(self.settings.urls):
            if place in self._wrong:
                results.append(self._wrong[place])
                continue
            known = normalize_url(url)
            place = first.setdefault(known, place)  # one that is there twice was fetched once
            if place in by_place:
                results.append({**by_place[place], "url": url})
            elif state == "finished":
                results.append({"url": url, **_untried(), **self._given_up(lost.get(known))})
            else:
                status = "cancelled" if state == "cancelled" else "pending"
                results.append({"url": url, **_untried(), **no_page("", ""), "status": status, "error": None})
        return results

    def _given_up(self, history: History | None) -> dict[str, Any]:
        """Why a batch that is finished has no result for a URL."""
        if history is None and self.options.depth:
            return no_page("limit", f"the batch had its {self.options.max_pages} pages (max_pages)")
        return no_page("worker lost", "it was given up" if history is None else history.reason)


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
