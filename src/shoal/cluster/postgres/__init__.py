"""The coordinator of a cluster in a PostgreSQL database."""

from __future__ import annotations

from shoal.cluster.postgres.coordinator import PostgresCoordinator as PostgresCoordinator
