"""Queries about runs and hosts, for the command line and the HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from shoal.errors import ConfigError
from shoal.fetch.page_needs import Need, learned_needs
from shoal.ports import HostState, Run, Store
from shoal.urls.normalize import host_of, normalize_url

T = TypeVar("T")


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


async def hosts_of(store: Store, runs: Sequence[Run], limit: int) -> list[HostState]:
    """The busiest hosts of some runs, with the requests of all these runs."""

    async def read(run: Run) -> list[HostState]:
        return await (await store.frontier(run.run_id)).host_states(limit)

    found: dict[str, HostState] = {}
    for states in await asyncio.gather(*map(read, runs)):
        for state in states:
            known = found.get(state.host)
            found[state.host] = replace(known, ready=known.ready + state.ready) if known is not None else state
    return sorted(found.values(), key=lambda state: (-(state.ready + state.in_flight), state.host))[:limit]


async def page_needs_of(store: Store, run: Run, hosts: Sequence[str]) -> dict[str, dict[str, Need]]:
    """What was learned of the pages of these hosts: which kinds need a browser. Hosts of which nothing is known are
    left out."""
    frontier = await store.frontier(run.run_id)
    found = {host: await learned_needs(frontier, host) for host in hosts}
    return {host: needs for host, needs in found.items() if needs}
