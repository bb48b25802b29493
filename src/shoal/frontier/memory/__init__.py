"""The frontier in memory: needs no server, and is lost when the process ends."""

from __future__ import annotations

from shoal.frontier.memory.store import MemoryStore as MemoryStore
