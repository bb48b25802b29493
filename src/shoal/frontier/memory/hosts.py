"""The hosts of a store in memory, as one run sees them, and the facts that all runs share."""

from __future__ import annotations

from collections.abc import Callable

from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.memory.requests import Requests
from shoal.frontier.politeness import Host, apply_update
from shoal.ports import HostState, HostUpdate

Facts = dict[str, tuple[bytes, float]]
"""Small facts and when each of them expires."""


class MemoryHosts:
    """See `shoal.ports.Hosts`."""

    def __init__(self, requests: Requests, hosts: dict[str, Host], facts: Facts, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._hosts = hosts
        self._facts = facts
        self._clock = clock

    async def update_host(self, host: str, update: HostUpdate) -> None:
        is_default = host == DEFAULT_HOST
        known = self._hosts.setdefault(host, Host(host)) if is_default else self._requests.lane(host).host
        apply_update(self._hosts, known, update, self._clock())

    async def host_states(self, limit: int = 100) -> list[HostState]:
        return self._requests.lanes.states(self._clock(), limit)

    async def host_state(self, host: str) -> HostState:
        return self._requests.lanes.state(self._hosts.get(host, Host(host)), self._clock())

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        now = self._clock()
        for old in [old for old, (_, until) in self._facts.items() if until <= now]:
            del self._facts[old]
        self._facts[key] = (value, now + ttl)

    async def recall(self, key: str) -> bytes | None:
        value, until = self._facts.get(key, (None, 0.0))
        return value if until > self._clock() else None
