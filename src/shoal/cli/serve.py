"""`shoal serve`: the HTTP API."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.running import FrontierUrl, Setting, given, resolve
from shoal.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Where to listen (default 127.0.0.1).")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="On which port (default 8000).")] = None,
    allow: Annotated[
        list[str],
        typer.Option("--allow", metavar="NETWORK", help="Private addresses that may be crawled. Repeatable."),
    ] = [],
    frontier: FrontierUrl = None,
    setting: Setting = [],
) -> None:
    """Serve the HTTP API: batches of URLs in, content out; runs, hosts and clusters.

    It listens on this machine only; with another --host a token is needed (SHOAL_SERVE__TOKEN). Private addresses are
    not crawled unless --allow lists them. The description of the API is at /docs.
    """
    from shoal.cli import progress

    try:
        from shoal.server import process
    except ModuleNotFoundError as exc:
        raise ConfigError(f"`shoal serve` needs {exc.name}; install it with: pip install 'shoal[api]'") from exc
    options = given({"serve.host": host, "serve.port": port, "frontier": frontier, "serve.allow": tuple(allow) or None})
    config = resolve(None, options, setting).config
    progress.set_up_logging(progress.console(), config.log_level)
    process.serve(config)
