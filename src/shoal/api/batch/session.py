"""A batch in a store: a run whose start requests are the URLs and whose items are the results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from ipaddress import ip_network
from typing import Annotated, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.quota import PER_ENTRY, Quota, room_of, size_of
from shoal.api.batch.spider import BatchSpider, shortened, start_requests
from shoal.api.batch.urls import UrlList
from shoal.config import Config
from shoal.crawling.onion import SharedFetcher
from shoal.errors import RequestError, RunError
from shoal.ports import Fetcher, Frontier, FrontierOptions, Run, Stats, Store
from shoal.system import chance, clock, threads

# The settings of a session, stored with its run. They are validated again when they are read.


_Short: TypeAlias = Annotated[str, Meta(max_length=300)]
_MAX_ATTEMPTS = 11  # the first, and the largest number of retries that a caller may request


class Webhook(Struct, frozen=True, forbid_unknown_fields=True):
    """Where to send a message when a batch ends, and the key that signs it."""

    url: Annotated[str, Meta(max_length=65536)]
    secret: _Short


class SessionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a process needs to work on a session."""

    urls: list[str]
    normalized: list[str] = msgspec.field(name="normal")
    """The normalized form of each URL; empty where it equals the URL. Stored because normalizing may take seconds."""
    invalid: dict[str, str] = msgspec.field(name="wrong", default_factory=dict)
    """Why a URL is invalid, by its position."""
    options: dict[str, object]
    caller: _Short
    """The name of the caller's token; empty for the main token, or without tokens."""
    address: _Short = ""
    """The caller's IP address."""
    distributed: bool
    networks: Annotated[tuple[_Short, ...], Meta(max_length=1000)] = ()
    """Private networks that the server allows (``serve.allow``). They hold for all processes that work on it."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    webhook: Webhook | None = None
    delay: Annotated[float, Meta(ge=0, le=1e9)]
    concurrency_per_host: Annotated[int, Meta(ge=1)]
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    max_attempts: Annotated[int, Meta(ge=1, le=_MAX_ATTEMPTS)]

    @property
    def owner(self) -> str:
        """Whose limits and shares the session counts against: the caller's name, or its address if it has none."""
        return self.caller or self.address

    @property
    def frontier_options(self) -> FrontierOptions:
        return FrontierOptions(
            max_attempts=self.max_attempts, delay=self.delay, concurrency_per_host=self.concurrency_per_host,
            weight=self.weight,
        )  # fmt: skip

    @classmethod
    def of(cls, run: Run) -> SessionSettings:
        """Read the settings of a run. RunError if another version of `shoal serve` wrote them and they are invalid."""
        try:
            settings = msgspec.convert(dict(run.settings), cls)
            _check(settings)
        except (msgspec.ValidationError, ValueError) as exc:
            raise RunError(f"session {run.run_id} has invalid settings: {exc}") from exc
        return settings

    def url_list(self) -> UrlList:
        normalized = [normal or url for url, normal in zip(self.urls, self.normalized, strict=True)]
        return UrlList(self.urls, normalized, {int(position): reason for position, reason in self.invalid.items()})


def read_settings(run: Run) -> tuple[SessionSettings, BatchOptions]:
    """Read the settings and options of a run. RunError as in `SessionSettings.of`."""
    settings = SessionSettings.of(run)
    try:
        return settings, BatchOptions.model_validate(settings.options)
    except ValidationError as exc:
        which = ", ".join(".".join(map(str, error["loc"])) for error in exc.errors()[:5])  # values may be secret
        raise RunError(f"session {run.run_id} has invalid options: {which}") from exc


def _check(settings: SessionSettings) -> None:
    """ValueError for errors that the types do not catch."""
    if len(settings.normalized) != len(settings.urls):
        raise ValueError(f"{len(settings.normalized)} normalized URLs for {len(settings.urls)} URLs")
    if not all(position.isdecimal() and int(position) < len(settings.urls) for position in settings.invalid):
        raise ValueError("invalid URLs at positions beyond the list")
    for network in settings.networks:
        ip_network(network)


OVER = ("finished", "cancelled")
"""The final states of a session: no more results follow."""
POLL_EVERY = (0.02, 0.25)
"""Seconds between polls for changes by other processes, first and at most."""
_PUSH_BATCH = 1000
_SEED_ROLE_TTL = 60.0
_NEVER = 1_000_000_000


class SessionTooLargeError(RequestError):
    """The URLs of a batch alone exceed the bytes that a session may store."""


class Session:
    """A batch in a store. Every process may read it. Processes that work on it hold leases."""

    def __init__(
        self, store: Store, run: Run, frontier: Frontier, settings: SessionSettings, options: BatchOptions
    ) -> None:
        self.id = run.run_id
        self.created_at = run.created_at
        self.frontier = frontier
        self.settings = settings
        self.options = options
        self.urls = settings.url_list()
        self.changed = asyncio.Event()
        """Set when work in this process has changed the session."""
        self.is_closing = False
        """Whether this process shuts down, so that its callers wait no longer."""
        self.shared = store.shared
        """Whether other processes may work on it too."""
        self.store = store
        self.run = run

    @cached_property
    def quota(self) -> Quota:
        """The bytes that the session may store. Readers need none: to sum up its URLs takes time."""
        initial = initial_size(self.urls, self.options)
        return Quota(self.settings.max_bytes, initial, self.frontier, room_of(self.store))

    @classmethod
    async def create(
        cls, store: Store, config: Config, urls: Sequence[str], options: BatchOptions, *, caller: str,
        distributed: bool, address: str = "", webhook: Webhook | None = None, max_bytes: int | None = None,
    ) -> Self:  # fmt: skip
        """Create a session and push its URLs. ``max_bytes``: instead of ``serve.max_session_bytes``.

        TooManyNamesError for too many non-ASCII host names. SessionTooLargeError if the URLs exceed the limit of a
        session.
        """
        parsed = await UrlList.parse(list(urls))
        size, limit = initial_size(parsed, options), max_bytes or config.serve.max_session_bytes
        if size > limit:
            raise SessionTooLargeError(
                f"the URLs with their headers and cookies take {size} bytes; the limit of a session is {limit} bytes "
                "(serve.max_session_bytes)"
            )
        settings = SessionSettings(
            urls=list(urls),
            normalized=["" if new == old else new for old, new in zip(parsed.urls, parsed.normalized, strict=True)],
            invalid={str(position): shortened(reason) for position, reason in parsed.invalid.items()},
            options=options.model_dump(mode="json"), caller=caller, address=address,
            distributed=distributed, networks=config.serve.allow, max_bytes=limit,
            webhook=webhook, delay=config.download_delay, concurrency_per_host=config.concurrency_per_host,
            weight=config.weight, max_attempts=options.retries + 1,
        )  # fmt: skip
        run = Run(
            run_id=chance.token_hex(16), spider=BatchSpider.name, state="running", created_at=clock.time(),
            settings=msgspec.to_builtins(settings), project=config.project_name,
        )  # fmt: skip
        await store.create_run(run)
        session = await cls._open(store, run)
        await session.seed()
        return session

    @classmethod
    async def find(cls, store: Store, session_id: str) -> Self | None:
        """Find a session. RunError if another version of Shoal created it and this one cannot read it."""
        run = await store.get_run(session_id)
        return None if run is None or run.spider != BatchSpider.name else await cls._open(store, run)

    @classmethod
    async def _open(cls, store: Store, run: Run) -> Self:
        settings, options = read_settings(run)
        return cls(store, run, await store.frontier(run.run_id, settings.frontier_options), settings, options)

    # -- for the processes that work on it

    def config(self, base: Config) -> Config:
        """The server's config with the caller's options on top. What a host answers to one caller keeps others from it
        for a moment only."""
        options, longest = self.options, base.serve.max_block
        return base.with_settings(
            {
                "retry.max_attempts": self.settings.max_attempts,
                "throttle.max_retry_after": min(longest, base.throttle.max_retry_after),
                "identities.rest": min(longest, base.identities.rest),
                "identities.max_rest": min(longest, base.identities.max_rest),
                "identities.give_up_after": _NEVER,
                "robots.obey": options.robots,
                "http.max_body_bytes": min(options.max_bytes, base.http.max_body_bytes),
                "scope.max_depth": options.depth,
                "scope.max_pages": options.max_pages if options.depth else None,
            }
        )

    def fetcher(self, shared: SharedFetcher, config: Config) -> Fetcher:
        """Make the fetcher of this session: no other session sees the cookies and the storage of its pages.
        ``config`` is the session's."""
        render = self.options.render
        return shared.scoped(self.id, config, None if render is None else render.as_render(), self.frontier)

    def spider(self, worker_id: str) -> BatchSpider:
        return BatchSpider(self.options, worker_id, self.urls.positions if self.options.depth else (), self.quota)

    async def seed(self) -> bool:
        """Push the URLs, or the rest of them if an earlier attempt was interrupted.

        False while another process holds the seed role, even if it has died. StoreRewoundError: the caller must
        recover and drop its caches before it tries again.
        """
        claim = await self.frontier.claim("seed", _SEED_ROLE_TTL)
        if claim is None:
            return not (await self.frontier.stats()).seeding
        # In a thread: checking the URLs of ten thousand requests takes a good part of a second.
        requests = await threads.call(start_requests, self.spider(""), self.urls)
        for begin in range(claim.position, len(requests), _PUSH_BATCH):
            cursor = b"%d" % (begin + _PUSH_BATCH)
            await self.frontier.push(requests[begin : begin + _PUSH_BATCH], seed=claim, cursor=cursor)
            claim = claim.moved_to(cursor)
            await asyncio.sleep(0)
        return await self.frontier.relinquish(claim, finished=True)

    def is_complete(self, stats: Stats) -> bool:
        """Whether no work is left: all requests are done or dead, or ``max_pages`` are done and none is leased. A
        leased request may return to the queue."""
        is_full = bool(self.options.depth) and stats.done >= self.options.max_pages
        return stats.finished or (is_full and not stats.leased)

    # -- state

    async def state(self) -> str:
        """``running``, ``paused``, ``finished`` or ``cancelled``. RunError if it was deleted."""
        state = await self.store.run_state(self.id)
        if state is None:
            raise RunError(f"session {self.id} was deleted")
        return state

    async def finish(self) -> None:
        with suppress(RunError):  # it was cancelled in the meantime
            await self.store.transition(self.id, "finished")
        self.changed.set()

    async def reopen(self) -> None:
        """Return to ``running`` if the store was rewound after the session finished."""
        if await self.store.run_state(self.id) == "finished" and not self.is_complete(await self.stats()):
            await self.store.transition(self.id, "running")

    async def cancel(self) -> None:
        """Fetch no more pages. Results can still be read."""
        with suppress(RunError):  # it finished in the meantime
            await self.store.transition(self.id, "cancelled")
        self.changed.set()

    async def stats(self) -> Stats:
        return await self.frontier.stats()

    async def progress(self) -> Progress:
        """How many URLs are in each state. Invalid URLs count as failed."""
        return progress_of(await self.stats(), len(self.urls.invalid))

    # -- waiting for it

    async def wait(self, seconds: float) -> None:
        """Wait until the session is over, for at most ``seconds``, or until `stop_waiting`."""
        pause = POLL_EVERY[0]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not await self.is_over() and not self.is_closing:
                    await self.wait_for_change(pause)
                    pause = min(POLL_EVERY[1], 1.5 * pause)

    def stop_waiting(self) -> None:
        """Wake all callers that wait for the session. They get the results so far."""
        self.is_closing = True
        self.changed.set()

    async def is_over(self) -> bool:
        """Whether the session is over. Clears ``changed``, so that `wait_for_change` waits for later changes."""
        self.changed.clear()
        return await self.state() in OVER

    async def wait_for_change(self, seconds: float) -> None:
        """Return when work in this process changes the session, or after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()


class Progress(Struct, frozen=True, kw_only=True):
    """How many pages of a batch are in each state."""

    total: int
    ready: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    results: int


def progress_of(stats: Stats, invalid: int) -> Progress:
    """How many URLs are in each state, with this number of invalid ones."""
    return Progress(
        total=stats.pushed + invalid,
        ready=stats.ready,
        waiting=stats.waiting,
        in_flight=stats.in_flight,
        done=stats.done,
        failed=stats.failed + invalid,
        results=stats.items + invalid,
    )


def initial_size(urls: UrlList, options: BatchOptions) -> int:
    """Bytes that a session stores before its first page: each URL as it was sent, and as a request."""
    size_of_request = PER_ENTRY + size_of(options.headers) + size_of(options.cookies)
    return size_of(urls.urls) + size_of(urls.normalized) + len(urls.positions) * size_of_request
