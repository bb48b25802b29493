"""Reads request bodies in bounded time and memory.

Decoding JSON into Python objects multiplies its size: 8 MB of ``[],[],...`` become 300 MB and block the event loop for
seconds. So a body is first split into its top-level values without decoding them. Only ``urls`` may be large. It is
decoded as a list of strings, which stops at the first element of another type. All other values are small.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import get_args

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from shoal.server.state import server_of

MAX_SMALL_BYTES = 128 * 1024
"""Limit of all values of a body together, except ``urls``."""
_LARGE = "urls"

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
        model = None if self.body_field is None else _find_model(self.body_field.field_info.annotation)
        if model is None:
            return handle

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request, model))

        return bounded


class _BoundedRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> object:
        return read_body(await self.body(), self._model, server_of(self).config.serve.max_urls)


def _find_model(annotation: object) -> type[BaseModel] | None:
    """The model in ``Model`` or ``Model | None``."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
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
        raise BodyError("body", f"invalid JSON object: {exc}") from None
    raws = {name: raw for name in model.model_fields if (raw := getattr(shape, name)) is not msgspec.UNSET}
    size = sum(len(bytes(raw)) for name, raw in raws.items() if name != _LARGE)
    if size > MAX_SMALL_BYTES:
        raise BodyError("body", f"{size} bytes without {_LARGE}; the limit is {MAX_SMALL_BYTES}")
    return {name: _decode_value(name, bytes(raw), max_urls) for name, raw in raws.items()}


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
