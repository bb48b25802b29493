"""One round: a fleet writes one output while its writer is killed and frozen, its writes arrive late, and the output is
set back. Then the judge compares the output with the site."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.frontier import open_store
from tests.nemesis import judge
from tests.nemesis.destinations import DESTINATIONS, Destination
from tests.nemesis.fleet import Fleet
from tests.nemesis.rounds import wait_for_progress, wait_for_run
from tests.nemesis.site import Plan, site
from tests.support.databases import RedisServer, shared

PLAN = Plan(pages=250, starts=250, slow_hosts=1, slow_pages=12, crawl_delay=0.5)
ROLE_SECONDS = 2.0
"""The role of a writer that is silent for this long goes to another worker."""
_LATE = (ROLE_SECONDS + 1.0, ROLE_SECONDS + 3.0)
_END_SECONDS = 90.0
_HELD_SOON = 2.0
_WRITER_SOON = 3.0
FAULTS = ("kill", "freeze", "hold", "set back")


@dataclass
class OutputVerdict:
    """The result of a round. ``problems`` is empty if the output is right and nothing was silent."""

    kind: str
    seed: int
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    items: int = 0
    refused: int = 0
    """Processes that stopped because their output was set back, and said so."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.kind}, seed {self.seed}: {', '.join(self.faults)}; {self.items} items in {self.seconds:.1f} s"
        return "\n  - ".join([f"{head}; {len(self.problems)} problems", *self.problems])


def play(kind: str, folder: Path, seed: int, *, faults: int = 3, first: Sequence[str] = ()) -> OutputVerdict:
    """Crawl the site to its end with this kind of output, with ``faults`` at random moments: the ``first`` ones, then
    random ones."""
    dice = random.Random(seed)
    verdict = OutputVerdict(kind, seed)
    began = time.monotonic()
    with ExitStack() as stack:
        target = stack.enter_context(site(folder, PLAN))
        destination = DESTINATIONS[kind](folder)
        stack.callback(destination.close)
        fleet = stack.enter_context(
            Fleet(
                folder, _own_store(), target, workers=2, shared_output=destination.spec,
                environment=destination.environment, **{"lease.ttl": ROLE_SECONDS, "worker.session": ROLE_SECONDS},
            )
        )  # fmt: skip
        attack = _Attack(dice, destination, fleet, stack, [name for name in first if _can(destination, name)])
        target.hold()
        fleet.start()
        wait_for_run(fleet.frontier, fleet.run_id)
        fleet.work()
        for moment in sorted(dice.uniform(0.05, 0.85) for _ in range(faults)):
            if not wait_for_progress(target, fleet, moment):
                break
            verdict.faults.append(attack())
        target.let_go()
        if not fleet.wait(_END_SECONDS):
            verdict.problems.append(f"the run did not end in {_END_SECONDS:g} s")
        verdict.problems += _look(destination, fleet, verdict, "set back" in verdict.faults)
        items = destination.items()
        verdict.items = len(items)
        verdict.problems += judge.judge_visits(target, target.visits())
        verdict.problems += judge.judge_items(target, items, f"the {kind} output")
        verdict.seconds = time.monotonic() - began
    return verdict


def _own_store() -> str:
    """A store without the hosts of other rounds: a port may be that of a slow host of an earlier round, whose
    Crawl-delay the store would still apply."""
    return f"{shared(RedisServer).url}?prefix=round-{secrets.token_hex(4)}"


def _look(destination: Destination, fleet: Fleet, verdict: OutputVerdict, was_set_back: bool) -> list[str]:
    """The problems of the processes. An output that was set back may stop the run: then other workers end the run, and
    the export that the message names must complete the output. The audit must agree with the output."""
    told = [text for text in fleet.exits if "shoal export" in text or "was set back" in text]
    problems = [text for text in fleet.exits if not (destination.stops_when_set_back and was_set_back and text in told)]
    verdict.refused = len(told)
    code, text = fleet.audit_outputs(destination.spec)
    logged = _logged(fleet)
    if destination.stops_when_set_back and (told or code):
        if not told:
            problems.append(f"the output lacks items and no process said so: {text[-300:]}")
        fleet.work_without_output()
        if not fleet.wait(_END_SECONDS):
            problems.append(f"the run did not end in {_END_SECONDS:g} s")
        fleet.export(destination.spec)
    elif code:
        problems.append(f"audit ended with {code}: {text[-600:]}")
    if not destination.stops_when_set_back and len(destination.items()) != logged:
        problems.append(f"the output has {len(destination.items())} of {logged} items of the log; audit said: {code}")
    return problems


def _logged(fleet: Fleet) -> int:
    async def count() -> int:
        store = await open_store(fleet.frontier)
        try:
            return (await (await store.frontier(fleet.run_id)).stats()).items
        finally:
            await store.close()

    return asyncio.run(count())


def _can(destination: Destination, fault: str) -> bool:
    return fault != "hold" or bool(destination.marks)


class _Attack:
    """Does one random fault at each call, and returns its name."""

    def __init__(
        self, dice: random.Random, destination: Destination, fleet: Fleet, stack: ExitStack, first: list[str]
    ) -> None:
        self._first = first
        self._dice = dice
        self._destination = destination
        self._fleet = fleet
        self._stack = stack
        self._copy: Any = destination.save()
        self._writer_pid = 0

    def __call__(self) -> str:
        possible = [name for name in FAULTS if _can(self._destination, name)]
        name = self._first.pop(0) if self._first else self._dice.choice(possible)
        act: Callable[[], bool] = {
            "kill": partial(self._to_writer, signal.SIGKILL),
            "freeze": self._freeze,
            "hold": self._hold,
            "set back": self._set_back,
        }[name]
        return name if act() else f"{name} (missed)"

    def _to_writer(self, number: signal.Signals) -> bool:
        until = time.monotonic() + _WRITER_SOON
        self._writer_pid = writer_pid(self._fleet)
        while not self._writer_pid and time.monotonic() < until:
            time.sleep(0.05)
            self._writer_pid = writer_pid(self._fleet)
        return self._fleet.signal(self._writer_pid, number)

    def _freeze(self) -> bool:
        """Until another worker has taken over. It wakes up while that one writes."""
        if not self._to_writer(signal.SIGSTOP):
            return False
        wake = threading.Timer(self._dice.uniform(*_LATE), _wake, (self._writer_pid,))
        wake.start()
        self._stack.callback(wake.join)
        return True

    def _hold(self) -> bool:
        """Hold back what the writer sends next, until another worker has taken over."""
        proxy = self._destination.proxy
        assert proxy is not None
        proxy.hold(self._dice.choice(self._destination.marks), self._dice.uniform(*_LATE))
        return proxy.held.wait(_HELD_SOON)

    def _set_back(self) -> bool:
        """To a copy that is a moment old, or to the beginning."""
        if self._dice.random() < 0.7:
            self._copy = self._destination.save()
        time.sleep(self._dice.uniform(0.3, 2.0))
        self._destination.set_back(self._copy)
        self._copy = self._destination.save()
        return True


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


def writer_pid(fleet: Fleet) -> int:
    """The process that writes the output now. 0 if there is none."""

    async def holder() -> str:
        store = await open_store(fleet.frontier)
        try:
            frontier = await store.frontier(fleet.run_id)
            held = [role.holder for role in await frontier.roles() if role.role.startswith("sink:") and role.held]
            return held[0] if held else ""
        finally:
            await store.close()

    name = asyncio.run(holder())
    return int(name.rsplit("-", 2)[1]) if name else 0
