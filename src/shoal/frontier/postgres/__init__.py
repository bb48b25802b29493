"""Runs and their frontiers in a PostgreSQL database, shared by all workers of a fleet."""

from __future__ import annotations

from shoal.frontier.postgres.store import PostgresStore as PostgresStore
