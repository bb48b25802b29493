"""What goes wrong in a simulated world, drawn from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from shoal.testing.simulation.loop import Process
from shoal.testing.simulation.world import World

RATES = ("loss", "lateness", "repetition", "disk-late", "site")
"""Faults that messages, threads and requests have at random."""
EVENTS = (*("kill", "freeze", "power", "away", "restart", "rewind", "disk-full", "clock", "output-back", "logout"),)
"""Faults that happen at a moment."""
FAULTS = (*RATES, *EVENTS)
_BETWEEN = 4.0
"""Seconds between two events, on average."""
_MAX_LOGOUTS = 3
"""A page that meets a fourth one fails, as documented: it seems to be logged out always."""


class Faults:
    """Makes things fail for a while. `shoal.testing.simulation.world.World` says what each of them means."""

    def __init__(self, world: World, kinds: Collection[str], file: Path, note: Callable[[str], None]) -> None:
        """``kinds``: see `FAULTS`. ``file``: an output that loses what was not synced when the power fails. ``note``:
        called with each event."""
        self._world = world
        self._kinds = kinds
        self._file = file
        self._note = note
        self.count = 0
        """How many events have happened."""
        self.logouts = 0
        self._events: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "power": self._cut_power,
            "away": self._go_away,
            "restart": self._restart,
            "rewind": self._rewind,
            "disk-full": self._fill_disk,
            "clock": self._step_clock,
            "output-back": self._set_output_back,
            "logout": self._log_out,
        }

    async def run(self, seconds: float) -> None:
        """Let things fail. At the end nothing fails any more."""
        world, random = self._world, self._world.random
        self._set_rates(1.0)
        chosen = [event for name, event in self._events.items() if name in self._kinds]
        end = world.loop.time() + seconds
        while world.loop.time() < end:
            await asyncio.sleep(random.expovariate(1 / _BETWEEN))
            if chosen:
                self.count += 1
                await random.choice(chosen)()
        self._end()
        self._note("nothing fails any more")

    def _end(self) -> None:
        self._set_rates(0.0)
        self._world.disk.is_full = self._world.server.is_away = False
        for process in self._world.processes:
            process.wall_offset = 0.0
            process.thaw()

    def _set_rates(self, factor: float) -> None:
        def rate(kind: str, share: float) -> float:
            return share * factor if kind in self._kinds else 0.0

        network, disk, site = self._world.network, self._world.disk, self._world.site
        network.loss, network.lateness = rate("loss", 0.03), rate("lateness", 0.02)
        network.repetition, disk.lateness = rate("repetition", 0.05), rate("disk-late", 0.05)
        site.failure_rate = rate("site", 0.1)

    def _victim(self) -> Process | None:
        alive = [process for process in self._world.processes if process.is_alive]
        return self._world.random.choice(alive) if alive else None

    async def _kill(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._note(f"kill {victim.name}")
            victim.kill()

    async def _freeze(self) -> None:
        victim = self._victim()
        if victim is not None:
            seconds = self._world.random.choice([0.5, 5.0, 8.0, 30.0])
            self._note(f"freeze {victim.name} for {seconds} s")
            victim.freeze()
            self._world.loop.call_later(seconds, victim.thaw)

    async def _cut_power(self) -> None:
        """All processes share a machine, apart from the servers."""
        for process in self._world.processes:
            if process.is_alive:
                process.kill()
        lost = self._world.disk.lose_power(self._file) if self._file.exists() else 0
        self._note(f"the power fails, and {lost} bytes of {self._file.name} are lost")

    async def _go_away(self) -> None:
        server, seconds = self._world.server, self._world.random.choice([0.5, 4.0, 15.0])
        self._note(f"the server is away for {seconds} s")
        server.is_away = True
        await asyncio.sleep(seconds)
        server.is_away = False

    async def _restart(self) -> None:
        if self._world.server.survives:
            self._note("the server is killed, and starts again")
            self._world.server.restart()

    async def _rewind(self) -> None:
        if self._world.server.restore():
            self._note("the store goes back")
        elif await self._world.server.list_runs():
            self._note("backup of the store")
            self._world.server.back_up()

    async def _fill_disk(self) -> None:
        self._note("the disk is full")
        self._world.disk.is_full = True
        await asyncio.sleep(self._world.random.choice([0.5, 5.0, 20.0]))
        self._world.disk.is_full = False
        self._note("the disk has room")

    async def _step_clock(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.wall_offset += self._world.random.choice([-3600.0, -5.0, 5.0, 3600.0, 1e6])
            victim.max_wall_offset = max(victim.max_wall_offset, victim.wall_offset)
            self._note(f"clock of {victim.name}: {victim.wall_offset:+.0f} s")

    async def _set_output_back(self) -> None:
        if self._world.database.restore():
            self._note("the database goes back")
        else:
            self._note("backup of the database")
            self._world.database.back_up()

    async def _log_out(self) -> None:
        if self.logouts < _MAX_LOGOUTS:
            self._note("the site logs everybody out")
            self.logouts += 1
            self._world.site.end_sessions()
