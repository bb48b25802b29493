"""`shoal config`: the settings in force."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import FrontierUrl, Mode, Setting, given, resolve
from shoal.cli.spider_lookup import find_spider, make_spider

app = Commands()


@app.add(
    examples="""
    shoal config
    shoal config books.py
    shoal config --mode distributed
    shoal config --set download_delay=2
    """
)
def config(
    spider: Annotated[str | None, typer.Argument(metavar="SPIDER", help="Include the settings of this spider.")] = None,
    setting: Setting = [],
    frontier: FrontierUrl = None,
    mode: Mode = None,
) -> None:
    """Show every setting and where its value comes from.

    Values come from shoal.toml, the spider, the environment (SHOAL_...) and the command line. Later ones win.
    """
    from shoal.config import flatten

    made = None if spider is None else make_spider(find_spider(spider)[0], {})
    resolved = resolve(made, given({"frontier": frontier, "mode": mode}), setting)
    for key, value in flatten(resolved.config).items():
        source = resolved.sources.get(key, "default")
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        print(f"{key:<28} {shown!s:<44} {source}".rstrip())
