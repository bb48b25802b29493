"""What happened to a URL of a run, with the pages that led to it, its redirects, and what its robots.txt says."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec import Struct

from shoal.config import Config
from shoal.errors import ItemError, RequestError
from shoal.fetch.layers.robots import fact_name, read_rules
from shoal.http import Request
from shoal.item import decode_item
from shoal.operations.charts import value_at
from shoal.ports import Documents, Frontier, History, HostState, LoggedItem, RequestState
from shoal.runs.reports import read_processes
from shoal.runs.samples import SKEW, RunSample, read_history
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
                text = "not in the queue"
            case "dead":
                text = f"failed ({self.kind}): {self.reason}"
            case "done":
                text = f"done{status}"
            case "leased":
                text = "in flight"
            case "waiting":
                text = "waiting for another attempt"
            case "ready":
                text = "still in the queue"
        if self.found_on is None:
            return text
        return f"{text}; the run had it already, {f'from {self.found_on}' if self.found_on else 'as a start request'}"


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
    parents: list[str] = []
    parent = history.parent
    while parent is not None and parent not in parents and len(parents) < MAX_PARENTS:
        parents.append(parent)
        try:
            before = await frontier.find(Request(parent), exact=True)
        except RequestError:
            break
        parent = before.parent if before is not None else None
    return tuple(parents)


async def _redirects(frontier: Frontier, history: History, *, exact: bool) -> tuple[Hop, ...]:
    """The chain of redirects of a page: from its first URL through this page to its end."""
    first, chain = history, await _follow(frontier, history, exact=exact)
    fingerprints = {history.fingerprint}
    while first.parent is not None and len(fingerprints) < MAX_HOPS:
        before = await _find(frontier, first.parent, exact=exact)
        if before is None or before.fingerprint in fingerprints or _target(before) is None:
            break
        longer = await _follow(frontier, before, exact=exact)  # a loop may pass the parent several times
        if not any(page.fingerprint == first.fingerprint for _, page in longer if page is not None):
            break
        first, chain = before, longer
        fingerprints.add(first.fingerprint)
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


# The items of one URL. The item log has no index, so the history of the run says where to search.


MAX_ITEMS = 5
MAX_TEXT = 2000
"""How much of an item is shown, in characters."""
_MAX_SEARCHED = 5000
_MAX_BYTES = 8 << 20
_READ = (8, 200)
"""How many items one call reads, at first and at most."""

_encode = msgspec.json.Encoder().encode


async def read_url_items(documents: Documents, frontier: Frontier, run_id: str, history: History) -> list[str]:
    """The first items of a URL as JSON, as far as a short search finds them: the item log may be trimmed, or the crawl
    too fast for its history. Long ones are cut."""
    if not history.items or not history.fingerprint:
        return []
    last = (await frontier.stats()).items
    first, end = find_range(await read_history(documents, run_id), _ended_at(history), last)
    count_shown = min(MAX_ITEMS, history.items)
    matching: list[LoggedItem] = []
    size, count = 0, _READ[0]
    while first < end and size < _MAX_BYTES and len(matching) < count_shown:
        items = await frontier.read_items(first, min(count, end - first), max_bytes=_MAX_BYTES)
        if not items:
            break
        matching += [item for item in items if item.fingerprint == history.fingerprint]
        size += sum(len(item.payload) for item in items)
        first, count = items[-1].seq, min(_READ[1], 4 * count)
    return [_as_json(item) for item in matching[:count_shown]]


def find_range(samples: Sequence[RunSample], at: float | None, last: int) -> tuple[int, int]:
    """The range of items that were logged around a time: after the first number, up to and including the second."""
    if at is None:
        return max(0, last - _MAX_SEARCHED), last
    times = [sample.at for sample in samples]
    before, after = bisect_left(times, at - SKEW) - 1, bisect_left(times, at + SKEW)
    first = samples[before].items if before >= 0 else 0
    end = samples[after].items if after < len(samples) else last
    if end - first <= _MAX_SEARCHED:
        return first, end
    middle = int(value_at(times, samples, at, attrgetter("items"))) if times and at <= times[-1] else last
    return max(first, middle - _MAX_SEARCHED // 2), min(end, middle + _MAX_SEARCHED // 2)


def _ended_at(history: History) -> float | None:
    """When its items were logged: in the step that ended it."""
    return next((event.at for event in reversed(history.events) if event.kind in ("done", "dead")), None)


def _as_json(item: LoggedItem) -> str:
    try:
        text = _encode(decode_item(item.payload)[1]).decode()
    except ItemError as exc:
        return str(exc)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
