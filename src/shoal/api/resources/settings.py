"""`/api/settings`: the settings in force."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from shoal.api.resources.common import record_action, with_examples
from shoal.api.server.errors import ProblemError, problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import server_of

# Bodies of `/api/settings`.


class SettingEntry(BaseModel):
    """A setting."""

    key: Annotated[str, Field(description="Dotted key, as in `shoal.toml` and `--set`.")]
    value: Annotated[object, Field(description="The value in force. Secrets are masked.")]
    source: Annotated[str, Field(description="`default`, a file, an environment variable, or `command line or code`.")]


class SettingList(BaseModel):
    """All settings of the server."""

    model_config = with_examples(
        {
            "settings": [
                {"key": "download_delay", "value": 0.5, "source": "default"},
                {"key": "serve.token", "value": "***", "source": "SHOAL_SERVE__TOKEN"},
            ]
        }
    )

    settings: list[SettingEntry]


class EndedLogins(BaseModel):
    """Whose sessions of the dashboard were ended."""

    model_config = with_examples({"ended": ["", "otto"]})

    ended: Annotated[list[str], Field(description="Names of tokens; empty: the main token.")]


router = APIRouter(prefix="/api/settings", tags=["settings"])


@router.get("", response_model=SettingList, responses=problems(401, 403, 422, 503))
async def list_settings(request: Request) -> Response:
    """Every setting of this server with its value and where that comes from. Secrets are masked. For the role
    `admin`."""
    return json_response({"settings": [each._asdict() for each in server_of(request).settings()]})


# `/api/logins`: end sessions of the dashboard.


logins_router = APIRouter(prefix="/api/logins", tags=["settings"])


@logins_router.delete("", response_model=EndedLogins, responses=problems(401, 403, 404, 422, 503))
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
