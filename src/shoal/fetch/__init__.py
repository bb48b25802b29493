"""Fetchers: request in, response out."""
