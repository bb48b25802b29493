"""Hosts and runs as people search them, and everything that a store knows of one host: its politeness, its robots.txt,
its identities, what its pages need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.fetch.layers.identity_facts import IdentityFacts, IdentityState, list_identities
from shoal.fetch.layers.robots import fact_name, read_rules
from shoal.fetch.routing import Need, learned_needs
from shoal.ports import Hosts, HostState, HostUpdate, Run, Store
from shoal.urls.normalize import host_of, normalize_url

_MAX_IDENTITIES = 50
_MAX_SEARCHED = 1000
"""Of so many hosts of each run, the busiest ones, those with a text in their name are listed."""
MAX_ROBOTS = 50_000
"""How much of a robots.txt is shown, in characters."""


class RobotsFile(Struct, frozen=True, kw_only=True):
    """A robots.txt as workers of the store read it. Its text is empty if the host has none."""

    origin: str
    text: str
    is_cut: bool = False
    """Whether the file is longer than the text."""
    crawl_delay: float | None = None
    """Seconds: the Crawl-delay for the user agent of this process."""


class HostReport(Struct, frozen=True, kw_only=True):
    """All that a store knows of one host."""

    state: HostState
    """``ready`` counts the requests of all runs in ``ready_by_run``."""
    ready_by_run: dict[str, int]
    """Ready requests by run."""
    robots: list[RobotsFile]
    identities: list[IdentityState]
    needs: dict[str, Need]
    """Which pages need a browser, by kind of page."""


async def report_host(store: Store, runs: Sequence[Run], config: Config, host: str) -> HostReport:
    """Describe a host, as these runs see it. There must be at least one."""
    frontiers = await asyncio.gather(*(store.frontier(run.run_id) for run in runs))
    host_states = await asyncio.gather(*(frontier.host_state(host) for frontier in frontiers))
    states = {run.run_id: state for run, state in zip(runs, host_states, strict=True)}
    frontier = frontiers[0]
    state = states[runs[0].run_id]
    identities = await list_identities(IdentityFacts(frontier), [host], _MAX_IDENTITIES)
    return HostReport(
        state=replace(state, ready=sum(host_state.ready for host_state in states.values())),
        ready_by_run={run_id: host_state.ready for run_id, host_state in states.items() if host_state.ready},
        robots=await read_robots(frontier, host, config),
        identities=[identity for identity in identities if identity.host or identity.state == "removed"],
        needs=await learned_needs(frontier, host),
    )


async def read_robots(hosts: Hosts, host: str, config: Config) -> list[RobotsFile]:
    """The robots.txt files of a host that are still valid, by origin."""
    files = []
    for origin in (f"https://{host}", f"http://{host}"):
        stored = await hosts.recall(fact_name(origin))
        if stored is not None:
            text = stored.decode("utf-8", "replace")
            delay = read_rules(text, config.user_agent, config.robots).crawl_delay
            shown = text[:MAX_ROBOTS]
            files.append(RobotsFile(origin=origin, text=shown, is_cut=len(text) > len(shown), crawl_delay=delay))
    return files


# -- searching


def matching_runs(runs: Sequence[Run], text: str) -> list[Run]:
    """The runs with this text in the name of their spider or in their ``run_id``."""
    return [run for run in runs if text.lower() in run.spider.lower() or text in run.run_id]


def host_name(text: str) -> str:
    """A host as frontiers name it; ``*`` for all others. ConfigError or RequestError if it is invalid."""
    if text == "*":
        return text
    if "/" in text or text.split() != [text]:
        raise ConfigError(f"{text!r} is not a host; write it as example.com or example.com:8080")
    return host_of(normalize_url(f"http://{text}/"))


async def change_host(hosts: Hosts, text: str, update: HostUpdate) -> str:
    """Change a host for all runs of the store, and return its name. ConfigError if the host is invalid, or is to be
    blocked and stands for all hosts."""
    host = host_name(text)
    if host == "*" and update.block_for is not UNSET:
        raise ConfigError(
            "cannot block '*': it stands for the default delay and concurrency. To stop all hosts, pause the run"
        )
    await hosts.update_host(host, update)
    return host


async def hosts_of(store: Store, runs: Sequence[Run], limit: int, search: str = "") -> list[HostState]:
    """The busiest hosts of some runs with ``search`` in their name, with the requests of all these runs."""
    search, count = search.lower(), _MAX_SEARCHED if search else limit

    async def read(run: Run) -> list[HostState]:
        return await (await store.frontier(run.run_id)).host_states(count)

    hosts: dict[str, HostState] = {}
    for states in await asyncio.gather(*map(read, runs)):
        for state in states:
            if search in state.host:
                before = hosts.get(state.host)
                hosts[state.host] = state if before is None else replace(before, ready=before.ready + state.ready)
    return sorted(hosts.values(), key=lambda state: (-(state.ready + state.in_flight), state.host))[:limit]


async def page_needs_of(store: Store, run: Run, hosts: Sequence[str]) -> dict[str, dict[str, Need]]:
    """What was learned of the pages of these hosts: which kinds need a browser. Hosts of which nothing is known are
    left out."""
    frontier = await store.frontier(run.run_id)
    needs_by_host = {host: await learned_needs(frontier, host) for host in hosts}
    return {host: needs for host, needs in needs_by_host.items() if needs}
