"""The screens of the dashboard that the navigation lists."""

from __future__ import annotations

NAVIGATION = (
    ("/", "Overview"),
    ("/ui/runs", "Runs"),
    ("/ui/hosts", "Hosts"),
    ("/ui/workers", "Workers"),
    ("/ui/batches", "Batches"),
    ("/ui/schedules", "Schedules"),
    ("/ui/notifications", "Notifications"),
    ("/ui/actions", "Actions"),
    ("/ui/settings", "Settings"),
)
SERVED_ONLY = ("/ui/batches",)
"""Screens of a server that crawls itself."""
ADMIN_ONLY = ("/ui/settings",)
