"""The layers around the fetcher: robots.txt, the spider's own, throttling, statuses, cookies, cache, identities."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from msgspec import structs

from shoal.config import Config, HttpSettings
from shoal.errors import BrowserError, ConfigError, FetchError, FrontierError, PluginError, RequestError, ShoalError
from shoal.fetch.bodies import FREE_BYTES, BodyBudget, BodyRoom, body_room
from shoal.fetch.guard import AddressGuard
from shoal.fetch.layers import Postponed, wrap
from shoal.fetch.layers.identity_facts import IdentityFacts, all_proxies, make_roster
from shoal.fetch.routing import RoutingFetcher
from shoal.http import Render, Request, Response
from shoal.http.rendering import RenderChoice
from shoal.messages import did_you_mean, pip_install
from shoal.ports import Fetch, Fetcher, Hosts, Lease, Middleware
from shoal.selector.parsing import limit_trees
from shoal.spider import Spider
from shoal.system import clock
from shoal.urls.normalize import Scope, host_of

if TYPE_CHECKING:
    from shoal.fetch.http_fetcher import HttpFetcher
    from shoal.fetch.layers.identities import Identities
    from shoal.fetch.layers.robots import Robots
    from shoal.fetch.routing import Renderer
    from shoal.fetch.sessions.session import Session
    from shoal.fetch.tor.layer import TorLayer

OWN_CLIENTS = ("auto", "aiohttp")
"""The values of ``http.client`` for Shoal's own client. ``aiohttp`` once was another one."""


class Route(Protocol):
    """What pages need and what may be missing for a while: a route through Tor, a login. The engine leases nothing
    meanwhile."""

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        ...

    async def keep(self) -> None:
        """Run until it is cancelled. An error ends the crawl."""
        ...


class Onion(NamedTuple):
    """A fetcher with its layers."""

    fetch: Fetch
    session: Session
    """The cookies of the run, and its login."""
    routes: Sequence[Route]
    """What all requests need."""
    identities: Identities | None
    robots: Robots | None
    on_lease: Callable[[Lease], None]
    """Called with each lease before its page is fetched."""
    fetch_robots: Fetch | None
    """Fetches only the robots.txt that applies to a request. See `Robots.fetch_first`."""

    def forget(self) -> None:
        """Drop what the layers cached from the store."""
        self.session.forget()
        if self.robots is not None:
            self.robots.forget()


def make_http_fetcher(config: Config, guard: AddressGuard | None = None) -> HttpFetcher:
    """The HTTP fetcher of a configuration. With a guard, it uses only the proxies in ``proxies``."""
    from shoal.fetch.http_fetcher import HttpFetcher

    proxies = all_proxies(config.proxies) if config.proxies else ()
    return HttpFetcher(
        _http_settings(config), config.sent_user_agent, guard, proxies,
        max_file_bytes=config.files.max_bytes, dns=config.dns,
    )  # fmt: skip


def make_plugged_fetcher(config: Config, *, is_guarded: bool) -> Fetcher:
    """The fetcher of a plugin. ConfigError if there is none of this name, or if only Shoal's own client will do."""
    from shoal.config import plugins

    name = config.http.client
    if is_guarded or config.tor.enabled:
        why = "goes through Tor" if config.tor.enabled else "must not contact private addresses (serve.allow)"
        raise ConfigError(f'"http.client" {name!r} cannot be used here: a crawl that {why} needs "{OWN_CLIENTS[0]}"')
    make = plugins.load("fetchers", name)
    if make is None:
        names = [*OWN_CLIENTS, *plugins.names("fetchers")]
        raise ConfigError(
            f'"http.client" must be "auto" or the name of a plugin, not {name!r}{did_you_mean(name, names)}'
            f"{plugins.hint('fetchers')}"
        )
    try:
        return cast(Fetcher, make(config.http, config.sent_user_agent))
    except ShoalError:
        raise
    except Exception as exc:  # the code of a stranger may raise anything
        raise PluginError(f"the plugin {name!r} failed: {type(exc).__name__}: {exc}") from exc


def make_fetcher(
    config: Config,
    networks: Sequence[str] | None = None,
    *,
    render: RenderChoice = None,
    scope: str = "",
    hosts: Hosts | None = None,
) -> RoutingFetcher:
    """Make the fetcher of a run.

    ``networks``: private addresses that may be contacted. All other private ones are refused. None: no limit.
    ``render``: for requests without a choice of their own. ``scope`` and ``hosts``: see `RoutingFetcher`.
    """
    if isinstance(render, Render) and not _is_installed("playwright"):
        raise ConfigError(f"rendering needs Playwright: {pip_install('browser')}")
    guard = None if networks is None else AddressGuard(networks)
    if config.http.client not in OWN_CLIENTS:
        http = make_plugged_fetcher(config, is_guarded=guard is not None)
    else:
        # With a guard, the fetcher uses only proxies of the operator. The layer for Tor applies the guard instead.
        http = make_http_fetcher(config, None if config.tor.enabled else guard)
    return RoutingFetcher(
        http,
        partial(make_renderer, config, guard),
        default=render if isinstance(render, Render) else None,
        proxy=config.http.proxy,
        scope=scope,
        hosts=hosts,
    )


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ValueError:  # somebody has set it to None
        return False


async def open_fetcher(
    stack: AsyncExitStack,
    config: Config,
    run_id: str,
    hosts: Hosts,
    networks: Sequence[str] | None,
    render: RenderChoice,
) -> tuple[RoutingFetcher, TorLayer | None]:
    """The fetcher of a run, and its layer for Tor if the run goes through it. Both end with the stack."""
    fetcher = make_fetcher(config, networks, render=render, scope=run_id, hosts=hosts)
    stack.push_async_callback(fetcher.close)
    await fetcher.open()
    if not config.tor.enabled:
        return fetcher, None
    from shoal.fetch.tor.layer import open_tor

    guard = None if networks is None else AddressGuard(networks)
    return fetcher, await open_tor(config, run_id, guard, stack)


def _http_settings(config: Config) -> HttpSettings:
    """The HTTP settings, with more time to connect through Tor."""
    if not config.tor.enabled:
        return config.http
    return structs.replace(config.http, connect_timeout=max(config.http.connect_timeout, config.tor.connect_timeout))


def make_renderer(config: Config, guard: AddressGuard | None) -> Renderer:
    """A browser that is started when it is needed."""
    from shoal.fetch.browser.fetcher import BrowserFetcher

    upstreams = None
    if guard is not None and not config.tor.enabled:  # the layer for Tor refuses all proxies but its own
        upstreams = all_proxies(config.proxies) if config.proxies else ()
    return BrowserFetcher(config.browser, config.sent_user_agent, guard, _http_settings(config), upstreams, config.dns)


def make_onion(
    spider: Spider, config: Config, hosts: Hosts, fetcher: Fetcher, may_work: Callable[[], bool] | None = None,
    tor: TorLayer | None = None, session: Session | None = None,
) -> Onion:  # fmt: skip
    """Wrap the fetcher in its layers, outermost first. ``may_work``: see `Participation`. ``session``: None if cookies
    are kept in memory only. ConfigError if the run goes through Tor but there is no layer for it."""
    if tor is None:
        config.refuse_tor("this process")
    from shoal.fetch.layers.cache import Cache
    from shoal.fetch.layers.robots import Robots
    from shoal.fetch.layers.throttle import StatusCheck, Throttle
    from shoal.fetch.sessions.session import Session

    session = session or Session(keep=config.cookies)
    for layer in spider.middlewares:
        if (use_jars := getattr(layer, "use_jars", None)) is not None:  # a Scrapy project has its own rules for cookies
            use_jars(session.jars)
    robots = Robots(config.robots, config.user_agent, hosts) if config.robots.obey else None
    throttle = Throttle(config.throttle, hosts.update_host) if config.throttle.enabled else None
    identities = _make_identities(spider, config, hosts, session) if config.proxies else None
    layers: list[Middleware | None] = [
        *spider.middlewares,
        throttle,
        StatusCheck(config.retry.statuses, spider.handle_statuses, config.throttle.max_retry_after),
        session if identities is None else None,  # each identity has its own cookies; a logged-out page has any status
        Cache(config.cache, session.keeps) if config.cache.enabled else None,
        identities,  # a block is the identity's: throttle and retries must not see it, and the cache needs no identity
        tor,  # the innermost one: no other layer can send a request past it
    ]
    _ask_before_navigating(fetcher, Scope(config.scope, spider.allowed_domains), robots, hosts)
    page = fetcher.fetch if may_work is None else _guarded(fetcher.fetch, may_work)
    fetch = wrap(page, [layer for layer in layers if layer is not None])
    routes = [route for route in (tor, session.login) if route is not None]
    on_lease = (lambda lease: None) if throttle is None else throttle.adopt
    fetch_robots = None if robots is None else partial(robots.fetch_first, fetch=fetch)
    if robots is not None:
        fetch = wrap(fetch, [robots])
    return Onion(fetch, session, routes, identities, robots, on_lease, fetch_robots)


def _ask_before_navigating(fetcher: Fetcher, scope: Scope, robots: Robots | None, hosts: Hosts) -> None:
    """Apply the scope, robots.txt, and the delay and block of the host to pages that actions navigate to."""

    async def permit(url: str) -> float | None:
        if scope.refuses(url) is not None:
            return None
        try:
            if robots is not None and not await robots.allows(url):
                return None
            state = await hosts.host_state(host_of(url))
        except FrontierError:
            return None
        return max(state.delay, state.blocked_for)

    if isinstance(fetcher, RoutingFetcher):
        fetcher.permit = permit


def _make_identities(spider: Spider, config: Config, hosts: Hosts, session: Session) -> Identities:
    from shoal.fetch.layers.identities import Identities

    roster = make_roster(config.proxies, config.identities)
    return Identities(roster, config.identities, IdentityFacts(hosts), hosts, spider.blocked, session)


def _guarded(fetch: Fetch, may_work: Callable[[], bool]) -> Fetch:
    """Refuse to fetch after this process lost its slot, even if the request was waiting for a robots.txt file."""

    async def guarded(request: Request) -> Response:
        if not may_work():
            raise Postponed("this process no longer holds its slot", contacted=False)
        return await fetch(request)

    return guarded


def preload() -> None:
    """Import the modules of a crawl ahead of time: a standby process may have to start at once."""
    for name in ("http_fetcher", "layers.cache", "layers.robots", "layers.throttle", "sessions.session"):
        importlib.import_module(f"shoal.fetch.{name}")


# Connections and one browser for many sessions, which must not see each other's pages.


_RETRY_AFTER = 5.0  # seconds after which a browser that did not start is tried again


class SharedFetcher:
    """Fetches and renders pages for the sessions of a server. It contacts no private address outside ``networks``."""

    def __init__(self, config: Config, networks: Sequence[str]) -> None:
        if config.http.client not in OWN_CLIENTS:
            make_plugged_fetcher(config, is_guarded=True)  # ConfigError
        self._config = config
        self._guard = AddressGuard(networks)
        self.http = make_http_fetcher(config, self._guard)
        self._bodies = BodyBudget(config.serve.max_body_memory)
        limit_trees(config.serve.max_tree_memory)
        self._browser: Renderer | None = None
        self._failure: tuple[float, str] | None = None
        """When the browser did not start, and why."""

    def scoped(self, scope: str, config: Config, render: Render | None, hosts: Hosts) -> RoutingFetcher:
        """A fetcher for one session. It shares the connections and the browser, but no cookies and no storage.

        ``config`` has the limits of the session, ``render`` is for all of its pages. Closing it closes nothing.
        """
        limit = config.http.max_body_bytes
        return RoutingFetcher(
            _BudgetedFetcher(self.http.limited_to(limit), self._bodies),
            lambda: _BorrowedBrowser(self, config.browser.page_timeout, limit),
            default=render,
            scope=scope,
            hosts=hosts,
        )

    def forget(self, scope: str) -> None:
        """Remove the cookies and the storage of a session that has ended."""
        if self._browser is not None:
            self._browser.forget(scope)

    def check_allowed(self) -> None:
        """RequestError if the operator does not allow rendering."""
        if not self._config.serve.render:
            raise RequestError("this server does not render pages (serve.render)")

    async def open_browser(self) -> Renderer:
        """Start the browser, if it is not running. BrowserError if it cannot start; RequestError if the operator
        does not allow rendering."""
        self.check_allowed()
        if self._failure is not None and clock.monotonic() - self._failure[0] < _RETRY_AFTER:
            raise BrowserError(self._failure[1])
        if self._browser is None:
            self._browser = make_renderer(self._config, self._guard)
        try:
            await self._browser.open()
        except BrowserError as exc:
            self._failure = clock.monotonic(), str(exc)
            raise
        self._failure = None
        return self._browser

    async def close(self) -> None:
        await self.http.close()
        if self._browser is not None:
            await self._browser.close()


class _BudgetedFetcher:
    """A fetcher whose large bodies share the memory of the process with those of all other sessions."""

    def __init__(self, fetcher: Fetcher, budget: BodyBudget) -> None:
        self._fetcher = fetcher
        self._budget = budget

    async def fetch(self, request: Request) -> Response:
        room = body_room.get()
        if room is None:
            task = asyncio.current_task()
            assert task is not None
            room = BodyRoom(self._budget, task)
            body_room.set(room)  # for all requests of this task: if each of them waited, they could wait for each other
        response = await self._fetcher.fetch(request)
        if len(response.body) > FREE_BYTES:
            await room.reserve(len(response.body))  # unless it is reserved already
        return response

    async def close(self) -> None:
        await self._fetcher.close()


class _BorrowedBrowser:
    """The browser, as one session uses it."""

    def __init__(self, owner: SharedFetcher, timeout: float, max_bytes: int) -> None:
        self._owner = owner
        self._timeout = timeout
        self._max_bytes = max_bytes

    async def open(self) -> None:
        await self._owner.open_browser()

    async def fetch(self, request: Request, options: Render, scope: str = "", upstream: str | None = None) -> Response:
        """Render a page. A caller cannot exceed the operator's `browser.page_timeout`: all callers share the tabs."""
        try:
            browser = await self._owner.open_browser()
        except (BrowserError, RequestError) as exc:
            retryable = isinstance(exc, BrowserError)
            raise FetchError(str(exc), kind="browser", retryable=retryable, contacted=False) from exc
        limited = request
        if request.timeout is not None and request.timeout > self._timeout:
            limited = request.replace(timeout=None)
        response = await browser.fetch(limited, options, scope, upstream)
        response.request = request
        if size_with_extras(response) > self._max_bytes:
            raise FetchError(
                f"the page with its screenshot, PDF and captured responses is larger than {self._max_bytes} bytes",
                kind="too large", retryable=False,
            )  # fmt: skip
        return response

    def status(self) -> str:
        """Empty: the browser belongs to all sessions."""
        return ""

    def forget(self, scope: str) -> None:
        self._owner.forget(scope)

    async def close(self) -> None:
        """Do nothing: the owner closes the browser."""


def size_with_extras(response: Response) -> int:
    """Bytes of the page and of everything that the browser returned with it."""
    captured = sum(len(response_part.body) for response_part in response.captured)
    return len(response.body) + len(response.screenshot or b"") + len(response.pdf or b"") + captured
