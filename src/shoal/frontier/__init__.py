"""Frontiers, opened by the scheme of their URL."""

from __future__ import annotations

from shoal.errors import StoreError
from shoal.ports import Store


async def open_store(url: str, *, readonly: bool = False) -> Store:
    """The store behind a URL: ``memory:`` or ``sqlite:///file``.

    ``readonly`` looks at a store without working on it, also while another process does.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "memory":
        from shoal.frontier.memory import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from shoal.frontier.sqlite import SQLiteStore

        return await SQLiteStore.open(_sqlite_path(url, rest), readonly=readonly)
    if scheme in ("redis", "rediss", "postgresql"):
        raise StoreError(f"a frontier in {scheme}:// is not part of this version yet; use memory: or sqlite:///file.db")
    raise StoreError(f"no frontier for {scheme!r}; use memory: or sqlite:///file.db")


def _sqlite_path(url: str, rest: str) -> str:
    path = rest.removeprefix("///") if rest.startswith("///") else ""
    if not path:
        raise StoreError(f"{url!r} names no file; write sqlite:///file.db, or sqlite:////abs/file.db")
    return path
