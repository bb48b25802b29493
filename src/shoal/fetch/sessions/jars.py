"""The cookie jars of a run, kept in its store.

A jar belongs to an identity, or is named by ``meta["cookiejar"]``. Each site (registrable domain) of a jar is one
document of the store. Processes change it by compare-and-set: each writes only the cookies that it changed, so none
overwrites those of another. In the same step, the cookies of the run get a new version. Every lease
carries the version, so a worker that leases a link of a page reads the cookies that the page has set.

Each login gives its jar an epoch. A cookie that belongs to an earlier epoch than that of the document is dropped: a
page that was fetched before the login must not log everybody out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS, StoreError
from shoal.fetch.sessions.cookies import Cookie, CookieJar, CookieKey, site_of, site_of_url
from shoal.ports import Completion, CookieWrite, Documents, Pushed, Queue
from shoal.system import chance, clock

log = logging.getLogger("shoal.session")

Changes: TypeAlias = dict[CookieKey, tuple[int, Cookie | None]]
"""The epoch and the new cookie by key. None: it was removed."""

_MAX_NAME = 150  # characters of a jar's name in a key
_MAX_SITE = 512 * 1024  # bytes of the cookies of a site
_MAX_LISTED = 1000
_MAX_JARS = 10_000
_MAX_EVICTED = 100_000
_TRIES = 50
_encode = msgspec.msgpack.Encoder().encode


class SiteCookies(Struct, frozen=True, array_like=True):
    """The cookies of one site in one jar, as they are stored. ``epoch``: of the login that they belong to."""

    epoch: int = 0
    cookies: tuple[Cookie, ...] = ()

    def changed(self, changes: Changes, now: float) -> SiteCookies:
        """With these changes, as far as they do not belong to an earlier epoch. The oldest cookies go if there is no
        room."""
        cookies = {cookie.key: cookie for cookie in self.cookies if not cookie.is_over(now)}
        epoch = self.epoch
        for key, (of, cookie) in changes.items():
            if of < self.epoch:
                continue
            epoch = max(epoch, of)
            cookies.pop(key, None)
            if cookie is not None and not cookie.is_over(now):
                cookies[key] = cookie
        size = sum(map(_size_of, cookies.values()))
        while size > _MAX_SITE:
            size -= _size_of(cookies.pop(next(iter(cookies))))
        return SiteCookies(epoch, tuple(cookies.values()))


_decode = msgspec.msgpack.Decoder(SiteCookies).decode


def _size_of(cookie: Cookie) -> int:
    return 60 + len(cookie.name) + len(cookie.domain) + 4 * (len(cookie.value) + len(cookie.path))


def quoted(jar: str) -> str:
    """The name of a jar as a part of a key."""
    return quote(jar, safe="")[:_MAX_NAME]


class JarKeys:
    """The keys of a run's jars in its store."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"run/{run_id}/jar/"

    def key(self, jar: str, site: str) -> str:
        return f"{self.prefix}{quoted(jar)}/{quote(site, safe='')}"

    def parts(self, key: str) -> tuple[str, str]:
        """The jar and the site of a key."""
        jar, _, site = key.removeprefix(self.prefix).partition("/")
        return unquote(jar), unquote(site)


class _Site(Struct):
    """What this process knows of a site in a jar."""

    generation: int = -1
    """It was read when `Jars` had this generation."""
    version: bytes = b""
    stored: SiteCookies = SiteCookies()
    changes: Changes = {}
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class Jar:
    """The cookies of one identity, as this process knows them."""

    def __init__(self, name: str, clock: Callable[[], float], jars: Callable[[], int]) -> None:
        self.name = name
        self.cookies = CookieJar(clock=clock, jars=jars, on_evict=self._evicted)
        self.epoch = 0
        """Of the last login that this process knows of."""
        self.sites: dict[str, _Site] = {}
        self.evicted: set[str] = set()
        """Stored sites that this process has dropped, because it has too many, if it had read all of them."""

    def adopt(self, site: _Site, stored: SiteCookies) -> None:
        """Take over what is stored of a site now, except what this process has changed and not stored yet."""
        self.epoch = max(self.epoch, stored.epoch)
        cookies = {cookie.key: cookie for cookie in stored.cookies}
        for before in site.stored.cookies:
            if before.key not in cookies and before.key not in site.changes:
                self.cookies.remove(before.key)
        for key, cookie in cookies.items():
            if key not in site.changes:
                self.cookies.put(cookie)
        site.stored = stored

    def settle(self, site: _Site, changes: Changes) -> None:
        """These changes are stored, or dropped because they belong to an earlier epoch than what is stored."""
        for key, change in changes.items():
            if site.changes.get(key) is not change:
                continue  # it changed again meanwhile
            del site.changes[key]
            if change[0] < site.stored.epoch:
                self.cookies.remove(key)
                for cookie in site.stored.cookies:
                    if cookie.key == key:
                        self.cookies.put(cookie)

    def _evicted(self, domain: str) -> None:
        """Read the site again when it is needed. Changes that are not stored yet are kept."""
        name = site_of(domain)
        site = self.sites.get(name)
        if site is None:
            return
        if not site.changes:  # drop all of it
            del self.sites[name]
            for cookie in site.stored.cookies:
                self.cookies.remove(cookie.key)
        if site.version or site.changes:
            self.evicted.add(name)


def _is_new(before: Cookie | None, cookie: Cookie, now: float) -> bool:
    """Whether a cookie is worth storing. A site may set the same one with each page, only with a later end."""
    if before is None or before.is_over(now):
        return not cookie.is_over(now)
    if before.value != cookie.value or msgspec.structs.replace(before, expires=cookie.expires) != cookie:
        return True
    if before.expires is None or cookie.expires is None:
        return before.expires != cookie.expires
    return cookie.expires < before.expires or before.expires - now < (cookie.expires - now) / 2


class Jars:
    """All jars of a run in one process. Without a store they are kept in memory only."""

    def __init__(
        self,
        documents: Documents | None = None,
        queue: Queue | None = None,
        run_id: str = "",
        clock: Callable[[], float] = lambda: clock.time(),
    ) -> None:
        self._documents = documents
        self._queue = queue
        self._keys = JarKeys(run_id)
        self._clock = clock
        self._jars: dict[str, Jar] = {}
        self._changed: set[tuple[str, str]] = set()
        """Jars and sites with changes that are not stored."""
        self._version = self._floor = 0
        """A lease may answer with the version before the last change of this process: it was on its way."""
        self._generation = 0
        """Changes when another process has changed cookies."""
        self._known_at = -1
        """The generation in which all sites that are stored were read."""
        self._flushing = asyncio.Lock()
        self._has_dropped = False
        self.jar("")  # nearly every page needs it

    @property
    def is_stored(self) -> bool:
        return self._documents is not None

    @property
    def has_changes(self) -> bool:
        """Whether there are changes that are not stored, or are being stored."""
        return bool(self._changed) or self._flushing.locked()

    def jar(self, name: str) -> Jar:
        """The jar of a name."""
        jar = self._jars.get(name)
        if jar is None:
            if len(self._jars) >= _MAX_JARS:
                self._drop_oldest()
            jar = self._jars[name] = Jar(name, self._clock, self._jars.__len__)
        return jar

    def _drop_oldest(self) -> None:
        """Drop a jar. If it is stored, it can be read again."""
        changed = {name for name, _ in self._changed}
        oldest = next((name for name in self._jars if name and name not in changed), None)
        if oldest is not None:
            del self._jars[oldest]
        if self._documents is None and not self._has_dropped:
            self._has_dropped = True
            log.warning("more than %d cookie jars: the oldest ones are dropped", _MAX_JARS)

    def seen(self, version: int) -> None:
        """A lease carried this version of the run's cookies."""
        if self._version < 0:
            self._floor = self._version = version
        elif version > self._version or version < self._floor:
            self._floor = self._version = version
            self._generation += 1

    def forget(self) -> None:
        """Drop everything: the store went back in time."""
        self._jars.clear()
        self._changed.clear()
        self._version = self._floor = 0
        self._generation += 1

    def is_fresh(self, jar: Jar, url: str) -> bool:
        """Whether this process knows the cookies for a URL. Otherwise call ``refresh``."""
        if self._documents is None or not self._version or self._known_at == self._generation:
            return not jar.evicted or site_of_url(url) not in jar.evicted
        site = jar.sites.get(site_of_url(url))
        return site is not None and site.generation == self._generation

    def _limit_evicted(self, jar: Jar) -> None:
        if len(jar.evicted) > _MAX_EVICTED:
            jar.evicted.clear()
            self._known_at = -1  # from now on, each site is read when it is needed

    async def refresh(self, jar: Jar, url: str) -> None:
        """Read the stored cookies for a URL."""
        name = site_of_url(url)
        site = jar.sites.setdefault(name, _Site())
        async with site.lock:
            if site.generation != self._generation or name in jar.evicted:
                await self._read(jar, name, site)
                jar.evicted.discard(name)

    async def open(self) -> None:
        """Read all jars. Only for a store that no other process uses."""
        await self.load()
        self._version = -1  # the next lease says which version that is

    async def load(self) -> None:
        """Read all jars, unless they are many. Then each site is read when it is needed."""
        assert self._documents is not None
        generation = self._generation
        documents = await self._documents.list_documents(self._keys.prefix, limit=_MAX_LISTED)
        for document in documents:
            name, site = self._keys.parts(document.key)
            jar = self.jar(name)
            state = jar.sites.setdefault(site, _Site())
            state.generation, state.version = generation, document.version
            jar.adopt(state, _read(document.value))
        if len(documents) < _MAX_LISTED:
            self._known_at = generation

    async def _read(self, jar: Jar, name: str, site: _Site) -> None:
        assert self._documents is not None
        generation = self._generation
        document = await self._documents.get_document(self._keys.key(jar.name, name))
        site.version = b"" if document is None else document.version
        site.generation = generation
        jar.adopt(site, SiteCookies() if document is None else _read(document.value))

    # -- changes

    def set(self, jar: Jar, cookie: Cookie, epoch: int) -> None:
        """Take over a cookie that a page has set, or ended. ``epoch``: of the jar when the page was requested. Cookies
        of an earlier epoch are dropped."""
        if epoch < jar.epoch:
            return
        now = self._clock()
        before = jar.cookies.get(cookie.key)
        jar.cookies.put(cookie)
        if jar.evicted:
            self._limit_evicted(jar)
        if self._documents is not None and _is_new(before, cookie, now):
            self._note_change(jar, cookie.key, None if cookie.is_over(now) else cookie, epoch)

    def _note_change(self, jar: Jar, key: CookieKey, cookie: Cookie | None, epoch: int) -> None:
        site = site_of(key[0])
        jar.sites.setdefault(site, _Site()).changes[key] = epoch, cookie
        self._changed.add((jar.name, site))

    async def flush(self, completions: Sequence[Completion] = ()) -> list[Pushed | None]:
        """Store all changes, then complete the pages that made them: in one step, if that is possible."""
        pushed: list[Pushed | None] | None = None
        async with self._flushing:
            changed, self._changed = self._changed, set()
            try:
                for number, name in enumerate(changed, 1):
                    pushed = await self._write_site(*name, completions if number == len(changed) else ())
            except BaseException:
                self._changed |= changed
                raise
        if pushed is None and completions:
            assert self._queue is not None
            pushed = await self._queue.complete(completions)
        return pushed or []

    async def _write_site(
        self, jar_name: str, name: str, completions: Sequence[Completion] = ()
    ) -> list[Pushed | None] | None:
        jar = self.jar(jar_name)
        if (site := jar.sites.get(name)) is None:
            return None
        async with site.lock:
            if site.generation != self._generation and site.version:  # others have changed cookies, perhaps these
                await self._read(jar, name, site)
            return await self._write(jar, name, site, completions)

    def _note(self, version: int) -> None:
        """This process has changed cookies, which have this version now."""
        if version != self._version + 1:  # others have changed cookies too
            self._generation += 1
        self._floor, self._version = self._version, version

    async def _write(
        self, jar: Jar, name: str, site: _Site, completions: Sequence[Completion]
    ) -> list[Pushed | None] | None:
        """Store the changes of a site, and complete pages in the same step. None: there was nothing to store, or others
        changed the site in between; then the pages are not completed."""
        assert self._queue is not None
        key = self._keys.key(jar.name, name)
        for attempt in range(_TRIES):
            changes = dict(site.changes)
            value = site.stored.changed(changes, self._clock())
            if value == site.stored:
                jar.settle(site, changes)
                return None
            content = _encode(value) if value.cookies or value.epoch else None
            own = chance.token_bytes(16)
            write = CookieWrite(key, content, site.version, own)
            version, pushed = await self._queue.store_cookies(write, () if attempt else completions)
            if version:
                self._note(version)
                site.generation = self._generation
                site.version, site.stored = own if content else b"", value
                jar.settle(site, changes)
                return None if attempt else pushed
            if attempt:
                await asyncio.sleep(0.002 * attempt)
            await self._read(jar, name, site)
        raise StoreError(f"cannot store the cookies of {name}: other processes keep changing them")

    # -- logins

    async def publish(self, jar: Jar, changes: Mapping[CookieKey, Cookie | None], epoch: int) -> None:
        """Store the cookies that a login has changed. From now on, pages of an earlier epoch change no cookie of this
        jar."""
        if self._documents is not None:
            await self.load()  # also the sites that other processes know
        jar.epoch = max(jar.epoch, epoch)
        for key, cookie in changes.items():
            if cookie is None:
                jar.cookies.remove(key)
            else:
                jar.cookies.put(cookie)
        if self._documents is None:
            return
        for name, site in jar.sites.items():
            site.changes = {key: change for key, change in site.changes.items() if change[0] >= epoch}
            site.changes[_MARK] = epoch, None
            self._changed.add((jar.name, name))
        for key, cookie in changes.items():
            self._note_change(jar, key, cookie, epoch)
        await self.flush()

    # -- for people

    async def stored(self) -> dict[str, dict[str, SiteCookies]]:
        """The stored cookies of each site, by jar."""
        assert self._documents is not None
        jars: dict[str, dict[str, SiteCookies]] = {}
        after = ""
        while documents := await self._documents.list_documents(self._keys.prefix, after=after, limit=_MAX_LISTED):
            for document in documents:
                name, site = self._keys.parts(document.key)
                jars.setdefault(name, {})[site] = _read(document.value)
            after = documents[-1].key
        return jars

    async def change_site(self, jar: str, site: str, update: Callable[[SiteCookies], SiteCookies]) -> None:
        """Replace the stored cookies of a site by the result of ``update``, which may be called several times."""
        assert self._documents is not None
        assert self._queue is not None
        key = self._keys.key(jar, site)
        for attempt in range(_TRIES):
            document = await self._documents.get_document(key)
            content = _encode(update(SiteCookies() if document is None else _read(document.value)))
            replaces = b"" if document is None else document.version
            if (await self._queue.store_cookies(CookieWrite(key, content, replaces, chance.token_bytes(16))))[0]:
                return
            await asyncio.sleep(0.002 * attempt)
        raise StoreError(f"cannot store the cookies of {site}: other processes keep changing them")


_MARK: CookieKey = ("", "", "")
"""The key of a change that only raises the epoch."""


def _read(value: bytes) -> SiteCookies:
    try:
        return _decode(value)
    except DECODING_ERRORS as exc:
        raise StoreError(f"stored cookies cannot be read ({exc}): another program has changed them") from exc
