"""`shoal map`: list the URLs of a site."""

from __future__ import annotations

import asyncio
import code
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.help import Commands, argument, option
from shoal.cli.options import AsJson, Concurrency, Delay, Proxy, Quiet, Setting, resolve, settings_of
from shoal.errors import ConfigError, ShoalError
from shoal.system import chance

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.http import Response
    from shoal.runs.command_spiders import SiteMap, SiteUrl

app = Commands()


@app.add(
    examples="""
    shoal map https://example.com
    shoal map https://example.com --match /blog/ --since 2026-01-01 --json
    shoal map https://example.com/sitemap_index.xml --limit 100
    """
)
def map(
    url: Annotated[str, argument("URL", "A page of the site, or one of its sitemaps.")],
    limit: Annotated[int, option("--limit N", "Stop after N URLs (default 1000000).", min=1)] = 1_000_000,
    match: Annotated[str | None, option("--match REGEX", "List only URLs in which REGEX is found.")] = None,
    since: Annotated[
        str | None, option("--since DATE", "Leave out URLs that did not change since DATE (2026-01-31).")
    ] = None,
    max_pages: Annotated[
        int | None, option("--max-pages N", "Fetch up to N sitemaps, or N pages for links (default 1000).")
    ] = None,
    delay: Delay = None,
    concurrency: Concurrency = None,
    proxy: Proxy = [],
    as_json: AsJson = False,
    setting: Setting = [],
    quiet: Quiet = False,
) -> None:
    """List the URLs of a site.

    The URLs come from the sitemaps that robots.txt names, or else from /sitemap.xml. If the site has no sitemap, they
    come from the links of its pages, up to three steps from URL. Pages that sitemaps list are not fetched. Each URL is
    printed once, as soon as it is found. Progress goes to standard error.
    """
    from shoal.cli import progress
    from shoal.runs.command_spiders import SiteMap
    from shoal.runs.crawl import run_blocking
    from shoal.sitemap_spider import MapSpider
    from shoal.urls.normalize import typed_url

    options = settings_of(delay=delay, concurrency=concurrency, max_pages=max_pages, proxy=proxy)
    resolved = resolve(MapSpider, options, setting)
    resolved.config.refuse_tor("shoal map")
    printer = _Printer(as_json)
    try:
        pattern = None if match is None else re.compile(match)
    except re.error as exc:
        raise ConfigError(f"--match {match!r} is not a regular expression: {exc}") from exc
    try:
        site_map = SiteMap(typed_url(url), resolved, printer, match=pattern, since=since, limit=limit)
    except ValueError as exc:
        raise ConfigError(f"invalid URL or --since: {exc}") from exc
    printer.on_closed = site_map.stop
    console = progress.console()
    progress.set_up_logging(console, "ERROR" if quiet else "WARNING")
    logging.getLogger("shoal.run").setLevel("ERROR")  # hides the notice that the crawl was stopped
    run_blocking(site_map, None if quiet else progress.show(console))
    code = _report(site_map, printer, quiet=quiet)
    if printer.is_closed:
        os._exit(code)  # Python would try to write the rest to the closed pipe
    sys.exit(code)


class _Printer:
    """Prints URLs until the reader of the pipe has gone."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.is_closed = False
        self.on_closed: Callable[[], None] = lambda: None

    def __call__(self, url: SiteUrl) -> None:
        if self.is_closed:
            return
        try:
            print(msgspec.json.encode(url).decode() if self._as_json else url.url)
        except BrokenPipeError:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        self.on_closed()

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            self.close()


def _report(site_map: SiteMap, printer: _Printer, *, quiet: bool) -> int:
    """Print what was found, and return the exit code."""
    from shoal.crawling.outcome import EXIT_FAILED

    printer.flush()
    summary = site_map.summary
    if site_map.error is not None or summary is None:
        print(f"shoal: {site_map.error}", file=sys.stderr)
        return 1
    if not quiet and site_map.count:
        fetched = summary.counters.fetched
        links = f"the links of {fetched} {'page' if fetched == 1 else 'pages'} (no sitemap lists URLs)"
        print(
            f"{site_map.count} URLs from {f'{site_map.sitemaps} sitemaps' if site_map.entries else links}",
            file=sys.stderr,
        )
        if site_map.limit_reached:
            print("there may be more: --limit is reached", file=sys.stderr)
        elif summary.state == "limit":
            print("there may be more: --max-pages is reached", file=sys.stderr)
    if site_map.count:
        return 0
    for reason in () if summary.outcome is None else summary.outcome.reasons:
        print(f"shoal: {reason}", file=sys.stderr)
    return EXIT_FAILED


# `shoal shell`: try selectors on a page.


@app.add(
    examples="""
    shoal shell https://example.com
    shoal shell https://example.com -c "css('title::text').get()"
    shoal shell https://example.com --render
    """
)
def shell(
    url: Annotated[str, argument("URL", "The page to fetch.")],
    command: Annotated[str | None, option("-c CODE", "Run this code and exit.")] = None,
    render: Annotated[bool, option("--render", "Render pages in a browser.")] = False,
    setting: Setting = [],
) -> None:
    """Fetch a page and try selectors on it.

    Python starts with these names: `response`, `css`, `xpath`, `re`, `links()`, `view()` and `fetch(URL)`.
    `fetch(URL, render=True)` renders a page in a browser.
    """
    page = _Page(resolve(None, {}, setting).config, render)
    page.fetch(url)
    if command is not None:
        page.execute(command)
        return
    banner = f"{page.names['response']!r}\nTry: css('title::text').get()   links()   view()   fetch(url)"
    code.interact(banner=banner, local=page.names, exitmsg="")


class _Page:
    """The page in the shell, and the names that the shell defines."""

    def __init__(self, settings: Config, render: bool) -> None:
        settings.refuse_tor("the shell")
        self._config = settings
        self._render = render
        self._response: Response | None = None
        self.names: dict[str, object] = {"fetch": self.fetch, "view": self.view}

    def execute(self, command: str) -> None:
        """Run code that the user typed, and print its value. If it raises, say where, and exit with 1."""
        from shoal.errors import describe

        try:
            try:
                program = compile(command, "-c", "eval")
            except SyntaxError:
                program = compile(command, "-c", "exec")
            value = eval(program, self.names)
        except ShoalError:
            raise
        except Exception as exc:
            message = f"SyntaxError: {exc}" if isinstance(exc, SyntaxError) else describe(exc)  # its text has the place
            print(f"shoal: {message}", file=sys.stderr)
            raise typer.Exit(1) from None
        if value is not None:
            print(value)

    def fetch(self, url: str, render: object = None) -> Response:
        """Fetch a page, with its redirects, and make it the shell's page. ``render``: as in a request."""
        from shoal.crawling.onion import make_fetcher
        from shoal.fetch.layers.identity_facts import all_proxies
        from shoal.http import Request
        from shoal.http.rendering import render_choice

        proxy = chance.choice(all_proxies(self._config.proxies)) if self._config.proxies else None
        how = render_choice(self._render if render is None else render)

        async def get() -> Response:
            fetcher = make_fetcher(self._config, render=how)
            try:
                await fetcher.open()
                response = await fetcher.fetch(Request(url if "://" in url else "http://" + url, proxy=proxy))
                for _ in range(self._config.http.max_redirects):
                    if not (300 <= response.status < 400 and "Location" in response.headers):
                        break
                    response = await fetcher.fetch(Request(response.urljoin(response.headers["Location"]), proxy=proxy))
                return response
            finally:
                await fetcher.close()

        response = self._response = asyncio.run(get())
        self.names.update(
            response=response, css=response.css, xpath=response.xpath, links=response.links, re=response.re
        )
        return response

    def view(self) -> None:
        """Print the page as Markdown."""
        if self._response is not None:
            print(self._response.to_markdown())
