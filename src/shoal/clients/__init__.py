"""Redis and PostgreSQL servers: addresses, connections, errors and schemas, shared by frontiers, clusters and sinks."""
