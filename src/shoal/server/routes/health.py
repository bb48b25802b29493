"""`/health` and `/ready`: whether the server lives, and whether it can work."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from shoal.server.responses import answer
from shoal.server.errors import problem, responses
from shoal.server.state import server_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The server lives."""

    status: str
    sessions: int


@router.get("/health", response_model=Health)
async def health(request: Request) -> Response:
    """The process answers. Nothing else is asked."""
    return answer({"status": "ok", "sessions": server_of(request).local.running})


@router.get("/ready", response_model=Health, responses=responses(503))
async def ready(request: Request) -> Response:
    """It can work: its store answers."""
    wrong = await server_of(request).is_ready()
    return problem(503, "not ready", wrong) if wrong else await health(request)
