"""Handles tasks in a worker process, with one event loop and one connection pool for its whole life."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from functools import partial
from ipaddress import ip_network
from typing import TypeVar

import uvloop

from shoal.api.batch.quota import Quota
from shoal.api.batch.session import OVER, Session
from shoal.api.batch.urls import redacted
from shoal.api.celery.messages import check_belongs, read_task
from shoal.api.celery.settings import distributed_frontier, store_name
from shoal.config import Config, find_config_file, load_config
from shoal.crawling.leases import LeaseKeeper, Persistence, Settler
from shoal.crawling.onion import SharedFetcher, make_onion
from shoal.crawling.page import PageHandler, Settlement
from shoal.crawling.run_queue import make_run_queue
from shoal.crawling.stats import Counters
from shoal.errors import ConfigError, RequestError, RunError, ShoalError, StoreRewoundError
from shoal.fetch.resolving import allow_many_lookups
from shoal.frontier import open_store
from shoal.ports import Failure, Lease, Store
from shoal.system import chance, clock, threads

log = logging.getLogger("shoal.tasks")

_MAX_OPEN_SESSIONS = 50
_MAX_QUOTAS = 2000  # sessions whose byte counts are remembered
_STATE_EVERY = 1.0
_CLOSE_TIMEOUT = 5.0

T = TypeVar("T")


def lease_ttl(config: Config) -> float:
    """Seconds for which a page is leased. A worker renews its leases while it works on them, so they are its
    heartbeats: the pages of a dead one return within a session."""
    return min(config.worker.session, config.lease.ttl)


class PageFailedError(ShoalError):
    """Why a page failed, for Celery and Flower. Celery copies it between processes."""


class PageWorker:
    """Runs tasks on an event loop. ``in_background``: the loop has its own thread, and several tasks run at once.
    Otherwise the loop runs in the thread of the only task, which saves two thread switches per page."""

    def __init__(self, config: Config | None = None, *, in_background: bool) -> None:
        self._config = config or load_config(file=find_config_file(os.environ), environ=os.environ).config
        self._store_name = store_name(distributed_frontier(self._config))
        allow_many_lookups()
        self._loop = uvloop.new_event_loop()
        self._runner: _TaskRunner | None = None
        self._in_background = in_background
        if in_background:
            threads.start(self._loop.run_forever, "shoal-pages")

    def work(
        self, session_id: str, lease: str, store: str, *, worker_id: str, robots_only: bool = False
    ) -> dict[str, object]:
        """Handle a task and return its outcome. RequestError if its arguments are invalid. ConfigError if the session
        is in another ``store`` than this worker's. ``robots_only``: fetch the robots.txt that the page needs, not the
        page."""
        sent = read_task(session_id, lease, store)
        if self._store_name != store:
            message = (
                f"the API uses the store {store}, but this worker uses {self._store_name}: "
                "set SHOAL_FRONTIER to the same URL for both"
            )
            log.error("%s", message)
            raise ConfigError(message)
        return self._run(self._work(session_id, sent, worker_id, robots_only))

    async def _work(self, session_id: str, sent: Lease, worker_id: str, robots_only: bool) -> dict[str, object]:
        if self._runner is None:
            self._runner = _TaskRunner(self._config, worker_id)
        return await self._runner.work(session_id, sent, robots_only)

    def _run(self, coroutine: Coroutine[object, object, T]) -> T:
        if self._in_background:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        if self._runner is not None:
            self._run(asyncio.wait_for(self._runner.close(), _CLOSE_TIMEOUT))
        self._loop.call_soon_threadsafe(self._loop.stop)


def intersect_networks(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """The networks that both lists contain."""
    pairs = ((ip_network(network), ip_network(other)) for network in first for other in second)
    smaller = (max(pair, key=lambda network: network.prefixlen) for pair in pairs if pair[0].overlaps(pair[1]))
    return tuple(dict.fromkeys(map(str, smaller)))


class _OpenSession:
    """A session with the parts that handle its pages."""

    def __init__(self, session: Session, config: Config, fetcher: SharedFetcher, worker_id: str) -> None:
        self.session = session
        self.frontier = session.frontier
        own = session.config(config)
        spider = session.spider(worker_id)
        queue = make_run_queue(spider, own, session.frontier, shared=True)
        onion = make_onion(spider, own, session.frontier, session.fetcher(fetcher, own))
        self.on_lease, self._forget = onion.on_lease, onion.forget
        counters = Counters()
        self.handler = PageHandler(spider, own, queue, onion.fetch, counters)
        self.robots_handler = PageHandler(spider, own, queue, onion.fetch_robots or onion.fetch, counters)
        # Pages are settled concurrently, so the queue must not learn from them: see Settler.
        self.settler = Settler(queue, counters, Persistence(shared=True), learns=False)
        self.tasks: dict[int, asyncio.Task[Settlement]] = {}
        """Pages in flight, by token."""
        self.reissued: dict[bytes, list[Lease]] = {}
        """The reissued lease of each task, by fingerprint."""
        self.leases = LeaseKeeper(session.frontier, lease_ttl(config), self._drop)
        self.renewal = asyncio.create_task(self.leases.run())
        self.users = 0
        self.is_over = False
        self.check_state_at = 0.0

    async def start_over(self) -> None:
        """Recover after the store was rewound. Pages in flight fail, as their leases are lost or released."""
        self._forget()
        await self.frontier.recover()

    def _drop(self, lease: Lease) -> None:
        if lease.token in self.tasks:
            self.tasks[lease.token].cancel()


class _TaskRunner:
    """Handles tasks within the event loop."""

    def __init__(self, config: Config, worker_id: str) -> None:
        self._config = config
        self._worker_id = worker_id
        self._ttl = lease_ttl(config)
        self._fetchers: dict[tuple[str, ...], SharedFetcher] = {}
        self._persist = Persistence(shared=True)
        self._store: Store | None = None
        self._open: OrderedDict[str, _OpenSession] = OrderedDict()
        self._quotas: OrderedDict[str, Quota] = OrderedDict()
        """Byte counts of sessions, including sessions that are no longer open."""
        self._opening = asyncio.Lock()

    async def work(self, session_id: str, sent: Lease, robots_only: bool = False) -> dict[str, object]:
        outcome: dict[str, object] = {"url": sent.request.url, "session_id": session_id, "attempt": sent.attempt}
        opened = await self._open_session(session_id)
        if opened is None:
            return {**outcome, "state": "gone"}  # the session was deleted
        try:
            check_belongs(sent, opened.session)
            return {**outcome, **await self._handle(opened, sent, robots_only)}
        except StoreRewoundError as error:  # the page will be leased again: the store has lost this attempt
            log.error("%s", error)
            await self._persist(opened.start_over)
            for lease in opened.reissued.pop(
                sent.fingerprint, ()
            ):  # it may still be leased, and nobody would settle it
                await self._persist(partial(opened.frontier.release, [lease], contacted=True))
            return {**outcome, "state": "lost"}
        except RequestError as exc:
            log.error("refused a task of session %s: %s", session_id, exc)
            return {**outcome, "state": "refused"}
        except RunError:
            return {**outcome, "state": "gone"}
        finally:
            opened.reissued.pop(sent.fingerprint, None)
            opened.users -= 1

    async def _handle(self, opened: _OpenSession, sent: Lease, robots_only: bool) -> dict[str, object]:
        frontier = opened.frontier
        nonce = chance.token_bytes(16)  # the same for all retries of this delivery
        (lease,) = await self._persist(lambda: frontier.reissue([sent], self._ttl, nonce=nonce))
        opened.reissued[sent.fingerprint] = [lease] if lease else []
        if lease is None:
            log.info("ignored a late or duplicate task url=%s", sent.request.url)
            return {"state": "stale"}
        if await self._is_over(opened):
            await self._persist(lambda: frontier.release([lease]))
            return {"state": "cancelled"}
        opened.on_lease(lease)
        opened.leases.add(lease)
        handler = opened.robots_handler if robots_only else opened.handler
        task = opened.tasks[lease.token] = asyncio.create_task(handler.handle(lease))
        try:
            settlement = await task
        except asyncio.CancelledError:
            return {"state": "lost"}  # the lease was lost: another worker has it, or will get it
        finally:
            opened.leases.remove(lease)
            del opened.tasks[lease.token]
        return await self._settle(opened, settlement)

    async def _is_over(self, opened: _OpenSession) -> bool:
        """Whether the session is over. Checked at most once a second: a cancelled session may fetch one more page."""
        if clock.monotonic() >= opened.check_state_at:
            opened.is_over = await self._persist(opened.session.state) in OVER
            opened.check_state_at = clock.monotonic() + _STATE_EVERY
        return opened.is_over

    async def _settle(self, opened: _OpenSession, settlement: Settlement) -> dict[str, object]:
        (state,) = await opened.settler.settle([settlement])
        if isinstance(settlement, Failure):
            reason = redacted(f"{settlement.kind}: {settlement.reason}")
            return {"state": state, "reason": reason, "retry_in": settlement.retry_in}
        return {"state": "postponed" if state == "released" else state}

    async def _open_session(self, session_id: str) -> _OpenSession | None:
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
            self._restore_quota(session)
            fetcher = self._fetcher(self._allowed_networks(session))
            opened = self._open[session_id] = _OpenSession(session, self._config, fetcher, self._worker_id)
            opened.users += 1
            self._close_idle()
            return opened

    def _restore_quota(self, session: Session) -> None:
        """Continue the count of a session that was open before. The lower of the API's and the worker's limits
        holds."""
        session.quota.limit = min(session.quota.limit, self._config.serve.max_session_bytes)
        session.quota = self._quotas.setdefault(session.id, session.quota)
        self._quotas.move_to_end(session.id)
        if len(self._quotas) > _MAX_QUOTAS:
            self._quotas.popitem(last=False)

    def _allowed_networks(self, session: Session) -> tuple[str, ...]:
        """Private networks that both the API and this worker allow (``serve.allow``). The session's own list is not
        enough: others may be able to write to the store."""
        requested, own = session.settings.networks, self._config.serve.allow
        networks = intersect_networks(requested, own)
        if set(networks) != set(requested):
            log.warning(
                "session %s: the API allows %s, this worker only %s (serve.allow)", session.id, requested, networks
            )
        return networks

    def _fetcher(self, networks: tuple[str, ...]) -> SharedFetcher:
        """A fetcher that refuses private addresses outside ``networks``."""
        if networks not in self._fetchers:
            self._fetchers[networks] = SharedFetcher(self._config, networks)
        return self._fetchers[networks]

    def _close_idle(self) -> None:
        """Close the least recently used sessions."""
        for session_id in list(self._open)[:-_MAX_OPEN_SESSIONS]:
            if not self._open[session_id].users:
                self._open.pop(session_id).renewal.cancel()
                for fetcher in self._fetchers.values():
                    fetcher.forget(session_id)

    async def close(self) -> None:
        for opened in self._open.values():
            opened.renewal.cancel()
        for fetcher in self._fetchers.values():
            await fetcher.close()
        if self._store is not None:
            await self._store.close()
