"""Turns every error into a response of the same format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from msgspec import Struct
from starlette.exceptions import HTTPException

from shoal.api.batch.admission import TooManySessionsError
from shoal.api.batch.urls import redacted
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BodyError, find_model, hint_for_field
from shoal.api.server.responses import json_response
from shoal.errors import (
    BrowserError,
    ConfigError,
    CoordinatorAwayError,
    RequestError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreFullError,
)

log = logging.getLogger("shoal.server")

_STATUSES: dict[type[ShoalError], tuple[int, str]] = {
    RunError: (409, "wrong state"),
    RequestError: (422, "bad request"),
    ConfigError: (422, "bad request"),
    BrowserError: (503, "no browser"),
    StoreAwayError: (503, "store away"),
    StoreFullError: (503, "store full"),
    CoordinatorAwayError: (503, "coordinator away"),
    TooManySessionsError: (429, "too many sessions"),
}
_PUBLIC_MESSAGES: dict[str, str] = {
    "store away": "the frontier's server does not respond; try again later",
    "store full": "the store has no room for more results; try again when some have expired",
    "coordinator away": "the coordinator's server does not respond; try again later",
    "internal": "internal error; see the server's log",
}
"""Messages that replace those of the exceptions, which may name internal servers and paths."""


MAX_DETAILS = 20
"""Errors that one response lists."""
_MAX_DETAIL_CHARACTERS = 300
_MAX_MESSAGE_CHARACTERS = 1000

_KINDS = {
    404: "not found",
    405: "method not allowed",
    413: "too large",
    422: "bad request",
    429: "too many requests",
    503: "busy",
}


class ProblemDetail(Struct, frozen=True, kw_only=True):
    """What failed: `kind` for programs, `message` for people."""

    kind: str
    message: str
    details: list[dict[str, str]]


class Problem(Struct, frozen=True):
    """The body of every error response."""

    error: ProblemDetail


def problem(
    status: int,
    kind: str,
    message: str,
    details: list[dict[str, str]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    details = [{name: _clean(text) for name, text in detail.items()} for detail in details or []]
    error = ProblemDetail(kind=kind, message=_clean(message, _MAX_MESSAGE_CHARACTERS), details=details)
    return json_response(Problem(error), status, headers)


def _clean(text: str, max_characters: int = _MAX_DETAIL_CHARACTERS) -> str:
    """Shorten a message and escape lone surrogates. Messages quote input, which may be long and not encodable."""
    short = text if len(text) <= max_characters else f"{text[:max_characters]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def _shorten_key(part: object) -> str:
    """A key of the body may be as long as the body."""
    return f"{part:.80}" if isinstance(part, str) else str(part)


class ProblemError(Exception):
    """Ends a request with an error response."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The error responses of a route, for OpenAPI."""
    return {status: {"model": answer(Problem)} for status in statuses}


def install(app: FastAPI) -> None:
    """Register a handler for each kind of exception that a route may raise."""

    @app.exception_handler(ProblemError)
    async def _handle_problem(request: Request, exc: ProblemError) -> Response:
        return problem(exc.status, exc.kind, str(exc))

    @app.exception_handler(HTTPException)
    async def _handle_http(request: Request, exc: HTTPException) -> Response:
        if exc.status_code == 400:  # FastAPI could not decode the body
            return problem(422, _KINDS[422], "body: invalid JSON")
        kind = _KINDS.get(exc.status_code, "http")
        return problem(exc.status_code, kind, str(exc.detail), headers=exc.headers)

    @app.exception_handler(Exception)
    async def _handle_unexpected(request: Request, exc: Exception) -> Response:
        return problem(500, "internal", _PUBLIC_MESSAGES["internal"])

    @app.exception_handler(RequestValidationError)
    async def _handle_validation(request: Request, exc: RequestValidationError) -> Response:
        errors = exc.errors()
        details = [
            {
                "where": ".".join(map(_shorten_key, error["loc"])),
                "message": _validation_message(error) + _hint(request, error),
            }
            for error in errors[:MAX_DETAILS]
        ]
        if len(errors) > MAX_DETAILS:
            details.append({"where": "body", "message": f"and {len(errors) - MAX_DETAILS} more errors"})
        first = details[0] if details else {"where": "body", "message": "invalid"}
        return problem(422, _KINDS[422], f"{first['where']}: {first['message']}", details)

    @app.exception_handler(BodyError)
    async def _handle_body(request: Request, exc: BodyError) -> Response:
        detail = {"where": exc.where, "message": exc.message}
        return problem(422, exc.kind, f"{exc.where}: {exc.message}", [detail])

    @app.exception_handler(ShoalError)
    async def _handle_shoal(request: Request, exc: ShoalError) -> Response:
        status, kind = next((_STATUSES[error] for error in type(exc).__mro__ if error in _STATUSES), (500, "internal"))
        retry = {"Retry-After": "5"} if status in (429, 503) else {}
        return problem(status, kind, public_message(exc, kind), headers=retry)


def _validation_message(error: Mapping[str, object]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    if error["type"] == "too_short":
        return "must not be empty"
    if error["type"] not in ("model_type", "model_attributes_type"):
        return str(error["msg"]).removeprefix("Value error, ")
    if error["loc"] == ("body",):  # FastAPI decodes a body only if the header says that it is JSON
        return "must be a JSON object, with the header Content-Type: application/json"
    return "must be a JSON object"


def _hint(request: Request, error: Mapping[str, Any]) -> str:
    """A suggestion for an unknown field within a body, or nothing."""
    place = error["loc"]
    body = getattr(request.scope.get("route"), "body_field", None)
    if error["type"] != "extra_forbidden" or place[0] != "body" or body is None:
        return ""
    model = find_model(body.field_info.annotation)
    for name in place[1:-1]:
        field = None if model is None else model.model_fields.get(name)
        model = None if field is None else find_model(field.annotation)
    return "" if model is None else hint_for_field(str(place[-1]), model)


def public_message(exc: ShoalError, kind: str = "") -> str:
    """The message of an error without internal addresses, servers and paths. The log has the full message."""
    if kind in _PUBLIC_MESSAGES:
        log.warning("%s: %s", kind, exc)
        return _PUBLIC_MESSAGES[kind]
    if isinstance(exc, RequestError):  # it quotes only what the caller sent
        return str(exc)
    message = redacted(str(exc))
    if message != str(exc):
        log.warning("responded %r: %s", message, exc)
    return message
