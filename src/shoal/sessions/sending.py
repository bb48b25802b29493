"""Sends requests with the cookies of a jar, and keeps those that the answers set."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextvars import ContextVar

from msgspec import Struct

from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.sessions.cookies import Cookie, CookieKey, read_cookie, site_of, site_of_url
from shoal.sessions.jars import Jar, Jars

_MAX_BROWSER_COOKIES = 3000
"""If a jar has more, a browser gets only those of the page's site."""


class SentCookies(Struct):
    """The cookies of a request, for a browser: those of its jar, and its own ones, which override them. A ``Cookie``
    header replaces them."""

    jars: Jars
    jar: Jar
    epoch: int
    """Of the jar when the page is requested."""
    url: str
    own: dict[str, str]
    only_own: bool = False
    is_login: bool = False
    is_rendered: bool = False
    """The browser has told what the page changed."""

    def wanted(self, known: Container[CookieKey] = ()) -> dict[CookieKey, Cookie]:
        """What the browser must have, also for other hosts: a page has frames. ``known``: what it has."""
        jar, now = self.jar.cookies, self.jar.cookies.clock()
        cookies = [] if self.only_own else [cookie for cookie in jar.all() if not cookie.is_over(now)]
        if len(cookies) > _MAX_BROWSER_COOKIES:
            site = site_of_url(self.url)
            cookies = [cookie for cookie in cookies if cookie.key in known or site_of(cookie.domain) == site]
        wanted = {cookie.key: cookie for cookie in cookies}
        if self.own:
            for cookie in jar.cookies_for(self.url):
                if cookie.name in self.own:
                    wanted.pop(cookie.key, None)
            for name, value in self.own.items():
                if (own := read_cookie(f"{name}={value}; Path=/", self.url, now)) is not None:
                    wanted[own.key] = own
        return wanted

    def keep(self, cookies: Iterable[Cookie]) -> None:
        """Keep cookies that the page has set, or ended. Those of an earlier epoch are dropped."""
        for cookie in cookies:
            self.jars.set(self.jar, cookie, self.epoch)

    def keep_answer(self, response: Response) -> None:
        """Keep the cookies of the ``Set-Cookie`` headers."""
        if "Set-Cookie" in response.headers:
            now = self.jar.cookies.clock()
            lines = response.headers.getall("Set-Cookie")
            self.keep(cookie for line in lines if (cookie := read_cookie(line, response.url, now)) is not None)


browser_cookies: ContextVar[SentCookies | None] = ContextVar("browser_cookies", default=None)
"""The cookies of the request that this task fetches. None: the browser has only those of the request itself."""


async def fetch_with(jars: Jars, jar: Jar, request: Request, fetch: Fetch, *, is_login: bool = False) -> Response:
    """Fetch a page with the cookies of a jar, and keep those that it sets."""
    cookies = jar.cookies.values_for(request.url) if jar.cookies else {}
    cookies.update(request.cookies)
    only_own = _cookie_header(request) is not None
    sent = SentCookies(jars, jar, jar.epoch, request.url, own_cookies(request), only_own, is_login)
    browser_cookies.set(sent)  # each page has a task of its own
    response = await send(request, cookies, fetch)
    if not sent.is_rendered:
        sent.keep_answer(response)
    return response


async def send(request: Request, cookies: dict[str, str], fetch: Fetch) -> Response:
    """Fetch a page with these cookies. A ``Cookie`` header of the request itself replaces them."""
    if not cookies or _cookie_header(request) is not None:
        return await fetch(request)
    header = "; ".join(f"{name}={value}" for name, value in cookies.items())
    response = await fetch(request.replace(headers={**request.headers, "Cookie": header}, cookies={}))
    response.request = request
    return response


def own_cookies(request: Request) -> dict[str, str]:
    """The cookies of the request itself: those of its ``Cookie`` header, if it has one."""
    header = _cookie_header(request)
    if header is None:
        return request.cookies
    pairs = (pair.partition("=") for pair in header.split(";") if "=" in pair)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cookie_header(request: Request) -> str | None:
    return next((value for name, value in request.headers.items() if name.lower() == "cookie"), None)
