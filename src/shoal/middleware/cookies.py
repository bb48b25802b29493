"""Cookies per host, kept for the life of the process."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie

from aiohttp import CookieJar
from yarl import URL

from shoal.http import Request, Response
from shoal.ports import Fetch


class Cookies:
    """Sends back what a host set, and a request's own cookies over it. Must be made inside the event loop."""

    def __init__(self) -> None:
        self._jar = CookieJar(unsafe=True)  # hosts that are addresses have cookies too

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        if request.cookies or len(self._jar):
            request = self._with_cookies(request)
        response = await fetch(request)
        if "Set-Cookie" in response.headers:
            self._store(response)
        return response

    def _with_cookies(self, request: Request) -> Request:
        kept = self._jar.filter_cookies(URL(request.url, encoded=True))
        cookies = {name: morsel.value for name, morsel in kept.items()} | request.cookies
        if not cookies or any(name.lower() == "cookie" for name in request.headers):
            return request
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        return request.replace(headers={**request.headers, "Cookie": header}, cookies={})

    def _store(self, response: Response) -> None:
        for line in response.headers.getall("Set-Cookie"):
            cookie: SimpleCookie = SimpleCookie()
            try:
                cookie.load(line)
            except CookieError:
                continue
            self._jar.update_cookies(cookie, URL(response.url, encoded=True))
