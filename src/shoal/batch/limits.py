"""Limits on what is validated: checked before the elements of a list or an object are.

pydantic validates every element before it reports, and keeps an error for each. A list of a million wrong elements
would cost gigabytes, so its length is checked first.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_MOST_KEYS = 40  # more than any model has, so that a slip is still reported by its name


def at_most(count: int) -> BeforeValidator:
    """For a field that holds a list or an object: no more than so many elements. Behind ``Field`` in an annotation:
    constraints that follow it would be checked on None too."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"has {len(value)} elements; at most {count} are taken")
        return value

    return BeforeValidator(check)


class StrictModel(BaseModel):
    """A part of a request: unknown keys are refused, and a flood of them is refused at once."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_KEYS:
            raise ValueError(f"has {len(value)} keys; it can have {len(cls.model_fields)}")
        return value
