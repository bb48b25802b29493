"""Watches a store for problems, and reports them. Every server runs this loop; one server at a time is in charge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from shoal.config import Config
from shoal.errors import ConfigError, FrontierError
from shoal.frontier.memory.store import MemoryDocuments
from shoal.messages import did_you_mean
from shoal.operations.active_runs import Mark
from shoal.operations.facts import FactReader
from shoal.operations.notifications.channels import Channel, open_channels
from shoal.operations.notifications.delivery import (
    ChannelState,
    Delivery,
    limits_for,
    read_channel_states,
    read_reports,
)
from shoal.operations.notifications.messages import Report, make_test_message
from shoal.operations.notifications.settings import LoadedSettings, NotificationSettings, Rule, load_notifications
from shoal.operations.problem import Problem, ProblemLimits
from shoal.operations.problems import advance_marks, find_problems, schedule_missed, store_away, workers_back
from shoal.operations.schedules.service import Schedules
from shoal.operations.snapshot import SnapshotTaker, StoreSnapshot
from shoal.ports import Documents, Store
from shoal.ports.documents import StoredValue
from shoal.system import chance, clock

# Times of schedules at which no run began.


async def read_missed(schedules: Schedules, since: float) -> list[Problem]:
    """The last missed time of each schedule, and the last run that could not start. Nothing before ``since``. Times
    during a pause are not missed."""
    problems = []
    for schedule in await schedules.list_all():
        name, spider = schedule.name, schedule.definition.spider
        if schedule.missed_at is not None and schedule.missed_at >= since:
            times = f"{schedule.missed} of its times were" if schedule.missed > 1 else "One of its times was"
            reason = f"{times} missed so far, because no server was running or all were late."
            problems.append(schedule_missed(name, spider, schedule.missed_at, f"{reason} `shoal schedule show {name}`"))
        if schedule.error and schedule.fired_at is not None and schedule.fired_at >= since:
            reason = f"Run {schedule.run_id}: {schedule.error}"
            problems.append(schedule_missed(name, spider, schedule.fired_at, reason))
    return problems


log = logging.getLogger("shoal.notifications")

_TAKEOVER = 3.0
"""Another server takes over after this many intervals without a sign of the server in charge."""
_TIMEOUT = 30.0
_CLOSE_TIMEOUT = 2.0
_BAD_KINDS = ("failed", "few_items", "low_coverage")


class Watch(Struct, frozen=True, kw_only=True):
    """Which server is in charge. It changes this document with each check. The others see that, by their own clocks,
    and know that it is alive."""

    holder: str
    beat: int = 0
    since: float
    """When the store was watched for the first time. What happened before is not reported."""
    marks: dict[str, Mark] = {}


def watch_of(documents: Documents, project: str) -> StoredValue[Watch]:
    """Which server watches the runs of a project."""
    return StoredValue(documents, f"watch/{project}", Watch)


class Watcher:
    """Checks a store for problems while this server is in charge, and delivers messages."""

    def __init__(
        self,
        store: Store,
        config: Config,
        settings: NotificationSettings,
        channels: Mapping[str, Channel],
        name: str,
        *,
        without: Sequence[str] = (),
        clock: Callable[[], float] = lambda: clock.time(),
    ) -> None:
        """``name``: of this server, unique. ``without``: names of spiders whose runs are left out."""
        project = config.project_name
        limits = partial(limits_for, settings.rules.values())
        self._settings = settings
        self._name = name
        self._clock = clock
        self._limits = limits
        self._taker = SnapshotTaker(store, config, without=without)
        self._facts = FactReader(store, config, limits, without=without)
        self._schedules = Schedules(store, project)
        self._watch = watch_of(store, project)
        self._delivery = Delivery(store, channels, settings, project, name, self._is_in_charge)
        self._own_delivery = Delivery(MemoryDocuments({}), channels, settings, project, name)
        """For a problem that cannot be stored: the store is unavailable."""
        self._seen: tuple[str, int] | None = None
        self._seen_at = 0.0
        self._held: Watch | None = None
        """The document as this server wrote it last. None if another one is in charge."""
        self._marks: dict[str, Mark] = {}
        self._before: StoreSnapshot | None = None
        self._away_since: float | None = None
        self._answering_since: float | None = None
        """Since when all checks succeeded."""

    async def run(self) -> None:
        """Check and deliver until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self.check))
            tasks.create_task(self._repeat(self.deliver))

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._settings.check_every * chance.uniform(0.9, 1.1))
            try:
                await step()
            except Exception:  # the next one may succeed
                log.exception("a step of the notifications failed")

    async def release(self) -> None:
        """Let another server take over at once."""
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                if self._held is not None:
                    await self._watch.change(self._released)

    async def check(self) -> None:
        """Check for problems once, if this server is in charge."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                await self._check()
        except (FrontierError, TimeoutError) as exc:
            self._answering_since = None
            await self._note_away(str(exc) or "it did not answer in time")
        else:
            if self._away_since is not None:
                self._away_since = None
                await self._own_delivery.check([], self._clock())

    async def _check(self) -> None:
        now = self._clock()
        was_in_charge = self._held is not None
        self._held = held = await self._hold(now)
        if held is None:
            self._before = None
            return
        if not was_in_charge:
            self._marks = dict(held.marks)
            await self._delivery.load()
        snapshot, before = await self._taker.take(now), self._before
        self._answering_since = self._answering_since or now
        self._before, self._marks = snapshot, advance_marks(self._marks, snapshot)
        bad = {r.problem.run_id for r in self._delivery.reports.values() if r.problem.kind in _BAD_KINDS}
        facts = await self._facts.read(
            snapshot, since=held.since, marks=self._marks, bad=bad, answering_since=self._answering_since
        )
        missed = await read_missed(self._schedules, held.since)
        facts = replace(facts, others=(*facts.others, *missed, *self._delivery.failing_channels()))
        if before is not None:  # one snapshot alone cannot show that a problem is over
            problems = find_problems(snapshot, before, facts, self._limits)
            active = {run_snapshot.run.run_id for run_snapshot in snapshot.runs}
            await self._delivery.check(problems, now, active=active, alive=workers_back(snapshot, facts))

    async def deliver(self) -> None:
        """Send what is due, if this server is in charge."""
        now = self._clock()
        await self._own_delivery.deliver(now)
        if self._held is not None:
            with suppress(FrontierError):  # the next check notices it
                await self._delivery.deliver(now)

    async def _hold(self, now: float) -> Watch | None:
        """Stay in charge, or take over from a server that seems dead. None if another one is in charge."""
        watch = await self._watch.change(lambda watch: self._next_watch(watch, now))
        return watch if watch is not None and watch.holder == self._name else None

    def _next_watch(self, watch: Watch | None, now: float) -> Watch:
        if watch is None:
            return Watch(holder=self._name, since=now)
        if watch.holder == self._name:
            return replace(watch, beat=watch.beat + 1, marks=self._marks if self._held is not None else watch.marks)
        beat = (watch.holder, watch.beat)
        if beat != self._seen:
            self._seen, self._seen_at = beat, clock.monotonic()
        silence = clock.monotonic() - self._seen_at
        if watch.holder and silence < _TAKEOVER * self._settings.check_every:
            return watch
        return replace(watch, holder=self._name, beat=watch.beat + 1)

    def _released(self, watch: Watch | None) -> Watch | None:
        if watch is None or watch.holder != self._name:
            return watch
        return replace(watch, holder="", beat=watch.beat + 1, marks=self._marks)

    async def _is_in_charge(self) -> bool:
        watch = await self._watch.read()
        return watch is not None and watch.holder == self._name

    async def _note_away(self, reason: str) -> None:
        """Report that the store is unavailable, if this server was in charge. The others cannot know whether it did."""
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        if self._held is not None and now - self._away_since >= _TAKEOVER * self._settings.check_every:
            await self._own_delivery.check([store_away(self._away_since, reason)], now)


# Notifications for servers and commands: the loop, the reported problems, the channels, a test message.


class ChannelInfo(Struct, frozen=True):
    """A channel of the settings, and its state."""

    name: str
    type: str
    is_failing: bool
    state: ChannelState


class Notifications:
    """The notifications of one process. Without channels it does nothing."""

    def __init__(
        self,
        config: Config,
        loaded: LoadedSettings | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        active: bool = True,
    ) -> None:
        """ConfigError if the settings are invalid, or a channel lacks a secret or a library. Without ``active``, it
        opens no channel and needs no secret: it only shows what others report."""
        loaded = load_notifications() if loaded is None else loaded
        self._config = config
        self._settings = loaded.settings
        self._channels: dict[str, Channel] = open_channels(loaded, config, environ) if active else {}
        self._watcher: Watcher | None = None
        self._task: asyncio.Task[None] | None = None

    def limits(self, run_id: str, spider: str) -> ProblemLimits:
        """The limits for this run, beyond which something is a problem."""
        return limits_for(self._settings.rules.values(), run_id, spider)

    @property
    def rules(self) -> dict[str, Rule]:
        return self._settings.rules

    def start(self, store: Store, name: str, *, without: Sequence[str] = ()) -> None:
        """Watch a store, if there is a channel. ``name``: of this process, unique. ``without``: names of spiders whose
        runs are left out."""
        if self._channels:
            self._watcher = Watcher(store, self._config, self._settings, self._channels, name, without=without)
            self._task = asyncio.create_task(self._watcher.run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._watcher is not None:
            await self._watcher.release()
        for channel in self._channels.values():
            await channel.close()

    async def problems(self, documents: Documents) -> list[Report]:
        """What was reported in the last days: lasting problems first, then the newest."""
        reports = await read_reports(documents, self._config.project_name)
        return sorted(reports.values(), key=lambda report: (not report.is_open, -report.reported_at))

    async def channels(self, documents: Documents) -> list[ChannelInfo]:
        """All channels of the settings, with their state and without secrets."""
        tables, limit = self._settings.channels, self._settings.failing_after
        states = await read_channel_states(documents, self._config.project_name, tables)
        return [
            ChannelInfo(name, str(table.__struct_config__.tag), states[name].failures >= limit, states[name])
            for name, table in tables.items()
        ]

    async def watched_since(self, documents: Documents) -> float | None:
        """When a server began to watch this project. None if none has."""
        watch = await watch_of(documents, self._config.project_name).read()
        return None if watch is None else watch.since

    async def test(self, name: str | None = None) -> dict[str, str]:
        """Send a test message through one channel or all of them. Return for each why it was not delivered, or an empty
        string. ConfigError if there is no such channel."""
        if not self._channels and self._settings.channels:
            raise ConfigError("this server sends no notifications; ask one that was started with `shoal serve`")
        if not self._channels:
            raise ConfigError("no channel is configured: add [notifications.channels.NAME] to shoal.toml")
        if name is not None and name not in self._channels:
            hint = did_you_mean(name, list(self._channels)) or f"; the channels are: {', '.join(self._channels)}"
            raise ConfigError(f"there is no channel {name!r:.120}{hint}")
        message = make_test_message(chance.token_bytes(12).hex(), self._config.project_name)
        chosen = {key: channel for key, channel in self._channels.items() if name in (None, key)}
        errors = await asyncio.gather(*(channel.send(message) for channel in chosen.values()))
        return dict(zip(chosen, errors, strict=True))
