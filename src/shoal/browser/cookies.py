"""Keeps the cookies of a browser context equal to those of its jar.

Several pages may use a context at the same time, so its cookies are never cleared: only what has changed in the jar is
put into the context, and only what has changed in the context is put into the jar.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shoal.middleware import Postponed
from shoal.sessions.cookies import Cookie, CookieKey
from shoal.sessions.session import SentCookies

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

log = logging.getLogger("shoal.browser")

_MAX_AGE = 400 * 86400.0  # seconds; browsers allow no more, and Playwright no date after the year 9999
_OVER = 1.0
"""The end of a cookie that is removed. Playwright's ``clear_cookies`` may remove all for a moment."""
_HOST = re.compile(r"[\d.]+|\[.*|[^.]*")
"""What has no subdomains: addresses, and names without dots."""


class ContextCookies:
    """The cookies of one context."""

    def __init__(self, context: BrowserContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._put: dict[CookieKey, Cookie] = {}
        """What the jar had when both were last equal."""
        self._seen: dict[CookieKey, Cookie] = {}
        """The same, as the browser shows it. A cookie that it refuses is missing."""

    async def put(self, sent: SentCookies) -> None:
        """Before a page: put what has changed in the jar into the context. Postponed if there was a login since the
        context was chosen: each login has contexts of its own."""
        async with self._lock:
            if sent.jar.epoch != sent.epoch:
                raise Postponed("there is a newer login", contacted=False)
            before, wanted = self._put, sent.wanted(self._put)
            changed = [cookie for key, cookie in wanted.items() if before.get(key) != cookie]
            ended = [
                old for key, old in before.items() if key not in wanted or wanted[key].host_only != old.host_only
            ]  # the browser has both cookies: for the host only, and for its subdomains
            if changed or ended:
                await self._add([replace(cookie, expires=_OVER) for cookie in ended] + changed)
                self._put = wanted
                for cookie in ended:
                    self._seen.pop(cookie.key, None)
                shown = await self._read()
                for cookie in changed:
                    self._note_put(cookie, shown)

    def _note_put(self, cookie: Cookie, shown: Mapping[CookieKey, Cookie]) -> None:
        found = shown.get(cookie.key)
        if found is None:  # the site may have ended it meanwhile; mostly the browser does not accept it
            log.debug("the browser does not accept the cookie %.100r of %s", cookie.name, cookie.domain)
            self._seen.pop(cookie.key, None)
        else:  # if another page has changed it meanwhile, `take` must see that
            self._seen[cookie.key] = found if found.value == cookie.value else cookie

    async def take(self, sent: SentCookies) -> None:
        """After a page: put what has changed in the context into the jar."""
        async with self._lock:
            shown = await self._read()
            changed = [cookie for key, cookie in shown.items() if self._seen.get(key) != cookie]
            ended = [replace(cookie, expires=0.0) for key, cookie in self._seen.items() if key not in shown]
            self._seen = shown
            self._put.update((cookie.key, cookie) for cookie in changed)
            for cookie in ended:
                self._put.pop(cookie.key, None)
            sent.keep(ended + changed)  # at once: the next page compares with the jar
            sent.is_rendered = True

    async def _read(self) -> dict[CookieKey, Cookie]:
        cookies = [_from_browser(shown) for shown in await self._context.cookies() if shown["name"]]
        return {cookie.key: cookie for cookie in cookies}

    async def _add(self, cookies: list[Cookie]) -> None:
        """Add cookies. The browser refuses all if it refuses one; then each is added alone."""
        from playwright.async_api import Error

        now = time.time()
        try:
            await self._context.add_cookies([_for_browser(cookie, now) for cookie in cookies])
        except Error:
            if len(cookies) == 1:
                return
            for cookie in cookies:
                await self._add([cookie])


def _for_browser(cookie: Cookie, now: float) -> Any:
    domain = cookie.domain if cookie.host_only or _HOST.fullmatch(cookie.domain) else f".{cookie.domain}"
    found: dict[str, object] = {
        "name": cookie.name, "value": cookie.value, "domain": domain, "path": cookie.path,
        "secure": cookie.secure, "httpOnly": cookie.http_only,
        "expires": -1 if cookie.expires is None else min(cookie.expires, now + _MAX_AGE),
    }  # fmt: skip
    same_site = cookie.same_site.capitalize()
    if same_site in ("Lax", "Strict") or (same_site == "None" and cookie.secure):  # browsers drop it otherwise
        found["sameSite"] = same_site
    return found


def _from_browser(shown: Mapping[str, Any]) -> Cookie:
    domain: str = shown["domain"]
    return Cookie(
        name=shown["name"],
        value=shown["value"],
        domain=domain.removeprefix("."),
        path=shown["path"],
        host_only=not domain.startswith("."),
        secure=shown["secure"],
        expires=None if shown["expires"] == -1 else shown["expires"],
        http_only=shown["httpOnly"],
        same_site=shown["sameSite"],
    )
