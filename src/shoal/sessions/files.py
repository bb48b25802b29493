"""Cookies in files of other programs: cookies.txt (Netscape), Playwright's storage state, lists of browser extensions.

Errors name the line or the entry, and never its content: it may be a secret.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from shoal.errors import ConfigError, RequestError
from shoal.sessions.cookies import Cookie, invalid_part, is_public_suffix
from shoal.urls.normalize import host_of, normalize_url

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
