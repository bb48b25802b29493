"""The option ``timeout`` of the URLs of servers."""

from __future__ import annotations

import re


def timeout_seconds(text: str | None, default: float) -> float:
    """Parse the seconds that a call may take. ValueError if the text is not a positive number."""
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) or float(text) <= 0:
        raise ValueError(f"the timeout {text!r} is not a positive number of seconds")
    return float(text)
