"""Access to a Redis server."""
