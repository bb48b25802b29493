"""One round: a fleet crawls a site while its store is rewound at random moments. Then the judge checks the result."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import StoreAwayError
from shoal.frontier import open_store
from tests.nemesis import judge
from tests.nemesis.fleet import Fleet
from tests.nemesis.judge import Span
from tests.nemesis.proxy import lossy
from tests.nemesis.servers import Rewindable
from tests.nemesis.site import Plan, Site, site

_END_SECONDS = 120.0
_CREATED_SECONDS = 60.0
_LONG_AGO = 3600.0


@dataclass
class Verdict:
    """The result of a round. ``problems`` is empty if nothing was lost or repeated."""

    seed: int
    rewinds: list[Span] = field(default_factory=list)
    """The span of time that each rewind removed."""
    seconds: float = 0.0
    requests: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def lost_seconds(self) -> float:
        return sum(killed - then for then, killed in self.rewinds)

    def __str__(self) -> str:
        back = ", ".join(f"{killed - then:.1f} s" for then, killed in self.rewinds) or "never"
        head = f"seed {self.seed}: set back {back}; {self.requests} requests in {self.seconds:.1f} s"
        return "\n  - ".join([f"{head}; {len(self.problems)} problems", *self.problems])


def wait_for_run(frontier: str, run_id: str) -> None:
    """Wait until `shoal start` has created the run."""

    async def exists() -> bool:
        try:
            store = await open_store(frontier)
        except StoreAwayError:
            return False
        try:
            return await store.get_run(run_id) is not None
        except StoreAwayError:
            return False
        finally:
            await store.close()

    until = time.monotonic() + _CREATED_SECONDS
    while not asyncio.run(exists()):
        assert time.monotonic() < until, f"run {run_id} was not created in {_CREATED_SECONDS:g} s"
        time.sleep(0.05)


def play(
    server: Rewindable, folder: Path, seed: int, *, rewinds: int, plan: Plan | None = None,
    back: tuple[float, float] = (0.5, 3.0), workers: int = 3, losses: float = 0.0, to_creation: bool = False,
) -> Verdict:  # fmt: skip
    """Crawl the site to its end, and rewind the store ``rewinds`` times by ``back`` seconds.

    ``losses`` is the probability that the response of a call is lost. With ``to_creation``, the first rewind goes back
    to the creation of the run, if the server can do that.
    """
    dice = random.Random(seed)
    plan = plan or Plan()
    verdict = Verdict(seed)
    began = time.monotonic()
    with ExitStack() as stack:
        target = stack.enter_context(site(folder, plan))
        frontier = stack.enter_context(_losing(server, dice.getrandbits(32), losses)) if losses else server.url
        fleet = stack.enter_context(Fleet(folder, frontier, target, workers=workers, restarts=40 if losses else 5))
        target.hold()
        moments = sorted(dice.uniform(0.05, 0.8) for _ in range(rewinds))
        fleet.start()
        wait_for_run(server.url, fleet.run_id)
        server.keep()
        fleet.work()
        for moment in moments:
            if not wait_for_progress(target, fleet, moment):
                break
            seconds = dice.uniform(*back)
            everything = to_creation and not verdict.rewinds
            verdict.rewinds.append(server.set_back(_LONG_AGO if everything else seconds))
            fleet.seed_again()
        target.let_go()
        ended = fleet.wait(_END_SECONDS)
        fleet.frontier = server.url
        verdict.seconds = time.monotonic() - began
        verdict.requests = target.requests_so_far()
        if not ended:
            verdict.problems.append(f"the run did not end in {_END_SECONDS:g} s")
        if len(verdict.rewinds) < rewinds:
            verdict.problems.append(f"the run ended after {len(verdict.rewinds)} of {rewinds} rewinds")
        verdict.problems += look(target, fleet, lost=verdict.rewinds)
    return verdict


@contextmanager
def _losing(server: Rewindable, seed: int, losses: float) -> Iterator[str]:
    """The URL of the server behind a proxy that loses responses."""
    dice = random.Random(seed)
    assert server.port is not None, "clients discover the address of this server: it cannot be behind a proxy"
    kind = "redis" if server.url.startswith("redis") else "postgres"
    with lossy(kind, server.port, lambda call, number: "cut" if dice.random() < losses else None) as proxy:
        yield server.url.replace(f":{server.port}/", f":{proxy.port}/")


def look(
    target: Site, fleet: Fleet, *, lost: Sequence[Span] = (), once: bool = False, unjudged: Sequence[Span] = ()
) -> list[str]:
    """The problems of a run that has ended."""
    visits = target.visits()
    outputs = {"the file": judge.lines_of(fleet.output), "the table": judge.rows_of(fleet.database, fleet.table)}
    return [
        *fleet.exits,
        *judge.judge_visits(target, visits, once=once),
        *judge.judge_outputs(target, outputs),
        *judge.judge_gaps(target, visits, lost=lost, unjudged=unjudged),
        *judge.judge_audit(fleet.audit(), judge.expectation(visits, lost)),
    ]


def wait_for_progress(target: Site, fleet: Fleet, progress: float) -> bool:
    """Wait until this part of the site is fetched. False if the run ends before."""
    while target.progress() < progress:
        if not fleet.look():
            return False
        time.sleep(0.1)
    return True
