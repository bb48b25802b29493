"""The frontier in a SQLite file: needs no server, survives ``kill -9``, and memory does not grow with the URLs."""

from __future__ import annotations

from shoal.frontier.sqlite.store import SQLiteStore as SQLiteStore
