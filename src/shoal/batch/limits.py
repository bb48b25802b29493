"""Limits that are checked before pydantic validates the elements of a list or an object.

pydantic validates every element and keeps an error for each. A list of a million invalid elements would cost gigabytes.
"""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_MAX_KEYS = 40  # more than any model has, so that a few unknown keys are still reported by name


def at_most(count: int) -> BeforeValidator:
    """Limit the elements of a list or an object to ``count``. Put it after ``Field`` in the annotation: pydantic would
    check constraints that follow it on None too."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"has {len(value)} elements; the limit is {count}")
        return value

    return BeforeValidator(check)


class StrictModel(BaseModel):
    """A part of a request that refuses unknown keys. Many unknown keys are one error, not one for each."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_KEYS:
            raise ValueError(f"has {len(value)} keys; the limit is {len(cls.model_fields)}")
        return value
