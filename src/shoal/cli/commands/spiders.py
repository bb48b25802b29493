"""`shoal new` and `shoal list`: create a spider, and list the spiders of a folder."""

from __future__ import annotations

import json
import re
import sys
from inspect import getsource
from pathlib import Path
from typing import Annotated

from shoal.cli.help import Commands, argument, option
from shoal.cli.options import FrontierUrl, InProject, Mode, Scrapy, Setting, resolve, settings_of
from shoal.cli.run_store import find_spider
from shoal.errors import ConfigError, SpiderError
from shoal.messages import did_you_mean

_TEMPLATE = """\
from shoal import Response, Spider


class {class_name}(Spider):
    name = "{name}"
    start_urls = ["{url}"]
    allowed_domains = ["{host}"]
    settings = {{{contact}"download_delay": 0.5, "scope": {{"max_depth": 5}}}}

    def parse(self, response: Response):
        yield {{"url": response.url, "title": response.css("title::text").get()}}
        yield response.follow_all("a[href]")
"""

app = Commands()


@app.add(
    examples="""
    shoal new books
    shoal new books https://example.com/
    shoal new books https://example.com/ --contact https://my.example/bot
    """
)
def new(
    name: Annotated[str, argument("NAME", "The spider's name. The file is NAME.py.")],
    url: Annotated[
        str, argument("URL", "The page to start from (default http://127.0.0.1:8000/).")
    ] = "http://127.0.0.1:8000/",
    contact: Annotated[
        str | None, option("--contact URL", "Your page or mailto: address for site owners, in the user agent.")
    ] = None,
) -> None:
    """Create a spider from a template.

    On a terminal it asks for a contact, unless --contact or a setting names one. Press Enter for none.
    """
    from shoal.config.checks import check_contact
    from shoal.urls.normalize import host_of, written_url

    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise SpiderError(f"invalid spider name {name!r}: start with a letter, then use letters, digits, _ and -")
    path = Path(name.replace("-", "_") + ".py")
    if path.exists():
        raise SpiderError(f"{path} already exists: choose another name, or delete the file")
    start = written_url(url)
    host = host_of(start).removeprefix("www.")
    if contact is None:
        contact = _ask_for_contact()
    if problem := check_contact(contact):
        raise SpiderError(f"--contact {problem}")
    class_name = "".join(part.capitalize() for part in re.split("[-_]", name))
    setting = f"{json.dumps('contact')}: {json.dumps(contact)}, " if contact else ""
    path.write_text(_TEMPLATE.format(class_name=class_name, name=name, url=start, host=host, contact=setting))
    print(f"wrote {path}\nrun it: shoal run {path} -o {name}.jsonl")


def _ask_for_contact() -> str:
    """A contact of the user's choice; empty: none, or there is one in the settings."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or resolve().config.contact:
        return ""
    print("How can the owners of sites reach you? A URL or mailto: address for the user agent (Enter: none)")
    try:
        return input("contact: ").strip()
    except EOFError:  # Ctrl-D
        return ""


@app.add(
    "list",
    examples="""
    shoal list
    shoal list spiders/
    """,
)
def list_spiders(
    where: Annotated[
        Path | None, argument("PATH", "A file or a folder (default: this folder).", show_default=False)
    ] = None,
) -> None:
    """List the spiders of shoal.toml and of a file or folder.

    The spiders of shoal.toml come first, if no PATH is given: the name, the file and the execution mode of each.
    """
    from shoal.runs.orchestrator import Registry
    from shoal.spider import spiders_in

    if where is None:
        registry = Registry.load()
        for name, entry in registry.items():
            print(f"{name:<20} {registry.reference(name):<32} {entry.execution_mode}")
        where = Path(".")
    if not where.exists():
        raise SpiderError(f"{where} does not exist")
    for path in [where] if where.is_file() else sorted(where.glob("*.py")):
        if "Spider" not in path.read_text(errors="replace"):
            continue
        try:
            for spider in spiders_in(path):
                print(f"{spider.spider_name():<20} {path}:{spider.__name__:<20} {_first_line(spider)}".rstrip())
        except SpiderError as error:
            print(f"cannot load {path}: {error}", file=sys.stderr)


def _first_line(spider: type) -> str:
    return (spider.__doc__ or "").strip().partition("\n")[0] if "__doc__" in vars(spider) else ""


# `shoal completion`: complete commands and options with the Tab key.


_SHELLS = ("bash", "zsh", "fish")


@app.add(
    examples="""
    shoal completion bash >> ~/.bashrc
    shoal completion zsh >> ~/.zshrc
    shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
)
def completion(
    shell: Annotated[str, argument("SHELL", "bash, zsh or fish.", autocompletion=lambda: list(_SHELLS))],
) -> None:
    """Print the completion script for a shell.

    Add the script to your shell's startup file and start a new shell. The Tab key then completes commands and options.
    For zsh, `compinit` must run first.
    """
    from typer._completion_shared import get_completion_script

    if shell not in _SHELLS:
        raise ConfigError(f"cannot complete in {shell}: use bash, zsh or fish{did_you_mean(shell, _SHELLS)}")
    print(get_completion_script(prog_name="shoal", complete_var="_SHOAL_COMPLETE", shell=shell))


# `shoal config`: the settings in force.


IMPORTANT = (
    "frontier", "concurrency", "download_delay", "user_agent", "contact", "log_level", "scope.allowed_domains",
    "scope.deny", "scope.max_pages", "robots.obey",
)  # fmt: skip
"""The settings that most crawls should think about."""
_FIELD = re.compile(r"    (\w+): [^#\n]*?(?:  # (.*))?")


def explanations() -> dict[str, str]:
    """What each setting means, by key: the comments beside and above the fields of the sections."""
    from shoal.config import Config
    from shoal.config.layers import Section

    meanings: dict[str, str] = {}

    def read(section: type[Section], prefix: str) -> None:
        above: list[str] = []
        for line in getsource(section).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            field = _FIELD.fullmatch(line)
            if field is not None and field[1] in section.__struct_fields__:
                meanings[f"{prefix}{field[1]}"] = " ".join([*above, field[2] or ""]).strip()
            above = []

    read(Config, "")
    for name, default in zip(Config.__struct_fields__, Config.__struct_defaults__, strict=True):
        if isinstance(default, Section):
            read(type(default), f"{name}.")
    return meanings


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
    spider: Annotated[str | None, argument("SPIDER", "Include the settings of this spider.")] = None,
    in_project: InProject = None,
    scrapy: Scrapy = Scrapy(),
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
        reference, _ = find_spider(spider, in_project, scrapy)
    kind = None if reference is None else load_spider(reference)
    resolved = resolve(kind, settings_of(frontier=frontier, mode=mode), setting)
    meanings = explanations()
    for key, value in flatten(resolved.config).items():
        print(f"# {'* ' if key in IMPORTANT else ''}{meanings[key]}")
        _print_line(key, value, resolved.sources.get(key, "default"))
        for other in resolved.overruled:
            if other.key == key:
                _print_line("", other.value, f"{other.source}: lost to {other.winner}")
    if kind is not None:
        for line in kind.other_settings():
            print(line)


def _print_line(key: str, value: object, source: str) -> None:
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    print(f"{key:<28} {shown!s:<44} {source}".rstrip())
