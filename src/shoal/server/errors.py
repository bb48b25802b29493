"""Errors as callers get them: one format, whatever went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from shoal.batch.admission import TooManySessionsError
from shoal.batch.redaction import redacted
from shoal.errors import ConfigError, CoordinatorAwayError, RequestError, RunError, ShoalError, StoreAwayError
from shoal.server.responses import answer
from shoal.server.bodies import BodyError

log = logging.getLogger("shoal.server")

_STATUSES: dict[type[ShoalError], tuple[int, str]] = {
    RunError: (409, "wrong state"),
    RequestError: (422, "bad request"),
    ConfigError: (422, "bad request"),
    StoreAwayError: (503, "store away"),
    CoordinatorAwayError: (503, "coordinator away"),
    TooManySessionsError: (429, "too many sessions"),
}
_INSTEAD: dict[str, str] = {
    "store away": "the server of the frontier does not answer; try again later",
    "coordinator away": "the server of the coordinator does not answer; try again later",
    "internal": "something went wrong in the server; its log has more",
}
"""What callers are told instead of what happened: that names servers and paths, which are no concern of theirs."""


MOST_DETAILS = 20
"""Errors that one answer lists."""
_LONGEST_DETAIL = 300  # characters
_LONGEST_MESSAGE = 1000

_KINDS = {404: "not found", 405: "method not allowed", 413: "too large", 422: "bad request"}


class ProblemDetail(BaseModel):
    """What went wrong: `kind` for programs, `message` for people."""

    kind: str
    message: str
    details: list[dict[str, str]] = []


class Problem(BaseModel):
    """The answer to whatever could not be done."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "kind": "bad request",
                        "message": "body.timeout: Input should be greater than 0",
                        "details": [{"where": "body.timeout", "message": "Input should be greater than 0"}],
                    }
                }
            ]
        }
    )

    error: ProblemDetail


def problem(
    status: int,
    kind: str,
    message: str,
    details: list[dict[str, str]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    details = [{name: _sayable(text) for name, text in detail.items()} for detail in details or []]
    body = {"error": {"kind": kind, "message": _sayable(message, _LONGEST_MESSAGE), "details": details}}
    return answer(body, status, headers)


def _sayable(text: str, longest: int = _LONGEST_DETAIL) -> str:
    """Messages quote what came in: it may be long, and may hold what no encoding has."""
    short = text if len(text) <= longest else f"{text[:longest]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def _place(part: object) -> str:
    """A key of the body may be as long as the body."""
    return f"{part:.80}" if isinstance(part, str) else str(part)


class ProblemError(Exception):
    """Ends a request with this answer."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the description of a route: what it answers when it can't."""
    return {status: {"model": Problem} for status in statuses}


def install(app: FastAPI) -> None:
    """Whatever a route raises becomes a problem."""

    @app.exception_handler(ProblemError)
    async def _own(request: Request, exc: ProblemError) -> Response:
        return problem(exc.status, exc.kind, str(exc))

    @app.exception_handler(HTTPException)
    async def _plain(request: Request, exc: HTTPException) -> Response:
        if exc.status_code == 400:  # a body that is too deep, or has a number without end
            return problem(422, _KINDS[422], "body: it can't be read")
        kind = _KINDS.get(exc.status_code, "http")
        return problem(exc.status_code, kind, str(exc.detail), headers=exc.headers)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, exc: Exception) -> Response:
        return problem(500, "internal", _INSTEAD["internal"])

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, exc: RequestValidationError) -> Response:
        found = exc.errors()
        details = [
            {"where": ".".join(map(_place, error["loc"])), "message": error["msg"].removeprefix("Value error, ")}
            for error in found[:MOST_DETAILS]
        ]
        if len(found) > MOST_DETAILS:
            details.append({"where": "body", "message": f"and {len(found) - MOST_DETAILS} more errors"})
        first = details[0] if details else {"where": "body", "message": "it can't be read"}
        return problem(422, _KINDS[422], f"{first['where']}: {first['message']}", details)

    @app.exception_handler(BodyError)
    async def _unreadable(request: Request, exc: BodyError) -> Response:
        detail = {"where": exc.where, "message": exc.message}
        return problem(422, exc.kind, f"{exc.where}: {exc.message}", [detail])

    @app.exception_handler(ShoalError)
    async def _ours(request: Request, exc: ShoalError) -> Response:
        status, kind = next((_STATUSES[each] for each in type(exc).__mro__ if each in _STATUSES), (500, "internal"))
        retry = {"Retry-After": "5"} if status in (429, 503) else {}
        return problem(status, kind, told(exc, kind), headers=retry)


def told(exc: ShoalError, kind: str = "") -> str:
    """What a caller may know of an error. What is left out is in the log."""
    if kind in _INSTEAD:
        log.warning("answered %s: %s", kind, exc)
        return _INSTEAD[kind]
    if isinstance(exc, RequestError):  # it quotes what the caller sent
        return str(exc)
    message = redacted(str(exc))
    if message != str(exc):
        log.warning("answered %r: %s", message, exc)
    return message
