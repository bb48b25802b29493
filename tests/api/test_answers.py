"""OpenAPI describes the structs that are sent."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal.api import resources
from shoal.api.server.answers import answer, examples


class Part(Struct, frozen=True, kw_only=True):
    """A part of a whole."""

    size: int
    """In bytes; None if
    it is ``unknown``."""


class Whole(Part, frozen=True, kw_only=True):
    """A whole."""

    state: Literal["b", "a"] = "b"
    parts: dict[str, tuple[Part, ...] | None] = {}
    """By name."""


class Short(Struct, omit_defaults=True):
    """Leaves out what is empty."""

    name: str
    parts: list[Part] = []


def test_a_field_is_described_by_the_text_below_it() -> None:
    schema = answer(Whole).model_json_schema()
    assert schema["description"] == "A whole."
    assert schema["properties"]["size"]["description"] == "In bytes; `null` if it is `unknown`."
    assert schema["properties"]["parts"]["description"] == "By name."
    assert schema["properties"]["state"]["enum"] == ["b", "a"]
    assert "description" not in schema["properties"]["state"]
    assert schema["$defs"]["Part"]["description"] == "A part of a whole."
    assert answer(Whole) is answer(Whole)


def test_fields_that_are_always_sent_are_required() -> None:
    assert set(answer(Whole).model_json_schema()["required"]) == {"size", "state", "parts"}
    assert answer(Short).model_json_schema()["required"] == ["name"]


def test_every_example_is_an_answer() -> None:
    structs: dict[str, Any] = {}
    for module in pkgutil.walk_packages(resources.__path__, f"{resources.__name__}."):
        structs |= vars(importlib.import_module(module.name))
    structs |= vars(importlib.import_module("shoal.api.server.errors"))
    for name, all_examples in examples().items():
        for example in all_examples:
            assert json.loads(msgspec.json.encode(msgspec.convert(example, structs[name]))) == example, name
