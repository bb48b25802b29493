"""The coordinator of a cluster on a Redis server."""

from __future__ import annotations

from shoal.cluster.redis.coordinator import RedisCoordinator as RedisCoordinator
