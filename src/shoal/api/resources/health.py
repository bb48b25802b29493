"""`/health` and `/ready`: liveness and readiness. `/metrics`: counters for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from msgspec import Struct

from shoal.api.batch.service import BatchService
from shoal.api.batch.spider import BatchSpider
from shoal.api.server.answers import answer
from shoal.api.server.auth import check_role
from shoal.api.server.errors import problem, problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import Server, server_of
from shoal.errors import ShoalError
from shoal.operations.metrics import (
    CONTENT_TYPE,
    Family,
    of_depth,
    of_frontier,
    of_hosts,
    of_ledger,
    of_problems,
    of_sessions,
    of_vitals,
    render,
)
from shoal.operations.snapshot import ACTIVE
from shoal.ports import Stats

router = APIRouter(tags=["health"])


class Health(Struct, frozen=True, kw_only=True):
    """The server responds."""

    status: str
    sessions: int


@router.get("/health", response_model=answer(Health))
async def health(request: Request) -> Response:
    """Liveness: the process responds. It checks no other server."""
    return json_response(Health(status="ok", sessions=server_of(request).local.running))


@router.get("/ready", response_model=answer(Health), responses=problems(503))
async def ready(request: Request) -> Response:
    """Readiness: the frontier responds too."""
    reason = await server_of(request).why_not_ready()
    return problem(503, "not ready", reason) if reason else await health(request)


# -- counters of this server and of the runs in its store


_TIMEOUT = 1.0  # seconds for the stores
_MAX_RUNS = 20  # the newest unfinished ones; each is a label, and Prometheus should have few
_MAX_HOSTS = 20


@router.get(
    "/metrics",
    dependencies=[Depends(check_role)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format"}, **problems(401)},
)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus: sessions, pages, errors and latency of this server, and the counts of unfinished runs."""
    server = server_of(request)
    vitals = server.vitals()
    own = {"run": vitals.run_id, "spider": vitals.spider}
    remote = server.remote.opened
    running = {"local": server.local.running, "distributed": 0 if remote is None else remote.running}
    families = [*of_vitals(vitals), *of_sessions(running, server.remote.workers)]
    try:
        async with asyncio.timeout(_TIMEOUT):
            families += [*await _of_batches(server), *await _of_runs(server), *of_frontier(own, up=True)]
    except (ShoalError, TimeoutError):
        families += of_frontier(own, up=False)
    with suppress(TimeoutError):  # there may be very many runs
        async with asyncio.timeout(_TIMEOUT):
            families += of_problems((problem.kind, problem.severity) for problem in await server.current_problems())
    return Response(render(families), media_type=CONTENT_TYPE)


async def _of_batches(server: Server) -> list[Family]:
    """The sum of all sessions: one label per session would be too many."""
    families = []
    for kind, service in (("local", server.local), ("distributed", server.remote.opened)):
        if service is not None:
            families += of_depth(await _sum_stats(service), {"run": f"batch {kind}", "spider": BatchSpider.name})
    return families


async def _sum_stats(service: BatchService) -> Stats:
    ledgers: Sequence[Stats] = await asyncio.gather(*(session.stats() for session in service.sessions))
    fields = ("pushed", "ready", "waiting", "leased", "done", "dead")
    return Stats(**{field: sum(getattr(ledger, field) for ledger in ledgers) for field in fields})


async def _of_runs(server: Server) -> list[Family]:
    families: list[Family] = []
    for run in (await server.list_runs(states=ACTIVE))[:_MAX_RUNS]:
        frontier = await server.store.frontier(run.run_id)
        labels = {"run": run.run_id, "spider": run.spider}
        families += [
            *of_ledger(await frontier.stats(), labels),
            *of_hosts(await frontier.host_states(_MAX_HOSTS), labels),
        ]
    return families
