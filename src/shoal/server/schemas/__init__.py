"""Pydantic models of request and response bodies. OpenAPI shows their docstrings, descriptions and examples."""
