"""Schedules: policies, definitions, and the loop on a simulated clock."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.errors import ConfigError, RunError, SpiderError, StoreAwayError
from shoal.frontier.memory import MemoryStore
from shoal.operations.actions import ActionLog
from shoal.operations.schedules.definitions import Declarations, make_definition, read_file
from shoal.operations.schedules.runner import ScheduleRunner, ServerRun, run_maker
from shoal.operations.schedules.schedule import Definition, Schedule, Step, next_step, run_now
from shoal.operations.schedules.service import Schedules, describe, fire
from shoal.ports import Document, Run, Store
from shoal.runs.orchestrator import Orchestrator
from shoal.runs.run_choice import WantedRun, choose_run
from shoal.runs.start import RunSettings
from shoal.testing import FakeClock
from shoal.urls.normalize import Scope

START = 1_700_000_000.0 // 3600 * 3600


def schedule(**values: Any) -> Schedule:
    own = {name: values.pop(name) for name in ("last", "paused", "waiting", "run_id") if name in values}
    definition = Definition(**{"spider": "Books", "every": "1h", **values})
    return Schedule(**{"name": "hourly", "project": "shoal", "definition": definition, "last": START, **own})


def steps(found: Schedule, now: float, *, active: bool = False) -> tuple[Schedule, list[float]]:
    """All steps until nothing changes. Each run ends at once, unless ``active``."""
    fired = []
    while (step := next_step(found, now, active=active)).after is not found:
        found = step.after
        fired += [] if step.due is None else [step.due]
    return found, fired


# -- policies


def test_a_time_fires_once_and_not_before() -> None:
    found, fired = steps(schedule(), START + 3599)
    assert fired == []
    found, fired = steps(found, START + 3600)
    assert fired == [START + 3600]
    assert found.run_id == "hourly_" + datetime.fromtimestamp(START + 3600, UTC).strftime("%Y%m%dT%H%M%S")
    assert steps(found, START + 3601) == (found, [])


@pytest.mark.parametrize(
    ("policy", "fired", "missed"),
    [
        ("one", [START + 5 * 3600], 4),
        ("none", [], 5),
        ("all", [START + hour * 3600 for hour in (1, 2, 3, 4, 5)], 0),
    ],
)
def test_times_that_were_missed(policy: str, fired: list[float], missed: int) -> None:
    found, made = steps(schedule(missed=policy), START + 5 * 3600 + 600)
    assert made == fired
    assert (found.last, found.missed) == (START + 5 * 3600, missed)
    assert found.missed_at == {"one": START + 4 * 3600, "none": START + 5 * 3600, "all": None}[policy]


def test_a_time_that_is_a_little_late_is_not_missed() -> None:
    found, fired = steps(schedule(missed="none"), START + 3 * 3600 + 30)
    assert fired == [START + 3 * 3600]
    assert found.missed == 2


def test_all_missed_times_start_one_after_the_other() -> None:
    found = schedule(missed="all", overlap="cancel", run_id="earlier")
    assert steps(found, START + 9000, active=True) == (found, [])
    found, fired = steps(found, START + 9000)
    assert fired == [START + 3600, START + 7200]


@pytest.mark.parametrize("policy", ["one", "none", "all"])
def test_while_a_run_works_its_schedule_skips_waits_or_cancels(policy: str) -> None:
    due = START + 3600
    step = next_step(schedule(missed=policy, overlap="skip", run_id="r"), due, active=True)
    assert (step.due, step.after.skipped, step.after.last, step.after.run_id) == (None, 1, due, "r")
    step = next_step(schedule(missed=policy, overlap="cancel", run_id="r"), due, active=True)
    assert (step.due, step.cancels) == (due, True)
    waits, fired = steps(schedule(missed=policy, overlap="wait", run_id="r"), due, active=True)
    assert (fired, waits.waiting) == ([], due)
    more, fired = steps(waits, due + 3600, active=True)  # at most one waits
    assert (fired, more.waiting, more.skipped) == ([], due, 1)
    done, fired = steps(more, due + 3700)
    assert (fired, done.waiting) == ([due], None)


def test_a_paused_schedule_does_nothing() -> None:
    found = schedule(paused=True)
    assert steps(found, START + 1e7) == (found, [])


def test_jitter_delays_each_time() -> None:
    found = schedule(jitter=1800.0)
    moments = [START + 3600 + second for second in range(1800) if steps(found, START + 3600 + second)[1]]
    assert 0 < moments[0] - (START + 3600) < 1800
    assert moments == [moments[0] + number for number in range(len(moments))]
    later, fired = steps(found, START + 7200)  # the jitter of the second time has not passed
    assert fired == [START + 3600]
    assert later.last == START + 3600


def test_the_clock_goes_back_and_forward() -> None:
    found, fired = steps(schedule(), START + 3600)
    assert fired == [START + 3600]
    for step_back in (1, 600, 3599):
        assert steps(found, START + 3600 - step_back) == (found, [])
    found, fired = steps(found, START + 10 * 3600)  # forward
    assert fired == [START + 10 * 3600]
    found, fired = steps(found, START + 9.5 * 3600)  # a little back
    assert fired == []
    found, fired = steps(found, START + 11 * 3600)
    assert fired == [START + 11 * 3600]


def test_a_clock_that_was_wrong_by_years_does_not_stop_a_schedule() -> None:
    wrong = START + 10 * 365 * 86400
    found, fired = steps(schedule(), wrong)
    assert len(fired) == 1
    found, fired = steps(found, START + 100)
    assert fired == []
    assert found.last == START + 100
    assert steps(found, START + 3600)[1] == [START + 3600]


def test_a_run_beside_the_times_has_a_name_of_its_own() -> None:
    step = run_now(schedule(), START + 3600, active=False)
    assert step is not None
    assert step.due == START + 3600.001
    assert step.after.run_id.endswith("-001")
    assert step.after.last == START
    _, fired = steps(step.after, START + 3600)
    assert fired == [START + 3600]
    assert run_now(schedule(run_id="r"), START, active=True) is None
    waits = run_now(schedule(run_id="r", overlap="wait"), START, active=True)
    assert waits is not None
    assert waits.after.waiting is not None
    assert run_now(waits.after, START, active=True) is None
    cancels = run_now(schedule(run_id="r", overlap="cancel"), START, active=True)
    assert cancels == Step(cancels.after, START + 0.001, cancels=True)  # type: ignore[union-attr]


def test_runs_of_two_projects_have_different_names() -> None:
    assert schedule().run_id_at(0.0) == "hourly_19700101T000000"
    assert replace(schedule(), project="other").run_id_at(0.25) == "other.hourly_19700101T000000-250"


# -- definitions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cron": "61 * * * *"}, r'"cron" must be a cron expression such as .*, not .61 .*: bad minute'),
        ({"cron": "* * * *"}, "4 fields, not 5"),
        ({"cron": "* * * * *", "time_zone": "Europe/Berln"}, '"time_zone" must be .* did you mean Europe/Berlin'),
        ({"cron": "* * * * *", "every": "1h"}, '"cron" and "every" contradict each other'),
        ({}, 'it is never due: set "cron"'),
        ({"every": "soon"}, '"every" must be an interval'),
        ({"every": "1h", "time_zone": "Europe/Berlin"}, '"time_zone" is for "cron"'),
        ({"every": "1h", "spider": "Boks"}, "\"spider\" must be .* not 'Boks'; did you mean Books"),
        ({"every": "1h", "spider": ""}, '"spider" must be text'),
        ({"every": "1h", "overlap": "skipp"}, '"overlap" must be one of skip, wait, cancel, .*did you mean skip'),
        ({"every": "1h", "missed": 3}, '"missed" must be one of one, all, none'),
        ({"every": "1h", "jitter": -1}, '"jitter" must be a number of seconds'),
        ({"every": "1h", "jitter": float("nan")}, '"jitter" must be a number of seconds'),
        ({"every": "1h", "jitter": 3600}, '"jitter" must be less than "every"'),
        ({"every": "1h", "keep": -1}, '"keep" must be a number of runs'),
        ({"every": "1h", "keep": True}, '"keep" must be a number of runs'),
        ({"every": "1h", "crn": "x"}, 'unknown key "crn"; did you mean cron'),
        ({"every": "1h", "arguments": {"settings": 1}}, '"arguments" cannot be stored: .*attribute of the spider'),
        ({"every": "1h", "settings": {"download_dely": 1}}, '"settings" has a problem: unknown key "download_dely"'),
        ({"every": "1h", "settings": {"download_delay": "x"}}, '"settings" has a problem: "download_delay" must be'),
        ({"every": "1h", "settings": {"browser.executable": "/bin/sh"}}, 'cannot change "browser.executable"'),
        ({"every": "1h", "settings": {"http": {"proxy": "http://a:1"}}}, 'cannot change "http.proxy"'),
        ({"every": "1h", "settings": {"cache.folder": "/tmp"}}, 'cannot change "cache.folder"'),
        ({"every": "1h", "settings": {"frontier": "memory:"}}, 'cannot change "frontier"'),
    ],
)
def test_errors_name_the_schedule_and_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule 'nightly': .*{message}"):
        make_definition("nightly", {"spider": "Books", **values}, ["Books", "Cars"])


def test_a_definition_is_read() -> None:
    found = make_definition(
        "a", {"spider": "Books", "every": 90, "settings": {"scope": {"max_pages": 5}, "download_delay": "2"}}, ["Books"]
    )
    assert found.every == "90s"
    assert found.settings == {"scope.max_pages": 5, "download_delay": 2.0}
    for name in ("", "a b", "a/b", "a.b", "-a", "x" * 101, "\n"):
        with pytest.raises(ConfigError, match="its name must have"):
            make_definition(name, {"spider": "Books", "every": "1h"}, ["Books"])


FILE = """
[spiders.Books]
file = "books.py"
[spiders.Fleet]
file = "books.py"
execution_mode = "distributed"
[schedules.nightly]
spider = "Books"
cron = "30 2 * * *"
time_zone = "Europe/Berlin"
arguments = { category = "travel" }
settings = { download_delay = 0.0 }
keep = 2
"""
SPIDER = """
from shoal import Spider

class Books(Spider):
    name = "books"
    start_urls = ["http://127.0.0.1:1/"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "books.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text(FILE)
    return tmp_path / "shoal.toml"


def test_a_file_is_read_and_its_errors_name_it(file: Path) -> None:
    assert read_file(file)["nightly"].keep == 2
    file.write_text(FILE.replace('spider = "Books"', 'spider = "Bucks"'))
    with pytest.raises(ConfigError, match=r"shoal.toml: schedule 'nightly': \"spider\" .* did you mean Books"):
        read_file(file)
    file.write_text("schedules = 3")
    with pytest.raises(ConfigError, match="must be a table of schedules"):
        read_file(file)
    file.write_text("[schedules]\na = 3")
    with pytest.raises(ConfigError, match=r"\[schedules.a\] must be a table"):
        read_file(file)


# -- the store


HOURLY = Definition(spider="Books", every="1h")


async def make_run(found: Schedule, due: float) -> Run:
    return Run(
        run_id=found.run_id_at(due), spider="books", state="queued", created_at=due, project=found.project,
        settings={"schedule": found.name},
    )  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture
def schedules(clock: FakeClock) -> Schedules:
    return Schedules(MemoryStore(), "shoal", clock)


async def test_schedules_are_added_listed_and_removed(schedules: Schedules) -> None:
    await schedules.add("b", HOURLY)
    await schedules.add("a", HOURLY)
    await Schedules(schedules.store, "other").add("c", HOURLY)
    assert [each.name for each in await schedules.list_all()] == ["a", "b"]
    with pytest.raises(RunError, match="schedule 'a' exists: change it with `shoal schedule change a`"):
        await schedules.add("a", HOURLY)
    changed = await schedules.add("a", replace(HOURLY, keep=3), replaces=True)
    assert changed.definition.keep == 3
    await schedules.remove("a")
    with pytest.raises(RunError, match="there is no schedule 'a'; there are: b"):
        await schedules.get("a")
    for name in ("bb", "\0", "x" * 1000, ""):
        for act in (schedules.remove, schedules.pause, schedules.resume, schedules.get):
            with pytest.raises(RunError, match="there is no schedule"):
                await act(name)


async def test_schedules_of_the_file_are_loaded_and_changed(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("mine", HOURLY)
    await schedules.load({"one": HOURLY, "two": HOURLY}, "web1:/a.toml")
    assert [(each.name, each.origin, each.source) for each in await schedules.list_all()] == [
        ("mine", "store", ""), ("one", "file", "web1:/a.toml"), ("two", "file", "web1:/a.toml")
    ]  # fmt: skip
    with pytest.raises(RunError, match=r"remove \[schedules.one\] there"):
        await schedules.remove("one")
    with pytest.raises(RunError, match="edit the file"):
        await schedules.add("one", HOURLY, replaces=True)
    await schedules.pause("one")
    clock.advance(100)
    before = await schedules.get("one")
    await schedules.load({"one": HOURLY, "two": HOURLY}, "web1:/a.toml")
    assert await schedules.get("one") == before  # a restart changes nothing
    await schedules.load({"one": replace(HOURLY, every="2h"), "two": HOURLY}, "web1:/a.toml")
    after = await schedules.get("one")
    assert (after.last, after.paused) == (clock.now, True)


# -- schedules of several files


class Servers:
    """Servers with different files on one store, and their clock."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock

    async def start(self, source: str, *names: str) -> Schedules:
        server = Schedules(self.store, "p", lambda: self.clock.now)
        server.declarations = Declarations(self.store, "p", lambda: self.clock.now)
        await server.load(dict.fromkeys(names, HOURLY), source)
        return server

    async def pass_time(self, seconds: float, *alive: Schedules) -> None:
        """Let the loops of these servers go on."""
        for _ in range(round(seconds / 10)):
            self.clock.advance(10)
            for server in alive:
                await server.check_declarations(await server.list_all())

    async def orphans(self) -> list[str]:
        found = await Schedules(self.store, "p").list_all()
        return [each.name for each in found if each.orphaned_at is not None]

    async def actions(self) -> list[tuple[str, str]]:
        return [(each.what, each.target) for each in reversed(await ActionLog(self.store, "p").recent())]


@pytest.fixture
def servers(clock: FakeClock) -> Servers:
    return Servers(MemoryStore(), clock)


async def test_a_server_leaves_the_schedules_of_another_alone(servers: Servers) -> None:
    a, b = await servers.start("a:/x", "one"), await servers.start("b:/y", "two")
    await servers.pass_time(600, a, b)
    assert (a.foreign, b.foreign) == ({"two"}, {"one"})
    assert (await servers.orphans(), await servers.actions()) == ([], [])
    assert [each.name for each in await a.list_all()] == ["one", "two"]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_schedule_is_orphaned_when_its_server_stays_away(servers: Servers, is_killed: bool) -> None:
    a, b = await servers.start("a:/x", "one"), await servers.start("b:/y", "two")
    await servers.pass_time(100, a, b)
    if not is_killed:
        await a.declarations.leave()
    await servers.pass_time(50, b)
    assert await servers.orphans() == []  # it may be restarting
    await servers.pass_time(100, b)
    assert await servers.orphans() == ["one"]
    assert await servers.actions() == [("orphan schedule", "one")]
    orphan = await b.get("one")
    assert orphan.next_due is None
    assert not (await fire(b.store, b.key("one"), servers.clock.now + 7200, make_run)).changed
    with pytest.raises(RunError, match="is orphaned: remove it first"):
        await b.add("one", HOURLY, replaces=True)

    a = await servers.start("a:/x", "one")  # it is back: nothing is lost
    back = await a.get("one")
    assert (back.orphaned_at, back.last) == (None, orphan.last)
    assert await servers.actions() == [("orphan schedule", "one"), ("adopt schedule", "one")]


async def test_a_server_that_was_frozen_takes_its_schedules_back(servers: Servers) -> None:
    a, b = await servers.start("a:/x", "one"), await servers.start("b:/y")
    await servers.pass_time(200, b)
    assert await servers.orphans() == ["one"]
    await servers.pass_time(10, a)
    assert await servers.orphans() == []


async def test_a_schedule_that_was_removed_from_the_file_is_orphaned_at_once(servers: Servers) -> None:
    a = await servers.start("a:/x", "one", "two")
    await a.declarations.leave()
    a = await servers.start("a:/x", "two")
    assert await servers.orphans() == ["one"]
    await a.remove("one")
    assert [each.name for each in await a.list_all()] == ["two"]


async def test_a_replica_that_still_has_the_schedule_keeps_it(servers: Servers) -> None:
    a, b = await servers.start("a:/x", "one"), await servers.start("b:/x", "one")
    await a.declarations.leave()
    a = await servers.start("a:/x")
    await servers.pass_time(300, a, b)
    assert await servers.orphans() == []


async def test_two_files_define_one_schedule_differently(servers: Servers) -> None:
    a = await servers.start("a:/x", "one")
    await a.load({"one": replace(HOURLY, every="2h")}, "b:/y")
    assert await servers.actions() == [("change schedule", "one")]


async def test_pause_and_resume(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("a", HOURLY)
    assert (await describe(schedules, await schedules.pause("a")))["next"] is None
    clock.advance(5 * 3600)
    assert not (await fire(schedules.store, schedules.key("a"), clock.now, make_run)).changed
    resumed = await schedules.resume("a")
    assert resumed.next_due == START + 6 * 3600
    clock.advance(10)
    assert await schedules.resume("a") == resumed
    assert not (await fire(schedules.store, schedules.key("a"), clock.now, make_run)).changed


async def test_a_run_now_obeys_the_overlap_policy(schedules: Schedules) -> None:
    await schedules.add("a", HOURLY)
    first = (await schedules.run("a", make_run)).run
    assert first is not None
    with pytest.raises(RunError, match=f'run {first.run_id} has not ended, and overlap is "skip"'):
        await schedules.run("a", make_run)
    await schedules.add("a", replace(HOURLY, overlap="wait"), replaces=True)
    assert (await schedules.run("a", make_run)).run is None
    with pytest.raises(RunError, match="another one waits already"):
        await schedules.run("a", make_run)
    await schedules.store.transition(first.run_id, "cancelled")
    second = (await fire(schedules.store, schedules.key("a"), schedules.now(), make_run)).run
    assert second is not None
    assert second.run_id != first.run_id
    await schedules.add("a", replace(HOURLY, overlap="cancel"), replaces=True)
    third = await schedules.run("a", make_run)
    assert third.run is not None
    assert third.cancelled == second.run_id
    assert [run.state for run in await schedules.runs("a")] == ["queued", "cancelled", "cancelled"]
    with pytest.raises(RunError, match="there is no schedule 'b'"):
        await schedules.run("b", make_run)


async def test_old_runs_are_deleted(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("a", replace(HOURLY, keep=2))
    await schedules.store.create_run(Run(run_id="other", spider="books", state="finished", created_at=0.0))
    for _ in range(5):
        clock.advance(3600)
        fired = await fire(schedules.store, schedules.key("a"), clock.now, make_run)
        assert fired.run is not None
        assert fired.schedule is not None
        await schedules.store.transition(fired.run.run_id, "cancelled")
        await schedules.delete_old_runs(fired.schedule)
    assert len(await schedules.runs("a")) == 2
    assert (await schedules.runs("a"))[0].run_id == fired.run.run_id
    assert await schedules.store.get_run("other") is not None


# -- runs


async def test_runs_of_servers_and_fleets_are_made(file: Path, schedules: Schedules) -> None:
    definition = read_file(file)["nightly"]
    found = await schedules.add("nightly", definition)
    orchestrator = Orchestrator(file, frontier="redis://127.0.0.1:1")
    make = run_maker(lambda: orchestrator, ["10.0.0.0/8"])
    single = await make(found, 0.0)
    assert (single.run_id, single.spider, single.state) == ("nightly_19700101T000000", "books", "queued")
    own = ServerRun.of(single)
    assert own is not None
    chosen = await own.choose(orchestrator)
    assert chosen.spider.arguments == {"category": "travel"}
    assert chosen.config.download_delay == 0.0
    fleet = await make(replace(found, definition=replace(definition, spider="Fleet")), 0.0)
    assert ServerRun.of(fleet) is None
    assert fleet.settings["seeds"] == "spider"
    assert fleet.settings["networks"] == ("10.0.0.0/8",)
    assert fleet.settings["delay"] == 0.0
    with pytest.raises(SpiderError, match="no spider 'None'"):
        await make(replace(found, definition=replace(definition, spider="None")), 0.0)


async def test_patterns_of_schedules_are_searched_in_linear_time(file: Path, schedules: Schedules) -> None:
    given = {"spider": "Books", "every": "1h", "settings": {"scope": {"allow": r'["(a|a)*!$"]', "deny": ["b"]}}}
    definition = make_definition("a", given, ["Books", "Fleet"])
    plain = {"scope.allow": ["(a|a)*!$"], "scope.deny": ["b"]}
    assert definition.settings == plain
    found = await schedules.add("a", definition)
    orchestrator = Orchestrator(file, frontier="redis://127.0.0.1:1")
    make = run_maker(lambda: orchestrator, [])
    single = await make(found, 0.0)
    assert single.settings["settings"] == plain
    own = ServerRun.of(single)
    assert own is not None
    scope = Scope((await own.choose(orchestrator)).config.scope)
    assert scope.refuses("http://a/" + "a" * 200) == "matches no allow rule"
    assert scope.refuses("http://a/b!") == "denied by the rule 'b'"
    fleet = await make(replace(found, definition=replace(definition, spider="Fleet")), 0.0)
    stored = RunSettings.of(fleet).scope
    assert (list(stored["allow"]), list(stored["deny"])) == (["(a|a)*!$"], ["b"])  # type: ignore[call-overload]


@pytest.mark.parametrize("pattern", ["(?!a)b", r"(a)\1", "(?i)" + "[\0-\U0010ffff]" * 5000])
def test_a_pattern_that_is_not_linear_is_refused_at_once(pattern: str) -> None:
    given = {"spider": "Books", "every": "1h", "settings": {"scope.deny": [pattern]}}
    with pytest.raises(ConfigError, match=r"schedule 'a': \"settings\" has a problem: \"scope.deny\""):
        make_definition("a", given, ["Books"])


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"browser.executable": "/bin/sh"}},
        {"settings": {"frontier": "memory:"}},
        {"settings": {"scope.allow": ["(?=x)"]}},
        {"settings": {"scope": {"deny": ["a{1001}"]}}},
        {"arguments": {"settings": {}}},
        {"arguments": 3},
        {"more": 1},
    ],
)
def test_a_run_that_others_wrote_is_refused(change: dict[str, Any]) -> None:
    settings = {"schedule": "a", "registered": "Books", **change}
    with pytest.raises(RunError, match="run r has"):
        ServerRun.of(Run(run_id="r", spider="books", state="queued", created_at=0.0, settings=settings))


async def test_other_commands_leave_the_runs_of_servers_alone(file: Path, schedules: Schedules) -> None:
    found = await schedules.add("nightly", read_file(file)["nightly"])
    run = await run_maker(lambda: Orchestrator(file), [])(found, 0.0)
    await schedules.store.create_run(run)
    await schedules.store.transition(run.run_id, "running")
    wanted = WantedRun(spider="books", project="shoal", start={}, new="never")
    assert (await choose_run(schedules.store, wanted)).run_id != run.run_id
    with pytest.raises(RunError, match=r"belongs to a schedule: servers .* work on it"):
        RunSettings.of(run)


# -- the loop


class Ending:
    """Ends each run at once."""

    def __init__(self, schedules: Schedules) -> None:
        self._store = schedules.store
        self.launched: list[str] = []
        self.broken: set[str] = set()

    async def make_run(self, found: Schedule, due: float) -> Run:
        if found.name in self.broken:
            raise SpiderError("its file is broken")
        return await make_run(found, due)

    async def launch(self, run: Run) -> None:
        self.launched.append(run.run_id)

    async def cancelled(self, run_id: str) -> None:
        pass

    async def take_over(self) -> None:
        for run in await self._store.list_runs(states=("queued",)):
            await self._store.transition(run.run_id, "cancelled")


async def test_the_loop_sleeps_until_the_next_time(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("a", HOURLY)
    launcher = Ending(schedules)
    runner = ScheduleRunner(schedules, launcher)
    assert await runner.step() == 10.0
    clock.advance(3597)
    assert await runner.step() == 3.0
    clock.advance(3)
    await runner.step()
    assert launcher.launched == [(await schedules.get("a")).run_id]


async def test_a_spider_that_cannot_be_used_is_reported_and_does_not_hinder_others(
    schedules: Schedules, clock: FakeClock
) -> None:
    await schedules.add("a", HOURLY)
    await schedules.add("b", HOURLY)
    launcher = Ending(schedules)
    launcher.broken.add("a")
    runner = ScheduleRunner(schedules, launcher)
    clock.advance(3600)
    await runner.step()
    assert len(launcher.launched) == 1
    assert (await schedules.get("a")).error == "its file is broken"
    launcher.broken.clear()
    clock.advance(60)
    await runner.step()
    assert len(launcher.launched) == 2  # its time was still due
    assert (await schedules.get("a")).error == ""


async def test_a_stored_pattern_that_is_not_linear_starts_no_run(
    file: Path, schedules: Schedules, clock: FakeClock
) -> None:
    """Another program stored it: it is checked when it is read."""
    await schedules.add("a", replace(HOURLY, spider="Books", settings={"scope.deny": ["(?=x)x"]}))
    launcher = Ending(schedules)
    launcher.make_run = run_maker(lambda: Orchestrator(file), [])  # type: ignore[method-assign]
    clock.advance(3600)
    await ScheduleRunner(schedules, launcher).step()
    assert launcher.launched == []
    assert "'(?=x)x' does not compile: invalid perl operator" in (await schedules.get("a")).error


async def test_a_run_that_waits_starts_when_the_earlier_one_has_ended(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("a", replace(HOURLY, overlap="wait"))
    launcher = Ending(schedules)
    launcher.take_over = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    runner = ScheduleRunner(schedules, launcher)
    for _ in range(3):
        clock.advance(3600)
        await runner.step()
    assert len(launcher.launched) == 1
    assert await runner.step() == 1.0
    await schedules.store.transition(launcher.launched[0], "cancelled")
    await runner.step()
    assert launcher.launched[1:] == [schedule().run_id_at(START + 7200).replace("hourly", "a")]
    assert (await schedules.get("a")).skipped == 1


class AwayStore(MemoryStore):
    """A store that is away for the first calls."""

    calls = 0

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        self.calls += 1
        if self.calls < 3:
            raise StoreAwayError("the store is away")
        return await super().list_documents(prefix, after=after, limit=limit)


async def test_the_loop_survives_a_store_that_is_away_and_wakes_on_changes() -> None:
    schedules = Schedules(AwayStore(), "shoal", time.time)
    launcher = Ending(schedules)
    pauses: list[float] = []

    async def wait(event: asyncio.Event, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 2:
            await event.wait()

    runner = ScheduleRunner(schedules, launcher, wait)
    loop = asyncio.create_task(runner.run())
    while len(pauses) < 3:
        await asyncio.sleep(0.001)
    assert pauses == [1.0, 1.0, 10.0]
    await schedules.add("a", replace(HOURLY, every="1s"))
    runner.wake()
    while len(pauses) < 4:
        await asyncio.sleep(0.001)
    assert pauses[-1] <= 1.0
    loop.cancel()


async def test_a_damaged_document_does_not_hinder_others(schedules: Schedules, clock: FakeClock) -> None:
    await schedules.add("a", HOURLY)
    await schedules.store.put_document(schedules.key("b"), b"\xc1", replaces=b"", version=bytes(8))
    await schedules.add("c", Definition(spider="Books", every="never"))
    launcher = Ending(schedules)
    clock.advance(3600)
    await ScheduleRunner(schedules, launcher).step()
    assert launcher.launched == [(await schedules.get("a")).run_id]
    assert "must be an interval" in (await schedules.get("c")).error
    assert (await describe(schedules, await schedules.get("c")))["next"] is None
