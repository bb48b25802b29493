"""Crawls in a simulated world, which a seed decides: the same code as in production, in virtual time."""
