"""Request bodies: read in bounded time and memory, however they are built.

Decoding JSON into Python objects multiplies its size: 8 MB of ``[],[],...`` become 300 MB and block the event loop for
seconds. So a body is first split into its top-level values without decoding them. Only ``urls`` may be large, and it is
decoded as a list of text, which stops at the first element that is something else. Everything else is small.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, get_args

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from shoal.server.state import server_of

MAX_SMALL_BYTES = 128 * 1024
"""Of all values of a body together, except ``urls``."""
_LARGE = "urls"

_decode_urls = msgspec.json.Decoder(list[str]).decode
_decode = msgspec.json.Decoder().decode


class BodyError(HTTPException):
    """A body that is refused before it is validated. FastAPI lets only HTTP exceptions through while it reads one."""

    def __init__(self, where: str, message: str, kind: str = "bad request") -> None:
        super().__init__(422, message)
        self.where, self.message, self.kind = where, message, kind


class BoundedRoute(APIRoute):
    """A route whose body is read by `read_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else _model_of(self.body_field.field_info.annotation)
        if model is None:
            return handle

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request, model))

        return bounded


class _BoundedRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        return read_body(await self.body(), self._model, server_of(self).config.serve.max_urls)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a body that may also be left out."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


@cache
def _shape(model: type[BaseModel]) -> type[msgspec.Struct]:
    """The top level of a body: its keys, with values that are not decoded."""
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in model.model_fields]
    return msgspec.defstruct(f"{model.__name__}Shape", fields, forbid_unknown_fields=True)


def read_body(body: bytes, model: type[BaseModel], max_urls: int) -> Any:
    """The body as plain values, for the model to validate. BodyError if it is not JSON, has an unknown key at its top
    level, or has more in it than the model could take."""
    if body.strip() == b"null":
        return None
    try:
        shape = msgspec.json.decode(body, type=_shape(model))
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise BodyError("body", f"not a JSON object that can be read: {exc}") from None
    given = {name: raw for name in model.model_fields if (raw := getattr(shape, name)) is not msgspec.UNSET}
    size = sum(len(bytes(raw)) for name, raw in given.items() if name != _LARGE)
    if size > MAX_SMALL_BYTES:
        raise BodyError("body", f"{size} bytes besides {_LARGE}; at most {MAX_SMALL_BYTES} are read")
    return {name: _value(name, bytes(raw), max_urls) for name, raw in given.items()}


def _value(name: str, raw: bytes, max_urls: int) -> Any:
    where = f"body.{name}"
    if name != _LARGE or len(raw) <= len(b"null"):
        try:
            return _decode(raw)
        except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
            raise BodyError(where, f"can't be read: {exc}") from None
    # Each text has an opening quote, which no backslash precedes: so there are at most so many texts.
    if raw.count(b'"') - raw.count(b'\\"') > 2 * max_urls:
        raise too_many_urls(max_urls)
    try:
        urls = _decode_urls(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise BodyError(where, f"must be a list of text: {exc}") from None
    if len(urls) > max_urls:
        raise too_many_urls(max_urls)
    return urls


def too_many_urls(max_urls: int) -> BodyError:
    return BodyError(
        f"body.{_LARGE}", f"too many URLs: at most {max_urls} are taken (serve.max_urls)", kind="too many urls"
    )
