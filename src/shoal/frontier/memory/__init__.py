"""The frontier in memory: nothing to install, gone with the process."""

from __future__ import annotations

from shoal.frontier.memory.store import MemoryStore as MemoryStore
