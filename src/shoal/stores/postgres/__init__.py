"""Access to a PostgreSQL database."""
