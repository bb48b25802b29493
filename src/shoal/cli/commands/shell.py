"""`shoal shell`: try selectors on a page."""

from __future__ import annotations

import code
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import Setting, resolve
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.http import Response

app = Commands()


@app.add(
    examples="""
    shoal shell https://example.com
    shoal shell https://example.com -c "css('title::text').get()"
    shoal shell https://example.com --render
    """
)
def shell(
    url: Annotated[str, typer.Argument(metavar="URL", help="The page to fetch.")],
    command: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run this code and exit.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Render pages in a browser.")] = False,
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
            said = f"SyntaxError: {exc}" if isinstance(exc, SyntaxError) else describe(exc)  # its text has the place
            print(f"shoal: {said}", file=sys.stderr)
            raise typer.Exit(1) from None
        if value is not None:
            print(value)

    def fetch(self, url: str, render: object = None) -> Response:
        """Fetch a page, with its redirects, and make it the shell's page. ``render``: as in a request."""
        import asyncio
        import random

        from shoal.crawling.onion import make_fetcher
        from shoal.http import Request
        from shoal.http.rendering import render_choice
        from shoal.identities.roster import all_proxies

        proxy = random.choice(all_proxies(self._config.proxies)) if self._config.proxies else None
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
