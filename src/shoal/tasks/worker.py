"""Works on the pages that come as tasks: one event loop and one pool of connections for the life of a process."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from functools import partial
from ipaddress import ip_network
from typing import Any, TypeVar

import uvloop

from shoal.batch.quota import Room
from shoal.batch.session import OVER, Session
from shoal.config import Config, find_config_file, load_config
from shoal.crawling.leases import LeaseKeeper
from shoal.crawling.onion import make_onion
from shoal.crawling.page import Handler, Settlement
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import make_scheduler
from shoal.crawling.settling import Settler
from shoal.crawling.stats import Counters
from shoal.errors import ConfigError, RequestError, RunError, StoreRewoundError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.resolving import look_up_many_names
from shoal.frontier import open_store
from shoal.ports import Lease, Store
from shoal.tasks.messages import check_fits, read_task
from shoal.tasks.settings import distributed_frontier, store_name

log = logging.getLogger("shoal.tasks")

LEASE_TTL = 60.0
"""At most: after this a page whose worker died goes to another."""
_SESSIONS = 50  # that a process keeps open
_ROOMS = 2000  # sessions whose bytes it remembers
_STATE_EVERY = 1.0
_CLOSING = 5.0

T = TypeVar("T")


def lease_ttl(config: Config) -> float:
    return min(LEASE_TTL, config.lease.ttl)


class PageWorker:
    """The pages of a worker process. ``in_background``: of several tasks at once, which hand them in and wait. Else the
    loop runs in the thread of its only task, which spares two changes of threads a page."""

    def __init__(self, config: Config | None = None, *, in_background: bool) -> None:
        self._config = config or load_config(file=find_config_file(os.environ), environ=os.environ).config
        self._store_name = store_name(distributed_frontier(self._config))
        look_up_many_names()
        self._loop = uvloop.new_event_loop()
        self._pages: _Pages | None = None
        self._in_background = in_background
        if in_background:
            threading.Thread(target=self._loop.run_forever, name="shoal-pages", daemon=True).start()

    def work(self, session_id: str, lease: str, store: str, *, worker_id: str) -> dict[str, Any]:
        """What became of the page. RequestError for arguments that the API does not send, ConfigError when its session
        is in another ``store`` than this worker's."""
        sent = read_task(session_id, lease, store)
        if self._store_name != store:
            message = (
                f"the session is in {store}, but this worker works on {self._store_name}: "
                "give both the same SHOAL_FRONTIER"
            )
            log.error("%s", message)
            raise ConfigError(message)
        return self._run(self._work(session_id, sent, worker_id))

    async def _work(self, session_id: str, sent: Lease, worker_id: str) -> dict[str, Any]:
        if self._pages is None:
            self._pages = _Pages(self._config, worker_id)
        return await self._pages.work(session_id, sent)

    def _run(self, doing: Coroutine[Any, Any, T]) -> T:
        if self._in_background:
            return asyncio.run_coroutine_threadsafe(doing, self._loop).result()
        return self._loop.run_until_complete(doing)

    def close(self) -> None:
        if self._pages is not None:
            self._run(asyncio.wait_for(self._pages.close(), _CLOSING))
        self._loop.call_soon_threadsafe(self._loop.stop)


def in_both(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """The networks that are in a network of each list."""
    pairs = ((ip_network(one), ip_network(other)) for one in first for other in second)
    found = (max(pair, key=lambda each: each.prefixlen) for pair in pairs if pair[0].overlaps(pair[1]))
    return tuple(dict.fromkeys(map(str, found)))


class _OpenSession:
    """A session that pages came from, with what handling them needs."""

    def __init__(self, session: Session, config: Config, fetcher: HttpFetcher, worker_id: str) -> None:
        self.session = session
        self.frontier = session.frontier
        own = session.config(config)
        spider = session.spider(worker_id)
        scheduler = make_scheduler(spider, own, session.frontier, shared=True)
        onion = make_onion(spider, own, session.frontier, fetcher.limited_to(own.http.max_body_bytes))
        self.heard, self._forget = onion.on_lease, onion.forget
        counters = Counters()
        self.handler = Handler(spider, own, scheduler, onion.fetch, counters)
        # Pages are settled at the same time, so none of them may teach the scheduler: see Settler.
        self.settler = Settler(session.frontier, scheduler, counters, Persistence(shared=True), learns=False)
        self.at_work: dict[int, asyncio.Task[Settlement]] = {}
        """By token."""
        self.taken: dict[bytes, list[Lease]] = {}
        """By fingerprint, the lease that a task was reissued."""
        self.leases = LeaseKeeper(session.frontier, lease_ttl(config), self._drop)
        self.keeping = asyncio.create_task(self.leases.run())
        self.users = 0
        self.is_over = False
        self.look_again = 0.0

    async def start_over(self) -> None:
        """The store went back in time. What is in flight fails by itself, as its leases are lost or released."""
        self._forget()
        await self.frontier.recover()

    def _drop(self, lease: Lease) -> None:
        if lease.token in self.at_work:
            self.at_work[lease.token].cancel()


class _Pages:
    """What lives in the loop."""

    def __init__(self, config: Config, worker_id: str) -> None:
        self._config = config
        self._worker_id = worker_id
        self._ttl = lease_ttl(config)
        self._fetchers: dict[tuple[str, ...], HttpFetcher] = {}
        self._persist = Persistence(shared=True)
        self._store: Store | None = None
        self._open: OrderedDict[str, _OpenSession] = OrderedDict()
        self._rooms: OrderedDict[str, Room] = OrderedDict()
        """What this process counted of sessions, also of such that are not open."""
        self._opening = asyncio.Lock()

    async def work(self, session_id: str, sent: Lease) -> dict[str, Any]:
        answer: dict[str, Any] = {"url": sent.request.url, "session_id": session_id, "attempt": sent.attempt}
        opened = await self._session(session_id)
        if opened is None:
            return {**answer, "state": "gone"}  # the session was removed
        try:
            check_fits(sent, opened.session)
            return {**answer, "state": await self._handle(opened, sent)}
        except StoreRewoundError as error:  # the page is leased again, as the store knows nothing of this attempt
            log.error("%s", error)
            await self._persist(opened.start_over)
            for lease in opened.taken.pop(sent.fingerprint, ()):  # it may be leased still, and nobody would end it
                await self._persist(partial(opened.frontier.release, [lease], contacted=True))
            return {**answer, "state": "lost"}
        except RequestError as exc:
            log.error("a task of session %s is refused: %s", session_id, exc)
            return {**answer, "state": "refused"}
        except RunError:
            return {**answer, "state": "gone"}
        finally:
            opened.taken.pop(sent.fingerprint, None)
            opened.users -= 1

    async def _handle(self, opened: _OpenSession, sent: Lease) -> str:
        frontier = opened.frontier
        nonce = os.urandom(16)  # of this delivery, however often it has to ask
        (lease,) = await self._persist(lambda: frontier.reissue([sent], self._ttl, nonce=nonce))
        opened.taken[sent.fingerprint] = [lease] if lease else []
        if lease is None:
            log.info("a task that came late or twice is left alone url=%s", sent.request.url)
            return "stale"
        if await self._is_over(opened):
            await self._persist(lambda: frontier.release([lease]))
            return "cancelled"
        opened.heard(lease)
        opened.leases.add(lease)
        task = opened.at_work[lease.token] = asyncio.create_task(opened.handler.handle(lease))
        try:
            settlement = await task
        except asyncio.CancelledError:
            return "lost"  # the lease: another has it, or will
        finally:
            opened.leases.remove(lease)
            del opened.at_work[lease.token]
        return await self._settle(opened, settlement)

    async def _is_over(self, opened: _OpenSession) -> bool:
        """Looked at once a second at most: a cancelled session may get one page more."""
        if time.monotonic() >= opened.look_again:
            opened.is_over = await self._persist(opened.session.state) in OVER
            opened.look_again = time.monotonic() + _STATE_EVERY
        return opened.is_over

    async def _settle(self, opened: _OpenSession, settlement: Settlement) -> str:
        (outcome,) = await opened.settler.settle([settlement])
        return "postponed" if outcome == "released" else outcome

    async def _session(self, session_id: str) -> _OpenSession | None:
        async with self._opening:
            if session_id in self._open:
                self._open.move_to_end(session_id)
                self._open[session_id].users += 1
                return self._open[session_id]
            if self._store is None:
                self._store = await self._persist(lambda: open_store(distributed_frontier(self._config)))
            store = self._store
            session = await self._persist(lambda: Session.find(store, session_id))
            if session is None:
                return None
            self._keep_counting(session)
            fetcher = self._fetcher(self._networks(session))
            opened = self._open[session_id] = _OpenSession(session, self._config, fetcher, self._worker_id)
            opened.users += 1
            self._tidy()
            return opened

    def _keep_counting(self, session: Session) -> None:
        """A session that is opened again goes on with its count. Its limit is this worker's own, if that is less."""
        session.room.limit = min(session.room.limit, self._config.serve.max_session_bytes)
        session.room = self._rooms.setdefault(session.id, session.room)
        self._rooms.move_to_end(session.id)
        if len(self._rooms) > _ROOMS:
            self._rooms.popitem(last=False)

    def _networks(self, session: Session) -> tuple[str, ...]:
        """Private networks that both the API which took the session and this worker allow (``serve.allow``): a session
        comes from a store that others may be able to write to."""
        asked, own = session.settings.networks, self._config.serve.allow
        both = in_both(asked, own)
        if set(both) != set(asked):
            log.warning("session %s may crawl %s, but this worker only %s (serve.allow)", session.id, asked, both)
        return both

    def _fetcher(self, networks: tuple[str, ...]) -> HttpFetcher:
        """Private addresses are refused, but for these."""
        if networks not in self._fetchers:
            guard = AddressGuard(networks)
            self._fetchers[networks] = HttpFetcher(self._config.http, self._config.user_agent, guard)
        return self._fetchers[networks]

    def _tidy(self) -> None:
        """Forget the sessions that were not heard of for longest."""
        for session_id in list(self._open)[:-_SESSIONS]:
            if not self._open[session_id].users:
                self._open.pop(session_id).keeping.cancel()

    async def close(self) -> None:
        for opened in self._open.values():
            opened.keeping.cancel()
        for fetcher in self._fetchers.values():
            await fetcher.close()
        if self._store is not None:
            await self._store.close()
