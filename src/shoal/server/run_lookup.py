"""Finds the run that a request is about."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from shoal.batch.spider import BatchSpider
from shoal.ports import Frontier, Run
from shoal.server.errors import ProblemError
from shoal.server.schemas.common import PRINTABLE
from shoal.server.state import Server

RunId = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="`run_id` of the run.")]


async def find_run(server: Server, run_id: str) -> Run:
    """Find a run. Batches are 404: each belongs to its caller. So are runs of other projects."""
    run = await server.store.get_run(run_id)
    if run is None or run.spider == BatchSpider.name or run.project != server.config.project_name:
        raise ProblemError(404, "no such run", f"run {run_id} does not exist")
    return run


async def open_frontier(server: Server, run_id: str) -> Frontier:
    run = await find_run(server, run_id)
    return await server.store.frontier(run.run_id)
