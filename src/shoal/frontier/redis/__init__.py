"""The frontier on a Redis server: shared by a fleet."""

from __future__ import annotations

from shoal.frontier.redis.store import RedisStore as RedisStore
