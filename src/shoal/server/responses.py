"""JSON responses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi.responses import Response


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
