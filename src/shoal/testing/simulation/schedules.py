"""Servers that start the runs of schedules and send notifications while their world fails, and what must come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from msgspec import Struct

from shoal.api.server.jobs import Jobs, ScheduledRuns
from shoal.config import Config
from shoal.crawling import onion
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.frontier import open_store
from shoal.http import Request, Response
from shoal.operations.notifications import channels
from shoal.operations.notifications.settings import LoadedSettings, NotificationSettings, Rule, WebhookChannel
from shoal.operations.notifications.watcher import Notifications
from shoal.operations.schedules.runner import ScheduleRunner
from shoal.operations.schedules.schedule import Definition
from shoal.operations.schedules.service import Schedules
from shoal.ports import Run, Store
from shoal.runs import orchestrator
from shoal.runs.orchestrator import Orchestrator
from shoal.spider import Spider
from shoal.testing.simulation.faults import EVENTS, RATES, Faults
from shoal.testing.simulation.moments import ZONES, Timing, changes_of
from shoal.testing.simulation.processes import Supervisor
from shoal.testing.simulation.receiver import KEY, Receiver, SimulatedFetcher
from shoal.testing.simulation.schedule_judge import ScheduleJudge
from shoal.testing.simulation.world import SCHEME, World

PROJECT = "shoal"
_SPIDERS = """
[spiders.Pages]
file = "pages.py"
arguments = {{ urls = {urls} }}
[spiders.Fleet]
file = "fleet.py"
execution_mode = "distributed"
"""
_CHANNELS = ("ops", "log")
_PATIENCE = 2000.0
"""Seconds in which all runs must end, and all messages must arrive, when nothing fails any more."""
_SETTLING = 25.0
"""Seconds after the faults until servers are at work."""
_CLOSE = 10.0
_FAULTS = (
    *(fault for fault in RATES if fault != "site"),
    *(fault for fault in EVENTS if fault not in ("disk-full", "output-back", "logout", "power")),
    *("receiver", "receiver-down", "outage", "stop"),
)


class PagesSpider(Spider):
    """Fetches some pages of the site."""

    name = "pages"

    def __init__(self, urls: Sequence[str] = ()) -> None:
        super().__init__()
        self._urls = urls

    def start(self) -> Iterator[Request]:
        yield from map(Request, self._urls)

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}


class FleetSpider(PagesSpider):
    """The spider of runs that are for workers. Here, a fleet ends them without fetching pages."""

    name = "fleet"


class Action(Struct, frozen=True):
    """Something that a user does."""

    at: float
    what: str
    schedule: str
    definition: Definition | None = None


class SchedulesPlan(Struct, frozen=True):
    """What happens in a simulation of schedules."""

    zone: str
    change: float
    """When its clocks change."""
    before_change: float
    """Seconds from the start until then."""
    servers: int
    initial: dict[str, Definition]
    """Schedules that are there from the beginning."""
    files: tuple[dict[str, Definition], ...]
    """The schedules of each server's shoal.toml. The servers with the same number modulo their count share one."""
    actions: tuple[Action, ...]
    longest: float
    """How many seconds a run of the fleet lasts at most."""
    check_every: float
    retry_after: float
    seconds: float
    """How long the world fails."""
    calm: float
    """How long schedules go on after that."""
    faults: frozenset[str]

    @classmethod
    def draw(cls, world: World) -> SchedulesPlan:
        """A plan that the seed decides."""
        random = world.random
        zone = random.choice(ZONES)
        before = random.choice([30.0, 100.0, 600.0, 3000.0])
        change = random.choice(changes_of(zone) or (1_780_000_000.0,))
        seconds = random.choice([60.0, 150.0, 400.0])

        def definition() -> Definition:
            return _draw_definition(random, zone, change)

        names = [f"s{number}" for number in range(random.choice([1, 2, 4]))]
        actions = []
        for _ in range(random.choice([0, 0, 3, 10])):
            at, what = random.uniform(5.0, seconds), random.choice(["add", "change", "pause", "remove", "run"])
            made = definition() if what in ("add", "change") else None
            actions.append(Action(at, what, schedule := random.choice([*names, "s9"]), made))
            if what == "pause":
                actions.append(Action(at + random.choice([5.0, 40.0, 100.0]), "resume", schedule))
        actions.sort(key=lambda action: action.at)
        files = [{f"f{number}": definition()} for number in range(random.choice([0, 0, 1, 2]))]
        return cls(
            zone=zone,
            change=change,
            before_change=before,
            servers=random.choice([1, 2, 3]),
            initial={name: definition() for name in names},
            files=tuple(files),
            actions=tuple(actions),
            longest=random.choice([1.0, 10.0, 100.0]),
            check_every=random.choice([2.0, 10.0]),
            retry_after=random.choice([1.0, 30.0]),
            seconds=seconds,
            calm=random.choice([90.0, 200.0]),
            faults=frozenset(random.sample(_FAULTS, random.choice([0, 1, 2, 4, 8]))),
        )

    @property
    def has_true_clocks(self) -> bool:
        """Whether no clock is wrong."""
        return "clock" not in self.faults

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        fields["faults"] = sorted(self.faults)
        return f"SchedulesPlan({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _draw_definition(random: Random, zone: str, change: float) -> Definition:
    timing = Timing.draw(random, zone, change)
    cron, every, time_zone = timing.key
    return Definition(
        spider=random.choice(["Pages", "Fleet"]),
        cron=cron,
        every=every,
        time_zone=time_zone,
        jitter=random.choice([0.0, 0.0, 0.0, 3.0 if timing.seconds else 40.0]),
        overlap=cast(Any, random.choice(["skip", "wait", "cancel"])),
        missed=cast(Any, random.choice(["one", "one", "all", "none"])),
        keep=random.choice([None, None, 0, 2]),
        settings={"download_delay": random.choice([0.0, 1.0, 8.0])},
    )


class ScheduleFaults(Faults):
    """Faults of servers that start runs and send messages."""

    def __init__(self, schedules: ScheduledWorld) -> None:
        world = schedules.world
        super().__init__(world, schedules.plan.faults, world.folder / "none", world.note)
        self._schedules = schedules
        self._events |= {
            "receiver-down": self._take_receiver_down,
            "outage": self._kill_all,
            "stop": self._stop_one,
        }

    def _set_rates(self, factor: float) -> None:
        super()._set_rates(factor)
        self._schedules.receiver.failure_rate = 0.4 * factor if "receiver" in self._kinds else 0.0

    async def _take_receiver_down(self) -> None:
        seconds = self._world.random.choice([5.0, 60.0])
        self._note(f"the receiver is down for {seconds} s")
        self._schedules.receiver.is_down = True
        await asyncio.sleep(seconds)
        self._schedules.receiver.is_down = False

    async def _kill_all(self) -> None:
        """Nobody starts the servers for a while."""
        seconds = self._world.random.choice([10.0, 50.0, 130.0, 1000.0, 5000.0])
        self._note(f"all processes are killed, for {seconds} s")
        self._schedules.supervisor.is_dark = True
        for process in self._world.processes:
            if process.is_alive:
                process.kill()
        await asyncio.sleep(seconds)
        self._schedules.supervisor.is_dark = False

    async def _stop_one(self) -> None:
        """One server is asked to stop."""
        if self._schedules.stops:
            name = self._world.random.choice(list(self._schedules.stops))
            self._note(f"{name} is asked to stop")
            self._schedules.stops[name].set()


class ScheduledWorld:
    """Servers, a fleet and a user. `run` it, then `judge`."""

    def __init__(self, world: World, plan: SchedulesPlan) -> None:
        self.world = world
        self.plan = plan
        world.epoch = plan.change - plan.before_change - 1000
        world.site.build(3, 1, 0, 0)
        self.receiver = Receiver(world)
        self.supervisor = Supervisor(world)
        self.stops: dict[str, asyncio.Event] = {}
        """For each server that works: set when it is asked to stop."""
        has_delays = {"freeze", "lateness", "disk-late", "loss", "away", "restart", "rewind"} & plan.faults
        world.server.judge = ScheduleJudge(
            world, PROJECT, 120.0 if has_delays else 3.0, has_true_clocks=plan.has_true_clocks
        )
        self.faults = ScheduleFaults(self)
        self._is_over = False
        self._end = 0.0
        self._calm_since = 0.0
        self._file = world.folder / "shoal.toml"
        self._file.write_text(_SPIDERS.format(urls=list(world.site.pages)))
        self._settings: dict[str, object] = {"robots.obey": False, "worker.session": 6.0, "lease.ttl": 20.0}
        self._config = Config().with_settings({"frontier": f"{SCHEME}:store", **self._settings})

    @property
    def _judge(self) -> ScheduleJudge:
        judge = self.world.server.judge
        assert isinstance(judge, ScheduleJudge)
        return judge

    # -- what replaces the ports

    def _spider(self, reference: str) -> type[Spider]:
        if reference.endswith("fleet.py"):
            return FleetSpider
        return PagesSpider

    def _fetcher(self, *args: object) -> SimulatedFetcher:
        return SimulatedFetcher(self.world, self.receiver)

    # -- processes

    def _orchestrator(self) -> Orchestrator:
        return Orchestrator(self._file, frontier=f"{SCHEME}:store", settings=self._settings)

    def _notifications(self) -> Notifications:
        settings = NotificationSettings(
            check_every=self.plan.check_every,
            retry_after=self.plan.retry_after,
            channels={name: WebhookChannel(url=self.receiver.url(name), key_env="KEY") for name in _CHANNELS},
            rules={"all": Rule(), "finished": Rule(events=("finished",))},
        )
        return Notifications(self._config, LoadedSettings(settings, "shoal.toml", Path()), {"KEY": KEY})

    async def _serve(self, number: int) -> None:
        """What `shoal serve` does for schedules and notifications: see `shoal.api.server.state.Server`."""
        name, files = self.world.current.name, self.plan.files
        stop = self.stops[name] = asyncio.Event()
        self.world.current.on_kill(lambda: self.stops.pop(name, None))
        store = await open_store(f"{SCHEME}:store")
        jobs, schedules = Jobs(store, (), 50), Schedules(store, PROJECT)
        runs = ScheduledRuns(schedules, jobs, self._config, self._orchestrator)
        runner = ScheduleRunner(schedules, runs)
        runs.on_ended = runner.wake
        notifications = self._notifications()
        notifications.start(store, name)
        if files:
            await schedules.load(files[number % len(files)], f"machine:{number % len(files)}/shoal.toml")
        loop = asyncio.create_task(runner.run())
        await stop.wait()
        await notifications.close()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout(2.0):
                await schedules.declarations.leave()
        await jobs.close()
        await runs.close()

    async def _work_as_fleet(self) -> None:
        """End the runs that are for workers."""
        store = await open_store(f"{SCHEME}:store")
        ends: dict[str, float] = {}
        while True:
            with suppress(FrontierError):
                for run in await store.list_runs(project=PROJECT, states=("queued", "running")):
                    if "registered" not in run.settings:
                        lasts = Random(f"{self.world.seed} {run.run_id}").uniform(0.0, self.plan.longest)
                        await self._work_on(store, run, ends, lasts)
            await asyncio.sleep(1.0)

    async def _work_on(self, store: Store, run: Run, ends: dict[str, float], seconds: float) -> None:
        now = self.world.loop.time()
        with suppress(RunError):  # it was cancelled meanwhile
            if run.state == "queued":
                await store.transition(run.run_id, "running", among=["queued", "running"])
            elif now >= ends.setdefault(run.run_id, now + seconds):
                await store.transition(run.run_id, "finished", among=["running"])

    async def _act(self, store: Store, action: Action) -> None:
        """What a user does with a command."""
        schedules, name = Schedules(store, PROJECT), action.schedule
        match action.what:
            case "add":
                assert action.definition is not None
                await schedules.add(name, action.definition)
            case "change":
                assert action.definition is not None
                await schedules.get(name)
                await schedules.add(name, action.definition, replaces=True)
            case "pause":
                await schedules.pause(name)
            case "resume":
                await schedules.resume(name)
            case "remove":
                await schedules.remove(name)
            case "run":
                runs = ScheduledRuns(schedules, Jobs(store, (), 50), self._config, self._orchestrator)
                await schedules.run(name, runs.make_run)

    async def _use(self) -> None:
        """Do what the plan says, by commands."""
        started = self.world.loop.time()
        for action in self.plan.actions:
            await asyncio.sleep(max(0.0, started + action.at - self.world.loop.time()))
            process = self.world.process("user")
            task = process.start(self._run_command(action))
            while not task.done() and process.is_alive:
                await asyncio.sleep(0.25)
            process.kill()

    async def _run_command(self, action: Action) -> None:
        self.world.note(f"the user: {action.what} {action.schedule}")
        try:
            await self._act(await open_store(f"{SCHEME}:store"), action)
        except ShoalError as exc:
            self.world.note(f"the user: {exc}")

    # -- from the beginning to the end

    async def run(self) -> None:
        """Work until the end. AssertionError if something does not end."""
        loop, plan = self.world.loop, self.plan
        keep, store = self.supervisor.keep, await open_store(f"{SCHEME}:store")
        for name, definition in plan.initial.items():
            await Schedules(store, PROJECT).add(name, definition)
        everybody = [
            loop.create_task(keep(f"server{number}.", self._server(number), self._has_ended))
            for number in range(plan.servers)
        ]
        everybody.append(loop.create_task(keep("fleet", self._work_as_fleet, self._has_ended)))
        user = loop.create_task(self._use())
        await self.faults.run(plan.seconds)
        self.receiver.is_down = self.supervisor.is_dark = False
        self.supervisor.is_calm = True
        self._calm_since = loop.time() + _SETTLING if plan.faults else 1000.0 + _SETTLING
        await user
        await asyncio.sleep(plan.calm)
        self._end = loop.time()
        await self._wind_up(store)
        self._is_over = True
        for stop in self.stops.values():
            stop.set()
        await asyncio.wait(everybody, timeout=_CLOSE)
        for task in everybody:
            if task.done():
                task.result()

    def _server(self, number: int) -> Callable[[], Any]:
        return lambda: self._serve(number)

    async def _has_ended(self, began_calmly: bool) -> bool:
        return self._is_over

    async def _wind_up(self, store: Store) -> None:
        """Pause everything. All runs must end, and all messages must arrive."""
        schedules = Schedules(store, PROJECT)
        for schedule in await schedules.list_all():
            await schedules.pause(schedule.name)
        self.world.note("everything is paused")
        deadline = self.world.loop.time() + _PATIENCE
        while self._judge.active or self._missing():
            if self.world.loop.time() > deadline:
                active = ", ".join(run.run_id for run in self._judge.active)
                missing = ", ".join(self._missing())
                raise AssertionError(f"active runs: {active or 'none'}; missing messages: {missing or 'none'}")
            await asyncio.sleep(1.0)

    def _missing(self) -> list[str]:
        return self.receiver.missing(self._due_messages(), _CHANNELS)

    def _due_messages(self) -> list[str]:
        """What must have been reported: the last runs that are finished, and the last missed time of each schedule."""
        judge = self._judge
        if judge.watched_since is None or not self.plan.has_true_clocks:
            return []
        since = judge.watched_since
        finished = [run for run in judge.runs.values() if run.state == "finished" and run.ended_at > since]
        due = [
            f"finished/{run.run_id}"
            for run in finished[-40:]
            if run.is_of_server and run.deleted_at == float("inf") and run.ended_at > since + 1.0
        ]
        for versions in judge.versions.values():
            last = versions[-1].schedule
            if last is not None and last.missed_at is not None and last.missed_at > self.world.epoch + since + 1.0:
                due.append(f"schedule_missed/{last.name} {last.missed_at:.0f}")
        return due

    def judge(self) -> None:
        """AssertionError if a law is broken."""
        assert not self.world.errors, self.world.errors[0]
        self._judge.judge(self._end, self._calm_since)
        self.receiver.judge(self._judge, has_true_clocks=self.plan.has_true_clocks)


async def schedules(world: World) -> None:
    """Simulate schedules and notifications, and judge them."""
    plan = SchedulesPlan.draw(world)
    world.note(repr(plan))
    scheduled = ScheduledWorld(world, plan)
    with ExitStack() as stack:
        stack.enter_context(patch.object(onion, "make_http_fetcher", scheduled._fetcher))
        stack.enter_context(patch.object(channels, "make_http_fetcher", scheduled._fetcher))
        stack.enter_context(patch.object(orchestrator, "load_spider", scheduled._spider))
        await scheduled.run()
        scheduled.judge()
