"""The cookie jars of a spider: one for each value of ``meta["cookiejar"]``."""

from __future__ import annotations

import logging

from shoal import http
from shoal.middleware.cookies import Cookies
from shoal.ports import Fetch
from shoal.scrapy.shared_types import Values

log = logging.getLogger("shoal.scrapy")

_MAX_JARS = 10_000


class CookieJars:
    """Sends and stores cookies. A request's own cookies enter its jar, so later requests send them too."""

    def __init__(self) -> None:
        self._jars: dict[object, Cookies] = {}

    async def fetch(
        self, request: http.Request, fetch: Fetch, jar: object = None, verbose: list[Values] | None = None
    ) -> http.Response:
        """Fetch a page with the cookies of a jar, and store those that it sets. ``verbose``: cookies of the request
        with a domain or path of their own."""
        if request.cookies or verbose:
            self.add(jar, request.url, request.cookies, verbose or [])
        headers = request.headers
        if request.cookies or any(name.lower() == "cookie" for name in headers):
            headers = {name: value for name, value in headers.items() if name.lower() != "cookie"}
            request = request.replace(cookies={}, headers=headers)
        return await self._jar(jar)(request, fetch)

    def add(self, jar: object, url: str, cookies: dict[str, str], verbose: list[Values]) -> None:
        """Put cookies of a request into a jar."""
        chosen = self._jar(jar)
        for name, value in cookies.items():
            chosen.store(f"{name}={value}; Path=/", url)
        for cookie in verbose:
            parts = [f"{cookie.get('name')}={cookie.get('value', '')}"]
            parts += [f"{key.capitalize()}={cookie[key]}" for key in ("domain", "path") if cookie.get(key)]
            if not cookie.get("path"):
                parts.append("Path=/")
            if cookie.get("secure"):
                parts.append("Secure")
            chosen.store("; ".join(parts), url)

    def _jar(self, key: object) -> Cookies:
        try:
            found = self._jars.get(key)
        except TypeError:  # not hashable
            key = repr(key)
            found = self._jars.get(key)
        if found is None:
            if len(self._jars) >= _MAX_JARS:
                oldest = next(each for each in self._jars if each is not None)
                del self._jars[oldest]
                log.warning("more than %d cookie jars: the oldest is dropped", _MAX_JARS)
            found = self._jars[key] = Cookies(jars=self._jars.__len__)
        return found
