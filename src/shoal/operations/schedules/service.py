"""The schedules of a project in a store: for commands, the HTTP API, the dashboard and the loop in servers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from shoal.errors import DECODING_ERRORS, ConfigError, RunError
from shoal.messages import did_you_mean
from shoal.operations.actions import ActionLog
from shoal.operations.schedules.definitions import Declarations
from shoal.operations.schedules.schedule import (
    NAME,
    Definition,
    Origin,
    Schedule,
    Step,
    next_step,
    run_now,
    schedule_of_run,
)
from shoal.operations.snapshot import ACTIVE, OVER
from shoal.ports import Run, Store
from shoal.ports.documents import StoredValue, all_documents
from shoal.system import clock

# One atomic step of a schedule: it records the decision about a due time and creates the run, or does neither.


MakeRun: TypeAlias = Callable[[Schedule, float], Awaitable[Run]]
"""Makes the run for a due time of a schedule, without storing it."""
Decide: TypeAlias = Callable[[Schedule, bool], Step]
"""Decides the next step of a schedule. Its second argument says whether the newest run is active."""


class Fired(Struct, frozen=True):
    """What a step did. ``schedule`` is the schedule as it is stored now, or None if it does not exist. ``run`` is the
    run that this call created. ``cancelled`` is the earlier run that this call cancelled, or an empty string."""

    schedule: Schedule | None
    changed: bool = False
    run: Run | None = None
    cancelled: str = ""


async def fire(store: Store, key: str, now: float, make_run: MakeRun) -> Fired:
    """Do the next step of the schedule in the document ``key``.

    Many processes may call this at the same time, and repeat it after a crash or a lost answer: each due time gets one
    run. The schedule's last time and the new run are stored together, and only if no other process has changed the
    schedule meanwhile. The name of the run is made from the schedule and the time."""
    return await take_step(store, key, lambda schedule, active: next_step(schedule, now, active=active), make_run)


async def take_step(store: Store, key: str, decide: Decide, make_run: MakeRun) -> Fired:
    """Read the schedule, decide, and store the result with its run. If another process changed the schedule in the
    meantime, nothing is done: read it again."""
    stored = StoredValue(store, key, Schedule)
    schedule = await stored.read()
    if schedule is None:
        return Fired(None)
    active = bool(schedule.run_id) and await store.run_state(schedule.run_id) in ACTIVE
    step = decide(schedule, active)
    if step.after is schedule:
        return Fired(schedule)
    run = None if step.due is None else await make_run(schedule, step.due)
    cancelled = ""
    if step.cancels:
        with suppress(RunError):  # it has ended in the meantime
            await store.transition(schedule.run_id, "cancelled")
            cancelled = schedule.run_id
    is_mine = False

    def update(value: Schedule | None) -> tuple[Schedule | None, Run | None]:
        nonlocal is_mine
        is_mine = value == schedule
        return (step.after, run) if is_mine else (value, None)

    after = await stored.change_with_run(update)
    if is_mine and run is not None:
        log.info("schedule %s: run %s is created", schedule.name, run.run_id)
    return Fired(after, is_mine, run if is_mine else None, cancelled)


log = logging.getLogger("shoal.schedules")

_MAX_ERROR = 500


class Schedules:
    """The schedules of one project. Several processes may change them at the same time."""

    def __init__(self, store: Store, project: str, now: Callable[[], float] = lambda: clock.time()) -> None:
        self.store = store
        self.project = project
        self.now = now
        self.declarations = Declarations(store, project)
        self.foreign: frozenset[str] = frozenset()
        """Schedules of the files of other servers, which start their runs and work on them. Known after
        ``check_declarations``."""
        self._log = ActionLog(store, project)

    def key(self, name: str) -> str:
        """The key of a schedule's document."""
        return f"schedule/{self.project}/{name}"

    def _stored(self, name: str) -> StoredValue[Schedule]:
        return StoredValue(self.store, self.key(name), Schedule)

    # -- reading

    async def list_all(self) -> list[Schedule]:
        """All schedules, in the order of their names. Documents that another program has damaged are left out."""
        schedules: list[Schedule] = []
        for document in await all_documents(self.store, self.key("")):
            try:
                schedules.append(msgspec.msgpack.decode(document.value, type=Schedule))
            except DECODING_ERRORS as exc:
                log.error("schedule %s is unreadable: %s", document.key.removeprefix(self.key("")), exc)
        return schedules

    async def find(self, name: str) -> Schedule | None:
        """A schedule; None if there is none of this name."""
        return await self._stored(name).read() if NAME.fullmatch(name) else None

    async def get(self, name: str) -> Schedule:
        """A schedule. RunError suggests the nearest name."""
        return await self.find(name) or await self._refuse(name)

    async def runs(self, name: str, among: int | None = None) -> list[Run]:
        """The runs of a schedule, newest first. ``among``: search only this many of the newest runs of the project."""
        return _runs_of(name, await self.store.list_runs(project=self.project, limit=among))

    # -- changing

    async def add(self, name: str, definition: Definition, *, replaces: bool = False) -> Schedule:
        """Store a schedule. RunError if there is one of this name, unless ``replaces``, or if shoal.toml defines
        it."""

        def update(schedule: Schedule | None) -> Schedule:
            if schedule is not None and schedule.orphaned_at is not None:
                raise RunError(f"schedule {name!r} is orphaned: remove it first (`shoal schedule rm {name}`)")
            if schedule is not None and schedule.origin == "file":
                raise RunError(f"schedule {name!r} is defined in shoal.toml: edit the file, and restart the server")
            if schedule is not None and not replaces:
                raise RunError(
                    f"schedule {name!r} exists: change it with `shoal schedule change {name}`, or choose another name"
                )
            return self._defined(name, definition, "store", schedule)

        added = await self._stored(name).change(update)
        assert added is not None
        return added

    async def load(self, definitions: Mapping[str, Definition], source: str = "") -> None:
        """Store the schedules of a shoal.toml, and declare them. Those of other files stay. ``source``: the machine and
        the file."""
        self.declarations.declare(definitions.keys(), source)
        for name, definition in definitions.items():
            before = await self.find(name)
            await self._stored(name).change(partial(self._defined, name, definition, "file", source=source))
            if before is not None and before.origin == "file" and before.definition != definition:
                await self._record("change schedule", name, f"by {source}; it was defined by {before.source}")
        await self.check_declarations(await self.list_all())

    async def check_declarations(self, schedules: Sequence[Schedule]) -> None:
        """Mark schedules that no file of a server that runs has any more, and take back the mark of those that this
        server has."""
        await self.declarations.beat()
        foreign: dict[str, str] = {}
        for schedule in schedules:
            if schedule.origin == "file" and schedule.name not in self.declarations.names:
                foreign[schedule.name] = schedule.source
            elif schedule.orphaned_at is not None:
                await self._mark(schedule.name, None, "adopt schedule", f"{self.declarations.source} has it")
        self.foreign = frozenset(foreign)
        if foreign:
            for name in sorted(await self.declarations.orphans(foreign.items())):
                detail = f"no server has it in its shoal.toml; it was in {foreign[name] or 'an unknown file'}"
                await self._mark(name, self.now(), "orphan schedule", detail)

    async def _mark(self, name: str, orphaned_at: float | None, what: str, detail: str) -> None:
        """Set or take back the mark of an orphan, and record that, unless another server was first."""
        is_changed = False

        def update(schedule: Schedule | None) -> Schedule | None:
            nonlocal is_changed
            if schedule is None or schedule.origin != "file" or (schedule.orphaned_at is None) == (orphaned_at is None):
                is_changed = False
                return schedule
            is_changed = True
            return replace(schedule, orphaned_at=orphaned_at)

        await self._stored(name).change(update)
        if is_changed:
            log.warning("%s %s: %s", what, name, detail)
            await self._record(what, name, detail)

    async def _record(self, what: str, name: str, detail: str) -> None:
        await self._log.add(f"server on {socket.gethostname()}", what, name, detail)

    def _defined(
        self, name: str, definition: Definition, origin: Origin, schedule: Schedule | None, source: str = ""
    ) -> Schedule:
        """The schedule with this definition. New times count from now."""
        if schedule is None:
            return Schedule(
                name=name, project=self.project, definition=definition, origin=origin, last=self.now(), source=source
            )  # fmt: skip
        if (schedule.definition, schedule.origin, schedule.source) == (definition, origin, source):
            return schedule
        changed = replace(schedule, definition=definition, origin=origin, source=source)
        if schedule.definition != definition:
            changed = replace(changed, error="")
        if schedule.definition.timing != definition.timing:
            changed = replace(changed, last=self.now(), waiting=None)
        return changed

    async def pause(self, name: str) -> Schedule:
        """Start no runs until it is resumed. An active run continues."""
        return await self._change(name, lambda schedule: replace(schedule, paused=True, waiting=None))

    async def resume(self, name: str) -> Schedule:
        """Continue with the next time. Times during the pause are skipped."""
        return await self._change(
            name, lambda schedule: replace(schedule, paused=False, last=self.now()) if schedule.paused else schedule
        )

    async def remove(self, name: str) -> None:
        """Delete a schedule; its runs stay. RunError if the shoal.toml of a server that runs defines it."""
        found = await self.get(name)

        def update(current: Schedule | None) -> None:
            schedule = current or found
            if schedule.origin == "file" and schedule.orphaned_at is None:
                raise RunError(
                    f"schedule {name!r} is defined in shoal.toml: remove [schedules.{name}] there and restart the "
                    "server, or pause it"
                )

        await self._stored(name).change(update)

    async def run(self, name: str, make_run: MakeRun) -> Fired:
        """Start a run now, outside of the schedule's times. The overlap policy applies. RunError if it forbids the
        run."""

        def decide(schedule: Schedule, active: bool) -> Step:
            step = run_now(schedule, self.now(), active=active)
            if step is None:
                waits = " and another one waits already" if schedule.waiting is not None else ""
                raise RunError(
                    f"schedule {name!r}: run {schedule.run_id} has not ended{waits}, and overlap is "
                    f'"{schedule.definition.overlap}"; wait, or cancel that run first'
                )
            return step

        while True:
            fired = await take_step(self.store, self.key(name), decide, make_run)
            if fired.schedule is None:
                await self._refuse(name)
            if fired.changed:
                return fired

    async def report_error(self, name: str, error: str) -> None:
        """Record why a run could not start, or failed. The next run that starts clears it."""
        text = error[:_MAX_ERROR]
        with suppress(RunError):  # removed in the meantime
            await self._change(
                name, lambda schedule: schedule if schedule.error == text else replace(schedule, error=text)
            )

    async def delete_old_runs(self, schedule: Schedule) -> list[str]:
        """Delete ended runs beyond the number to keep, oldest first. Returns their names."""
        keep = schedule.definition.keep
        if keep is None:
            return []
        ended = _runs_of(schedule.name, await self.store.list_runs(project=self.project, states=OVER))
        deleted = []
        for run in ended[keep:]:
            with suppress(RunError):  # another server was first
                await self.store.delete_run(run.run_id)
                deleted.append(run.run_id)
        return deleted

    async def _change(self, name: str, update: Callable[[Schedule], Schedule]) -> Schedule:
        if not NAME.fullmatch(name):
            return await self._refuse(name)
        changed = await self._stored(name).change(lambda schedule: None if schedule is None else update(schedule))
        return changed if changed is not None else await self._refuse(name)

    async def _refuse(self, name: str) -> Schedule:
        names = [schedule.name for schedule in await self.list_all()]
        hint = did_you_mean(name, names) or f"; there are: {', '.join(names[:20]) or 'none'}"
        raise RunError(f"there is no schedule {name!r:.120}{hint}")


_SHOWN = (
    "origin source orphaned_at paused next waiting run_id run_state fired_at fired skipped missed_times missed_at error"
)
"""What `describe` shows of a schedule besides its name and definition, in this order."""


async def describe(schedules: Schedules, schedule: Schedule) -> dict[str, object]:
    """A schedule with its next time and the state of its newest run, for the HTTP API, the dashboard and commands."""
    state = await schedules.store.run_state(schedule.run_id) if schedule.run_id else None
    values = {**asdict(schedule), "next": None, "run_state": state, "missed_times": schedule.missed}
    with suppress(ConfigError):  # another program stored it
        values["next"] = schedule.next_due
    return {"name": schedule.name, **asdict(schedule.definition), **{name: values[name] for name in _SHOWN.split()}}


def _runs_of(name: str, runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if schedule_of_run(dict(run.settings)) == name]
