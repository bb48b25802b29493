"""The layer that fetches each page with the identity of its host, and retires identities that are blocked or fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from shoal.config import IdentitySettings
from shoal.errors import ConfigError, FetchError, FrontierError, ProxyError
from shoal.fetch.layers import Postponed
from shoal.fetch.layers.identity_facts import DAY, Identity, IdentityCounts, IdentityFacts, Removal
from shoal.fetch.layers.throttle import retry_after_of
from shoal.fetch.sessions.session import Session
from shoal.http import Request, Response
from shoal.ports import Fetch, Hosts, HostUpdate
from shoal.system import chance, clock
from shoal.urls.normalize import host_of, origin_of

# The rules of identities: how long they rest, which error is whose fault, and what a failure costs. They do no I/O.

_UNRELATED = frozenset({"too large", "request", "address"})
"""Kinds of errors that no other identity would change."""


class Fault(Enum):
    """Whose fault a failed fetch is."""

    REFUSED = auto()
    """The proxy refuses this user, or is not a proxy: a retry cannot help."""
    PROXY = auto()
    """The proxy can't be reached."""
    UNSURE = auto()
    """The host's, or that of a proxy that lies."""
    PAGE = auto()
    """The page's own."""


def fault_of(error: FetchError) -> Fault:
    """Whose fault it is that a page was not fetched through a proxy."""
    if isinstance(error, ProxyError):
        return Fault.PROXY if error.retryable else Fault.REFUSED
    if error.status or error.kind in _UNRELATED:
        return Fault.PAGE
    return Fault.UNSURE


def rest_seconds(settings: IdentitySettings, streak: int, retry_after: float = 0.0) -> float:
    """How long an identity rests after a block. ``streak``: blocks before it without a page in between.

    The time doubles with each block in a row, and is never shorter than the host asked for.
    """
    return max(min(settings.rest * 2.0 ** min(streak, 30), settings.max_rest), retry_after)


def is_removed(settings: IdentitySettings, failures: int, since: float) -> bool:
    """Whether an identity that failed so often in a row, over so many seconds, is removed."""
    return failures >= settings.max_failures and since >= settings.remove_after


def free_failures(settings: IdentitySettings, identities: int) -> int:
    """How many failures of a page that may be the fault of a proxy cost it no attempt: enough for every other
    identity to try, up to a limit."""
    return min(settings.max_blocks, max(0, identities - 1))


# What one process remembers of its identities. The store decides; this saves calls to it, and rates failures.

_MAX_ENTRIES = 50_000
_RECHECK_SECONDS = 5.0  # a rest that is remembered longer than this is asked for again

_MAX_ANSWERED = 4  # identities of a host whose last answer is remembered
_EVIDENCE_SECONDS = 60.0  # an answer to another identity in this time shows that a host is not down

K = TypeVar("K")
T = TypeVar("T")


class ShortMemory:
    """A bounded cache of the state of identities. Forgetting is always safe: the store is asked again."""

    def __init__(self, clock: Callable[[], float] = lambda: clock.monotonic()) -> None:
        self._clock = clock
        self._assigned: dict[str, tuple[str, float]] = {}
        self._rests: dict[tuple[str, str], tuple[float, float, bool]] = {}
        """By identity and host: when to ask the store again, when it returns, and whether it is final."""
        self._works: dict[str, set[str]] = {}
        """The identities that work on a host."""
        self._answered: dict[str, dict[str, float]] = {}
        """By host: when it last answered the identities that used it last."""
        self._failed: dict[tuple[str, str], float] = {}
        """When an identity last failed on a host."""
        self._rows: dict[str, tuple[int, float]] = {}
        """By identity: failures in a row, and when the first was."""
        self._good: dict[str, str] = {}
        """By host: a page that was fetched successfully."""

    def assigned(self, host: str) -> str | None:
        name, until = self._assigned.get(host, (None, 0.0))
        return name if until > self._clock() else None

    def assign(self, host: str, name: str, seconds: float) -> None:
        before = self._assigned.get(host, (name, 0.0))[0]
        if before != name:
            self.unset_works(before, host)  # it may have been blocked elsewhere, so it must prove itself again
        _put(self._assigned, host, (name, self._clock() + seconds))

    def rests(self, name: str, host: str) -> bool:
        """Whether the identity rests for sure. False: ask the store."""
        return self._rests.get((name, host), (0.0, 0.0, False))[0] > self._clock()

    def rest(self, name: str, host: str, seconds: float, *, is_final: bool = False) -> None:
        now = self._clock()
        again = now + min(max(seconds, 0.0), _RECHECK_SECONDS)
        _put(self._rests, (name, host), (again, now + seconds, is_final))

    def returns_in(self, names: Iterable[str], host: str) -> float:
        """Seconds until the first of these identities returns to a host, as far as this process knows."""
        now = self._clock()
        return min((self._rests.get((name, host), (0.0, now, False))[1] - now for name in names), default=60.0)

    def is_final(self, name: str, host: str) -> bool:
        return self._rests.get((name, host), (0.0, 0.0, False))[2]

    def resting(self) -> int:
        now = self._clock()
        return sum(returns > now for _, returns, _ in self._rests.values())

    def works(self, name: str, host: str) -> bool:
        """Whether the identity fetched pages of a host since its last failure or block there."""
        return name in self._works.get(host, ())

    def set_works(self, name: str, host: str) -> None:
        if host not in self._works:
            _put(self._works, host, set())
        self._works[host].add(name)

    def succeeded(self, name: str, host: str) -> None:
        self._rows.pop(name, None)
        if host not in self._answered:
            _put(self._answered, host, {})
        _put(self._answered[host], name, self._clock(), _MAX_ANSWERED)

    def answers_another(self, name: str, host: str) -> bool:
        """Whether the host answered another identity since this one failed on it, or a short while ago."""
        since = max(self._failed.get((name, host), 0.0), self._clock() - _EVIDENCE_SECONDS)
        return any(other != name and at >= since for other, at in self._answered.get(host, {}).items())

    def failed(self, name: str, host: str, *, counts: bool) -> tuple[int, float]:
        """Note a failure. Returns how many counted in a row, and the seconds since the first of them."""
        now = self._clock()
        _put(self._failed, (name, host), now)
        count, since = self._rows.get(name, (0, now))
        if counts:
            count += 1
            self._rows[name] = (count, since)
        return count, now - since

    def good(self, host: str) -> str | None:
        """A page of the host that was fetched successfully; None if there is none."""
        return self._good.get(host)

    def set_good(self, host: str, url: str) -> None:
        if host not in self._good:
            _put(self._good, host, url)

    def unset_works(self, name: str, host: str) -> None:
        self._works.get(host, set()).discard(name)


def _put(entries: dict[K, T], key: K, value: T, most: int = _MAX_ENTRIES) -> None:
    """Store a value. The oldest is dropped when there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


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
            return await self._session(request, fetch)
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
            response = await self._session(request, partial(_send_as, identity, fetch), identity.name)
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
        if self._announce_at is None or self._announce_at <= clock.monotonic():
            await self._announce()
        name = self._memory.assigned(host) or await self._facts.assigned(host)
        if name in self._roster and await self._is_available(name, host):
            if self._memory.assigned(host) is None:
                self._memory.assign(host, name, min(_CACHE_SECONDS, self._settings.hold))
            return self._roster[name]
        others = [other for other in self._roster if other != name]
        chance.shuffle(others)  # so that hosts are spread over the identities
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
        self._announce_at = clock.monotonic() + _ANNOUNCE_SECONDS
        await self._facts.add_names(list(self._roster))
        for name in self._roster if is_new else ():
            await self._facts.restore(name)

    async def _is_available(self, name: str, host: str) -> bool:
        if await self._is_removed(name) or self._memory.rests(name, host):
            return False
        rest = await self._facts.resting(name, host)
        if rest is None:
            return True
        seconds = rest.returns - clock.time()
        self._memory.rest(name, host, seconds if 0 <= seconds <= 2 * DAY else _WAIT[0], is_final=rest.is_final)
        return False

    async def _is_removed(self, name: str) -> bool:
        now = clock.monotonic()
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
        names = [name for name in self._roster if name not in self._removed]
        if names and all(self._memory.is_final(name, host) for name in names):
            message = f"{host} blocks every identity (identities.give_up_after); they try it again after a day"
            return FetchError(message, kind="blocked", retryable=False, contacted=False)
        seconds = min(max(self._memory.returns_in(names, host), _WAIT[0]), _WAIT[1])
        reason = f"no identity is available: {len(names)} rest, {len(self._removed)} are removed"
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
        retry_after = retry_after_of(response, self._settings.max_rest)
        seconds = rest_seconds(self._settings, streak, retry_after.total_seconds() if retry_after is not None else 0.0)
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
        self._checked[name] = clock.monotonic()
        await self._facts.remove(name, Removal(reason, refused), self._settings.max_rest)
        self._check_exhausted()


async def _send_as(identity: Identity, fetch: Fetch, request: Request) -> Response:
    """Send a request as the identity. Headers of the request itself win."""
    own = {name.lower() for name in request.headers}
    headers = {name: value for name, value in identity.headers.items() if name.lower() not in own}
    return await fetch(request.replace(proxy=identity.proxy, headers={**headers, **request.headers}))
