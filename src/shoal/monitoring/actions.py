"""The log of user actions: who paused a run, changed a host, deleted something."""

from __future__ import annotations

import time

from msgspec import Struct

from shoal.ports import Documents
from shoal.printable import printable
from shoal.stores.documents import StoredValue

MAX_ACTIONS = 400
"""How many actions the log keeps."""
_MAX_TEXTS = {"who": 120, "what": 40, "target": 200, "detail": 200}
"""The longest text, in characters. All actions together fit into one document."""


class Action(Struct, frozen=True, kw_only=True):
    """Something that a user did. All texts are printable and short."""

    at: float
    who: str
    """The caller's name and address, or the user and machine of a command."""
    what: str
    """A verb, such as ``pause``."""
    target: str
    """The run, host, cluster or schedule."""
    detail: str = ""


class ActionLog:
    """The actions on the runs of one project. Several processes may add actions at the same time."""

    def __init__(self, documents: Documents, project: str) -> None:
        self._stored = StoredValue(documents, f"actions/{project}", tuple[Action, ...])

    async def add(self, who: str, what: str, target: str, detail: str = "") -> None:
        """Add an action that has been done."""
        texts = {"who": who, "what": what, "target": target, "detail": detail}
        short = {name: printable(text)[: _MAX_TEXTS[name]] for name, text in texts.items()}
        action = Action(at=time.time(), **short)
        await self._stored.change(lambda actions: (*(actions or ())[-MAX_ACTIONS + 1 :], action))

    async def recent(self, limit: int = 100) -> list[Action]:
        """The last actions, newest first."""
        actions = await self._stored.read() or ()
        return list(reversed(actions[-limit:])) if limit > 0 else []
