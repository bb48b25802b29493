"""The runs that schedules create. A run of a fleet has the settings that its workers read. A run of a server has all
that a server needs to work on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from shoal.errors import ConfigError, RunError
from shoal.ports import Run
from shoal.runs.orchestrator import Chosen, Orchestrator
from shoal.runs.start import queued_run
from shoal.runs.trust import check_arguments
from shoal.schedules.definitions import check_settings, usable_settings
from shoal.schedules.firing import MakeRun
from shoal.schedules.schedule import Schedule


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
            found = msgspec.convert(dict(run.settings), cls)
            check_arguments(run.run_id, found.arguments)
            check_settings(found.settings)
        except (msgspec.ValidationError, ConfigError) as exc:
            raise RunError(f"run {run.run_id} has invalid settings: {exc}") from exc
        return found

    async def choose(self, orchestrator: Orchestrator) -> Chosen:
        """Create its spider. Importing the file may be slow, so a thread does it."""
        return await asyncio.to_thread(
            orchestrator.choose, self.registered, self.arguments, "single", usable_settings(self.settings)
        )


def run_maker(make_orchestrator: Callable[[], Orchestrator], networks: Sequence[str]) -> MakeRun:
    """Return a function that makes the runs of schedules with the spiders of a registry. ``networks``: the only private
    networks that workers of a fleet may contact. ShoalError if the spider does not exist or cannot be created."""

    async def make_run(schedule: Schedule, due: float) -> Run:
        definition, run_id = schedule.definition, schedule.run_id_at(due)
        settings = usable_settings(definition.settings)
        chosen = await asyncio.to_thread(
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
            run_id=run_id, spider=chosen.spider.spider_name(), state="queued", created_at=time.time(),
            settings=msgspec.to_builtins(own), project=schedule.project,
        )  # fmt: skip

    return make_run
