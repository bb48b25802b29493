"""`/api/logins`: end sessions of the dashboard."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from shoal.server.action_log import record_action
from shoal.server.errors import ProblemError, problems
from shoal.server.responses import json_response
from shoal.server.schemas.settings import EndedLogins
from shoal.server.state import server_of

router = APIRouter(prefix="/api/logins", tags=["settings"])


@router.delete("", response_model=EndedLogins, responses=problems(401, 403, 404, 422, 503))
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
    await record_action(request, "end logins", ", ".join(each or "main token" for each in ended))
    return json_response({"ended": ended})
