"""Chooses how each page is fetched: over HTTP, in a browser, or over HTTP first and then in a browser if needed."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS, FetchError, FrontierError
from shoal.fetch.sessions.session import browser_cookies
from shoal.http import Render, Request, Response
from shoal.http.rendering import Permit, permit
from shoal.ports import Fetcher, Hosts
from shoal.selector import selectors
from shoal.system import clock
from shoal.urls.normalize import host_of

# Learns which pages of a host need a browser. All workers of a store share what was learned, and it expires.

Need: TypeAlias = Literal["http", "browser"]

_AGREEING = 2
"""How many pages of a kind must need the same before the need is taken as known."""
_VALID = 86_400.0
"""Seconds until a known need expires. Then the pages of this kind are checked again."""
_FEW_CHARACTERS = 400
"""A page with less text than this, but with scripts, may be an empty shell."""
_MANY_LINKS = 5
_VARIABLE = re.compile(r"\d+|[0-9a-f]{8,}|.{25,}", re.IGNORECASE)
_MAX_KINDS = 10_000
_MAX_KINDS_PER_HOST = 50
_FRESH = 5.0
"""Seconds for which a process uses what it has read from the store."""


def is_shell(response: Response) -> bool:
    """Whether the HTML is hardly more than a frame that scripts fill."""
    if "html" not in response.headers.get("Content-Type", "text/html") or b"<script" not in response.body.lower():
        return False
    return len(visible_text(response)) < _FEW_CHARACTERS and _links(response) < _MANY_LINKS


def says_more(rendered: Response, plain: Response) -> bool:
    """Whether scripts added text or links that the plain HTML does not have."""
    return _links(rendered) > _links(plain) or len(visible_text(rendered)) > 1.2 * len(visible_text(plain)) + 20


def visible_text(response: Response) -> str:
    """The text of the page without scripts and styles, with single spaces."""
    with selectors.uncounted():
        texts = response.xpath("//body//text()[not(ancestor::script|ancestor::style|ancestor::noscript)]").getall()
    return " ".join(" ".join(texts).split())


def _links(response: Response) -> int:
    with selectors.uncounted():
        return len(response.css("a[href]"))


def kind_of(url: str) -> str:
    """The kind of a page. Paths of a host that differ only in numbers and names are of one kind: ``/product/*``."""
    segments = urlsplit(url).path.split("/")[1:4]
    names = ("*" if name and (number or _VARIABLE.fullmatch(name)) else name for number, name in enumerate(segments))
    return "/" + "/".join(names)


class LearnedNeeds(Struct, frozen=True):
    """What pages of a kind need, and until when that is taken as known, in seconds since 1970."""

    need: Need
    until: float


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, LearnedNeeds])


async def learned_needs(hosts: Hosts, host: str) -> dict[str, Need]:
    """What is known of the pages of a host, by kind."""
    return {kind: learned.need for kind, learned in (await _recall(hosts, host)).items()}


async def _recall(hosts: Hosts, host: str) -> dict[str, LearnedNeeds]:
    """What the store knows, without what must be checked again."""
    stored = await hosts.recall(f"render:{host}")
    if stored is None:
        return {}
    try:
        kinds = _decoder.decode(stored)
    except DECODING_ERRORS:  # another version wrote it
        return {}
    return {kind: learned for kind, learned in kinds.items() if learned.until > clock.time()}


class PageNeeds:
    """What the pages of hosts need, by kind of page. It learns only from successful fetches."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._seen: dict[tuple[str, str], list[Need]] = {}
        """What the last pages of a kind needed, seen by this process."""
        self._known: dict[str, dict[str, LearnedNeeds]] = {}
        """By host. Used without a store, and for a short time with one."""
        self._fresh_until: dict[str, float] = {}

    async def known(self, url: str) -> Need | None:
        """What a page of this kind needs; None if that is not known, or must be checked again."""
        host = host_of(url)
        if self._hosts is not None and clock.monotonic() > self._fresh_until.get(host, 0.0):
            if len(self._known) >= _MAX_KINDS:
                self._known.clear()
            self._known[host] = await _recall(self._hosts, host)
            self._fresh_until[host] = clock.monotonic() + _FRESH
        learned = self._known.get(host, {}).get(kind_of(url))
        return learned.need if learned is not None and learned.until > clock.time() else None

    async def learn(self, url: str, need: Need) -> None:
        """Record what a successfully fetched page needed."""
        host, kind = host_of(url), kind_of(url)
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        needs = self._seen.setdefault((host, kind), [])
        needs.append(need)
        if needs[-_AGREEING:] != [need] * _AGREEING:
            return
        del self._seen[host, kind]
        kinds = self._known.setdefault(host, {})
        if self._hosts is not None:
            kinds.update(await _recall(self._hosts, host))
        kinds[kind] = LearnedNeeds(need, clock.time() + _VALID)  # the others expire when they would have
        while len(kinds) > _MAX_KINDS_PER_HOST:
            del kinds[next(iter(kinds))]
        if self._hosts is not None:
            await self._hosts.remember(f"render:{host}", _encoder.encode(kinds), _VALID)


class Renderer(Protocol):
    """A browser. See `BrowserFetcher`."""

    async def open(self) -> None: ...

    async def fetch(
        self, request: Request, options: Render, scope: str = "", upstream: str | None = None
    ) -> Response: ...

    def forget(self, scope: str) -> None: ...

    async def close(self) -> None: ...

    def status(self) -> str:
        """What the browser does, for people."""
        ...


class RoutingFetcher:
    """Fetches over HTTP, unless the request or the spider asks for a browser.

    ``default`` applies to requests without a choice of their own. ``scope``: pages of different scopes share no
    cookies and no storage in the browser.
    """

    def __init__(
        self,
        http: Fetcher,
        make_renderer: Callable[[], Renderer],
        *,
        default: Render | None = None,
        proxy: str | None = None,
        scope: str = "",
        hosts: Hosts | None = None,
    ) -> None:
        self._http = http
        self._make_renderer = make_renderer
        self._renderer: Renderer | None = None
        self._default = default
        self._proxy = proxy
        self._scope = scope
        self._hosts = hosts
        self._needs = PageNeeds(hosts)
        self.permit: Permit | None = None
        """Asked before actions of the user navigate."""

    def fetch(self, request: Request) -> Awaitable[Response]:
        render = request.render
        if render is None:
            render = self._default
        if render is None or render is False or render is True:  # True never: a request converts it
            return self._http.fetch(request)
        return self._render(request, render) if render.mode == "always" else self._choose(request, render)

    async def open(self) -> None:
        """If the spider renders its pages, start the browser. BrowserError if it cannot be started."""
        if self._default is not None and self._default.mode == "always":
            await self._browser().open()

    async def close(self) -> None:
        await self._http.close()
        if self._renderer is not None:
            await self._renderer.close()

    def browser_status(self) -> str:
        """What the browser does, for people. Empty if there is none."""
        return "" if self._renderer is None else self._renderer.status()

    def _browser(self) -> Renderer:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    async def _render(self, request: Request, options: Render) -> Response:
        sent = browser_cookies.get()
        permit.set(self._permit_login if sent is not None and sent.is_login else self.permit)
        return await self._browser().fetch(request, options, self._scope, request.proxy or self._proxy)

    async def _permit_login(self, url: str) -> float | None:
        """Wait for the delay of the host. As for other requests of a login, robots.txt and the scope do not matter. If
        the delay is too long for a page, the login makes the request itself."""
        try:
            return 0.0 if self._hosts is None else (await self._hosts.host_state(host_of(url))).delay
        except FrontierError:
            return None

    async def _choose(self, request: Request, options: Render) -> Response:
        """Fetch over HTTP, and render what turns out to be an empty shell."""
        needs = await self._needs.known(request.url)
        if needs == "browser":
            return await self._render(request, options)
        response = await self._http.fetch(request)
        if needs == "http" or not response.ok or not is_shell(response):
            if needs is None and response.ok:
                await self._needs.learn(request.url, "http")
            return response
        if (sent := browser_cookies.get()) is not None:
            sent.keep_answer(response)
        try:
            rendered = await self._render(request, options)
        except FetchError as error:  # a browser that fails teaches nothing
            error.contacted = True
            raise
        if rendered.ok:
            await self._needs.learn(request.url, "browser" if says_more(rendered, response) else "http")
        return rendered
