"""Adds the dashboard to the application."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from shoal.server.dashboard import login
from shoal.server.dashboard.pages import page
from shoal.server.dashboard.screens import (
    actions,
    batches,
    cluster,
    compare,
    host,
    hosts,
    notifications,
    overview,
    run,
    runs,
    schedules,
    session,
    settings,
    url,
    workers,
)


def add_dashboard(app: FastAPI) -> None:
    """Serve the overview at ``/``, and everything else of the dashboard below ``/ui``."""
    app.mount("/ui/static", _Files(directory=str(files("shoal.server.dashboard") / "static")))
    screens = (
        overview, runs, run, url, compare, hosts, host, workers, cluster, batches, session, schedules, notifications,
        actions, settings,
    )  # fmt: skip
    for each in (login, *screens):
        app.include_router(each.router)

    @app.get("/ui/{rest:path}", include_in_schema=False)
    async def not_found(request: Request) -> Response:
        return page(request, "error.html", {"problem": "There is no such page."}, 404)


class _Files(StaticFiles):
    """Files whose addresses change with their content."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response
