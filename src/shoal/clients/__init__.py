"""Clients of servers, shared by frontiers, sinks and clusters: Redis, PostgreSQL, MySQL and object storage.

Each has addresses, connections that are made again, and errors in three classes: away, uncertain and final. This room
may import `ports` and what is below it. Start with `errors`, then `redis`.
"""
