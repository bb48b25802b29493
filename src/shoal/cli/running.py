"""`shoal crawl` and `shoal run`."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

from shoal.crawling.garbage import collect_rarely
from shoal.errors import ConfigError, ShoalError, SpiderError

if TYPE_CHECKING:
    from shoal.config import Resolved
    from shoal.spider import Spider

Output = Annotated[
    list[str],
    typer.Option(
        "-o", "--output", metavar="FILE",
        help="Where items go: FILE.jsonl .csv .parquet .db (SQLite), postgresql:// or mysql://, - for standard output.",
    ),
]  # fmt: skip
FrontierUrl = Annotated[
    str | None,
    typer.Option(
        "--frontier", metavar="URL",
        help="Where the URLs are kept: memory: (default), sqlite:///file.db, redis://host, postgresql://host/db",
    ),
]  # fmt: skip
Argument = Annotated[
    list[str],
    typer.Option("-a", "--argument", metavar="KEY=VALUE", help="An argument of the spider. Repeatable."),
]
Setting = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as `shoal config` lists them. Repeatable."),
]
Delay = Annotated[
    float | None, typer.Option("--delay", metavar="SECONDS", help="Between two fetches from one host (default 0.5).")
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="Requests in flight at once (default 32).")
]
MaxPages = Annotated[int | None, typer.Option("--max-pages", metavar="N", help="Stop after so many pages.")]
NewRun = Annotated[bool, typer.Option("--new-run", help="Start anew, also when there is a run to go on with.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, only warnings and the summary.")]
MetricsPort = Annotated[
    str | None,
    typer.Option(
        "--metrics-port", metavar="[ADDRESS:]PORT",
        help="Serve /metrics and /health: 9100 (this machine only), 0.0.0.0:9100, 9100-9109 (the first free), 0.",
    ),
]  # fmt: skip

During: TypeAlias = Callable[[Any], Awaitable[None]]


def register(app: typer.Typer) -> None:
    app.command()(crawl)
    app.command()(run)


def crawl(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to start.")],
    output: Output = [],
    item: Annotated[
        list[str],
        typer.Option("--item", metavar="NAME=CSS", help='A field of the item, e.g. "price=p.price". Repeatable.'),
    ] = [],
    depth: Annotated[
        int | None, typer.Option("--depth", metavar="N", help="Links away from the first page (default 3).")
    ] = None,
    same_site: Annotated[bool, typer.Option("--same-site/--any-site", help="Stay on the host.")] = True,
    markdown: Annotated[bool, typer.Option("--markdown", help="Text as Markdown.")] = False,
    max_pages: Annotated[
        int | None, typer.Option("--max-pages", metavar="N", help="Stop after so many pages (default 1000).")
    ] = None,
    delay: Delay = None,
    concurrency: Concurrency = None,
    frontier: FrontierUrl = None,
    setting: Setting = [],
    new_run: NewRun = False,
    metrics_port: MetricsPort = None,
    quiet: Quiet = False,
) -> None:
    """Crawl a site without writing code: title and text of each page, or the fields you choose."""
    from shoal.crawling.page_spider import page_spider, parse_fields

    spider = page_spider(url, same_site=same_site, fields=parse_fields(item), markdown=markdown)
    options = given(
        {
            "scope.max_depth": depth,
            "scope.max_pages": max_pages,
            "download_delay": delay,
            "concurrency": concurrency,
            "frontier": frontier,
        }
    )
    execute(
        spider, resolve(spider, options, setting), output or ["-"], new_run=new_run, quiet=quiet,
        metrics_port=metrics_port,
    )  # fmt: skip


def run(
    spider: Annotated[str, typer.Argument(metavar="FILE", help="The spider's file, or FILE:Class.")],
    output: Output = [],
    argument: Argument = [],
    delay: Delay = None,
    concurrency: Concurrency = None,
    max_pages: MaxPages = None,
    frontier: FrontierUrl = None,
    setting: Setting = [],
    new_run: NewRun = False,
    metrics_port: MetricsPort = None,
    quiet: Quiet = False,
) -> None:
    """Run a spider in this process.

    With --frontier sqlite:///file.db it survives a crash: the same command again goes on where it was.
    """
    made = make_spider(spider, pairs(argument, "-a"))
    options = given(
        {
            "download_delay": delay,
            "concurrency": concurrency,
            "scope.max_pages": max_pages,
            "frontier": frontier,
        }
    )
    execute(
        made, resolve(made, options, setting), output, new_run=new_run, quiet=quiet, command=spider,
        metrics_port=metrics_port,
    )  # fmt: skip


def make_spider(reference: str, arguments: Mapping[str, Any]) -> Spider:
    """The spider in a file, made with its arguments."""
    from shoal.spider import load_spider

    kind = load_spider(reference)
    try:
        return kind(**arguments)
    except ShoalError:
        raise
    except Exception as exc:  # whatever the user's __init__ raises
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        place = "" if frame.filename == __file__ else f" (line {frame.lineno})"
        raise SpiderError(f"{reference}: {kind.__name__} can't be made: {type(exc).__name__}: {exc}{place}") from exc


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were on the command line."""
    return {key: value for key, value in options.items() if value is not None}


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """``key=value`` of a repeated option."""
    found = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"{option} {text!r}: write it as key=value")
        found[key] = value
    return found


_OPTION_NAMES = {
    "download_delay": "--delay",
    "concurrency": "--concurrency",
    "scope.max_pages": "--max-pages",
    "scope.max_depth": "--depth",
    "frontier": "--frontier",
    "lease.batch": "--batch-size",
    "log_level": "--log-level",
    **{f"cluster.{name}": f"--{name}" for name in ("coordinator", "runner", "backup", "session")},
    **{f"serve.{name}": f"--{name}" for name in ("host", "port", "allow")},
}


def resolve(spider: Spider | None, options: Mapping[str, Any], settings: list[str]) -> Resolved:
    """All layers of the configuration, with this command line on top."""
    from shoal.config import find_config_file, load_config

    typed = pairs(settings, "--set")
    return load_config(
        file=find_config_file(os.environ),
        spider=None if spider is None else spider.settings,
        spider_name="" if spider is None else type(spider).__name__,
        environ=os.environ,
        command_line={**options, **typed},
        options={key: _OPTION_NAMES[key] for key in options if key not in typed},
    )


def execute(
    spider: Spider, resolved: Resolved, outputs: list[str], *, new_run: bool, quiet: bool, command: str = "",
    urls: list[str] | None = None, metrics_port: str | None = None,
) -> NoReturn:  # fmt: skip
    """Crawl, show it, and end with the summary. Exit code 1 when the crawl failed."""
    from shoal.cli import progress, summary
    from shoal.runs.crawl import Crawl, run_blocking

    collect_rarely()
    made = Crawl(spider, resolved.config, outputs=outputs, new_run=new_run, collect=False, urls=urls)
    console = progress.console()
    progress.set_up_logging(console, "WARNING" if quiet else resolved.config.log_level)
    run_blocking(made, beside(None if quiet else progress.show(console), metrics_port))
    assert made.summary is not None
    summary.show(console, made.summary, resolved.config, command)
    sys.exit(1 if made.summary.state == "failed" else 0)


def beside(show: During | None, metrics_port: str | None) -> During | None:
    """What runs beside a crawl: what shows it, and the metrics if they are asked for."""
    if metrics_port is None:
        return show
    from shoal.metrics.serving import listen, parse_address, serve

    listener = listen(parse_address(metrics_port))

    async def both(made: Any) -> None:
        tasks = [serve(made, listener)] if show is None else [show(made), serve(made, listener)]
        await asyncio.gather(*tasks)

    return both
