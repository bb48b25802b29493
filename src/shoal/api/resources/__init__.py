"""One module per group of routes."""

from __future__ import annotations
