"""Builds the FastAPI application."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files

from fastapi import Depends, FastAPI, Security
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from shoal import __version__
from shoal.api.dashboard.router import add_dashboard
from shoal.api.resources import batches, clusters, health, hosts, notifications, reports, runs, schedules, settings
from shoal.api.server.auth import AuthMiddleware, CallerTokens, check_admin, check_binding, check_role
from shoal.api.server.errors import install, problems
from shoal.api.server.state import Server, schedules_of_file
from shoal.config import Config
from shoal.operations.notifications.watcher import Notifications

_DESCRIPTION = """Crawl URLs and get their content, in this server or on Celery workers.

If the server has a token, send it as `Authorization: Bearer TOKEN`. All errors have the same format:
`{"error": {"kind": ..., "message": ..., "details": [...]}}`."""

_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
)
"""An answer is data, unless it says otherwise: nothing in it runs, even if a browser shows it as a page."""

# Only for OpenAPI: AuthMiddleware checks the token.
_TOKEN = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="X-API-Key", auto_error=False))]


def create_app(config: Config, *, ui_only: bool = False) -> FastAPI:
    """Build the API and the dashboard as an ASGI application. ConfigError if it would accept anyone on the network, or
    shoal.toml has an invalid schedule or notifications that cannot work.

    ``ui_only``: other processes use the store and handle its batches, schedules and notifications.
    """
    check_binding(config.serve)
    schedules_of_file()
    notifier = Notifications(config, active=not ui_only)  # now: a wrong setting is a ConfigError

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server = app.state.server = Server(config, notifier, ui_only=ui_only)
        await server.open()
        try:
            yield
        finally:
            await server.close()

    app = _Application(
        title="Shoal",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    install(app)
    if not ui_only:
        app.include_router(batches.router, dependencies=_TOKEN)
    # Reports come before runs, or else /api/runs/compare would match /api/runs/{run_id}.
    for router in (
        reports.router,
        runs.router,
        reports.charts_router,
        hosts.router,
        reports.workers_router,
        clusters.router,
        schedules.router,
        notifications.router,
        notifications.actions_router,
    ):
        app.include_router(router, dependencies=[*_TOKEN, Depends(check_role)], responses=problems(403))
    app.include_router(settings.router, dependencies=[*_TOKEN, Depends(check_admin)])
    app.include_router(health.router)
    add_dashboard(app)
    _serve_docs(app)
    app.state.callers = CallerTokens(config.serve)
    app.add_middleware(AuthMiddleware, config=config.serve, callers=app.state.callers)
    return app


class _Application(FastAPI):
    """Adds `_HEADERS` to every answer that has none of its own, also to errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                present = {name for name, _ in headers}
                message["headers"] = [*headers, *(header for header in _HEADERS if header[0] not in present)]
            await send(message)

        await super().__call__(scope, receive, send_safely)


def _serve_docs(app: FastAPI) -> None:
    """Serve `/docs` with bundled scripts and styles, so that it works without internet access."""
    app.mount("/docs/assets", StaticFiles(directory=str(files("fastapi_swagger") / "resources")))
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Shoal",
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="/docs/assets/favicon-32x32.png",
    )
    policy = _policy_of_docs(bytes(page.body).decode())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.body, headers={"Content-Security-Policy": policy})


def _policy_of_docs(html: str) -> str:
    """A policy that allows the scripts of this page, and no others."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
