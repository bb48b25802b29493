"""The layer that fetches each page with the identity of its host, and retires identities that are blocked or fail."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from shoal.config import IdentitySettings
from shoal.errors import ConfigError, FetchError, FrontierError
from shoal.http import Request, Response
from shoal.identities.counts import IdentityCounts
from shoal.identities.facts import DAY, IdentityFacts, Removal
from shoal.identities.memory import ShortMemory
from shoal.identities.roster import Identity
from shoal.identities.rules import Fault, fault_of, free_failures, is_removed, rest_seconds
from shoal.middleware import Postponed
from shoal.middleware.status_check import parse_retry_after
from shoal.ports import Fetch, Hosts, HostUpdate
from shoal.sessions.session import Session
from shoal.urls.normalize import host_of, origin_of

log = logging.getLogger("shoal.identities")

_CACHE_SECONDS = 1.0  # how long assignments and removals are cached; neither sends a request to a resting identity
_ANNOUNCE_SECONDS = 3600.0
_SUSPECT = 2  # blocks after which a page is compared with another one
_FAILURE_REST = 5.0  # seconds that an identity does not use a host on which it failed
_WAIT = (0.2, 10.0)  # seconds, shortest and longest, until a host without an identity is tried again


class Identities:
    """Gives each request the proxy, cookies and headers of an identity. A request with a proxy of its own keeps it.

    An identity that rests on a host gets no request of it: the store is asked before each request. Requests that are
    already on their way when a block arrives still end. A host without an identity is blocked in the frontier for a
    moment, and its pages wait there. Nothing is ever fetched directly.
    """

    def __init__(
        self,
        roster: Sequence[Identity],
        settings: IdentitySettings,
        facts: IdentityFacts,
        hosts: Hosts,
        is_blocked: Callable[[Response], bool],
        session: Session | None = None,
    ) -> None:
        self._roster = {identity.name: identity for identity in roster}
        self._settings = settings
        self._facts = facts
        self._hosts = hosts
        self._is_blocked = is_blocked
        self._session = session or Session()
        self._memory = ShortMemory()
        self._removed: dict[str, str] = {}
        """Reasons by name, as this process knows them."""
        self._refused: set[str] = set()
        """Identities whose proxy refuses this process's own user and password."""
        self._checked: dict[str, float] = {}
        """When it was last checked whether an identity is removed."""
        self._announce_at: float | None = None
        """When to store the names of the identities again."""
        self._counts = IdentityCounts(known=len(self._roster))
        self.on_exhausted: Callable[[ConfigError], None] = lambda error: None
        """Called when all identities are removed."""

    @property
    def counts(self) -> IdentityCounts:
        self._counts.removed = len(self._removed)
        self._counts.resting = self._memory.resting()
        return self._counts

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        if request.proxy is not None:
            return await self._session.fetch(request, fetch)
        host = host_of(request.url)
        try:
            identity = await self._choose(host)
            if not self._memory.works(identity.name, host):
                await self._test(identity, host, request, fetch)
            return await self._fetch(identity, host, request, fetch)
        except FrontierError as error:
            raise Postponed(f"the state of the identities can't be read: {error}", contacted=True) from error

    async def _fetch(self, identity: Identity, host: str, request: Request, fetch: Fetch) -> Response:
        self._counts.requests += 1
        try:
            response = await self._session.fetch(request, partial(_send_as, identity, fetch), identity.name)
        except FetchError as error:
            await self._failed(identity, host, request, error)
            raise
        response.request = request
        try:
            if self._is_block(response):
                raise await self._blocked(identity, host, request, response)
            await self._succeeded(identity, host, response)
        except BaseException:
            if response.page is not None:  # nobody else will see the response
                await response.release()
            raise
        return response

    async def _test(self, identity: Identity, host: str, request: Request, fetch: Fetch) -> None:
        """If the page was blocked several times, test the identity with another page, which was fetched before. This
        tells whether the identity is still blocked, or nobody may see the page. Raises Postponed after a test."""
        good = self._memory.good(host)
        if good is None or good == request.url or await self._facts.failures_of(request.fingerprint()) < _SUSPECT:
            return
        try:
            await self._fetch(identity, host, Request(good, render=False), fetch)
        except FetchError as error:
            raise Postponed(str(error), contacted=error.contacted) from error
        raise Postponed("the identity was tested with another page", contacted=True)

    def _is_block(self, response: Response) -> bool:
        if response.url == origin_of(response.url) + "/robots.txt":
            return response.status == 429  # with 403, many sites mean that there is no such file
        try:
            return bool(self._is_blocked(response))
        except Exception as exc:  # the user's code may raise anything: it costs this page
            reason = f"blocked() of the spider failed: {type(exc).__name__}: {exc}"
            raise FetchError(reason, kind="callback", retryable=False, status=response.status) from exc

    # -- which identity

    async def _choose(self, host: str) -> Identity:
        """The identity for a host. Postponed if the host must wait, FetchError if no identity is left for it."""
        if self._announce_at is None or self._announce_at <= time.monotonic():
            await self._announce()
        name = self._memory.assigned(host) or await self._facts.assigned(host)
        if name in self._roster and await self._is_available(name, host):
            if self._memory.assigned(host) is None:
                self._memory.assign(host, name, min(_CACHE_SECONDS, self._settings.hold))
            return self._roster[name]
        others = [each for each in self._roster if each != name]
        random.shuffle(others)  # so that hosts are spread over the identities
        for other in others:
            if await self._is_available(other, host):
                await self._assign(host, other, is_ours=name is None or name in self._roster)
                return self._roster[other]
        raise await self._unavailable(host)

    async def _assign(self, host: str, name: str, *, is_ours: bool) -> None:
        """``is_ours``: False if the host has an identity of a worker with other proxies, and keeps it there."""
        if is_ours:
            await self._facts.assign(host, name, self._settings.hold)
        hold = self._settings.hold
        self._memory.assign(host, name, min(_CACHE_SECONDS, hold) if is_ours else hold)
        log.debug("host=%s has the identity %s", host, name)

    async def _announce(self) -> None:
        """Store the names of the identities. A new process tries removed ones again: they may have been corrected."""
        is_new = self._announce_at is None
        self._announce_at = time.monotonic() + _ANNOUNCE_SECONDS
        await self._facts.add_names(list(self._roster))
        for name in self._roster if is_new else ():
            await self._facts.restore(name)

    async def _is_available(self, name: str, host: str) -> bool:
        if await self._is_removed(name) or self._memory.rests(name, host):
            return False
        rest = await self._facts.resting(name, host)
        if rest is None:
            return True
        left = rest.returns - time.time()
        self._memory.rest(name, host, left if 0 <= left <= 2 * DAY else _WAIT[0], is_final=rest.is_final)
        return False

    async def _is_removed(self, name: str) -> bool:
        now = time.monotonic()
        if now - self._checked.get(name, -_CACHE_SECONDS) >= _CACHE_SECONDS:
            self._checked[name] = now
            removal = await self._facts.removed(name)
            if removal is None:
                self._refused.discard(name)
                self._removed.pop(name, None)
            elif not removal.refused or name in self._refused:  # another worker may have another password
                self._removed[name] = removal.reason
        return name in self._removed

    async def _unavailable(self, host: str) -> Exception:
        """Let the pages of a host wait in the frontier; give them up if no identity will return to it."""
        self._check_exhausted()
        left = [name for name in self._roster if name not in self._removed]
        if left and all(self._memory.is_final(name, host) for name in left):
            message = f"{host} blocks every identity (identities.give_up_after); they try it again after a day"
            return FetchError(message, kind="blocked", retryable=False, contacted=False)
        seconds = min(max(self._memory.returns_in(left, host), _WAIT[0]), _WAIT[1])
        reason = f"no identity is available: {len(left)} rest, {len(self._removed)} are removed"
        await self._hosts.update_host(host, HostUpdate(block_for=seconds, block_reason=reason))
        return Postponed(reason, contacted=False)

    def _check_exhausted(self) -> None:
        if len(self._removed) == len(self._roster):
            several = f"all {len(self._roster)} proxies" if len(self._roster) > 1 else "the only proxy"
            reason = next(iter(self._removed.values()))
            self.on_exhausted(
                ConfigError(
                    f'{several} in "proxies" failed: {reason}. Correct the setting and start again; a stored frontier '
                    "keeps the pages"
                )
            )

    # -- what became of a request

    async def _succeeded(self, identity: Identity, host: str, response: Response) -> None:
        self._memory.succeeded(identity.name, host)
        if response.ok and response.request is not None and response.request.method == "GET":
            self._memory.set_good(host, response.url)
        if self._memory.rests(identity.name, host):
            return  # the page was on its way when another was blocked
        if not self._memory.works(identity.name, host):
            self._memory.set_works(identity.name, host)
            if await self._facts.streak(identity.name, host):
                await self._facts.set_streak(identity.name, host, 0)

    async def _blocked(self, identity: Identity, host: str, request: Request, response: Response) -> Exception:
        """Retire an identity that a host blocked. The page is released; after too many blocks it fails."""
        name = identity.name
        self._counts.blocks += 1
        reason = f"{host} blocks the identity: it answered {response.status}"
        if self._memory.rests(name, host):  # another page met the same block
            return Postponed(reason, contacted=True)
        worked = self._memory.works(name, host)
        self._memory.rest(name, host, self._settings.rest)  # before the first await: it is one block for all pages
        if await self._facts.resting(name, host) is not None:  # a page of another worker met it
            return Postponed(reason, contacted=True)
        streak = 0 if worked else await self._facts.streak(name, host)
        await self._retire(name, host, streak, response)
        if not worked and self._memory.good(host) and await self._facts.failures_of(request.fingerprint()) >= _SUSPECT:
            return Postponed(reason, contacted=True)  # it was blocked before this page
        if await self._facts.count_failure(request.fingerprint()) > self._settings.max_blocks:
            message = f"{host} blocks this page with every identity: it answered {response.status}"
            return FetchError(message, kind="blocked", retryable=True, status=response.status)
        return Postponed(reason, contacted=True)

    async def _retire(self, name: str, host: str, streak: int, response: Response) -> None:
        asked = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC), self._settings.max_rest)
        seconds = rest_seconds(self._settings, streak, asked.total_seconds() if asked is not None else 0.0)
        is_final = streak + 1 >= self._settings.give_up_after
        if is_final:
            seconds = max(seconds, DAY)
        self._memory.rest(name, host, seconds, is_final=is_final)
        self._memory.unset_works(name, host)
        await self._facts.rest(name, host, f"answered {response.status}", seconds, is_final=is_final)
        await self._facts.set_streak(name, host, streak + 1)
        log.info("host=%s answered %d: the identity %s rests for %.0f s", host, response.status, name, seconds)

    async def _failed(self, identity: Identity, host: str, request: Request, error: FetchError) -> None:
        """Decide what a failed request costs. Postponed: nothing, and another identity tries. Else the error counts."""
        name, fault = identity.name, fault_of(error)
        if fault is Fault.PAGE:
            return
        self._counts.failures += 1
        worked = self._memory.works(name, host)
        self._memory.unset_works(name, host)
        if fault is Fault.UNSURE and worked:
            return  # excused once, because earlier pages succeeded
        if not self._memory.rests(name, host):  # otherwise another page met the same failure
            await self._count_failure(name, host, fault, error)
        if fault is Fault.UNSURE:
            free = free_failures(self._settings, len(self._roster) - len(self._removed))
            if await self._facts.count_failure(request.fingerprint()) > free:
                error.retryable = True  # another identity may get another answer
                return
        raise Postponed(str(error), contacted=error.contacted) from error

    async def _count_failure(self, name: str, host: str, fault: Fault, error: FetchError) -> None:
        """Let the identity rest on this host for a moment. Remove it if it fails everywhere."""
        seconds = min(_FAILURE_REST, self._settings.rest)
        self._memory.rest(name, host, seconds)
        counts = fault is not Fault.UNSURE or self._memory.answers_another(name, host)
        failures, since = self._memory.failed(name, host, counts=counts)
        if fault is Fault.REFUSED or is_removed(self._settings, failures, since):
            await self._remove(name, str(error), refused=fault is Fault.REFUSED)
        else:
            log.info("the identity %s failed: %s", name, error)
            await self._facts.rest(name, host, str(error), seconds)

    async def _remove(self, name: str, reason: str, *, refused: bool) -> None:
        if name not in self._removed:
            log.warning("the identity %s is removed: %s", name, reason)
        if refused:
            self._refused.add(name)
        self._removed[name] = reason
        self._checked[name] = time.monotonic()
        await self._facts.remove(name, Removal(reason, refused), self._settings.max_rest)
        self._check_exhausted()


async def _send_as(identity: Identity, fetch: Fetch, request: Request) -> Response:
    """Send a request as the identity. Headers of the request itself win."""
    own = {name.lower() for name in request.headers}
    headers = {name: value for name, value in identity.headers.items() if name.lower() not in own}
    proxy = identity.upstream(host_of(request.url))
    return await fetch(request.replace(proxy=proxy, headers={**headers, **request.headers}))
