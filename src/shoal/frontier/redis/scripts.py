"""Runs the frontier's Lua scripts."""

from __future__ import annotations

from collections.abc import Callable

from shoal.frontier.redis.layouts import lua_constants, lua_literals
from shoal.stores.redis.client import Answer, RedisClient, ScriptFolder, Word

SCRIPTS = ScriptFolder(
    "shoal.frontier.redis",
    ("base", "hosts", "lanes", "requests", "slots", "stages"),
    tuple(lua_constants().items()),
    (
        *((script, "turns") for script in ("lease", "settle", "states")),
        ("lease", "choosing"),
        *((script, "faults") for script in ("audit", "audit_lanes", "audit_items", "repair")),
        *((script, "put") for script in ("document", "settle")),
        *((script, "beats") for script in ("beat", "leave", "silent", "fence", "delete", "waits", "upgrade")),
    ),
    tuple(lua_literals().items()),
)


class FrontierScripts:
    """The scripts of the frontiers of one store. ``offset``: seconds to add to the server's clock, for tests."""

    def __init__(self, client: RedisClient, offset: Callable[[], float] = lambda: 0.0) -> None:
        self.client = client
        self._offset = offset

    async def run(self, name: str, run: bytes, options: bytes, *arguments: Word) -> Answer:
        """Run a script. ``run``: the number of a run, perhaps with its name, or nothing."""
        words = (repr(self._offset()), run, options, *arguments)
        if name != "lease":
            return await self.client.run_script(SCRIPTS, name, *words)
        address = self.client.address
        return await self.client.run_script(
            SCRIPTS, name, *words,
            store=f"{address.db} {address.prefix!r}",
            before_loading=lambda: self.run("restarted", b"", options),
        )  # fmt: skip
