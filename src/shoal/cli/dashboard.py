"""`--ui`: the dashboard of a crawl, in a process of its own that ends with the crawl."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from shoal.errors import ConfigError
from shoal.suggestions import pip_install

if TYPE_CHECKING:
    from shoal.crawling.stats import Vitals

_PORT = 8000
_NEEDED = ("fastapi", "uvicorn", "jinja2")
_POLL = 0.1  # seconds
_STOP_TIMEOUT = 5.0


def check_installed() -> None:
    """ConfigError if the libraries of the dashboard are missing."""
    for name in _NEEDED:
        if find_spec(name) is None:
            raise ConfigError(f"--ui needs {name}; install it with: {pip_install('api')}")


class Shown(Protocol):
    """A crawl or a worker."""

    @property
    def address(self) -> str: ...

    def vitals(self) -> Vitals: ...


async def show_dashboard(made: Shown) -> None:
    """Start the dashboard when the crawl has opened its store, and stop it when this task is cancelled."""
    from shoal.runs.child import command

    while made.vitals().frontier is None:
        await asyncio.sleep(_POLL)
    port = _free_port()
    words, environ = command(["ui", "--frontier", made.address, "--port", str(port)], tethered=True)
    child = await asyncio.create_subprocess_exec(
        *words, env={**environ, "SHOAL_LOG_LEVEL": "WARNING"}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    print(f"dashboard: http://127.0.0.1:{port}/", file=sys.stderr)
    try:
        await child.wait()
    finally:
        with suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await child.wait()
        except TimeoutError:
            child.kill()


def _free_port() -> int:
    """The usual port, or another one that is free."""
    for port in (_PORT, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    raise ConfigError("--ui: there is no free port")
