"""`shoal config`: the settings in force."""

from __future__ import annotations

import re
from inspect import getsource
from typing import Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import FrontierUrl, InProject, Mode, Scrapy, ScrapySetting, Setting, given, resolve
from shoal.cli.spider_lookup import find_spider
from shoal.errors import ConfigError

IMPORTANT = (
    "frontier", "concurrency", "download_delay", "user_agent", "contact", "log_level", "scope.allowed_domains",
    "scope.deny", "scope.max_pages", "robots.obey",
)  # fmt: skip
"""The settings that most crawls should think about."""
_FIELD = re.compile(r"    (\w+): [^#\n]*?(?:  # (.*))?")

app = Commands()


def explanations() -> dict[str, str]:
    """What each setting means, by key: the comments beside and above the fields of the sections."""
    from shoal.config import Config
    from shoal.config.layers import Section

    found: dict[str, str] = {}

    def read(section: type[Section], prefix: str) -> None:
        above: list[str] = []
        for line in getsource(section).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            field = _FIELD.fullmatch(line)
            if field is not None and field[1] in section.__struct_fields__:
                found[f"{prefix}{field[1]}"] = " ".join([*above, field[2] or ""]).strip()
            above = []

    read(Config, "")
    for name, default in zip(Config.__struct_fields__, Config.__struct_defaults__, strict=True):
        if isinstance(default, Section):
            read(type(default), f"{name}.")
    return found


@app.add(
    examples="""
    shoal config
    shoal config books.py
    shoal config --config production.toml
    shoal config --mode distributed
    shoal config --set download_delay=2
    shoal config --scrapy PROJECT_FOLDER books
    """
)
def config(
    spider: Annotated[str | None, typer.Argument(metavar="SPIDER", help="Include the settings of this spider.")] = None,
    in_project: InProject = None,
    scrapy: Scrapy = False,
    scrapy_setting: ScrapySetting = [],
    setting: Setting = [],
    frontier: FrontierUrl = None,
    mode: Mode = None,
) -> None:
    """Show every setting and where its value comes from.

    The line above a setting says what it means. The ten settings that matter most have a *.
    The command line wins over the environment (SHOAL_...), then come shoal.toml and the spider. A line below a value
    shows one that lost, where it comes from, and what won.
    """
    from shoal.config import flatten
    from shoal.spider import load_spider

    if scrapy and spider is None:
        raise ConfigError("--scrapy needs a spider: pass FILE.py, or the folder of a project and a spider's name")
    reference = None
    if spider is not None:
        reference, _ = find_spider(spider, in_project, scrapy=scrapy, settings=scrapy_setting)
    made = None if reference is None else load_spider(reference)
    resolved = resolve(made, given({"frontier": frontier, "mode": mode}), setting)
    meanings = explanations()
    for key, value in flatten(resolved.config).items():
        print(f"# {'* ' if key in IMPORTANT else ''}{meanings[key]}")
        _print_line(key, value, resolved.sources.get(key, "default"))
        for other in resolved.overruled:
            if other.key == key:
                _print_line("", other.value, f"{other.source}: lost to {other.winner}")
    if made is not None:
        for line in made.other_settings():
            print(line)


def _print_line(key: str, value: object, source: str) -> None:
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    print(f"{key:<28} {shown!s:<44} {source}".rstrip())
