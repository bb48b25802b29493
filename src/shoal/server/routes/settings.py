"""`/api/settings`: the settings in force."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.schemas.settings import SettingList
from shoal.server.state import server_of

router = APIRouter(prefix="/api/settings", tags=["settings"])


@router.get("", response_model=SettingList, responses=problems(401, 403, 422, 503))
async def list_settings(request: Request) -> Response:
    """Every setting of this server with its value and where that comes from. Secrets are masked. For the role
    `admin`."""
    return json_response({"settings": [each._asdict() for each in server_of(request).settings()]})
