"""Runs the API in this process until it is asked to stop."""

from __future__ import annotations

import errno
import socket
import sys

import uvicorn
from fastapi import FastAPI

from shoal.config import Config
from shoal.crawling.garbage import collect_rarely
from shoal.errors import ConfigError
from shoal.fetch.resolving import allow_many_lookups
from shoal.server.app import create_app
from shoal.server.budgets import Budget
from shoal.server.slow_requests import protocol_with_timeout
from shoal.server.state import Server

_SHUTDOWN_TIMEOUT = 3  # seconds for open responses
_REUSED = 8 << 20  # bytes, more than what is needed to encode one answer at once


def serve(config: Config, *, ui_only: bool = False) -> None:
    """Serve until asked to stop. ConfigError if the server would accept anyone on the network, or cannot listen.

    ``ui_only``: see `create_app`.
    """
    app = create_app(config, ui_only=ui_only)
    _check_address(config.serve.host, config.serve.port)
    process = _Process(
        uvicorn.Config(
            app, host=config.serve.host, port=config.serve.port, log_level=config.log_level.lower(), access_log=False,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            http=protocol_with_timeout(config.serve.request_timeout, _connections(config.serve.max_connections)),
        ),
        app,
    )  # fmt: skip
    collect_rarely()
    allow_many_lookups()
    keep_freed_memory()
    process.run()
    if not process.started:
        sys.exit(1)


def keep_freed_memory() -> None:
    """Let malloc of glibc keep up to twice this size, which it learns when such a block is freed. Otherwise each answer
    of some megabytes may return its memory to the system and fault it in again, which takes as long as to encode it."""
    bytearray(_REUSED)


def _connections(total: int) -> Budget:
    """Connections that may be open. One address may have half of them."""
    return Budget("connections", max(1, total // 2), total)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError if the server cannot listen there. uvicorn would only log it and exit."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as exc:
        in_use = exc.errno == errno.EADDRINUSE
        reason = "the port is already in use. Choose another with --port" if in_use else exc.strerror
        raise ConfigError(f"can't listen on {host}:{port}: {reason}") from exc


class _Process(uvicorn.Server):
    """Shuts down without waiting for batches: responds to their callers first."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        server: Server = self._app.state.server
        server.stop_waiting()
        await super().shutdown(sockets)
