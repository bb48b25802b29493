"""Chromium: its processes, its pages, and the gateway for its traffic."""
