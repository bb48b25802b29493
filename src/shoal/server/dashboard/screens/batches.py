"""Batches: a form that tries a URL, the sessions with their progress, and the Celery workers."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.server.auth import allows
from shoal.server.dashboard.pages import add_screen
from shoal.server.errors import ProblemError
from shoal.server.state import Server

router = APIRouter()

_SESSIONS = 50


def check_serves(server: Server) -> None:
    """ProblemError if batches belong to other processes."""
    if server.ui_only:
        raise ProblemError(
            404, "no batches", "Batches are shown by `shoal serve`: this server only shows the runs of a store."
        )


async def load(server: Server, request: Request) -> dict[str, object]:
    check_serves(server)
    caller = None if allows(request, "admin") else request.state.caller
    return {
        "sessions": await server.list_sessions(caller, _SESSIONS),
        "limit": _SESSIONS,
        "celery": server.remote.last_status(),
        "renders": server.config.serve.render,
        "shows_callers": caller is None and bool(server.config.serve.tokens),
        "keep_results": server.config.serve.keep_results,
    }


add_screen(router, "/ui/batches", "batches", load)
