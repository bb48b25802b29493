"""Lets other processes of this machine use the store of a crawl while it works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from shoal.errors import StoreError
from shoal.frontier import file_of
from shoal.frontier.local.owner import open_owned, serving
from shoal.frontier.local.processes import ProcessWatch
from shoal.ports import Store

log = logging.getLogger("shoal.frontier")


async def open_served(url: str, name: str, stack: AsyncExitStack, on_change: Callable[[], None]) -> Store:
    """Open a store in memory or in a file, and serve it until the stack is closed. The crawl works without that too, so
    a machine without a place for the socket costs a warning.

    ``name``: how a store in memory is announced. ``on_change``: called when another process changed something."""
    file, watch = file_of(url), ProcessWatch()
    store = await open_owned(file, watch)
    stack.push_async_callback(store.close)
    try:
        server = await stack.enter_async_context(serving(store, watch, file, name))
        server.on_change = on_change
    except StoreError as exc:
        log.warning("other commands cannot use this crawl while it runs: %s", exc)
    return store
