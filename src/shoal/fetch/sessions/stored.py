"""The stored session of a run, for tools: list its jars, add cookies from elsewhere, clear it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Literal, TypeAlias
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal.errors import DECODING_ERRORS, ConfigError, RequestError, StoreError
from shoal.fetch.sessions.cookies import Cookie, CookieJar, invalid_part, is_public_suffix, site_of
from shoal.fetch.sessions.jars import Changes, Jars, SiteCookies, quoted
from shoal.fetch.sessions.login import LoginState, login_state
from shoal.ports import Documents, Queue
from shoal.ports.documents import StoredValue
from shoal.system import clock
from shoal.urls.normalize import host_of, normalize_url

# Cookies in files of other programs: cookies.txt (Netscape), Playwright's storage state, lists of browser
# extensions.
#
# Errors name the line or the entry, and never its content: it may be a secret.

CookieFormat: TypeAlias = Literal["netscape", "playwright"]

MAX_FILE = 8 * 1024 * 1024
MAX_COOKIES = 10_000
_HTTP_ONLY = "#HttpOnly_"
_HEADER = "# Netscape HTTP Cookie File\n# The values are secrets.\n\n"
_FIELDS = ("domain", "subdomains", "path", "secure", "expires", "name", "value")
_FLAGS = {"TRUE": True, "FALSE": False}
_SAME_SITE = {"strict": "Strict", "lax": "Lax", "none": "None", "no_restriction": "None"}


class CookieFile(Struct, frozen=True):
    """The cookies of a file."""

    cookies: tuple[Cookie, ...]
    digest: str
    """Of the file."""
    origins: int = 0
    """Sites whose local storage is in the file too. It cannot be imported."""


def read_cookie_file(data: bytes) -> CookieFile:
    """Read cookies in any of the formats. ConfigError says what is wrong, and where."""
    if len(data) > MAX_FILE:
        raise ConfigError(f"it has more than {MAX_FILE // 1024**2} MB, and is probably not a file of cookies")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = 1 + data.count(b"\n", 0, exc.start)
        raise ConfigError(f"line {line} is not UTF-8") from None
    origins = 0
    if text.lstrip()[:1] in ("{", "["):
        entries, origins = _entries(text)
        cookies = [_read_entry(number, entry) for number, entry in enumerate(entries, 1)]
    else:
        cookies = list(_read_lines(text))
    if not cookies:
        raise ConfigError("there is no cookie in it")
    if len(cookies) > MAX_COOKIES:
        raise ConfigError(f"it has {len(cookies):,} cookies; the limit is {MAX_COOKIES:,}")
    return CookieFile(tuple(cookies), hashlib.blake2b(data, digest_size=16).hexdigest(), origins)


def to_netscape(cookies: Iterable[Cookie]) -> str:
    """A cookies.txt, as curl and yt-dlp read it."""
    lines = []
    for cookie in cookies:
        domain = cookie.domain if cookie.host_only else f".{cookie.domain}"
        flags = ("FALSE" if cookie.host_only else "TRUE", cookie.path, "TRUE" if cookie.secure else "FALSE")
        expires = 0 if cookie.expires is None else math.ceil(cookie.expires)
        mark = _HTTP_ONLY if cookie.http_only else ""
        lines.append("\t".join((f"{mark}{domain}", *flags, str(expires), cookie.name, cookie.value)) + "\n")
    return _HEADER + "".join(lines)


def to_storage_state(cookies: Iterable[Cookie]) -> str:
    """The storage state of a Playwright context."""
    entries = [
        {
            "name": cookie.name,
            "value": cookie.value,
            "domain": cookie.domain if cookie.host_only else f".{cookie.domain}",
            "path": cookie.path,
            "expires": -1 if cookie.expires is None else cookie.expires,
            "httpOnly": cookie.http_only,
            "secure": cookie.secure,
            "sameSite": _SAME_SITE.get(cookie.same_site.lower(), "Lax"),
        }
        for cookie in cookies
    ]
    return json.dumps({"cookies": entries, "origins": []}, indent=2) + "\n"


def _make_cookie(
    where: str, name: str, value: str, domain: str, path: str, *, host_only: bool | None, secure: bool,
    expires: float | None, http_only: bool, same_site: str = "",
) -> Cookie:  # fmt: skip
    """A cookie of a file. ``host_only``: None if only a dot before the domain tells it."""
    bare = domain.strip().removeprefix(".")
    bracketed = f"[{bare}]" if bare.count(":") > 1 and not bare.startswith("[") else bare
    try:
        if not bare or any(mark in bare for mark in "/?#@") or ":" in bracketed.rpartition("]")[2]:
            raise RequestError("it has more than a host")
        host = host_of(normalize_url(f"http://{bracketed}/"))
    except RequestError:
        raise ConfigError(f"{where}: the domain is invalid; write it as example.com or .example.com") from None
    if host_only is None:
        host_only = not domain.strip().startswith(".")
    cookie = Cookie(
        name, value, host, path or "/", host_only or is_public_suffix(host), secure, expires, http_only, same_site
    )
    if part := invalid_part(cookie):
        raise ConfigError(f"{where}: {part}")
    return cookie


# -- cookies.txt


def _read_lines(text: str) -> Iterator[Cookie]:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        http_only = line.startswith(_HTTP_ONLY)
        line = line.removeprefix(_HTTP_ONLY)
        if not line.strip() or line.startswith("#"):
            continue
        yield _read_line(f"line {number}", line.split("\t"), http_only=http_only)


def _read_line(where: str, fields: list[str], *, http_only: bool) -> Cookie:
    if len(fields) == len(_FIELDS) - 1:
        fields = [*fields, ""]
    if len(fields) != len(_FIELDS):
        raise ConfigError(
            f"{where} has {len(fields)} fields. A cookies.txt has {len(_FIELDS)}, separated by tabs: "
            f"{', '.join(_FIELDS)}"
        )
    domain, subdomains, path, secure, expires, name, value = fields
    for title, flag in (("subdomains", subdomains), ("secure", secure)):
        if flag.upper() not in _FLAGS:
            raise ConfigError(f"{where}: {title} must be TRUE or FALSE")
    return _make_cookie(
        where, name, value, domain, path, host_only=not _FLAGS[subdomains.upper()], secure=_FLAGS[secure.upper()],
        expires=_moment(where, expires or 0), http_only=http_only,
    )  # fmt: skip


# -- JSON


class _Entry(Struct, rename="camel"):
    """A cookie in JSON. Programs name the end differently."""

    name: str
    value: str
    domain: str
    path: str = "/"
    secure: bool = False
    http_only: bool = False
    host_only: bool | None = None
    same_site: str | None = None
    expires: float | str | None = None
    expiration_date: float | str | None = None
    expiry: float | str | None = None


def _entries(text: str) -> tuple[list[object], int]:
    """The entries of a list of cookies, and how many origins have storage."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"line {exc.lineno}: it is not valid JSON ({exc.msg})") from None
    except RecursionError:
        raise ConfigError("it is not a list of cookies: the JSON is nested too deeply") from None
    origins = content.get("origins") if isinstance(content, dict) else None
    entries = content.get("cookies") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ConfigError(
            'the JSON has no list of cookies. It must be a list, or an object with "cookies", as '
            "`playwright open --save-storage=FILE` writes it"
        )
    return entries, len(origins) if isinstance(origins, list) else 0


def _read_entry(number: int, content: object) -> Cookie:
    where = f"cookie {number}"
    try:
        entry = msgspec.convert(content, _Entry)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {exc}") from None
    ends = (end for end in (entry.expires, entry.expiration_date, entry.expiry) if end is not None)
    return _make_cookie(
        where, entry.name, entry.value, entry.domain, entry.path, host_only=entry.host_only, secure=entry.secure,
        expires=_moment(where, next(ends, 0)), http_only=entry.http_only,
        same_site=_SAME_SITE.get((entry.same_site or "").lower(), ""),
    )  # fmt: skip


def _moment(where: str, end: float | str) -> float | None:
    """When a cookie ends: seconds since 1970, or a date. None with 0, -1 or "session"."""
    if isinstance(end, str) and end.strip().lower() in ("", "session"):
        return None
    try:
        seconds = float(end)
    except ValueError:
        seconds = _date(str(end))
    if not math.isfinite(seconds):
        raise ConfigError(f"{where}: the end of the cookie is neither a number of seconds nor a date")
    return seconds if seconds > 0 else None


def _date(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


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
        now, sites = clock.time(), (await self._jars.stored()).get(jar, {})
        return [cookie for _, site in sorted(sites.items()) for cookie in site.cookies if not cookie.is_over(now)]

    async def add(self, jar: str, cookies: Iterable[Cookie], digest: str = "") -> None:
        """Add cookies as a login does: under a new epoch, so that pages fetched before change none of them. A login
        that workers wait for counts as done. ``digest``: of the file that has them."""
        stored = (await self._jars.stored()).get(jar, {})
        login = login_state(self._documents, self._run_id, jar)
        epoch, now = _new_epoch(stored, await login.read()), clock.time()
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
        return StoredValue(self._documents, f"run/{self._run_id}/imported/{quoted(jar)}", _Import)


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
    usable = jar.all()
    domains = {cookie.domain for cookie in lasting if jar.get(cookie.key) is None}
    if len(lasting) < len(file.cookies):
        log.warning(
            "%d of %d cookies have expired and are left out", len(file.cookies) - len(lasting), len(file.cookies)
        )
    if domains:
        names = ", ".join(sorted(domains)[:5])
        log.warning("cookies of %s are left out: a domain has up to 50 cookies and 64 KB", names)
    if file.origins:
        log.warning("the session file also has local storage, which is left out: only cookies are imported")
    return usable


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
    return max(int(clock.time() * 1e6), above + 1)


def _new_epoch(sites: Mapping[str, SiteCookies], login: LoginState | None) -> int:
    epochs = (site.epoch for site in sites.values())
    return new_epoch(max((0 if login is None else login.epoch, *epochs)))


def _with_changes(changes: Changes, epoch: int, now: float, stored: SiteCookies) -> SiteCookies:
    changed = stored.changed(changes, now)
    return replace(changed, epoch=max(changed.epoch, epoch))


def _without_cookies(epoch: int, stored: SiteCookies) -> SiteCookies:
    return stored if stored.epoch > epoch else SiteCookies(epoch)  # a login was faster


def _imported_at(epoch: int, now: float, stored: LoginState | None) -> LoginState:
    state = stored or LoginState()
    if state.epoch > epoch:  # a login was faster
        return state
    return replace(state, epoch=epoch, at=now, unproven=0, failures=0, reason="", stopped=False)


def _report(jar: str, sites: Mapping[str, SiteCookies], login: LoginState | None) -> JarReport:
    now = clock.time()
    reports = []
    for site, stored in sorted(sites.items()):
        if cookies := [cookie for cookie in stored.cookies if not cookie.is_over(now)]:
            ends = min((cookie.expires for cookie in cookies if cookie.expires is not None), default=None)
            names = tuple(sorted({cookie.name for cookie in cookies}))
            reports.append(SiteReport(site=site, cookies=len(cookies), names=names, ends=ends))
    epoch = max((0 if login is None else login.epoch, *(site.epoch for site in sites.values())))
    return JarReport(jar=jar, sites=tuple(reports), epoch=epoch, login=login)
