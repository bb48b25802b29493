"""`shoal new` and `shoal list`: create a spider, and list the spiders of a folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import resolve
from shoal.errors import SpiderError

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
    name: Annotated[str, typer.Argument(metavar="NAME", help="The spider's name. The file is NAME.py.")],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The page to start from (default http://127.0.0.1:8000/).")
    ] = "http://127.0.0.1:8000/",
    contact: Annotated[
        str | None,
        typer.Option(
            "--contact", metavar="URL", help="Your page or mailto: address for site owners, in the user agent."
        ),
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
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or resolve(None, {}, []).config.contact:
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
        Path | None,
        typer.Argument(metavar="PATH", help="A file or a folder (default: this folder).", show_default=False),
    ] = None,
) -> None:
    """List the spiders of shoal.toml and of a file or folder.

    The spiders of shoal.toml come first, if no PATH is given: the name, the file and the execution mode of each.
    """
    from shoal.runs.registry import Registry
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
