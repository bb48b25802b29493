"""What happened to a URL of a run, with the pages that led to it and what its robots.txt says."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from shoal.config import Config
from shoal.errors import RequestError
from shoal.http import Request
from shoal.middleware.robots import fact_name, read_rules
from shoal.monitoring.reports import read_processes
from shoal.ports import Documents, Frontier, History, HostState
from shoal.urls.normalize import host_of, origin_of

MAX_PARENTS = 20
"""The longest chain of pages that leads to a URL."""


class UrlReport(Struct, frozen=True, kw_only=True):
    """A URL of a run."""

    history: History
    parents: tuple[str, ...]
    """The page that links or redirects to it, the page that links to that one, and so on."""
    host: HostState
    robots: str
    """What robots.txt says about it."""


class Agent(NamedTuple):
    """How a run fetches."""

    user_agent: str
    obeys_robots: bool = True


async def read_agent(documents: Documents, run_id: str, config: Config) -> Agent:
    """What the processes of a run report; the user agent of the configuration if they report none."""
    for report in await read_processes(documents, run_id):
        if report.user_agent:
            return Agent(report.user_agent, report.obeys_robots)
    return Agent(config.user_agent)


async def report_url(
    frontier: Frontier, url: str, config: Config, agent: Agent, *, exact: bool = False
) -> UrlReport | None:
    """Describe a URL. None if the run does not have it. RequestError if it is invalid. ``exact``: see
    `Inspection.find`."""
    page = Request(url)
    history = await frontier.find(page, exact=exact)
    if history is None:
        return None
    return UrlReport(
        history=history, parents=await _parents(frontier, history), host=await frontier.host_state(host_of(page.url)),
        robots=await _robots(frontier, history, agent, config),
    )  # fmt: skip


async def _parents(frontier: Frontier, history: History) -> tuple[str, ...]:
    found: list[str] = []
    parent = history.parent
    while parent is not None and parent not in found and len(found) < MAX_PARENTS:
        found.append(parent)
        try:
            before = await frontier.find(Request(parent), exact=True)
        except RequestError:
            break
        parent = before.parent if before is not None else None
    return tuple(found)


async def _robots(frontier: Frontier, history: History, agent: Agent, config: Config) -> str:
    """Whether the stored robots.txt allows it, for the user agent of the run. What the crawl recorded takes
    precedence."""
    if not agent.obeys_robots:
        return "not checked: the run does not obey robots.txt"
    stored = await frontier.recall(fact_name(origin_of(history.url)))
    if stored is None:
        return "allowed when it was fetched, or not checked" if history.status else "not read yet, or not checked"
    rules = read_rules(stored.decode("utf-8", "replace"), agent.user_agent, config.robots).rules
    if rules is None or rules.can_fetch(history.url, agent.user_agent):
        return "allowed"
    return (
        "disallowed, but fetched: the run does not obey robots.txt, or it changed" if history.status else "disallowed"
    )
