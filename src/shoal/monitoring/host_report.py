"""Everything that a store knows of one host: its politeness, its robots.txt, its identities, what its pages need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shoal.config import Config
from shoal.fetch.page_needs import Need, learned_needs
from shoal.identities.facts import IdentityFacts
from shoal.identities.listing import IdentityState, list_identities
from shoal.middleware.robots import fact_name, read_rules
from shoal.ports import Hosts, HostState, Run, Store

_MAX_IDENTITIES = 50
MAX_ROBOTS = 50_000
"""How much of a robots.txt is shown, in characters."""


class RobotsFile(Struct, frozen=True, kw_only=True):
    """A robots.txt as workers of the store read it. Its text is empty if the host has none."""

    origin: str
    text: str
    is_cut: bool = False
    """Whether the file is longer than the text."""
    crawl_delay: float | None = None
    """The Crawl-delay for the user agent of this process."""


class HostReport(Struct, frozen=True, kw_only=True):
    """One host."""

    state: HostState
    """``ready`` counts the requests of all these runs."""
    ready_by_run: dict[str, int]
    """Ready requests by run."""
    robots: list[RobotsFile]
    identities: list[IdentityState]
    needs: dict[str, Need]
    """What its pages need, by kind of page."""


async def report_host(store: Store, runs: Sequence[Run], config: Config, host: str) -> HostReport:
    """Describe a host, as these runs see it. There must be at least one."""
    frontiers = await asyncio.gather(*(store.frontier(run.run_id) for run in runs))
    found = await asyncio.gather(*(frontier.host_state(host) for frontier in frontiers))
    states = {run.run_id: state for run, state in zip(runs, found, strict=True)}
    frontier = frontiers[0]
    state = states[runs[0].run_id]
    identities = await list_identities(IdentityFacts(frontier), [host], _MAX_IDENTITIES)
    return HostReport(
        state=replace(state, ready=sum(each.ready for each in states.values())),
        ready_by_run={run_id: each.ready for run_id, each in states.items() if each.ready},
        robots=await read_robots(frontier, host, config),
        identities=[each for each in identities if each.host or each.state == "removed"],
        needs=await learned_needs(frontier, host),
    )


async def read_robots(hosts: Hosts, host: str, config: Config) -> list[RobotsFile]:
    """The robots.txt files of a host that are still valid, by origin."""
    found = []
    for origin in (f"https://{host}", f"http://{host}"):
        stored = await hosts.recall(fact_name(origin))
        if stored is not None:
            text = stored.decode("utf-8", "replace")
            delay = read_rules(text, config.user_agent, config.robots).crawl_delay
            shown = text[:MAX_ROBOTS]
            found.append(RobotsFile(origin=origin, text=shown, is_cut=len(text) > len(shown), crawl_delay=delay))
    return found
