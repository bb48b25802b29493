"""`shoal crawl` and `shoal run`: a crawl in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

from shoal.cli.commands.processes import fork_ahead, process_crawl, run_if_worker_process
from shoal.cli.commands.session import read_session
from shoal.cli.help import Commands, argument, option
from shoal.cli.options import (
    Argument,
    Concurrency,
    Crawling,
    Delay,
    Display,
    FailAbove,
    InProject,
    Limits,
    Outputs,
    Rendering,
    Resume,
    Scrapy,
    SpiderName,
    pairs,
    resolve,
    settings_of,
    share_of,
    starts_anew,
)
from shoal.cli.run_store import find_spider, make_spider
from shoal.runs.loop_thread import collect_rarely

if TYPE_CHECKING:
    from shoal.cli.commands.processes import RunningCrawl
    from shoal.config import Resolved
    from shoal.runs.process_fork import ForkedProcesses
    from shoal.spider import Spider

Processes = Annotated[
    int, option("--processes N", "Fetch and parse in N processes of this machine (default 1).", min=1)
]
During: TypeAlias = "Callable[[RunningCrawl], Coroutine[object, None, None]]"

Fields = Annotated[
    list[str], option("--item NAME=CSS", 'Add a field to each item, such as "price=p.price". Repeatable.')
]
Allowed = Annotated[list[str], option("--allow REGEX", "Take items only from pages whose URL matches. Repeatable.")]
Denied = Annotated[list[str], option("--deny REGEX", "Take no items from pages whose URL matches. Repeatable.")]
Depth = Annotated[
    int | None,
    option("--depth N", "Follow links up to N steps from the first page (default 3). It sets scope.max_depth."),
]
Screenshots = Annotated[
    str | None, option("--screenshots FOLDER", "Render all pages and write a PNG of each to FOLDER.")
]

app = Commands()


@app.add(
    examples="""
    shoal crawl https://example.com -o pages.jsonl
    shoal crawl https://example.com --item name=h1 --item price=p.price -o a.csv
    shoal crawl https://example.com --each article --item name=h3 -o a.csv
    shoal crawl https://example.com --render -o pages.jsonl
    shoal crawl https://example.com -o pages.jsonl --frontier sqlite:///crawl.db
    """
)
def crawl(
    url: Annotated[str, argument("URL", "The page to start from.")],
    outputs: Outputs = Outputs(),
    item: Fields = [],
    each: Annotated[str, option("--each CSS", 'Make an item of each element, such as "article.product".')] = "",
    allow: Allowed = [],
    deny: Denied = [],
    depth: Depth = None,
    same_site: Annotated[
        bool, option("--same-site/--any-site", "Crawl only the first page's host (default), or any host.")
    ] = True,
    markdown: Annotated[bool, option("--markdown", "Write the text of pages as Markdown.")] = False,
    max_pages: Annotated[int | None, option("--max-pages N", "Stop after N pages (default 1000).")] = None,
    limits: Limits = Limits(),
    rendering: Rendering = Rendering(),
    screenshots: Screenshots = None,
    delay: Delay = None,
    concurrency: Concurrency = None,
    crawling: Crawling = Crawling(),
    processes: Processes = 1,
    fail_above: FailAbove = None,
    display: Display = Display(),
) -> None:
    """Crawl a site without writing code.

    Each page becomes an item with its URL, title and text, or with the fields that you choose with --item. With --each,
    each matching element of a page becomes an item. --allow and --deny choose the pages that yield items; links of all
    pages are followed. Items go to standard output unless you pass --output.
    """
    from shoal.runs.command_spiders import page_spider, parse_fields

    forked = fork_ahead(processes)
    spider = page_spider(
        url, same_site=same_site, fields=parse_fields(item), markdown=markdown, rows=each, allow=allow, deny=deny
    )
    rendering.apply(spider)
    if screenshots is not None:
        spider.take_screenshots(screenshots)
    options = settings_of(
        depth=depth, max_pages=max_pages, delay=delay, concurrency=concurrency, fail_above=share_of(fail_above)
    )
    resolved = resolve(spider, options | crawling.settings() | limits.settings(), crawling.setting)
    execute(
        spider,
        resolved,
        outputs.specs() or ["-"],
        new_run=crawling.new_run,
        display=display,
        processes=forked,
        session=crawling.session,
    )


@app.add(
    examples="""
    shoal run books.py -o books.jsonl
    shoal run books.py:Books -a category=travel -o books.csv --delay 1
    shoal run books.py -o books.jsonl --frontier sqlite:///books.db
    shoal run --scrapy books.py -o books.jsonl
    shoal run --scrapy PROJECT_FOLDER books -o books.jsonl
    """
)
def run(
    spider: SpiderName,
    in_project: InProject = None,
    scrapy: Scrapy = Scrapy(),
    outputs: Outputs = Outputs(),
    argument: Argument = [],
    delay: Delay = None,
    concurrency: Concurrency = None,
    max_pages: Annotated[int | None, option("--max-pages N", "Stop after N pages.")] = None,
    limits: Limits = Limits(),
    rendering: Rendering = Rendering(),
    crawling: Crawling = Crawling(),
    resume: Resume = False,
    processes: Processes = 1,
    fail_above: FailAbove = None,
    display: Display = Display(),
) -> None:
    """Run a spider on this machine.

    With --frontier sqlite:///file.db the crawl survives a crash: run the same command again to resume it. With
    --processes it uses several cores. While it runs, `shoal stats`, `hosts`, `pause` and others work on it from another
    terminal. The exit code is 5 if the outcome of the run is "failed": see --fail-above.
    """
    new_run = starts_anew(crawling.new_run, resume)
    forked = fork_ahead(processes)
    reference, entry = find_spider(spider, in_project, scrapy)
    instance = make_spider(reference, {**(entry.arguments if entry else {}), **pairs(argument, "-a")})
    rendering.apply(instance)
    options = settings_of(max_pages=max_pages, delay=delay, concurrency=concurrency, fail_above=share_of(fail_above))
    resolved = resolve(instance, options | crawling.settings() | limits.settings(), crawling.setting)
    execute(
        instance,
        resolved,
        outputs.with_registered(entry),
        new_run=new_run,
        display=display,
        processes=forked,
        session=crawling.session,
    )


def execute(
    spider: Spider,
    resolved: Resolved,
    outputs: list[str],
    *,
    new_run: bool,
    display: Display,
    urls: list[str] | None = None,
    processes: ForkedProcesses | None = None,
    session: str | None = None,
) -> NoReturn:
    """Crawl on this machine, then show the summary and exit."""
    from shoal.cli.summary import resume_command
    from shoal.runs.crawl import Crawl

    run_if_worker_process(spider, resolved, quiet=display.quiet)
    imported = None if session is None else read_session(session, spider, resolved.config)
    if processes is not None:
        crawl: Crawl = process_crawl(spider, resolved, processes, outputs, new_run=new_run)
    else:
        crawl = Crawl(spider, resolved, outputs=outputs, new_run=new_run, collect=False, urls=urls)
    crawl.imported = imported
    crawl.serves = True
    crawl.command = resume_command(sys.argv[1:])
    show_and_exit(crawl, resolved, display, command=sys.argv[1:])


def show_and_exit(
    crawl: RunningCrawl,
    resolved: Resolved,
    display: Display,
    *,
    command: Sequence[str] = (),
    notices: list[str] = [],
) -> NoReturn:
    """Run a crawl, a worker or a node to its end; show its progress and summary. Exit code 1 if it failed.

    With a ``command`` (the words after ``shoal``) the run is this process's own, and the exit code also tells a run
    whose outcome is ``failed``. A worker is one of several, and a supervisor restarts a worker that fails: when the run
    has ended, its exit code is 0.
    """
    from shoal.cli import progress, summary
    from shoal.crawling.outcome import EXIT_FAILED
    from shoal.runs.crawl import run_blocking

    collect_rarely()
    console = progress.console()
    progress.set_up_logging(console, "WARNING" if display.quiet else resolved.config.log_level)
    for notice in notices:
        console.print(notice, style="yellow", soft_wrap=True)
    show = None if display.quiet else progress.show(console)
    run_blocking(crawl, _beside(show, display, resolved.config.worker.metrics_token))
    if crawl.summary is None:  # a worker that had no run
        sys.exit(0)
    summary.show(console, crawl.summary, resolved.config, command)
    sys.exit(1 if crawl.summary.state == "failed" else EXIT_FAILED if command and crawl.summary.has_failed else 0)


def _beside(show: During | None, display: Display, metrics_token: str | None) -> During | None:
    """Tasks that run during a crawl: its progress, the server of its metrics, and its dashboard."""
    during = [] if show is None else [show]
    if display.metrics_port is not None:
        from shoal.operations.metrics_server import listen, parse_address, serve

        listener = listen(parse_address(display.metrics_port))
        during.append(lambda crawl: serve(crawl, listener, metrics_token))
    if display.ui:
        from shoal.cli.commands.processes import check_installed, show_dashboard

        check_installed()
        during.append(show_dashboard)

    async def all_of_them(crawl: RunningCrawl) -> None:
        await asyncio.gather(*(task(crawl) for task in during))

    return all_of_them if during else None
