"""Hosts: how fast each may be fetched from, and small facts about them."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, Struct, UnsetType


class HostUpdate(Struct, frozen=True, kw_only=True):
    """A change of a host's politeness. UNSET keeps a value; None resets it to the default."""

    delay: float | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET
    crawl_delay: float | UnsetType | None = UNSET
    learned_delay: float | UnsetType | None = UNSET
    block_for: float | UnsetType | None = UNSET
    """Seconds from now during which nothing of this host is leased. A longer block stays. 0 or None unblocks."""
    block_reason: str = ""


class HostState(Struct, frozen=True, kw_only=True):
    """The politeness of a host that is in force."""

    host: str
    delay: float
    why: str
    concurrency: int
    in_flight: int
    ready: int
    blocked_for: float
    block_reason: str


class Hosts(Protocol):
    """The hosts of a store, shared by all its runs and workers."""

    async def update_host(self, host: str, update: HostUpdate) -> None:
        """Change a host for all runs of the store. Delay and concurrency of the host ``*`` are the defaults of all
        others."""
        ...

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """The hosts with the most ready requests first."""
        ...

    async def host_state(self, host: str) -> HostState:
        """The politeness in force for one host, whether or not the run has requests of it."""
        ...

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a small fact for all runs and workers of the store for ``ttl`` seconds, such as a robots.txt."""
        ...

    async def recall(self, key: str) -> bytes | None:
        """A fact that was remembered. None if there is none, or its ``ttl`` is over."""
        ...
