"""`shoal schedule`: spiders that run at set times."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct
from msgspec.structs import asdict

from shoal.cli.help import Commands, argument, option
from shoal.cli.options import Argument, AsJson, FrontierUrl, Setting, given, pairs, settings_of
from shoal.cli.run_store import current_project, opened_store, record_action
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.operations.schedules.schedule import Schedule
    from shoal.operations.schedules.service import Schedules

Name = Annotated[str, argument("NAME", "The name of the schedule.")]
Cron = Annotated[str | None, option("--cron EXPRESSION", "Minute, hour, day of month, month and day of week.")]

app = Commands()
schedule_app = Commands(
    help="Run spiders at set times.\n\n"
    "Schedules are stored in the frontier, and `shoal serve` starts their runs. With several servers, each time starts "
    "one run. Schedules in shoal.toml ([schedules.NAME]) are added when a server starts.",
    epilog=('shoal schedule add nightly Books --cron "30 2 * * *"\nshoal schedule list --frontier redis://host'),
    no_args_is_help=True,
)
app.add_typer(schedule_app, name="schedule")


class _Definition(Struct, frozen=True, kw_only=True):
    """What runs, and when."""

    cron: Cron = None
    every: Annotated[str | None, option("--every INTERVAL", "An interval such as 90s, 15m, 1h30m or 1d.")] = None
    time_zone: Annotated[str | None, option("--time-zone ZONE", "The IANA time zone of --cron (default UTC).")] = None
    jitter: Annotated[float | None, option("--jitter SECONDS", "Start each run up to this much later.")] = None
    overlap: Annotated[
        str | None, option("--overlap POLICY", "If the previous run still works: skip (default), wait, or cancel it.")
    ] = None
    missed: Annotated[
        str | None, option("--missed POLICY", "For times while no server ran, start one run (default), all or none.")
    ] = None
    keep: Annotated[int | None, option("--keep N", "Keep N ended runs, and delete older ones (default: all).")] = None
    arguments: Argument = []
    settings: Setting = []

    def values(self, spider: str | None) -> dict[str, object]:
        """The keys of a definition that are on the command line."""
        arguments, settings = pairs(self.arguments, "-a"), pairs(self.settings, "--set")
        return given(**{**asdict(self), "spider": spider, "arguments": arguments, "settings": settings})


@asynccontextmanager
async def _opened(frontier: str | None, what: str = "", name: str = "") -> AsyncIterator[Schedules]:
    """The schedules of a frontier. Afterwards, ``what`` was done to the schedule ``name`` is recorded. Empty: nothing
    was changed."""
    from shoal.operations.schedules.service import Schedules

    async with opened_store(frontier, may_create=what == "add schedule") as store:
        schedules = Schedules(store, current_project())
        yield schedules
        if what:
            await record_action(store, what, name, project=schedules.project)


@schedule_app.add(
    examples="""
    shoal schedule add nightly Books --cron "30 2 * * *" --time-zone Europe/Berlin
    shoal schedule add often Books --every 15m -a category=travel --overlap wait
    shoal schedule add daily Books --every 1d --frontier redis://host
    """
)
async def add(
    name: Name,
    spider: Annotated[str, argument("SPIDER", "A name from [spiders] in shoal.toml.")],
    definition: _Definition = _Definition(),
    frontier: FrontierUrl = None,
) -> None:
    """Add a schedule for a spider of shoal.toml."""
    from shoal.operations.schedules.definitions import make_definition
    from shoal.runs.orchestrator import Registry

    checked = make_definition(name, definition.values(spider), Registry.load())

    async with _opened(frontier, "add schedule", name) as schedules:
        added = await schedules.add(name, checked)
        print(f"schedule {name} is added; its first run is due {_moment(added.next_due, added)}")


@schedule_app.add(
    examples="""
    shoal schedule change nightly --cron "0 4 * * *" --frontier redis://host
    shoal schedule change nightly --spider Books --keep 10 --overlap wait
    shoal schedule change nightly --reset keep --reset arguments
    """
)
async def change(
    name: Name,
    spider: Annotated[str | None, option("--spider SPIDER", "A name from [spiders] in shoal.toml.")] = None,
    definition: _Definition = _Definition(),
    reset: Annotated[list[str], option("--reset KEY", "Restore the default of a key, such as keep. Repeatable.")] = [],
    frontier: FrontierUrl = None,
) -> None:
    """Change what a schedule runs, or when.

    Options that you leave out stay as they are. New times count from now. `-a` replaces all arguments, `--set` all
    settings. A schedule that is in shoal.toml is changed there.
    """
    values = definition.values(spider)
    if not values and not reset:
        raise ConfigError("nothing to change: pass an option, such as --cron or --keep")

    async with _opened(frontier, "change schedule", name) as schedules:
        from shoal.operations.schedules.definitions import change_definition
        from shoal.runs.orchestrator import Registry

        current = (await schedules.get(name)).definition
        names = [key.replace("-", "_") for key in reset]
        changed = change_definition(name, current, values, names, Registry.load())
        schedule = await schedules.add(name, changed, replaces=True)
        print(f"schedule {name} is changed; its next run is due {_moment(schedule.next_due, schedule)}")


@schedule_app.add("list", examples="shoal schedule list --frontier redis://host")
async def list_schedules(frontier: FrontierUrl = None, as_json: AsJson = False) -> None:
    """List the schedules of the project."""

    async with _opened(frontier) as schedules:
        from shoal.operations.schedules.schedule import describe_timing
        from shoal.operations.schedules.service import describe

        described = [(schedule, await describe(schedules, schedule)) for schedule in await schedules.list_all()]
        if as_json:
            for _, page in described:
                print(json.dumps(page))
            return
        print(f"{'name':<20} {'spider':<16} {'when':<30} {'next':<20} last run")
        for schedule, page in described:
            due = _moment(page["next"], schedule)
            following = "orphaned" if schedule.orphaned_at else "paused" if schedule.paused else due
            last = f"{schedule.run_id} ({page['run_state'] or 'deleted'})" if schedule.run_id else "none"
            error = f"; {schedule.error}" if schedule.error else ""
            if schedule.orphaned_at is not None:
                since = _moment(schedule.orphaned_at, schedule)
                error += f"; since {since} no server has it in its shoal.toml"
                error += f"; `shoal schedule rm {schedule.name}` removes it"
            timing = describe_timing(schedule.definition)
            print(f"{schedule.name:<20} {schedule.definition.spider:<16} {timing:<30} {following:<20} {last}{error}")


@schedule_app.add(examples="shoal schedule show nightly --frontier redis://host")
async def show(name: Name, frontier: FrontierUrl = None, as_json: AsJson = False) -> None:
    """Show a schedule, its next times and its last runs."""

    async with _opened(frontier) as schedules:
        from itertools import islice

        from shoal.operations.schedules.schedule import each_after
        from shoal.operations.schedules.service import describe

        schedule = await schedules.get(name)
        page = await describe(schedules, schedule)
        if as_json:
            print(json.dumps(page))
            return
        page["next"] = None if page["next"] is None else _moment(page["next"], schedule)
        for key in ("waiting", "fired_at", "missed_at", "orphaned_at"):
            page[key] = None if page[key] is None else _moment(page[key], schedule)
        for key, value in page.items():
            if value not in (None, "", {}):
                print(f"{key.replace('_', ' '):<14} {value}")
        if not schedule.paused and schedule.orphaned_at is None:
            upcoming = islice(each_after(schedule.definition.times, max(schedule.last, schedules.now())), 5)
            print(f"{'times':<14} {', '.join(_moment(due, schedule) for due in upcoming)}")
        for run in (await schedules.runs(name))[:5]:
            print(f"{'run':<14} {run.run_id} ({run.state})")


@schedule_app.add(examples="shoal schedule pause nightly --frontier redis://host")
async def pause(name: Name, frontier: FrontierUrl = None) -> None:
    """Start no more runs until you resume the schedule."""

    async with _opened(frontier, "pause schedule", name) as schedules:
        await schedules.pause(name)
        print(f"schedule {name} is paused: `shoal schedule resume {name}` continues it")


@schedule_app.add(examples="shoal schedule resume nightly --frontier redis://host")
async def resume(name: Name, frontier: FrontierUrl = None) -> None:
    """Continue a paused schedule with its next time."""

    async with _opened(frontier, "resume schedule", name) as schedules:
        schedule = await schedules.resume(name)
        print(f"schedule {name} continues; its next run is due {_moment(schedule.next_due, schedule)}")


@schedule_app.add(examples="shoal schedule run nightly --frontier redis://host")
async def run(name: Name, frontier: FrontierUrl = None) -> None:
    """Start a run of a schedule now, in addition to its times.

    If the mode of the spider is "single", a server works on the run, otherwise workers do. The overlap policy applies.
    """

    async with _opened(frontier, "run schedule", name) as schedules:
        from shoal.cli.options import resolve
        from shoal.operations.schedules.runner import run_maker
        from shoal.runs.orchestrator import Orchestrator

        config = resolve(None, settings_of(frontier=frontier)).config
        fired = await schedules.run(name, run_maker(lambda: Orchestrator(frontier=config.frontier), config.serve.allow))
        if fired.run is None:
            print(f"schedule {name}: the run waits until the previous run has ended")
        else:
            cancelled = f"; run {fired.cancelled} is cancelled" if fired.cancelled else ""
            print(f"schedule {name}: run {fired.run.run_id} is queued{cancelled}")


@schedule_app.add("rm", examples="shoal schedule rm nightly --frontier redis://host")
async def remove(name: Name, frontier: FrontierUrl = None) -> None:
    """Delete a schedule. Its runs stay."""

    async with _opened(frontier, "delete schedule", name) as schedules:
        await schedules.remove(name)
        print(f"schedule {name} is deleted; its runs stay")


def _moment(moment: object, schedule: Schedule) -> str:
    """A time in the time zone of the schedule."""
    if not isinstance(moment, float | int):
        return "never"
    from datetime import datetime

    from shoal.operations.schedules.schedule import find_zone

    zone = find_zone(schedule.definition.time_zone)
    return datetime.fromtimestamp(moment, zone).strftime("%Y-%m-%d %H:%M:%S %Z")
