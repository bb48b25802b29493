"""What happened to a URL of a run, with the pages that led to it, its redirects, and what its robots.txt says."""

from __future__ import annotations

import re
from typing import NamedTuple

from msgspec import Struct

from shoal.config import Config
from shoal.errors import RequestError
from shoal.http import Request
from shoal.middleware.robots import fact_name, read_rules
from shoal.monitoring.reports import read_processes
from shoal.ports import Documents, Frontier, History, HostState, RequestState
from shoal.urls.normalize import host_of, normalize_url, origin_of

MAX_PARENTS = 20
"""The longest chain of pages that leads to a URL."""
MAX_HOPS = 25
"""The longest part of a chain of redirects that is shown."""
_MOVED = re.compile(r"(?:redirected to|replaced by [A-Z]+) (\S+)")
"""The note on the completion of a page that another request continues."""


class Hop(Struct, frozen=True, kw_only=True):
    """One page of a chain of redirects."""

    url: str
    state: RequestState | None
    """None: the run does not have it."""
    status: int = 0
    kind: str = ""
    reason: str = ""
    found_on: str | None = None
    """The run had this page already when the chain reached it: the page that it was found on, "" for a start
    request."""

    @property
    def text(self) -> str:
        """What became of it, for people."""
        status = f", HTTP {self.status}" if self.status else ""
        match self.state:
            case None:
                found = "not in the queue"
            case "dead":
                found = f"failed ({self.kind}): {self.reason}"
            case "done":
                found = f"done{status}"
            case "leased":
                found = "in flight"
            case "waiting":
                found = "waiting for another attempt"
            case "ready":
                found = "still in the queue"
        if self.found_on is None:
            return found
        return f"{found}; the run had it already, {f'from {self.found_on}' if self.found_on else 'as a start request'}"


class UrlReport(Struct, frozen=True, kw_only=True):
    """A URL of a run."""

    history: History
    parents: tuple[str, ...]
    """The page that links or redirects to it, the page that links to that one, and so on."""
    redirects: tuple[Hop, ...] = ()
    """The whole chain of redirects that it belongs to, from the first URL to the last. Empty if it has none."""
    host: HostState
    robots: str
    """What robots.txt says about it."""

    @property
    def outcome(self) -> str:
        """How its chain of redirects ended, for people. Empty if it has none."""
        if not self.redirects:
            return ""
        way = " → ".join(hop.url for hop in self.redirects[1:])
        more = "" if len(self.redirects) < MAX_HOPS else " …"
        return f"redirected to {way}{more}: {self.redirects[-1].text}"


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
        history=history, parents=await _parents(frontier, history),
        redirects=await _redirects(frontier, history, exact=exact), host=await frontier.host_state(host_of(page.url)),
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


async def _redirects(frontier: Frontier, history: History, *, exact: bool) -> tuple[Hop, ...]:
    """The chain of redirects of a page: from its first URL through this page to its end."""
    first, chain = history, await _follow(frontier, history, exact=exact)
    seen = {history.fingerprint}
    while first.parent is not None and len(seen) < MAX_HOPS:
        before = await _find(frontier, first.parent, exact=exact)
        if before is None or before.fingerprint in seen or _target(before) is None:
            break
        longer = await _follow(frontier, before, exact=exact)  # a loop may pass the parent several times
        if not any(page.fingerprint == first.fingerprint for _, page in longer if page is not None):
            break
        first, chain = before, longer
        seen.add(first.fingerprint)
    return tuple(hop for hop, _ in chain) if len(chain) > 1 else ()


async def _follow(frontier: Frontier, history: History, *, exact: bool) -> list[tuple[Hop, History | None]]:
    """The pages to which a page redirects, one after the other, beginning with itself."""
    chain: list[tuple[Hop, History | None]] = [(_hop(history), history)]
    while (url := _target(history)) is not None and len(chain) < MAX_HOPS:
        found_on = None
        following = await _find(frontier, url, exact=True, parent=history.fingerprint)  # a URL of the chain again
        if following is None:
            following = await _find(frontier, url, exact=exact)
            if following is None:
                return [*chain, (Hop(url=url, state=None), None)]
            if following.parent != history.url:
                found_on = following.parent or ""
        chain.append((_hop(following, found_on), following))
        history = following
    return chain


async def _find(frontier: Frontier, url: str, *, exact: bool, parent: bytes = b"") -> History | None:
    try:
        return await frontier.find(Request(url), exact=exact, parent=parent)
    except RequestError:
        return None


def _target(history: History) -> str | None:
    """Where a page that is done redirects to."""
    notes = [event.detail for event in history.events if event.kind == "note"] if history.state == "done" else []
    match = _MOVED.match(notes[-1]) if notes else None
    return None if match is None else match[1]


def _hop(history: History, found_on: str | None = None) -> Hop:
    return Hop(
        url=history.url, state=history.state, status=history.status, kind=history.kind, reason=history.reason,
        found_on=found_on,
    )  # fmt: skip


async def _robots(frontier: Frontier, history: History, agent: Agent, config: Config) -> str:
    """Whether the stored robots.txt allows it, for the user agent of the run. What the crawl recorded takes
    precedence."""
    if not agent.obeys_robots:
        return "not checked: the run does not obey robots.txt"
    stored = await frontier.recall(fact_name(origin_of(history.url)))
    if stored is None:
        return "allowed when it was fetched, or not checked" if history.status else "not read yet, or not checked"
    rules = read_rules(stored.decode("utf-8", "replace"), agent.user_agent, config.robots).rules
    if rules is None or rules.can_fetch(normalize_url(history.url), agent.user_agent):
        return "allowed"
    return (
        "disallowed, but fetched: the run does not obey robots.txt, or it changed" if history.status else "disallowed"
    )
