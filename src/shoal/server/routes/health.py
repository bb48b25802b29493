"""`/health` and `/ready`: liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from shoal.server.errors import problem, problems
from shoal.server.responses import json_response
from shoal.server.state import server_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The server responds."""

    status: str
    sessions: int


@router.get("/health", response_model=Health)
async def health(request: Request) -> Response:
    """Liveness: the process responds. It checks no other server."""
    return json_response({"status": "ok", "sessions": server_of(request).local.running})


@router.get("/ready", response_model=Health, responses=problems(503))
async def ready(request: Request) -> Response:
    """Readiness: the frontier responds too."""
    reason = await server_of(request).why_not_ready()
    return problem(503, "not ready", reason) if reason else await health(request)
