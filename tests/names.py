"""Names for the cases of a test that are the same in each process."""

from __future__ import annotations

import re


def steady(value: object) -> str:
    """What a value looks like, without where it is in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
