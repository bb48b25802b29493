"""Describes answers in OpenAPI. An answer is a struct, usually one of those that operations return, so the document
says what is sent: the fields of the struct, and the text below each of them in the source."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import cache, reduce
from importlib.resources import files
from itertools import pairwise
from operator import or_
from types import ModuleType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from msgspec import NODEFAULT, Struct, structs
from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model


@cache
def answer(struct: type[Struct]) -> type[BaseModel]:
    """The model of a struct, for ``response_model``. Its examples are in ``examples.json``.

    All fields are required, because msgspec writes them all, unless the struct omits defaults."""
    omits_defaults = struct.__struct_config__.omit_defaults
    texts = _field_texts(struct)
    fields: dict[str, Any] = {}
    for field in structs.fields(struct):
        default: object = ...
        if omits_defaults and not field.required:
            default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        description = texts.get(field.name)
        fields[field.encode_name] = _described(field.type), Field(default, description=description)
    shown = examples().get(struct.__name__)
    config = ConfigDict(json_schema_extra={"examples": shown} if shown else None)
    return create_model(struct.__name__, __config__=config, __doc__=_markdown(struct.__doc__ or ""), **fields)


def _described(kind: Any) -> Any:
    """A type with the models of the structs in it."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return answer(kind)
    arguments = get_args(kind)
    if not arguments or get_origin(kind) is Literal:
        return kind
    arguments = tuple(map(_described, arguments))
    return reduce(or_, arguments) if get_origin(kind) in (Union, UnionType) else get_origin(kind)[arguments]


def _field_texts(struct: type[Struct]) -> Mapping[str, str]:
    """The texts below the fields of a struct and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        texts |= _texts_of_module(sys.modules[base.__module__]).get(base.__name__, {})
    return texts


@cache
def _texts_of_module(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """By class and field. Empty for a module without source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return {}
    return {node.name: dict(_texts_of_class(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts_of_class(node: ast.ClassDef) -> list[tuple[str, str]]:
    return [
        (field.target.id, _markdown(text.value.value))
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    ]


def _markdown(text: str) -> str:
    """A docstring for users of the API: None is ``null`` in JSON."""
    text = inspect.cleandoc(text).replace("\n", " ").replace("``", "`")
    return re.sub(r"\bNone\b", "`null`", text)


@cache
def examples() -> Mapping[str, list[JsonValue]]:
    """The examples of answers, by struct."""
    text = (files("shoal.api.resources") / "examples.json").read_text("utf-8")
    return cast("Mapping[str, list[JsonValue]]", json.loads(text))
