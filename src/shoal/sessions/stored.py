"""The stored session of a run, for tools: list its jars, add cookies from elsewhere, clear it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal.errors import DECODING_ERRORS, ConfigError, StoreError
from shoal.ports import Documents, Queue
from shoal.sessions.cookies import Cookie, CookieJar, site_of
from shoal.sessions.files import CookieFile
from shoal.sessions.jars import Changes, Jars, SiteCookies
from shoal.sessions.login import LoginState, login_state
from shoal.stores.documents import StoredValue

log = logging.getLogger("shoal.session")

_LISTED = 1000


class SiteReport(Struct, frozen=True, kw_only=True):
    """The cookies of a site in a jar, without their values."""

    site: str
    cookies: int
    names: tuple[str, ...]
    ends: float | None
    """When the first of them ends; None if they last as long as the session."""


class JarReport(Struct, frozen=True, kw_only=True):
    """A jar of a run, without values."""

    jar: str
    sites: tuple[SiteReport, ...] = ()
    epoch: int = 0
    """Of its last login or import; 0 if there is none."""
    login: LoginState | None = None
    """None if it has no login."""


class SessionImport(Struct, frozen=True):
    """Cookies for a jar of a run, from a file."""

    jar: str
    file: CookieFile


class _Import(Struct, frozen=True):
    """The file that was imported last into a jar."""

    digest: str


class StoredSession:
    """The jars and logins of a run in its store. Workers notice every change with their next lease."""

    def __init__(self, documents: Documents, queue: Queue, run_id: str) -> None:
        self._documents = documents
        self._run_id = run_id
        self._jars = Jars(documents, queue, run_id)

    async def reports(self) -> list[JarReport]:
        """All jars, by name."""
        stored, logins = await self._jars.stored(), await read_logins(self._documents, self._run_id)
        return [_report(name, stored.get(name, {}), logins.get(name)) for name in sorted({*stored, *logins})]

    async def cookies(self, jar: str) -> list[Cookie]:
        """The cookies of a jar that have not ended."""
        now, sites = time.time(), (await self._jars.stored()).get(jar, {})
        return [cookie for _, site in sorted(sites.items()) for cookie in site.cookies if not cookie.is_over(now)]

    async def add(self, jar: str, cookies: Iterable[Cookie], digest: str = "") -> None:
        """Add cookies as a login does: under a new epoch, so that pages fetched before change none of them. A login
        that workers wait for counts as done. ``digest``: of the file that has them."""
        stored = (await self._jars.stored()).get(jar, {})
        login = login_state(self._documents, self._run_id, jar)
        epoch, now = _new_epoch(stored, await login.read()), time.time()
        changes: dict[str, Changes] = {site: {} for site in stored}
        for cookie in cookies:
            changes.setdefault(site_of(cookie.domain), {})[cookie.key] = epoch, cookie
        for site, changed in changes.items():
            await self._jars.change_site(jar, site, partial(_with_changes, changed, epoch, now))
        await login.change(partial(_imported_at, epoch, now))
        await self._imported(jar).change(lambda _: _Import(digest) if digest else None)

    async def has_imported(self, jar: str, digest: str) -> bool:
        """Whether the last import into a jar was this file."""
        return await self._imported(jar).read() == _Import(digest)

    async def clear(self, jars: Iterable[str]) -> None:
        """Remove the cookies and the logins of jars. Their epoch stays and grows: pages that were fetched before bring
        no cookie back."""
        stored = await self._jars.stored()
        for jar in jars:
            login = login_state(self._documents, self._run_id, jar)
            epoch = _new_epoch(stored.get(jar, {}), await login.read())
            for site in stored.get(jar, {}):
                await self._jars.change_site(jar, site, partial(_without_cookies, epoch))
            await login.change(lambda _: None)
            await self._imported(jar).change(lambda _: None)

    def _imported(self, jar: str) -> StoredValue[_Import]:
        return StoredValue(self._documents, f"run/{self._run_id}/imported/{quote(jar, safe='')[:150]}", _Import)


async def import_session(documents: Documents, queue: Queue, run_id: str, imported: SessionImport) -> None:
    """Add cookies to a run, unless their file was already imported: the run may have newer ones since then."""
    session = StoredSession(documents, queue, run_id)
    if await session.has_imported(imported.jar, imported.file.digest):
        log.info("the session file is unchanged: the run keeps the cookies that it has")
    else:
        await session.add(imported.jar, usable_cookies(imported.file), imported.file.digest)


def usable_cookies(file: CookieFile) -> list[Cookie]:
    """The cookies to import. Logs what of the file is left out. ConfigError if no cookie is left."""
    jar = CookieJar()
    lasting = [cookie for cookie in file.cookies if not cookie.is_over(jar.clock())]
    if not lasting:
        raise ConfigError("all cookies of the session file have expired; record the session again")
    for cookie in lasting:
        jar.put(cookie)
    kept = jar.all()
    domains = {cookie.domain for cookie in lasting if jar.get(cookie.key) is None}
    if len(lasting) < len(file.cookies):
        log.warning(
            "%d of %d cookies have expired and are left out", len(file.cookies) - len(lasting), len(file.cookies)
        )
    if domains:
        named = ", ".join(sorted(domains)[:5])
        log.warning("cookies of %s are left out: a domain has up to 50 cookies and 64 KB", named)
    if file.origins:
        log.warning("the session file also has local storage, which is left out: only cookies are imported")
    return kept


async def read_logins(documents: Documents, run_id: str) -> dict[str, LoginState]:
    """The logins of a run by jar."""
    prefix = f"run/{run_id}/login/"
    logins: dict[str, LoginState] = {}
    for document in await documents.list_documents(prefix, limit=_LISTED):
        try:
            state = msgspec.msgpack.decode(document.value, type=LoginState)
        except DECODING_ERRORS as exc:
            raise StoreError(f"a stored login cannot be read ({exc}): another program has changed it") from exc
        logins[unquote(document.key.removeprefix(prefix))] = state
    return logins


def new_epoch(above: int = 0) -> int:
    """An epoch that is later than all before."""
    return max(time.time_ns() // 1000, above + 1)


def _new_epoch(sites: Mapping[str, SiteCookies], login: LoginState | None) -> int:
    epochs = (site.epoch for site in sites.values())
    return new_epoch(max((0 if login is None else login.epoch, *epochs)))


def _with_changes(changes: Changes, epoch: int, now: float, found: SiteCookies) -> SiteCookies:
    changed = found.changed(changes, now)
    return replace(changed, epoch=max(changed.epoch, epoch))


def _without_cookies(epoch: int, found: SiteCookies) -> SiteCookies:
    return found if found.epoch > epoch else SiteCookies(epoch)  # a login was faster


def _imported_at(epoch: int, now: float, found: LoginState | None) -> LoginState:
    state = found or LoginState()
    if state.epoch > epoch:  # a login was faster
        return state
    return replace(state, epoch=epoch, at=now, unproven=0, failures=0, reason="", stopped=False)


def _report(jar: str, sites: Mapping[str, SiteCookies], login: LoginState | None) -> JarReport:
    now = time.time()
    reports = []
    for site, stored in sorted(sites.items()):
        if cookies := [cookie for cookie in stored.cookies if not cookie.is_over(now)]:
            ends = min((cookie.expires for cookie in cookies if cookie.expires is not None), default=None)
            names = tuple(sorted({cookie.name for cookie in cookies}))
            reports.append(SiteReport(site=site, cookies=len(cookies), names=names, ends=ends))
    epoch = max((0 if login is None else login.epoch, *(site.epoch for site in sites.values())))
    return JarReport(jar=jar, sites=tuple(reports), epoch=epoch, login=login)
