"""`/metrics`: what the server does, and the runs of its store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from shoal.batch.admission import Desk
from shoal.batch.spider import BatchSpider
from shoal.errors import ShoalError
from shoal.metrics import (
    CONTENT_TYPE,
    Family,
    of_depth,
    of_frontier,
    of_hosts,
    of_ledger,
    of_sessions,
    of_vitals,
    render,
)
from shoal.ports import Stats
from shoal.runs.queries import run_options
from shoal.server.errors import responses
from shoal.server.state import Server, server_of

router = APIRouter(tags=["health"])

_PATIENCE = 1.0  # seconds that stores have for their answers
_RUNS = 20  # the newest that are not over; each is a label, of which Prometheus wants few
_HOSTS = 20


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format"}, **responses(401)},
)
async def metrics(request: Request) -> Response:
    """For Prometheus: sessions, pages, errors and latency of this server, and the ledgers of runs that go on."""
    server = server_of(request)
    vitals = server.vitals()
    own = {"run": vitals.run_id, "spider": vitals.spider}
    families = [*of_vitals(vitals), *of_sessions(_running(server), server.remote.workers)]
    try:
        async with asyncio.timeout(_PATIENCE):
            families += [*await _of_batches(server), *await _of_runs(server), *of_frontier(own, up=True)]
    except (ShoalError, TimeoutError):
        families += of_frontier(own, up=False)
    return Response(render(families), media_type=CONTENT_TYPE)


def _running(server: Server) -> dict[str, int]:
    remote = server.remote.opened
    return {"local": server.local.running, "distributed": 0 if remote is None else remote.running}


async def _of_batches(server: Server) -> list[Family]:
    """All sessions together: each of them would be a label."""
    families = []
    for kind, desk in (("local", server.local), ("distributed", server.remote.opened)):
        if desk is not None:
            families += of_depth(await _sum(desk), {"run": f"batch {kind}", "spider": BatchSpider.name})
    return families


async def _sum(desk: Desk) -> Stats:
    ledgers: Sequence[Stats] = await asyncio.gather(*(session.stats() for session in desk.sessions))
    fields = ("pushed", "ready", "waiting", "leased", "done", "dead")
    return Stats(**{field: sum(getattr(ledger, field) for ledger in ledgers) for field in fields})


async def _of_runs(server: Server) -> list[Family]:
    families: list[Family] = []
    live = [
        run
        for run in await server.store.list_runs()
        if run.state in ("queued", "running", "paused") and run.spider != BatchSpider.name
    ]
    for run in live[:_RUNS]:
        frontier = await server.store.frontier(run.run_id, run_options(run, server.config))
        labels = {"run": run.run_id, "spider": run.spider}
        families += [*of_ledger(await frontier.stats(), labels), *of_hosts(await frontier.host_states(_HOSTS), labels)]
    return families
