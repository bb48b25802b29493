"""Runs and their frontiers on a Redis server, shared by all workers of a fleet."""

from __future__ import annotations

from shoal.frontier.redis.store import RedisStore as RedisStore
