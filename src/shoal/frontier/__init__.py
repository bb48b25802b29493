"""Frontiers, opened by the scheme of their URL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from shoal.errors import StoreAwayError, StoreError
from shoal.ports import Store

_OPEN_AGAIN = (0.1, 0.3)  # seconds before another try


async def open_store(url: str, *, readonly: bool = False) -> Store:
    """The store behind a URL: ``memory:``, ``sqlite:///file``, ``redis://host``, ``postgresql://host/database``.

    ``readonly`` looks at a store without working on it, also while another process does.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "memory":
        from shoal.frontier.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from shoal.frontier.sqlite import SQLiteStore

        return await SQLiteStore.open(_sqlite_path(url, rest), readonly=readonly)
    if scheme.partition("+")[0] in ("redis", "rediss"):
        with needs_extra("redis", scheme):
            from shoal.frontier.redis import RedisStore
        return await _open_again(lambda: RedisStore.open(url))
    if scheme == "postgresql":
        with needs_extra("postgres", scheme):
            from shoal.frontier.postgres import PostgresStore
        return await _open_again(lambda: PostgresStore.open(url))
    raise StoreError(
        f"no frontier for {scheme!r}; use memory:, sqlite:///file.db, redis://host or postgresql://host/db"
    )


async def _open_again(opening: Callable[[], Awaitable[Store]]) -> Store:
    """A connection may break in a bad moment. A server that stays away is reported soon."""
    for pause in _OPEN_AGAIN:
        try:
            return await opening()
        except StoreAwayError:
            await asyncio.sleep(pause)
    return await opening()


@contextmanager
def needs_extra(name: str, scheme: str) -> Iterator[None]:
    """The libraries of a server are installed only where they are wanted."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise StoreError(f"{scheme}:// needs {exc.name}; install it with: pip install 'shoal[{name}]'") from exc


def _sqlite_path(url: str, rest: str) -> str:
    path = rest.removeprefix("///") if rest.startswith("///") else ""
    if not path:
        raise StoreError(f"{url!r} names no file; write sqlite:///file.db, or sqlite:////abs/file.db")
    return path
