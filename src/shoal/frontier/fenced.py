"""The view that the holder of a cluster slot has of a frontier that lives in one process."""

from __future__ import annotations

from typing import Protocol

from shoal.ports import Claim, Frontier, Holder, Leased


class LocalFrontier(Frontier, Protocol):
    """The only frontier object of a run, shared by all its workers. Leases and claims name their holder."""

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, begun: bool = True, nonce: bytes = b""
    ) -> Leased: ...

    async def claim(
        self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b""
    ) -> Claim | None: ...


class FencedFrontier:
    """See `shoal.ports.Frontier`. Leases and roles that it grants belong to the holder, so that ``fence`` can take them
    away. All other calls go to the shared frontier."""

    def __init__(self, frontier: LocalFrontier, holder: Holder) -> None:
        self._frontier = frontier
        self._holder = holder
        self.push = frontier.push
        self.renew = frontier.renew
        self.reissue = frontier.reissue
        self.complete = frontier.complete
        self.fail = frontier.fail
        self.release = frontier.release
        self.fence = frontier.fence
        self.advance = frontier.advance
        self.relinquish = frontier.relinquish
        self.roles = frontier.roles
        self.read_items = frontier.read_items
        self.trim_items = frontier.trim_items
        self.update_host = frontier.update_host
        self.host_states = frontier.host_states
        self.remember = frontier.remember
        self.recall = frontier.recall
        self.stats = frontier.stats
        self.audit = frontier.audit
        self.recover = frontier.recover
        self.rewinds = frontier.rewinds
        self.find = frontier.find
        self.dead_kinds = frontier.dead_kinds
        self.dead = frontier.dead
        self.retry_dead = frontier.retry_dead
        self.close = frontier.close

    async def lease(self, limit: int, ttl: float, *, begun: bool = True, nonce: bytes = b"") -> Leased:
        return await self._frontier.lease(limit, ttl, self._holder, begun=begun, nonce=nonce)

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"") -> Claim | None:
        return await self._frontier.claim(role, ttl, self._holder, nonce=nonce)
