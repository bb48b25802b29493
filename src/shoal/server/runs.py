"""`/api/runs`: spiders of the registry, and what becomes of their runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.batch.redaction import redacted
from shoal.batch.session import OVER
from shoal.batch.spider import BatchSpider
from shoal.batch.urls import GivenUrls
from shoal.crawling.stats import counts
from shoal.errors import RunError, SinkError, SpiderError
from shoal.http import Request as Page
from shoal.item import decode_item
from shoal.ports import Event, Frontier, History, Inspection, LoggedItem, Run, RunState
from shoal.runs.orchestrator import Chosen, queued
from shoal.runs.queries import run_options
from shoal.runs.start import start_run
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, responses, told
from shoal.server.run_models import (
    PRINTABLE,
    DeadPage,
    HistoryModel,
    ItemPage,
    Ledger,
    Removed,
    Retried,
    RetryFailed,
    RunList,
    RunPage,
    RunStarted,
    StartRun,
)
from shoal.server.state import Server, server_of
from shoal.urls.normalize import normalize_url

router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=BoundedRoute)

_STARTING = 60.0  # seconds that pushing start requests may take
_LAST_ITEM = 10**13  # no log has more, and every store can count so far

RunId = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="The run_id, as a start gave it.")]


# -- starting and listing


@router.post("", status_code=201, response_model=RunStarted, responses=responses(401, 404, 413, 422, 429, 503))
async def start(order: StartRun, request: Request) -> Response:
    """Start a spider of the registry, by its name there. Its file, its arguments and its outputs are the registry's:
    a request brings no code. `single` runs in this server; `distributed` waits for workers, which `worker_command`
    starts. The same request again goes on where an earlier one was interrupted, unless `new_run`."""
    server = server_of(request)
    given = None if order.urls is None else await GivenUrls.read(order.urls, normalize_url)
    with _spider_problems():
        chosen = await _choose(server, order)
        begin = _queue if chosen.mode == "distributed" else _run_here
        answer = await begin(server, chosen, given, new_run=order.new_run)
    return _json({**answer, "mode": chosen.mode}, 201, Location=f"/api/runs/{answer['run_id']}")


async def _choose(server: Server, order: StartRun) -> Chosen:
    orchestrator = server.orchestrator()
    if order.spider not in orchestrator.registry:
        known = ", ".join(orchestrator.registry) or "none"
        raise ProblemError(404, "no such spider", f"no spider {order.spider!r:.110} in the registry; it has: {known}")
    # A spider's file may be slow to import.
    return await asyncio.to_thread(orchestrator.choose, order.spider, order.arguments, order.mode)


async def _queue(server: Server, chosen: Chosen, given: GivenUrls | None, *, new_run: bool) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_STARTING):
            started = await start_run(
                server.store, chosen.spider, chosen.config, urls=_urls(given), outputs=chosen.outputs,
                new_run=new_run, networks=server.config.serve.allow,
            )  # fmt: skip
    except TimeoutError:
        message = f"not all start requests were pushed within {_STARTING:g} s; the same request goes on with the rest"
        raise ProblemError(503, "not started", message) from None
    wrong = 0 if given is None else len(given.wrong)
    answer = queued(started, chosen, server.frontier_to_name())
    return {**answer, "unreadable": answer["unreadable"] + wrong}


def _urls(given: GivenUrls | None) -> list[str] | None:
    """Those that can be read, in normal form."""
    if given is None:
        return None
    return [url for place, url in enumerate(given.normal) if place not in given.wrong]


async def _run_here(server: Server, chosen: Chosen, given: GivenUrls | None, *, new_run: bool) -> dict[str, Any]:
    run = await server.jobs.start(chosen, _urls(given), new_run=new_run)
    unknown = dict.fromkeys(("enqueued", "duplicates", "out_of_scope", "unreadable", "worker_command"))
    return {"status": "running", "run_id": run.run_id, "spider": run.spider, **unknown}


@contextmanager
def _spider_problems() -> Iterator[None]:
    """What a spider or its outputs can't be started with is no error of this server."""
    try:
        yield
    except (SpiderError, SinkError) as exc:
        raise ProblemError(422, "bad request", told(exc)) from exc


@router.get("", response_model=RunList, responses=responses(401, 422, 503))
async def list_runs(
    request: Request,
    spider: Annotated[
        str | None, Query(max_length=200, pattern=PRINTABLE, description="Only its runs, by the name it gives itself.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="Only the newest.")] = 20,
) -> Response:
    """The runs of the server's frontier, the newest first, also those that others began. Batches are none of them."""
    server = server_of(request)
    found = [run for run in await server.store.list_runs(spider) if run.spider != BatchSpider.name]
    pages = []
    for run in found[:limit]:
        try:
            pages.append(await _page(server, run))
        except RunError:  # removed in this moment
            continue
    return _json({"runs": pages, "total": len(found)})


# -- one run


@router.get("/{run_id}", response_model=RunPage, responses=responses(401, 404, 422, 503))
async def read_run(run_id: RunId, request: Request) -> Response:
    """The state of a run, and its ledger at this moment."""
    server = server_of(request)
    return _json(await _page(server, await _find(server, run_id)))


@router.post("/{run_id}/pause", response_model=RunPage, responses=responses(401, 404, 409, 422, 503))
async def pause(run_id: RunId, request: Request) -> Response:
    """Give out no more work; workers stay and wait. What is in flight is ended."""
    return await _transition(request, run_id, "paused")


@router.post("/{run_id}/resume", response_model=RunPage, responses=responses(401, 404, 409, 422, 429, 503))
async def resume(run_id: RunId, request: Request) -> Response:
    """Let a run go on that was paused or cancelled. Its workers go on; start some if there are none. One that this
    server ran is run here again."""
    return await _transition(request, run_id, "running")


@router.post("/{run_id}/cancel", response_model=RunPage, responses=responses(401, 404, 409, 422, 503))
async def cancel(run_id: RunId, request: Request) -> Response:
    """End a run before it is finished: its workers leave. Nothing is removed, and it can be resumed."""
    return await _transition(request, run_id, "cancelled")


async def _transition(request: Request, run_id: str, state: RunState) -> Response:
    server = server_of(request)
    await _find(server, run_id)
    run = await server.store.transition(run_id, state)
    if state == "running":
        await server.jobs.resume(run)
    else:
        await server.jobs.poll_state(run_id)
    return _json(await _page(server, run))


@router.post("/{run_id}/retry-failed", response_model=Retried, responses=responses(401, 404, 422, 503))
async def retry_failed(run_id: RunId, request: Request, which: RetryFailed | None = None) -> Response:
    """Make the dead requests of a run ready again, with all their attempts. What robots.txt forbade stays dead unless
    it is named. A run that is finished has to be resumed."""
    frontier = await _frontier(server_of(request), run_id)
    count = await frontier.retry_dead(None if which is None else which.kinds)
    return _json({"run_id": run_id, "retried": count})


@router.delete("/{run_id}", response_model=Removed, responses=responses(401, 404, 409, 422, 503))
async def remove(
    run_id: RunId,
    request: Request,
    force: Annotated[bool, Query(description="Also one that is not finished or cancelled.")] = False,
) -> Response:
    """Forget a run: its URLs, its ledger and its item log. Outputs stay as they are."""
    server = server_of(request)
    run = await _find(server, run_id)
    if run.state not in OVER and not force:
        raise ProblemError(409, "wrong state", f"run {run_id} is {run.state}; cancel it first, or say force=true")
    await server.jobs.leave(run_id)
    await server.store.delete_run(run_id)
    return _json({"run_id": run_id, "removed": True})


# -- what is in it


@router.get("/{run_id}/items", response_model=ItemPage, responses=responses(401, 404, 422, 503))
async def read_items(
    run_id: RunId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=_LAST_ITEM, description="`next` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The items of a run in the order of its log, a page at a time. A page ends early where it would be too large."""
    server = server_of(request)
    frontier = await _frontier(server, run_id)
    items = _fitting(await frontier.read_items(after, limit), server.config.serve.max_answer_bytes)
    shown = [dict(zip(("type", "item"), decode_item(item.payload), strict=True)) for item in items]
    return _json(
        {
            "run_id": run_id,
            "items": [{"seq": item.seq, "key": item.key, **each} for item, each in zip(items, shown, strict=True)],
            "next": items[-1].seq if items else after,
        }
    )


def _fitting(items: list[LoggedItem], max_bytes: int) -> list[LoggedItem]:
    """As many as an answer may hold, and at least one."""
    size = 0
    for count, item in enumerate(items):
        size += len(item.payload)
        if size > max_bytes and count:
            return items[:count]
    return items


@router.get("/{run_id}/ledger", response_model=Ledger, responses=responses(401, 404, 422, 503))
async def read_ledger(run_id: RunId, request: Request) -> Response:
    """The ledger of a run, counted anew from its requests: nothing is lost if it is balanced."""
    frontier = await _frontier(server_of(request), run_id)
    counted = await frontier.audit()
    kinds = await frontier.dead_kinds()
    return _json(
        {"run_id": run_id, **msgspec.structs.asdict(counted), "dead_kinds": kinds, "balanced": counted.balanced}
    )


@router.get("/{run_id}/url", response_model=HistoryModel, responses=responses(401, 404, 422, 503))
async def read_url(
    run_id: RunId,
    request: Request,
    url: Annotated[str, Query(min_length=1, max_length=8192, description="As it was found, or as Shoal spells it.")],
) -> Response:
    """What became of a URL: where it was found, its attempts and waits, its items."""
    frontier = await _frontier(server_of(request), run_id)
    page = Page(url)
    history = await frontier.find(page)
    if history is None:
        message = f"run {run_id} has not seen {page.url}: no fetched page links to it, or it is not in scope"
        raise ProblemError(404, "no such url", message)
    return _json(_shown(history))


@router.get("/{run_id}/dead", response_model=DeadPage, responses=responses(401, 404, 422, 503))
async def read_dead(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=0, le=1000)] = 100) -> Response:
    """What was given up: how many by kind, and some of them, in any order."""
    frontier = await _frontier(server_of(request), run_id)
    kinds = await frontier.dead_kinds()
    return _json({"run_id": run_id, "kinds": kinds, "dead": await _some_dead(frontier, limit) if limit else []})


async def _some_dead(frontier: Inspection, limit: int) -> list[History]:
    found: list[History] = []
    async with aclosing(cast(Any, frontier.dead())) as dead:
        async for history in dead:
            found.append(_shown(history))
            if len(found) == limit:
                break
    return found


def _shown(history: History) -> History:
    """Reasons may name addresses that callers are not told of."""
    events = tuple(Event(event.at, event.what, redacted(event.detail)) for event in history.events)
    return msgspec.structs.replace(history, reason=redacted(history.reason), events=events)


async def _find(server: Server, run_id: str) -> Run:
    """Batches are not found: they are their callers' own."""
    run = await server.store.get_run(run_id)
    if run is None or run.spider == BatchSpider.name:
        raise ProblemError(404, "no such run", f"there is no run {run_id}")
    return run


async def _frontier(server: Server, run_id: str) -> Frontier:
    run = await _find(server, run_id)
    return await server.store.frontier(run.run_id, run_options(run, server.config))


async def _page(server: Server, run: Run) -> dict[str, Any]:
    ledger = await (await server.store.frontier(run.run_id, run_options(run, server.config))).stats()
    return {
        "run_id": run.run_id,
        "spider": run.spider,
        "state": run.state,
        "created_at": run.created_at,
        "stats": {**msgspec.structs.asdict(ledger), **counts(ledger)},
        "error": server.jobs.failure(run.run_id),
    }


def _json(content: Any, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
