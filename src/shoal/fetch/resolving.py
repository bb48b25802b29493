"""Resolves host names. No lookup can delay a connection to another host, or to an address."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiohappyeyeballs import AddrInfoType

from shoal.config import DnsSettings
from shoal.system import clock, threads

_MAX_REMEMBERED = 1024  # names
_FIRST_PAUSE = 0.5  # seconds that the first failure of a name is remembered; shorter than the delay before a retry
_MAX_LOOKUPS = 4096  # in this process; each takes about 4 KB
_MAX_THREADS = 128  # for the resolver of the system
# c-ares doubles the time-out with each try, and begins with less if the server is fast. The deadline comes before.
_FIRST_TRY, _TRIES = 0.5, 5
_SECOND_LEVEL = frozenset(("ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"))


class ResolvedAddress(NamedTuple):
    """An address of a host."""

    host: str
    family: int
    protocol: int
    scope: int = 0
    """The network interface of a link-local IPv6 address."""

    def target(self, port: int) -> AddrInfoType:
        """What a socket connects to."""
        address = (self.host, port, 0, self.scope) if self.family == socket.AF_INET6 else (self.host, port)
        return self.family, socket.SOCK_STREAM, self.protocol, "", address


_Future: TypeAlias = asyncio.Future[list[ResolvedAddress]]


class UnresolvedError(socket.gaierror):
    """A name has no address. ``reason`` is empty if it does not exist."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code, reason or "the name does not exist")
        self.reason = reason


class Caller:
    """Whoever looks up names: a run, a session of the API, a browser context. It waits only for its own lookups."""

    def __init__(self, max_lookups: int) -> None:
        """Names of one zone take a quarter of the lookups at most: a zone may never answer, and others do."""
        self._most = max_lookups
        self._share = max(1, max_lookups // 4)
        self._zones: Counter[str] = Counter()
        self._held = 0
        self._freed = asyncio.Event()

    async def take(self, zone: str, resolver: Resolver) -> None:
        """Wait until one more lookup may begin. If all callers together have too many, each may still have one."""
        while (
            self._held >= self._most
            or self._zones[zone] >= self._share
            or (self._held and len(resolver.unanswered) >= resolver.most)
        ):
            await self._freed.wait()
        self._held += 1
        self._zones[zone] += 1

    def give_back(self, zone: str) -> None:
        self._held -= 1
        self._zones[zone] -= 1
        if not self._zones[zone]:
            del self._zones[zone]
        self._freed.set()
        self._freed = asyncio.Event()


current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
"""For whom this task looks up names, if several callers share a fetcher."""


class _KnownName(NamedTuple):
    """What is remembered of a name: addresses, or why there are none."""

    until: float
    addresses: list[ResolvedAddress]
    error: tuple[int, str] | None = None
    pause: float = 0.0


class Names:
    """Resolves names, with a deadline. Addresses are remembered, failures only for a moment.

    Requests of one caller that need the same name at the same time share a lookup. Those of different callers do not,
    because one of them may have to wait.
    """

    def __init__(self, settings: DnsSettings = DnsSettings(), cache_seconds: float = 300.0) -> None:
        self._settings = settings
        self._seconds = cache_seconds
        self._known: dict[str, _KnownName] = {}
        self._lookups: dict[tuple[Caller, str], asyncio.Task[list[ResolvedAddress]]] = {}
        self._own = self.new_caller()

    def new_caller(self) -> Caller:
        settings = self._settings
        return Caller(settings.max_lookups if settings.resolver == "c-ares" else min(settings.max_lookups, 32))

    async def resolve(self, host: str, caller: Caller | None = None) -> list[ResolvedAddress]:
        """The addresses of a host, the best one first. `UnresolvedError` if there is none, or none in time."""
        name = self._known.get(host)
        if name is not None and clock.monotonic() < name.until:
            if name.error is not None:
                raise UnresolvedError(*name.error)
            return name.addresses
        if literal := _literal(host):
            return literal
        key = caller or current_caller.get() or self._own, host
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.create_task(self._look_up(*key))
            lookup.add_done_callback(partial(self._end, key))
        return await asyncio.shield(lookup)

    def _end(self, key: tuple[Caller, str], lookup: asyncio.Task[list[ResolvedAddress]]) -> None:
        del self._lookups[key]
        if not lookup.cancelled():
            lookup.exception()  # nobody may be waiting for it any more

    async def _look_up(self, caller: Caller, host: str) -> list[ResolvedAddress]:
        """If there is little time left when the turn comes, the failure is not remembered: it says nothing about the
        name, and would be a way to spoil names for others."""
        seconds, zone = self._settings.deadline, _zone(host)
        resolver = _resolver(self._settings.resolver)
        asked_at = 0.0
        try:
            async with asyncio.timeout(seconds):
                await caller.take(zone, resolver)
                asked_at = clock.monotonic()
                answer = resolver.ask(host)
                answer.add_done_callback(lambda _: caller.give_back(zone))
                addresses = await (answer if resolver.can_cancel else asyncio.shield(answer))
        except TimeoutError as exc:
            reason = f"no answer within {seconds:g} s (dns.deadline)"
            if not asked_at:
                reason = f"too many names wait for an answer, no turn within {seconds:g} s (dns.max_lookups)"
            error = UnresolvedError(socket.EAI_AGAIN, reason)
            if asked_at and clock.monotonic() - asked_at > 0.9 * seconds:
                self._remember_failure(host, error)
            raise error from exc
        except UnresolvedError as exc:
            self._remember_failure(host, exc)
            raise
        self._remember(host, _KnownName(clock.monotonic() + self._seconds, addresses))
        return addresses

    def _remember_failure(self, host: str, error: UnresolvedError) -> None:
        """For twice as long as the last time, if that was a moment ago."""
        now, last = clock.monotonic(), self._known.get(host)
        again = last is not None and last.error is not None and now < last.until + self._settings.failure_seconds
        pause = min(2 * last.pause if last is not None and again else _FIRST_PAUSE, self._settings.failure_seconds)
        self._remember(host, _KnownName(now + pause, [], (error.errno or 0, error.reason), pause))

    def _remember(self, host: str, name: _KnownName) -> None:
        self._known.pop(host, None)
        self._known[host] = name
        if len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def close(self) -> None:
        for lookup in [*self._lookups.values()]:
            lookup.cancel()
        self._known.clear()


def _literal(host: str) -> list[ResolvedAddress]:
    """The address, if the host is one: in any spelling that the system reads. Nothing is looked up."""
    try:
        return _addresses(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except ValueError as exc:  # a name that cannot be encoded
        raise socket.gaierror(socket.EAI_NONAME, str(exc)) from exc
    except socket.gaierror:
        return []


def _addresses(infos: Iterable[tuple[Any, Any, int, str, tuple[Any, ...]]]) -> list[ResolvedAddress]:
    return [
        ResolvedAddress(str(address[0]), family, protocol, int(address[3]) if len(address) > 3 else 0)
        for family, _, protocol, _, address in infos
    ]


def _zone(host: str) -> str:
    """The part of a name that one owner probably has: two labels, or three below ``co.uk`` and the like."""
    labels = host.rstrip(".").lower().split(".")
    return ".".join(labels[-3 if len(labels[-1]) == 2 and labels[-2:][0] in _SECOND_LEVEL else -2 :])


# -- who knows the addresses


class Resolver(Protocol):
    """Asks for addresses. One for each process, used by all its event loops."""

    most: int
    """How many names may be unanswered."""
    unanswered: set[_Future]
    can_cancel: bool
    """Whether a lookup ends when nobody waits for it any more."""

    def ask(self, host: str) -> _Future:
        """Begin a lookup. It fails with `UnresolvedError`."""
        ...


class CaresResolver:
    """c-ares, which asks the name servers in one thread for all names. It reads the system's settings: /etc/hosts,
    /etc/resolv.conf (again when that changes), and the order of both in /etc/nsswitch.conf."""

    most = _MAX_LOOKUPS
    can_cancel = True

    def __init__(self) -> None:
        import pycares  # needed for names only, which a crawl of addresses does not have

        self.unanswered: set[_Future] = set()
        self._channel = pycares.Channel(timeout=_FIRST_TRY, tries=_TRIES)
        self._missing = (pycares.errno.ARES_ENOTFOUND, pycares.errno.ARES_ENODATA, pycares.errno.ARES_EBADNAME)
        self._explain = pycares.errno.strerror

    def ask(self, host: str) -> _Future:
        loop = asyncio.get_running_loop()
        future = _new_future(loop, self.unanswered)

        def settle(result: Any, code: int | None) -> None:
            if future.done():
                return
            nodes = () if code else result.nodes
            if nodes:
                infos = ((node.family, 0, socket.IPPROTO_TCP, "", _texts(node.addr)) for node in nodes)
                future.set_result(_addresses(infos))
            elif code is None or code in self._missing:
                future.set_exception(UnresolvedError(socket.EAI_NONAME))
            else:
                future.set_exception(UnresolvedError(socket.EAI_AGAIN, str(self._explain(code))))

        def answered(result: Any, code: int | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, code)

        try:
            name = host.encode("idna").decode()
            self._channel.getaddrinfo(name, None, type=socket.SOCK_STREAM, callback=answered)
        except (OSError, ValueError) as exc:
            future.set_exception(UnresolvedError(socket.EAI_NONAME, str(exc)))
        return future


def _texts(address: tuple[Any, ...]) -> tuple[Any, ...]:
    return address[0].decode() if isinstance(address[0], bytes) else address[0], *address[1:]


class SystemResolver:
    """The resolver of the system. Each lookup needs a thread, which nothing can end before the system gives up."""

    most = _MAX_THREADS
    can_cancel = False

    def __init__(self) -> None:
        self.unanswered: set[_Future] = set()

    def ask(self, host: str) -> _Future:
        loop = asyncio.get_running_loop()
        future = _new_future(loop, self.unanswered)

        def settle(addresses: list[ResolvedAddress], error: UnresolvedError | None) -> None:
            if not future.done():
                future.set_result(addresses) if error is None else future.set_exception(error)

        def look_up() -> None:
            addresses, error = [], None
            try:
                flags = socket.AI_ADDRCONFIG
                addresses = _addresses(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags))
            except socket.gaierror as exc:
                missing = exc.errno == socket.EAI_NONAME
                error = UnresolvedError(exc.errno or 0, "" if missing else exc.strerror or "")
            except (OSError, ValueError) as exc:
                error = UnresolvedError(socket.EAI_NONAME, str(exc))
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, addresses, error)

        try:
            # A daemon: the process may end before the system gives up.
            threads.start(look_up, "shoal-lookup")
        except RuntimeError as exc:
            future.set_exception(UnresolvedError(socket.EAI_AGAIN, str(exc)))
        return future


def _new_future(loop: asyncio.AbstractEventLoop, unanswered: set[_Future]) -> _Future:
    future: _Future = loop.create_future()
    unanswered.add(future)
    future.add_done_callback(unanswered.discard)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may be waiting
    return future


_resolvers: dict[str, Resolver] = {}
_of_parents: list[Resolver] = []
"""Resolvers of the process that this one was forked from. Deleting one would wait for a thread that is not here."""


def _resolver(name: str) -> Resolver:
    """The resolver of this process."""
    if name not in _resolvers:
        _resolvers[name] = CaresResolver() if name == "c-ares" else SystemResolver()
    return _resolvers[name]


def _forget_parents() -> None:
    _of_parents.extend(_resolvers.values())
    _resolvers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


def allow_many_lookups() -> None:
    """Let uvloop itself resolve 32 names at once, instead of four. Call it before the first lookup of the process.

    Pages do not need it, but clients of stores and libraries that spiders use do.
    """
    os.environ.setdefault("UV_THREADPOOL_SIZE", "32")
