"""The loop in every server that starts the runs of schedules when they are due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from shoal.errors import ConfigError, FrontierError, RunError, ShoalError
from shoal.operations.schedules.definitions import check_settings, usable_settings
from shoal.operations.schedules.schedule import Schedule, wakes_at
from shoal.operations.schedules.service import MakeRun, Schedules, fire
from shoal.ports import Run
from shoal.runs.orchestrator import Chosen, Orchestrator
from shoal.runs.start import queued_run
from shoal.runs.trust import check_arguments
from shoal.system import clock, threads

log = logging.getLogger("shoal.schedules")

MAX_PAUSE = 10.0
"""The longest time between two checks, in seconds. Another server may have changed a schedule."""
_POLL_WAITING = 1.0
"""Seconds between two checks of a run that another one waits for."""
_MIN_PAUSE = 0.01
_MAX_STEPS = 1000
"""How many steps of one schedule are done before the others get a turn."""


class Launcher(Protocol):
    """Makes the runs of schedules, and makes sure that a server works on them."""

    def make_run(self, schedule: Schedule, due: float, /) -> Awaitable[Run]:
        """Make the run for a due time, without storing it. ShoalError if its spider cannot be used."""
        ...

    async def launch(self, run: Run) -> None:
        """Begin to work on a run that was just created, unless it is for a fleet."""
        ...

    async def cancelled(self, run_id: str) -> None:
        """Stop working on a run that was cancelled."""
        ...

    async def take_over(self) -> None:
        """Take over runs that no server works on, because it was killed or was at its limit."""
        ...


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class ScheduleRunner:
    """Starts the runs of a project's schedules. Every server has one; together they start each run once.

    Errors of the store are logged, and the loop continues. An error of one schedule does not hinder the others: it is
    recorded in that schedule, and its time stays due."""

    def __init__(
        self,
        schedules: Schedules,
        launcher: Launcher,
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = wait_for_event,
    ) -> None:
        """``wait`` sleeps until the event is set, or for this many seconds by the clock of ``schedules``."""
        self._schedules = schedules
        self._launcher = launcher
        self._wait = wait
        self._woken = asyncio.Event()
        self._is_away = False

    def wake(self) -> None:
        """Check the schedules now, because one was changed or a run has ended."""
        self._woken.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._woken.clear()
            try:
                pause = await self.step()
                self._is_away = False
            except FrontierError as exc:
                if not self._is_away:
                    log.error("schedules wait: %s", exc)
                self._is_away, pause = True, _POLL_WAITING
            except Exception:  # a defect must not end the loop
                log.exception("the schedules could not be checked")
                pause = MAX_PAUSE
            await self._wait(self._woken, pause)

    async def step(self) -> float:
        """Do everything that is due now. Returns the seconds until the next check."""
        pause = MAX_PAUSE
        schedules = await self._schedules.list_all()
        await self._schedules.check_declarations(schedules)
        for schedule in schedules:
            if schedule.name in self._schedules.foreign:  # its own servers have its spider
                continue
            try:
                pause = min(pause, await self._advance(schedule))
            except FrontierError:
                raise
            except ShoalError as exc:
                if schedule.error != str(exc):
                    log.error("schedule %s cannot start a run: %s", schedule.name, exc)
                await self._schedules.report_error(schedule.name, str(exc))
        await self._launcher.take_over()
        return max(pause, _MIN_PAUSE)

    async def _advance(self, schedule: Schedule) -> float:
        """Do the steps of one schedule that are due. Returns the seconds until its next one."""
        current, store = schedule, self._schedules.store
        for _ in range(_MAX_STEPS):
            if self._seconds_to(current) > 0 and current.waiting is None:
                break
            fired = await fire(store, self._schedules.key(current.name), self._schedules.now(), self._launcher.make_run)
            if fired.schedule is None:  # removed
                return MAX_PAUSE
            if fired.cancelled:
                await self._launcher.cancelled(fired.cancelled)
            if fired.run is not None:
                await self._launcher.launch(fired.run)
                await self._schedules.delete_old_runs(fired.schedule)
            if fired.schedule == current:
                return _POLL_WAITING  # it waits for a run to end
            current = fired.schedule
        return _POLL_WAITING if current.waiting is not None else max(0.0, self._seconds_to(current))

    def _seconds_to(self, schedule: Schedule) -> float:
        """The seconds until its next step, at most `MAX_PAUSE`."""
        now = self._schedules.now()
        at = wakes_at(schedule, now)
        return MAX_PAUSE if at is None else min(MAX_PAUSE, at - now)


# The runs that schedules create. A run of a fleet has the settings that its workers read. A run of a server has all
# that a server needs to work on it.


class ServerRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a run that a server works on. They are checked when they are read, because others may be able to
    write to the store."""

    schedule: str
    registered: str
    """The spider's name in the registry."""
    arguments: dict[str, object] = {}
    settings: dict[str, object] = {}

    @classmethod
    def of(cls, run: Run) -> ServerRun | None:
        """None for other runs. RunError if the settings are not allowed."""
        if "schedule" not in run.settings or "registered" not in run.settings:
            return None
        try:
            server_run = msgspec.convert(dict(run.settings), cls)
            check_arguments(run.run_id, server_run.arguments)
            check_settings(server_run.settings)
        except (msgspec.ValidationError, ConfigError) as exc:
            raise RunError(f"run {run.run_id} has invalid settings: {exc}") from exc
        return server_run

    async def choose(self, orchestrator: Orchestrator) -> Chosen:
        """Create its spider. Importing the file may be slow, so a thread does it."""
        return await threads.call(
            orchestrator.choose, self.registered, self.arguments, "single", usable_settings(self.settings)
        )


def run_maker(make_orchestrator: Callable[[], Orchestrator], networks: Sequence[str]) -> MakeRun:
    """Return a function that makes the runs of schedules with the spiders of a registry. ``networks``: the only private
    networks that workers of a fleet may contact. ShoalError if the spider does not exist or cannot be created."""

    async def make_run(schedule: Schedule, due: float) -> Run:
        definition, run_id = schedule.definition, schedule.run_id_at(due)
        settings = usable_settings(definition.settings)
        chosen = await threads.call(
            lambda: make_orchestrator().choose(definition.spider, definition.arguments, None, settings)
        )
        if chosen.mode == "distributed":
            return queued_run(
                chosen.spider, chosen.config, run_id, outputs=chosen.outputs, networks=networks, schedule=schedule.name
            )  # fmt: skip
        own = ServerRun(
            schedule=schedule.name, registered=definition.spider, arguments=definition.arguments,
            settings=check_settings(settings),
        )  # fmt: skip
        return Run(
            run_id=run_id, spider=chosen.spider.spider_name(), state="queued", created_at=clock.time(),
            settings=msgspec.to_builtins(own), project=schedule.project,
        )  # fmt: skip

    return make_run
