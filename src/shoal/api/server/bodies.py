"""Reads request bodies in bounded time and memory.

The limit of a body is that of its route, and is checked before and while it arrives. All bodies that are being read
together have a limit too (`Server.bodies`).

Decoding JSON into Python objects multiplies its size: 8 MB of ``[],[],...`` become 300 MB and block the event loop for
seconds. So a body is first split into its top-level values without decoding them. Only ``urls`` may be large. It is
decoded as a list of strings, which stops at the first element of another type. All other values are small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cache
from typing import get_args

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive

from shoal.api.server.budgets import caller_of
from shoal.api.server.state import server_of
from shoal.messages import did_you_mean

MAX_SMALL_BYTES = 128 * 1024
"""Limit of all values of a body together, except ``urls``."""
MAX_PUBLIC_BYTES = 20_000
"""Limit of a body on a route that needs no token."""
_LARGE = "urls"
_UNCOUNTED_BYTES = 64 * 1024  # what uvicorn reads of a body before anybody asks for it
_DRAIN_TIMEOUT = 2.0  # seconds

_decode_urls = msgspec.json.Decoder(list[str]).decode
_decode = msgspec.json.Decoder().decode


class BodyError(HTTPException):
    """A body is invalid. An HTTPException because FastAPI passes no others through while it reads a body."""

    def __init__(self, where: str, message: str, kind: str = "bad request") -> None:
        super().__init__(422, message)
        self.where, self.message, self.kind = where, message, kind


class BoundedRoute(APIRoute):
    """A route that reads its body with `read_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else find_model(self.body_field.field_info.annotation)
        if model is None:
            return handle

        async def bounded(request: Request) -> Response:
            bounded_request = _BoundedRequest(request, model)
            try:
                return await handle(bounded_request)
            finally:
                bounded_request.drop_body()

        return bounded


class _BoundedRequest(Request):
    """Keeps its body only until it is decoded: an answer may take an hour."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self._serve = server_of(request).config.serve
        self._budget = server_of(request).bodies
        self._caller = caller_of(request)
        self._raw = b""
        self._counted = 0

    async def body(self) -> bytes:
        """Read the body. What this returns is only as empty as the body is; `json` decodes it."""
        max_bytes, name = MAX_SMALL_BYTES, ""
        if _LARGE in self._model.model_fields:
            max_bytes, name = self._serve.max_request_bytes, " (serve.max_request_bytes)"
        raw = bytearray()
        try:
            self._count(content_length(self.headers), max_bytes, name)
            async for chunk in self.stream():
                self._count(len(raw) + len(chunk), max_bytes, name)
                raw += chunk
        except HTTPException:
            raw.clear()
            await drain(self.receive)
            raise
        self._raw = bytes(raw)
        return self._raw[:1]

    def _count(self, size: int, max_bytes: int, name: str) -> None:
        if size > max_bytes:
            raise too_large(max_bytes, name)
        if size > max(self._counted, _UNCOUNTED_BYTES):
            self._budget.take(self._caller, size - self._counted)
            self._counted = size

    async def json(self) -> object:
        try:
            return read_body(self._raw, self._model, self._serve.max_urls)
        finally:
            self.drop_body()

    def drop_body(self) -> None:
        self._raw = b""
        self._budget.give_back(self._caller, self._counted)
        self._counted = 0


def too_large(max_bytes: int, name: str = "") -> HTTPException:
    """The refusal of a body. ``name``: of its limit's setting."""
    return HTTPException(413, f"the body is larger than {max_bytes} bytes{name}", {"Connection": "close"})


def content_length(headers: Headers) -> int:
    """The length that a request declares, or 0."""
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0


async def drain(receive: Receive) -> None:
    """Read the rest of the body for a moment: a client whose connection is closed while it sends sees no response."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT):
            while (await receive()).get("more_body"):
                pass


def find_model(annotation: object) -> type[BaseModel] | None:
    """The model in ``Model`` or ``Model | None``."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


@cache
def _shape(model: type[BaseModel]) -> type[msgspec.Struct]:
    """A struct with the top-level keys of a body, whose values stay encoded."""
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in model.model_fields]
    return msgspec.defstruct(f"{model.__name__}Shape", fields, forbid_unknown_fields=True)


def read_body(body: bytes, model: type[BaseModel], max_urls: int) -> object:
    """Decode a body into plain values, which the model validates next.

    BodyError if the body is not a JSON object, has an unknown key at its top level, or is too large.
    """
    if body.strip() == b"null":
        return None
    try:
        shape = msgspec.json.decode(body, type=_shape(model))
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        hint = _similar_key(str(exc), model) if isinstance(exc, msgspec.ValidationError) else ""
        raise BodyError("body", f"invalid JSON object: {exc}{hint}") from None
    raws = {name: raw for name in model.model_fields if (raw := getattr(shape, name)) is not msgspec.UNSET}
    size = sum(len(bytes(raw)) for name, raw in raws.items() if name != _LARGE)
    if size > MAX_SMALL_BYTES:
        raise BodyError("body", f"{size} bytes without {_LARGE}; the limit is {MAX_SMALL_BYTES}")
    return {name: _decode_value(name, bytes(raw), max_urls) for name, raw in raws.items()}


def _similar_key(message: str, model: type[BaseModel]) -> str:
    """A suggestion for the unknown key that a message of msgspec names between backticks."""
    _, quote, rest = message.partition("unknown field `")
    return hint_for_field(rest.rpartition("`")[0], model) if quote else ""


def hint_for_field(name: str, model: type[BaseModel]) -> str:
    """What may be meant by a field that a model does not have: a similar name, or one of a model within it."""
    if near := did_you_mean(name, list(model.model_fields)):
        return near
    for outer, field in model.model_fields.items():
        inner = find_model(field.annotation)
        if inner is not None and name in inner.model_fields:
            return f"; it belongs in {outer}"
    return ""


def _decode_value(name: str, raw: bytes, max_urls: int) -> object:
    where = f"body.{name}"
    if name != _LARGE or len(raw) <= len(b"null"):
        try:
            return _decode(raw)
        except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
            raise BodyError(where, f"invalid JSON: {exc}") from None
    # Each string has two quotes without a backslash before them. So this bounds the number of strings.
    if raw.count(b'"') - raw.count(b'\\"') > 2 * max_urls:
        raise _too_many_urls(max_urls)
    try:
        urls = _decode_urls(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise BodyError(where, f"must be a list of strings: {exc}") from None
    if len(urls) > max_urls:
        raise _too_many_urls(max_urls)
    return urls


def _too_many_urls(max_urls: int) -> BodyError:
    return BodyError(f"body.{_LARGE}", f"too many URLs; the limit is {max_urls} (serve.max_urls)", kind="too many urls")
