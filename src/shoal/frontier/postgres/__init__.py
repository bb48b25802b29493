"""Runs in a PostgreSQL database, for as many workers as its connections allow."""

from __future__ import annotations

from shoal.frontier.postgres.store import PostgresStore as PostgresStore
