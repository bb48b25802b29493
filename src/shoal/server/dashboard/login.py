"""Logging in to the dashboard with a token, and out again."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from shoal.server.auth import LOGIN, ROLES, session_cookie
from shoal.server.bodies import BoundedRoute
from shoal.server.dashboard.pages import page
from shoal.server.sessions import SessionCookies
from shoal.server.state import server_of

router = APIRouter(include_in_schema=False, route_class=BoundedRoute)

_PENALTY = 1.0  # seconds before a wrong token is refused: guessing takes long


@router.get(LOGIN)
async def show_login(request: Request, next: Annotated[str, Query(max_length=8192)] = "/") -> Response:
    """The login page. Without tokens there is nothing to log in to."""
    if not _tokens(request):
        return RedirectResponse("/", 303)
    return page(request, "login.html", {"next": _own_path(next), "problem": ""})


@router.post(LOGIN)
async def log_in(request: Request) -> Response:
    """Check a token, and set the session cookie."""
    form = dict(parse_qsl((await request.body()).decode("latin-1"), max_num_fields=5))
    wanted = _own_path(form.get("next", "/"))
    found = _find_name(_tokens(request), form.get("token", "").strip())
    if found is None:
        await asyncio.sleep(_PENALTY)
        return page(request, "login.html", {"next": wanted, "problem": "This token is not known."}, 401)
    roles = server_of(request).config.serve.roles
    if found and ROLES.index(roles.get(found, "batch")) < ROLES.index("viewer"):
        text = f"The token {found!r} is for batches only. Ask for the role viewer (serve.roles)."
        return page(request, "login.html", {"next": wanted, "problem": text}, 403)
    response = RedirectResponse(wanted, 303)
    response.headers["set-cookie"] = session_cookie(SessionCookies(_tokens(request)).make(found), request.scope)
    return response


@router.post("/ui/logout")
async def log_out(request: Request) -> Response:
    """End the session in this browser."""
    response = Response(status_code=204, headers={"HX-Redirect": LOGIN})
    response.headers["set-cookie"] = session_cookie("", request.scope)
    return response


def _tokens(request: Request) -> dict[str, str]:
    serve = server_of(request).config.serve
    return {**serve.tokens, **({"": serve.token} if serve.token else {})}


def _find_name(tokens: dict[str, str], sent: str) -> str | None:
    found = None
    for name, token in tokens.items():  # compare with all, so that the time reveals nothing
        if hmac.compare_digest(sent.encode(), token.encode()):
            found = name
    return found


def _own_path(text: str) -> str:
    """A path of this server: a login must not lead to another site."""
    parts = urlsplit(text)
    is_own = text.startswith("/") and not text.startswith(("//", "/\\")) and not parts.netloc and text.isprintable()
    return text if is_own and text.isascii() else "/"
