"""For admins. `/api/settings`: the settings in force. `/api/logins`: end sessions of the dashboard."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec import Struct

from shoal.api.resources.common import record_action
from shoal.api.server.answers import answer
from shoal.api.server.errors import ProblemError, problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import SettingInForce, server_of


class SettingList(Struct, frozen=True, kw_only=True):
    """All settings of the server."""

    settings: list[SettingInForce]


class EndedLogins(Struct, frozen=True, kw_only=True):
    """Whose sessions of the dashboard were ended."""

    ended: list[str]
    """Names of tokens; empty: the main token."""


router = APIRouter(prefix="/api", tags=["settings"])


@router.get("/settings", response_model=answer(SettingList), responses=problems(401, 403, 422, 503))
async def list_settings(request: Request) -> Response:
    """Every setting of this server with its value and where that comes from. Secrets are masked. For the role
    `admin`."""
    return json_response(SettingList(settings=server_of(request).settings()))


@router.delete("/logins", response_model=answer(EndedLogins), responses=problems(401, 403, 404, 422, 503))
async def end_logins(
    request: Request,
    name: Annotated[
        str | None, Query(max_length=200, description="The name of a token; empty: the main token. Default: all.")
    ] = None,
) -> Response:
    """Log people out of the dashboard: all sessions of one token, or of all tokens. For the role `admin`."""
    names = list(request.app.state.callers.by_name)
    if name is not None and name not in names:
        raise ProblemError(404, "not found", f"no token has the name {name!r:.80}")
    ended = names if name is None else [name]
    await server_of(request).logins.end_all(ended)
    await record_action(request, "end logins", ", ".join(token_name or "main token" for token_name in ended))
    return json_response(EndedLogins(ended=ended))
