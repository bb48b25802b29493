"""Judges schedules at the store, from what ``docs/schedules.md`` promises and the moments at which they are due."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Struct

from shoal.operations.notifications.messages import Report
from shoal.operations.schedules.schedule import Definition, Schedule, schedule_of_run
from shoal.ports import Run, RunState
from shoal.testing.simulation.moments import Timing
from shoal.testing.simulation.store import StoreJudge

if TYPE_CHECKING:
    from shoal.testing.simulation.store import Call
    from shoal.testing.simulation.world import World

LATE = 60.0
"""A time counts as missed after a minute."""
_decode_schedule = msgspec.msgpack.Decoder(Schedule).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


class Version(Struct):
    """A schedule as the store had it from a moment on."""

    at: float
    """In the time of the loop."""
    by: str
    """The process that wrote it."""
    schedule: Schedule | None
    """None: it was removed."""


class Started(Struct):
    """A run of a schedule."""

    run_id: str
    schedule: str
    life: int
    """The number of the schedule of this name."""
    at: float
    is_of_server: bool
    """Whether a server works on it, not a fleet."""
    state: RunState = "queued"
    ended_at: float = inf
    deleted_at: float = inf


class ScheduleJudge(StoreJudge):
    """Each moment starts one run, or none if the policies of its schedule say so."""

    methods = frozenset({"put_document", "create_run", "transition", "delete_run"})

    def __init__(self, world: World, project: str, patience: float, *, has_true_clocks: bool) -> None:
        """``patience``: how many seconds may pass between a decision of a server and its effect in the store.
        ``has_true_clocks``: no clock is wrong."""
        self.versions: dict[str, list[Version]] = {}
        self.runs: dict[str, Started] = {}
        self.watched_since: float | None = None
        """When a server first watched the store for problems."""
        self.confirmed: dict[tuple[str, str], float] = {}
        """When the store knew that a channel has a message: by the message's id and the channel's name."""
        self._waiting: dict[str, set[tuple[str, str]]] = {}
        """The messages of each problem that wait."""
        self._world = world
        self._prefix = f"schedule/{project}/"
        self._patience = patience
        self._has_true_clocks = has_true_clocks
        self._written: set[bytes] = set()
        """The versions of all documents that were written."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.versions = {name: list(versions) for name, versions in self.versions.items()}
        twin.runs = {run_id: msgspec.structs.replace(run) for run_id, run in self.runs.items()}
        twin.confirmed, twin._written = dict(self.confirmed), set(self._written)
        twin._waiting = {key: set(messages) for key, messages in self._waiting.items()}
        return twin

    def after_rewind(self, before: Self) -> Self:
        return self

    # -- what happens

    def note(self, call: Call, arguments: tuple[Any, ...], result: Any) -> None:
        if call.method == "put_document":
            key, value, _, version, run = arguments
            if result and version not in self._written:
                self._written.add(version)
                self._note_document(call.caller.name, key, value)
                if run is not None:
                    self._note_run(call, key.removeprefix(self._prefix), run)
        elif call.method == "create_run":
            if arguments[0].run_id not in self.runs and (name := schedule_of_run(dict(arguments[0].settings))):
                self._note_run(call, name, arguments[0])
        elif (run := self.runs.get(arguments[0])) is not None:
            if call.method == "delete_run":
                run.deleted_at = self._now
                run.ended_at = min(run.ended_at, self._now)
            elif run.state != result.state:
                run.state = result.state
                run.ended_at = self._now if run.state in ("finished", "cancelled") else inf
                self._world.note(f"run {run.run_id} is {run.state}")

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    def _note_document(self, process: str, key: str, value: bytes | None) -> None:
        if key.startswith(self._prefix):
            schedule = None if value is None else _decode_schedule(value)
            self.versions.setdefault(key.removeprefix(self._prefix), []).append(Version(self._now, process, schedule))
        elif key.startswith("watch/") and self.watched_since is None:
            self.watched_since = self._now
        elif key.startswith("problem/"):
            outbox = () if value is None else _decode_report(value).outbox
            waiting = {(outgoing.message.message_id, outgoing.channel) for outgoing in outbox}
            for message in self._waiting.pop(key, set()) - waiting:
                self.confirmed.setdefault(message, self._now)
            self._waiting[key] = waiting

    def _note_run(self, call: Call, name: str, run: Run) -> None:
        """A run is created, or would be if there were none of its name."""
        process, require = call.caller, self._world.require
        self._world.note(f"{process.name} starts {run.run_id}")
        require(run.run_id not in self.runs or not self._has_true_clocks, f"{run.run_id} is started a second time")
        known = self.runs.get(run.run_id)
        if known is not None and known.deleted_at == inf:
            return
        is_repeat = known is not None and self._has_true_clocks  # a wrong clock may forget a run that was deleted
        require(not is_repeat, f"{run.run_id} is started a second time, after it was deleted")
        before = [version.schedule for version in self.versions.get(name, [])[:-1]][-1:]
        schedule, life = before[0] if before else None, self._life_of(name)
        # A store that goes back may forget that the earlier run was cancelled a moment ago.
        may_forget = any(at > self._now - self._patience for at in self._world.server.restored_at)
        for other in self.runs.values():
            is_active = other.schedule == name and other.life == life and other.ended_at == inf and not may_forget
            require(not is_active, f"{run.run_id} is started while {other.run_id} is active")
        self.runs[run.run_id] = Started(run.run_id, name, life, self._now, "registered" in run.settings)
        if schedule is None:
            require(False, f"{run.run_id} is started, and its schedule does not exist")
        elif (moment := _moment_of_run(schedule, run.run_id)) is not None:
            require(not schedule.paused, f"{run.run_id} is started while its schedule is paused")
            require(schedule.orphaned_at is None, f"{run.run_id} is started while its schedule is orphaned")
            offset = max(process.max_wall_offset for process in self._world.processes)
            clock = self._world.epoch + self._now + offset  # who waits may have been told so by a wrong clock
            require(clock >= moment, f"{process.name} starts {run.run_id} {moment - clock:.3f} s early")
            planned = _timing(schedule).between(moment - 1, moment)
            require(planned == [moment], f"{run.run_id} is started, which is not a time of {_timing(schedule)}")

    def _life_of(self, name: str) -> int:
        return sum(version.schedule is None for version in self.versions.get(name, []))

    # -- the verdict

    @property
    def active(self) -> list[Started]:
        """The runs that have not ended."""
        return [run for run in self.runs.values() if run.ended_at == inf]

    def judge(self, end: float, since_calm: float) -> None:
        """AssertionError if a law is broken. ``end``: until when schedules were at work, in the time of the loop.
        ``since_calm``: since when nothing failed, and servers were at work."""
        for name in self.versions:
            for segment in self._segments(name, end):
                _Verdict(self, name, segment, since_calm).judge()
        self._judge_cancelled()

    def _segments(self, name: str, end: float) -> Iterator[list[Version]]:
        """The times in which a schedule had the same timing and was not paused. The last version of each one is what
        ended it."""
        segment: list[Version] = []
        for version in [version for version in self.versions[name] if version.at < end]:
            schedule, last = version.schedule, segment[-1].schedule if segment else None
            is_same = schedule is not None and last is not None and schedule.definition.timing == last.definition.timing
            if segment and (not is_same or schedule is None or schedule.paused):
                yield [*segment, version]
                segment = []
            if schedule is not None and not schedule.paused:
                segment.append(version)
        if segment:
            yield [*segment, Version(end, "", None)]

    def _judge_cancelled(self) -> None:
        """A run is cancelled for another one, if the policy says so."""
        for run in self.runs.values():
            if run.state != "cancelled":
                continue
            allowed = [
                version.schedule.definition.overlap
                for version, following in pairwise([*self.versions[run.schedule], Version(inf, "", None)])
                if version.schedule is not None and following.at > run.ended_at - self._patience
                if version.at < run.ended_at
            ]
            assert "cancel" in allowed, f"{run.run_id} is cancelled, and the policy is {allowed}"

    def was_active(self, name: str, life: int, since: float, until: float) -> bool:
        """Whether a run of a schedule was active at some time between two moments."""
        return any(
            run.schedule == name and run.life == life and run.at <= until and run.ended_at >= since
            for run in self.runs.values()
        )


class _Verdict:
    """Judges the moments of one segment."""

    def __init__(self, judge: ScheduleJudge, name: str, segment: list[Version], since_calm: float) -> None:
        assert segment[0].schedule is not None
        self._judge = judge
        self._name = name
        self._segment = segment[:-1]
        self._end = segment[-1].at
        self._since_calm = since_calm
        self._timing = Timing.of(segment[0].schedule.definition.timing)
        versions = judge.versions[name]
        self._life = sum(version.schedule is None for version in versions[: versions.index(segment[0])])

    def judge(self) -> None:
        world, first = self._judge._world, self._segment[0]
        moments = self._timing.between(world.epoch + first.at, world.epoch + self._end)
        for moment in moments:
            self._judge_moment(moment, moment - world.epoch)
        if self._judge._has_true_clocks:
            self._judge_counts()
            self._judge_early_moments()

    def _run_of(self, moment: float) -> Started | None:
        schedule = self._segment[0].schedule
        assert schedule is not None
        return self._judge.runs.get(schedule.run_id_at(moment))

    def _judge_moment(self, moment: float, due: float) -> None:
        """``due``: the moment in the time of the loop."""
        judge = self._judge
        decision = next(
            (
                pair
                for pair in pairwise(self._segment)
                if pair[1].schedule is not None and pair[1].schedule.last >= moment
            ),
            None,
        )
        if decision is None:
            self._judge_undecided(moment, due)
            return
        before, after = decision
        assert before.schedule is not None
        assert after.schedule is not None
        if not judge._has_true_clocks:
            return
        definition = before.schedule.definition
        run = self._run_of(moment)
        if run is None and after.schedule.waiting != moment:
            self._judge_absent(moment, due, definition, before, after)
        elif run is not None and run.at <= after.at:
            self._judge_started(moment, due, definition, after)
        self._judge_delay(moment, due, definition, after)

    def _judge_undecided(self, moment: float, due: float) -> None:
        """Nobody has decided about a moment until its schedule was paused, changed or removed, or the end."""
        last = self._segment[-1].schedule
        assert last is not None
        since = max(due + last.definition.jitter, self._since_calm, self._segment[0].at)
        is_blocked = last.definition.missed == "all" and self._judge.was_active(
            self._name, self._life, self._end - self._judge._patience, self._end
        )
        is_handled = last.orphaned_at is not None or is_blocked or last.last >= moment
        is_lost = not is_handled and self._end - since > _REACTION
        assert not is_lost, f"{self._name}: {moment} is lost; it was due {self._end - due:.1f} s before the end"

    def _judge_absent(self, moment: float, due: float, definition: Definition, before: Version, after: Version) -> None:
        """A moment has no run. The policies must say so."""
        judge, world = self._judge, self._judge._world
        now = world.epoch + after.at
        was_active = judge.was_active(self._name, self._life, after.at - judge._patience, after.at)
        may_skip = definition.overlap in ("skip", "wait") and was_active
        is_missed = now - moment > LATE or self._timing.following(moment) <= now
        assert after.schedule is not None
        is_last = self._timing.following(moment) > after.schedule.last
        may_miss = is_missed and (definition.missed == "none" or (definition.missed == "one" and not is_last))
        was_removed = before.schedule is not None and before.schedule.waiting == moment
        assert may_skip or may_miss or was_removed, (
            f"{self._name}: {moment} has no run; {definition} decided {after.at - due:.3f} s after it"
        )

    def _judge_started(self, moment: float, due: float, definition: Definition, after: Version) -> None:
        """A moment has started a run at once. It must not be one that was missed."""
        patience = self._judge._patience
        late = after.at - due - definition.jitter
        if definition.missed == "none":
            assert late <= LATE + patience, f"{self._name}: {moment} starts {late:.1f} s late; the policy is none"
        if definition.missed in ("none", "one"):
            following = self._timing.following(moment) - self._judge._world.epoch
            is_newest = following + definition.jitter > after.at - patience
            assert is_newest, f"{self._name}: {moment} starts, and a later time is missed, too"

    def _judge_delay(self, moment: float, due: float, definition: Definition, after: Version) -> None:
        """While nothing fails, moments are not late."""
        since = max(due + definition.jitter, self._since_calm, self._segment[0].at)
        late = after.at - since
        is_waiting = definition.missed == "all" and self._judge.was_active(
            self._name, self._life, after.at - self._judge._patience, after.at
        )
        was_orphaned = any(version.schedule and version.schedule.orphaned_at for version in self._segment)
        assert late <= _REACTION or is_waiting or was_orphaned, (
            f"{self._name}: {moment} was decided {late:.1f} s late, and nothing failed"
        )

    def _judge_counts(self) -> None:
        """Each moment is counted once: as fired, skipped or missed."""
        for before, after in pairwise(self._segment):
            old, new = before.schedule, after.schedule
            assert old is not None
            assert new is not None
            moments = self._timing.between(old.last, new.last)
            counted = sum(getattr(new, name) - getattr(old, name) for name in ("fired", "skipped", "missed"))
            counted += (new.waiting is not None) - (old.waiting is not None)
            is_beside = new.last == old.last and counted == 1  # somebody ran it now
            is_limited = len(moments) > _MAX_COUNTED <= counted  # after a long outage, not all are counted
            assert is_beside or is_limited or counted == len(moments), (
                f"{self._name}: {counted} of {len(moments)} moments are counted between {old} and {new}"
            )

    def _judge_early_moments(self) -> None:
        """New times count from now, and times during a pause are skipped."""
        judge, first = self._judge, self._segment[0]
        assert first.schedule is not None
        for run in judge.runs.values():
            if run.schedule == self._name and first.at <= run.at < self._end:
                moment = _moment_of_run(first.schedule, run.run_id)
                is_early = moment is not None and moment <= judge._world.epoch + first.at - judge._patience
                assert not is_early, f"{run.run_id} is of a time before its schedule was made, changed or resumed"


_MAX_COUNTED = 1000
_REACTION = 14.0
"""Seconds within which servers see what was changed, and do what is due."""


def _timing(schedule: Schedule) -> Timing:
    return Timing.of(schedule.definition.timing)


def _moment_of_run(schedule: Schedule, run_id: str) -> float | None:
    """The moment in the name of a run; None for one that somebody started beside the times."""
    text = run_id.removeprefix(schedule.run_prefix)
    if "-" in text:
        return None
    return datetime.strptime(text, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
