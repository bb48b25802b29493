"""The layer of a run's session: sends cookies, keeps those that pages set, and notices pages that are logged out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.errors import FrontierError
from shoal.http import Request, Response
from shoal.middleware import Postponed
from shoal.ports import Documents, Fetch, Frontier
from shoal.sessions.jars import Jars
from shoal.sessions.sending import fetch_with, send
from shoal.sessions.turns import Persist
from shoal.spider import Spider

if TYPE_CHECKING:
    from shoal.sessions.login import LoginKeeper

COOKIE_JAR = "cookiejar"
"""The key in a request's ``meta`` that names its jar."""


class Session:
    """Cookies and logins of a run, for one process. A request's own cookies override those of its jar, and are the only
    ones with ``keep=False``."""

    def __init__(self, jars: Jars | None = None, *, keep: bool = True, login: LoginKeeper | None = None) -> None:
        self.jars = jars or Jars()
        self.login = login
        self._keep = keep

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        return await self.fetch(request, fetch)

    async def fetch(self, request: Request, fetch: Fetch, identity: str = "") -> Response:
        """Fetch a page with the cookies of its jar. Postponed while a login is under way, and if the page is logged
        out."""
        if not self._keep:
            return await send(request, request.cookies, fetch)
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

    async def flush(self) -> None:
        """Store the cookies that pages have set since the last call."""
        await self.jars.flush()

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
        from shoal.sessions.login import LoginKeeper  # few spiders need it

        login = LoginKeeper(
            run_id, config.login, jars, frontier, documents, persist=persist, stop_run=stop_run,
            log_in=spider.log_in if spider.can_log_in else None, is_logged_out=spider.logged_out,
        )  # fmt: skip
    return Session(jars, keep=config.cookies or login is not None, login=login)


def jar_name(request: Request, identity: str = "") -> str:
    """The name of the jar of a request."""
    named = request.meta.get(COOKIE_JAR)
    return identity if named is None else f"{identity}#{named}"
