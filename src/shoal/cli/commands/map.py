"""`shoal map`: list the URLs of a site."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import AsJson, Concurrency, Delay, Proxy, Quiet, Setting, given, resolve
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.runs.site_map import SiteMap, SiteUrl

app = Commands()


@app.add(
    examples="""
    shoal map https://example.com
    shoal map https://example.com --match /blog/ --since 2026-01-01 --json
    shoal map https://example.com/sitemap_index.xml --limit 100
    """
)
def map(
    url: Annotated[str, typer.Argument(metavar="URL", help="A page of the site, or one of its sitemaps.")],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="Stop after N URLs (default 1000000).", min=1)
    ] = 1_000_000,
    match: Annotated[
        str | None, typer.Option("--match", metavar="REGEX", help="List only URLs in which REGEX is found.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DATE", help="Leave out URLs that did not change since DATE (2026-01-31)."),
    ] = None,
    max_pages: Annotated[
        int | None,
        typer.Option("--max-pages", metavar="N", help="Fetch up to N sitemaps, or N pages for links (default 1000)."),
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
    from shoal.runs.crawl import run_blocking
    from shoal.runs.site_map import SiteMap
    from shoal.sitemaps.mapping import MapSpider
    from shoal.urls.normalize import typed_url

    options = given(
        {"download_delay": delay, "concurrency": concurrency, "scope.max_pages": max_pages, "proxies": proxy or None}
    )
    resolved = resolve(MapSpider, options, setting)
    resolved.config.refuse_tor("shoal map")
    printer = _Printer(as_json)
    try:
        pattern = None if match is None else re.compile(match)
    except re.error as exc:
        raise ConfigError(f"--match {match!r} is not a regular expression: {exc}") from exc
    try:
        made = SiteMap(typed_url(url), resolved, printer, match=pattern, since=since, limit=limit)
    except ValueError as exc:
        raise ConfigError(f"invalid URL or --since: {exc}") from exc
    printer.on_closed = made.stop
    console = progress.console()
    progress.set_up_logging(console, "ERROR" if quiet else "WARNING")
    logging.getLogger("shoal.run").setLevel("ERROR")  # hides the notice that the crawl was stopped
    run_blocking(made, None if quiet else progress.show(console))
    code = _report(made, printer, quiet=quiet)
    if printer.is_closed:
        os._exit(code)  # Python would try to write the rest to the closed pipe
    sys.exit(code)


class _Printer:
    """Prints URLs until the reader of the pipe has gone."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.is_closed = False
        self.on_closed: Callable[[], None] = lambda: None

    def __call__(self, found: SiteUrl) -> None:
        import msgspec

        if self.is_closed:
            return
        try:
            print(msgspec.json.encode(found).decode() if self._as_json else found.url)
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


def _report(made: SiteMap, printer: _Printer, *, quiet: bool) -> int:
    """Print what was found, and return the exit code."""
    from shoal.crawling.outcome import EXIT_FAILED

    printer.flush()
    summary = made.summary
    if made.error is not None or summary is None:
        print(f"shoal: {made.error}", file=sys.stderr)
        return 1
    if not quiet and made.count:
        fetched = summary.counters.fetched
        links = f"the links of {fetched} {'page' if fetched == 1 else 'pages'} (no sitemap lists URLs)"
        print(f"{made.count} URLs from {f'{made.sitemaps} sitemaps' if made.entries else links}", file=sys.stderr)
        if made.limit_reached:
            print("there may be more: --limit is reached", file=sys.stderr)
        elif summary.state == "limit":
            print("there may be more: --max-pages is reached", file=sys.stderr)
    if made.count:
        return 0
    for reason in () if summary.outcome is None else summary.outcome.reasons:
        print(f"shoal: {reason}", file=sys.stderr)
    return EXIT_FAILED
