"""`/api/actions`: the log of user actions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from shoal.server.action_log import action_log
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.schemas.notifications import ActionPage

router = APIRouter(prefix="/api/actions", tags=["actions"])


@router.get("", response_model=ActionPage, responses=problems(401, 422, 503))
async def list_actions(
    request: Request, limit: Annotated[int, Query(ge=1, le=400, description="Number of latest actions.")] = 100
) -> Response:
    """What users did through the API and with commands, newest first: who paused a run, who changed a host."""
    return json_response({"actions": await action_log(request).recent(limit)})
