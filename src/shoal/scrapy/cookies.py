"""The cookie jars of a spider: one for each value of ``meta["cookiejar"]``. They are those of the run."""

from __future__ import annotations

from shoal import http
from shoal.errors import FrontierError
from shoal.middleware import Postponed
from shoal.ports import Fetch
from shoal.scrapy.shared_types import Values
from shoal.sessions.cookies import read_cookie
from shoal.sessions.jars import Jar, Jars
from shoal.sessions.session import fetch_with


class CookieJars:
    """Sends and stores cookies. A request's own cookies enter its jar, so later requests send them too."""

    def __init__(self) -> None:
        self.jars = Jars()
        """Those of the run, as soon as the crawl begins."""

    async def fetch(
        self, request: http.Request, fetch: Fetch, jar: object = None, verbose: list[Values] | None = None
    ) -> http.Response:
        """Fetch a page with the cookies of a jar, and store those that it sets. ``verbose``: cookies of the request
        with a domain or path of their own."""
        chosen = self._jar(jar)
        try:
            if not self.jars.is_fresh(chosen, request.url):
                await self.jars.refresh(chosen, request.url)
        except FrontierError as error:
            raise Postponed(f"the cookies of the run cannot be read: {error}", contacted=False) from error
        if request.cookies or verbose:
            self.add(jar, request.url, request.cookies, verbose or [])
        headers = request.headers
        if request.cookies or any(name.lower() == "cookie" for name in headers):
            headers = {name: value for name, value in headers.items() if name.lower() != "cookie"}
            request = request.replace(cookies={}, headers=headers)
        return await fetch_with(self.jars, chosen, request, fetch)

    def add(self, jar: object, url: str, cookies: dict[str, str], verbose: list[Values]) -> None:
        """Put cookies of a request into a jar."""
        lines = [f"{name}={value}; Path=/" for name, value in cookies.items()]
        for cookie in verbose:
            parts = [f"{cookie.get('name')}={cookie.get('value', '')}"]
            parts += [f"{key.capitalize()}={cookie[key]}" for key in ("domain", "path") if cookie.get(key)]
            if not cookie.get("path"):
                parts.append("Path=/")
            if cookie.get("secure"):
                parts.append("Secure")
            lines.append("; ".join(parts))
        chosen = self._jar(jar)
        for line in lines:
            if (read := read_cookie(line, url, chosen.cookies.clock())) is not None:
                self.jars.set(chosen, read, chosen.epoch)

    def _jar(self, key: object) -> Jar:
        return self.jars.jar("" if key is None else f"#{key if isinstance(key, str) else repr(key)}")
