"""Sends requests with the cookies of a jar, and keeps those that the answers set."""

from __future__ import annotations

from contextvars import ContextVar

from msgspec import Struct

from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.sessions.cookies import Cookie, read_cookie
from shoal.sessions.jars import Jar, Jars


class SentCookies(Struct):
    """What a browser needs of a request's jar."""

    jar: Jar
    epoch: int
    url: str
    changed: list[Cookie] | None = None
    """Set by the browser: cookies that the page has changed, or ended (``expires`` is 0)."""

    @property
    def context(self) -> str:
        """Pages with the same text may share cookies and storage in the browser."""
        return f"{self.jar.name} {self.epoch}"

    @property
    def cookies(self) -> list[Cookie]:
        """The cookies for the page, with their domains and paths."""
        return self.jar.cookies.cookies_for(self.url)


browser_cookies: ContextVar[SentCookies | None] = ContextVar("browser_cookies", default=None)
"""The cookies of the request that this task fetches."""


async def fetch_with(jars: Jars, jar: Jar, request: Request, fetch: Fetch) -> Response:
    """Fetch a page with the cookies of a jar, and keep those that it sets."""
    epoch = jar.epoch
    cookies = jar.cookies.values_for(request.url) if jar.cookies else {}
    cookies.update(request.cookies)
    sent = SentCookies(jar, epoch, request.url)
    browser_cookies.set(sent)  # each page has a task of its own
    response = await send(request, cookies, fetch)
    if "Set-Cookie" in response.headers:
        now = jar.cookies.clock()
        for line in response.headers.getall("Set-Cookie"):
            if (cookie := read_cookie(line, response.url, now)) is not None:
                jars.set(jar, cookie, epoch)
    for cookie in sent.changed or ():
        jars.set(jar, cookie, epoch)
    return response


async def send(request: Request, cookies: dict[str, str], fetch: Fetch) -> Response:
    """Fetch a page with these cookies. A ``Cookie`` header of the request itself replaces them."""
    if not cookies or any(name.lower() == "cookie" for name in request.headers):
        return await fetch(request)
    header = "; ".join(f"{name}={value}" for name, value in cookies.items())
    response = await fetch(request.replace(headers={**request.headers, "Cookie": header}, cookies={}))
    response.request = request
    return response
