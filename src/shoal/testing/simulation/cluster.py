"""A cluster that crawls a site while its world fails: Runners, Backup Runners, and the judges of their slots."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from itertools import pairwise

from msgspec import structs

from shoal.ports import Counts
from shoal.runs.cluster.election import HESITATION
from shoal.runs.cluster.node import Node
from shoal.testing.simulation.coordinator import URL, Cluster, CoordinatorServer, Tenure, coordinated
from shoal.testing.simulation.crawl import RUN, SLACK, Crawl, CrawlPlan, Work
from shoal.testing.simulation.faults import EVENTS, RATES, Faults
from shoal.testing.simulation.loop import Process
from shoal.testing.simulation.site import Visit
from shoal.testing.simulation.world import World

OWN_EVENTS = (*("stop", "scale", "cut-coordinator", "cut-store", "coordinator-away", "coordinator-restart"),)
LOSS = "coordinator-loss"
CLUSTER_FAULTS = (*RATES, *EVENTS, *OWN_EVENTS, LOSS)
"""What can happen to a cluster."""
_POLL = 0.1
_SETTLED_AFTER = 30.0
"""Seconds, besides a session, after which nothing is left of a fault: all late messages have arrived."""
_PROMPT = 1.0
"""Seconds within which a member that is there and fit takes a vacant slot, besides the hesitation for others."""
_MAX_TRIALS = 3


class ClusterPlan(CrawlPlan, frozen=True, kw_only=True):
    """What happens to a simulated cluster."""

    counts: Counts
    ttl: float
    """Seconds of a session."""
    has_indexes: bool
    """Whether the nodes choose the numbers in their names."""

    @classmethod
    def draw_cluster(cls, world: World) -> ClusterPlan:
        """A plan that the seed decides."""
        random = world.random
        plan = structs.asdict(CrawlPlan.draw(world, CLUSTER_FAULTS))
        nodes, runner = random.choice([1, 2, 3, 4, 6]), random.choice([1, 1, 2, 3])
        plan |= {"workers": nodes, "pages": random.choice([10, 40, 80]), "delay": random.choice([0.2, 1.0, 3.0])}
        return cls(
            **plan,
            counts=Counts(runner, random.choice([0, 1, 2])),
            ttl=random.choice([4.0, 6.0, 10.0]),
            has_indexes=random.random() < 0.5,
        )


class ClusterFaults(Faults):
    """Also those of nodes and of their coordinator."""

    def __init__(self, crawl: ClusterCrawl) -> None:
        file = crawl.world.folder / "items.jsonl"
        super().__init__(crawl.world, crawl.plan.faults, file, crawl.world.note)
        self._crawl = crawl
        self._coordinator = crawl.coordinator
        self._events |= {
            "stop": self._stop,
            "scale": self._scale,
            "cut-coordinator": self._cut_off_coordinator,
            "cut-store": self._cut_off_store,
            "coordinator-away": self._take_coordinator_away,
            "coordinator-restart": self._restart_coordinator,
            LOSS: self._lose_coordinator_data,
        }

    def _end(self) -> None:
        super()._end()
        self._coordinator.is_away = False
        self._coordinator.cut_off.clear()
        self._world.server.cut_off.clear()

    async def _stop(self) -> None:
        self._crawl.stop(self._victim())

    async def _set_output_back(self) -> None:
        """Not when all pages are done: nodes of a finished run do not open its outputs, and so would not notice."""
        if await self._crawl.has_pages():
            await super()._set_output_back()

    async def _scale(self) -> None:
        counts = Counts(self._world.random.choice([1, 2, 3]), self._world.random.choice([0, 1, 2]))
        if self._crawl.cluster.counts is not None:
            self._note(f"the cluster is scaled to {counts}")
            self._crawl.cluster.execute("scale", (counts.runner, counts.backup), self._world.machine)

    async def _cut_off_coordinator(self) -> None:
        await self._cut_off("coordinator", self._coordinator.cut_off)

    async def _cut_off_store(self) -> None:
        await self._cut_off("store", self._world.server.cut_off)

    async def _cut_off(self, name: str, cut_off: set[Process]) -> None:
        victim, seconds = self._victim(), self._world.random.choice([1.0, 5.0, 15.0, 40.0])
        if victim is not None:
            self._note(f"{victim.name} cannot reach the {name} for {seconds} s")
            cut_off.add(victim)
            self._world.loop.call_later(seconds, cut_off.discard, victim)

    async def _take_coordinator_away(self) -> None:
        seconds = self._world.random.choice([0.5, 4.0, 15.0])
        self._note(f"the coordinator is away for {seconds} s")
        self._coordinator.is_away = True
        await asyncio.sleep(seconds)
        self._coordinator.is_away = False

    async def _restart_coordinator(self) -> None:
        self._note("the coordinator is killed, and starts again")
        self._coordinator.restart()

    async def _lose_coordinator_data(self) -> None:
        self._note("the coordinator loses its data")
        self._coordinator.lose_data()


class ClusterCrawl(Crawl):
    """One crawl of a cluster in a world. `run` it, then `judge`."""

    plan: ClusterPlan

    def __init__(self, world: World, plan: ClusterPlan) -> None:
        self.coordinator = CoordinatorServer(world)
        self._nodes: dict[Process, Node] = {}
        self._trials = 0
        super().__init__(world, plan)

    def _make_faults(self) -> Faults:
        return ClusterFaults(self)

    @property
    def cluster(self) -> Cluster:
        """The cluster as the coordinator has it now."""
        return self.coordinator.cluster(RUN)

    async def has_pages(self) -> bool:
        """Whether the run has pages that are not done."""
        return await self._run_state() == "running" and (await (await self._frontier()).stats()).remaining > 0

    # -- processes

    def _roles(self) -> dict[str, Work]:
        return {f"node{number}.": partial(self._take_part, number) for number in range(1, self.plan.workers + 1)}

    async def _take_part(self, number: int) -> None:
        plan = self.plan
        node = self._nodes[self.world.current] = Node(
            self._spider(),
            self._config,
            name="node_<index>" if plan.has_indexes else f"node_{number}",
            runner=plan.counts.runner,
            backup=plan.counts.backup,
            coordinator=URL,
            run_id=RUN,
            session=plan.ttl,
            outputs=self._outputs,
        )
        self._note_end(await node)

    def stop(self, process: Process | None) -> None:
        """Stop the node of a process, as SIGTERM does."""
        if process in self._nodes and not process.is_frozen:
            self._note(f"stop {process.name}")
            process.run(self._nodes[process].stop)

    async def run(self) -> None:
        with coordinated(self.world, self.coordinator):
            watching = [self.world.loop.create_task(work()) for work in (self._watch, self._try_takeovers)]
            await super().run()
            for task in watching:
                task.cancel()

    # -- takeovers when nothing fails any more

    async def _wait_until_settled(self) -> None:
        while not self._supervisor.is_calm:
            await asyncio.sleep(1.0)
        await asyncio.sleep(_SETTLED_AFTER + self.plan.ttl)

    async def _try_takeovers(self) -> None:
        """End Runners one by one."""
        await self._wait_until_settled()
        random = self.world.random
        while self._trials < _MAX_TRIALS and not await self._has_ended():
            runners = [tenure for tenure in self.coordinator.tenures if self._is_open(tenure)]
            if runners:
                self._trials += 1
                process = random.choice(runners).process
                self._end_runner(process, random.choice(["kill", "stop", "freeze"]))
            await asyncio.sleep(2 * self.plan.ttl + random.uniform(5.0, 6.0))

    def _is_open(self, tenure: Tenure) -> bool:
        return tenure.until > self.world.server.clock() and tenure.process.is_alive

    def _end_runner(self, process: Process, how: str) -> None:
        self._note(f"without other faults: {how} {process.name}")
        if how == "kill":
            process.kill()
        elif how == "stop":
            self.stop(process)
        else:
            process.freeze()
            self.world.loop.call_later(1.5 * self.plan.ttl, process.thaw)

    async def _watch(self) -> None:
        """A slot does not stay vacant while somebody could take it."""
        await self._wait_until_settled()
        vacant_since: dict[int, float] = {}
        while True:
            await asyncio.sleep(_POLL)
            now = self.world.loop.time()
            vacant_since = {index: vacant_since.get(index, now) for index in self._neglected_slots()}
            for index, since in vacant_since.items():
                if now - since > _PROMPT + HESITATION * self.plan.workers and not await self._has_ended():
                    self.world.require(False, f"slot {index} is vacant since {since - 1000:.3f}, and nobody takes it")
                    return

    def _neglected_slots(self) -> list[int]:
        """The vacant slots, if a member can take one."""
        cluster, now = self.cluster, self.world.server.clock()
        held = {
            index for index, slot in cluster.slots.items() if slot.holder and cluster.end_of(slot.holder) > now
        }  # a member whose session has ended may still be there
        runner = cluster.counts.runner if cluster.counts else 0
        vacant = [index for index in range(runner) if index not in held][: max(0, runner - len(held))]
        holders = {cluster.slots[index].holder for index in held}
        waiting = [name for name in cluster.members if name not in holders and self._is_able(cluster, name)]
        return vacant[: len(waiting)]

    def _is_able(self, cluster: Cluster, name: str) -> bool:
        process, member = cluster.processes[name], cluster.members[name]
        return process.is_alive and not process.is_frozen and bool(member.fit)

    # -- the judges

    async def judge(self) -> None:
        await super().judge()
        self.cluster.remove_lost()
        self._judge_tenures()
        self._judge_work()

    def _judge_tenures(self) -> None:
        """A slot has one holder, and each holder has a later epoch."""
        tenures_of = defaultdict(list)
        for tenure in self.coordinator.tenures:
            tenures_of[tenure.index].append(tenure)
        for tenures in tenures_of.values():
            for tenure, following in pairwise(tenures):
                assert following.epoch > tenure.epoch, f"{following} has no later epoch than {tenure}"
                has_ended = tenure.until <= following.since or LOSS in self.plan.faults
                assert has_ended, f"{following} began before the end of {tenure}"

    def _judge_work(self) -> None:
        """Only holders of slots contact the site. What they asked for ends with their sessions, if they run then."""
        tenures_of = defaultdict(list)
        for tenure in self.coordinator.tenures:
            tenures_of[tenure.process].append(tenure)
        clock = self.world.server.clock() - self.world.loop.time()
        for visit in self.world.site.visits:
            start, end = visit.start + clock, visit.end + clock
            tenures = [tenure for tenure in tenures_of[visit.process] if tenure.since <= start <= tenure.until]
            assert tenures, f"without a slot: {visit}; the process had {tenures_of[visit.process]}"
            ran = visit.process.thawed_at < visit.start and not visit.process.is_frozen
            assert end <= tenures[-1].until + SLACK or not ran, f"{visit} went on after {tenures[-1]}"

    def _knows(self, visit: Visit, following: Visit) -> bool:
        """When the coordinator has lost its data, two nodes may have the same slot until their sessions end."""
        since = visit.start - self.plan.ttl
        lost = any(since <= at <= following.start for at in self.coordinator.lost_at)
        return not lost and super()._knows(visit, following)

    def _judge_gaps(self) -> None:
        if not self._trials:
            super()._judge_gaps()


async def simulate_cluster(world: World) -> None:
    """Simulate one crawl of a cluster, and judge it."""
    plan = ClusterPlan.draw_cluster(world)
    world.note(repr(plan))
    crawl = ClusterCrawl(world, plan)
    await crawl.run()
    await crawl.judge()
