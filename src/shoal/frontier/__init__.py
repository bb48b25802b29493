"""Frontiers store the requests of a run. The scheme of a frontier's URL selects its backend.

The rules are written once, in `rules`, `host_policy` and `politeness`. `memory`, `sqlite`, `redis` and `postgres`
keep them in their own ways, and `local` shares a frontier of one process with others on the machine. This room may
import `fetch` and what is below it. Start with `memory.queue`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from shoal.errors import StoreAwayError, StoreError
from shoal.messages import pip_install
from shoal.ports import Store

_RETRY_DELAYS = (0.1, 0.3)  # seconds


async def open_store(url: str, *, readonly: bool = False) -> Store:
    """Open the store at a URL: ``memory:``, ``sqlite:///file``, ``redis://host``, ``postgresql://host/database``, or
    ``local:NAME`` for the store of a crawl that runs on this machine. Other schemes are those of plugins.

    With ``readonly`` a SQLite file can be inspected while another process works on it. StoreAwayError if a server does
    not answer, StoreError if the URL or the store cannot be used.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "memory":
        from shoal.frontier.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from shoal.frontier.sqlite import SQLiteStore

        return await SQLiteStore.open(_sqlite_path(url, rest), readonly=readonly)
    if scheme == "local":
        from shoal.frontier.local.store import SocketStore

        return await SocketStore.open(url)
    if scheme.partition("+")[0] in ("redis", "rediss"):
        with needs_extra("redis", scheme):
            from shoal.frontier.redis import RedisStore
        return await _open_with_retries(lambda: RedisStore.open(url))
    if scheme == "postgresql":
        with needs_extra("postgres", scheme):
            from shoal.frontier.postgres import PostgresStore
        return await _open_with_retries(lambda: PostgresStore.open(url))
    from shoal.config import plugins

    opened = plugins.load("frontiers", scheme)
    if opened is not None:
        return await _open_with_retries(lambda: opened(url, readonly=readonly))
    raise StoreError(
        f"no frontier for {scheme!r}; use memory:, sqlite:///file.db, redis://host or postgresql://host/db"
        f"{plugins.hint('frontiers')}"
    )


async def join_store(url: str, *, readonly: bool = False) -> Store:
    """Open a store for a short time. If another process of this machine works on the SQLite file, use the store through
    that process; otherwise like `open_store`. Waits for a process that is about to close the file."""
    path = file_of(url)
    if path is None:
        return await open_store(url, readonly=readonly)
    from shoal.frontier.local.server import join_or_open

    return await join_or_open(path, lambda: open_store(url, readonly=readonly))


async def share_store(url: str) -> Store:
    """Open a store that other processes use at the same time. A SQLite file gets a process that owns it and serves all
    others of this machine; other stores are opened like `open_store`."""
    path = file_of(url)
    if path is None:
        return await open_store(url)
    from shoal.frontier.local.server import share_file

    return await share_file(path)


def file_of(url: str) -> str | None:
    """The file of a SQLite frontier; None for other frontiers."""
    scheme, _, rest = url.partition(":")
    return _sqlite_path(url, rest) if scheme == "sqlite" else None


async def _open_with_retries(open_it: Callable[[], Awaitable[Store]]) -> Store:
    """Open a store, and retry after a short network fault. A server that stays away is reported within a second."""
    for delay in _RETRY_DELAYS:
        try:
            return await open_it()
        except StoreAwayError:
            await asyncio.sleep(delay)
    return await open_it()


@contextmanager
def needs_extra(name: str, scheme: str) -> Iterator[None]:
    """Turn a missing library into a StoreError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise StoreError(f"{scheme}:// needs {exc.name}; install it with: {pip_install(name)}") from exc


def _sqlite_path(url: str, rest: str) -> str:
    path = rest.removeprefix("///") if rest.startswith("///") else ""
    if not path:
        raise StoreError(f"{url!r} names no file; write sqlite:///file.db, or sqlite:////abs/file.db")
    return path
