"""Defects that a simulation must find. Each is one line of Shoal, as it must not be."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType

from msgspec import Struct


class Defect(Struct, frozen=True):
    """A line of a function that is replaced."""

    name: str
    effect: str
    function: str
    """Where: ``module:function`` or ``module:Class.method``."""
    line: str
    wrong: str
    scenario: str = "crawl"
    backend: str | None = None
    """The store that has it. None: all of them."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the defect for a while."""
        function = _find(self.function)
        before = function.__code__
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.line) != 1:
            raise LookupError(f"{self.name}: {self.function} has no line {self.line!r}")
        source = f"from __future__ import annotations\n{source.replace(self.line, self.wrong)}"
        names: dict[str, object] = {}
        exec(source, function.__globals__, names)
        function.__code__ = _function_of(names[function.__name__]).__code__
        try:
            yield
        finally:
            function.__code__ = before


def _find(path: str) -> FunctionType:
    module, _, names = path.partition(":")
    target: object = import_module(module)
    for name in names.split("."):
        target = vars(target)[name]
    return _function_of(target)


def _function_of(target: object) -> FunctionType:
    function = target.fget if isinstance(target, property) else target
    assert isinstance(function, FunctionType)
    return function


_QUEUE = "shoal.frontier.memory.queue:MemoryQueue"
_CLUSTER = "shoal.runs.cluster"

_SCHEDULES = "shoal.operations.schedules"
_NOTIFICATIONS = "shoal.operations.notifications"

_OF_SCHEDULES = [
    Defect(
        "time before run",
        "a server that is killed after it stored the time of a schedule has not created its run",
        f"{_SCHEDULES}.service:take_step",
        "after = await stored.change_with_run(update)",
        "after = await stored.change(lambda value: update(value)[0])\n"
        "    if is_mine and run is not None:\n"
        "        await store.create_run(run)",
        scenario="schedules",
    ),
    Defect(
        "started twice",
        "a server starts the run of a time that another one has decided about meanwhile",
        f"{_SCHEDULES}.service:take_step",
        "is_mine = value == schedule",
        "is_mine = value is not None",
        scenario="schedules",
    ),
    Defect(
        "lost answer",
        "a message is forgotten if the receiver does not answer",
        f"{_NOTIFICATIONS}.delivery:Delivery._drain",
        "if error:",
        'if error and "did not answer" not in error:',
        scenario="schedules",
    ),
    Defect(
        "another id",
        "a message that is repeated has a new id",
        f"{_NOTIFICATIONS}.delivery:Delivery._drain",
        "_send(channel, outgoing.message)",
        '_send(channel, replace(outgoing.message, message_id=f"{mark[0]}-{outgoing.attempts}"))',
        scenario="schedules",
    ),
    Defect(
        "changed clocks",
        "a local time that does not exist is left out, or one that exists twice is due twice",
        f"{_SCHEDULES}.schedule:_with_specific_hours",
        'if fields[1] not in ("*", "*/1"):',
        "if False:",
        scenario="schedules",
    ),
    Defect(
        "queued is over",
        "a run that waits for a worker does not count as active",
        f"{_SCHEDULES}.service:take_step",
        "in ACTIVE",
        'in ("running", "paused")',
        scenario="schedules",
    ),
    Defect(
        "times of a pause",
        "times during a pause are started when the schedule is resumed",
        f"{_SCHEDULES}.service:Schedules.resume",
        "paused=False, last=self.now()",
        "paused=False",
        scenario="schedules",
    ),
]
"""In schedules and notifications."""

DEFECTS = [
    Defect(
        "late write",
        "a table takes the rows of a writer that has been replaced",
        "shoal.sinks.tablesink:TableSink._begin",
        " AND epoch = {progress.epoch} AND seq = {progress.position}",
        "",
    ),
    Defect(
        "trusted cursor",
        "an output that was restored from a backup gets only newer items",
        "shoal.sinks.keys:WriteProgress.resume",
        "if self._saved is None or position >= self._saved.seq:",
        "if True:",
    ),
    Defect(
        "cookies of a process",
        "a worker does not read the cookies that the run has",
        "shoal.fetch.sessions.jars:Jars.is_fresh",
        "return site is not None and site.generation == self._generation",
        "return True",
    ),
    Defect(
        "early trim",
        "items leave the log when one output has them, not all",
        "shoal.crawling.pacing:ItemLogKeeper.run",
        "passed = min(",
        "passed = max(",
    ),
    Defect(
        "missing fence",
        "a lease that was lost still completes its page",
        f"{_QUEUE}._current",
        "held is None or held.token != lease.token",
        "held is None",
        backend="memory",
    ),
    Defect(
        "off by one",
        "the run finishes when one request is left",
        "shoal.ports.queue:Stats.finished",
        "return not (self.remaining or self.seeding)",
        "return not (self.remaining > 1 or self.seeding)",
    ),
    Defect(
        "repeated token",
        "another worker gets a page under the same token",
        f"{_QUEUE}.lease",
        "token = rules.token_base(nonce)",
        "token = 0",
        backend="memory",
    ),
    Defect(
        "remembered links",
        "after a rewind, a worker still leaves out links that the store has lost",
        "shoal.crawling.run_queue:RunQueue.forget",
        "self._known = KnownLinks()",
        "pass",
    ),
    Defect(
        "no sync",
        "a position is saved before the file is on the disk",
        "shoal.sinks.files:GrowingFileSink._flush",
        "self._file.sync()",
        "pass",
    ),
    Defect(
        "long deadline",
        "a worker that was frozen fetches a page although its lease is over",
        f"{_QUEUE}.lease",
        "deadline = clock.now() + ttl",
        "deadline = clock.now() + 10 * ttl",
        backend="memory",
    ),
    Defect(
        "delay from the lease",
        "the delay of a host begins when its last page was leased",
        "shoal.frontier.politeness:Host.end_lease",
        "self.ended_at = now",
        "pass",
    ),
    Defect(
        "links twice",
        "two pages of one batch add the same link",
        "shoal.frontier.memory.requests:Requests.add_children",
        "if self.fingerprints.find(name) is None",
        "if True",
        backend="memory",
    ),
    Defect(
        "forgotten attempt",
        "a page whose worker was killed is not fetched again",
        f"{_QUEUE}._lose",
        "requests.requeue(held.lane, held.rank, number, now)",
        "pass",
        backend="memory",
    ),
    *_OF_SCHEDULES,
    # of clusters
    Defect(
        "work without a slot",
        "a node works on after the end of its session",
        f"{_CLUSTER}.slots:NodeSession.is_good",
        "return self.left > 0",
        "return self.left >= 0",
        scenario="cluster",
    ),
    Defect(
        "repeated epoch",
        "the next holder of a slot gets the epoch of the last one",
        f"{_CLUSTER}.election:next_epoch",
        "return max(last + 1, microseconds)",
        "return max(last, 1)",
        scenario="cluster",
    ),
    Defect(
        "sleeping backup",
        "a Backup Runner does not wake up when the session of a Runner ends",
        f"{_CLUSTER}.membership:Membership._wait",
        "self._sleep(min([interval, *soon]),",
        "self._sleep(interval,",
        scenario="cluster",
    ),
    Defect(
        "deaf backup",
        "a lost wake-up: a Backup Runner does not hear that a Runner has left",
        f"{_CLUSTER}.redis:RedisCoordinator.wait",
        "if _position(last) > _position(self._seen):",
        "if False:",
        scenario="cluster",
    ),
    Defect(
        "late release",
        "the frontier is not told of a new holder, so the leases of a dead Runner end only with their time",
        "shoal.runs.lifecycle:RunLifecycle._fence",
        "count = await self._frontier.fence(holder.slot, holder.epoch)",
        "count = 0",
        scenario="cluster",
    ),
    Defect(
        "trusting frontier",
        "the frontier gives leases to a holder that has been replaced",
        f"{_QUEUE}.lease",
        "self._roles.check_holder(holder)",
        "pass",
        scenario="cluster",
        backend="memory",
    ),
]
"""By importance: the first ones were found by users, or could have been."""
