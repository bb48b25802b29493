"""`shoal serve` and `shoal ui`: the HTTP API and the dashboard."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace

from shoal.cli.help import Commands, option
from shoal.cli.options import FrontierUrl, Setting, resolve, settings_of
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.messages import pip_install

Host = Annotated[str | None, option("--host ADDRESS", "Listen on this address (default 127.0.0.1).")]
Port = Annotated[int | None, option("--port N", "Listen on this port (default 8000).")]

app = Commands()


@app.add(
    examples="""
    shoal serve
    shoal serve --port 9000 --frontier redis://host
    SHOAL_SERVE__TOKEN="$TOKEN" shoal serve --host 0.0.0.0
    """
)
def serve(
    host: Host = None,
    port: Port = None,
    allow: Annotated[
        list[str], option("--allow NETWORK", "Allow private addresses to be crawled, such as 10.0.0.0/8. Repeatable.")
    ] = [],
    frontier: FrontierUrl = None,
    setting: Setting = [],
) -> None:
    """Serve the HTTP API and the dashboard.

    Open its address in a browser to watch and control crawls. Clients send batches of URLs and get their content; they
    start and control runs, and see hosts and clusters. /docs describes the API. The server listens on this machine
    only. To listen on another address, set a token (SHOAL_SERVE__TOKEN). Private addresses are not crawled unless
    --allow lists them.
    """
    options = settings_of(host=host, port=port, frontier=frontier, allow=allow)
    _serve(resolve(None, options, setting).config, ui_only=False)


@app.add(
    examples="""
    shoal ui --frontier sqlite:///books.db
    shoal ui --frontier redis://host --port 9000
    """
)
def ui(
    frontier: FrontierUrl = None,
    host: Host = None,
    port: Port = None,
    setting: Setting = [],
) -> None:
    """Show the dashboard of any frontier.

    Other processes may work on it at the same time. Without --frontier it shows the crawl that runs on this machine,
    or the frontier of shoal.toml. It does not crawl itself: `shoal serve` also runs batches, schedules and
    notifications.
    """
    from shoal.cli.run_store import running_frontier

    config = resolve(None, settings_of(host=host, port=port, frontier=frontier), setting).config
    _serve(replace(config, frontier=running_frontier(config.frontier)), ui_only=True)


def _serve(config: Config, *, ui_only: bool) -> None:
    from shoal.cli import progress

    try:
        from shoal.api.server import process
    except ModuleNotFoundError as exc:
        name = "ui" if ui_only else "serve"
        raise ConfigError(f"`shoal {name}` needs {exc.name}; install it with: {pip_install('api')}") from exc
    config.refuse_tor("the API")
    progress.set_up_logging(progress.console(), config.log_level)
    process.serve(config, ui_only=ui_only)
