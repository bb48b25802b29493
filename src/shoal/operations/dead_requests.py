"""The failed requests of a run: retrying them, which reopens a finished run, and examples of each kind."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from fnmatch import translate

from msgspec import Struct

from shoal.crawling.stats import LimitReached
from shoal.errors import RunError
from shoal.frontier.rules import is_retried, no_run
from shoal.http import Request
from shoal.operations.hosts import host_name
from shoal.operations.processes import read_run_processes
from shoal.ports import MAX_RETRIED, Documents, Frontier, History, Inspection, Run, Store
from shoal.runs.reports import read_processes
from shoal.runs.run_choice import mark_reopened
from shoal.runs.run_end import closing, forget_outcome, limit_of
from shoal.urls.normalize import host_of

_MAX_READ = 1000
"""Failed requests that are read to find examples."""


class DeadFilter(Struct, frozen=True, kw_only=True):
    """Selects failed requests of a run."""

    kinds: tuple[str, ...] | None = None
    """Kinds of failure. None: all but those that robots.txt or the scope forbids."""
    host: str | None = None
    url: str | None = None
    """A pattern of URLs: ``*`` stands for any text, ``?`` for any character."""

    @classmethod
    def of(cls, kinds: Sequence[str], host: str | None, url: str | None) -> DeadFilter:
        """A filter as users write it. ConfigError or RequestError if the host is invalid."""
        return cls(kinds=tuple(kinds) or None, host=None if host is None else host_name(host), url=url)

    @property
    def is_by_url(self) -> bool:
        return self.host is not None or self.url is not None

    def __str__(self) -> str:
        """For people: ``http 500, of a.example``."""
        words = [", ".join(self.kinds or ("all kinds",)), f"of {self.host}" * (self.host is not None)]
        return ", ".join(filter(None, [*words, self.url or ""]))

    def pattern(self) -> re.Pattern[str]:
        """The pattern of URLs as a regular expression without backtracking."""
        return re.compile(translate("*" if self.url is None else self.url.replace("[", "[[]")))


# -- retrying


class RetryResult(Struct, frozen=True, kw_only=True):
    """What a retry did, and what the run needs now."""

    run: Run
    """The run after the retry."""
    count: int
    """Requests that are queued again."""
    reopened: bool
    """Whether the run was finished, and is running again."""
    left: int
    """Requests in the queue of the run."""
    limit: LimitReached | None
    """The limit at which the run had stopped."""
    workers: int
    """Processes that work on the run."""
    hint: str
    """How to start a process that continues the run."""

    def __str__(self) -> str:
        """For people: what happened, and what to do."""
        run_id, state = self.run.run_id, self.run.state
        if self.count:
            message = f"{self.count} requests are queued again" if self.count > 1 else "1 request is queued again"
        elif self.reopened:
            message = f"no other failed request matches, but {self.left} were queued again before"
        else:
            return f"0 requests are queued again: no failed request of run {run_id} matches"
        if state == "paused":
            return f"{message}. Run {run_id} is paused: `shoal resume {run_id}` continues it"
        if state not in ("queued", "running"):
            return f"{message}, but run {run_id} is {state} now: `shoal resume {run_id}` continues it"
        begun = f"{message}. Run {run_id} is {state}{' again' if self.reopened else ''}"
        if self.limit is not None:
            more = f"{self.limit.setting} is above {self.limit.value}"
            return f"{begun}. It had {self.limit}: nothing more is fetched until {more}; {self.hint}"
        if self.workers:
            return f"{begun}: {'1 process works' if self.workers == 1 else f'{self.workers} processes work'} on it"
        return f"{begun}; no process works on it: {self.hint}"


async def retry_failed(store: Store, run: Run, frontier: Frontier, which: DeadFilter) -> RetryResult:
    """Make the failed requests of a filter ready again. A finished run becomes running, so that workers take it.

    RunError if the run was cancelled, or stopped at a limit that cannot be raised. If it is interrupted, call it again:
    a finished run whose queue is not empty is reopened even if nothing is left to retry."""
    return await _retry(store, run, frontier, lambda: retry_matching(frontier, which))


async def retry_request(store: Store, run: Run, frontier: Frontier, request: Request) -> RetryResult:
    """Like `retry_failed`, for one request."""
    return await _retry(store, run, frontier, lambda: frontier.retry_dead(only=[request.fingerprint()]))


async def _retry(store: Store, run: Run, frontier: Frontier, retry: Callable[[], Awaitable[int]]) -> RetryResult:
    limit = await limit_of(store, run)
    _check_retryable(run, limit)
    count = await retry()
    # Only now: a run that is reopened first could be finished again before its requests are in the queue.
    run, reopened = await _reopen(store, run.run_id, frontier, is_limited=limit is not None and not count)
    processes = await read_run_processes(store, frontier, run.run_id) if store.shared else []
    return RetryResult(
        run=run, count=count, reopened=reopened, left=(await frontier.stats()).remaining, limit=limit,
        workers=sum(process.state == "working" for process in processes), hint=await start_hint(store, run),
    )  # fmt: skip


def _check_retryable(run: Run, limit: LimitReached | None) -> None:
    """RunError if no worker would fetch a request that is retried."""
    if run.state == "cancelled":
        raise RunError(
            f"run {run.run_id} was cancelled, so its failed requests are not retried; `shoal resume {run.run_id}` "
            "continues it, then retry them"
        )
    if limit is not None and not run.settings.keys().isdisjoint(("seeds", "registered")):
        raise RunError(
            f"run {run.run_id} {limit}, and its workers cannot raise that limit, so its failed requests are not "
            f"retried; start a new run with a higher {limit.setting}"
        )


async def _reopen(store: Store, run_id: str, frontier: Frontier, *, is_limited: bool) -> tuple[Run, bool]:
    """Move a finished run with requests in its queue back to ``running``. Return the run, and whether it was moved.
    ``is_limited``: it is finished although its queue is not empty."""
    run = await store.get_run(run_id)
    if run is None:
        raise no_run(run_id)
    if run.state != "finished" or is_limited or not (await frontier.stats()).remaining:
        return run, False
    await mark_reopened(store, run_id)
    await forget_outcome(store, run_id)
    with suppress(RunError):  # another process was first, or deleted it
        return await store.transition(run_id, "running"), True
    return await store.get_run(run_id) or run, False


async def start_hint(documents: Documents, run: Run) -> str:
    """How to start a process that works on a run: with a command that can be pasted, if one is known."""
    if "registered" in run.settings:
        return "a server (`shoal serve`) that has its spider takes it within seconds"
    reports = await read_processes(documents, run.run_id)
    for report in reports:
        if report.command:
            return f"start one with `{report.command}`"
    if "seeds" in run.settings:
        return f"start one with `shoal worker SPIDER --run-id {run.run_id}`"
    if any(report.role == "server" for report in reports):
        return "repeat the request that started it (`POST /api/runs`)"
    return "repeat the command or program that started it"


async def retry_matching(frontier: Inspection, which: DeadFilter) -> int:
    """Make the failed requests of a filter ready again. Returns how many. Requests of a host or a URL are retried in
    steps: if it is interrupted, call it again."""
    if not which.is_by_url:
        return await frontier.retry_dead(which.kinds)
    retried, matches = 0, which.pattern().match
    fingerprints: list[bytes] = []
    async with closing(frontier.dead()) as dead:
        async for request in dead:
            if (
                is_retried(request.kind, which.kinds)
                and which.host in (None, _host(request.url))
                and matches(request.url)
            ):
                fingerprints.append(request.fingerprint)
            if len(fingerprints) == MAX_RETRIED:
                retried += await frontier.retry_dead(which.kinds, only=fingerprints)
                fingerprints = []
    return retried + (await frontier.retry_dead(which.kinds, only=fingerprints) if fingerprints else 0)


def _host(url: str) -> str:
    return host_of(url) if "://" in url else ""  # another program overwrote the request


# -- examples


class DeadKind(Struct, frozen=True, kw_only=True):
    """The failed requests of one kind."""

    kind: str
    count: int
    examples: list[History]
    """Some of them. It may be empty if there are very many failed requests of other kinds."""


async def dead_examples(frontier: Inspection, limit: int = 3) -> list[DeadKind]:
    """The failed requests of a run by kind, the most frequent kind first, with examples of each. It reads a bounded
    number of requests, so a rare kind may have no example."""
    counts = await frontier.dead_kinds()
    by_kind: dict[str, list[History]] = {kind: [] for kind in counts}
    missing, left = sum(min(limit, count) for count in counts.values()), _MAX_READ
    if missing:
        async with closing(frontier.dead()) as dead:
            async for request in dead:
                examples = by_kind.setdefault(request.kind, [])
                if len(examples) < limit:
                    examples.append(request)
                    missing -= 1
                left -= 1
                if not left or missing <= 0:
                    break
    by_count = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [DeadKind(kind=kind, count=count, examples=by_kind[kind]) for kind, count in by_count]
