"""The screens of the dashboard that the navigation lists."""

from __future__ import annotations

NAVIGATION = (
    ("/", "Overview"),
    ("/ui/runs", "Runs"),
    ("/ui/hosts", "Hosts"),
    ("/ui/workers", "Workers"),
)
