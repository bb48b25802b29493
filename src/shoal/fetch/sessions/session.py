"""The layer of a run's session: sends cookies, keeps those that pages set, and notices pages that are logged out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec import Struct

from shoal.config import Config
from shoal.errors import FrontierError
from shoal.fetch.layers import Postponed
from shoal.fetch.sessions.cookies import Cookie, CookieKey, read_cookie, site_of, site_of_url
from shoal.fetch.sessions.jars import Jar, Jars
from shoal.http import Request, Response
from shoal.ports import Documents, Fetch, Frontier, Hosts, HostState, HostUpdate
from shoal.spider import Spider
from shoal.system import clock
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from shoal.fetch.sessions.login import LoginKeeper

# Requests outside of the queue that keep the delay of their host, such as those of a login.
#
# The host is blocked for all runs until its pages in flight have ended and its delay is over, during the request,
# and for one delay after it. Blocks are short and renewed, so that one of a process that died ends soon.

T = TypeVar("T")

_BLOCK = 1.0  # seconds; a longer delay takes its place
_POLL = 0.05
REASON = "a login"
"""Why the host is blocked."""


class Persist(Protocol):
    """Repeats a call of the store while it is away."""

    async def __call__(self, step: Callable[[], Awaitable[T]], /) -> T: ...


class HostTurns:
    """Takes turns of hosts."""

    def __init__(self, hosts: Hosts, persist: Persist) -> None:
        self._hosts = hosts
        self._persist = persist

    async def fetch(self, request: Request, fetch: Fetch) -> Response:
        """Fetch a page when its host is free."""
        host = host_of(request.url)
        state = await self._state(host)
        while state.blocked_for:  # by somebody else
            await asyncio.sleep(min(state.blocked_for, 10 * _POLL))
            state = await self._state(host)
        if not state.delay:
            return await fetch(request)
        async with self._blocked(host, state.delay) as block:
            is_free = False
            while not is_free:
                await block.renew()
                lapses = block.lapses
                while (await self._state(host)).in_flight:
                    await asyncio.sleep(_POLL)
                await asyncio.sleep(state.delay)
                is_free = block.holds and block.lapses == lapses
            return await fetch(request)

    @asynccontextmanager
    async def _blocked(self, host: str, delay: float) -> AsyncIterator[_Block]:
        """Keep a host blocked, and leave it blocked for its delay."""
        block = _Block(self._hosts, self._persist, host, max(delay, _BLOCK))
        renewing = asyncio.create_task(block.keep())
        try:
            yield block
        finally:
            renewing.cancel()
            await block.renew()

    async def _state(self, host: str) -> HostState:
        return await self._persist(lambda: self._hosts.host_state(host))


class _Block:
    """A block of a host that is renewed. It lapses while the store does not answer."""

    def __init__(self, hosts: Hosts, persist: Persist, host: str, seconds: float) -> None:
        self._hosts = hosts
        self._persist = persist
        self._host = host
        self._seconds = seconds
        self._until = 0.0
        self.lapses = 0
        """How often it began, because it had ended before it was renewed. Others may have had the host in between."""

    @property
    def holds(self) -> bool:
        return clock.monotonic() < self._until

    async def keep(self) -> None:
        """Renew it until cancelled."""
        while True:
            await asyncio.sleep(_BLOCK / 3)
            await self.renew()

    async def renew(self) -> None:
        await self._persist(self._renew)

    async def _renew(self) -> None:
        now = clock.monotonic()
        await self._hosts.update_host(self._host, HostUpdate(block_for=self._seconds, block_reason=REASON))
        self.lapses += now > self._until
        self._until = max(self._until, now + self._seconds)


_MAX_BROWSER_COOKIES = 3000
"""If a jar has more, a browser gets only those of the page's site."""
COOKIE_JAR = "cookiejar"
"""The key in a request's ``meta`` that names its jar."""


class Session:
    """Cookies and logins of a run, for one process. A request's own cookies override those of its jar, and are the only
    ones with ``keep=False``."""

    def __init__(self, jars: Jars | None = None, *, keep: bool = True, login: LoginKeeper | None = None) -> None:
        self.jars = jars or Jars()
        self.login = login
        self._keep = keep

    async def __call__(self, request: Request, fetch: Fetch, identity: str = "") -> Response:
        """Fetch a page with the cookies of its jar. Postponed while a login is under way, and if the page is logged
        out."""
        if not self._keep:
            return await send(request, list(request.cookies.items()), fetch)
        jar = self.jars.jar(jar_name(request, identity) if COOKIE_JAR in request.meta else identity)
        is_page = self.login is not None and not request.url.endswith("/robots.txt")
        try:
            if not self.jars.is_fresh(jar, request.url):
                await self.jars.refresh(jar, request.url)
            if is_page and self.login is not None:
                await self.login.check(jar, fetch)
            epoch = jar.epoch
            response = await fetch_with(self.jars, jar, request, fetch)
            if is_page and self.login is not None and not response.from_cache:
                if self.login.is_out(response):
                    if response.page is not None:  # nobody else will see the response
                        await response.release()
                    raise await self.login.logged_out(jar, epoch, request, response)
                await self.login.note_page(jar, epoch, request)
        except FrontierError as error:
            raise Postponed(f"the session of the run cannot be read: {error}", contacted=True) from error
        return response

    def keeps(self, response: Response) -> bool:
        """Whether a page may be cached: not if it is logged out."""
        return self.login is None or not self.login.is_out(response)

    def forget(self) -> None:
        """Drop what was read from the store, which went back in time."""
        self.jars.forget()
        if self.login is not None:
            self.login.forget()


def make_session(
    spider: Spider, config: Config, run_id: str, frontier: Frontier, documents: Documents | None, persist: Persist,
    stop_run: Callable[[], Awaitable[object]],
) -> Session:  # fmt: skip
    """The session of a run. ``documents``: where its jars are stored; None if they belong to this process."""
    jars = Jars(documents, frontier, run_id)
    login = None
    if spider.needs_login:
        from shoal.fetch.sessions.login import LoginKeeper  # few spiders need it

        login = LoginKeeper(
            run_id, config.login, jars, frontier, documents, persist=persist, stop_run=stop_run,
            log_in=spider.log_in if spider.can_log_in else None, is_logged_out=spider.logged_out,
        )  # fmt: skip
    return Session(jars, keep=config.cookies or login is not None, login=login)


def jar_name(request: Request, identity: str = "") -> str:
    """The name of the jar of a request."""
    name = request.meta.get(COOKIE_JAR)
    return identity if name is None else f"{identity}#{name}"


# -- requests with the cookies of a jar


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
        by_key = {cookie.key: cookie for cookie in cookies}
        if self.own:
            for cookie in jar.cookies_for(self.url):
                if cookie.name in self.own:
                    by_key.pop(cookie.key, None)
            for name, value in self.own.items():
                if (own := read_cookie(f"{name}={value}; Path=/", self.url, now)) is not None:
                    by_key[own.key] = own
        return by_key

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
    header, own = _cookie_header(request), own_cookies(request)
    sent = SentCookies(jars, jar, jar.epoch, request.url, own, header is not None, is_login)
    browser_cookies.set(sent)  # each page has a task of its own
    cookies = jar.cookies.pairs_for(request.url) if jar.cookies.domains and header is None else []
    if own:
        cookies = [*(pair for pair in cookies if pair[0] not in own), *own.items()]
    response = await send(request, cookies, fetch)
    if not sent.is_rendered:
        sent.keep_answer(response)
    return response


async def send(request: Request, cookies: Sequence[tuple[str, str]], fetch: Fetch) -> Response:
    """Fetch a page with these cookies. A ``Cookie`` header of the request itself replaces them."""
    if not cookies or _cookie_header(request) is not None:
        return await fetch(request)
    header = "; ".join(f"{name}={value}" for name, value in cookies)
    response = await fetch(request.replace(headers={**request.headers, "Cookie": header}, cookies={}))
    response.request = request
    return response


def own_cookies(request: Request) -> dict[str, str]:
    """The cookies of the request itself: those of its ``Cookie`` header, if it has one."""
    if (header := _cookie_header(request)) is None:
        return request.cookies
    pairs = (pair.partition("=") for pair in header.split(";") if "=" in pair)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cookie_header(request: Request) -> str | None:
    if not request.headers:
        return None
    return next((value for name, value in request.headers.items() if name.lower() == "cookie"), None)
