"""The dashboard: pages for people who watch and steer crawls. Its buttons call the routes of the HTTP API."""

from __future__ import annotations
