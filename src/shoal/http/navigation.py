"""Who decides where a page may go while actions of the user run in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeAlias

Permit: TypeAlias = Callable[[str], Awaitable[float | None]]
"""Asked for a URL on the host of the page: seconds to wait before it goes there. None: the frontier must decide."""

permit: ContextVar[Permit | None] = ContextVar("permit", default=None)
"""For the pages that this task renders. None: nobody needs to be asked."""
