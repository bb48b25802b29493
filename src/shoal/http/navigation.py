"""Permission for a page to navigate while actions of the user run in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeAlias

Permit: TypeAlias = Callable[[str], Awaitable[float | None]]
"""Called with a URL on the host of the page. Returns the seconds to wait before the page navigates there; None if the
frontier must decide."""

permit: ContextVar[Permit | None] = ContextVar("permit", default=None)
"""For the pages that this task renders. None: every URL of the host is allowed."""
