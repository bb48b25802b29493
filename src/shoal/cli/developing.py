"""`shoal new`, `list`, `shell`, `config`, `doctor`: for writing a spider."""

from __future__ import annotations

import code
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.running import FrontierUrl, Setting, given, make_spider, resolve
from shoal.errors import ShoalError, SpiderError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.http import Response

_TEMPLATE = """\
from shoal import Request, Response, Spider


class {class_name}(Spider):
    name = "{name}"
    start_urls = ["{url}"]
    settings = {{"download_delay": 0.5, "scope": {{"max_depth": 5}}}}

    def parse(self, response: Response):
        yield {{"url": response.url, "title": response.css("title::text").get()}}
        yield response.follow_all("a[href]")
"""


def register(app: typer.Typer) -> None:
    app.command()(new)
    app.command("list")(list_spiders)
    app.command()(shell)
    app.command()(config)
    app.command()(doctor)


def new(
    name: Annotated[str, typer.Argument(help="The spider's name; the file is NAME.py.")],
    url: Annotated[str, typer.Argument(help="Where it starts.")] = "http://127.0.0.1:8000/",
) -> None:
    """Write a spider from a template."""
    from shoal.urls.normalize import normalize_url

    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise SpiderError(f"{name!r} can't be a spider's name: use letters, digits, _ and -")
    path = Path(name.replace("-", "_") + ".py")
    if path.exists():
        raise SpiderError(f"{path} is there already; it was left as it is")
    class_name = "".join(part.capitalize() for part in re.split("[-_]", name))
    path.write_text(_TEMPLATE.format(class_name=class_name, name=name, url=normalize_url(url)))
    print(f"wrote {path}\nrun it: shoal run {path} -o {name}.jsonl")


def list_spiders(
    where: Annotated[Path, typer.Argument(help="A file or a folder.")] = Path("."),
) -> None:
    """List the spiders in a file, or in the files of a folder."""
    from shoal.spider import spiders_in

    if not where.exists():
        raise SpiderError(f"there is no {where}")
    for path in [where] if where.is_file() else sorted(where.glob("*.py")):
        if "Spider" not in path.read_text(errors="replace"):
            continue
        try:
            for spider in spiders_in(path):
                print(f"{spider.spider_name():<20} {path}:{spider.__name__:<20} {_first_line(spider)}".rstrip())
        except SpiderError as error:
            print(f"{path}: can't be loaded: {error}", file=sys.stderr)


def _first_line(spider: type) -> str:
    return (spider.__doc__ or "").strip().partition("\n")[0] if "__doc__" in vars(spider) else ""


def shell(
    url: Annotated[str, typer.Argument(metavar="URL", help="The page to look at.")],
    command: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run this and leave.")] = None,
    setting: Setting = [],
) -> None:
    """Fetch a page and try selectors on it: `response`, `css`, `xpath`, `links()`, `fetch(URL)`."""
    page = _Page(resolve(None, {}, setting).config)
    page.fetch(url)
    if command is not None:
        try:
            result = eval(compile(command, "-c", "eval"), page.names)  # the user's own words, typed here
        except SyntaxError:
            exec(compile(command, "-c", "exec"), page.names)
        else:
            if result is not None:
                print(result)
        return
    banner = f"{page.names['response']!r}\nTry: css('title::text').get()   links()   view()   fetch(url)"
    code.interact(banner=banner, local=page.names, exitmsg="")


class _Page:
    """The page in the shell, and the names that one can use on it."""

    def __init__(self, settings: Config) -> None:
        self._config = settings
        self.names: dict[str, Any] = {"fetch": self.fetch, "view": self.view}

    def fetch(self, url: str) -> Response:
        import asyncio

        from shoal.fetch.http import HttpFetcher
        from shoal.http import Request

        async def get() -> Response:
            fetcher = HttpFetcher(self._config.http, self._config.user_agent)
            try:
                response = await fetcher.fetch(Request(url if "://" in url else "http://" + url))
                for _ in range(self._config.http.max_redirects):
                    if not (300 <= response.status < 400 and "Location" in response.headers):
                        break
                    response = await fetcher.fetch(Request(response.urljoin(response.headers["Location"])))
                return response
            finally:
                await fetcher.close()

        response = asyncio.run(get())
        self.names.update(
            response=response, css=response.css, xpath=response.xpath, links=response.links, re=response.re
        )
        return response

    def view(self) -> None:
        """Print the page as Markdown."""
        print(self.names["response"].to_markdown())


def config(
    spider: Annotated[str | None, typer.Argument(metavar="FILE", help="With this spider's own settings.")] = None,
    setting: Setting = [],
    frontier: FrontierUrl = None,
) -> None:
    """Print every setting in force, and where it comes from."""
    from shoal.config import flatten

    made = None if spider is None else make_spider(spider, {})
    resolved = resolve(made, given({"frontier": frontier}), setting)
    for key, value in flatten(resolved.config).items():
        source = resolved.sources.get(key, "default")
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        print(f"{key:<28} {shown!s:<44} {source}".rstrip())


def doctor() -> None:
    """Check this machine: Python, libraries, open files, the configuration."""
    import importlib.metadata
    import resource

    problems = 0

    def say(good: bool | None, what: str, hint: str = "") -> None:
        nonlocal problems
        problems += good is False
        mark = {True: "ok  ", False: "BAD ", None: "-   "}[good]
        print(f"{mark}{what}{'' if good or not hint else ': ' + hint}")

    say(sys.version_info >= (3, 11), f"Python {sys.version.split()[0]}", "Shoal needs 3.11 or later")
    for name in ("aiohttp", "uvloop", "turbohtml", "msgspec", "protego", "yarl", "typer", "rich"):
        try:
            say(True, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            say(False, name, f"missing; pip install {name}")
    for name, extra, use in (
        ("pyarrow", "parquet", "Parquet files"),
        ("brotli", "brotli", "pages in Brotli"),
        ("zstandard", "zstd", "pages in Zstandard"),
    ):
        try:
            say(True, f"{name} {importlib.metadata.version(name)} ({use})")
        except importlib.metadata.PackageNotFoundError:
            say(None, name, f"not installed; pip install 'shoal[{extra}]' for {use}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    say(soft >= 1024, f"{soft} open files allowed", "raise it with ulimit -n for a high concurrency")
    try:
        resolved = resolve(None, {}, [])
        files = {source for source in resolved.sources.values() if source.endswith(".toml")}
        say(True, f"configuration ({', '.join(sorted(files)) or 'no shoal.toml'})")
        folder = os.path.abspath(".")
        say(os.access(folder, os.W_OK), f"{folder} can be written", "outputs go there by default")
    except ShoalError as error:
        say(False, "configuration", str(error))
    sys.exit(1 if problems else 0)
