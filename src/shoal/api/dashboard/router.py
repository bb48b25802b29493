"""Adds the dashboard to the application."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, cast
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from shoal.api.dashboard import batch_screens, fleet_screens, run_screens
from shoal.api.dashboard.pages import page
from shoal.api.server.auth import LOGIN, CallerTokens, client_address, has_role, session_cookie
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import ProblemError
from shoal.api.server.logins import SessionCookies
from shoal.api.server.state import server_of
from shoal.errors import StoreAwayError

# -- logging in to the dashboard with a token, and out again


router = APIRouter(include_in_schema=False, route_class=BoundedRoute)


@router.get(LOGIN)
async def show_login(request: Request, next: Annotated[str, Query(max_length=8192)] = "/") -> Response:
    """The login page. Without tokens there is nothing to log in to."""
    if not _callers(request).by_name:
        return RedirectResponse("/", 303)
    return page(request, "login.html", {"next": _own_path(next), "problem": ""})


@router.post(LOGIN)
async def log_in(request: Request) -> Response:
    """Check a token, and set the session cookie."""
    try:
        form = dict(parse_qsl((await request.body()).decode("latin-1"), max_num_fields=5))
    except ValueError as exc:
        raise ProblemError(422, "bad request", "the body has more fields than the form of the login") from exc
    next_path = _own_path(form.get("next", "/"))
    callers = _callers(request)

    def refuse(status: int, text: str) -> Response:
        return page(request, "login.html", {"next": next_path, "problem": text}, status)

    try:
        caller = callers.find(form.get("token", "").strip().encode(), client_address(request.scope))
    except ProblemError as exc:
        answer = refuse(exc.status, f"{exc}.".capitalize())
        answer.headers["Retry-After"] = "1"
        return answer
    if caller is None:
        return refuse(401, "This token is not known.")
    roles = server_of(request).config.serve.roles
    if caller and not has_role(roles.get(caller, "batch"), "viewer"):
        return refuse(403, f"The token {caller!r} is for batches only. Ask for the role viewer (serve.roles).")
    try:
        await server_of(request).logins.ended()  # a session must not begin before the store knows any
    except StoreAwayError:
        return refuse(503, "The store does not answer. Try again in a moment.")
    response = RedirectResponse(next_path, 303)
    response.headers["set-cookie"] = session_cookie(SessionCookies(callers.by_name).make(caller), request.scope)
    return response


@router.post("/ui/logout")
async def log_out(request: Request) -> Response:
    """End the session, also for copies of its cookie. `StoreAwayError` leaves it as it is."""
    if request.state.session is not None:
        await server_of(request).logins.end(request.state.session)
    response = Response(status_code=204, headers={"HX-Redirect": LOGIN})
    response.headers["set-cookie"] = session_cookie("", request.scope)
    return response


def _callers(request: Request) -> CallerTokens:
    return cast(CallerTokens, request.app.state.callers)


def _own_path(text: str) -> str:
    """A path of this server: a login must not lead to another site."""
    parts = urlsplit(text)
    is_own = text.startswith("/") and not text.startswith(("//", "/\\")) and not parts.netloc and text.isprintable()
    return text if is_own and text.isascii() else "/"


def add_dashboard(app: FastAPI) -> None:
    """Serve the overview at ``/``, and everything else of the dashboard below ``/ui``."""
    app.mount("/ui/static", _Files(directory=str(files("shoal.api.dashboard") / "static")))
    for routes in (router, run_screens.router, fleet_screens.router, batch_screens.router):
        app.include_router(routes)

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
