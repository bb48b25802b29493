"""Types that several schemas share."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, TypeAlias, cast

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
"""Text without control characters. No store has a key with one."""
URL = "http://127.0.0.1:8080/"
RUN_ID = "20260215_120000_3fa9"

Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]


def _check_scalar(value: object) -> object:
    """Runs before pydantic tries each type of the union, so that there is one message instead of one per type."""
    if isinstance(value, dict | list):
        raise ValueError("must be a string, a number, true, false or null")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must fit into 64 bits; send larger integers as strings")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("must be a finite number")
    return value


Scalar: TypeAlias = Annotated[
    Annotated[str, Field(max_length=10_000)] | bool | int | float | None, BeforeValidator(_check_scalar)
]


def with_examples(*examples: Mapping[str, object], strict: bool = False) -> ConfigDict:
    """Model settings that show ``examples`` in OpenAPI. ``strict`` rejects unknown keys."""
    return ConfigDict(
        extra="forbid" if strict else None, json_schema_extra={"examples": list(cast("tuple[JsonDict, ...]", examples))}
    )
