"""Lets other processes of this machine use the store of a crawl, or of a server, while it works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from shoal.errors import StoreBusyError, StoreError
from shoal.frontier import file_of
from shoal.frontier.local.owner import open_owned, serving
from shoal.frontier.local.processes import ProcessWatch
from shoal.ports import Store

log = logging.getLogger("shoal.frontier")

_PATIENCE = 1.5
_BETWEEN_TRIES = 0.05


class ServedStore(NamedTuple):
    """A store, and where other processes find it; empty if they cannot."""

    store: Store
    address: str


async def open_served(
    url: str, name: str, stack: AsyncExitStack, on_change: Callable[[], None] = lambda: None
) -> ServedStore:
    """Open a store in memory or in a file, and serve it until the stack is closed. If the socket cannot be created, log
    a warning: this process needs no socket.

    ``name``: how a store in memory is announced. ``on_change``: called when another process changed something."""
    file, watch = file_of(url), ProcessWatch()
    store = await _open_in_time(file, watch)
    stack.push_async_callback(store.close)
    try:
        server = await stack.enter_async_context(serving(store, watch, file, name))
        server.on_change = on_change
    except StoreError as exc:
        log.warning("other commands cannot use this frontier while this process runs: %s", exc)
        return ServedStore(store, "")
    return ServedStore(store, url if file is not None else f"local:{server.path}")


async def _open_in_time(file: str | None, watch: ProcessWatch) -> Store:
    """Open a store. Wait a moment if the file is busy: an owner exits shortly after its last client."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return await open_owned(file, watch)
        except StoreBusyError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)
