"""IDs of test cases that are the same in each process."""

from __future__ import annotations

import re


def steady(value: object) -> str:
    """The repr of a value without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
