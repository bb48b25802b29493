"""The hosts of a SQLite file, as one run sees them, and the facts that all runs share."""

from __future__ import annotations

from collections.abc import Callable

from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.politeness import apply_update
from shoal.frontier.sqlite.lanes import SharedHosts, StoredLanes
from shoal.frontier.sqlite.run_file import RunFile
from shoal.ports import HostState, HostUpdate


class SQLiteHosts:
    """See `shoal.ports.Hosts`."""

    def __init__(self, run: RunFile, hosts: SharedHosts, lanes: StoredLanes, reload: Callable[[], None]) -> None:
        """``reload`` reads the lanes and leases of the run from the file."""
        self._file = run
        self._hosts = hosts
        self._lanes = lanes
        self._reload = reload

    async def update_host(self, host: str, update: HostUpdate) -> None:
        def step() -> None:
            known = self._hosts.load(host) if host == DEFAULT_HOST else self._lanes.lane(host).host
            apply_update(self._hosts.by_name, known, update, self._file.clock())
            self._hosts.save([known])

        await self._file.file.write(step)

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """In a file that is opened readonly, only requests of this run count as in flight."""

        def step() -> list[HostState]:
            self._refresh()
            return self._lanes.states(self._file.clock(), limit)

        return await self._file.read(step)

    async def host_state(self, host: str) -> HostState:
        def step() -> HostState:
            self._refresh()
            return self._lanes.state(host, self._file.clock())

        return await self._file.read(step)

    def _refresh(self) -> None:
        """Reload the hosts of a file that is opened readonly, because another process writes to it."""
        if self._file.file.readonly:
            self._hosts.forget()
            self._reload()

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        def step() -> None:
            now = self._file.clock()
            self._file.db.execute("DELETE FROM note WHERE until <= ?", (now,))
            self._file.db.execute("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", (key, value, now + ttl))

        await self._file.file.write(step)

    async def recall(self, key: str) -> bytes | None:
        def step() -> bytes | None:
            sql = "SELECT value FROM note WHERE key = ? AND until > ?"
            row = self._file.db.execute(sql, (key, self._file.clock())).fetchone()
            return row[0] if row else None

        return await self._file.read(step)
