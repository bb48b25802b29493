"""The state of identities in the store, as remembered facts. All workers share it, and the store's clock ends it."""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS
from shoal.ports import Hosts

DAY = 86400.0
_PAGE_SECONDS = 6 * 3600.0  # how long the blocks of a page are counted together
_MAX_NAMES = 10_000
_ENDED = 0.001  # seconds; a fact with this ttl is gone

T = TypeVar("T")


class Rest(Struct, frozen=True):
    """Why an identity gets no requests of a host. It rests while the fact exists.

    ``returns`` is by the clock of the process that wrote it: for people, and for how often to check.
    """

    reason: str
    returns: float
    is_final: bool = False
    """The host blocked it again and again: it does not return soon."""


class Removal(Struct, frozen=True):
    """Why an identity was removed from all hosts. ``refused``: its proxy refuses the user and password of one worker;
    other workers may have the right ones."""

    reason: str
    refused: bool = False


class IdentityFacts:
    """Reads and writes the state. FrontierError if the store is away."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def assigned(self, host: str) -> str | None:
        """The identity that all workers use for a host."""
        return await self._recall(f"identity of {host}", str)

    async def assign(self, host: str, name: str, seconds: float) -> None:
        await self._remember(f"identity of {host}", name, seconds)

    async def resting(self, name: str, host: str) -> Rest | None:
        return await self._recall(f"identity rests {host} {name}", Rest)

    async def rest(self, name: str, host: str, reason: str, seconds: float, *, is_final: bool = False) -> None:
        rest = Rest(reason, time.time() + seconds, is_final)
        await self._remember(f"identity rests {host} {name}", rest, seconds)

    async def streak(self, name: str, host: str) -> int:
        """How often the host blocked the identity without a page in between."""
        return max(0, await self._recall(f"identity streak {host} {name}", int) or 0)

    async def set_streak(self, name: str, host: str, streak: int) -> None:
        await self._remember(f"identity streak {host} {name}", streak, DAY if streak else _ENDED)

    async def removed(self, name: str) -> Removal | None:
        return await self._recall(f"identity removed {name}", Removal)

    async def remove(self, name: str, removal: Removal, seconds: float) -> None:
        await self._remember(f"identity removed {name}", removal, seconds)

    async def restore(self, name: str) -> None:
        """Use an identity again that was removed."""
        if await self.removed(name) is not None:
            await self.remove(name, Removal(""), _ENDED)

    async def count_failure(self, page: bytes) -> int:
        """Count a failure that cost a page no attempt. Returns how many it has had."""
        count = await self.failures_of(page) + 1
        await self._remember(f"identity page {page.hex()}", count, _PAGE_SECONDS)
        return count

    async def failures_of(self, page: bytes) -> int:
        return await self._recall(f"identity page {page.hex()}", int) or 0

    async def names(self) -> list[str]:
        """The identities of all workers that used the store during the last day."""
        return await self._recall("identity names", list[str]) or []

    async def add_names(self, names: list[str]) -> None:
        """Add the identities of a worker for a day. Two workers that start together may miss each other's: repeat
        it."""
        merged = dict.fromkeys([*await self.names(), *names])
        await self._remember("identity names", list(merged)[-_MAX_NAMES:], DAY)

    async def _recall(self, key: str, kind: type[T]) -> T | None:
        value = await self._hosts.recall(key)
        if value is None:
            return None
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except DECODING_ERRORS:  # written by another version
            return None

    async def _remember(self, key: str, value: object, seconds: float) -> None:
        await self._hosts.remember(key, msgspec.msgpack.encode(value), seconds)
