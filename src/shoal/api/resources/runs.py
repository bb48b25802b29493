"""`/api/runs`: start spiders of the registry, control and inspect their runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec import Struct, convert
from msgspec.structs import asdict, replace
from pydantic import Field, field_validator

from shoal.api.batch.options import StrictModel, at_most
from shoal.api.batch.results import Entry
from shoal.api.batch.session import OVER
from shoal.api.batch.urls import UrlList, redacted
from shoal.api.resources.common import (
    PRINTABLE,
    URL,
    RunId,
    Scalar,
    Word,
    find_run,
    open_frontier,
    record_action,
    spider_problems,
    with_examples,
)
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.budgets import caller_of
from shoal.api.server.errors import ProblemError, problems, public_message
from shoal.api.server.responses import EntryEncoder, json_response
from shoal.api.server.state import Server, server_of
from shoal.crawling.outcome import Outcome, Verdict
from shoal.crawling.stats import STATE_NAMES, LimitReached, ledger
from shoal.errors import RunError, ShoalError
from shoal.http import Request as Page
from shoal.item import decode_item
from shoal.operations.dead_requests import DeadFilter, RetryResult, retry_failed, retry_request
from shoal.operations.hosts import matching_runs
from shoal.operations.url_report import Hop, read_agent, read_url_items, report_url
from shoal.ports import Fault, Frontier, History, LoggedItem, Run, RunState
from shoal.runs.orchestrator import Chosen, queued
from shoal.runs.run_end import announce_end, closing, limit_of, read_outcome
from shoal.runs.start import start_run
from shoal.spider import Spider
from shoal.system import threads
from shoal.urls.normalize import written_url


class StartRun(StrictModel):
    """Starts a spider from the registry (`[spiders]` in the server's shoal.toml)."""

    model_config = with_examples(
        {"spider": "Books", "arguments": {"category": "travel"}},
        {"spider": "Books", "urls": [URL], "mode": "distributed", "new_run": True},
    )

    spider: Annotated[str, Field(min_length=1, max_length=200, description="Name of the spider in the registry.")]
    urls: Annotated[
        Annotated[list[Annotated[str, Field(max_length=8192)]], Field(fail_fast=True)] | None,
        Field(min_length=1, description="URLs to start with, instead of the spider's start requests."),
    ] = None
    arguments: Annotated[
        dict[Word, Scalar],
        Field(max_length=100, description="Constructor arguments of the spider. They override those in the registry."),
        at_most(100),
    ] = {}
    mode: Annotated[
        Literal["single", "distributed"] | None,
        Field(description="`single` runs in this server, `distributed` on workers. Default: the registry's."),
    ] = None
    new_run: Annotated[
        bool, Field(description="Start a new run even if an unfinished run of the same request exists.")
    ] = False

    @field_validator("arguments")
    @classmethod
    def _check_names(cls, arguments: dict[str, object]) -> dict[str, object]:
        for name in arguments:
            if name.startswith("_") or hasattr(Spider, name):
                raise ValueError(f"{name!r:.80} is an attribute of Spider; it cannot be an argument")
        return arguments


class RunStarted(Struct, frozen=True, kw_only=True):
    """A run that was started or resumed."""

    run_id: str
    status: RunState
    spider: str
    """`name` of the spider class."""
    mode: Literal["single", "distributed"]
    enqueued: int | None = None
    """Start requests pushed. `null` if they are pushed while the run works."""
    duplicates: int | None = None
    out_of_scope: int | None = None
    unreadable: int | None = None
    """Start URLs that are not valid URLs."""
    worker_command: str | None = None
    """Command that starts a worker."""


class RequestCounts(Struct, frozen=True, kw_only=True):
    """Requests of a run by state, and its items."""

    pushed: int
    ready: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    left: int
    """Ready, waiting and in flight, and links that are not queued yet."""
    duplicates: int
    items: int


class RunStats(RequestCounts, frozen=True, kw_only=True):
    """Request counts of a run: pushed = ready + waiting + in_flight + done + failed."""

    seeding: bool
    """Not all start requests are pushed yet."""
    incoming: int
    """Links of done pages that are not queued yet."""
    rewinds: int
    """How often the store went back in time."""


class RunOutcome(Struct, frozen=True, kw_only=True):
    """How a run ended."""

    verdict: Verdict
    """See the page about outcomes."""
    accounted: str
    """What became of its pages."""
    reasons: list[str]
    """Why the verdict is not better."""
    failed_hooks: list[str]
    """Those reasons that came after the end: hooks that failed."""
    headline: str


class RunLimit(LimitReached, frozen=True, kw_only=True):
    """The limit at which a run stopped before it had fetched everything."""

    message: str


class RunPage(Struct, frozen=True, kw_only=True):
    """A run and its current counts."""

    run_id: str
    spider: str
    state: RunState
    created_at: float
    """Unix time, in seconds."""
    stats: RunStats
    outcome: RunOutcome | None
    """`null` until the run is finished."""
    error: str
    """Why the run failed in this server, or an empty string."""
    limit: RunLimit | None
    """At which limit it stopped. `null` if it is not finished, or complete."""


class RunList(Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: list[RunPage]
    total: int
    """Number of all runs, also those beyond `limit`."""


class RetryFailed(StrictModel):
    """Which failed requests to retry."""

    model_config = with_examples({"kinds": ["http 500", "timeout"]}, {"url": "*/products/*"}, {})

    kinds: Annotated[
        list[Word] | None,
        Field(min_length=1, max_length=100, description="Error kinds to retry (default: all but `robots`, `scope`)."),
        at_most(100),
    ] = None
    host: Annotated[str | None, Field(min_length=1, max_length=260, description="Only requests of this host.")] = None
    url: Annotated[
        str | None,
        Field(min_length=1, max_length=1000, description="Only URLs that match: `*` is any text, `?` any character."),
    ] = None


class RetryUrl(StrictModel):
    """The failed URL to retry."""

    model_config = with_examples({"url": URL})

    url: Annotated[str, Field(min_length=1, max_length=8192, description="The URL as it was found, or normalized.")]


class Retried(Struct, frozen=True, kw_only=True):
    """How many failed requests are ready again, and what their run needs."""

    run_id: str
    retried: int
    reopened: bool
    """The run was finished, and is running again."""
    state: RunState
    workers: int
    """Processes that work on the run now."""
    message: str
    """What happened, and what continues the run."""


class Removed(Struct, frozen=True, kw_only=True):
    """A run that was deleted."""

    run_id: str
    removed: bool


class ItemEntry(Struct, frozen=True, kw_only=True):
    """An item of the item log. Retries of its page do not change `key`."""

    seq: int
    key: str
    type: str
    """Class name of the item; `item` for a dict."""
    item: dict[str, object]


class ItemPage(Struct, frozen=True, kw_only=True):
    """One page of a run's items, in log order."""

    run_id: str
    items: list[ItemEntry]
    next: int
    """Pass it as `after` to get the next page."""


class Ledger(RunStats, frozen=True, kw_only=True):
    """Request counts, recounted from the requests themselves."""

    run_id: str
    failed_kinds: dict[str, int]
    balanced: bool
    """Whether pushed = ready + waiting + in_flight + done + failed, without faults."""
    faults: tuple[Fault, ...]
    """What is missing in the store, or contradicts the rest."""


class UrlEvent(Struct, frozen=True, kw_only=True):
    """An event in the life of a request."""

    at: float
    """Unix time, in seconds."""
    what: str
    """What happened, or the state it has now."""
    detail: str
    worker: str
    """The worker that held the lease; empty if none did."""


class UrlHistory(Struct, frozen=True, kw_only=True):
    """The history of a URL."""

    url: str
    state: Literal["ready", "waiting", "in flight", "done", "failed"]
    depth: int
    priority: float
    attempts: int
    status: int
    """HTTP status of the last response; 0 if there was none."""
    items: int
    parent: str | None
    """The page that links to it; `null` for a start request."""
    reason: str
    kind: str
    """Kind of the failure; empty if it did not fail."""
    events: list[UrlEvent]
    worker: str
    """The worker that holds its lease, or held the last one."""


class RedirectHop(Struct, frozen=True, kw_only=True):
    """One page of a chain of redirects."""

    url: str
    state: str | None
    """Of its request. `null` if the run does not have it."""
    status: int
    kind: str
    """Kind of failure, if it failed."""
    reason: str
    found_on: str | None
    """If the run had this page already: the page it was found on; empty for a start request."""


class UrlPage(UrlHistory, frozen=True, kw_only=True):
    """The history of a URL, and what led to it."""

    parents: tuple[str, ...]
    """`parent`, the page that links to that one, and so on; at most 20."""
    robots: str
    """What the robots.txt of its host says about it, as last read."""
    first_items: list[str]
    """Its first items as JSON, at most 5. Long ones are cut. Empty if the item log no longer has them, or a short
    search does not find them."""
    redirects: list[RedirectHop]
    """The chain of redirects that it belongs to, from the first URL to the last. At most 25."""
    outcome: str
    """How that chain ended. Empty if there is none."""


class FailedPage(Struct, frozen=True, kw_only=True):
    """Failed requests: counts by error kind, and some of the requests."""

    run_id: str
    kinds: dict[str, int]
    failed: list[UrlHistory]


router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=BoundedRoute)

_SEED_TIMEOUT = 60.0  # seconds
_ITEMS_READ = (32, 1 << 20)  # items, and expected bytes, that are read at once
_MAX_ITEM_NUMBER = 10**13  # larger than any log, small enough for every store


# -- starting and listing


@router.post(
    "", status_code=201, response_model=answer(RunStarted), responses=problems(401, 404, 409, 413, 422, 429, 503)
)
async def start(body: StartRun, request: Request) -> Response:
    """Start a spider of the registry by name. Its file, arguments and outputs come from the registry: a request
    contains no code. `single` runs in this server. `distributed` waits for workers; `worker_command` starts one. The
    same request again resumes an interrupted run, unless `new_run` is true."""
    server = server_of(request)
    urls = None if body.urls is None else await UrlList.parse(body.urls, written_url)
    with spider_problems():
        chosen = await _choose(server, body)
        start_chosen = _queue if chosen.mode == "distributed" else _run_here
        started = await start_chosen(server, chosen, urls, new_run=body.new_run)
    await record_action(request, "start", started.run_id, f"{body.spider}, {chosen.mode}")
    return json_response(started, 201, {"Location": f"/api/runs/{started.run_id}"})


async def _choose(server: Server, body: StartRun) -> Chosen:
    orchestrator = server.orchestrator()
    if body.spider not in orchestrator.registry:
        names = ", ".join(orchestrator.registry) or "none"
        raise ProblemError(
            404, "no such spider", f"no spider {body.spider!r:.110} in the registry. Known spiders: {names}"
        )
    # A spider's file may be slow to import.
    return await threads.call(orchestrator.choose, body.spider, body.arguments, body.mode)


async def _queue(server: Server, chosen: Chosen, urls: UrlList | None, *, new_run: bool) -> RunStarted:
    try:
        async with asyncio.timeout(_SEED_TIMEOUT):
            started = await start_run(
                server.store,
                chosen.spider,
                chosen.config,
                urls=_valid_urls(urls),
                outputs=chosen.outputs,
                new_run=new_run,
                networks=server.config.serve.allow,
            )
    except TimeoutError:
        message = f"could not push all start requests within {_SEED_TIMEOUT:g} s; send the same request again to resume"
        raise ProblemError(503, "not started", message) from None
    invalid = 0 if urls is None else len(urls.invalid)
    values = queued(started, chosen, server.flags_for_workers())
    return convert({**values, "unreadable": started.unreadable + invalid, "mode": chosen.mode}, RunStarted)


def _valid_urls(urls: UrlList | None) -> list[str] | None:
    """The valid URLs, as they are sent."""
    if urls is None:
        return None
    return [url for position, url in enumerate(urls.normalized) if position not in urls.invalid]


async def _run_here(server: Server, chosen: Chosen, urls: UrlList | None, *, new_run: bool) -> RunStarted:
    if server.ui_only:
        message = "`shoal ui` crawls nothing itself: start the run with mode `distributed`, or use `shoal serve`"
        raise ProblemError(409, "not here", message)
    run = await server.jobs.start(chosen, _valid_urls(urls), new_run=new_run)
    return RunStarted(run_id=run.run_id, status="running", spider=run.spider, mode="single")


@router.get("", response_model=answer(RunList), responses=problems(401, 422, 503))
async def list_runs(
    request: Request,
    spider: Annotated[
        str | None, Query(max_length=200, pattern=PRINTABLE, description="Only runs of the spider with this `name`.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="Number of newest runs.")] = 20,
    state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
    search: Annotated[
        str, Query(max_length=200, pattern=PRINTABLE, description="Only runs with this in their spider or `run_id`.")
    ] = "",
) -> Response:
    """The runs in the server's frontier, newest first, including those started elsewhere. Batches are not listed."""
    server = server_of(request)
    states = None if state is None else [state]
    matching = matching_runs(await server.list_runs(spider, states=states), search)
    pages = []
    for run in matching[:limit]:
        try:
            pages.append(await _describe(server, run))
        except RunError:  # deleted in the meantime
            continue
    return json_response(RunList(runs=pages, total=len(matching)))


# -- one run


@router.get("/{run_id}", response_model=answer(RunPage), responses=problems(401, 404, 422, 503))
async def read_run(run_id: RunId, request: Request) -> Response:
    """The state and the request counts of a run."""
    server = server_of(request)
    return json_response(await _describe(server, await find_run(server, run_id)))


@router.post("/{run_id}/pause", response_model=answer(RunPage), responses=problems(401, 404, 409, 422, 503))
async def pause(run_id: RunId, request: Request) -> Response:
    """Pause a run: requests in flight finish, no others start. Workers wait."""
    return await _transition(request, run_id, "paused", "pause")


@router.post("/{run_id}/resume", response_model=answer(RunPage), responses=problems(401, 404, 409, 422, 429, 503))
async def resume(run_id: RunId, request: Request) -> Response:
    """Resume a run that was paused or cancelled. Workers that wait continue; start workers if there are none. A run
    that worked in this server continues here."""
    return await _transition(request, run_id, "running", "resume")


@router.post("/{run_id}/cancel", response_model=answer(RunPage), responses=problems(401, 404, 409, 422, 503))
async def cancel(run_id: RunId, request: Request) -> Response:
    """Cancel a run: its workers exit. Nothing is deleted, and you can resume it."""
    return await _transition(request, run_id, "cancelled", "cancel")


async def _transition(request: Request, run_id: str, state: RunState, what: str) -> Response:
    server = server_of(request)
    await find_run(server, run_id)
    if state == "running":
        await announce_end(server.store, run_id, None)
    run = await server.store.transition(run_id, state)
    await record_action(request, what, run_id)
    if state == "running":
        await server.jobs.resume(run)
    else:
        await server.jobs.poll_state(run_id)
    return json_response(await _describe(server, run))


@router.post("/{run_id}/retry-failed", response_model=answer(Retried), responses=problems(401, 404, 409, 422, 503))
async def retry_some(run_id: RunId, request: Request, which: RetryFailed | None = None) -> Response:
    """Retry the failed requests of a run: all, or those of some kinds, a host or a pattern of URLs. Each gets
    its full number of attempts again. Requests that robots.txt disallows stay failed unless you name the kind `robots`.
    Links that were refused because the queue was full are queued again while it has room. The others stay failed: call
    this again later. A finished run is `running` afterwards; `message` says which process continues it, or how to
    start one. A cancelled run is not changed (409)."""
    server = server_of(request)
    run = await find_run(server, run_id)
    frontier = await open_frontier(server, run_id)
    which = which or RetryFailed()
    chosen = DeadFilter.of(which.kinds or (), which.host, which.url)
    result = await retry_failed(server.store, run, frontier, chosen)
    return await _retried(request, result, f"{result.count} requests, {chosen}")


async def _retried(request: Request, result: RetryResult, detail: str) -> Response:
    """The answer to a retry. A run that worked in this server continues here."""
    server, run = server_of(request), result.run
    await record_action(request, "retry", run.run_id, detail + "; the run is reopened" * result.reopened)
    if result.reopened:
        try:
            await server.jobs.resume(run)
        except ShoalError as exc:  # its requests are queued, whatever happens here
            hint = f"this server cannot continue it ({public_message(exc)}); resume it later"
            result = replace(result, hint=hint)
    if server.jobs.has(run.run_id):
        result = replace(result, workers=max(1, result.workers))
    retried = Retried(
        run_id=run.run_id,
        retried=result.count,
        reopened=result.reopened,
        state=run.state,
        workers=result.workers,
        message=str(result),
    )
    return json_response(retried)


@router.delete("/{run_id}", response_model=answer(Removed), responses=problems(401, 404, 409, 422, 503))
async def remove(
    run_id: RunId,
    request: Request,
    force: Annotated[bool, Query(description="Also delete a run that is not finished or cancelled.")] = False,
) -> Response:
    """Delete a run: its URLs, counts and item log. Its outputs are not touched."""
    server = server_of(request)
    run = await find_run(server, run_id)
    if run.state not in OVER and not force:
        raise ProblemError(409, "wrong state", f"run {run_id} is {run.state}; cancel it first, or pass force=true")
    await server.jobs.forget(run_id)
    await server.store.delete_run(run_id)
    await record_action(request, "delete", run_id, f"of {run.spider}, {run.state}")
    return json_response(Removed(run_id=run_id, removed=True))


# -- contents


@router.get("/{run_id}/items", response_model=answer(ItemPage), responses=problems(401, 404, 422, 503))
async def read_items(
    run_id: RunId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=_MAX_ITEM_NUMBER, description="`next` of the previous page.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """One page of a run's items, in log order. It may have fewer than `limit` items, to bound its size."""
    server = server_of(request)
    frontier = await open_frontier(server, run_id)
    encoder = EntryEncoder(server.answers, caller_of(request), server.config.serve.max_answer_bytes)
    page = encoder.page({"run_id": run_id}, "items", _item_portions(frontier, after, limit), limit, after)
    return await encoder.respond(page)


async def _item_portions(frontier: Frontier, after: int, limit: int) -> AsyncGenerator[list[Entry]]:
    """The items after number ``after``, read a few at a time: one may have many megabytes."""
    count, most = _ITEMS_READ
    while items := await frontier.read_items(after, min(count, limit), max_bytes=most):
        yield [Entry(item.seq, len(item.payload), partial(_show_item, item)) for item in items]
        after, limit = items[-1].seq, limit - len(items)
        if not limit:
            return


def _show_item(item: LoggedItem, whole: bool) -> dict[str, object]:
    """An item has no form without its content."""
    name, content = decode_item(item.payload)
    return {"seq": item.seq, "key": item.key, "type": name, "item": content}


@router.get("/{run_id}/ledger", response_model=answer(Ledger), responses=problems(401, 404, 422, 503))
async def read_ledger(run_id: RunId, request: Request) -> Response:
    """Recount the requests of a run. If the counts balance, no request is lost."""
    frontier = await open_frontier(server_of(request), run_id)
    counted = await frontier.audit()
    kinds = await frontier.dead_kinds()
    values = {**ledger(counted), "run_id": run_id, "failed_kinds": kinds, "balanced": counted.balanced}
    return json_response(convert({**values, "faults": counted.faults}, Ledger))


@router.get("/{run_id}/url", response_model=answer(UrlPage), responses=problems(401, 404, 422, 503))
async def read_url(
    run_id: RunId,
    request: Request,
    url: Annotated[str, Query(min_length=1, max_length=8192, description="The URL as it was found, or normalized.")],
) -> Response:
    """The history of a URL: the pages that led to it, its attempts and waits, its items, what robots.txt says."""
    server = server_of(request)
    frontier = await open_frontier(server, run_id)
    report = await report_url(frontier, url, server.config, await read_agent(server.store, run_id, server.config))
    if report is None:
        raise _no_such_url(run_id, url)
    items = await read_url_items(server.store, frontier, run_id, report.history)
    page = UrlPage(
        **asdict(_show_history(report.history)),
        parents=report.parents,
        robots=report.robots,
        first_items=items,
        redirects=[_show_hop(hop) for hop in report.redirects],
        outcome=redacted(report.outcome),
    )
    return json_response(page)


def _show_hop(hop: Hop) -> RedirectHop:
    state = None if hop.state is None else STATE_NAMES.get(hop.state, hop.state)
    return RedirectHop(**(asdict(hop) | {"state": state, "reason": redacted(hop.reason)}))


@router.post("/{run_id}/url/retry", response_model=answer(Retried), responses=problems(401, 404, 409, 422, 503))
async def retry_url(run_id: RunId, which: RetryUrl, request: Request) -> Response:
    """Retry one failed URL, with its full number of attempts. `retried` is 0 if it has not failed, or robots.txt or the
    scope forbids it. A finished run is `running` afterwards, as with `retry-failed`."""
    server = server_of(request)
    run = await find_run(server, run_id)
    frontier = await open_frontier(server, run_id)
    page = Page(which.url)
    if await frontier.find(page, exact=True) is None:
        raise _no_such_url(run_id, which.url)
    return await _retried(request, await retry_request(server.store, run, frontier, page), page.url)


def _no_such_url(run_id: str, url: str) -> ProblemError:
    message = f"run {run_id} has no URL {Page(url).url}: no fetched page links to it, or it is out of scope"
    return ProblemError(404, "no such url", message)


@router.get("/{run_id}/failed", response_model=answer(FailedPage), responses=problems(401, 404, 422, 503))
async def read_failed(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=0, le=1000)] = 100) -> Response:
    """Failed requests: counts by error kind, and up to `limit` requests, in any order."""
    frontier = await open_frontier(server_of(request), run_id)
    kinds = await frontier.dead_kinds()
    failed = await _read_failed(frontier, limit) if limit else []
    return json_response(FailedPage(run_id=run_id, kinds=kinds, failed=failed))


async def _read_failed(frontier: Frontier, limit: int) -> list[UrlHistory]:
    histories: list[UrlHistory] = []
    async with closing(frontier.dead()) as dead:
        async for history in dead:
            histories.append(_show_history(history))
            if len(histories) == limit:
                break
    return histories


def _show_history(history: History) -> UrlHistory:
    """Redact internal addresses in the reasons."""
    events = [
        UrlEvent(at=event.at, what=event.what, detail=redacted(event.detail), worker=event.worker)
        for event in history.events
    ]
    state = STATE_NAMES.get(history.state, history.state)
    values = asdict(history) | {"state": state, "reason": redacted(history.reason), "events": events}
    return convert(values, UrlHistory)


async def _describe(server: Server, run: Run) -> RunPage:
    frontier = await server.store.frontier(run.run_id)
    stats = await frontier.stats()
    outcome = await read_outcome(server.store, run, frontier, server.config.outcome)
    limit = await limit_of(server.store, run)
    return RunPage(
        run_id=run.run_id,
        spider=run.spider,
        state=run.state,
        created_at=run.created_at,
        stats=convert(ledger(stats), RunStats),
        outcome=None if outcome is None else _show_outcome(outcome),
        error=server.jobs.failure(run.run_id),
        limit=None if limit is None else RunLimit(**asdict(limit), message=str(limit)),
    )


def _show_outcome(outcome: Outcome) -> RunOutcome:
    return RunOutcome(
        verdict=outcome.verdict,
        accounted=outcome.accounted,
        reasons=[redacted(reason) for reason in outcome.reasons],
        failed_hooks=[redacted(reason) for reason in outcome.failed_hooks],
        headline=outcome.headline(),
    )
